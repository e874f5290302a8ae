"""`pliant bench gpu`: training on one GPU beside plain PyTorch and DDP, in parts that are run one by one, or all.

    step      one worker: N = 1 beside plain PyTorch, N = 4 beside bare gradient accumulation, and the price of determinism
    memory    peak memory of N = 1, 2, 4, 8, 16 replicas on one worker, beside bare accumulation
    bits      digests after every step: 1, 2 and 4 processes, two runs of each, beside DDP on gloo with tensors on the device
    changes   digests after every step of a job that goes through 2 -> 1 -> 3 workers, kill -9 and a replacement
    live      the longest gap between two commits around a shrink, a grow and a kill -9
    packed    2 and 4 processes on the device, beside DDP on gloo and, with its folder, version 0.1
    profile   where a step's time goes: kernels, what the device waits for, and the host's functions
    all       all parts but the last one, within a time limit

All contenders of a part are interleaved in one run, with the same deterministic kernels pinned. A part ends by itself: when
its time is nearly over, it holds no further rounds. A verdict that is null means that no time was left for it.

Workers are forked from one process that has imported torch, which is started once; version 0.1 has a process of its own.
With `all`, parts that measure time run alone. Those that only compare bits, or count bytes, run at the same time, as far as
the device's memory and the host's cores go. A part that ends early leaves its time to those after it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro import contest, forking
from pliant_repro.bench import gpu_bits, gpu_elastic, gpu_memory, gpu_profile, gpu_timing
from pliant_repro.bench.gpu_parts import DevicePool, GpuOptions, Part, describe_failure
from pliant_repro.contest import Progress
from pliant_repro.forking import ColdStarts

ALONE = ("step", "packed", "live", "profile")
"""Parts that run alone, because they measure time."""
GIVEN_THREADS = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")


def run(options: GpuOptions, args: Mapping[str, object], progress: Progress, pool: DevicePool | None = None) -> Json:
    """Run one part, and return the result in the one form. `pool` is what it shares with parts that run at the same time."""
    found, begun_s = Part(), time.monotonic()
    with _forks([options.part]) as cold:
        _measure(options, progress, pool or DevicePool(), found)
        return _result(found, args, cold, begun_s)


def _forks(parts: Sequence[str]) -> contextlib.AbstractContextManager[ColdStarts]:
    """Return a block in which the workers of these parts are forked, if they have some that can be."""
    if set(parts) <= {"live"}:  # `pliant run` starts its workers
        return contextlib.nullcontext(ColdStarts())
    return forking.warm_process(contest.clean_environ())


def _measure(options: GpuOptions, progress: Progress, pool: DevicePool, found: Part) -> None:
    """Run one part, and note in `found` what it finds, cell by cell."""
    parts: dict[str, Callable[[], None]] = {
        "step": lambda: gpu_timing.run_step(options, progress, found),
        "packed": lambda: gpu_timing.run_packed(options, progress, found),
        "profile": lambda: gpu_profile.run_profile(options, progress, found),
        "live": lambda: gpu_elastic.run_live(options, progress, found),
        "memory": lambda: gpu_memory.run_memory(options, progress, pool, found),
        "bits": lambda: gpu_bits.run_bits(options, progress, pool, found),
        "changes": lambda: gpu_elastic.run_changes(options, progress, pool, found),
    }
    # Each of many processes would start one per core. With 1 no process is started only to compile.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = GIVEN_THREADS or ("3" if options.part in ALONE else "1")
    parts[options.part]()


def _result(found: Part, args: Mapping[str, object], cold: ColdStarts, begun_s: float) -> Json:
    """Return what a part has found, so far or in all, in the one form."""
    ok = bool(found.verdicts) and all(holds for holds, _ in found.verdicts)
    return contest.form(
        "gpu",
        args,
        ok,
        [*found.remarks, *cold.reasons],
        command=shlex.join(["pliant", *sys.argv[1:]]),
        took_s=time.monotonic() - begun_s,
        device=dict(found.device),
        cells=found.cells,
        table={"columns": list(found.columns), "rows": [list(row) for row in found.rows]},
        verdicts=[{"ok": holds, "text": text} for holds, text in found.verdicts],
    )


# --- all parts ---


@dataclass(frozen=True, slots=True)
class Phase:
    """Parts that run at the same time."""

    parts: tuple[str, ...]

    @property
    def share(self) -> float:
        """How much of the time they get, relative to other phases."""
        return max(SHARES[part] for part in self.parts)


SHARES = {"step": 340, "packed": 220, "live": 300, "memory": 60, "bits": 540, "changes": 540}
"""Seconds that a part needs on an H200 with 16 cores, about."""
PHASES = (Phase(("step",)), Phase(("packed",)), Phase(("live",)), Phase(("memory", "bits", "changes")))
PARTS = tuple(part for phase in PHASES for part in phase.parts)
SPARE_S = 10.0
"""Time kept back for the end of processes, and for writing."""


def phases_of(parts: Sequence[str]) -> list[Phase]:
    """Return the phases of these parts, in their order.

    Raises:
        ConfigError: there is no such part.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--parts {part}: use some of {','.join(PARTS)}")
    chosen = [replace(phase, parts=tuple(part for part in phase.parts if part in parts)) for phase in PHASES]
    return [phase for phase in chosen if phase.parts]


def limit_of(phases: Sequence[Phase], left_s: float) -> float:
    """Return how long the first of these phases may take if so much time is left for all of them."""
    return max(1.0, left_s * phases[0].share / sum(phase.share for phase in phases))


def run_all(
    options: GpuOptions,
    parts: Sequence[str],
    folder: Path,
    args: Mapping[str, object],
    progress: Progress,
    save: Callable[[Json, Path], None],
) -> Json:
    """Run the parts, write the result of each into the folder, and return a summary of all.

    A result is written whenever a cell is done, and when the part ends. A part that fails keeps what it has measured, and
    the others go on.

    Args:
        options: the options of every part, except its name; `limit_s` is the time for all.
        save: writes a result to a file.
    """
    begun_s = time.monotonic()
    phases = phases_of(parts or PARTS)
    results: dict[str, Json] = {}

    def run_part(part: str, limit_s: float, pool: DevicePool) -> None:
        chosen = replace(options, part=part, limit_s=limit_s)
        tell = lambda what, fraction: progress(f"{part}: {what}", len(results) / len(PARTS))  # noqa: E731
        part_args = {**args, "part": part, "cells": chosen.cells, "limit": limit_s}
        found, part_begun_s = Part(), time.monotonic()
        found.keep = lambda: save(_result(found, part_args, cold, part_begun_s), folder / f"gpu_{part}.json")
        try:
            _measure(chosen, tell, pool, found)
        except Exception as error:
            found.judge(False, f"it failed: {describe_failure(error)}")
        results[part] = _result(found, part_args, cold, part_begun_s)
        found.keep()

    with _forks(parts or PARTS) as cold:
        for number, phase in enumerate(phases):
            left_s = begun_s + options.limit_s - SPARE_S - time.monotonic()
            limit_s = limit_of(phases[number:], left_s)
            pool = DevicePool()
            with ThreadPoolExecutor(len(phase.parts)) as threads:
                for running in [threads.submit(run_part, part, limit_s, pool) for part in phase.parts]:
                    running.result()
    progress("done", 1.0)
    return summary_of(results, args, time.monotonic() - begun_s)


def summary_of(results: Mapping[str, Json], args: Mapping[str, object], took_s: float) -> Json:
    """Return the verdicts of all parts in one result."""
    rows, verdicts, remarks = [], [], []
    for part, result in results.items():
        told = [{**verdict, "text": f"{part}: {verdict['text']}"} for verdict in cast("list[Json]", result["verdicts"])]
        verdicts += told
        counts = [sum(verdict["ok"] is value for verdict in told) for value in (True, False, None)]
        rows.append([part, f"{cast(float, result['took_s']):.0f}", *map(str, counts)])
        remarks += [f"{part}: {remark}" for remark in cast("list[str]", result["remarks"])]
    device = next((result["device"] for result in results.values() if result.get("device")), {})
    ok = bool(results) and all(bool(result["ok"]) for result in results.values())
    return contest.form(
        "gpu",
        args,
        ok,
        remarks,
        command=shlex.join(["pliant", *sys.argv[1:]]),
        took_s=took_s,
        device=device,
        table={"columns": ["part", "s", "hold", "do not hold", "not measured"], "rows": rows},
        verdicts=verdicts,
    )
