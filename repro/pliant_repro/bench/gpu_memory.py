"""The part `memory` of `pliant bench gpu`: peak memory of more and more replicas in one worker, beside bare accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

from pliant.machine import Json
from pliant_repro.bench.gpu_parts import (
    Clock,
    DevicePool,
    GpuOptions,
    Part,
    ask_all,
    describe_failure,
    device_of,
    process_bytes,
    started,
)
from pliant_repro.bench.train import TrainingTask
from pliant_repro.contest import Progress

REPLICA_COUNTS = (1, 2, 4, 8, 16)
SIDES = ("plain", "pliant", "host")
"""Bare accumulation, ours, and ours with `gradients="host"`."""
SLACK_BYTES = 32 << 20
"""Peak memory may be above its limit by this much: the allocator rounds, and the order of frees varies."""


def run_memory(options: GpuOptions, progress: Progress, pool: DevicePool, found: Part) -> None:
    """Measure the peak memory of one worker with more and more replicas; each is a process of its own."""
    found.columns = ("network", "N", "bare MB", "ours MB", "limit MB", "gradients=host MB")
    clock = Clock(options.limit_s)
    wanted = [(*cell, side, count) for cell in options.cells for count in REPLICA_COUNTS for side in SIDES]

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

    def try_to_measure(item: tuple[str, str, str, int]) -> tuple[Json | None, str]:
        try:
            return measure(*item)
        except Exception as error:  # of this thread; the others go on
            return None, describe_failure(error)

    progress("memory", 0.0)
    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = dict(zip(wanted, threads.map(try_to_measure, wanted), strict=True))
    for model, mode in options.cells:
        peaks = {key[2:]: answer for key, (answer, _) in answers.items() if key[:2] == (model, mode) and answer}
        judge_memory(found, model, mode, peaks, is_late=clock.is_over)
    found.remarks += [failure for _, failure in answers.values() if failure]


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
        bare, ours, host = (peak(side, count) for side in SIDES)
        most = None
        if bare is not None:
            most = memory_limit(bare, cast(int, peaks["plain", count]["gradient_bytes"]), count)
        found.rows.append((f"{model} {mode}", str(count), show(bare), show(ours), show(most), show(host)))
        found.cells.append({
            "model": model, "mode": mode, "replicas": count, "bare_bytes": bare, "ours_bytes": ours,
            "limit_bytes": most, "host_bytes": host, "answers": {side: peaks.get((side, count)) for side in SIDES},
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
