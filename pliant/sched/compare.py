"""Comparison of policies on one trace, in as many processes as there are cores, and its result in the form of all benches.

If jobs are elastic, a change of devices is charged in two ways: as a restart, and as the pause of a live resize.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pliant.errors import ConfigError
from pliant.machine import Json, machine
from pliant.sched import pollux
from pliant.sched.cluster import Cluster, Reservation, reserved_over_time
from pliant.sched.policies import make_policy, policy_class
from pliant.sched.simulate import Charges, EndedJob, Simulation, SimulationOutcome, in_use, job_rows, summary
from pliant.sched.tenants import OTHERS, Tenant, TenantShares, with_others
from pliant.sched.traces import Trace, jobs_of

RESTART_S = 30.0
"""Seconds of a restart in Pollux' simulator: a checkpoint, new processes, a first step."""
LIVE_PAUSE_S = 0.0212
"""Measured median pause of a job that grows from 2 to 4 workers (`pliant bench resize`, repro/results)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSetting:
    """Settings of a simulation that do not depend on the policy."""

    trace: Trace
    cluster: str
    profiles: str = ""
    """Folder of Pollux' step times; empty if there are none."""
    interval_s: float = 60.0
    restart_s: float = RESTART_S
    live_pause_s: float | None = LIVE_PAUSE_S
    """Pause of a live resize in seconds; None simulates restarts only."""
    seed: int = 0
    speeds: tuple[tuple[str, float], ...] = ()
    reservations: tuple[Reservation, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    """Who shares the cluster; none: policies see no tenants."""

    def __post_init__(self) -> None:
        for each in self.reservations:
            there = Cluster.parse(self.cluster).counts
            if each.devices > there.get(each.kind, 0):
                raise ConfigError(f"--reserve {each.kind}={each.devices}: the cluster has {there}")
        if self.trace.form == "pollux" and not self.profiles:
            raise ConfigError("a workload of Pollux needs its step times: give --profiles DIR, its folder of traces")

    def run(
        self, policy: str, *, live: bool, progress: Callable[[float], None] = lambda fraction: None
    ) -> SimulationOutcome:
        """Simulate one policy from the beginning."""
        cluster, chosen = Cluster.parse(self.cluster), make_policy(policy)
        profiles = pollux.load(Path(self.profiles)) if self.profiles else None
        jobs = jobs_of(self.trace.entries, cluster, seed=self.seed, speeds=dict(self.speeds), profiles=profiles)
        if chosen.adapts_batch:
            for job in jobs:
                pollux.make_adaptive(job)
        if self.tenants:
            chosen = TenantShares(chosen, self.tenants)
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
class PolicyRun:
    """One simulation: a policy, and how changes of devices are charged."""

    policy: str
    live: bool


def runs(policies: Sequence[str], setting: SimulationSetting) -> list[PolicyRun]:
    """Return every policy with restarts, and elastic policies also with live resizes."""
    listed = [PolicyRun(name, False) for name in policies]
    if setting.live_pause_s is not None:
        listed += [PolicyRun(name, True) for name in policies if policy_class(name).elastic]
    return listed


def compare(
    policies: Sequence[str],
    setting: SimulationSetting,
    *,
    processes: int = 0,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> Mapping[PolicyRun, SimulationOutcome]:
    """Simulate all policies; return the outcomes in the order of `runs`. `processes=0` uses one for each core."""
    todo = runs(policies, setting)
    processes = min(processes or len(os.sched_getaffinity(0)), len(todo))
    found: dict[PolicyRun, SimulationOutcome] = {}
    if processes <= 1:
        for number, run in enumerate(todo):
            progress(run.policy, number / len(todo))
            part = functools.partial(_report_part, progress, run.policy, number, len(todo))
            found[run] = setting.run(run.policy, live=run.live, progress=part)
        return found
    # Spawn: the caller may have threads, which do not survive a fork.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_simulate, setting, run): run for run in todo}
        for number, future in enumerate(as_completed(futures)):
            found[futures[future]] = future.result()
            progress(futures[future].policy, (number + 1) / len(todo))
    return {run: found[run] for run in todo}


def _report_part(progress: Callable[[str, float], None], policy: str, number: int, of: int, part: float) -> None:
    progress(policy, (number + part) / of)


def _simulate(setting: SimulationSetting, run: PolicyRun) -> SimulationOutcome:
    return setting.run(run.policy, live=run.live)


# --- result ---

MAX_ROWS = 2000
"""The result lists the jobs one by one if there are at most this many."""
BASELINES = ("yarn-cs", "yarn-cs-gang")
OURS = ("easyscale-heter", "easyscale-homo")
POLLUX_NOTES = (
    "a placement is its smallest rotation; measured ones are interpolated in the batch of a device, others linearly in "
    "(nodes, devices, batch) over Delaunay triangles, whose choice among equals follows the order of the points",
    "epochs end at whole seconds (half to even); a job whose end is rounded down to the second of a round "
    "still holds its devices in that round; the first round is one interval after the clock starts",
    "tiresias counts pauses as service, lets smaller jobs pass one that does not fit, and never promotes a job again",
    "optimus counts steps from the end of the present epoch, and predicts for packed nodes of four",
    "new devices come from the node with the most free ones, the first of equals; a job that keeps its number of devices keeps its nodes",
)
"""How details that the description of the published simulator leaves open were decided: as its program does."""

RESERVED_NOTE = (
    "reserved devices are free at the next round, except where a policy never takes devices back (yarn-cs, yarn-cs-gang): "
    "there they become free only when the jobs on them end"
)


def result(
    setting: SimulationSetting, outcomes: Mapping[PolicyRun, SimulationOutcome], args: Mapping[str, object]
) -> Json:
    """Return the figures of one trace under several policies as JSON."""
    policies: dict[str, Json] = {}
    for run, outcome in outcomes.items():
        numbers: Json = dict(summary(outcome))
        if setting.tenants:
            numbers["tenants"] = tenant_figures(outcome, setting.tenants)
        if run.live:
            policies[run.policy]["live_resize"] = numbers
            continue
        numbers["about"] = policy_class(run.policy).about
        numbers["allocated"] = [[round(time, 3), round(count, 3)] for time, count in in_use(outcome)]
        if len(outcome.jobs) <= MAX_ROWS:
            numbers["per_job"] = job_rows(outcome)
        policies[run.policy] = numbers
    name = next((each for each in OURS if each in policies), next(iter(policies)))
    ours = policies[name]
    return {
        "bench": "sim",
        "args": dict(args),
        "ours": {"policy": name, "median_s": ours["jct_median_s"], "iqr_s": None, "mean_s": ours["jct_mean_s"]},
        "peers": {each: _peer(numbers, ours) for each, numbers in policies.items() if each != name},
        "bound": None,
        "trace": {
            "format": setting.trace.form,
            "jobs": len(setting.trace.entries),
            "unused_rows": setting.trace.unused_rows,
            "skipped_rows": setting.trace.skipped_rows,
        },
        "policies": policies,
        "factors": factors(policies),
        "machine": machine(),
        "ok": True,
        "remarks": remarks(setting),
    }


def tenant_figures(outcome: SimulationOutcome, tenants: Sequence[Tenant]) -> Json:
    """Return the figures of each tenant that has had jobs."""
    found: dict[str, list[EndedJob]] = {each.name: [] for each in with_others(tenants)}
    for job in outcome.jobs:
        found.get(job.tenant, found[OTHERS]).append(job)
    total_s = math.fsum(job.device_s for job in outcome.jobs)
    return {
        name: {
            "jobs": len(jobs),
            "jct_mean_s": math.fsum(job.jct_s for job in jobs) / len(jobs),
            "waited_mean_s": math.fsum(job.started_s - job.submitted_s for job in jobs) / len(jobs),
            "gpu_hours": math.fsum(job.device_s for job in jobs) / 3600,
            "share": math.fsum(job.device_s for job in jobs) / total_s if total_s else 0.0,
        }
        for name, jobs in found.items()
        if jobs
    }


def _peer(numbers: Json, ours: Json) -> Json:
    return {
        "median_s": numbers["jct_median_s"],
        "iqr_s": None,
        "speedup": over(numbers, ours, "jct_mean_s"),
        "makespan_speedup": over(numbers, ours, "makespan_s"),
    }


def over(one: Json, other: Json, key: str) -> float | None:
    """Return the seconds of `one` over those of `other`; None if they are unknown or 0."""
    above, below = one[key], other[key]
    return above / below if isinstance(above, int | float) and isinstance(below, int | float) and below else None


def factors(policies: Mapping[str, Json]) -> Json:
    """Return by which factor each policy shortens the mean completion time and the makespan of each baseline."""
    return {
        f"{name} over {base}": {
            key: over(policies[base], policies[name], f"{key}_s") for key in ("jct_mean", "makespan")
        }
        for base in BASELINES
        for name in policies
        if base in policies and name not in BASELINES
    }


def remarks(setting: SimulationSetting) -> list[str]:
    notes: Sequence[str] = POLLUX_NOTES if setting.trace.form == "pollux" else ()
    charged = f"every start and every change of devices is charged {setting.restart_s:g} s"
    if setting.live_pause_s is not None:
        charged += f"; live_resize: a change of devices is charged the {setting.live_pause_s:g} s of a live resize"
    reserved = [RESERVED_NOTE] if setting.reservations else []
    most = max(Cluster.parse(setting.cluster).counts.values())
    if large := sum(entry.devices > most for entry in setting.trace.entries):
        reserved.append(
            f"{large} jobs ask for more devices than there are of any type ({most} at most): their replicas share devices"
        )
    return [charged, *reserved, *setting.trace.notes, *notes]
