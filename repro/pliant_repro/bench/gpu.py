"""`pliant bench gpu`: training on one GPU beside plain PyTorch and DDP, in parts that are run one by one.

    step      one worker: N = 1 beside plain PyTorch, N = 4 beside bare gradient accumulation, and the price of determinism
    memory    peak memory of N = 1, 2, 4, 8, 16 replicas on one worker, beside bare accumulation
    bits      digests after every step: 1, 2 and 4 processes, two runs of each, beside DDP on gloo with tensors on the device
    changes   digests after every step of a job that goes through 2 -> 1 -> 3 workers, kill -9 and a replacement
    live      the longest gap between two commits around a shrink, a grow and a kill -9
    packed    2 and 4 processes on the device, beside DDP on gloo and, with its folder, version 0.1
    profile   where a step's time goes: kernels, what the device waits for, and the host's functions
    all       all parts but the last one, within a time limit (`bench.gpu_plan`)

All contenders of a part are interleaved in one run, with the same deterministic kernels pinned. A part ends by itself: when its
time is nearly over, it holds no further rounds. A verdict that is null means that no time was left for it. `bench.gpu_bits` and `bench.gpu_elastic` have the parts that compare bits, and
those whose workers come and go.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench import version01
from pliant_repro.bench.train import PROGRAM, TrainingTask
from pliant_repro.contest import (
    Contender,
    Placement,
    Progress,
    Rules,
    Timings,
    check_choice,
    check_least,
    paired_ratios,
    quantile,
)

NETWORKS = ("gpt2", "resnet50", "lstm", "vit", "lstm-dropout")
MODES = ("eager", "compiled", "fp16", "priority")
"""How a network is trained. `bits` also has fp16, which is float16 with a GradScaler, and priority, which is sync="priority"."""
DEFAULT_MODELS = {
    "step": ("gpt2", "resnet50"), "memory": ("gpt2",), "bits": ("gpt2", "resnet50", "lstm", "vit"),
    "changes": ("gpt2", "resnet50", "lstm", "vit"), "live": ("gpt2",), "packed": ("gpt2", "resnet50"),
    "profile": ("gpt2",),
}  # fmt: skip
"""The parts, and the networks that each trains by default."""
DEFAULT_MODES = {"memory": ("eager",), "profile": ("eager",), "packed": ("eager",)}
"""Modes of the parts that do not take both eager and compiled by default."""
MORE_CELLS = {"bits": (("resnet50", "fp16"), ("resnet50", "priority"))}
"""Cells that a part has by default, besides all networks with all modes."""
DEFAULT_REPEAT = {"step": 40, "packed": 12, "live": 3}
"""Rounds, or changes of each kind, where time allows so many."""
DEFAULT_STEPS = {"step": 4, "packed": 3, "bits": 5}
"""Steps of a turn, or steps that are compared."""
LEAST_ROUNDS = {"step": 10, "packed": 5}
"""Rounds that are held even if the time of a cell is over."""
CELL_WEIGHT = {"compiled": 1.5}
"""Share of the time of a cell with this mode, where the others have 1: it has to be compiled first."""
STEP_LIMITS = {"one": 1.02, "several": 1.03}
"""Most time of a step: of N = 1 over plain PyTorch, and of several replicas over bare accumulation."""
REPLICA_COUNTS = (1, 2, 4, 8, 16)
SLACK_BYTES = 32 << 20
"""Peak memory may be above its limit by this much: the allocator rounds, and the order of frees varies."""
SEED = 1234
ALONE_CORES = 4
"""Cores on which the contenders of `step` take their turns, all on the same ones, if there are at least twice as many. They
start, compile and warm up on all cores, at the same time."""
START_S, TURN_S = 240.0, 300.0
EXTRA_S = 20.0
"""How long a part may go on when its time is over."""
DEVICE_BYTES = 138e9
"""Device memory that processes may need together."""
NEEDED_BYTES = {"gpt2": 12.5e9, "resnet50": 8e9, "vit": 6e9}
"""Device memory of one process that trains the network; others need OTHER_BYTES."""
OTHER_BYTES = 4e9
MAX_PROCESSES = 24
"""Processes that the host can run at the same time."""
PROFILED_STEPS = 4
ALONE = ("step", "packed", "live", "profile")
"""Parts that run alone, because they measure time."""
GIVEN_THREADS = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuOptions:
    """Options of `pliant bench gpu`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    part: str
    models: tuple[str, ...] = ()
    """Networks; empty means those of the part."""
    modes: tuple[str, ...] = ()
    device: str = "cuda"
    tiny: bool = False
    """Whether the networks have a few thousand parameters, so that the program can be tried on a CPU."""
    replicas: int = 4
    batch: int = 0
    size: int = 0
    repeat: int = 0
    """Rounds; in `live`, changes of each kind. 0 means the part's own choice."""
    steps: int = 0
    """Steps of a turn; in `bits`, steps that are compared. 0 means the part's own choice."""
    limit_s: float = 420.0
    """Time in which the part is to end."""
    order: str = ""
    """Order of the sums, as an argument of `pliant.join`; empty means its default, and in `bits` both."""
    gradients: str = ""
    """Where gradients are kept, as an argument of `pliant.join`; empty means its default."""
    sync: str = ""
    """How sums travel, as an argument of `pliant.join`; empty means its default."""
    autocast: bool = True
    """Whether the forward pass runs in bfloat16 where torch's autocast does so."""
    old: Path | None = None
    """Folder with version 0.1 of pliant, for `packed`."""
    traces: Path | None = None
    """Folder for the traces of `profile`."""

    def __post_init__(self) -> None:
        check_choice("PART", self.part, tuple(DEFAULT_MODELS))
        check_choice("--device", self.device, ("cpu", "cuda"))
        for model in self.models:
            check_choice("--models", model, NETWORKS)
        for mode in self.modes:
            check_choice("--modes", mode, MODES)
        check_least(
            ("--replicas", self.replicas, 1), ("--batch", self.batch, 0), ("--size", self.size, 0),
            ("--repeat", self.repeat, 0), ("--steps", self.steps, 0), ("--limit", self.limit_s, 1),
        )  # fmt: skip
        if self.old is not None and not (self.old / "pliant" / "__init__.py").exists():
            raise ConfigError(f"--old {self.old}: there is no pliant/ in it; give a checkout of version 0.1")

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Every network with every mode, the eager ones first."""
        models = self.models or DEFAULT_MODELS[self.part]
        modes = self.modes or DEFAULT_MODES.get(self.part, ("eager", "compiled"))
        more = MORE_CELLS.get(self.part, ()) if not self.models and not self.modes else ()
        return [*((model, mode) for mode in modes for model in models), *more]

    @property
    def num_rounds(self) -> int:
        return self.repeat or DEFAULT_REPEAT.get(self.part, 1)

    @property
    def num_steps(self) -> int:
        return self.steps or DEFAULT_STEPS.get(self.part, 4)

    def task(self, model: str, mode: str, side: str = "pliant", **more: Any) -> TrainingTask:
        """Return what a contender trains: the network with bfloat16 autocast and the kernels pinned that we pin."""
        from pliant_repro import zoo

        name = f"{model}-tiny" if self.tiny else model
        chosen = zoo.network(name)
        given = {"order": self.order, "gradients": self.gradients, "sync": self.sync}
        join = {key: value for key, value in given.items() if value} if side == "pliant" else {}
        return TrainingTask(**{
            "side": side, "num_workers": 1, "replicas": 1, "model": name, "optimizer": chosen.optimizer,
            "batch": self.batch or chosen.batch, "size": self.size or chosen.size, "device": self.device,
            "autocast": self.autocast, "compiled": mode == "compiled", "scaler": mode == "fp16", "strict": True,
            "lead": 2, "join": join, **more,
        })  # fmt: skip


@dataclass(slots=True)
class Part:
    """Result of a part: what was measured, how to show it, and what it says about the goals."""

    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    cells: list[Json] = field(default_factory=list)
    verdicts: list[tuple[bool | None, str]] = field(default_factory=list)
    """Whether it holds, None if no time was left to find out, and what was found."""
    remarks: list[str] = field(default_factory=list)
    device: Mapping[str, object] = field(default_factory=dict)

    def judge(self, ok: bool | None, text: str) -> None:
        self.verdicts.append((ok, text))


class Clock:
    """The time that a part has, shared out among its cells."""

    def __init__(self, limit_s: float, weights: Sequence[float] = (1.0,)) -> None:
        """`weights` say how the time is shared out among the cells, in their order."""
        self._end_s, self._weights = time.monotonic() + limit_s, list(weights)

    def next_cell(self) -> float:
        """Return the moment at which the next cell is to end."""
        share = self._weights[0] / sum(self._weights)
        del self._weights[0]
        return time.monotonic() + self.left_s * share

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def bound(self, timeout_s: float) -> float:
        """Return this time-out, or what is left of the part's time and a little more, if that is less."""
        return max(5.0, min(timeout_s, self.left_s + EXTRA_S))


class DevicePool:
    """Device memory, and processes of the host, for all that runs at the same time.

    Who asks first is served first: a group that needs much would wait for ever if smaller ones could overtake it.
    """

    def __init__(self, most_bytes: float = DEVICE_BYTES, most_processes: int = MAX_PROCESSES) -> None:
        self._free_bytes, self._free_processes = most_bytes, most_processes
        self._most_bytes, self._most_processes = most_bytes, most_processes
        self._changed = threading.Condition()
        self._waiting: list[object] = []

    @contextlib.contextmanager
    def lend(self, num_bytes: float, num_processes: int, timeout_s: float) -> Iterator[bool]:
        """Wait until so much is free, and hold it; `num_bytes` is that of one process. Gives false if time was over."""
        needed = min(num_bytes * num_processes, self._most_bytes), min(num_processes, self._most_processes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)

            def is_next() -> bool:
                fits = needed[0] <= self._free_bytes and needed[1] <= self._free_processes
                return self._waiting[0] is ticket and fits

            got = self._changed.wait_for(is_next, max(0.0, timeout_s))
            self._waiting.remove(ticket)
            if got:
                self._free_bytes -= needed[0]
                self._free_processes -= needed[1]
            self._changed.notify_all()
        try:
            yield got
        finally:
            if got:
                with self._changed:
                    self._free_bytes += needed[0]
                    self._free_processes += needed[1]
                    self._changed.notify_all()


def run(options: GpuOptions, args: Mapping[str, object], progress: Progress, pool: DevicePool | None = None) -> Json:
    """Run one part, and return the result in the one form. `pool` is what it shares with parts that run at the same time."""
    from pliant_repro.bench import gpu_bits, gpu_elastic

    pool = pool or DevicePool()
    parts: dict[str, Callable[[], Part]] = {
        "step": lambda: run_step(options, progress),
        "packed": lambda: run_packed(options, progress),
        "profile": lambda: run_profile(options, progress),
        "live": lambda: gpu_elastic.run_live(options, progress),
        "memory": lambda: run_memory(options, progress, pool),
        "bits": lambda: gpu_bits.run_bits(options, progress, pool),
        "changes": lambda: gpu_elastic.run_changes(options, progress, pool),
    }
    # Each of many processes would start one per core. With 1 no process is started only to compile.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = GIVEN_THREADS or ("3" if options.part in ALONE else "1")
    begun_s = time.monotonic()
    found = parts[options.part]()
    ok = bool(found.verdicts) and all(holds for holds, _ in found.verdicts)
    return contest.form(
        "gpu",
        args,
        ok,
        found.remarks,
        command=shlex.join(["pliant", *sys.argv[1:]]),
        took_s=time.monotonic() - begun_s,
        device=dict(found.device),
        cells=found.cells,
        table={"columns": list(found.columns), "rows": [list(row) for row in found.rows]},
        verdicts=[{"ok": holds, "text": text} for holds, text in found.verdicts],
    )


# --- contenders ---


@contextlib.contextmanager
def started(
    tasks: Mapping[str, TrainingTask],
    progress: Progress,
    clock: Clock,
    old: Path | None = None,
) -> Iterator[dict[str, Contender]]:
    """Start a contender for each task, all at the same time, and give them by their names. All are gone afterwards."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        found = {name: cleanup.enter_context(_contender(name, task, folder, old)) for name, task in tasks.items()}
        try:
            contest.start_all(found.values(), clock.bound(START_S), progress)
            yield found
        finally:
            with ThreadPoolExecutor(max(1, len(found))) as threads:  # each may take seconds to end
                list(threads.map(Contender.close, found.values()))


def _contender(name: str, task: TrainingTask, folder: Path, old: Path | None) -> Contender:
    placement = Placement(num_workers=task.num_workers, folder=folder)
    if task.side == "version01":
        assert old is not None, "it was given"
        starter = version01.launcher(old, task.num_workers)
        return placement.contender(name, version01.PROGRAM, task.to_json(), launcher=starter)
    task = replace(task, rendezvous=f"file://{folder / name}.store")
    strategy = "AUTO" if task.side == "pliant" and task.num_workers > 1 else ""
    return placement.contender(name, PROGRAM, task.to_json(), strategy=strategy)


def cores_of_contenders(available: Iterable[int]) -> list[int]:
    """Return the cores on which contenders that take turns run, all on the same ones; none if there are too few to choose."""
    cores = sorted(available)
    return cores[-ALONE_CORES:] if len(cores) >= 2 * ALONE_CORES else []


def ask_all(
    contenders: Sequence[Contender], command: Mapping[str, object], clock: Clock
) -> dict[str, list[contest.Answer]]:
    """Let all contenders carry out a command at the same time; those that fail are missing in the answer."""

    def ask(contender: Contender) -> list[contest.Answer] | None:
        try:
            return contender.ask(command, clock.bound(TURN_S))
        except LaunchError:
            return None

    with ThreadPoolExecutor(max(1, len(contenders))) as threads:
        answers = list(threads.map(ask, contenders))
    return {each.name: answer for each, answer in zip(contenders, answers, strict=True) if answer is not None}


def device_of(contenders: Mapping[str, Contender]) -> Mapping[str, object]:
    """Return what the contenders know about their device."""
    for each in contenders.values():
        for answer in each.ready_answers:
            if "device" in answer:
                return cast("Mapping[str, object]", answer["device"])
    return {}


def settings_of(contenders: Mapping[str, Contender]) -> dict[str, Mapping[str, str]]:
    """Return the settings of torch that choose kernels, of each contender that has told them."""
    return {
        name: cast("Mapping[str, str]", each.ready_answers[0]["settings"])
        for name, each in contenders.items()
        if each.ready_answers and "settings" in each.ready_answers[0]
    }


def time_over(ours: Timings, other: Timings) -> Json:
    """Return our time over the other's, round by round: median and spread; null if one of them failed."""
    ratios = paired_ratios(ours.rounds, other.rounds)
    if ours.median_s is None or other.median_s is None or not ratios:
        return {"median": None, "p10": None, "p90": None, "rounds": 0}
    return {
        "median": quantile(ratios, 0.5), "p10": quantile(ratios, 0.1), "p90": quantile(ratios, 0.9), "rounds": len(ratios),
    }  # fmt: skip


def _numbers(results: Mapping[str, Timings]) -> Json:
    return {
        name: {
            **{key: value for key, value in contest.measured(each).items() if key != "tensor_bytes_per_s"},
            "rounds_s": each.rounds,
        }
        for name, each in results.items()
    }


def show_ms(timings: Timings) -> str:
    """Format median and spread in milliseconds."""
    if timings.median_s is None:
        return "failed"
    low, high = (quantile(timings.seconds, fraction) * 1e3 for fraction in (0.1, 0.9))
    return f"{timings.median_s * 1e3:.2f} ({low:.2f}-{high:.2f})"


def show_ratio(values: Json) -> str:
    if values["median"] is None:
        return "-"
    return f"{values['median']:.3f} ({values['p10']:.3f}-{values['p90']:.3f})"


def is_within(values: Json, most: float) -> bool:
    median = values["median"]
    return isinstance(median, float) and median <= most


# --- step ---


def run_step(options: GpuOptions, progress: Progress) -> Part:
    """Measure the time of a step on one worker.

    Rounds are short, so that many of them are held: what disturbs the host lasts longer than a round, and hits both sides of
    a ratio. Every second round has the reverse order. All contenders run on the same cores; those that wait for their turn
    are blocked, and keep their memory. `plain_again` is plain PyTorch once more: its ratio is the noise of the others.
    """
    several = options.replicas
    found = Part(columns=("network", "side", "ms (p10-p90)", "over plain", "limit"))
    clock = Clock(options.limit_s, weights_of(options.cells))
    cores = cores_of_contenders(os.sched_getaffinity(0))
    for model, mode in options.cells:
        end_s, begun_s = clock.next_cell(), time.monotonic()
        tasks = {
            "plain_free": options.task(model, mode, "plain", strict=False),
            "plain": options.task(model, mode, "plain"),
            "pliant": options.task(model, mode),
            "plain_again": options.task(model, mode, "plain"),
            f"plain_x{several}": options.task(model, mode, "plain", replicas=several, lead=1),
            f"pliant_x{several}": options.task(model, mode, replicas=several, lead=1),
        }
        with started(tasks, _named(progress, f"{model} {mode}"), clock) as contenders:
            found.device = found.device or device_of(contenders)
            started_s = time.monotonic()
            command = {"keep_memory": process_bytes(model, options) * len(tasks) <= DEVICE_BYTES}
            first = [contenders[name] for name in ("plain_free", "plain")]
            if mode == "compiled":  # the others find what these two have compiled in torch's cache, which all share
                ask_all(first, {"do": "run", "iterations": 1, **command}, clock)
            ask_all([*contenders.values()], {"do": "run", "iterations": 2, **command}, clock)
            if cores:
                ask_all([*contenders.values()], {"do": "cores", "cores": cores}, clock)
            warm_s = time.monotonic()
            steps = {name: max(2, options.num_steps // task.replicas) for name, task in tasks.items()}
            rules = replace(_rules(options, clock, end_s), alternate=True)
            progress_of = _named(progress, f"{model} {mode}")
            results = contest.hold(contenders.values(), rules, iterations=steps, command=command, progress=progress_of)
            settings, measured_s = settings_of(contenders), time.monotonic()
        judge_step(found, model, mode, several, results, is_late=clock.is_over)
        if settings:
            judge_settings(found, f"{model} {mode}", settings)
        found.cells[-1] |= {"cores": cores, "steps_of_a_turn": steps, "settings": settings}
        found.cells[-1]["took_s"] = _parts_of(
            start=(begun_s, started_s), warm_up=(started_s, warm_s), rounds=(warm_s, measured_s)
        )
    return found


def weights_of(cells: Sequence[tuple[str, str]]) -> list[float]:
    """Return how the time is shared out among the cells."""
    return [CELL_WEIGHT.get(mode, 1.0) for _, mode in cells]


def _parts_of(**spans: tuple[float, float]) -> Json:
    return {name: round(end_s - begun_s, 2) for name, (begun_s, end_s) in spans.items()}


def _rules(options: GpuOptions, clock: Clock, end_s: float) -> Rules:
    """Return the rules of a cell that is to end at `end_s`."""
    return Rules(
        rounds=options.num_rounds,
        iterations=options.num_steps,
        warmup=1,
        timeout_s=clock.bound(TURN_S),
        limit_s=max(1.0, end_s - time.monotonic() - 5),
        least_rounds=min(options.num_rounds, LEAST_ROUNDS.get(options.part, 2)),
    )


def judge_ratio(found: Part, text: str, most: float, ours: Timings, other: Timings, *, is_late: bool = False) -> Json:
    """Add the verdict on our time over the other's, and return the ratio.

    If a side has failed, the verdict says why. It is None if the side only lacked time, which it did if `is_late`.
    """
    values = time_over(ours, other)
    if values["median"] is not None:
        found.judge(is_within(values, most), f"{text} {show_ratio(values)}, at most {most:g}")
        return values
    why = ours.failure or other.failure
    no_time = is_late and (not why or contest.NO_ANSWER in why)
    found.judge(None if no_time else False, f"{text}: {'no time was left' if no_time else why or 'no round was held'}")
    return values


def judge_step(
    found: Part, model: str, mode: str, several: int, results: Mapping[str, Timings], *, is_late: bool = False
) -> None:
    """Add the rows and verdicts of one network; `is_late` says that the time of the part is over."""
    one, many = (
        judge_ratio(
            found,
            f"{model} {mode}: {text}",
            STEP_LIMITS[name],
            results[f"pliant{suffix}"],
            results[f"plain{suffix}"],
            is_late=is_late,
        )
        for name, suffix, text in (
            ("one", "", "N = 1 over plain PyTorch"),
            ("several", f"_x{several}", f"N = {several} over bare accumulation"),
        )
    )
    price = time_over(results["plain"], results["plain_free"])
    noise = time_over(results["plain_again"], results["plain"])
    for side, values, most in (
        ("plain_free", None, ""),
        ("plain", price, "(over free)"),
        ("plain_again", noise, "(the noise)"),
        ("pliant", one, f"{STEP_LIMITS['one']}"),
        (f"plain_x{several}", None, ""),
        (f"pliant_x{several}", many, f"{STEP_LIMITS['several']}"),
    ):
        shown = show_ratio(values) if values is not None else ""
        found.rows.append((f"{model} {mode}", side, show_ms(results[side]), shown, most))
    found.cells.append(
        {
            "model": model, "mode": mode, "replicas": several, "sides": _numbers(results),
            "one": one, "several": many, "price_of_determinism": price, "noise": noise,
        }
    )  # fmt: skip
    found.remarks += contest.failures(results)


def judge_settings(found: Part, name: str, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Add the verdict on whether all contenders have the same kernels pinned; the free one is to differ."""
    pinned = {side: values for side, values in settings.items() if side != "plain_free"}
    expected = pinned.get("plain", {})
    wrong = [
        f"{side} has {key}={values.get(key)} where plain has {expected.get(key)}"
        for side, values in pinned.items()
        for key in sorted({*values, *expected})
        if values.get(key) != expected.get(key)
    ]
    text = f"{name}: the same settings in {', '.join(pinned)}"
    found.judge(bool(expected) and not wrong, text if not wrong else f"{name}: {'; '.join(wrong)}")


def _named(progress: Progress, name: str) -> Progress:
    return lambda what, fraction: progress(f"{name}: {what}", fraction)


# --- memory ---


def run_memory(options: GpuOptions, progress: Progress, pool: DevicePool) -> Part:
    """Measure the peak memory of one worker with more and more replicas; each is a process of its own."""
    found = Part(columns=("network", "N", "bare MB", "ours MB", "limit MB", "gradients=host MB"))
    sides = ["plain", "pliant", *(["host"] if "gradients" in join_options() else [])]
    clock = Clock(options.limit_s)
    wanted = [(*cell, side, count) for cell in options.cells for count in REPLICA_COUNTS for side in sides]

    def measure(model: str, mode: str, side: str, count: int) -> tuple[Json | None, str]:
        with pool.lend(process_bytes(model, options), 1, clock.left_s) as got:
            if not got:
                return None, f"{side}, N = {count}: no time was left"
            task = _memory_task(options, model, mode, side, count)
            with started({side: task}, lambda what, fraction: None, clock) as contenders:
                found.device = found.device or device_of(contenders)
                ask_all([*contenders.values()], {"do": "run", "iterations": 1}, clock)
                answers = ask_all([*contenders.values()], {"do": "memory", "iterations": 3}, clock)
                return dict(answers[side][0]) if side in answers else None, contenders[side].failure

    progress("memory", 0.0)
    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = dict(zip(wanted, threads.map(lambda item: measure(*item), wanted), strict=True))
    for model, mode in options.cells:
        peaks = {key[2:]: answer for key, (answer, _) in answers.items() if key[:2] == (model, mode) and answer}
        judge_memory(found, model, mode, peaks, is_late=clock.is_over)
    found.remarks += [failure for _, failure in answers.values() if failure]
    return found


def _memory_task(options: GpuOptions, model: str, mode: str, side: str, count: int) -> TrainingTask:
    if side != "host":
        return options.task(model, mode, side, replicas=count)
    return replace(options, gradients="host").task(model, mode, replicas=count)


def memory_limit(bare_bytes: int, gradient_bytes: int, replicas: int) -> int:
    """Return the most that `replicas` replicas in one worker may allocate: ceil(log2 N) sets of gradients above the bare loop."""
    return bare_bytes + math.ceil(math.log2(replicas)) * gradient_bytes


def judge_memory(
    found: Part, model: str, mode: str, peaks: Mapping[tuple[str, int], Json], *, is_late: bool = False
) -> None:
    """Add the rows and verdicts of one network; `peaks` are the answers by side and number of replicas."""

    def peak(side: str, count: int) -> int | None:
        return cast("int | None", peaks.get((side, count), {}).get("peak_bytes"))

    def show(value: int | None) -> str:
        return f"{value / 1e6:.1f}" if value is not None else "-"

    for count in REPLICA_COUNTS:
        bare, ours, host = (peak(side, count) for side in ("plain", "pliant", "host"))
        most = None
        if bare is not None:
            most = memory_limit(bare, cast(int, peaks["plain", count]["gradient_bytes"]), count)
        found.rows.append((f"{model} {mode}", str(count), show(bare), show(ours), show(most), show(host)))
        found.cells.append({
            "model": model, "mode": mode, "replicas": count, "bare_bytes": bare, "ours_bytes": ours,
            "limit_bytes": most, "host_bytes": host, "answers": {side: peaks.get((side, count)) for side in ("plain", "pliant", "host")},
        })  # fmt: skip
        missing = None if is_late else False
        found.judge(
            ours <= most + SLACK_BYTES if ours is not None and most is not None else missing,
            f"{model} {mode}: N = {count} allocates {show(ours)} MB, at most {show(most)} + {SLACK_BYTES / 1e6:.0f} MB",
        )
    first, last = peak("host", REPLICA_COUNTS[0]), peak("host", REPLICA_COUNTS[-1])
    if first is not None and last is not None:
        text = f'{model} {mode}: gradients="host" keeps it flat: {show(first)} MB, then {show(last)} MB'
        found.judge(last <= first + SLACK_BYTES, text)


def join_options() -> frozenset[str]:
    """Return the names of the arguments of `pliant.join`."""
    import inspect

    import pliant

    return frozenset(inspect.signature(pliant.join).parameters)


def process_bytes(model: str, options: GpuOptions) -> float:
    return 0.0 if options.tiny else NEEDED_BYTES.get(model, OTHER_BYTES)


# --- packed ---


def run_packed(options: GpuOptions, progress: Progress) -> Part:
    """Measure several processes on the device: ours, DDP on gloo, and version 0.1."""
    found = Part(columns=("network", "processes", "side", "ms (p10-p90)", "ours over it"))
    sizes = [count for count in (2, 4) if options.replicas % count == 0]
    clock = Clock(options.limit_s, [weight for weight in weights_of(options.cells) for _ in sizes])
    for model, mode in options.cells:
        for count in sizes:
            end_s, begun_s = clock.next_cell(), time.monotonic()
            sides = ["pliant", "ddp", *(["version01"] if options.old is not None else [])]
            tasks = {
                side: options.task(model, mode, side, num_workers=count, replicas=options.replicas) for side in sides
            }
            with started(tasks, _named(progress, f"{model} {count}"), clock, options.old) as contenders:
                found.device = found.device or device_of(contenders)
                started_s = time.monotonic()
                room = process_bytes(model, options) * count * len(tasks)
                ask_all([*contenders.values()], {"do": "run", "iterations": 1}, clock)  # warms up all at once
                warm_s = time.monotonic()
                rules = replace(_rules(options, clock, end_s), alternate=True)
                results = contest.hold(
                    contenders.values(),
                    rules,
                    command={"keep_memory": room <= DEVICE_BYTES},
                    progress=_named(progress, f"{model} {count}"),
                )
                measured_s = time.monotonic()
            judge_packed(found, model, mode, count, results, is_late=clock.is_over)
            found.cells[-1]["took_s"] = _parts_of(
                start=(begun_s, started_s), warm_up=(started_s, warm_s), rounds=(warm_s, measured_s)
            )
    return found


def judge_packed(
    found: Part, model: str, mode: str, count: int, results: Mapping[str, Timings], *, is_late: bool = False
) -> None:
    """Add the rows and verdicts of one network on `count` processes."""
    ratios: Json = {}
    for side, timings in results.items():
        shown = ""
        if side != "pliant":
            text = f"{model} {mode} on {count} processes: ours over {side}"
            ratios[side] = values = judge_ratio(found, text, 1.0, results["pliant"], timings, is_late=is_late)
            shown = show_ratio(values)
        found.rows.append((f"{model} {mode}", str(count), side, show_ms(timings), shown))
    found.cells.append({
        "model": model, "mode": mode, "processes": count, "sides": _numbers(results), "ours_over": ratios,
    })  # fmt: skip
    found.remarks += contest.failures(results)


# --- profile ---


def run_profile(options: GpuOptions, progress: Progress) -> Part:
    """Profile plain PyTorch, free and with deterministic kernels, and ours with one and with several replicas."""
    columns = ("network", "side", "step ms", "host ms", "busy ms", "idle ms", "kernels", "copies ms", "pliant's own ms")
    found = Part(columns=columns)
    clock = Clock(options.limit_s)
    for model, mode in options.cells:
        several = options.replicas
        tasks = {
            "plain_free": options.task(model, mode, "plain", strict=False),
            "plain": options.task(model, mode, "plain"),
            "pliant": options.task(model, mode),
            f"plain_x{several}": options.task(model, mode, "plain", replicas=several),
            f"pliant_x{several}": options.task(model, mode, replicas=several),
        }
        with started(tasks, progress, clock) as contenders:
            found.device = found.device or device_of(contenders)
            ask_all([*contenders.values()], {"do": "run", "iterations": 3}, clock)
            for number, (side, contender) in enumerate(contenders.items()):  # one at a time: the device is shared
                progress(f"{model} {mode}: {side}", number / len(contenders))
                save_as = str(options.traces / f"{model}_{mode}_{side}") if options.traces is not None else ""
                command = {"do": "profile", "iterations": min(options.num_steps, PROFILED_STEPS), "save_as": save_as}
                answer = ask_all([contender], command, clock).get(side)
                if answer is None:
                    found.remarks.append(contender.failure)
                    found.judge(False, contender.failure)
                    continue
                add_profile(found, model, mode, side, dict(answer[0]))
    return found


def add_profile(found: Part, model: str, mode: str, side: str, answer: Json) -> None:
    """Add the row of one side, and the lists of what takes the most time."""
    light, python = (cast(Json, answer[key]) for key in ("light", "python"))

    def ms(values: Json, key: str) -> str:
        return f"{float(cast(float, values.get(key, 0.0))) * 1e3:.2f}"

    times = [ms(light, key) for key in ("step_s", "host_s", "device_busy_s", "device_idle_s")]
    kernels = f"{float(cast(float, light['kernels'])):.0f}"
    own = ms(python, "pliant_own_s")
    found.rows.append((f"{model} {mode}", side, *times, kernels, ms(light, "copies_s"), own))
    found.cells.append({"model": model, "mode": mode, "side": side, **answer})
    found.judge(True, f"{model} {mode}, {side}: profiled")
    for values, key, title in (
        (light, "top_kernels", "kernels"),
        (light, "top_waits", "what the device waited for"),
        (light, "top_host", "host, without what is inside"),
        (python, "top_pliant", "functions of pliant, without what is inside"),
        (python, "pliant_calls", "functions of pliant, with what is inside"),
    ):
        items = cast("list[Json]", values.get(key, []))[:10]
        lines = [
            f"    {float(cast(float, each['s'])) * 1e3:8.3f} ms {each['count']:7.1f} x  {each['name']}"
            for each in items
        ]
        if lines:
            found.remarks.append("\n".join([f"{model} {mode}, {side}: {title}, per step", *lines]))
