"""KungFu, figure 4: a batch size that follows the gradient's noise, beside a small and a large fixed one.

Three jobs per seed under `pliant run`, one after the other, with the same model, data, learning rate and number of epochs:
a small batch, one 32 times as large, and one that begins small and is grown by `GrowBatchSize`. The claims:
the adaptive job ends as accurate as the small batch and gets there in less time, the large batch is not as accurate;
and the batch grows only, on all workers alike, once per epoch at most.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pliant.cli import plotting
from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.figures import images, trials
from pliant_repro.figures.figures import Options, TableRows, form

NAME = "kungfu-fig4"
PROGRAM = Path(__file__).with_name("adaptive_batch.py")
MODES = ("small", "large", "adaptive")
COLOURS = {"small": "tab:orange", "large": "tab:red", "adaptive": "tab:blue"}
GROWTH = 32
"""The large batch over the small one: 1024 over 32 in the paper."""
THRESHOLD = 8
"""The noise scale over the batch that it allows. With a fixed number of epochs, larger batches are less training."""
LAST = 5
"""Epochs that an accuracy is the mean of: that of one epoch goes up and down."""
WITHIN, LESS_TIME = 0.005, 0.20
"""How much less accurate the adaptive job may be, and how much less time it must take to get there."""
PAPER = {
    "small": "high accuracy, slow",
    "large": "fast, does not converge to high accuracy",
    "adaptive": "the accuracy of small, faster",
    "hardware": "ResNet-56 on CIFAR-10, 4 x 32 and 4 x 1024; about 6 h on 4 K80, 3 h on 4 TITAN X; no figures published",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is trained, and how long."""

    batch: int
    """The small one, of one replica."""
    epochs: int
    lr: float
    workers: int
    words: tuple[str, ...]
    """More arguments of the program."""


@dataclass(slots=True)
class Course:
    """How one job went."""

    mode: str
    seed: int
    times_s: list[float] = field(default_factory=list)
    """Spent on training at the end of each epoch."""
    accuracies: list[float] = field(default_factory=list)
    batches: dict[int, dict[int, int]] = field(default_factory=dict)
    """The batch size by step, as each worker had it."""
    epoch_of: dict[int, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """What it has printed."""

    @property
    def smooth(self) -> list[float]:
        """The accuracies, each the mean of the last few."""
        parts = [self.accuracies[max(0, end - LAST) : end] for end in range(1, len(self.accuracies) + 1)]
        return [sum(part) / len(part) for part in parts]

    @property
    def final(self) -> float:
        return self.smooth[-1]

    def time_to(self, accuracy: float) -> float | None:
        """When the accuracy was first as good as that."""
        reached = (time_s for time_s, value in zip(self.times_s, self.smooth, strict=True) if value >= accuracy)
        return next(reached, None)

    @property
    def trace(self) -> list[int]:
        """The batch size in each step, as the first worker had it."""
        return [self.batches[0][step] for step in sorted(self.batches[0])]

    def to_json(self) -> Json:
        return {
            "mode": self.mode,
            "seed": self.seed,
            "times_s": self.times_s,
            "accuracies": self.accuracies,
            "final_accuracy": self.final,
            "changes": changes_of(self),
            "trace_is_sound": not trace_faults(self),
        }


def run(options: Options) -> Json:
    setting = _setting(options)
    seeds = (1,) if options.quick else (1, 2, 3) if options.full else (1, 2)
    courses = []
    with tempfile.TemporaryDirectory(prefix="pliant-fig4-") as folder:
        words: tuple[str, ...] = ()
        if not options.data:
            digits = Path(folder) / "digits.npz"
            images.save(images.from_scikit_learn(), digits)
            words = ("--digits", str(digits))
        for seed in seeds:
            for mode in MODES:
                options.say(f"{mode}, seed {seed}: {setting.epochs} epochs")
                courses.append(_train(mode, seed, setting, words, Path(folder)))
                options.say(f"  accuracy {courses[-1].final:.2%} after {courses[-1].times_s[-1]:.1f} s")
    return result_of(courses, options, judged=not options.quick)


def _setting(options: Options) -> Setting:
    epochs = options.choose_steps(quick=4, usual=80, full=200)
    if not options.data:
        return Setting(batch=4, epochs=epochs, lr=0.02, workers=2, words=())
    epochs = options.choose_steps(quick=1, usual=60, full=200)
    words = ("--cifar", options.data, "--device", options.where, "--weight-decay", "2e-4")
    # The artifact's rate for 32 samples of each of 4 workers.
    return Setting(batch=32, epochs=epochs, lr=0.025, workers=1 if options.where == "cuda" else 2, words=words)


def _train(mode: str, seed: int, setting: Setting, words: Sequence[str], folder: Path) -> Course:
    journal = folder / f"{mode}-{seed}"
    journal.mkdir()
    batch = setting.batch * (GROWTH if mode == "large" else 1)
    command = [
        sys.executable,
        "-c",
        "from pliant.cli.main import main; main()",
        "run",
        "-q",
        "-np",
        str(setting.workers),
    ]
    if mode == "adaptive":
        command += ["--policy", f"grow-batch-size:threshold={THRESHOLD},max_batch={setting.batch * GROWTH}"]
    named = {"--batch": batch, "--epochs": setting.epochs, "--lr": setting.lr, "--seed": seed, "--journal": journal}
    command += [sys.executable, str(PROGRAM), *(str(word) for pair in named.items() for word in pair)]
    environ = trials.environment(trials.Task(model=NAME, steps=0), pinned=False)
    output, code = trials.finish([*command, *setting.words, *words], environ, 6 * 3600)
    if code != 0:
        last = "\n".join(output.strip().splitlines()[-12:])
        raise LaunchError(f"{mode}, seed {seed}: ended with exit code {code}; its last words:\n{last}")
    return read(mode, seed, sorted(journal.glob("*.jsonl")), output)


def read(mode: str, seed: int, journals: Sequence[Path], output: str = "") -> Course:
    """What the workers have written down."""
    course = Course(mode, seed, lines=[line.partition("] ")[2] for line in output.splitlines() if "::stdout]" in line])
    for path in journals:
        for line in path.read_text().splitlines():
            facts = json.loads(line)
            for step, _, _, batch in facts["turns"]:
                course.batches.setdefault(facts["rank"], {})[step] = batch
                course.epoch_of[step] = facts["epoch"]
            if facts["rank"] == 0:
                course.times_s.append(facts["time_s"])
                course.accuracies.append(facts["accuracy"])
    return course


# --- what is judged ---


def changes_of(course: Course) -> list[tuple[int, int]]:
    """(step, batch size): the first, and every other one when it begins."""
    found: list[tuple[int, int]] = []
    for step in sorted(course.batches[0]):
        if not found or found[-1][1] != course.batches[0][step]:
            found.append((step, course.batches[0][step]))
    return found


def trace_faults(course: Course) -> list[str]:
    """What is wrong with the batch sizes of a job, if anything."""
    wrong = []
    changes = changes_of(course)
    if any(after < before for (_, before), (_, after) in itertools.pairwise(changes)):
        wrong.append("the batch has shrunk")
    if any(sizes != course.batches[0] for sizes in course.batches.values()):
        wrong.append("not all workers had the same batch sizes")
    epochs = [course.epoch_of[step] for step, _ in changes[1:]]
    if len(set(epochs)) != len(epochs):
        wrong.append("the batch has changed twice in an epoch")
    return [f"{course.mode}, seed {course.seed}: {text}" for text in wrong]


def result_of(courses: Sequence[Course], options: Options, *, judged: bool) -> Json:
    """The figure; not `judged`: too short to say who is more accurate."""
    seeds = sorted({course.seed for course in courses})
    by = {(course.mode, course.seed): course for course in courses}
    finals = {mode: _mean([by[mode, seed].final for seed in seeds]) for mode in MODES}
    times = {mode: _times_to([by[mode, seed] for seed in seeds], finals["small"] - WITHIN) for mode in MODES}
    cells: list[Json] = [course.to_json() for course in courses]
    complaints = [fault for course in courses for fault in trace_faults(course)]
    if not any(len(changes_of(course)) > 1 for course in courses if course.mode == "adaptive") and judged:
        complaints.append("the adaptive batch has never grown")
    complaints += judge(finals, times) if judged else []
    ours = {
        mode: {
            "final_accuracy": finals[mode],
            "time_to_accuracy_s": times[mode],
            "time_s": _mean([by[mode, seed].times_s[-1] for seed in seeds]),
            "final_batch": max(by[mode, seed].trace[-1] for seed in seeds),
        }
        for mode in MODES
    }
    remarks = [
        f"accuracies are means of {LAST} epochs and of {len(seeds)} seeds; the time is training, without evaluation, until "
        f"small's final accuracy less {WITHIN:.1%} is reached",
        "the large batch has the learning rate of the small one: 32 times that, as in the artifact, diverges here",
        "paper, without figures: large is fast and does not converge to high accuracy; adaptive is as accurate as small, "
        "and faster",
        "the full size is ResNet-56 on CIFAR-10: --data DIR (with --full for 200 epochs), which takes 4 GPUs of 2016 3 to 6 h",
    ]
    if not judged:
        remarks.append("--quick is too short to compare accuracies: only the batch sizes were judged")
    shown = next(course.lines for course in courses if course.mode == "adaptive")
    return form(
        NAME, options, ours=ours, paper=PAPER, cells=cells, complaints=complaints, remarks=remarks, lines=shown,
        target_accuracy=finals["small"] - WITHIN, judged=judged,
    )  # fmt: skip


def _times_to(courses: Sequence[Course], accuracy: float) -> float | None:
    """The mean over the seeds, if all got there."""
    found = [course.time_to(accuracy) for course in courses]
    reached = [time_s for time_s in found if time_s is not None]
    return _mean(reached) if len(reached) == len(found) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def judge(finals: Mapping[str, float], times: Mapping[str, float | None]) -> list[str]:
    wrong = []
    if finals["adaptive"] < finals["small"] - WITHIN:
        wrong.append(f"adaptive ends with {finals['adaptive']:.2%}, small with {finals['small']:.2%}")
    if finals["large"] >= finals["small"] - WITHIN:
        wrong.append(f"large ends with {finals['large']:.2%}, which is as good as small's {finals['small']:.2%}")
    small_s, adaptive_s = times["small"], times["adaptive"]
    if small_s is None or adaptive_s is None:
        wrong.append("not every seed of small and adaptive reached the accuracy that is timed")
    elif adaptive_s > (1 - LESS_TIME) * small_s:
        wrong.append(f"adaptive takes {adaptive_s:.1f} s to that accuracy, small {small_s:.1f} s: not 20 % less")
    return wrong


# --- what is shown ---


def table(result: Json) -> TableRows:
    rows = []
    ours = cast("dict[str, Any]", result["ours"])
    small_s = ours["small"]["time_to_accuracy_s"]
    for mode in MODES:
        one = ours[mode]
        time_s = one["time_to_accuracy_s"]
        rows.append(
            (
                mode,
                f"{one['final_accuracy']:.2%}",
                f"{one['time_s']:.1f} s",
                f"{time_s:.1f} s" if time_s else "never",
                f"{1 - time_s / small_s:+.0%}" if time_s and small_s else "-",
                f"4 x {one['final_batch']}",
            )
        )
    target = cast(float, result["target_accuracy"])
    columns = ("batch", "final accuracy", "training", f"until {target:.2%}", "less time", "last batch")
    return TableRows("accuracy and time by batch size", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    caption = (
        "Ours: 4 replicas on one machine's CPU, thin lines are single seeds' batch sizes. "
        "Paper: ResNet-56 on CIFAR-10, 4 GPUs; large is fast and inaccurate, adaptive as accurate as small, and faster."
    )
    with plotting.picture(path, "Accuracy over time, by batch size", caption, 2) as [left, right]:
        for one in cast("list[dict[str, Any]]", result["cells"]):
            mode, is_first = one["mode"], one["seed"] == 1
            label = mode if is_first else None
            left.plot(
                one["times_s"], one["accuracies"], color=COLOURS[mode], label=label, alpha=1 if is_first else 0.35
            )
            steps, sizes = zip(*one["changes"], strict=True)
            if len(steps) == 1:  # it stays so, however many steps there are
                right.axhline(sizes[0], color=COLOURS[mode], label=label)
            else:
                last = steps[-1] + max(1, steps[-1] // 30)
                right.step([*steps, last], [*sizes, sizes[-1]], where="post", color=COLOURS[mode], label=label)
        left.axhline(cast(float, result["target_accuracy"]), color=plotting.PAPER, linestyle=":")
        left.set(xlabel="s of training", ylabel="accuracy")
        right.set(xlabel="step", ylabel="batch of a replica")
        right.set_yscale("log", base=2)
        right.yaxis.set_major_formatter("{x:g}")
        for axes in (left, right):
            axes.legend(fontsize=8)
