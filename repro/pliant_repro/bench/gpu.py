"""`pliant bench gpu`: training on one GPU beside plain PyTorch and DDP, in parts that are run one by one.

    step      one worker: N = 1 beside plain PyTorch, N = 4 beside bare gradient accumulation, and the price of determinism
    memory    peak memory of N = 1, 2, 4, 8, 16 replicas on one worker, beside bare accumulation
    bits      digests after every step: 1, 2 and 4 processes, two runs of each, beside DDP on gloo with tensors on the device
    changes   digests after every step of a job that goes through 2 -> 1 -> 3 workers, kill -9 and a replacement
    live      the longest gap between two commits around a shrink, a grow and a kill -9
    packed    2 and 4 processes on the device, beside DDP on gloo and, with its folder, version 0.1
    profile   where a step's time goes: kernels, what the device waits for, and the host's functions

All contenders of a part are interleaved in one run, with the same deterministic kernels pinned. A part ends by itself: when its
time is nearly over, it holds no further rounds. `bench.gpu_elastic` has the parts whose workers come and go.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
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
MODES = ("eager", "compiled")
DEFAULT_MODELS = {
    "step": ("gpt2", "resnet50"), "memory": ("gpt2",), "bits": ("gpt2", "resnet50", "lstm", "vit"),
    "changes": ("gpt2", "resnet50", "lstm", "vit"), "live": ("gpt2",), "packed": ("gpt2", "resnet50"),
    "profile": ("gpt2",),
}  # fmt: skip
"""The parts, and the networks that each trains by default."""
DEFAULT_MODES = {"memory": ("eager",), "profile": ("eager",), "packed": ("eager",)}
"""Modes of the parts that do not take both by default."""
STEP_LIMITS = {"one": 1.02, "several": 1.03}
"""Most time of a step: of N = 1 over plain PyTorch, and of several replicas over bare accumulation."""
REPLICA_COUNTS = (1, 2, 4, 8, 16)
SLACK_BYTES = 32 << 20
"""Peak memory may be above its limit by this much: the allocator rounds, and the order of frees varies."""
SEED = 1234
START_S, TURN_S = 240.0, 300.0
EXTRA_S = 20.0
"""How long a part may go on when its time is over."""
DEVICE_BYTES = 120e9
"""Device memory that the processes of one batch may need together."""
NEEDED_BYTES = {"gpt2": 15e9, "resnet50": 8e9, "vit": 6e9}
"""Device memory of one process that trains the network; others need OTHER_BYTES."""
OTHER_BYTES = 4e9
MAX_PROCESSES = 20
PROFILED_STEPS = 4


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
    repeat: int = 12
    """Rounds; in `live`, changes of each kind."""
    steps: int = 8
    """Steps of a turn; in `bits`, steps that are compared."""
    limit_s: float = 420.0
    """Time in which the part is to end."""
    order: str = ""
    """Order of the sums, as an argument of `pliant.join`; empty means its default, and in `bits` that of DDP."""
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
            ("--repeat", self.repeat, 1), ("--steps", self.steps, 1), ("--limit", self.limit_s, 1),
        )  # fmt: skip
        if self.old is not None and not (self.old / "pliant" / "__init__.py").exists():
            raise ConfigError(f"--old {self.old}: there is no pliant/ in it; give a checkout of version 0.1")

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Every network with every mode, the eager ones first."""
        models = self.models or DEFAULT_MODELS[self.part]
        modes = self.modes or DEFAULT_MODES.get(self.part, MODES)
        return [(model, mode) for mode in modes for model in models]

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
            "autocast": self.autocast, "compiled": mode == "compiled", "strict": True, "lead": 2, "join": join, **more,
        })  # fmt: skip


@dataclass(slots=True)
class Part:
    """Result of a part: what was measured, how to show it, and what it says about the goals."""

    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    cells: list[Json] = field(default_factory=list)
    verdicts: list[tuple[bool, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    device: Mapping[str, object] = field(default_factory=dict)

    def judge(self, ok: bool, text: str) -> None:
        self.verdicts.append((ok, text))


class Clock:
    """The time that a part has, shared out among its cells."""

    def __init__(self, limit_s: float, num_cells: int) -> None:
        self._end_s, self._cells_left = time.monotonic() + limit_s, num_cells

    def next_cell(self) -> float:
        """Return the moment at which the next cell is to end."""
        left_s = self._end_s - time.monotonic()
        share_s = left_s / max(1, self._cells_left)
        self._cells_left -= 1
        return time.monotonic() + share_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def bound(self, timeout_s: float) -> float:
        """Return this time-out, or what is left of the part's time and a little more, if that is less."""
        return max(5.0, min(timeout_s, self.left_s + EXTRA_S))


def run(options: GpuOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Run one part, and return the result in the one form."""
    from pliant_repro.bench import gpu_elastic

    parts: dict[str, Callable[[GpuOptions, Progress], Part]] = {
        "step": run_step, "memory": run_memory, "bits": run_bits, "packed": run_packed, "profile": run_profile,
        "changes": gpu_elastic.run_changes, "live": gpu_elastic.run_live,
    }  # fmt: skip
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # each of many processes would start one per core
    begun_s = time.monotonic()
    found = parts[options.part](options, progress)
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
    tasks: Mapping[str, TrainingTask], progress: Progress, clock: Clock, old: Path | None = None
) -> Iterator[dict[str, Contender]]:
    """Start a contender for each task, and give those that started by their names. All are gone afterwards."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        found = {name: cleanup.enter_context(_contender(name, task, folder, old)) for name, task in tasks.items()}
        contest.start_all(found.values(), clock.bound(START_S), progress)
        yield found


def _contender(name: str, task: TrainingTask, folder: Path, old: Path | None) -> Contender:
    placement = Placement(num_workers=task.num_workers, folder=folder)
    if task.side == "version01":
        assert old is not None, "it was given"
        starter = version01.launcher(old, task.num_workers)
        return placement.contender(name, version01.PROGRAM, task.to_json(), launcher=starter)
    task = replace(task, rendezvous=f"file://{folder / name}.store")
    strategy = "AUTO" if task.side == "pliant" and task.num_workers > 1 else ""
    return placement.contender(name, PROGRAM, task.to_json(), strategy=strategy)


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


def _device(contenders: Mapping[str, Contender]) -> Mapping[str, object]:
    for each in contenders.values():
        for answer in each.ready_answers:
            if "device" in answer:
                return cast("Mapping[str, object]", answer["device"])
    return {}


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
    """Measure the time of a step on one worker."""
    several = options.replicas
    found = Part(columns=("network", "side", "ms (p10-p90)", "over plain", "limit"))
    clock = Clock(options.limit_s, len(options.cells))
    for model, mode in options.cells:
        end_s = clock.next_cell()
        tasks = {
            "plain": options.task(model, mode, "plain"),
            "pliant": options.task(model, mode),
            "plain_free": options.task(model, mode, "plain", strict=False),
            f"plain_x{several}": options.task(model, mode, "plain", replicas=several),
            f"pliant_x{several}": options.task(model, mode, replicas=several),
        }
        with started(tasks, progress, clock) as contenders:
            found.device = found.device or _device(contenders)
            ask_all([*contenders.values()], {"do": "run", "iterations": 2}, clock)  # compiles all at the same time
            limit_s = max(1.0, end_s - time.monotonic() - 5)
            rules = Rules(
                rounds=options.repeat,
                iterations=options.steps,
                warmup=1,
                timeout_s=clock.bound(TURN_S),
                limit_s=limit_s,
            )
            results = contest.hold(contenders.values(), rules, progress=_named(progress, f"{model} {mode}"))
        judge_step(found, model, mode, several, results)
    return found


def judge_step(found: Part, model: str, mode: str, several: int, results: Mapping[str, Timings]) -> None:
    """Add the rows and verdicts of one network."""
    one = time_over(results["pliant"], results["plain"])
    many = time_over(results[f"pliant_x{several}"], results[f"plain_x{several}"])
    price = time_over(results["plain"], results["plain_free"])
    for side, values, most in (
        ("plain_free", None, ""),
        ("plain", price, "(over free)"),
        ("pliant", one, f"{STEP_LIMITS['one']}"),
        (f"plain_x{several}", None, ""),
        (f"pliant_x{several}", many, f"{STEP_LIMITS['several']}"),
    ):
        shown = show_ratio(values) if values is not None else ""
        found.rows.append((f"{model} {mode}", side, show_ms(results[side]), shown, most))
    found.cells.append(
        {
            "model": model, "mode": mode, "replicas": several, "sides": _numbers(results),
            "one": one, "several": many, "price_of_determinism": price,
        }
    )  # fmt: skip
    for name, values, limit in (
        ("N = 1 over plain PyTorch", one, STEP_LIMITS["one"]),
        (f"N = {several} over bare accumulation", many, STEP_LIMITS["several"]),
    ):
        found.judge(is_within(values, limit), f"{model} {mode}: {name} {show_ratio(values)}, at most {limit}")
    found.remarks += contest.failures(results)


def _named(progress: Progress, name: str) -> Progress:
    return lambda what, fraction: progress(f"{name}: {what}", fraction)


# --- memory ---


def run_memory(options: GpuOptions, progress: Progress) -> Part:
    """Measure the peak memory of one worker with more and more replicas."""
    found = Part(columns=("network", "N", "bare MB", "ours MB", "limit MB", "gradients=host MB"))
    sides = ["plain", "pliant", *(["host"] if "gradients" in join_options() else [])]
    clock = Clock(options.limit_s, len(options.cells))
    for model, mode in options.cells:
        peaks: dict[tuple[str, int], Json] = {}
        wanted = [(side, count) for count in REPLICA_COUNTS for side in sides]
        for batch in in_batches(wanted, [process_bytes(model, options)] * len(wanted), [1] * len(wanted)):
            tasks = {f"{side}_{count}": _memory_task(options, model, mode, side, count) for side, count in batch}
            with started(tasks, progress, clock) as contenders:
                found.device = found.device or _device(contenders)
                ask_all([*contenders.values()], {"do": "run", "iterations": 1}, clock)
                answers = ask_all([*contenders.values()], {"do": "memory", "iterations": 3}, clock)
                found.remarks += [each.failure for each in contenders.values() if each.failure]
            for side, count in batch:
                if (answer := answers.get(f"{side}_{count}")) is not None:
                    peaks[side, count] = dict(answer[0])
        judge_memory(found, model, mode, peaks)
    return found


def _memory_task(options: GpuOptions, model: str, mode: str, side: str, count: int) -> TrainingTask:
    if side != "host":
        return options.task(model, mode, side, replicas=count)
    return replace(options, gradients="host").task(model, mode, replicas=count)


def memory_limit(bare_bytes: int, gradient_bytes: int, replicas: int) -> int:
    """Return the most that `replicas` replicas in one worker may allocate: ceil(log2 N) sets of gradients above the bare loop."""
    return bare_bytes + math.ceil(math.log2(replicas)) * gradient_bytes


def judge_memory(found: Part, model: str, mode: str, peaks: Mapping[tuple[str, int], Json]) -> None:
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
        holds = ours is not None and most is not None and ours <= most + SLACK_BYTES
        found.judge(holds, f"{model} {mode}: N = {count} allocates {show(ours)} MB, at most {show(most)} MB")
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


def in_batches(
    items: Sequence[Any], num_bytes: Sequence[float], num_processes: Sequence[int], most_bytes: float = DEVICE_BYTES
) -> list[list[Any]]:
    """Cut items into batches that fit into the device's memory together, and that the host can run at the same time.

    `num_bytes` is what each process of an item needs.
    """
    batches: list[list[Any]] = []
    used_bytes = used_processes = 0.0
    for item, each_bytes, count in zip(items, num_bytes, num_processes, strict=True):
        fits = used_bytes + each_bytes * count <= most_bytes and used_processes + count <= MAX_PROCESSES
        if not batches or not fits:
            batches.append([])
            used_bytes = used_processes = 0.0
        batches[-1].append(item)
        used_bytes += each_bytes * count
        used_processes += count
    return batches


# --- bits ---


@dataclass(frozen=True, slots=True)
class Group:
    """One training whose digests are compared with others of its cell."""

    model: str
    mode: str
    side: str
    num_workers: int
    number: int = 0
    """Number of the run."""

    @property
    def name(self) -> str:
        return f"{self.model}_{self.mode}_{self.side}_{self.num_workers}_{self.number}"

    @property
    def shown(self) -> str:
        who = "DDP on gloo" if self.side == "ddp" else "ours"
        return f"{who} on {self.num_workers}, run {self.number + 1}"


Digests = list[tuple[str, str]]
"""Digests after every step: of parameters and optimizer, and of the buffers."""


def run_bits(options: GpuOptions, progress: Progress) -> Part:
    """Compare digests after every step, of several placements, of two runs of each, and of DDP."""
    order = options.order
    if not order and "order" in join_options():
        order = "ddp"  # the order in which stock DDP sums
    options = replace(options, order=order)
    sizes = [count for count in (1, 2, 4) if count <= options.replicas]
    groups = [
        group
        for model, mode in options.cells
        for group in (
            Group(model, mode, "ddp", options.replicas),
            *(Group(model, mode, "pliant", count, number) for number in (0, 1) for count in sizes),
        )
    ]
    found = Part(columns=("network", "placements", "two runs", "DDP", "digest after the last step"))
    digests: dict[Group, Digests] = {}
    failures: dict[Group, str] = {}
    needed = [process_bytes(group.model, options) for group in groups]
    batches = in_batches(groups, needed, [group.num_workers for group in groups])
    clock = Clock(options.limit_s, len(batches))
    for number, batch in enumerate(batches):
        if clock.left_s < 20:
            found.remarks.append(f"no time was left for {', '.join(group.name for group in batch)}")
            continue
        progress(f"{batch[0].model} {batch[0].mode}", number / len(batches))
        tasks = {
            group.name: options.task(
                group.model, group.mode, group.side, num_workers=group.num_workers, replicas=options.replicas, seed=SEED
            )
            for group in batch
        }
        with started(tasks, lambda what, fraction: None, clock) as contenders:
            found.device = found.device or _device(contenders)
            answers = ask_all([*contenders.values()], {"do": "digests", "iterations": options.steps}, clock)
            failures |= {group: contenders[group.name].failure for group in batch}
        for group in batch:
            if group.name in answers:
                digests[group], said = merge_ranks(answers[group.name])
                failures[group] = said
    for model, mode in options.cells:
        judge_bits(found, [group for group in groups if (group.model, group.mode) == (model, mode)], digests, order)
    found.remarks += [f"{group.shown}, {group.model} {group.mode}: {why}" for group, why in failures.items() if why]
    if options.device == "cuda":
        judge_refusal(found, options, clock)
    return found


def merge_ranks(answers: Sequence[contest.Answer]) -> tuple[Digests, str]:
    """Return rank 0's digests, and a remark if the state of another rank differs from it in any step."""
    states, buffers = (cast("list[str]", answers[0][key]) for key in ("states", "buffers"))
    for rank, answer in enumerate(answers):
        for step, (mine, theirs) in enumerate(zip(states, cast("list[str]", answer["states"]), strict=True), 1):
            if mine != theirs:
                return list(zip(states, buffers, strict=True)), f"rank {rank} differs from rank 0 after step {step}"
    return list(zip(states, buffers, strict=True)), ""


def first_difference(found: Sequence[object], expected: Sequence[object]) -> int | None:
    """Return the first step (from 1 on) whose digests differ, or that one of the two lacks; None if all are equal."""
    for step in range(max(len(found), len(expected))):
        if step >= min(len(found), len(expected)) or found[step] != expected[step]:
            return step + 1
    return None


def judge_bits(found: Part, groups: Sequence[Group], digests: Mapping[Group, Digests], order: str) -> None:
    """Add the row and the verdicts of one network: all its groups are to have the same digests."""
    first = groups[0]
    what = f"{first.model} {first.mode}"
    ours = [group for group in groups if group.side == "pliant"]
    reference = digests.get(ours[0], [])
    differences = {group: first_difference(digests.get(group, []), reference) if reference else 1 for group in groups}
    is_oracle = order in ("", "ddp")
    columns = []
    for name, compared in (
        ("all placements", [group for group in ours if group.number == 0]),
        ("a second run", [group for group in ours if group.number == 1]),
        ("DDP", [group for group in groups if group.side == "ddp"]),
    ):
        wrong = [f"{group.shown} from step {differences[group]} on" for group in compared if differences[group]]
        columns.append("equal" if not wrong else "DIFFERENT")
        if name == "DDP" and not is_oracle:
            columns[-1] += f" (order {order})"
            continue
        text = f"{what}, {name}: equal digests after each of {len(reference)} steps"
        found.judge(not wrong, text if not wrong else f"{what}, {name}: {'; '.join(wrong)}")
    found.rows.append((what, *columns, reference[-1][0][:16] if reference else "-"))
    found.cells.append({
        "model": first.model, "mode": first.mode, "order": order,
        "groups": [
            {**asdict(group), "first_difference": differences[group], "digests": digests.get(group)} for group in groups
        ],
    })  # fmt: skip


def nondeterministic() -> tuple[Any, Any]:
    """Return a network whose backward has no deterministic kernel on a GPU, and an input; a model of `make_subject`."""
    import torch
    from torch import nn

    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReflectionPad2d(1), nn.Flatten(), nn.Linear(4 * 16 * 16, 2))
    return layers.cuda(), torch.randn(2, 3, 16, 16, device="cuda")


REFUSED = "reflection_pad2d_backward"


def judge_refusal(found: Part, options: GpuOptions, clock: Clock) -> None:
    """Add the verdict on a program with an operator that has no deterministic kernel: it is to be refused by name."""
    task = replace(options.task("gpt2", "eager"), model=f"{__name__}:nondeterministic", optimizer="sgd", autocast=False)
    with started({"refused": task}, lambda what, fraction: None, clock) as contenders:
        ask_all([contenders["refused"]], {"do": "run", "iterations": 1}, clock)
        said = contenders["refused"].failure
    found.cells.append({"refusal": said})
    found.judge(REFUSED in said, f"a program with {REFUSED} is refused: {said[:300] or 'it was not'}")


# --- packed ---


def run_packed(options: GpuOptions, progress: Progress) -> Part:
    """Measure several processes on the device: ours, DDP on gloo, and version 0.1."""
    found = Part(columns=("network", "processes", "side", "ms (p10-p90)", "ours over it"))
    sizes = [count for count in (2, 4) if options.replicas % count == 0]
    clock = Clock(options.limit_s, len(options.cells) * len(sizes))
    for model, mode in options.cells:
        for count in sizes:
            end_s = clock.next_cell()
            sides = ["pliant", "ddp", *(["version01"] if options.old is not None else [])]
            tasks = {
                side: options.task(model, mode, side, num_workers=count, replicas=options.replicas) for side in sides
            }
            with started(tasks, progress, clock, options.old) as contenders:
                found.device = found.device or _device(contenders)
                limit_s = max(1.0, end_s - time.monotonic() - 5)
                rules = Rules(
                    rounds=options.repeat,
                    iterations=options.steps,
                    warmup=1,
                    timeout_s=clock.bound(TURN_S),
                    limit_s=limit_s,
                )
                results = contest.hold(contenders.values(), rules, progress=_named(progress, f"{model} {count}"))
            judge_packed(found, model, mode, count, results)
    return found


def judge_packed(found: Part, model: str, mode: str, count: int, results: Mapping[str, Timings]) -> None:
    """Add the rows and verdicts of one network on `count` processes."""
    ratios: Json = {}
    for side, timings in results.items():
        shown = ""
        if side != "pliant":
            ratios[side] = values = time_over(results["pliant"], timings)
            shown = show_ratio(values)
            text = f"{model} {mode} on {count} processes: ours over {side} {shown}, at most 1"
            found.judge(is_within(values, 1.0), text)
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
    clock = Clock(options.limit_s, len(options.cells))
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
            found.device = found.device or _device(contenders)
            ask_all([*contenders.values()], {"do": "run", "iterations": 3}, clock)
            for number, (side, contender) in enumerate(contenders.items()):  # one at a time: the device is shared
                progress(f"{model} {mode}: {side}", number / len(contenders))
                save_as = str(options.traces / f"{model}_{mode}_{side}") if options.traces is not None else ""
                command = {"do": "profile", "iterations": min(options.steps, PROFILED_STEPS), "save_as": save_as}
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
