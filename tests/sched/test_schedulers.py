"""Who gets which devices: small clusters, decided by hand."""

from __future__ import annotations

import pytest

from pliant.errors import ConfigError
from pliant.sched.cluster import Cluster, ClusterNode, DevicePlacer, ScheduledJob, SteadyWork
from pliant.sched.planner import DeviceType, devices_to_keep
from pliant.sched.policies import POLICIES, make_policy, parse_policies

V, T = DeviceType("v100", 3.0), DeviceType("t4", 1.0)


def job(name: str, replicas: int = 4, *, at: float = 0.0, steps: float = 1000.0, **more: object) -> ScheduledJob:
    values: dict[str, object] = {"types": (V, T), "work": SteadyWork(steps), **more}
    return ScheduledJob(name=name, submitted_s=at, replicas=replicas, **values)  # type: ignore[arg-type]


def decide(policy: str, jobs: list[ScheduledJob], cluster: Cluster, now: float = 0.0) -> dict[str, dict[str, int]]:
    chosen = make_policy(policy)
    return chosen.allocate(chosen.jobs(jobs), cluster, now)


def test_who_has_none_gets_the_smallest_in_order_of_submission() -> None:
    jobs = [job("late", at=2), job("early", at=1)]
    assert decide("easyscale-heter", jobs, Cluster({"v100": 1, "t4": 1})) == {"early": {"t4": 1}, "late": {"v100": 1}}
    assert decide("easyscale-homo", jobs, Cluster({"v100": 1, "t4": 1})) == {"early": {"v100": 1}}


def test_a_job_that_must_not_mix_stays_on_its_type() -> None:
    fixed = job("fixed", mixed=False, preferred="t4", held={"t4": 1})
    assert decide("easyscale-heter", [fixed], Cluster({"v100": 4, "t4": 2})) == {"fixed": {"t4": 2}}


def test_increments_go_by_speed_up_per_device() -> None:
    # +1 device: from 8 turns to 4 for the one, from 3 to 2 for the other.
    big, small = job("big", 8, held={"v100": 1}, at=5), job("small", 3, held={"v100": 1})
    assert decide("easyscale-homo", [small, big], Cluster({"v100": 3})) == {"big": {"v100": 2}}


def test_of_equal_increments_the_one_with_more_devices_goes_first() -> None:
    # 4 on 2 -> 4 devices: 2x for two more; 5 on 2 -> 3 devices: 1.5x for one more. Both are 1.5 per device.
    four, five = job("four", 4, held={"v100": 2}, types=(V,), at=9), job("five", 5, held={"v100": 2}, types=(V,))
    assert decide("easyscale-homo", [five, four], Cluster({"v100": 6})) == {"four": {"v100": 4}}


def test_a_guarantee_takes_back_what_was_borrowed() -> None:
    borrower = job("borrower", 8, held={"v100": 4}, types=(V,))
    owner = job("owner", 4, at=9, min_devices=2, types=(V,))
    assert decide("easyscale-homo", [borrower, owner], Cluster({"v100": 4})) == {
        "borrower": {"v100": 2},
        "owner": {"v100": 2},
    }


def test_guaranteed_devices_are_not_taken_for_another_guarantee() -> None:
    first = job("first", 2, held={"v100": 2}, types=(V,), min_devices=2)
    second = job("second", 2, at=1, min_devices=2, types=(V,))
    assert decide("easyscale-homo", [first, second], Cluster({"v100": 3})) == {}


def test_nobody_waits_while_a_job_has_several() -> None:
    # 8 replicas on 4 devices: 2 turns, on 3 they take 3: half a turn more. On 2 they take 4, on 1 they take 8.
    four, two = job("four", 8, held={"v100": 4}, types=(V,)), job("two", 8, held={"v100": 2}, types=(V,), at=5)
    late = job("late", 2, types=(V,), at=9)
    assert decide("easyscale-heter", [four, two, late], Cluster({"v100": 6})) == {
        "four": {"v100": 3},
        "late": {"v100": 1},
    }
    single = [job(name, 8, held={"v100": 1}, types=(V,)) for name in "ab"]
    assert decide("easyscale-heter", [*single, late], Cluster({"v100": 2})) == {}


def test_who_gives_a_device_gives_those_too_that_are_idle_without_it() -> None:
    # 4 replicas on 4 devices take one turn; on 3 they take two, as on 2.
    giver = job("giver", 4, held={"v100": 4}, types=(V,))
    late = [job(f"late{at}", 2, types=(V,), at=at) for at in (7, 8, 9)]
    assert decide("easyscale-homo", [giver, *late], Cluster({"v100": 4})) == {
        "giver": {"v100": 1},
        **{each.name: {"v100": 1} for each in late},
    }
    assert decide("easyscale-homo", [giver, *late[:2]], Cluster({"v100": 4})) == {
        "giver": {"v100": 2},
        **{each.name: {"v100": 1} for each in late[:2]},
    }


def test_a_guarantee_is_not_shared_and_types_are_kept_to() -> None:
    owner = job("owner", 4, held={"v100": 2}, types=(V,), min_devices=2)
    assert decide("easyscale-homo", [owner, job("late", 2, types=(V,), at=9)], Cluster({"v100": 2})) == {}
    mixed = job("mixed", 8, held={"v100": 2, "t4": 1})
    assert decide("easyscale-heter", [mixed, job("late", 2, types=(T,), at=9)], Cluster({"v100": 2, "t4": 1})) == {
        "mixed": {"v100": 2},
        "late": {"t4": 1},
    }


def test_reserved_devices_come_from_whoever_came_last() -> None:
    old, new = job("old", held={"v100": 2}, types=(V,)), job("new", held={"v100": 2}, types=(V,), at=5)
    cluster = Cluster({"v100": 4}, reserved={"v100": 3})
    assert decide("easyscale-heter", [old, new], cluster) == {"new": {"v100": 0}, "old": {"v100": 1}}


def test_a_slow_device_is_released_and_not_asked_for_again() -> None:
    """Role 3: the planner believed in the new device; the measurement did not."""
    tried = job("a", 8, held={"v100": 2})
    cluster = Cluster({"v100": 2, "t4": 2})
    [after] = decide("easyscale-heter", [tried], cluster).values()
    assert after.get("t4")
    assert devices_to_keep(tried.held, 6.0, after, 4.0) == tried.held
    tried.avoided = frozenset({tuple(sorted(after.items()))})
    tried.memory = {}
    assert decide("easyscale-heter", [tried], cluster) == {}


def test_the_shortest_remaining_time_preempts() -> None:
    long, short = job("long", held={"v100": 4}, types=(V,)), job("short", at=5, steps=10, types=(V,))
    assert decide("srtf", [long, short], Cluster({"v100": 4}), now=60) == {"long": {}, "short": {"v100": 4}}


def test_tiresias_puts_those_with_16_gpu_hours_behind() -> None:
    tiresias, cluster = make_policy("tiresias"), Cluster({"v100": 4})
    old, new = job("old", held={"v100": 4}, types=(V,)), job("new", at=5, types=(V,))
    jobs = tiresias.jobs([old, new])
    assert tiresias.allocate(jobs, cluster, 14_399) == {}
    assert tiresias.wakes_s(jobs, 14_399) == 14_400
    assert tiresias.allocate(jobs, cluster, 14_400) == {"old": {}, "new": {"v100": 4}}


def test_tiresias_lets_smaller_jobs_pass() -> None:
    jobs = [job("a", 3, types=(V,)), job("b", 3, types=(V,), at=1), job("c", 1, types=(V,), at=2)]
    assert decide("tiresias", jobs, Cluster({"v100": 4})) == {"a": {"v100": 3}, "c": {"v100": 1}}


def test_optimus_gives_one_each_and_more_to_whom_it_saves_most() -> None:
    jobs = [job("short", 3, steps=10, types=(V,)), job("long", 3, steps=1000, types=(V,))]
    assert decide("optimus", jobs, Cluster({"v100": 4})) == {"short": {"v100": 1}, "long": {"v100": 3}}


def test_pollux_is_fair() -> None:
    jobs = [job(name, 4, types=(V,), held={"v100": 1}) for name in "ab"]
    assert decide("pollux", jobs, Cluster({"v100": 4}), now=1000) == {"a": {"v100": 2}, "b": {"v100": 2}}


def test_a_gang_larger_than_its_type_shares_devices() -> None:
    big = job("big", 32, types=(V,))
    for policy in ("yarn-cs", "yarn-cs-gang", "tiresias"):
        assert decide(policy, [big], Cluster({"v100": 16})) == {"big": {"v100": 16}}


def test_strict_order_within_a_type() -> None:
    there = job("there", 2, types=(V,), held={"v100": 2})
    jobs = [there, job("big", 4, types=(V,)), job("small", 1, at=1, types=(V,)), job("other", 1, at=2, types=(T,))]
    assert decide("yarn-cs-gang", jobs, Cluster({"v100": 5, "t4": 1})) == {"other": {"t4": 1}}
    assert decide("yarn-cs", jobs, Cluster({"v100": 5, "t4": 1})) == {}


def test_places_are_on_the_emptiest_node_the_first_of_equals() -> None:
    places = DevicePlacer([ClusterNode("gpu", 4)] * 3)
    assert places.take({"gpu": 3}) == ((0, 3),)
    assert places.take({"gpu": 6}) == ((1, 4), (2, 2))
    places.give_back(((0, 3),))
    assert places.take({"gpu": 5}) == ((0, 4), (2, 1))


def test_clusters_and_policies_are_read_from_text() -> None:
    assert Cluster.parse("v100=2x4,t4=1x2").counts == {"v100": 8, "t4": 2}
    assert len(Cluster.parse("gpu=16x4").nodes) == 16
    assert parse_policies("all") == list(POLICIES)
    assert parse_policies("srtf, tiresias") == ["srtf", "tiresias"]


@pytest.mark.parametrize("text", ["", "v100", "v100=x", "v100=2,v100=3", "v100=2x4,t4=2", "v100=0", "none.csv"])
def test_unreadable_clusters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        Cluster.parse(text)


@pytest.mark.parametrize("text", ["", "yarn", "srtf,fastest"])
def test_unknown_policies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tiresias"):
        parse_policies(text)
