"""One trace under several policies, in as many processes as there are cores, each policy with all charges that matter.

Where jobs are elastic, a change of devices is charged twice over: as a restart, and as the pause of a live resize.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pliant.errors import ConfigError
from pliant.sched import pollux
from pliant.sched.machines import Cluster, Reservation, reserved_over_time
from pliant.sched.schedulers import registry as schedulers
from pliant.sched.simulate import Charges, Outcome, Simulation
from pliant.sched.traces import Trace
from pliant.sched.workloads import jobs_of

RESTART_S = 30.0
"""Of Pollux' simulator; a checkpoint, new processes, a first step."""
LIVE_PAUSE_S = 0.0212
"""As measured: the median pause of a job that grows from 2 to 4 workers (`pliant bench resize`, benchmarks/results)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is simulated, whatever the policy."""

    trace: Trace
    cluster: str
    profiles: str = ""
    """Folder of Pollux' step times; empty: none."""
    interval_s: float = 60.0
    restart_s: float = RESTART_S
    live_pause_s: float | None = LIVE_PAUSE_S
    """None: only restarts."""
    seed: int = 0
    speeds: tuple[tuple[str, float], ...] = ()
    reservations: tuple[Reservation, ...] = ()

    def __post_init__(self) -> None:
        for each in self.reservations:
            there = Cluster.parse(self.cluster).counts
            if each.devices > there.get(each.kind, 0):
                raise ConfigError(f"--reserve {each.kind}={each.devices}: the cluster has {there}")
        if self.trace.form == "pollux" and not self.profiles:
            raise ConfigError("a workload of Pollux needs its step times: give --profiles DIR, its folder of traces")

    def run(self, policy: str, *, live: bool, progress: Callable[[float], None] = lambda fraction: None) -> Outcome:
        """One policy, from the beginning."""
        cluster, chosen = Cluster.parse(self.cluster), schedulers.make(policy)
        profiles = pollux.load(Path(self.profiles)) if self.profiles else None
        jobs = jobs_of(self.trace.entries, cluster, seed=self.seed, speeds=dict(self.speeds), profiles=profiles)
        if chosen.adapts_batch:
            for job in jobs:
                pollux.adaptive(job)
        change_s = self.live_pause_s if live and self.live_pause_s is not None else self.restart_s
        charges = Charges(start_s=self.restart_s, change_s=change_s)
        return Simulation(
            jobs,
            cluster,
            chosen,
            interval_s=self.interval_s,
            charges=charges,
            reservations=reserved_over_time(self.reservations),
            progress=progress,
        ).run()


@dataclass(frozen=True, slots=True)
class Run:
    """What to simulate: one policy with one way to charge changes."""

    policy: str
    live: bool


def runs(policies: Sequence[str], setting: Setting) -> list[Run]:
    """Every policy with restarts, and elastic ones with live resizes, too."""
    listed = [Run(name, False) for name in policies]
    if setting.live_pause_s is not None:
        listed += [Run(name, True) for name in policies if schedulers.POLICIES[name].elastic]
    return listed


def compare(
    policies: Sequence[str],
    setting: Setting,
    *,
    processes: int = 0,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> Mapping[Run, Outcome]:
    """All runs, in their order. `processes` 0: one for each core."""
    todo = runs(policies, setting)
    processes = min(processes or len(os.sched_getaffinity(0)), len(todo))
    found: dict[Run, Outcome] = {}
    if processes <= 1:
        for number, run in enumerate(todo):
            progress(run.policy, number / len(todo))
            part = functools.partial(_told, progress, run.policy, number, len(todo))
            found[run] = setting.run(run.policy, live=run.live, progress=part)
        return found
    # Fresh processes: the caller may have threads, which a fork would freeze.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_one, setting, run): run for run in todo}
        for number, future in enumerate(as_completed(futures)):
            found[futures[future]] = future.result()
            progress(futures[future].policy, (number + 1) / len(todo))
    return {run: found[run] for run in todo}


def _told(progress: Callable[[str, float], None], policy: str, number: int, of: int, part: float) -> None:
    progress(policy, (number + part) / of)


def _one(setting: Setting, run: Run) -> Outcome:
    return setting.run(run.policy, live=run.live)
