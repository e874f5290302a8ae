"""The parts of `pliant bench gpu` whose workers come and go: `live` measures how long a change is felt, `changes` the bits."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from pliant.errors import LaunchError
from pliant_repro.bench import commit_gaps
from pliant_repro.bench.commit_gaps import AFTER, Event
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, StepBegun, members
from pliant_repro.bench.gpu import SEED, START_S, TURN_S, Clock, GpuOptions, Part, in_batches, process_bytes, started
from pliant_repro.contest import Contender, Progress

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


# --- live ---


def run_live(options: GpuOptions, progress: Progress) -> Part:
    """Shrink and grow a job and kill its workers, and measure the gaps between commits."""
    found = Part(columns=("network", *commit_gaps.COLUMNS), remarks=[commit_gaps.REMARK])
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
    name = f"{model} {mode}"
    commits = commit_gaps.commit_times(reports)
    felt = commit_gaps.measure_changes(reports, events, commit_gaps.EXTRA_S[device])
    told = commit_gaps.judge(felt, ("shrink", "grow", "kill", "replacement"), name)
    found.rows += [(name, *row) for row in told.rows]
    found.verdicts += told.verdicts
    sizes = {str(size): median_s for size, median_s in commit_gaps.median_steps(reports, commits).items()}
    listed = ", ".join(f"{median_s * 1e3:.1f} ms on {size}" for size, median_s in sizes.items())
    found.remarks.append(f"{name}: median step {listed}")
    found.cells.append({
        "model": model, "mode": mode, "median_step_s": sizes, "slow_share": commit_gaps.slow_share(reports),
        "changes": told.numbers, "events": [[event.kind, event.at_s, event.until_s] for event in events],
        "commits_s": sorted(commits.items()),
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
