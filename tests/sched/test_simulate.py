"""The simulator keeps its promises under every policy: nothing over-allocated, no work lost, every change charged."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import ConfigError, PliantError
from pliant.sched.cluster import (
    Changes,
    Cluster,
    ClusterJobs,
    Reservation,
    ScheduledJob,
    SchedulingPolicy,
    SteadyWork,
    reserved_over_time,
)
from pliant.sched.compare import PolicyRun, SimulationSetting, compare, result
from pliant.sched.planner import DeviceType, best_plan
from pliant.sched.policies import POLICIES, make_policy
from pliant.sched.simulate import Charges, Simulation, SimulationOutcome, in_use, summary
from pliant.sched.traces import Trace, TraceEntry, jobs_of, perturb

SPEEDS = {"v100": 3.0, "p100": 2.0, "t4": 1.0}
TYPES = tuple(DeviceType(name, speed) for name, speed in SPEEDS.items())
STEPS = 400.0


def jobs_from(seed: int, count: int, *, guarantees: bool = False) -> list[ScheduledJob]:
    chance = random.Random(seed)
    return [
        ScheduledJob(
            name=f"j{number}",
            submitted_s=round(chance.uniform(0, 2000), 1),
            replicas=chance.choice((1, 1, 2, 3, 4, 8)),
            types=TYPES,
            work=SteadyWork(chance.uniform(1, STEPS)),
            preferred=chance.choice(list(SPEEDS)),
            mixed=chance.random() < 0.6,
            min_devices=1 if guarantees and chance.random() < 0.3 else 0,
        )
        for number in range(count)
    ]


def run(
    policy: str, seed: int, count: int, cluster: dict[str, int], charges: Charges, **more: object
) -> SimulationOutcome:
    jobs = jobs_from(seed, count, guarantees=bool(more.pop("guarantees", False)))
    return Simulation(
        jobs, Cluster(dict(cluster)), make_policy(policy), charges=charges, keep_history=True, **more
    ).run()  # type: ignore[arg-type]


def check(outcome: SimulationOutcome, jobs: list[ScheduledJob], cluster: dict[str, int], charges: Charges) -> None:
    """From the history alone, without the simulator's own arithmetic."""
    by_name = {job.name: job for job in jobs}
    assert sorted(ended.name for ended in outcome.jobs) == sorted(by_name)
    moves: list[tuple[float, int, str, int]] = []
    for ended in outcome.jobs:
        job, steps, pauses, had = by_name[ended.name], 0.0, 0.0, False
        history = outcome.history[ended.name]
        assert history[-1] == (ended.ended_s, {})
        for (start, held), (end, _) in itertools.pairwise(history):
            assert start >= job.submitted_s
            if not held:
                had = False
                continue
            charged = charges.change_s if had else charges.start_s
            had = True
            pauses += min(charged, end - start)
            plan = best_plan(job.replicas, job.types, tuple(held.get(kind.name, 0) for kind in job.types))
            assert plan is not None
            steps += max(0.0, end - start - charged) / plan.overload
            moves += [(start, 1, kind, count) for kind, count in held.items()]
            moves += [(end, 0, kind, -count) for kind, count in held.items()]
        assert steps == pytest.approx(job.work.steps_left(), rel=1e-6), ended.name
        assert ended.paused_s == pytest.approx(pauses), ended.name
        assert ended.changes == sum(1 for _, held in history if held)
    used = dict.fromkeys(cluster, 0)
    for _, _, kind, change in sorted(moves):
        used[kind] += change
        assert used[kind] <= cluster[kind]
    assert not any(used.values())


clusters = st.fixed_dictionaries({"v100": st.integers(1, 6), "p100": st.integers(1, 4), "t4": st.integers(1, 4)})


@pytest.mark.parametrize("policy", POLICIES)
@given(st.integers(0, 10_000), st.integers(1, 14), clusters, st.sampled_from([(30.0, 30.0), (20.0, 0.1), (0.0, 0.0)]))
@settings(max_examples=15, deadline=None)
def test_nothing_is_over_allocated_lost_or_free(
    policy: str, seed: int, count: int, cluster: dict[str, int], seconds: tuple[float, float]
) -> None:
    charges = Charges(start_s=seconds[0], change_s=seconds[1])
    outcome = run(policy, seed, count, cluster, charges)
    check(outcome, jobs_from(seed, count), cluster, charges)
    again = run(policy, seed, count, cluster, charges)
    assert again == outcome


@pytest.mark.parametrize("policy", POLICIES)
@given(st.integers(0, 10_000), st.integers(2, 12))
@settings(max_examples=15, deadline=None)
def test_guarantees_and_reservations_keep_the_promises_too(policy: str, seed: int, count: int) -> None:
    cluster, charges = {"v100": 3, "p100": 2, "t4": 2}, Charges()
    reservations = [(300.0, {"v100": 2}), (900.0, {"v100": 3, "t4": 1}), (1500.0, {})]
    outcome = run(policy, seed, count, cluster, charges, guarantees=True, reservations=reservations)
    check(outcome, jobs_from(seed, count, guarantees=True), cluster, charges)
    if policy not in ("yarn-cs", "yarn-cs-gang"):  # these never take anything back
        assert used_at(outcome, 899)["v100"] <= 1
        assert used_at(outcome, 1499)["v100"] == 0
        assert used_at(outcome, 1499)["t4"] <= 1


def used_at(outcome: SimulationOutcome, time_s: float) -> Counter[str]:
    used: Counter[str] = Counter()
    for history in outcome.history.values():
        used.update(next((held for since_s, held in reversed(history) if since_s <= time_s), {}))
    return used


def test_a_reservation_is_free_at_the_next_round() -> None:
    cluster = Cluster({"v100": 4})
    job = ScheduledJob(name="a", submitted_s=0, replicas=4, types=TYPES[:1], work=SteadyWork(3000))
    outcome = Simulation(
        [job],
        cluster,
        make_policy("easyscale-heter"),
        reservations=[(300.0, {"v100": 3}), (900.0, {})],
        keep_history=True,
    ).run()
    assert outcome.history["a"][:4] == [(60, {"v100": 1}), (120, {"v100": 2}), (180, {"v100": 4}), (300, {"v100": 1})]
    assert (960, {"v100": 2}) in outcome.history["a"] or (900, {"v100": 2}) in outcome.history["a"]


def test_reservations_are_read_and_added_up() -> None:
    listed = [
        *Reservation.parse("v100=4,t4=1@3600-7200"),
        *Reservation.parse("v100=2@5000-"),
        *Reservation.parse("t4=1@0-3600"),
    ]
    assert listed[0] == Reservation("v100", 4, 3600, 7200)
    assert reserved_over_time(listed) == [
        (0, {"t4": 1}),
        (3600, {"v100": 4, "t4": 1}),
        (5000, {"v100": 6, "t4": 1}),
        (7200, {"v100": 2}),
    ]
    assert reserved_over_time([]) == []


@pytest.mark.parametrize(
    "text", ["", "v100", "v100=4", "v100=4@5", "v100=4@x-9", "v100=x@1-2", "=4@1-2", "v100=0@1-2", "v100=1@5-5", "v100=1@-1-5",
             "v100=1@nan-5", "v100=1@inf-", "v100=1@1-nan", "v100=1@-", "@1-2"],
)  # fmt: skip
def test_other_reservations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--reserve {text!r}: ".replace("(", r"\(")):
        Reservation.parse(text)


def test_idle_time_costs_nothing() -> None:
    jobs = [
        ScheduledJob(name=f"j{day}", submitted_s=day * 86400.0, replicas=2, types=TYPES[:1], work=SteadyWork(100))
        for day in range(50)
    ]
    outcome = Simulation(jobs, Cluster({"v100": 2}), make_policy("easyscale-homo")).run()
    assert outcome.rounds <= 5 * len(jobs)


def test_one_job_at_a_time_or_as_many_as_fit() -> None:
    def ends(policy: str) -> list[float]:
        jobs = [
            ScheduledJob(name=f"j{n}", submitted_s=0, replicas=2, types=TYPES[:1], work=SteadyWork(270))
            for n in range(2)
        ]
        return [job.ended_s for job in Simulation(jobs, Cluster({"v100": 4}), make_policy(policy)).run().jobs]

    assert ends("yarn-cs") == [180, 300]  # a round, 30 s of start, 90 s of work; the next round
    assert ends("yarn-cs-gang") == [120, 120]


def test_series_of_devices_in_use_has_the_same_area() -> None:
    outcome = run("easyscale-heter", 3, 12, {"v100": 3, "p100": 2, "t4": 2}, Charges())
    numbers, series = summary(outcome), in_use(outcome)
    ends = [start for start, _ in series[1:]] + [numbers["makespan_s"]]
    area = sum(mean * (end - start) for (start, mean), end in zip(series, ends, strict=True))
    assert area / 3600 == pytest.approx(numbers["gpu_hours"])


class Greedy(SchedulingPolicy):
    name, about = "greedy", "gives everybody everything"

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        return {job.name: {"v100": 4} for job in jobs.waiting()}


def test_a_policy_that_gives_too_much_is_found_out() -> None:
    jobs = [
        ScheduledJob(name=f"j{n}", submitted_s=0, replicas=4, types=TYPES[:1], work=SteadyWork(9)) for n in range(2)
    ]
    with pytest.raises(PliantError, match="gave 8 devices of type v100, of which there are 4"):
        Simulation(jobs, Cluster({"v100": 4}), Greedy()).run()


def test_jobs_that_can_never_run_are_named() -> None:
    job = ScheduledJob(name="a", submitted_s=0, replicas=1, types=TYPES, preferred="t4")
    with pytest.raises(ConfigError, match="a prefers 't4'"):
        Simulation([job], Cluster({"v100": 4}), make_policy("easyscale-heter"))


# --- several seeds ---

DAY = tuple(TraceEntry(f"j{n}", 60.0 * n, 1 + n % 4, 600.0 + 10 * n, application="bert") for n in range(40))


def test_perturbed_jobs_are_the_same_jobs_in_another_order() -> None:
    moved = perturb(DAY, 1)
    assert [entry.name for entry in moved] != [entry.name for entry in DAY]
    assert [entry.submitted_s for entry in moved] == sorted(entry.submitted_s for entry in moved)
    before = {entry.name: entry for entry in DAY}
    for entry in moved:  # the mean gap is 39/40 of a minute
        assert replace(entry, submitted_s=before[entry.name].submitted_s, slowness=1.0) == before[entry.name]
        assert entry.submitted_s >= 0
        assert abs(entry.submitted_s - before[entry.name].submitted_s) <= 585.0 + 1e-3
    assert perturb(DAY, 1) == moved != perturb(DAY, 2)


def test_a_slow_job_takes_longer_than_its_policy_knows() -> None:
    cluster = Cluster({"v100": 4})
    known, slow = (jobs_of([replace(DAY[0], slowness=slowness)], cluster)[0] for slowness in (1.0, 1.25))
    assert slow.work.steps_left() == pytest.approx(known.work.steps_left())
    took = [Simulation([job], Cluster({"v100": 4}), make_policy("yarn-cs")).run().jobs[0] for job in (known, slow)]
    # A round of 60 s, 30 s of start, and the work: 600 s, and a quarter more.
    assert [job.ended_s for job in took] == pytest.approx([690, 840])


def test_figures_of_seeds_are_medians_with_least_and_most() -> None:
    setting = SimulationSetting(trace=Trace("made", DAY), cluster="v100=4", seeds=3)
    results = compare(("yarn-cs", "easyscale-homo"), setting, processes=1)
    alone = compare(("yarn-cs",), replace(setting, seeds=1), processes=1)
    homo, fifo = PolicyRun("easyscale-homo", False), PolicyRun("yarn-cs", False)
    assert results[fifo].figures[0] == alone[fifo].figures[0] == summary(alone[fifo].first)
    told = result(setting, results, {})
    times = [each["jct_mean_s"] for each in results[homo].figures]
    numbers = told["policies"]["easyscale-homo"]  # type: ignore[index, call-overload]
    assert len(set(times)) == 3
    assert numbers["jct_mean_s"] == sorted(times)[1]
    assert numbers["spread"]["jct_mean_s"] == [min(times), max(times)]
    factors = told["factors"]["easyscale-homo over yarn-cs"]  # type: ignore[index, call-overload]
    ratios = [one["jct_mean_s"] / time for one, time in zip(results[fifo].figures, times, strict=True)]
    assert factors["of"] == "one job at a time"
    assert (factors["jct_mean"], factors["spread"]["jct_mean"]) == (sorted(ratios)[1], [min(ratios), max(ratios)])
    assert result(setting, compare(("yarn-cs", "easyscale-homo"), setting, processes=1), {}) == told


@pytest.mark.parametrize("seeds", [0, -1, 1001])
def test_numbers_of_seeds_are_checked(seeds: int) -> None:
    with pytest.raises(ConfigError, match=f"--seeds {seeds}: use 1 to 1,000"):
        SimulationSetting(trace=Trace("made", DAY), cluster="v100=4", seeds=seeds)


# --- a simulation that comes to a standstill ---


class Undecided(SchedulingPolicy):
    """Gives nothing to anybody, and wants to be asked again in the next round."""

    name = "undecided"
    about = "for tests"

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        return {}

    def wakes_s(self, jobs: ClusterJobs, now: float) -> float:
        return now


def one(**more: object) -> ScheduledJob:
    return ScheduledJob(**{"name": "a", "submitted_s": 10.0, "replicas": 2, "types": TYPES[:1], **more})  # type: ignore[arg-type]


@pytest.mark.timeout(10)
def test_a_simulation_in_which_nothing_can_happen_names_the_jobs_that_wait_and_why() -> None:
    jobs = [one(name=f"j{number}") for number in range(7)]
    with pytest.raises(PliantError) as ended:
        Simulation(jobs, Cluster({"v100": 4}), make_policy("yarn-cs-gang"), reservations=[(0.0, {"v100": 3})]).run()
    assert str(ended.value) == (
        "yarn-cs-gang: the simulation stands still at 10 s, nothing will happen any more. 7 jobs have not ended: "
        + "; ".join(f"j{n} (waits for 2 v100: there are 4, of which 3 are reserved and 1 are free)" for n in range(5))
        + "; and 2 more. Give the cluster more of these devices, or reserve fewer"
    )


@pytest.mark.timeout(10)
def test_rounds_without_end_and_work_without_end_are_told() -> None:
    with pytest.raises(PliantError, match=r"undecided: .* nothing has changed in 1000 rounds.*: a \(waits for 2 v100"):
        Simulation([one()], Cluster({"v100": 4}), Undecided()).run()
    with pytest.raises(PliantError, match=r"nothing will happen any more.*a \(has 2 v100, and its work has no end\)"):
        Simulation([one(work=SteadyWork(float("inf")))], Cluster({"v100": 4}), make_policy("yarn-cs-gang")).run()
    with pytest.raises(PliantError, match=r"nothing will happen any more.*its work has no end"):
        Simulation([one(work=SteadyWork(float("nan")))], Cluster({"v100": 4}), make_policy("yarn-cs-gang")).run()


@pytest.mark.timeout(10)
def test_a_clock_that_no_longer_moves_is_told() -> None:
    """So late, the next round begins at the same moment: a float has no room for the seconds between the two."""
    with pytest.raises(PliantError, match="time no longer moves. 1 jobs have not ended: a "):
        Simulation([one(submitted_s=1e20)], Cluster({"v100": 4}), Undecided()).run()


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1.0])
def test_jobs_are_submitted_at_a_time(at_s: float) -> None:
    with pytest.raises(ConfigError, match=f"job a is submitted at {at_s} s: use seconds from 0"):
        Simulation([one(submitted_s=at_s)], Cluster({"v100": 4}), make_policy("yarn-cs"))
