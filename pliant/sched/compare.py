"""Comparison of policies on one trace, in as many processes as there are cores, and its result in the form of all benches.

If jobs are elastic, a change of devices is charged in two ways: as a restart, and as the pause of a live resize.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.duration import format_duration
from pliant.errors import ConfigError
from pliant.machine import Json, machine
from pliant.sched import pollux
from pliant.sched.cluster import Cluster, Reservation, reserved_over_time
from pliant.sched.failures import FailureRates, Outages
from pliant.sched.policies import make_policy, policy_class
from pliant.sched.processes import call_in_processes
from pliant.sched.simulate import Charges, EndedJob, Simulation, SimulationOutcome, in_use, job_rows, quantile, summary
from pliant.sched.tenants import OTHERS, Tenant, TenantShares, with_others
from pliant.sched.traces import ESTIMATE_ERROR, JITTER_GAPS, Trace, jobs_of, perturb

Simulated = tuple[SimulationOutcome | None, dict[str, float | int]]
"""Outcome and figures of one simulation."""
MAX_SEEDS = 1000
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
    seeds: int = 1
    """Number of simulations of each policy: of the trace as it is, then of perturbed ones."""
    speeds: tuple[tuple[str, float], ...] = ()
    reservations: tuple[Reservation, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    """Who shares the cluster; none: policies see no tenants."""
    failures: FailureRates | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"--seeds {self.seeds}: use 1 to {MAX_SEEDS:,}; 1 simulates the trace as it is")
        for each in self.reservations:
            there = Cluster.parse(self.cluster).counts
            if each.devices > there.get(each.kind, 0):
                raise ConfigError(f"--reserve {each.kind}={each.devices}: the cluster has {there}")
        if self.trace.form == "pollux" and not self.profiles:
            raise ConfigError("a workload of Pollux needs its step times: give --profiles DIR, its folder of traces")

    def run(
        self, policy: str, *, live: bool, sample: int = 0, progress: Callable[[float], None] = lambda fraction: None
    ) -> SimulationOutcome:
        """Simulate one policy from the beginning: on the trace as it is, or on a perturbed one if `sample` is not 0."""
        cluster, chosen = Cluster.parse(self.cluster), make_policy(policy)
        profiles = pollux.load(Path(self.profiles)) if self.profiles else None
        seed = self.seed + sample
        entries = perturb(self.trace.entries, seed) if sample else self.trace.entries
        jobs = jobs_of(entries, cluster, seed=seed, speeds=dict(self.speeds), profiles=profiles)
        if chosen.adapts_batch:
            for job in jobs:
                pollux.make_adaptive(job)
        if self.tenants:
            chosen = TenantShares(chosen, self.tenants)
        charges = Charges(start_s=self.restart_s, change_s=self.restart_s)
        if live and self.live_pause_s is not None:
            charges = Charges(start_s=self.restart_s, change_s=self.live_pause_s, resizes_live=True)
        return Simulation(
            jobs,
            cluster,
            chosen,
            interval_s=self.interval_s,
            charges=charges,
            reservations=reserved_over_time(self.reservations),
            outages=Outages(cluster, self.failures, seed) if self.failures else None,
            progress=progress,
        ).run()


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One simulation: a policy, and how changes of devices are charged."""

    policy: str
    live: bool


@dataclass(slots=True)
class PolicyResult:
    """What the simulations of one policy gave."""

    first: SimulationOutcome
    """That of the trace as it is."""
    figures: list[dict[str, float | int]] = field(default_factory=list)
    """Figures of the trace as it is, then of each perturbed one."""


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
) -> Mapping[PolicyRun, PolicyResult]:
    """Simulate all policies; return the results in the order of `runs`. `processes=0` uses one for each core."""
    todo = [(run, sample) for run in runs(policies, setting) for sample in range(setting.seeds)]
    processes = min(processes or len(os.sched_getaffinity(0)), len(todo))
    found: dict[tuple[PolicyRun, int], Simulated] = {}
    if processes <= 1:
        for number, (run, sample) in enumerate(todo):
            progress(run.policy, number / len(todo))
            part = functools.partial(_report_part, progress, run.policy, number, len(todo))
            found[run, sample] = _simulate(setting, run, sample, part)
    else:
        calls = call_in_processes(functools.partial(_simulate_one, setting), todo, processes)
        with contextlib.closing(calls):
            for number, ((run, sample), simulated) in enumerate(calls):
                found[run, sample] = simulated
                progress(run.policy, (number + 1) / len(todo))
    results: dict[PolicyRun, PolicyResult] = {}
    for run, sample in todo:
        outcome, figures = found[run, sample]
        if outcome is not None:
            results[run] = PolicyResult(outcome)
        results[run].figures.append(figures)
    return results


def _report_part(progress: Callable[[str, float], None], policy: str, number: int, of: int, part: float) -> None:
    progress(policy, (number + part) / of)


def _simulate_one(setting: SimulationSetting, which: tuple[PolicyRun, int]) -> Simulated:
    return _simulate(setting, *which)


def _simulate(
    setting: SimulationSetting,
    run: PolicyRun,
    sample: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Simulated:
    """Return one simulation; its outcome only if the trace is as it is: others would fill the memory."""
    outcome = setting.run(run.policy, live=run.live, sample=sample, progress=progress)
    return None if sample else outcome, summary(outcome)


# --- result ---

MAX_ROWS = 2000
"""The result lists the jobs one by one if there are at most this many."""
BASELINES = {"yarn-cs": "one job at a time", "yarn-cs-gang": "a FIFO of gangs"}
"""What the others are compared with, and what that is."""
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


def result(setting: SimulationSetting, results: Mapping[PolicyRun, PolicyResult], args: Mapping[str, object]) -> Json:
    """Return the figures of one trace under several policies as JSON: medians of all seeds, with their spread."""
    policies: dict[str, Json] = {}
    for run, found in results.items():
        numbers = medians(found.figures)
        outcome = found.first
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
        "seeds": setting.seeds,
        "ours": {
            "policy": name,
            "median_s": ours["jct_median_s"],
            "iqr_s": _iqr_s(results, name),
            "mean_s": ours["jct_mean_s"],
        },
        "peers": {
            each: {**_peer(numbers, ours), "iqr_s": _iqr_s(results, each)}
            for each, numbers in policies.items()
            if each != name
        },
        "bound": None,
        "trace": {
            "format": setting.trace.form,
            "jobs": len(setting.trace.entries),
            "unused_rows": setting.trace.unused_rows,
            "skipped_rows": setting.trace.skipped_rows,
        },
        "policies": policies,
        "factors": factors(results),
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
        "speedup": over(numbers, ours, "jct_mean_s"),
        "makespan_speedup": over(numbers, ours, "makespan_s"),
    }


def medians(figures: Sequence[Mapping[str, float | int]]) -> Json:
    """Return the median of each figure over all seeds; if there are several, with least and most as `spread`."""
    numbers: Json = {}
    for key in figures[0]:
        values = sorted(each[key] for each in figures)
        numbers[key] = quantile(values, 0.5) if len(values) > 1 else values[0]
    if len(figures) > 1:
        numbers["spread"] = {
            key: [min(each[key] for each in figures), max(each[key] for each in figures)] for key in figures[0]
        }
    return numbers


def _iqr_s(results: Mapping[PolicyRun, PolicyResult], policy: str) -> float | None:
    """Return the range between the quartiles of the median completion time over the seeds; None for one seed."""
    values = sorted(each["jct_median_s"] for each in results[PolicyRun(policy, False)].figures)
    return quantile(values, 0.75) - quantile(values, 0.25) if len(values) > 1 else None


def over(one: Mapping[str, object], other: Mapping[str, object], key: str) -> float | None:
    """Return the seconds of `one` over those of `other`; None if they are unknown or 0."""
    above, below = one[key], other[key]
    return above / below if isinstance(above, int | float) and isinstance(below, int | float) and below else None


def factors(results: Mapping[PolicyRun, PolicyResult]) -> Json:
    """Return by which factor each policy shortens the mean completion time and the makespan of each baseline.

    A live resize is compared with restarts, too. Both sides of a factor have the same seed.
    """
    found: Json = {}
    for base, words in BASELINES.items():
        for run in results:
            if PolicyRun(base, False) in results and run.policy not in BASELINES and not run.live:
                found[f"{run.policy} over {base}"] = _factor(results[PolicyRun(base, False)], results[run], words)
    for run in results:
        if run.live:
            restarts = results[PolicyRun(run.policy, False)]
            found[f"{run.policy}, live resize, over restarts"] = _factor(restarts, results[run], "its restarts")
    return found


def _factor(base: PolicyResult, other: PolicyResult, words: str) -> Json:
    found: Json = {"of": words}
    spread: dict[str, list[float]] = {}
    for key in ("jct_mean", "makespan"):
        pairs = zip(base.figures, other.figures, strict=True)
        values = [value for one, two in pairs if (value := over(one, two, f"{key}_s")) is not None]
        found[key] = quantile(sorted(values), 0.5) if values else None
        if len(values) > 1:
            spread[key] = [min(values), max(values)]
    return {**found, "spread": spread} if spread else found


def remarks(setting: SimulationSetting) -> list[str]:
    notes: Sequence[str] = POLLUX_NOTES if setting.trace.form == "pollux" else ()
    charged = f"every start and every change of devices is charged {setting.restart_s:g} s"
    if setting.live_pause_s is not None:
        charged += f"; live_resize: a change of devices is charged the {setting.live_pause_s:g} s of a live resize"
    if setting.seeds > 1:
        charged += (
            f"; medians of {setting.seeds} seeds: the trace as it is, then perturbed ones, in which each job comes up to "
            f"{JITTER_GAPS:g} mean gaps earlier or later, and takes exp(N(0, {ESTIMATE_ERROR:g})) times as long as estimated"
        )
    if rates := setting.failures:
        parts = [f"{kind} every {format_duration(mean_s)}" for kind, mean_s in rates.devices_s.items()]
        parts += [f"a node every {format_duration(rates.nodes_s)}"] if rates.nodes_s < math.inf else []
        saved = "has" if rates.checkpoint_s == math.inf else f"has one every {format_duration(rates.checkpoint_s)} and"
        charged += (
            f"; failures in the mean of {', '.join(parts)}, repaired in {format_duration(rates.repair_s)}: an elastic job with "
            f"live resizes does a step again, any other job restarts from its checkpoint: it {saved} one at each change of its devices"
        )
    reserved = [RESERVED_NOTE] if setting.reservations else []
    most = max(Cluster.parse(setting.cluster).counts.values())
    if large := sum(entry.devices > most for entry in setting.trace.entries):
        reserved.append(
            f"{large} jobs ask for more devices than there are of any type ({most} at most): their replicas share devices"
        )
    return [charged, *reserved, *setting.trace.notes, *notes]
