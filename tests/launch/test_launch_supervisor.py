"""The rules of a runner, on values: who is blamed, who is stopped, when it is over."""

from __future__ import annotations

import signal

import pytest

from pliant.cluster import View, Worker
from pliant.errors import REFUSED_EXIT
from pliant.launch.events import (
    Action,
    Exited,
    ExitRunner,
    Interrupted,
    KillWorker,
    ReportFailure,
    RequestReplacement,
    SendStatus,
    ShowMessage,
    StartFailed,
    StartWorker,
    StateChanged,
    TerminateWorker,
    Tick,
    TimedOut,
    Verdict,
)
from pliant.launch.supervisor import Supervisor, describe_exit, exit_code

HERE, THERE = "10.0.0.1", "10.0.0.2"
A, B, C, FAR = Worker(HERE, 1000), Worker(HERE, 1001), Worker(HERE, 1002), Worker(THERE, 1000)


def view(number: int, *workers: Worker, hosts: tuple[str, ...] = (HERE, THERE)) -> View:
    return View(number, workers, tuple(Worker(host, 99) for host in hosts))


def kinds(actions: list[Action], *kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def started(*workers: Worker, watch: bool = False, keep: bool = False, alone: bool = True) -> Supervisor:
    made = Supervisor(HERE, grace_s=10, watch=watch, keep=keep, alone=alone)
    made.handle(StateChanged(view(1, *workers)), 0)
    return made


def test_only_local_workers_are_started_each_on_a_slot() -> None:
    made = Supervisor(HERE, grace_s=10)
    first = view(0, A, FAR, B)
    assert kinds(made.handle(StateChanged(first), 0), StartWorker) == [
        StartWorker(A, first, 0),
        StartWorker(B, first, 1),
    ]


def test_it_is_over_when_all_have_ended_well() -> None:
    made = started(A, B)
    assert kinds(made.handle(Exited(A, 0), 1), ExitRunner) == []
    assert kinds(made.handle(Exited(B, 0), 2), ExitRunner) == [ExitRunner(0)]
    assert made.num_finished == made.num_started == 2
    assert made.handle(Tick(), 3) == []


def test_nothing_is_over_before_the_first_view() -> None:
    made = Supervisor(HERE, grace_s=10)
    assert kinds(made.handle(Tick(), 0), ExitRunner) == []
    assert kinds(made.handle(Interrupted(signal.SIGTERM), 1), ExitRunner) == [ExitRunner(143)]


def test_a_host_without_workers_is_done_at_once() -> None:
    made = Supervisor(HERE, grace_s=10)
    assert kinds(made.handle(StateChanged(view(0, FAR)), 0), ExitRunner) == [ExitRunner(0)]


def test_the_first_failure_is_blamed_and_ends_the_others() -> None:
    made = started(A, B, C)
    actions = made.handle(Exited(B, 3), 1)
    assert kinds(actions, ReportFailure, TerminateWorker) == [
        TerminateWorker(A),
        TerminateWorker(C),
        ReportFailure(B, "exit code 3"),
    ]
    assert kinds(made.handle(Exited(A, 1), 1.1), ReportFailure, ExitRunner) == []
    assert kinds(made.handle(Exited(C, -15), 1.2), ReportFailure, ExitRunner) == [ExitRunner(3)]


def test_who_does_not_end_in_time_is_killed() -> None:
    made = started(A, B)
    made.handle(Exited(A, 1), 5)
    assert made.next_deadline_s == 15
    assert kinds(made.handle(Tick(), 14.9), KillWorker) == []
    assert kinds(made.handle(Tick(), 15), KillWorker) == [KillWorker(B)]
    assert kinds(made.handle(Exited(B, -9), 15.1), ExitRunner) == [ExitRunner(1)]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_a_second_kills(signum: int, code: int) -> None:
    made = started(A)
    assert kinds(made.handle(Interrupted(signum), 1), TerminateWorker, KillWorker) == [TerminateWorker(A)]
    assert kinds(made.handle(Interrupted(signum), 2), TerminateWorker, KillWorker) == [KillWorker(A)]
    assert kinds(made.handle(Exited(A, -9), 3), ExitRunner, ReportFailure) == [ExitRunner(code)]


def test_a_worker_that_ends_badly_after_a_signal_is_not_blamed() -> None:
    made = started(A)
    made.handle(Interrupted(signal.SIGTERM), 1)
    assert kinds(made.handle(Exited(A, 1), 2), ReportFailure, ExitRunner) == [ExitRunner(143)]


def test_the_timeout_ends_the_job_with_124() -> None:
    made = started(A)
    actions = made.handle(TimedOut("5m0.0s"), 300)
    assert any("-timeout 5m0.0s" in action.text for action in actions if isinstance(action, ShowMessage))
    assert kinds(actions, TerminateWorker) == [TerminateWorker(A)]
    assert kinds(made.handle(Exited(A, 0), 301), ExitRunner) == [ExitRunner(124)]


def test_a_worker_that_cannot_be_started_fails_the_job() -> None:
    made = started(A, B)
    assert kinds(made.handle(StartFailed(A, "no memory"), 0), TerminateWorker) == [TerminateWorker(B)]
    assert kinds(made.handle(Exited(B, -15), 1), ExitRunner) == [ExitRunner(1)]


@pytest.mark.parametrize(
    ("code", "shell", "text"),
    [
        (3, 3, "exit code 3"),
        (-11, 139, "killed by SIGSEGV"),
        (-9, 137, "killed by SIGKILL (out of memory?"),
        (-70, 198, "killed by signal 70"),
    ],
)
def test_ends_are_described(code: int, shell: int, text: str) -> None:
    assert exit_code(code) == shell
    assert describe_exit(code).startswith(text)


def test_with_other_hosts_the_verdict_is_waited_for() -> None:
    made = started(A, alone=False)
    actions = made.handle(Exited(A, 0), 1)
    assert kinds(actions, SendStatus, ExitRunner) == [SendStatus("done")]
    assert made.next_deadline_s is None
    assert kinds(made.handle(Verdict("", 0), 9), ExitRunner) == [ExitRunner(0)]


def test_a_failure_elsewhere_ends_the_workers_here() -> None:
    made = started(A, alone=False)
    actions = made.handle(Verdict("worker far failed: exit code 4", 4), 1)
    assert kinds(actions, TerminateWorker, ReportFailure) == [TerminateWorker(A)]
    assert kinds(made.handle(Exited(A, -15), 2), ExitRunner) == [ExitRunner(4)]


def test_what_failed_first_in_the_job_is_the_cause_here_too() -> None:
    made = started(A, alone=False)
    actions = made.handle(Exited(A, 1), 1)
    assert kinds(actions, SendStatus) == [SendStatus("failed", f"worker {A} failed: exit code 1", 1)]
    assert kinds(actions, ExitRunner) == []
    assert kinds(made.handle(Verdict("worker far failed: exit code 4", 4), 1.5), ExitRunner) == [ExitRunner(4)]


def test_a_head_that_says_nothing_is_not_waited_for_for_ever() -> None:
    made = started(A, alone=False)
    made.handle(Exited(A, 1), 1)
    assert made.next_deadline_s == 16
    assert kinds(made.handle(Tick(), 16), ExitRunner) == [ExitRunner(1)]


def test_a_new_view_starts_newcomers_and_ends_leavers() -> None:
    made = started(A, B, watch=True)
    actions = made.handle(StateChanged(view(2, A, C, FAR)), 5)
    assert ShowMessage("arrived at v2, new np=3, local: +1/-1, global: +2/-1") in actions
    assert kinds(actions, StartWorker, TerminateWorker) == [TerminateWorker(B), StartWorker(C, view(2, A, C, FAR), 2)]
    assert kinds(made.handle(Exited(B, 1), 6), ReportFailure, ExitRunner) == []
    # B's slot is free again.
    assert kinds(made.handle(StateChanged(view(3, A, C, B)), 7), StartWorker) == [StartWorker(B, view(3, A, C, B), 1)]


def test_one_that_comes_back_while_leaving_is_started_after_its_end() -> None:
    made = started(A, B, watch=True)
    made.handle(StateChanged(view(2, A)), 1)
    assert kinds(made.handle(StateChanged(view(3, A, B)), 2), StartWorker) == []
    assert kinds(made.handle(Exited(B, 0), 3), StartWorker) == [StartWorker(B, view(3, A, B), 1)]


def test_an_old_view_changes_nothing() -> None:
    made = started(A, watch=True)
    made.handle(StateChanged(view(5, A)), 1)
    assert made.handle(StateChanged(view(4)), 2) == []


def test_a_view_without_workers_stops_all_and_is_a_good_end() -> None:
    made = started(A, watch=True)
    assert kinds(made.handle(StateChanged(view(2, hosts=())), 1), TerminateWorker) == [TerminateWorker(A)]
    assert kinds(made.handle(Exited(A, -15), 2), ExitRunner) == [ExitRunner(0)]


def test_keep_stays_until_a_signal() -> None:
    made = started(A, watch=True, keep=True)
    assert kinds(made.handle(Exited(A, 0), 1), ExitRunner) == []
    assert kinds(made.handle(StateChanged(view(2, A, B)), 2), StartWorker) == [StartWorker(B, view(2, A, B), 0)]
    made.handle(Exited(B, 0), 3)
    assert kinds(made.handle(Interrupted(signal.SIGTERM), 4), ExitRunner) == [ExitRunner(143)]


def test_a_waiting_runner_stays_until_it_was_added_and_removed() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True)
    elsewhere = view(1, FAR, hosts=(THERE,))
    assert kinds(made.handle(StateChanged(elsewhere), 0), ExitRunner) == []
    assert kinds(made.handle(StateChanged(view(2, FAR, A)), 1), StartWorker) == [StartWorker(A, view(2, FAR, A), 0)]
    made.handle(StateChanged(view(3, FAR, hosts=(THERE,))), 2)
    assert kinds(made.handle(Exited(A, 0), 3), ExitRunner) == [ExitRunner(0)]


def test_a_shrunk_host_waits_to_be_used_again() -> None:
    made = started(A, FAR, watch=True)
    made.handle(StateChanged(view(2, FAR)), 1)
    assert kinds(made.handle(Exited(A, 0), 2), ExitRunner, SendStatus) == [SendStatus("idle")]


def test_a_crash_in_watch_mode_ends_the_job() -> None:
    made = started(A, B, watch=True)
    assert kinds(made.handle(Exited(A, 2), 1), ReportFailure, TerminateWorker) == [
        TerminateWorker(B),
        ReportFailure(A, "exit code 2"),
    ]
    assert kinds(made.handle(Exited(B, 0), 2), ExitRunner) == [ExitRunner(2)]


def test_independent_workers_are_replaced_one_by_one_and_the_job_ends_when_all_have_finished() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    actions = made.handle(Exited(A, -9), 20)
    assert kinds(actions, RequestReplacement, TerminateWorker, ExitRunner, SendStatus) == [RequestReplacement()]
    made.handle(StateChanged(view(2, B)), 20)
    assert kinds(made.handle(StateChanged(view(3, B, C)), 20), StartWorker) == [StartWorker(C, view(3, B, C), 0)]
    assert kinds(made.handle(Exited(B, 0), 30), TerminateWorker, ExitRunner, RequestReplacement) == []
    assert kinds(made.handle(Exited(C, 0), 31), ExitRunner) == [ExitRunner(0)]


def test_an_independent_worker_that_is_not_replaced_fails_the_job_when_the_others_have_finished() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    actions = made.handle(Exited(A, REFUSED_EXIT), 20)
    assert kinds(actions, RequestReplacement, ExitRunner) == []
    made.handle(StateChanged(view(2, B)), 21)
    assert kinds(made.handle(Exited(B, 0), 30), ReportFailure, ExitRunner) == [
        ReportFailure(A, f"exit code {REFUSED_EXIT}", "was the last one, and failed"),
        ExitRunner(REFUSED_EXIT),
    ]
