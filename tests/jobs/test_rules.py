"""The rules of the live scheduler, by values: what happens goes in, what is to be done comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_world import World, spec

from pliant.errors import CapacityError, ConfigError, NameTaken
from pliant.jobs.rules import (
    AVOID_S,
    END_GRACE_S,
    MAX_LOSSES,
    RESERVE_GRACE_S,
    DropWorkers,
    EndRun,
    ManagedJob,
    NoteEvent,
    ResizeRun,
    SchedulerState,
    StartRun,
)
from pliant.sched import policies as schedulers
from pliant.sched.tenants import Tenant


@pytest.fixture
def world() -> World:
    return World()


# --- starting and growing ---


def test_a_job_starts_with_its_guarantee_and_says_why(world: World) -> None:
    assert world.submit("a") == [StartRun("a", {"cpu": 1})]
    job = world.job("a")
    assert (job.state, job.asked, job.run) == ("starting", {"cpu": 1}, 1)
    assert job.why == "starts on 1 cpu"
    assert [note.what for note in world.done if isinstance(note, NoteEvent)] == ["submitted", "decision", "starting"]


def test_nothing_grows_before_its_speed_is_known(world: World) -> None:
    world.submit("a")
    assert world.allocate() == []
    world.steps("a", count=6)  # two do not count, five are needed
    assert world.allocate() == []
    world.steps("a", count=1)
    assert world.allocate() == [ResizeRun("a", {"cpu": 2})]


def test_growth_doubles_until_every_replica_has_a_device(world: World) -> None:
    world.submit("a")
    world.steps("a", 0.4)
    assert world.allocate() == [ResizeRun("a", {"cpu": 2})]
    world.steps("a", 0.2)
    assert world.allocate() == [ResizeRun("a", {"cpu": 4})]
    world.steps("a", 0.1)
    assert world.allocate() == []


def test_steps_of_before_a_change_do_not_count(world: World) -> None:
    world.submit("a")
    world.steps("a", 0.4)
    world.allocate()
    for step in range(20, 40):
        world.state.add_step("a", step, 1, 0.4, world.now_s)  # still one worker
    assert world.job("a").throughput.steps_per_s is None


def test_devices_that_a_job_has_not_left_are_nobody_elses(world: World) -> None:
    world.submit("a")
    world.grown("a")
    assert world.submit("b") == [ResizeRun("a", {"cpu": 3})]  # and no start of b: a's process is still there
    assert world.job("b").state == "waiting"
    assert world.look() == []
    world.settle("a")
    assert world.look() == [StartRun("b", {"cpu": 1})]


def test_priority_comes_before_age(world: World) -> None:
    world.reserve(cpu=4)
    world.submit("old")
    world.submit("urgent", priority=5)
    assert world.reserve(cpu=3) == [StartRun("urgent", {"cpu": 1})]


def test_the_last_one_in_gives_back_first_and_low_priority_before_high() -> None:
    world = World(cpu=4)
    world.submit("first", max=2)
    world.submit("second", max=2, priority=1)
    world.grown("first")
    world.grown("second")
    assert world.reserve(cpu=1) == [ResizeRun("first", {"cpu": 1})]


def test_a_job_without_a_guarantee_waits_for_what_is_left(world: World) -> None:
    world.submit("a", min=4)
    assert world.submit("b", min=0) == []
    world.settle()
    assert world.end("a", 0) == [StartRun("b", {"cpu": 1})]


# --- putting off, and going on ---


def test_a_guarantee_puts_off_who_has_none() -> None:
    world = World(cpu=1)
    world.submit("guest", min=0)
    world.settle()
    assert world.submit("owner") == [EndRun("guest")]
    assert world.job("guest").ending == "put-off"
    assert world.job("owner").state == "waiting"
    assert world.end("guest", 0) == [StartRun("owner", {"cpu": 1})]
    assert world.job("guest").state == "put-off"
    world.settle()
    assert world.end("owner", 0) == [StartRun("guest", {"cpu": 1})]
    assert world.job("guest").run == 3


def test_one_that_finishes_while_it_is_put_off_has_finished() -> None:
    world = World(cpu=1)
    world.submit("guest", min=0)
    world.submit("owner")
    world.end("guest", 0, finished=True)
    assert world.job("guest").state == "finished"


def test_who_does_not_end_in_time_is_killed(world: World) -> None:
    world.submit("a")
    world.settle()
    world.do(world.state.stop("a", world.now_s))
    assert world.look(END_GRACE_S - 1) == []
    assert world.look(1) == [EndRun("a", kill=True)]
    assert world.look(1) == []
    assert world.look(END_GRACE_S) == [EndRun("a", kill=True)]  # once more, should it still live


# --- reservations ---


def test_a_reservation_shrinks_jobs_and_is_free_when_their_processes_are_gone(world: World) -> None:
    world.submit("a")
    world.grown("a")
    assert world.reserve(cpu=2) == [ResizeRun("a", {"cpu": 2})]
    assert not world.state.reserved_is_free
    world.state.set_occupied("a", {"cpu": 3})
    assert not world.state.reserved_is_free
    world.settle()
    assert world.state.reserved_is_free
    assert world.look() == []
    assert world.state.reserve_by_s is None


def test_workers_that_do_not_leave_reserved_devices_are_killed(world: World) -> None:
    world.submit("a")
    world.grown("a")
    world.reserve(cpu=2)
    assert world.look(RESERVE_GRACE_S - 0.01) == []
    assert world.look(0.02) == [DropWorkers("a")]


def test_a_reservation_of_everything_puts_jobs_off_and_kills_who_is_slow(world: World) -> None:
    world.submit("a")
    world.grown("a")
    assert world.reserve(cpu=4) == [EndRun("a")]
    assert world.look(RESERVE_GRACE_S + 0.01) == [EndRun("a", kill=True)]
    world.end("a", -9)
    assert world.job("a").state == "put-off"
    assert world.state.reserved_is_free
    assert world.reserve() == [StartRun("a", {"cpu": 1})]


def test_a_runner_that_cannot_be_told_yet_is_killed_in_time(world: World) -> None:
    world.submit("a", min=2)
    world.deaf = {"a"}
    assert world.reserve(cpu=3) == [ResizeRun("a", {"cpu": 1})]
    assert not world.state.reserved_is_free, "its runner knows of two devices"
    assert world.look(RESERVE_GRACE_S + 0.01) == [EndRun("a", kill=True)]
    world.end("a", None)
    assert world.job("a").state == "starting", "there is room for one of its two devices"


def test_what_is_free_is_reserved_without_disturbing_anybody(world: World) -> None:
    world.submit("a")
    assert world.reserve(cpu=3) == []
    assert world.state.reserved_is_free


def test_reserved_devices_are_given_to_nobody(world: World) -> None:
    world.reserve(cpu=3)
    world.submit("a")
    world.grown("a")
    assert world.job("a").asked == {"cpu": 1}
    assert world.submit("b") == []


def test_devices_given_back_are_used_again(world: World) -> None:
    world.submit("a")
    world.grown("a")
    world.reserve(cpu=2)
    world.steps("a", 0.2)
    assert world.reserve(cpu=0) == [ResizeRun("a", {"cpu": 4})]


@pytest.mark.parametrize(
    ("wanted", "error"), [({"cpu": 5}, CapacityError), ({"gpu": 1}, ConfigError), ({"cpu": -1}, ConfigError)]
)
def test_what_is_not_there_cannot_be_reserved(world: World, wanted: dict[str, int], error: type[ConfigError]) -> None:
    with pytest.raises(error, match="cpu|gpu"):
        world.state.reserve(wanted, world.now_s)
    assert world.state.reserved == {}


def test_a_policy_that_takes_nothing_back_puts_whole_jobs_off() -> None:
    world = World("yarn-cs-gang", cpu=4)
    assert world.submit("a") == [StartRun("a", {"cpu": 4})]
    world.settle()
    assert world.reserve(cpu=1) == [EndRun("a")]
    assert world.end("a", 0) == []
    assert world.reserve() == [StartRun("a", {"cpu": 4})]


# --- falling back ---


def test_a_job_that_was_faster_on_fewer_devices_goes_back_and_remembers(world: World) -> None:
    world.submit("a")
    world.steps("a", 0.2)
    assert world.allocate() == [ResizeRun("a", {"cpu": 2})]
    assert world.steps("a", 0.3) == [ResizeRun("a", {"cpu": 1})]
    assert "3.33 steps/s on 2 cpu after 5" in world.job("a").why
    world.steps("a", 0.2)
    assert world.allocate() == []
    world.now_s += AVOID_S + 1
    assert world.allocate() == [ResizeRun("a", {"cpu": 2})]


# --- ends ---


@pytest.mark.parametrize(
    ("code", "finished", "state"),
    [
        (0, False, "finished"),
        (0, True, "finished"),
        (None, True, "finished"),
        (1, False, "failed"),
        (78, False, "failed"),
        (-9, False, "starting"),
        (143, False, "starting"),
        (None, False, "starting"),
    ],
)
def test_how_a_run_ends_says_what_becomes_of_the_job(
    world: World, code: int | None, finished: bool, state: str
) -> None:
    world.submit("a")
    world.steps("a", count=1)
    world.end("a", code, finished=finished)
    assert world.job("a").state == state
    assert (world.job("a").ended_s is not None) == (state in ("finished", "failed"))


def test_a_job_whose_runs_are_lost_without_a_step_between_fails(world: World) -> None:
    world.submit("a")
    for _ in range(MAX_LOSSES - 1):
        assert world.end("a", -9) == [StartRun("a", {"cpu": 1})]
    world.steps("a", count=1)
    for _ in range(MAX_LOSSES - 1):
        assert world.end("a", None) == [StartRun("a", {"cpu": 1})]
    assert world.end("a", None) == []
    assert world.job("a").state == "failed"
    assert f"{MAX_LOSSES} times" in world.job("a").why


def test_stopping(world: World) -> None:
    world.submit("a", min=4)
    world.submit("b", min=4)
    world.settle()
    assert world.do(world.state.stop("b", world.now_s)) == []
    assert world.job("b").state == "stopped"
    assert world.do(world.state.stop("a", world.now_s)) == [EndRun("a")]
    assert world.job("a").state == "starting"
    world.end("a", 0)
    assert (world.job("a").state, world.job("a").exit_code) == ("stopped", 0)
    assert world.do(world.state.stop("a", world.now_s, kill=True)) == []


def test_a_job_that_cannot_be_started_fails_and_frees_its_devices(world: World) -> None:
    world.submit("a", min=4)
    world.submit("b")
    assert world.do(world.state.fail_start("a", "no such program", world.now_s)) == [StartRun("b", {"cpu": 1})]
    assert world.job("a").why == "could not be started: no such program"


def test_names_are_taken_for_ever(world: World) -> None:
    world.submit("a")
    world.end("a", 0)
    with pytest.raises(NameTaken, match="finished"):
        world.submit("a")


def test_a_job_for_other_devices_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="the cluster has 4 cpu"):
        world.submit("a", devices=["v100"])
    assert "a" not in world.state.jobs


# --- several types, and devices that vanish ---


def test_a_job_of_one_type_takes_the_best_that_has_room() -> None:
    world = World(v100=1, t4=2)
    world.submit("a", devices=["v100", "t4"])
    assert world.submit("b", devices=["v100", "t4"]) == [StartRun("b", {"t4": 1})]
    world.steps("b", 0.2)
    assert world.allocate() == [ResizeRun("b", {"t4": 2})]


def test_a_mixed_job_gets_both() -> None:
    world = World(v100=1, t4=1)
    world.submit("a", mixed=True, determinism="D2", speed={"v100": 2, "t4": 1}, replicas=3)
    world.steps("a", 1.5)
    assert world.allocate() == [ResizeRun("a", {"v100": 1, "t4": 1})]


def test_when_devices_vanish_jobs_shrink() -> None:
    world = World(cpu=4)
    world.submit("a")
    world.grown("a")
    assert world.do(world.state.set_devices({"cpu": 2}, world.now_s)) == [ResizeRun("a", {"cpu": 2})]
    assert world.do(world.state.set_devices({"cpu": 0}, world.now_s)) in ([], [EndRun("a")])
    world.settle()
    world.end("a", None)
    assert world.job("a").state == "put-off"
    assert world.do(world.state.set_devices({"cpu": 1}, world.now_s)) == [StartRun("a", {"cpu": 1})]


def test_a_job_whose_types_are_all_gone_waits_for_them() -> None:
    world = World(v100=1, cpu=1)
    world.submit("a", devices=["v100"])
    world.settle()
    assert world.do(world.state.set_devices({"cpu": 1}, world.now_s)) == [EndRun("a")]
    assert world.end("a", 0) == []
    assert world.do(world.state.set_devices({"cpu": 1, "v100": 1}, world.now_s)) == [StartRun("a", {"v100": 1})]


# --- rigid jobs ---


def test_a_rigid_job_waits_until_all_of_its_devices_are_free_and_never_grows(world: World) -> None:
    world.submit("a", min=2, max=2)
    assert world.submit_rigid("fed", 3) == []
    assert world.end("a", 0) == [StartRun("fed", {"cpu": 3})]
    world.steps("fed", count=20)
    assert world.allocate() == []


def test_a_rigid_job_that_asks_for_more_than_there_is_gets_all(world: World) -> None:
    assert world.submit_rigid("fed", 9) == [StartRun("fed", {"cpu": 4})]


def test_a_rigid_job_is_put_off_as_a_whole_and_comes_back(world: World) -> None:
    world.submit_rigid("fed", 3)
    world.settle()
    assert world.reserve(cpu=2) == [EndRun("fed")]
    world.end("fed", 0)
    assert world.job("fed").state == "put-off"
    assert world.reserve() == [StartRun("fed", {"cpu": 3})]


def test_a_stopped_job_is_resumed_and_a_finished_one_is_not(world: World) -> None:
    world.submit("a")
    with pytest.raises(NameTaken, match="a is starting: it need not be resumed"):
        world.state.resume("a", world.now_s)
    world.do(world.state.stop("a", world.now_s))
    world.end("a", 0)
    assert world.job("a").state == "stopped"
    assert world.do(world.state.resume("a", world.now_s)) == [StartRun("a", {"cpu": 1})]
    world.end("a", 0)
    with pytest.raises(ConfigError, match="a has finished"):
        world.state.resume("a", world.now_s)


# --- starting again ---


def test_a_scheduler_that_begins_anew_knows_what_it_knew(world: World) -> None:
    world.submit("a")
    world.grown("a")
    world.submit("b", priority=2, args=["--x", "1"])
    world.reserve(cpu=1)
    saved = [
        ManagedJob.from_json(job.demand, json.loads(json.dumps(job.to_json()))) for job in world.state.jobs.values()
    ]
    again = SchedulerState(schedulers.make_policy("easyscale-heter"), {"cpu": 4}, saved, world.state.reserved)
    for name, job in world.state.jobs.items():
        assert again.jobs[name].to_json() == job.to_json()
    again.set_occupied("a", {"cpu": 4})
    again.submit(spec("c"), 2000.0)
    assert again.jobs["c"].number == 3
    assert again.jobs["c"].run in (0, 3)


# --- whatever happens ---


class Storm(World):
    """Random events; after each, nobody has what is not there."""

    def check(self) -> None:
        for kind, count in self.state.devices.items():
            used = sum(job.used(kind) for job in self.state.jobs.values())
            assert used <= count, f"{used} of {count} {kind} in use"
            asked = sum(job.asked.get(kind, 0) for job in self.state.jobs.values() if not job.ending)
            assert asked <= count - self.state.reserved.get(kind, 0)
        for job in self.state.jobs.values():
            assert not job.is_over or not job.is_active
            assert sum(job.target.values()) <= job.demand.max
            assert job.state in ("starting", "running") or not job.is_active
            if job.demand.rigid and job.is_active and job.target:
                assert job.asked == job.target

    def finish_all(self) -> None:
        self.reserve()
        for _ in range(40 * len(self.state.jobs) + 40):
            self.settle()
            self.look(1)
            self.check()
            active = self.state.active
            if not active:
                break
            self.end(active[0].name, 0, finished=not active[0].ending)
        assert all(job.is_over for job in self.state.jobs.values()), {
            name: (job.state, job.target, job.asked) for name, job in self.state.jobs.items()
        }


EVENTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 7), st.integers(0, 4)), max_size=60)
POLICIES = st.sampled_from(["easyscale-heter", "easyscale-homo", "yarn-cs-gang", "yarn-cs"])
TENANTS = (Tenant(name="a", weight=2.0, quota={"cpu": 2}), Tenant(name="b", quota={"gpu": 1}, priority=1))


@settings(max_examples=250, deadline=None)
@given(EVENTS, POLICIES, st.sampled_from([(), TENANTS]))
def test_nobody_has_what_is_not_there_and_everybody_ends(
    events: list[tuple[int, int, int]], policy: str, tenants: tuple[Tenant, ...]
) -> None:
    storm = Storm(policy, tenants, cpu=4, gpu=2)
    for kind, which, amount in events:
        names = list(storm.state.jobs)
        name = names[which % len(names)] if names else ""
        active = [job.name for job in storm.state.active]
        chosen = active[which % len(active)] if active else ""
        if kind == 0:
            said: Mapping[str, Any] = {"devices": [["cpu"], ["gpu", "cpu"], []][which % 3], "priority": amount % 3}
            if which == 7:
                storm.submit_rigid(f"job-{len(names)}", 1 + amount, "ab"[amount % 2])
            else:
                storm.submit(f"job-{len(names)}", ["a", "b", ""][which % 3], min=min(amount, 4), replicas=4, **said)
        elif kind == 1 and name:
            storm.do(storm.state.stop(name, storm.now_s, kill=bool(amount % 2)))
        elif kind == 2:
            storm.reserve(cpu=amount, gpu=amount // 2)
        elif kind == 3 and chosen:
            storm.settle(chosen)
        elif kind == 4 and chosen:
            storm.steps(chosen, 0.1 * (1 + amount), count=8)
        elif kind == 5 and chosen:
            storm.end(chosen, [0, 1, -9, None, 143][amount], finished=amount == 0)
        elif kind == 6:
            storm.allocate()
        elif kind == 7 and chosen:
            storm.deaf ^= {chosen}
        storm.look(0.3 * which)
        storm.check()
    storm.finish_all()


def test_a_job_that_could_never_run_here_is_refused() -> None:
    """Also at the API, where no command has looked before."""
    world = World(v100=2, t4=1)
    for said, told in (
        ({"min": 3}, "min 3: the cluster has 1 t4 and 2 v100, and the job has one type at a time; use 2 or less"),
        ({"min": 4, "mixed": True, "determinism": "D2"}, "min 4: the cluster has 1 t4 and 2 v100; use 3 or less"),
        ({"min": 2, "devices": ["t4"]}, "min 2: the cluster has 1 t4 and 2 v100; use 1 or less"),
        ({"devices": ["cpu"]}, "devices cpu: the cluster has 1 t4 and 2 v100; name one of these types"),
    ):
        with pytest.raises(ConfigError) as refusal:
            world.submit("a", replicas=4, **said)
        assert str(refusal.value) == told
    assert not world.state.jobs
    assert world.submit("a", replicas=4, min=2) != []
    assert world.submit_rigid("federated", 9) == [], "its processes share the devices, and it waits for all there are"
