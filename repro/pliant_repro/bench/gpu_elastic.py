"""The parts of `pliant bench gpu` whose workers come and go: `live` measures how long a change is felt, `changes` the bits."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import cast

from pliant.errors import LaunchError
from pliant_repro.bench import commit_gaps
from pliant_repro.bench.commit_gaps import AFTER, Event
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, StepBegun, members
from pliant_repro.bench.gpu_bits import TAMPERED_STEP, why_no_evidence
from pliant_repro.bench.gpu_parts import (
    SEED,
    START_S,
    TURN_S,
    Clock,
    DevicePool,
    GpuOptions,
    Part,
    describe_failure,
    process_bytes,
    started,
    weights_of,
)
from pliant_repro.contest import Contender, Progress

CHANGE_S = 90.0
BIG, SMALL = 2, 1
"""Numbers of workers between which `live` changes."""
JOB_PROCESSES = 5
"""Processes of a job of `changes` at most, with the fixed one beside it."""
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
        "scaler": task.scaler, "join": task.join, "max_restarts": 100, "start_timeout_s": clock.bound(START_S),
        "change_timeout_s": clock.bound(CHANGE_S), **more,
    })  # fmt: skip


# --- live ---


def run_live(options: GpuOptions, progress: Progress, found: Part) -> None:
    """Shrink and grow a job and kill its workers, and measure the gaps between commits."""
    found.columns = ("network", *commit_gaps.COLUMNS)
    found.remarks.append(commit_gaps.REMARK)
    clock = Clock(options.limit_s, weights_of(options.cells))
    for model, mode in options.cells:
        end_s = clock.next_cell()
        events: list[Event] = []
        failure = ""
        with ElasticJob(elastic_options(options, model, mode, clock)) as job:
            try:
                change_repeatedly(job, events, options.num_rounds, end_s, progress, f"{model} {mode}")
            except LaunchError as error:
                failure = str(error)
            reports = list(job.reports)
        judge_live(found, model, mode, reports, events, options.device, is_late=clock.is_over)
        if failure:
            found.remarks.append(f"{model} {mode}: {failure}")
            found.judge(None if clock.is_over else False, f"{model} {mode}: {failure}")
        found.keep()


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
    found: Part,
    model: str,
    mode: str,
    reports: Sequence[StepBegun],
    events: Sequence[Event],
    device: str,
    *,
    is_late: bool = False,
) -> None:
    """Add the rows and verdicts of one network."""
    name = f"{model} {mode}"
    commits = commit_gaps.commit_times(reports)
    felt = commit_gaps.measure_changes(reports, events, commit_gaps.EXTRA_S[device])
    told = commit_gaps.judge(felt, ("shrink", "grow", "kill", "replacement"), name, is_late=is_late)
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


def run_changes(options: GpuOptions, progress: Progress, pool: DevicePool, found: Part) -> None:
    """Compare the digests of jobs that go through changes with those of fixed ones, after every step."""
    found.columns = ("network", "steps", "digests", "sizes", "result")
    cells = options.cells
    clock = Clock(options.limit_s)
    control = cells[-1] if len(cells) == 1 else next((cell for cell in cells if cell[0].startswith("lstm")), cells[0])
    done: list[tuple[str, str]] = []

    def compare(cell: tuple[str, str]) -> Compared:
        with pool.lend(process_bytes(cell[0], options), JOB_PROCESSES + (cell == control), clock.left_s - 30) as got:
            if not got:
                return Compared(failure="no time was left", is_late=True)
            try:
                compared = compare_changes(options, *cell, clock, with_control=cell == control)
            except Exception as error:  # of this thread; the other cells go on
                compared = Compared(failure=describe_failure(error))
        compared.is_late = bool(compared.failure) and clock.is_over
        done.append(cell)
        progress(f"changes: {cell[0]} {cell[1]}", len(done) / len(cells))
        return compared

    with ThreadPoolExecutor(len(cells)) as threads:
        for (model, mode), compared in zip(cells, threads.map(compare, cells), strict=True):
            judge_changes(found, model, mode, compared)
            found.keep()


Digests = list[tuple[str, str]]
"""Digests of a fixed job after every step: of parameters and optimizer, and of the buffers."""


@dataclass(slots=True)
class Compared:
    """A job that went through changes, and what it is compared with."""

    reports: list[StepBegun] = field(default_factory=list)
    expected: Digests = field(default_factory=list)
    """Digests of the fixed job."""
    control: Digests | None = None
    """Digests of a fixed job of which one bit was flipped; None if there was no such job."""
    failure: str = ""
    is_late: bool = False
    """Whether it failed because the time of the part was over."""


def compare_changes(options: GpuOptions, model: str, mode: str, clock: Clock, *, with_control: bool) -> Compared:
    """Run a job through changes and a fixed one beside it, and one more of which a bit is flipped if it is to be a control."""
    chosen = elastic_options(options, model, mode, clock, digests=True, seed=SEED, least_step_s=PACE_S[options.device])
    task = options.task(model, mode, replicas=options.replicas, seed=SEED)
    tasks = {"fixed": task, **({"control": replace(task, tamper=TAMPERED_STEP)} if with_control else {})}
    last = math.inf  # until it is known how many steps the job has done
    found = Compared()

    def train_fixed(contender: Contender) -> Digests:
        digests: Digests = []
        while len(digests) < last:
            answer = contender.ask({"do": "digests", "iterations": FIXED_STEPS}, clock.bound(TURN_S))[0]
            if why := why_no_evidence(answer):
                raise LaunchError(why)
            states, buffers = (cast("list[str]", answer[key]) for key in ("states", "buffers"))
            digests += zip(states, buffers, strict=True)
        return digests

    def train_control(contender: Contender) -> Digests:
        answer = contender.ask({"do": "digests", "iterations": TAMPERED_STEP + 1}, clock.bound(TURN_S))[0]
        return list(zip(*(cast("list[str]", answer[key]) for key in ("states", "buffers")), strict=True))

    with started(tasks, lambda what, fraction: None, clock) as contenders, ThreadPoolExecutor(2) as threads:
        fixed = threads.submit(train_fixed, contenders["fixed"])
        control = threads.submit(train_control, contenders["control"]) if with_control else None
        try:
            with ElasticJob(chosen) as job:
                try:
                    go_through_changes(job)
                except LaunchError as error:
                    found.failure = str(error)
        finally:
            found.reports = list(job.reports)
            last = max((each.step for each in found.reports), default=0)
        try:
            found.expected = fixed.result()
            found.control = control.result() if control is not None else None
        except LaunchError as error:
            found.failure = found.failure or str(error)
    return found


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


@dataclass(frozen=True, slots=True)
class Difference:
    """A digest that is not what it is to be."""

    step: int
    text: str


def compare_digests(reports: Sequence[StepBegun], expected: Digests) -> tuple[int, list[Difference]]:
    """Return how many digests were compared, and those that differ; buffers are compared on rank 0, as DDP has them.

    What a worker has reported after steps that it then took back does not count, as happens with sync="priority".
    """
    compared, wrong = 0, list[Difference]()
    counted: list[StepBegun] = []
    least: dict[int, int] = {}
    for each in reversed(reports):
        if each.step <= least.setdefault(each.pid, each.step):
            least[each.pid] = each.step
            counted.append(each)
    for each in reversed(counted):
        if not each.digest or not each.step or each.step > len(expected):
            continue
        compared += 1
        state, buffers = expected[each.step - 1]
        if each.digest != state or (each.rank == 0 and each.buffers != buffers):
            what = "state" if each.digest != state else "buffers"
            wrong.append(Difference(each.step, f"{what} after step {each.step} on rank {each.rank} of {each.size}"))
    return compared, wrong


def judge_changes(found: Part, model: str, mode: str, compared: Compared) -> None:
    """Add the row and the verdicts of one network."""
    reports, failure = compared.reports, compared.failure
    count, wrong = compare_digests(reports, compared.expected)
    steps = len({each.step for each in reports if each.digest})
    sizes = [size for size, _ in itertools.groupby(each.size for each in sorted(reports, key=lambda each: each.step))]
    shown = (
        " ".join(map(str, dict.fromkeys(itertools.pairwise(sizes))))
        if len(sizes) > 12
        else " -> ".join(map(str, sizes))
    )
    ok = None if compared.is_late and not wrong else not failure and not wrong and count > 0
    said = failure or (f"{len(wrong)} differ, first {wrong[0].text}" if wrong else "equal")
    found.rows.append((f"{model} {mode}", str(steps), str(count), shown, said[:80]))
    found.judge(
        ok,
        f"{model} {mode}: {count} digests after {steps} steps through 2 -> 1 -> 3, kill -9 and a replacement: {said}",
    )
    found.cells.append({
        "model": model, "mode": mode, "steps": steps, "compared": count, "different": [each.text for each in wrong], "failure": failure,
        "last": compared.expected[-1] if compared.expected else None,
    })  # fmt: skip
    if compared.control is not None:
        unlike = [each.step for each in compare_digests(reports, compared.control)[1]]
        shown = f"from step {min(unlike)} on" if unlike else "no difference"
        text = f"{model} {mode}, control: a bit flipped after step {TAMPERED_STEP} shows {shown}"
        found.judge(bool(unlike) and min(unlike) == TAMPERED_STEP, text)
    if failure:
        found.remarks.append(f"{model} {mode}: {failure}")
