"""A runner whose workers follow the roll: the rules on values, then real workers that crash, leave and come."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence

import pytest
from launching import Launcher, Runner

from pliant.cluster import Membership, View, Worker
from pliant.elastic.client import ConfigClient
from pliant.jobs.store import running_jobs
from pliant.launch.events import (
    Action,
    Exited,
    ExitRunner,
    Interrupted,
    KillWorker,
    NotReplaced,
    ReportFailure,
    ReportLoss,
    RequestReplacement,
    RunnerGone,
    SendStatus,
    ShowMessage,
    StartFailed,
    StartWorker,
    StateChanged,
    TerminateWorker,
    Tick,
    Verdict,
)
from pliant.launch.supervisor import Replacements, Supervisor

HERE, THERE = "10.0.0.1", "10.0.0.2"
A, B, C, D, FAR = (Worker(HERE, 1000), Worker(HERE, 1001), Worker(HERE, 1002), Worker(HERE, 1003), Worker(THERE, 1000))


def view(number: int, *workers: Worker) -> View:
    return View(number, workers, (Worker(HERE, 99), Worker(THERE, 99)))


def kinds(actions: Sequence[Action], *kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: Sequence[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, ShowMessage))


def arrive(made: Supervisor, wanted: View, at_s: float) -> list[Action]:
    """Another view is wanted; the members stay."""
    return made.handle(StateChanged(wanted, made._state.membership), at_s)


def change(made: Supervisor, membership: Membership, at_s: float) -> list[Action]:
    """The members change; the wanted view stays."""
    return made.handle(StateChanged(made.view, membership), at_s)


def training(*workers: Worker, max_restarts: int = 100, slots: int = 4, alone: bool = True) -> Supervisor:
    """A job in which all `workers` train, in view 1 and roll 1."""
    made = Supervisor(HERE, grace_s=10, watch=True, alone=alone, slots=slots, max_restarts=max_restarts)
    arrive(made, view(1, *workers), 0)
    change(made, Membership(1, workers, wanted=1), 0)
    return made


def test_a_crash_before_anybody_was_ready_ends_the_job() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, max_restarts=100)
    arrive(made, view(1, A, B), 0)
    change(made, Membership(), 0)
    actions = made.handle(Exited(A, 2), 1)
    assert kinds(actions, ReportLoss, ReportFailure, TerminateWorker) == [
        TerminateWorker(B),
        ReportFailure(A, "exit code 2"),
    ]


def test_a_crash_of_a_member_is_reported_and_replaced_at_once() -> None:
    made = training(A, B)
    actions = made.handle(Exited(B, -11), 20)
    assert kinds(actions, ReportLoss, RequestReplacement, ReportFailure, TerminateWorker, StartWorker) == [
        ReportLoss(B, "killed by SIGSEGV"),
        RequestReplacement(),
    ]
    assert said(actions) == "lost 10.0.0.1.1001: killed by SIGSEGV; replacing it now (restart 1 of 100)"
    assert arrive(made, view(2, A), 20.1)  # the server has heard of it
    assert kinds(arrive(made, view(3, A, C), 20.2), StartWorker) == [StartWorker(C, view(3, A, C), 1)]


def test_a_crashed_worker_is_not_started_again_under_its_name_until_the_view_dropped_it() -> None:
    made = training(A, B)
    made.handle(Exited(B, 1), 20)
    assert kinds(arrive(made, view(2, A, B, FAR), 21), StartWorker) == []  # a wish from before the loss
    arrive(made, view(3, A, FAR), 22)
    assert kinds(arrive(made, view(4, A, FAR, B), 23), StartWorker) == [StartWorker(B, view(4, A, FAR, B), 1)]


def test_pauses_double_and_a_long_life_resets_them() -> None:
    made = Replacements(100)
    worker = A
    for at_s, told in ((100, "now"), (200, "in 0.5s"), (300, "in 1s"), (400, "in 2s")):
        made.note_start(worker, at_s - 50)
        made.note_join(worker, at_s - 40)
        assert made.decide(worker, at_s)[1].startswith(f"replacing it {told} (restart ")
    for at_s in range(500, 1000, 100):
        made.note_start(worker, at_s - 50)
        last = made.decide(worker, at_s)[1]
    assert "in 30s" in last
    made.note_start(worker, 1000)
    made.note_join(worker, 1001)
    assert "replacing it now" in made.decide(worker, 1061)[1]


def test_a_replacement_waits_for_its_time() -> None:
    made = training(A, B, C)
    made.handle(Exited(B, 1), 20)
    actions = made.handle(Exited(C, 1), 20)
    assert kinds(actions, RequestReplacement) == []
    assert "in 0.5s (restart 2 of 100)" in said(actions)
    assert made.next_deadline_s == 20.5
    assert kinds(made.handle(Tick(), 20.5), RequestReplacement) == [RequestReplacement()]


def test_no_replacement_where_a_wish_has_filled_the_slot_or_taken_it() -> None:
    for wish in (view(3, A, D, FAR, Worker(HERE, 1004)), view(3, A, FAR)):
        made = training(A, B, C, FAR)
        made.handle(Exited(B, 1), 20)
        arrive(made, view(2, A, C, D, FAR), 20.1)  # the first one has come
        made.handle(Exited(C, 1), 20.2)
        arrive(made, wish, 20.3)
        assert made.next_deadline_s != 20.7
        assert kinds(made.handle(Tick(), 21), RequestReplacement) == []


def test_no_replacement_beyond_the_slots() -> None:
    made = training(A, B, C, slots=2)
    assert kinds(made.handle(Exited(C, 1), 20), RequestReplacement) == []


def test_when_restarts_are_used_up_the_job_goes_on_with_those_left() -> None:
    made = training(A, B, C, max_restarts=1)
    made.handle(Exited(B, 1), 20)
    actions = made.handle(Exited(C, 1), 30)
    assert "not replaced: the 1 restarts of --max-restarts are used up" in said(actions)
    assert kinds(made.handle(Tick(), 100), RequestReplacement, TerminateWorker, ExitRunner) == []
    arrive(made, view(2, A), 101)
    change(made, Membership(2, over=True), 102)
    assert kinds(made.handle(Exited(A, 0), 103), ExitRunner) == []  # one was asked for, and is still to come
    assert kinds(made.handle(NotReplaced("the job has finished"), 104), ExitRunner) == [ExitRunner(0)]


def test_a_crash_that_comes_again_three_times_is_not_replaced_any_more() -> None:
    made = training(A, B)
    names = [B, C, D]
    for i, worker in enumerate(names):
        at_s = 5.0 + 9 * i
        actions = made.handle(Exited(worker, 1), at_s)
        if i < 2:
            made.handle(Tick(), at_s + 1)
            arrive(made, view(2 * i + 2, A), at_s + 2)
            arrive(made, view(2 * i + 3, A, names[i + 1]), at_s + 3)
    assert "not replaced: workers on this host crashed within 10s of their start 3 times in a row" in said(actions)


def test_many_killed_at_once_are_not_a_program_that_always_fails() -> None:
    made = training(A, B, C, D)
    told = [said(made.handle(Exited(worker, -9), 3)) for worker in (B, C, D)]
    assert all("replacing it" in line for line in told)


def test_the_last_crash_fails_the_job_and_is_blamed() -> None:
    made = training(A, B, max_restarts=0)
    made.handle(Exited(A, 3), 20)
    arrive(made, view(2, B), 21)
    actions = made.handle(Exited(B, -9), 22)
    hint = "killed by SIGKILL (out of memory? see dmesg)"
    assert kinds(actions, ReportLoss, ReportFailure, ExitRunner) == [
        ReportLoss(B, hint),
        ReportFailure(B, hint, "was the last one, and failed"),
        ExitRunner(137),
    ]


def test_members_on_another_host_go_on() -> None:
    made = training(A, FAR, max_restarts=0, alone=False)
    actions = made.handle(Exited(A, 3), 20)
    assert kinds(actions, ExitRunner, ReportFailure, SendStatus) == [SendStatus("idle")]


def test_a_replacement_that_is_refused_may_be_the_end() -> None:
    made = training(A, B)
    made.handle(Exited(A, 3), 20)
    assert kinds(made.handle(Exited(B, 4), 20), ReportFailure) == []  # one is coming
    change(made, Membership(3, over=True), 20.1)
    assert kinds(made.handle(NotReplaced("the cluster was cleared"), 20.2), ReportFailure, ExitRunner) == [
        ReportFailure(B, "exit code 4", "was the last one, and failed"),
        ExitRunner(4),
    ]


def test_a_refused_worker_is_reported_and_never_replaced() -> None:
    made = training(A, B)
    actions = made.handle(Exited(B, 78), 20)
    assert kinds(actions, ReportLoss, RequestReplacement) == [ReportLoss(B, "exit code 78")]
    assert "so it is not replaced" in said(actions)
    arrive(made, view(2, A), 21)
    assert kinds(made.handle(Exited(A, 78), 22), ExitRunner) == [ExitRunner(78)]


def test_a_member_that_is_no_longer_wanted_leaves_by_itself() -> None:
    made = training(A, B)
    assert kinds(arrive(made, view(2, A), 5), TerminateWorker) == []
    assert made.next_deadline_s is None
    change(made, Membership(2, (A,), wanted=2), 50)
    assert made.next_deadline_s == 60
    assert kinds(made.handle(Exited(B, 0), 51), ReportLoss, RequestReplacement, ExitRunner, ReportFailure) == []
    assert made.next_deadline_s is None
    assert (made.num_started, made.num_finished, made.num_lost) == (2, 1, 0)


def test_one_that_does_not_leave_is_told_and_then_killed() -> None:
    made = training(A, B)
    arrive(made, view(2, A), 5)
    change(made, Membership(2, (A,), wanted=2), 50)
    assert kinds(made.handle(Tick(), 60), TerminateWorker) == [TerminateWorker(B)]
    assert kinds(made.handle(Tick(), 70), KillWorker) == [KillWorker(B)]
    assert kinds(made.handle(Exited(B, -9), 71), ReportLoss, RequestReplacement) == []


def test_a_newcomer_whose_wish_was_withdrawn_is_told_at_once() -> None:
    made = training(A)
    arrive(made, view(2, A, B), 5)
    assert kinds(arrive(made, view(3, A), 6), TerminateWorker) == [TerminateWorker(B)]
    assert kinds(made.handle(Exited(B, -15), 7), ReportLoss, RequestReplacement) == []


def test_the_last_member_is_replaced_and_only_then_dropped_from_the_view() -> None:
    made = training(A)
    actions = made.handle(Exited(A, -9), 20)
    report = ReportLoss(A, "killed by SIGKILL (out of memory? see dmesg)")
    assert kinds(actions, ReportLoss, RequestReplacement, ExitRunner) == [report, RequestReplacement(), report]
    change(made, Membership(2, (), urgent=2, wanted=1), 20.1)
    arrive(made, view(2, A, B), 20.2)
    assert kinds(arrive(made, view(3, B), 20.3), ExitRunner) == []
    assert B in made.running


def test_a_newcomer_that_crashes_is_reported_so_that_nobody_waits_for_it() -> None:
    made = training(A)
    arrive(made, view(2, A, B), 5)
    assert kinds(made.handle(Exited(B, 1), 6), ReportLoss, RequestReplacement) == [
        ReportLoss(B, "exit code 1"),
        RequestReplacement(),
    ]
    arrive(made, view(3, A, C), 7)
    actions = made.handle(Exited(C, 0), 8)
    assert kinds(actions, ReportLoss, RequestReplacement) == [ReportLoss(C, "it ended before it was ready")]
    assert kinds(made.handle(StartFailed(D, "no memory"), 9), ReportLoss) == [
        ReportLoss(D, "could not be started: no memory")
    ]


def test_one_that_left_and_is_wanted_again_is_started_again() -> None:
    made = training(A, B)
    arrive(made, view(2, A), 5)
    change(made, Membership(2, (A,), wanted=2), 6)
    assert kinds(arrive(made, view(3, A, B), 7), StartWorker) == []
    assert kinds(made.handle(Exited(B, 0), 8), StartWorker) == [StartWorker(B, view(3, A, B), 1)]


def test_one_that_others_hold_for_lost_is_replaced_when_it_ends() -> None:
    for code in (1, -9):
        made = training(A, B)
        made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
        if code == -9:
            assert kinds(made.handle(Tick(), 30), TerminateWorker) == [TerminateWorker(B)]
        assert RequestReplacement() in made.handle(Exited(B, code), 31)


def test_the_others_word_may_come_before_the_end_of_a_crashed_worker() -> None:
    made = training(A, B)
    made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
    assert RequestReplacement() in made.handle(Exited(B, -9), 20.01)


def test_a_crash_of_one_that_was_told_to_leave_is_not_replaced() -> None:
    made = training(A, B)
    arrive(made, view(2, A), 20)
    actions = made.handle(Exited(B, 1), 21)
    assert kinds(actions, ReportLoss, RequestReplacement) == [ReportLoss(B, "exit code 1")]
    assert "it was told to leave anyway" in said(actions)


def test_when_it_is_over_newcomers_are_told_and_members_may_take_their_time() -> None:
    made = training(A)
    arrive(made, view(2, A, B), 5)
    assert kinds(change(made, Membership(2, over=True, wanted=2), 6), TerminateWorker) == [TerminateWorker(B)]
    assert kinds(made.handle(Exited(B, -15), 6), ExitRunner, ReportLoss) == []
    assert made.next_deadline_s is None
    assert kinds(made.handle(Exited(A, 0), 500), ExitRunner) == [ExitRunner(0)]


def test_a_crash_after_the_end_is_still_a_failure() -> None:
    made = training(A)
    change(made, Membership(2, over=True, wanted=1), 6)
    assert kinds(made.handle(Exited(A, 1), 7), ReportFailure, ExitRunner) == [
        ReportFailure(A, "exit code 1"),
        ExitRunner(1),
    ]


@pytest.mark.parametrize("code", [0, -15])
def test_resize_to_nobody_is_a_good_end(code: int) -> None:
    made = training(A, B)
    made.handle(Exited(B, 1), 5)
    arrive(made, view(2, A), 5)
    arrive(made, view(3, A, C), 5)
    change(made, Membership(3, (A, C), urgent=2, wanted=3), 6)
    arrive(made, View(4, (), ()), 7)
    assert kinds(change(made, Membership(4, over=True, wanted=4), 7), TerminateWorker) == []
    if code:
        assert kinds(made.handle(Tick(), 17), TerminateWorker) == [TerminateWorker(A), TerminateWorker(C)]
    made.handle(Exited(A, code), 17)
    assert kinds(made.handle(Exited(C, code), 17), ExitRunner, ReportFailure) == [ExitRunner(0)]


def test_a_signal_to_the_runner_ends_all() -> None:
    made = training(A, B)
    assert kinds(made.handle(Interrupted(signal.SIGTERM), 1), TerminateWorker) == [
        TerminateWorker(A),
        TerminateWorker(B),
    ]
    made.handle(Exited(A, 0), 2)
    assert kinds(made.handle(Exited(B, 1), 2), ExitRunner, ReportLoss) == [ExitRunner(143)]


def test_a_job_that_has_begun_outlives_a_host() -> None:
    made = training(A, FAR, alone=False)
    actions = made.handle(RunnerGone(THERE), 1)
    assert kinds(actions, TerminateWorker, SendStatus, ReportLoss) == [
        ReportLoss(FAR, "the runner on 10.0.0.2 is gone")
    ]
    made.handle(Exited(A, 0), 2)
    assert kinds(made.handle(Verdict("", 0), 3), ExitRunner) == [ExitRunner(0)]
    early = Supervisor(HERE, grace_s=10, watch=True, alone=False)
    arrive(early, view(1, A, FAR), 0)
    assert kinds(early.handle(RunnerGone(THERE), 1), TerminateWorker) == [TerminateWorker(A)]


def test_a_job_whose_workers_were_all_on_a_host_that_is_gone_fails() -> None:
    made = training(FAR, alone=False)
    actions = made.handle(RunnerGone(THERE), 1)
    assert kinds(actions, SendStatus) == [
        SendStatus("failed", "the runner on 10.0.0.2 is gone, and all workers with it", 1)
    ]


def test_without_its_head_a_runner_ends_by_itself() -> None:
    made = training(A, FAR, alone=False)
    made.handle(RunnerGone(THERE, was_head=True), 1)
    change(made, Membership(2, over=True), 2)
    assert kinds(made.handle(Exited(A, 0), 3), ExitRunner) == [ExitRunner(0)]


def test_with_keep_the_next_job_of_a_server_starts_afresh() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, keep=True, max_restarts=100)
    arrive(made, view(1, A), 0)
    change(made, Membership(1, (A,)), 0)
    change(made, Membership(2, over=True), 1)
    assert kinds(made.handle(Exited(A, 0), 2), ExitRunner) == []
    change(made, Membership(2), 3)
    assert kinds(arrive(made, view(3, A), 4), StartWorker) == [StartWorker(A, view(3, A), 0)]
    assert kinds(made.handle(Exited(A, 1), 5), ReportLoss, ReportFailure) == [ReportFailure(A, "exit code 1")]


# --- real workers ---

FOLLOW = """
    import os, pathlib, sys
    from pliant.identity import worker_spec
    from pliant.elastic.client import ConfigClient

    spec = worker_spec()
    me = spec.worker
    with ConfigClient(spec.config_server) as client:
        roll = client.ready(me)
        while me not in roll.members and not roll.over:
            roll = client.wait_for_membership(roll.number, 30)
        print(f"trains {'torch' in sys.modules}", flush=True)  # before it is up: it is killed right after
        pathlib.Path(f"up-{me.port}-{os.getpid()}").touch()
        while me in roll.members:
            roll = client.wait_for_membership(roll.number, 30)
"""


def up(launcher: Launcher, count: int) -> dict[int, int]:
    """The process of each port that trains or has."""
    launcher.until(lambda: len(launcher.files("up-*")) == count, f"start of {count} members")
    found = (path.name.split("-")[1:] for path in launcher.files("up-*"))
    return {int(port): int(pid) for port, pid in found}


def url_of(runner: Runner) -> str:
    while matched := re.search(rb"config server at (\S+)", line := runner.stderr.readline()) or line:
        if isinstance(matched, re.Match):
            return matched[1].decode()
    raise AssertionError("the runner named no config server")


@pytest.mark.processes
def test_a_killed_member_is_lost_and_replaced(launcher: Launcher, alive: Callable[[int], bool], free_port: int) -> None:
    launcher.script("follow.py", FOLLOW)
    ports = f"{free_port}-{min(free_port + 30, 65535)}"
    runner = launcher.start("-w", "-np", 2, "-port-range", ports, "follow.py", **launcher.without_torch())
    url = url_of(runner)
    with ConfigClient(url) as client:
        (first_port, first), (_, second) = sorted(up(launcher, 2).items())
        before = client.membership()
        assert [job.config_server for job in running_jobs(launcher.environ) if job.pid == runner.pid] == [url]
        os.kill(first, signal.SIGKILL)
        lost = client.wait_for_membership(before.number, 20)
        assert lost.urgent == lost.number
        now = up(launcher, 3)
        roll = client.membership()
        assert now[roll.members[0].port] == second
        assert first_port not in [worker.port for worker in roll.members]
        client.resize(1)
        launcher.until(lambda: len([pid for pid in now.values() if alive(pid)]) == 1, "end of the one removed")
        client.resize(0)
    ended = launcher.end(runner)
    assert ended.code == 0, ended.stderr
    assert not [job for job in running_jobs(launcher.environ) if job.pid == runner.pid]
    assert f"lost 127.0.0.1.{first_port}: killed by SIGKILL" in ended.stderr
    assert "replacing it now (restart 1 of 100)" in ended.stderr
    assert "all 2/2 local workers finished (1 lost), took" in ended.last_line
    assert ended.stdout.count("trains True") == 3


@pytest.mark.processes
def test_a_program_that_always_crashes_ends_the_job(launcher: Launcher) -> None:
    launcher.script(
        "crash.py", FOLLOW.replace("while me in roll.members", "sys.exit(5)\n        while me in roll.members")
    )
    ended = launcher.run("-q", "-w", "--no-warm", "-np", 2, "--max-restarts", 2, "crash.py")
    assert ended.code == 5
    assert re.search(r"worker 127.0.0.1:\d+ .*was the last one, and failed: exit code 5", ended.stderr)


@pytest.mark.processes
def test_the_job_goes_on_when_a_host_dies(launcher: Launcher, free_port: int) -> None:
    launcher.script("follow.py", FOLLOW)
    common = ("-w", "--no-warm", "-np", 2, "-H", "127.0.0.1:1,127.0.0.2:1", "-port", free_port, "follow.py")
    head, other = (
        launcher.start("-self", host, *common, PLIANT_SECRET="s" * 32) for host in ("127.0.0.1", "127.0.0.2")
    )
    with ConfigClient(url_of(head)) as client:
        up(launcher, 2)
        roll = client.membership()
        assert len(roll.members) == 2
        other.kill()
        lost = client.wait_for_membership(roll.number, 20)
        assert [worker.host for worker in lost.members] == ["127.0.0.1"]
        client.finish()
    ended = launcher.end(head)
    assert ended.code == 0, ended.stderr
    assert "the runner on 127.0.0.2 is gone; the job goes on without it" in ended.stderr
