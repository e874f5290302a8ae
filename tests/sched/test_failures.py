"""Failures of devices and nodes in the simulator: what they cost, by hand, and that no work is lost or done for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate import jobs_from

from pliant.errors import ConfigError, PliantError
from pliant.sched.cluster import Cluster, ScheduledJob, SteadyWork
from pliant.sched.failures import DevicesDown, FailureRates, Outage, Outages
from pliant.sched.planner import DeviceType, best_plan
from pliant.sched.policies import POLICIES, make_policy
from pliant.sched.simulate import Charges, Simulation, SimulationOutcome, summary

T4 = (DeviceType("t4", 1.0),)
"""One replica-step per second."""
LIVE, RESTART = Charges(start_s=30, change_s=1, resizes_live=True), Charges(start_s=30, change_s=30)


class Planned(Outages):
    """Failures at given times, each repaired 100 s later; the first device fails, or the first node."""

    def __init__(self, *times: float, node: int | None = None, every_s: float = 200.0) -> None:
        super().__init__(Cluster({"t4": 1}), FailureRates(checkpoint_s=every_s), 0)
        self._planned = sorted(
            (at_s + later, "t4", node, node is not None, later == 0, 0.0) for at_s in times for later in (0, 100)
        )

    @property
    def next_s(self) -> float:
        return self._planned[0][0] if self._planned else float("inf")

    def pop(self) -> Outage:
        return Outage(*self._planned.pop(0))


def simulate(
    policy: str, replicas: int, outages: Outages, charges: Charges, cluster: str = "t4=4", count: int = 1
) -> SimulationOutcome:
    jobs = [
        ScheduledJob(name=f"j{number}", submitted_s=0, replicas=replicas, types=T4, work=SteadyWork(1000))
        for number in range(count)
    ]
    return Simulation(
        jobs, Cluster.parse(cluster), make_policy(policy), charges=charges, outages=outages, keep_history=True
    ).run()


def test_a_gang_goes_back_to_its_checkpoint_and_waits_for_the_repair() -> None:
    outcome = simulate("yarn-cs-gang", 4, Planned(530.5), RESTART)
    # 30 s of start, 500.5 s of steps of 1 s, of which 400 are saved; 4 devices again at 630.5; start, 600 steps.
    [job] = outcome.jobs
    assert job.ended_s == pytest.approx(1260.5)
    assert (job.failures, job.lost_device_s) == (1, pytest.approx(4 * 100.5))
    numbers = summary(outcome)
    assert (numbers["failures"], numbers["interruptions"]) == (1, 1)
    assert numbers["lost_gpu_hours"] == pytest.approx(402 / 3600)


def test_a_live_job_loses_the_step_under_way() -> None:
    outcome = simulate("easyscale-homo", 4, Planned(531.5), LIVE)
    # 1 device from 60: 30 s of start, 7.5 steps; 2 from 120: a pause of 1 s, 29.5 steps; 4 from 180: at 531.5, 350.5.
    # Half a step is lost: 387 are done. 3 devices take 2 s a step: after the pause, 63.75 until 4 are there in the round
    # of 660. After a pause, 549.25 are left.
    [job] = outcome.jobs
    assert job.ended_s == pytest.approx(660 + 1 + 549.25)
    assert job.lost_device_s == pytest.approx(4 * 0.5)
    assert outcome.undone == {"j0": [(531.5, pytest.approx(0.5))]}
    assert [held for _, held in outcome.history["j0"]] == [{"t4": n} for n in (1, 2, 4, 3, 4)] + [{}]


def test_an_elastic_job_that_restarts_loses_what_it_has_not_saved() -> None:
    outcome = simulate("easyscale-homo", 4, Planned(531.5), RESTART)
    # It computes on 4 devices from 210 on: of 321.5 s, 200 are saved.
    assert outcome.jobs[0].lost_device_s == pytest.approx(4 * 121.5)
    assert outcome.undone == {"j0": [(531.5, pytest.approx(121.5))]}


@pytest.mark.parametrize(("node", "cluster"), [(None, "t4=1"), (0, "t4=1x1")])
def test_a_live_job_that_loses_all_devices_goes_back_too(node: int | None, cluster: str) -> None:
    outcome = simulate("easyscale-homo", 1, Planned(590.5, node=node), LIVE, cluster)
    # From the round of 60 on: 30 s of start, 500.5 s, of which 400 are saved; the round of 720, 30 s of start, 600 steps.
    assert outcome.jobs[0].ended_s == pytest.approx(720 + 30 + 600)
    assert outcome.jobs[0].lost_device_s == pytest.approx(100.5)


def test_a_node_takes_all_its_devices_along() -> None:
    # Two jobs on two nodes of two. Node 0 fails at 590.5, and is there again at 690.5.
    outcome = simulate("yarn-cs-gang", 2, Planned(590.5, node=0), RESTART, "t4=2x2", count=2)
    ends = {job.name: (job.ended_s, job.lost_device_s) for job in outcome.jobs}
    assert ends["j1"] == (1030, 0)
    # 560.5 s of steps of 1 s, 400 saved; from 690.5 on 30 s of start, and 600 steps.
    assert ends["j0"] == (pytest.approx(1320.5), pytest.approx(2 * 160.5))
    assert outcome.failures == 1


def test_a_free_device_that_fails_costs_nothing() -> None:
    outcome = simulate("yarn-cs-gang", 4, Planned(1, 2), RESTART, "t4=4", count=1)
    free = simulate("yarn-cs-gang", 1, Planned(100.0), RESTART, "t4=4", count=1)
    assert outcome.jobs[0].failures == 1  # the second one strikes when it waits
    assert (free.jobs[0].failures, free.jobs[0].ended_s) == (1, pytest.approx(100 + 30 + 1000))
    later = Planned(100.0)
    later._planned = [(100.0, "t4", None, False, True, 0.3), *later._planned[1:]]
    assert simulate("yarn-cs-gang", 1, later, RESTART).jobs[0].failures == 0


def test_a_simulation_that_only_fails_says_so() -> None:
    rates = FailureRates(devices_s={"t4": 100.0}, repair_s=0, checkpoint_s=3600.0)
    with pytest.raises(PliantError, match=r"no job has ended in 10,000 failures; raise --mtbf, or lower --checkpoint"):
        simulate("yarn-cs-gang", 8, Outages(Cluster({"t4": 8}), rates, 0), RESTART, "t4=8")


def test_failures_come_at_their_rate_and_do_not_depend_on_what_happens() -> None:
    cluster = Cluster.parse("t4=1000x2")
    rates = FailureRates(devices_s={"t4": 1e6}, nodes_s=1e5, repair_s=0)
    outages = Outages(cluster, rates, 3)
    found = [outages.pop() for _ in range(20_000)]
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    span_s = found[-1].at_s
    nodes = sum(each.begins for each in found if each.whole_node)
    devices = sum(each.begins for each in found if not each.whole_node)
    assert nodes == pytest.approx(1000 * span_s / 1e5, rel=0.05)
    assert devices == pytest.approx(2000 * span_s / 1e6, rel=0.1)
    again = Outages(cluster, rates, 3)
    assert [again.pop() for _ in range(100)] == found[:100]
    assert Outages(cluster, rates, 4).pop() != found[0]


def test_rates_are_read_from_text() -> None:
    cluster = Cluster.parse("v100=2x4,t4=1x4")
    rates = FailureRates.parse(["30d,10d/t4", "90d/node"], "2h", "0", cluster)
    day = 86400.0
    assert rates == FailureRates(
        devices_s={"v100": 30 * day, "t4": 10 * day}, nodes_s=90 * day, repair_s=7200, checkpoint_s=float("inf")
    )
    assert FailureRates.parse(["12h/t4"], "90s", "30m", cluster) == FailureRates(
        devices_s={"t4": day / 2}, repair_s=90, checkpoint_s=1800
    )
    for text in ("", "30d/", "/t4", "nan", "-1", "0", "5d/p100", "1d,2d"):
        with pytest.raises(ConfigError, match="--mtbf"):
            FailureRates.parse([text], "2h", "30m", cluster)


# --- laws ---


def free_devices_over_time(cluster: Cluster, outages: Outages, end_s: float) -> list[tuple[float, dict[str, int]]]:
    """Return (time, devices that are up from then on), counted anew."""
    down, found = DevicesDown(cluster), [(0.0, dict(cluster.counts))]
    while outages.next_s <= end_s:
        outage = outages.pop()
        down.apply(outage)
        found.append((outage.at_s, {kind: cluster.available(kind) for kind in cluster.counts}))
    return found


def check_never_more_than_up(outcome: SimulationOutcome, up: Sequence[tuple[float, dict[str, int]]]) -> None:
    moves: list[tuple[float, int, str, int]] = []
    for history in outcome.history.values():
        for (start, held), (end, _) in itertools.pairwise(history):
            moves += [(start, 2, kind, count) for kind, count in held.items()]
            moves += [(end, 0, kind, -count) for kind, count in held.items()]
    for (_, before), (at_s, after) in itertools.pairwise(up):
        moves += [(at_s, 1, kind, before[kind] - after[kind]) for kind in after]
    room = dict(up[0][1])
    for _, moment in itertools.groupby(sorted(moves), key=lambda move: move[0]):
        for _, _, kind, count in moment:
            room[kind] -= count
        assert min(room.values()) >= 0


@pytest.mark.parametrize("policy", POLICIES)
@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([30.0, 300.0, float("inf")]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_work_is_conserved(policy: str, seed: int, count: int, every_s: float, live: bool) -> None:
    text = "v100=2x2,p100=1x2,t4=1x2"
    rates = FailureRates(devices_s={"v100": 900.0, "p100": 900.0}, nodes_s=1500.0, repair_s=150.0, checkpoint_s=every_s)
    charges = LIVE if live else RESTART

    def run() -> SimulationOutcome:
        cluster = Cluster.parse(text)
        outages = Outages(cluster, rates, seed)
        return Simulation(
            jobs_from(seed, count), cluster, make_policy(policy), charges=charges, outages=outages, keep_history=True
        ).run()

    outcome = run()
    jobs = {job.name: job for job in jobs_from(seed, count)}
    assert sorted(ended.name for ended in outcome.jobs) == sorted(jobs)
    for ended in outcome.jobs:
        job, done, had = jobs[ended.name], 0.0, False
        undone = dict[float, float]()
        for at_s, steps in outcome.undone.get(ended.name, []):
            undone[at_s] = undone.get(at_s, 0.0) + steps
        longest_s = 0.0
        for (start, held), (end, after) in itertools.pairwise(outcome.history[ended.name]):
            plan = best_plan(job.replicas, job.types, tuple(held.get(kind.name, 0) for kind in job.types))
            if plan is not None:
                done += max(0.0, end - start - (charges.change_s if had else charges.start_s)) / plan.overload
                longest_s = max(longest_s, plan.overload)
            had = bool(held)
            if end in undone and live and after and make_policy(policy).elastic:
                assert undone[end] <= 1 + 1e-6  # the step under way
            elif end in undone:
                assert undone[end] <= every_s * 24 + 1e-6  # the fastest eight devices
        assert done == pytest.approx(job.work.steps_left() + sum(undone.values()), rel=1e-6), ended.name
        assert all(steps >= -1e-9 for steps in undone.values())
        assert ended.failures == len(outcome.undone.get(ended.name, []))
    fresh = Cluster.parse(text)
    end_s = max(job.ended_s for job in outcome.jobs)
    check_never_more_than_up(outcome, free_devices_over_time(fresh, Outages(fresh, rates, seed), end_s))
    assert run() == outcome
