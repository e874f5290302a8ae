"""The parts of `pliant bench gpu` whose workers come and go: `live` measures how long a change is felt, `changes` the bits."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, StepBegun, members, summarise
from pliant_repro.bench.gpu import SEED, START_S, TURN_S, Clock, GpuOptions, Part, in_batches, process_bytes, started
from pliant_repro.contest import Contender, Progress, quantile

AFTER = 20
"""Steps after a change that are judged."""
GAP_FACTOR = 1.5
GAP_EXTRA_S = {"cpu": 0.02, "cuda": 0.15}
"""The longest gap around a change: at most GAP_FACTOR times the slower median step, and this much more."""
KILL_S = 1.0
"""kill -9 to the end of the next step: at most this, and one step."""
CHANGE_S = 90.0
BIG, SMALL = 2, 1
"""Numbers of workers between which `live` changes."""
STEADY = 3
"""Steps between two changes of `changes`."""
FIXED_STEPS = 10
"""Steps of the fixed job in a turn; it does not wait for the changing one."""
PACE_S = {"cpu": 0.1, "cuda": 0.5}
"""Least time of a step of `changes`, so that not too many steps have to be repeated for the comparison."""


def elastic_options(options: GpuOptions, model: str, mode: str, clock: Clock, **more: object) -> ElasticOptions:
    """Return the options of a job that trains what the contenders of the other parts train."""
    task = options.task(model, mode)
    return ElasticOptions(**{  # type: ignore[arg-type]
        "num_workers": BIG, "small": SMALL, "model": task.model, "batch": task.batch, "size": task.size,
        "replicas": options.replicas, "device": task.device, "autocast": task.autocast, "compiled": task.compiled,
        "join": task.join, "max_restarts": 100, "start_timeout_s": clock.bound(START_S),
        "change_timeout_s": clock.bound(CHANGE_S), **more,
    })  # fmt: skip


# --- reading the reports ---


def commit_times(reports: Iterable[StepBegun]) -> dict[int, float]:
    """Return when each step was done by all workers, by its number.

    A worker reports the end of a step with the beginning of the next one, so the last step is missing. If a worker was killed
    after a step, and the others had to do that step again, they are later.
    """
    found: dict[int, float] = {}
    for each in reports:
        if each.ended_s and each.step:
            found[each.step - 1] = max(each.ended_s, found.get(each.step - 1, 0.0))
    return found


def gaps(commits: Mapping[int, float], first: int, last: int) -> list[float]:
    """Return the seconds from each commit to the next, for the steps from `first` to `last` that are known."""
    pairs = ((commits.get(step - 1), commits.get(step)) for step in range(first, last + 1))
    return [after - before for before, after in pairs if before is not None and after is not None]


def median_steps(reports: Sequence[StepBegun], commits: Mapping[int, float]) -> dict[int, float]:
    """Return the median time of a step for each number of workers; the first step after a change does not count."""
    sizes: dict[int, int] = {}
    disturbed: set[int] = set()
    for each in reports:
        sizes[each.step] = each.size
        if each.change is not None:
            disturbed.add(each.step)
    samples: dict[int, list[float]] = {}
    for step, size in sizes.items():
        if step not in disturbed and sizes.get(step - 1) == size:
            samples.setdefault(size, []).extend(gaps(commits, step, step))
    return {size: quantile(times, 0.5) for size, times in samples.items() if times}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the job."""

    kind: str
    """shrink, grow or kill."""
    at_s: float
    until_s: float = float("inf")
    """When the next thing was done."""
    pid: int = 0
    """The process that was killed."""


@dataclass(slots=True)
class Felt:
    """How one kind of change was felt; one value for each change."""

    gap_s: list[float] = field(default_factory=list)
    """The longest gap between two commits, from the request until AFTER steps after the change."""
    gap_limit_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)
    """The longest of the AFTER steps that follow the first step after the change."""
    after_limit_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    """From a kill to the end of the next step."""
    next_limit_s: list[float] = field(default_factory=list)

    def to_json(self) -> Json:
        return {
            "gap": summarise(self.gap_s), "gap_limits_s": self.gap_limit_s, "after": summarise(self.after_s),
            "after_limits_s": self.after_limit_s, "next": summarise(self.next_s), "next_limits_s": self.next_limit_s,
        }  # fmt: skip


def measure_changes(reports: Sequence[StepBegun], events: Sequence[Event], device: str) -> dict[str, Felt]:
    """Return how each kind of change was felt: shrink, grow, kill, and the replacement after a kill."""
    commits = commit_times(reports)
    medians = median_steps(reports, commits)
    found: dict[str, Felt] = {}

    def add(kind: str, begin_s: float, change: StepBegun, before: int | None = None) -> Felt:
        """Add a change; steps from number `before` on belong to the next one."""
        assert change.change is not None, "it follows a change"
        felt = found.setdefault(kind, Felt())
        first = min((step for step, at_s in commits.items() if at_s > begin_s), default=change.step)
        slower_s = max(medians.get(size, 0.0) for size in change.change[:2])
        last = change.step + AFTER if before is None else min(change.step + AFTER, before - 1)
        felt.gap_s.append(max(gaps(commits, min(first, change.step), last), default=0.0))
        felt.gap_limit_s.append(GAP_FACTOR * slower_s + GAP_EXTRA_S[device])
        felt.after_s.append(max(gaps(commits, change.step + 1, last), default=0.0))
        felt.after_limit_s.append(GAP_FACTOR * medians.get(change.size, 0.0))
        return felt

    for event in events:
        changes = [
            each
            for each in reports
            if each.change is not None and event.at_s < each.at_s < event.until_s and each.pid != event.pid
        ]
        by_step = {each.step: each for each in changes}  # each survivor reports a change
        ordered = [by_step[step] for step in sorted(by_step)]
        if not ordered:
            continue
        felt = add(event.kind, event.at_s, ordered[0], ordered[1].step if len(ordered) > 1 else None)
        if event.kind == "kill":
            end_s = commits.get(ordered[0].step)
            if end_s is not None:
                felt.next_s.append(end_s - event.at_s)
                felt.next_limit_s.append(KILL_S + medians.get(ordered[0].size, 0.0))
            if len(ordered) > 1:
                add("replacement", commits.get(ordered[0].step, event.at_s), ordered[-1])
    return found


# --- live ---


def run_live(options: GpuOptions, progress: Progress) -> Part:
    """Shrink and grow a job and kill its workers, and measure the gaps between commits."""
    columns = ("network", "change", "times", "gap ms", "limit", "after ms", "limit", "kill ms", "limit")
    found = Part(columns=columns)
    clock = Clock(options.limit_s, len(options.cells))
    for model, mode in options.cells:
        end_s = clock.next_cell()
        events: list[Event] = []
        failure = ""
        with ElasticJob(elastic_options(options, model, mode, clock)) as job:
            try:
                change_repeatedly(job, events, options.repeat, end_s, progress, f"{model} {mode}")
            except LaunchError as error:
                failure = str(error)
            reports = list(job.reports)
        judge_live(found, model, mode, reports, events, options.device)
        if failure:
            found.remarks.append(f"{model} {mode}: {failure}")
            found.judge(False, f"{model} {mode}: {failure}")
    return found


def change_repeatedly(
    job: ElasticJob, events: list[Event], repeat: int, end_s: float, progress: Progress, name: str
) -> None:
    """Shrink, grow and kill again and again, until `end_s` if a further round would end later; note what was done."""
    progress(f"{name}: starting", 0.0)
    job.wait_until_steady(BIG, AFTER)
    with job.client() as resize:
        for number in itertools.count():
            begun_s = time.monotonic()
            for kind, size in (("shrink", SMALL), ("grow", BIG), ("kill", BIG)):
                progress(f"{name}: {kind}", number / repeat)
                mark, pid = len(job.reports), 0
                if kind == "kill":
                    pid = members(job.reports)[BIG - 1 - number % BIG].pid
                    at_s = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                else:
                    at_s = resize(size)
                reports = wait_until_changed(job, size, AFTER + 2, mark)
                if kind == "shrink":
                    job.wait_for_exits(reports, size)
                events.append(Event(kind, at_s, time.monotonic(), pid))
            took_s = time.monotonic() - begun_s
            if number + 1 >= repeat or time.monotonic() + took_s > end_s:
                return


def wait_until_changed(job: ElasticJob, size: int, steps: int, since: int) -> list[StepBegun]:
    """Wait for a change after which `size` workers have each committed `steps` steps; return the reports since then."""

    def is_changed(reports: Sequence[StepBegun]) -> bool:
        changes = [each.step for each in reports if each.change is not None]
        return bool(changes) and reports[-1].size == size and len(members(reports)) == size

    job.wait_until(f"a change to {size} workers", is_changed, since)
    return job.wait_until_steady(size, steps, since)


def judge_live(
    found: Part, model: str, mode: str, reports: Sequence[StepBegun], events: Sequence[Event], device: str
) -> None:
    """Add the rows and verdicts of one network."""
    felt = measure_changes(reports, events, device)
    medians = median_steps(reports, commit_times(reports))
    for kind in ("shrink", "grow", "kill", "replacement"):
        values = felt.get(kind)
        if values is None:
            found.judge(False, f"{model} {mode}: {kind} was not measured")
            continue
        cells = []
        for title, samples, limits in (
            ("the longest gap between two commits", values.gap_s, values.gap_limit_s),
            (f"the longest of the {AFTER} steps after it", values.after_s, values.after_limit_s),
            ("kill -9 to the end of the next step", values.next_s, values.next_limit_s),
        ):
            if not samples:
                cells += ["", ""]
                continue
            worst = max(range(len(samples)), key=lambda at: samples[at] - limits[at])
            shown = f"{quantile(samples, 0.5) * 1e3:.0f} ({samples[worst] * 1e3:.0f})", f"{limits[worst] * 1e3:.0f}"
            cells += shown
            if kind == "kill" and samples is values.gap_s:
                continue  # judged by the time to the next step
            text = f"{model} {mode}, {kind}: {title} {shown[0]} ms, at most {shown[1]} ms"
            found.judge(samples[worst] <= limits[worst], text)
        found.rows.append((f"{model} {mode}", kind, str(len(values.gap_s)), *cells))
    sizes = {str(size): median_s for size, median_s in medians.items()}
    found.remarks.append(
        f"medians, and in brackets the worst: longest gap, longest of {AFTER} steps after, kill to next step"
    )
    listed = ", ".join(f"{median_s * 1e3:.1f} ms on {size}" for size, median_s in sizes.items())
    found.remarks.append(f"{model} {mode}: median step {listed}")
    commits = sorted(commit_times(reports).items())
    found.cells.append({
        "model": model, "mode": mode, "median_step_s": sizes, "changes": {kind: each.to_json() for kind, each in felt.items()},
        "events": [[event.kind, event.at_s, event.until_s] for event in events], "commits_s": commits,
    })  # fmt: skip


# --- changes ---


def run_changes(options: GpuOptions, progress: Progress) -> Part:
    """Compare the digests of jobs that go through changes with those of fixed ones, after every step."""
    found = Part(columns=("network", "steps", "digests", "sizes", "result"))
    cells = options.cells
    needed = [process_bytes(model, options) for model, _ in cells]
    batches = in_batches(cells, needed, [4] * len(cells))
    clock = Clock(options.limit_s, len(batches))
    for number, batch in enumerate(batches):
        if clock.left_s < 60:
            found.judge(False, f"no time was left for {batch}")
            continue
        progress(", ".join(f"{model} {mode}" for model, mode in batch), number / len(batches))
        with ThreadPoolExecutor(len(batch)) as threads:
            runs = [threads.submit(compare_changes, options, model, mode, clock) for model, mode in batch]
        for (model, mode), run in zip(batch, runs, strict=True):
            judge_changes(found, model, mode, *run.result())
    return found


def compare_changes(
    options: GpuOptions, model: str, mode: str, clock: Clock
) -> tuple[list[StepBegun], list[tuple[str, str]], str]:
    """Return the reports of a job that went through changes, the digests of a fixed one, and why one of them failed."""
    chosen = elastic_options(options, model, mode, clock, digests=True, seed=SEED, least_step_s=PACE_S[options.device])
    task = options.task(model, mode, replicas=options.replicas, seed=SEED)
    failure = ""
    last = math.inf  # until it is known how many steps the job has done

    def train_fixed(contender: Contender) -> list[tuple[str, str]]:
        digests: list[tuple[str, str]] = []
        while len(digests) < last:
            answer = contender.ask({"do": "digests", "iterations": FIXED_STEPS}, clock.bound(TURN_S))[0]
            states, buffers = (cast("list[str]", answer[key]) for key in ("states", "buffers"))
            digests += zip(states, buffers, strict=True)
        return digests

    with started({"fixed": task}, lambda what, fraction: None, clock) as contenders, ThreadPoolExecutor(1) as threads:
        fixed = threads.submit(train_fixed, contenders["fixed"])
        try:
            with ElasticJob(chosen) as job:
                try:
                    go_through_changes(job)
                except LaunchError as error:
                    failure = str(error)
        finally:
            reports = list(job.reports)
            last = max((each.step for each in reports), default=0)
        try:
            return reports, fixed.result(), failure
        except LaunchError as error:
            return reports, [], failure or str(error)


def go_through_changes(job: ElasticJob) -> None:
    """2 -> 1 -> 3 workers, then kill -9 of one, and its replacement."""
    job.wait_until_steady(2, STEADY)
    with job.client() as resize:
        for size in (1, 3):
            mark = len(job.reports)
            resize(size)
            wait_until_changed(job, size, STEADY, mark)
    mark = len(job.reports)
    os.kill(members(job.reports)[1].pid, signal.SIGKILL)
    wait_until_changed(job, 3, STEADY, mark)


def compare_digests(reports: Sequence[StepBegun], expected: Sequence[tuple[str, str]]) -> tuple[int, list[str]]:
    """Return how many digests were compared, and those that differ; buffers are compared on rank 0, as DDP has them."""
    compared, wrong = 0, []
    for each in reports:
        if not each.digest or not each.step or each.step > len(expected):
            continue
        compared += 1
        state, buffers = expected[each.step - 1]
        if each.digest != state or (each.rank == 0 and each.buffers != buffers):
            what = "state" if each.digest != state else "buffers"
            wrong.append(f"{what} after step {each.step} on rank {each.rank} of {each.size}")
    return compared, wrong


def judge_changes(
    found: Part, model: str, mode: str, reports: Sequence[StepBegun], expected: Sequence[tuple[str, str]], failure: str
) -> None:
    """Add the row and the verdict of one network."""
    compared, wrong = compare_digests(reports, expected)
    steps = len({each.step for each in reports if each.digest})
    sizes = [size for size, _ in itertools.groupby(each.size for each in sorted(reports, key=lambda each: each.step))]
    shown = (
        " ".join(map(str, dict.fromkeys(itertools.pairwise(sizes))))
        if len(sizes) > 12
        else " -> ".join(map(str, sizes))
    )
    ok = not failure and not wrong and compared > 0
    said = failure or (f"{len(wrong)} differ, first {wrong[0]}" if wrong else "equal")
    found.rows.append((f"{model} {mode}", str(steps), str(compared), shown, said[:80]))
    found.judge(
        ok,
        f"{model} {mode}: {compared} digests after {steps} steps through 2 -> 1 -> 3, kill -9 and a replacement: {said}",
    )
    found.cells.append({
        "model": model, "mode": mode, "steps": steps, "compared": compared, "different": wrong, "failure": failure,
        "last": expected[-1] if expected else None,
    })  # fmt: skip
    if failure:
        found.remarks.append(f"{model} {mode}: {failure}")
