"""`pliant bench gpu all`: the parts one after another within a time limit, each with a result file of its own as it ends.

Parts that measure time run alone. Those that only compare bits, or count bytes, run at the same time, as far as the device's
memory and the host's cores go. A part that ends early leaves its time to those after it.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, PliantError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench import gpu
from pliant_repro.bench.gpu import DevicePool, GpuOptions
from pliant_repro.contest import Progress


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
    """Run the parts, write the result of each into the folder when it ends, and return a summary of all.

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
        try:
            result = gpu.run(chosen, part_args, tell, pool)
        except (PliantError, OSError) as error:  # what is measured already is not to be lost
            result = contest.form("gpu", part_args, False, [f"{part}: {error}"], verdicts=[], took_s=0.0)
        results[part] = result
        save(result, folder / f"gpu_{part}.json")

    for number, phase in enumerate(phases):
        left_s = begun_s + options.limit_s - SPARE_S - time.monotonic()
        limit_s = limit_of(phases[number:], left_s)
        pool = DevicePool()
        with ThreadPoolExecutor(len(phase.parts)) as threads:
            for run in [threads.submit(run_part, part, limit_s, pool) for part in phase.parts]:
                run.result()
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
