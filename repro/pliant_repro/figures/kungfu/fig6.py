"""KungFu, figure 6: workers are added as long as each is worth it. Where that stops, beside a sweep over all sizes.

First the truth: a job of each size, whose throughput is measured. Then elastic jobs under `pliant run -w` that begin with
one worker each and grow by the policy `Provision`. The claim: they stop at the size that the sweep shows to be
best (the smallest that is not worth enlarging), or at one beside it that differs by less than the threshold, every time.
The model is a small BERT, and every worker computes with one thread: as workers share this machine's cores, more of them
than there are cores are not worth it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pliant.adapt.size import next_size
from pliant.cli import plotting
from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.bench.stats import quantile
from pliant_repro.figures import trials
from pliant_repro.figures.figures import Options, TableRows, form, num_cores

NAME = "kungfu-fig6"
PROGRAM = Path(__file__).with_name("provisioning.py")
ALPHA = 1 / 3
"""The artifact's: how much of its fair share a worker must add."""
LINE = re.compile(r"resize \d+ -> \d+ took [\d.]+m?s|policy \w+: .*")
PAPER = {
    "hardware": "BERT-base on SQuAD 2.0, 4 GPUs, 8 samples per worker, windows of 800 steps",
    "examples_per_s_per_worker": 12.67,
    "workers_of_that": 3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How large the experiment is."""

    runs: int
    max_workers: int
    change_step: int
    sweep_steps: int
    words: tuple[str, ...]
    """More arguments of the program."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Course:
    """How a job went that grew by itself."""

    workers: int
    """When it had come to rest."""
    done: bool
    history: list[list[float]]
    """[workers, samples per second] of each window that was decided on."""
    rows: list[tuple[int, int, float]]
    """(step, workers, samples per second), from out_0.csv."""
    lines: list[str]


def run(options: Options) -> Json:
    setting = _setting(options)
    with tempfile.TemporaryDirectory(prefix="pliant-fig6-") as folder:
        sweep = {}
        for workers in range(1, setting.max_workers + 1):
            options.say(f"sweep: {workers} workers")
            sweep[workers] = _measure(workers, setting, Path(folder))
            options.say(f"  {sweep[workers]:.1f} samples/s")
        courses = []
        for number in range(setting.runs):
            options.say(f"run {number + 1} of {setting.runs}: begins with 1 worker")
            courses.append(_provision(number, setting, Path(folder)))
            options.say(f"  stopped at {courses[-1].workers}")
    return result_of(sweep, courses, options)


def _setting(options: Options) -> Setting:
    device = ("--device", options.where)
    if options.data:
        steps = options.choose_steps(quick=5, usual=20, full=800)
        words = ("--data", str(Path(options.data).resolve()), "--places", "384", *device)
        workers = 4 if options.where == "cpu" else max(2, _num_gpus())
        return Setting(runs=1 if options.quick else 5, max_workers=workers, change_step=steps, sweep_steps=2 * steps,
                       words=words, timeout_s=6 * 3600)  # fmt: skip
    steps = options.choose_steps(quick=10, usual=20, full=100)
    if options.quick:  # without transformers, and without need for a quiet machine
        return Setting(runs=1, max_workers=3, change_step=steps, sweep_steps=2 * steps,
                       words=("--paced", "0.1", "--devices", "2", "--batch", "2", "--places", "16"), timeout_s=300)  # fmt: skip
    return Setting(runs=5 if options.full else 3, max_workers=num_cores() + 2, change_step=steps, sweep_steps=3 * steps,
                   words=("--places", "64", *device), timeout_s=1200)  # fmt: skip


def _num_gpus() -> int:
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])


def _measure(workers: int, setting: Setting, folder: Path) -> float:
    """Samples per second of a job that stays as it is: the median of the second half of its steps."""
    out = folder / f"sweep-{workers}"
    _launch(out, workers, ["--steps", str(setting.sweep_steps)], setting)
    rows = read_rows(out)
    return quantile([rate for _, _, rate in rows[len(rows) // 2 :]], 0.5)


def _provision(number: int, setting: Setting, folder: Path) -> Course:
    out = folder / f"run-{number}"
    words = [
        "--max-workers",
        str(setting.max_workers),
        "--change-step",
        str(setting.change_step),
        "--alpha",
        str(ALPHA),
    ]
    output = _launch(out, 1, words, setting)
    found = json.loads((out / "provision.json").read_text())
    lines = [match[0] for match in LINE.finditer(output)]
    return Course(found["workers"], found["done"], found["history"], read_rows(out), lines)


def _launch(out: Path, workers: int, words: Sequence[str], setting: Setting) -> str:
    out.mkdir()
    command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q", "-w", "-np", str(workers)]
    command += ["-H", f"127.0.0.1:{setting.max_workers}", sys.executable, str(PROGRAM), "--out", str(out)]
    environ = trials.environment(trials.Task(model=NAME, steps=0), pinned=False)
    output, code = trials.finish([*command, *words, *setting.words], environ, setting.timeout_s)
    if code != 0:
        last = "\n".join(output.strip().splitlines()[-12:])
        raise LaunchError(
            f"a job with {workers} workers at the start ended with exit code {code}; its last words:\n{last}"
        )
    return output


def read_rows(out: Path) -> list[tuple[int, int, float]]:
    """The first worker's steps without those that had a change in them."""
    with (out / "out_0.csv").open() as file:
        return [
            (int(row["global_step"]), int(row["num_workers"]), float(row["throughput"]))
            for row in csv.DictReader(file)
            if int(row["sub_step"]) > 0
        ]


# --- what is judged ---


def bar(smaller: int, larger: int) -> float:
    """How many times the throughput of the smaller size the larger one must have."""
    return 1 + ALPHA * (larger - smaller) / larger


def by_rule(sweep: Mapping[int, float]) -> int:
    """Where the rule stops if it is given the sweep's throughputs."""
    size = 1
    while (larger := next_size(size, 0, max(sweep))) is not None and sweep[larger] >= bar(size, larger) * sweep[size]:
        size = larger
    return size


def best_of(sweep: Mapping[int, float]) -> int:
    """The smallest size that no larger one is worth adding workers to: of a plateau, its beginning."""
    return next(
        size
        for size in sorted(sweep)
        if all(sweep[larger] < bar(size, larger) * sweep[size] for larger in sweep if larger > size)
    )


def accepted(sweep: Mapping[int, float]) -> list[int]:
    """The best size, and those beside it that differ by less than the threshold."""
    best = best_of(sweep)
    beside = [
        size
        for size in (best - 1, best + 1)
        if size in sweep and sweep[best] < bar(min(size, best), max(size, best)) * sweep[size]
    ]
    return sorted([best, *beside])


def result_of(sweep: Mapping[int, float], courses: Sequence[Course], options: Options) -> Json:
    allowed = accepted(sweep)
    complaints = [
        f"run {number}: stopped at {course.workers} workers; the sweep allows {allowed}"
        for number, course in enumerate(courses, 1)
        if course.workers not in allowed
    ]
    complaints += [f"run {number}: did not come to rest" for number, course in enumerate(courses, 1) if not course.done]
    best = best_of(sweep)
    if best in (1, max(sweep)):
        complaints.append(f"the sweep is best with {best} workers, an end of it: nothing can be said about stopping")
    cells: list[Json] = [
        {"workers": size, "samples_per_s": rate, "per_worker": rate / size} for size, rate in sweep.items()
    ]
    ours = {
        "best": best,
        "accepted": allowed,
        "by_rule": by_rule(sweep),
        "stopped_at": [course.workers for course in courses],
        "samples_per_s": sweep[best],
    }
    what = "paced compute on 2 devices" if options.quick and not options.data else "workers share this machine's cores"
    remarks = [
        f"{what}; sizes that the sweep allows: {', '.join(map(str, allowed))}; the rule on the sweep's numbers: {by_rule(sweep)}",
        "sweep and runs are measured one after the other: let nothing else compute on this machine meanwhile",
        "paper: windows of 800 steps; it ended with 3 of 4 workers, each of 12.67 examples/s",
        "the full size is BERT-base on SQuAD 2.0 on 4 GPUs: --data DIR with train-v2.0.json and BERT, --full for 800 steps",
    ]
    return form(
        NAME, options, ours=ours, paper=PAPER, cells=cells, complaints=complaints, remarks=remarks,
        runs=[{"workers": course.workers, "history": course.history, "rows": course.rows, "lines": course.lines}
              for course in courses],
        lines=courses[0].lines if courses else [],
    )  # fmt: skip


# --- what is shown ---


def table(result: Json) -> TableRows:
    ours = cast("dict[str, Any]", result["ours"])
    rows = []
    for one in cast("list[dict[str, Any]]", result["cells"]):
        stopped = ours["stopped_at"].count(one["workers"])
        mark = (
            "best"
            if one["workers"] == ours["best"]
            else "within the threshold"
            if one["workers"] in ours["accepted"]
            else ""
        )
        rows.append(
            (str(one["workers"]), f"{one['samples_per_s']:.1f}", f"{one['per_worker']:.1f}", mark, str(stopped or ""))
        )
    columns = ("workers", "samples/s", "per worker", "sweep", "runs that stopped here")
    return TableRows("throughput by size, and where provisioning stops", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    caption = (
        "Left: jobs that stay as they are. Right: jobs that begin with one worker; a point is a step of all workers."
    )
    cells = cast("list[dict[str, Any]]", result["cells"])
    with plotting.picture(path, "Adaptive provisioning", caption, 2) as [left, right]:
        left.plot([one["workers"] for one in cells], [one["samples_per_s"] for one in cells], "o-", color="tab:blue")
        left.set(xlabel="workers", ylabel="samples/s", ylim=(0, None), xticks=[one["workers"] for one in cells])
        sizes = right.twinx()
        for number, one in enumerate(cast("list[dict[str, Any]]", result["runs"])):
            steps = [row[0] for row in one["rows"]]
            if number == 0:
                right.plot(steps, [row[2] for row in one["rows"]], ".", color="tab:blue", markersize=2)
            sizes.step(steps, [row[1] for row in one["rows"]], where="post", color="tab:orange", alpha=0.6)
        right.set(xlabel="step", ylabel="samples/s", ylim=(0, None))
        sizes.set(ylabel="workers", ylim=(0, None))
