"""The rules of a runner, on values: who is started, stopped, blamed or replaced, and when the job is over."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from pliant.cluster import Membership, View, Worker
from pliant.errors import ENDED_EXIT, GIVEN_UP_EXIT, LOST_PEER_EXIT, PROGRAM_EXIT, REFUSED_EXIT, SHADOW_EXIT
from pliant.launch.events import (
    STRANDED,
    Action,
    Event,
    Exited,
    ExitRunner,
    Idle,
    Interrupted,
    KillWorker,
    NotReplaced,
    ReplacementAdded,
    ReportFailure,
    ReportLoss,
    RequestReplacement,
    RunnerGone,
    SendStatus,
    ServerContact,
    ShowMessage,
    StartFailed,
    StartWorker,
    StateChanged,
    Stopped,
    TerminateWorker,
    Tick,
    TimedOut,
    Verdict,
)
from pliant.launch.replacements import Replacements
from pliant.launch.supervisor import END_NOTICED_S, STRANDED_S, Supervisor
from pliant.launch.worker_ends import Cause, cause_of, describe_exit, exit_code
from pliant.progress_board import ProgramFailure

HERE, THERE = "10.0.0.1", "10.0.0.2"
A, B, C, D = (Worker(HERE, port) for port in (1000, 1001, 1002, 1003))
FAR = Worker(THERE, 1000)


def view(number: int, *workers: Worker, hosts: tuple[str, ...] = (HERE, THERE)) -> View:
    return View(number, workers, tuple(Worker(host, 99) for host in hosts))


def kinds(actions: list[Action], *kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def react(made: Supervisor, event: Event, at_s: float, *kind: type[Action]) -> list[Action]:
    """What the runner does about `event`, of these kinds."""
    return kinds(made.handle(event, at_s), *kind)


def started(*workers: Worker, watch: bool = False, keep: bool = False, alone: bool = True) -> Supervisor:
    made = Supervisor(HERE, grace_s=10, watch=watch, keep=keep, alone=alone, slots=4, max_restarts=9 * watch)
    made.handle(StateChanged(view(1, *workers)), 0)
    return made


def test_a_runner_without_workers_does_not_wait_for_ever_for_a_config_server() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, max_restarts=9)
    made.handle(StateChanged(view(1, A), Membership(1, (A,))), 0)
    made.handle(ServerContact("refused"), 10)
    assert made.next_deadline_s is None, "its worker trains on"
    made.handle(Exited(A, 1), 500)
    assert made.next_deadline_s == 500 + STRANDED_S
    assert react(made, Tick(), 520, ExitRunner) == []
    made.handle(ServerContact(""), 530)
    assert made.next_deadline_s is None
    made.handle(ServerContact("another job's"), 540)
    actions = made.handle(Tick(), 540 + STRANDED_S)
    assert kinds(actions, ExitRunner) == [ExitRunner(1)]
    assert "the config server is away (another job's): start it again" in str(kinds(actions, ShowMessage))


def test_of_several_hosts_the_first_decides_when_no_worker_is_left_and_no_config_server() -> None:
    made = started(A, watch=True, alone=False)
    made.handle(StateChanged(view(1, A, FAR), Membership(1, (A, FAR))), 0)
    made.handle(ServerContact("refused"), 10)
    made.handle(Exited(A, 1), 20)
    (stranded,) = react(made, Tick(), 20 + STRANDED_S, SendStatus, ExitRunner)
    assert isinstance(stranded, SendStatus)
    assert (stranded.status, stranded.code) == (STRANDED, 1)
    assert made.next_deadline_s is None
    assert react(made, Verdict(stranded.cause, 1), 100, ExitRunner) == [ExitRunner(1)]
    kept = Supervisor(HERE, grace_s=10, watch=True, keep=True)
    kept.handle(ServerContact("refused"), 0)
    assert kept.handle(Tick(), 1000) == []
    assert kept.next_deadline_s is None


def test_only_local_workers_are_started_each_on_a_slot() -> None:
    made = Supervisor(HERE, grace_s=10)
    first = view(0, A, FAR, B)
    assert react(made, StateChanged(first), 0, StartWorker) == [StartWorker(A, first, 0), StartWorker(B, first, 1)]


def test_it_is_over_when_all_have_ended_well() -> None:
    made = started(A, B)
    assert react(made, Exited(A, 0), 1, ExitRunner) == []
    assert react(made, Exited(B, 0), 2, ExitRunner) == [ExitRunner(0)]
    assert made.num_finished == made.num_started == 2
    assert made.handle(Tick(), 3) == []


def test_nothing_is_over_before_the_first_view() -> None:
    made = Supervisor(HERE, grace_s=10)
    assert react(made, Tick(), 0, ExitRunner) == []
    assert react(made, Interrupted(signal.SIGTERM), 1, ExitRunner) == [ExitRunner(143)]


def test_a_host_without_workers_is_done_at_once() -> None:
    made = Supervisor(HERE, grace_s=10)
    assert react(made, StateChanged(view(0, FAR)), 0, ExitRunner) == [ExitRunner(0)]


def test_the_first_failure_is_blamed_and_ends_the_others() -> None:
    made = started(A, B, C)
    actions = made.handle(Exited(B, 3), 1)
    assert kinds(actions, ReportFailure, TerminateWorker) == [
        TerminateWorker(A),
        TerminateWorker(C),
        ReportFailure(B, "exit code 3"),
    ]
    assert react(made, Exited(A, 1), 1.1, ReportFailure, ExitRunner) == []
    assert react(made, Exited(C, -15), 1.2, ReportFailure, ExitRunner) == [ExitRunner(3)]


def test_a_worker_that_only_lost_another_one_is_not_blamed() -> None:
    made = started(A, B, C)
    assert made.handle(Exited(A, LOST_PEER_EXIT), 1) == []
    assert react(made, Exited(B, 1), 1.5, ReportFailure, TerminateWorker) == [
        TerminateWorker(C),
        ReportFailure(B, "exit code 1"),
    ]
    assert react(made, Exited(C, LOST_PEER_EXIT), 1.6, ReportFailure, ExitRunner) == [ExitRunner(1)]


@pytest.mark.parametrize("last", [Exited(C, 0), Tick()])
def test_a_lost_worker_that_does_not_fail_by_itself_ends_the_job_all_the_same(last: Event) -> None:
    made = started(A, B, C)
    made.handle(Exited(A, LOST_PEER_EXIT), 1)
    made.handle(Exited(B, LOST_PEER_EXIT), 1.1)
    assert made.next_deadline_s == 6
    [report] = react(made, last, 2 if isinstance(last, Exited) else 6, ReportFailure)
    assert report == ReportFailure(A, f"it has lost another worker (exit code {LOST_PEER_EXIT})", "ended")
    assert made.failed


def test_the_head_names_the_worker_that_failed_on_another_host() -> None:
    made = started(A, B, alone=False)
    made.handle(Exited(A, LOST_PEER_EXIT), 1)
    assert react(made, Exited(B, LOST_PEER_EXIT), 1.1, ReportFailure, ExitRunner) == []
    actions = made.handle(Verdict(f"worker {FAR} failed: exit code 3", 3), 1.5)
    assert kinds(actions, ReportFailure, ExitRunner) == [ExitRunner(3)]


def test_a_program_that_never_joins_is_told_so_unless_it_is_plain() -> None:
    made = started(A, B)
    actions = made.handle(Exited(A, 0, joined=False), 1)
    assert kinds(actions, TerminateWorker) == [TerminateWorker(B)]
    assert "pliant.join()" in said(actions)
    assert "--plain" in said(actions)
    assert react(made, Exited(B, -15), 1, ExitRunner) == [ExitRunner(PROGRAM_EXIT)]
    own_reason = started(A, B)  # as a wrong argument, before it could join
    assert react(own_reason, Exited(A, 2, joined=False), 1, ReportFailure) == [ReportFailure(A, "exit code 2")]
    plain = Supervisor(HERE, grace_s=10, plain=True)
    plain.handle(StateChanged(view(1, A)), 0)
    assert react(plain, Exited(A, 0, joined=False), 1, ExitRunner) == [ExitRunner(0)]


def test_who_does_not_end_in_time_is_killed() -> None:
    made = started(A, B)
    made.handle(Exited(A, 1), 5)
    assert made.next_deadline_s == 15
    assert react(made, Tick(), 14.9, KillWorker) == []
    assert react(made, Tick(), 15, KillWorker) == [KillWorker(B)]
    assert react(made, Exited(B, -9), 15.1, ExitRunner) == [ExitRunner(1)]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_a_second_kills(signum: int, code: int) -> None:
    made = started(A)
    assert react(made, Interrupted(signum), 1, TerminateWorker, KillWorker) == [TerminateWorker(A)]
    assert react(made, Interrupted(signum), 2, TerminateWorker, KillWorker) == [KillWorker(A)]
    assert react(made, Exited(A, -9), 3, ExitRunner, ReportFailure) == [ExitRunner(code)]


def test_the_timeout_ends_the_job_with_124() -> None:
    made = started(A)
    actions = made.handle(TimedOut("5m0.0s"), 300)
    assert any("-timeout 5m0.0s" in action.text for action in actions if isinstance(action, ShowMessage))
    assert kinds(actions, TerminateWorker) == [TerminateWorker(A)]
    assert react(made, Exited(A, 0), 301, ExitRunner) == [ExitRunner(124)]


def test_a_worker_that_cannot_be_started_fails_the_job() -> None:
    made = started(A, B)
    assert react(made, StartFailed(A, "no memory"), 0, TerminateWorker) == [TerminateWorker(B)]
    assert react(made, Exited(B, -15), 1, ExitRunner) == [ExitRunner(1)]


@pytest.mark.parametrize(
    ("code", "shell", "text"),
    [
        (3, 3, "exit code 3"),
        (143, 143, "ended by SIGTERM (exit code 143)"),
        (-11, 139, "killed by SIGSEGV"),
        (-9, 137, "killed by SIGKILL"),
        (-70, 198, "killed by signal 70"),
    ],
)
def test_ends_are_described(code: int, shell: int, text: str) -> None:
    assert exit_code(code) == shell
    assert describe_exit(code) == text


def test_a_kill_for_want_of_memory_says_so() -> None:
    assert (
        describe_exit(-9, out_of_memory=True) == "killed by SIGKILL: the machine, or its container, was out of memory"
    )


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        *((-each, Cause.OUTSIDE) for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        *((code, Cause.OUTSIDE) for code in (143, 137, LOST_PEER_EXIT)),
        *(
            (-each, Cause.PROGRAM)
            for each in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        ),
        *((code, Cause.PROGRAM) for code in (1, 3, 139, REFUSED_EXIT, PROGRAM_EXIT)),
    ],
)
def test_a_signal_from_outside_is_told_from_one_that_a_program_causes(code: int, cause: Cause) -> None:
    assert cause_of(code) is cause
    assert cause_of(code, out_of_memory=True) is (Cause.OUTSIDE if code == LOST_PEER_EXIT else Cause.PROGRAM)


def test_with_other_hosts_the_verdict_is_waited_for() -> None:
    made = started(A, alone=False)
    actions = made.handle(Exited(A, 0), 1)
    assert kinds(actions, SendStatus, ExitRunner) == [SendStatus("done")]
    assert made.next_deadline_s is None
    assert react(made, Verdict("", 0), 9, ExitRunner) == [ExitRunner(0)]


def test_a_failure_elsewhere_ends_the_workers_here() -> None:
    made = started(A, alone=False)
    actions = made.handle(Verdict("worker far failed: exit code 4", 4), 1)
    assert kinds(actions, TerminateWorker, ReportFailure) == [TerminateWorker(A)]
    assert react(made, Exited(A, -15), 2, ExitRunner) == [ExitRunner(4)]


def test_what_failed_first_in_the_job_is_the_cause_here_too() -> None:
    made = started(A, alone=False)
    actions = made.handle(Exited(A, 1), 1)
    assert kinds(actions, SendStatus) == [SendStatus("failed", f"worker {A} failed: exit code 1", 1)]
    assert kinds(actions, ExitRunner) == []
    assert react(made, Verdict("worker far failed: exit code 4", 4), 1.5, ExitRunner) == [ExitRunner(4)]


def test_a_head_that_says_nothing_is_not_waited_for_for_ever() -> None:
    made = started(A, alone=False)
    made.handle(Exited(A, 1), 1)
    assert made.next_deadline_s == 16
    assert react(made, Tick(), 16, ExitRunner) == [ExitRunner(1)]


def test_a_new_view_starts_newcomers_and_ends_leavers() -> None:
    made = started(A, B, watch=True)
    actions = made.handle(StateChanged(view(2, A, C, FAR)), 5)
    assert ShowMessage("arrived at v2, new np=3, local: +1/-1, global: +2/-1") in actions
    assert kinds(actions, StartWorker, TerminateWorker) == [TerminateWorker(B), StartWorker(C, view(2, A, C, FAR), 2)]
    assert react(made, Exited(B, 1), 6, ReportFailure, ExitRunner) == []
    # B's slot is free again.
    assert react(made, StateChanged(view(3, A, C, B)), 7, StartWorker) == [StartWorker(B, view(3, A, C, B), 1)]


def test_one_that_comes_back_while_leaving_is_started_after_its_end() -> None:
    made = started(A, B, watch=True)
    made.handle(StateChanged(view(2, A)), 1)
    assert react(made, StateChanged(view(3, A, B)), 2, StartWorker) == []
    assert react(made, Exited(B, 0), 3, StartWorker) == [StartWorker(B, view(3, A, B), 1)]


def test_an_old_view_changes_nothing() -> None:
    made = started(A, watch=True)
    made.handle(StateChanged(view(5, A)), 1)
    assert made.handle(StateChanged(view(4)), 2) == []


def test_a_view_without_workers_stops_all_and_the_job_has_not_finished() -> None:
    made = started(A, watch=True)
    cleared = StateChanged(view(2, hosts=()), Membership(over=True, wanted=2, ended_by="pliant stop"))
    actions = made.handle(cleared, 1)
    assert kinds(actions, TerminateWorker) == [TerminateWorker(A)]
    assert "the job was ended before its last step: pliant stop" in said(actions)
    assert made.handle(cleared, 1) == []
    assert react(made, Exited(A, -15), 2, ExitRunner) == [ExitRunner(ENDED_EXIT)]


def test_ctrl_c_is_named_as_the_cause_and_not_that_the_last_worker_left() -> None:
    made = training(A)
    assert "SIGINT received by the runner" in said(made.handle(Interrupted(signal.SIGINT), 5))
    actions = change(made, Membership(2, over=True, wanted=1, ended_by="its last worker has left"), 6)
    assert said(actions) == f"the job was ended before its last step: SIGINT received by the runner on {HERE}"
    assert react(made, Exited(A, -15), 7, ExitRunner) == [ExitRunner(130)]


def test_who_has_ended_a_job_is_told_to_the_other_hosts() -> None:
    over = Membership(2, over=True, wanted=1, ended_by="POST /clear from 127.0.0.1")
    made = training(A, FAR, alone=False)
    change(made, over, 5)
    assert react(made, Exited(A, 0), 6, SendStatus, ExitRunner) == [SendStatus("done", over.ended_by, ENDED_EXIT)]
    assert react(made, Verdict(over.ended_by, ENDED_EXIT), 7, ExitRunner) == [ExitRunner(ENDED_EXIT)]
    late = training(A, alone=False)  # it has not heard of it from the server
    late.handle(Exited(A, 0), 6)
    actions = late.handle(Verdict(over.ended_by, ENDED_EXIT), 7)
    assert said(actions) == f"the job was ended before its last step: {over.ended_by}"
    assert kinds(actions, ExitRunner) == [ExitRunner(ENDED_EXIT)]


def test_a_waiting_runner_stays_until_it_was_added_and_removed() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True)
    elsewhere = view(1, FAR, hosts=(THERE,))
    assert react(made, StateChanged(elsewhere), 0, ExitRunner) == []
    assert react(made, StateChanged(view(2, FAR, A)), 1, StartWorker) == [StartWorker(A, view(2, FAR, A), 0)]
    made.handle(StateChanged(view(3, FAR, hosts=(THERE,))), 2)
    assert react(made, Exited(A, 0), 3, ExitRunner) == [ExitRunner(0)]


def test_a_shrunk_host_waits_to_be_used_again() -> None:
    made = started(A, FAR, watch=True)
    made.handle(StateChanged(view(2, FAR)), 1)
    assert react(made, Exited(A, 0), 2, ExitRunner, SendStatus) == [SendStatus("idle")]


def test_independent_workers_are_replaced_one_by_one_and_the_job_ends_when_all_have_finished() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    actions = made.handle(Exited(A, -9), 20)
    assert kinds(actions, RequestReplacement, TerminateWorker, ExitRunner, SendStatus) == [RequestReplacement()]
    made.handle(StateChanged(view(2, B)), 20)
    assert react(made, StateChanged(view(3, B, C)), 20, StartWorker) == [StartWorker(C, view(3, B, C), 0)]
    assert react(made, Exited(B, 0), 30, TerminateWorker, ExitRunner, RequestReplacement) == []
    assert react(made, Exited(C, 0), 31, ExitRunner) == [ExitRunner(0)]


def test_an_independent_worker_that_is_not_replaced_fails_the_job_when_the_others_have_finished() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    actions = made.handle(Exited(A, REFUSED_EXIT), 20)
    assert kinds(actions, RequestReplacement, ExitRunner) == []
    made.handle(StateChanged(view(2, B)), 21)
    assert react(made, Exited(B, 0), 30, ReportFailure, ExitRunner) == [
        ReportFailure(A, f"exit code {REFUSED_EXIT}", "was the last one, and failed"),
        ExitRunner(REFUSED_EXIT),
    ]


def lone_and_independent() -> Supervisor:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A)), 0)
    return made


def test_an_independent_worker_whose_replacement_cannot_come_fails_the_job() -> None:
    made = lone_and_independent()
    assert react(made, Exited(A, -9), 20, RequestReplacement, ExitRunner) == [RequestReplacement()]
    assert react(made, NotReplaced("no free port"), 20.1, ReportFailure, ExitRunner) == [
        ReportFailure(A, "killed by SIGKILL", "was the last one, and failed"),
        ExitRunner(137),
    ]
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    made.handle(Exited(A, -9), 20)
    assert react(made, Exited(B, 0), 20.1, ReportFailure, ExitRunner) == []  # one is coming
    assert react(made, NotReplaced("no free port"), 20.2, ExitRunner) == [ExitRunner(137)]


def test_what_an_independent_worker_left_undone_is_not_forgotten_when_another_one_is_replaced() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, slots=2, max_restarts=5, independent=True)
    made.handle(StateChanged(view(1, A, B)), 0)
    made.handle(Exited(A, REFUSED_EXIT), 20)
    made.handle(StateChanged(view(2, B)), 21)
    assert kinds(made.handle(Exited(B, -9), 22), ReportLoss) == [ReportLoss(B, "killed by SIGKILL")] * 2
    made.handle(StateChanged(view(3, C)), 23)
    assert react(made, Exited(C, 0), 30, ExitRunner) == [ExitRunner(REFUSED_EXIT)]


def test_the_last_independent_worker_is_replaced_and_then_dropped_from_the_view() -> None:
    made = lone_and_independent()
    report = ReportLoss(A, "killed by SIGKILL")
    actions = made.handle(Exited(A, -9), 20)
    assert kinds(actions, ReportLoss, RequestReplacement) == [report, RequestReplacement(), report]
    made.handle(StateChanged(view(2, A, B)), 21)
    made.handle(StateChanged(view(3, B)), 22)
    assert react(made, Exited(B, 0), 30, ExitRunner) == [ExitRunner(0)]


def test_a_mistake_in_the_program_ends_an_elastic_job_at_once() -> None:
    made = training(A, B)
    arrive(made, view(2, A, B, C), 1)
    actions = made.handle(Exited(C, PROGRAM_EXIT), 2)
    assert kinds(actions, RequestReplacement, TerminateWorker, ReportFailure) == [], "only the new worker is wrong"
    assert "not replaced" in said(actions)
    actions = made.handle(Exited(A, PROGRAM_EXIT), 3)
    assert kinds(actions, RequestReplacement, TerminateWorker, ReportFailure) == [
        TerminateWorker(B),
        ReportFailure(A, f"a mistake in the program (exit code {PROGRAM_EXIT})"),
    ]
    assert react(made, Exited(B, 0), 3, ExitRunner) == [ExitRunner(PROGRAM_EXIT)]


def said(actions: Sequence[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, ShowMessage))


def arrive(made: Supervisor, wanted: View, at_s: float) -> list[Action]:
    """Another view is wanted; the members stay."""
    return made.handle(StateChanged(wanted, made._state.membership), at_s)


def change(made: Supervisor, membership: Membership, at_s: float) -> list[Action]:
    """The members change; the wanted view stays."""
    return made.handle(StateChanged(made.view, membership), at_s)


def training(*workers: Worker, max_restarts: int = 100, slots: int = 4, alone: bool = True) -> Supervisor:
    """A job in which all `workers` train, in view 1 and membership 1."""
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
    assert kinds(arrive(made, view(3, A, C), 20.2), StartWorker) == [StartWorker(C, view(3, A, C), 1, shadow=True)]


def test_a_crashed_worker_is_not_started_again_under_its_name_until_the_view_dropped_it() -> None:
    made = training(A, B)
    made.handle(Exited(B, 1), 20)
    assert kinds(arrive(made, view(2, A, B, FAR), 21), StartWorker) == []  # a wish from before the loss
    arrive(made, view(3, A, FAR), 22)
    assert kinds(arrive(made, view(4, A, FAR, B), 23), StartWorker) == [StartWorker(B, view(4, A, FAR, B), 1, True)]


def test_a_new_worker_that_cannot_warm_up_is_started_again_without_as_are_all_later_ones() -> None:
    made = training(A, B)
    both = view(2, A, B, C)
    assert kinds(arrive(made, both, 20), StartWorker) == [StartWorker(C, both, 2, shadow=True)]
    actions = made.handle(Exited(C, SHADOW_EXIT), 21)
    assert kinds(actions, StartWorker, ReportLoss, RequestReplacement) == [StartWorker(C, both, 2)]
    assert said(actions) == "10.0.0.1.1002 could not warm up alone: it is started again without, as all that come later"
    assert made.num_started == 3
    assert kinds(arrive(made, view(3, A, B, C, D), 22), StartWorker) == [StartWorker(D, view(3, A, B, C, D), 3)]
    # Whoever was not to warm up has no such excuse.
    assert react(made, Exited(D, SHADOW_EXIT), 23, ReportLoss) == [ReportLoss(D, "exit code 81")]


def test_a_worker_that_dies_while_it_warms_up_is_a_loss_like_another() -> None:
    made = training(A, B)
    arrive(made, view(2, A, B, C), 20)
    assert react(made, Exited(C, -9), 21, ReportLoss, RequestReplacement, ReportFailure) == [
        ReportLoss(C, "killed by SIGKILL"),
        RequestReplacement(),
    ]
    arrive(made, view(3, A, B), 21.1)
    assert kinds(arrive(made, view(4, A, B, D), 21.2), StartWorker) == [StartWorker(D, view(4, A, B, D), 2, True)]


def test_nobody_warms_up_for_a_job_in_which_nobody_is_left() -> None:
    made = training(A, B)
    made.handle(Exited(A, -9), 20)
    made.handle(Exited(B, -9), 20)
    assert kinds(arrive(made, view(2, B, C), 20.2), StartWorker) == [StartWorker(C, view(2, B, C), 0)]


def test_pauses_double_and_a_long_life_resets_them() -> None:
    made = Replacements(100)
    worker = A
    for at_s, told in ((100, "now"), (200, "in 0.5s"), (300, "in 1s"), (400, "in 2s")):
        made.note_start(worker, at_s - 50)
        made.note_join(worker, at_s - 40)
        assert made.decide(worker, Cause.PROGRAM, at_s)[1].startswith(f"replacing it {told} (restart ")
    for at_s in range(500, 1000, 100):
        made.note_start(worker, at_s - 50)
        last = made.decide(worker, Cause.PROGRAM, at_s)[1]
    assert "in 30s" in last
    made.note_start(worker, 1000)
    made.note_join(worker, 1001)
    assert "replacing it now" in made.decide(worker, Cause.PROGRAM, 1061)[1]


def test_a_replacement_waits_for_its_time() -> None:
    made = training(A, B, C)
    made.handle(Exited(B, 1), 20)
    actions = made.handle(Exited(C, 1), 20)
    assert kinds(actions, RequestReplacement) == []
    assert "in 0.5s (restart 2 of 100)" in said(actions)
    assert made.next_deadline_s == 20.5
    assert react(made, Tick(), 20.5, RequestReplacement) == [RequestReplacement()]


def test_no_replacement_where_a_wish_has_filled_the_slot_or_taken_it() -> None:
    for wish in (view(3, A, D, FAR, Worker(HERE, 1004)), view(3, A, FAR)):
        made = training(A, B, C, FAR)
        made.handle(Exited(B, 1), 20)
        arrive(made, view(2, A, C, D, FAR), 20.1)  # the first one has come
        made.handle(Exited(C, 1), 20.2)
        arrive(made, wish, 20.3)
        assert made.next_deadline_s != 20.7
        assert react(made, Tick(), 21, RequestReplacement) == []


def test_no_replacement_beyond_the_slots() -> None:
    made = training(A, B, C, slots=2)
    assert react(made, Exited(C, 1), 20, RequestReplacement) == []


def test_when_restarts_are_used_up_the_job_goes_on_with_those_left() -> None:
    made = training(A, B, C, max_restarts=1)
    made.handle(Exited(B, 1), 20)
    actions = made.handle(Exited(C, 1), 30)
    assert "not replaced: the 1 restarts of --max-restarts are used up" in said(actions)
    assert react(made, Tick(), 100, RequestReplacement, TerminateWorker, ExitRunner) == []
    arrive(made, view(2, A), 101)
    change(made, Membership(2, over=True), 102)
    assert react(made, Exited(A, 0), 103, ExitRunner) == []  # one was asked for, and is still to come
    assert react(made, NotReplaced("the job has finished"), 104, ExitRunner) == [ExitRunner(0)]


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


def test_many_that_crash_at_once_are_not_a_program_that_always_fails() -> None:
    made = training(A, B, C, D)
    told = [said(made.handle(Exited(worker, -11), 3)) for worker in (B, C, D)]
    assert all("replacing it" in line for line in told)


def replace_again_and_again(made: Supervisor, code: int, count: int, every_s: float, lived_s: float = 1.5) -> list[str]:
    """Worker B and each that comes in its place end with this code, so long after their start; what is said each time."""
    told, at_s, worker = [], 2.0, B
    for number in range(count):
        actions = made.handle(Exited(worker, code), at_s)
        told.append(said(actions).partition("; ")[2])
        while RequestReplacement() not in actions:
            assert made.next_deadline_s is not None
            at_s = made.next_deadline_s
            actions = made.handle(Tick(), at_s)
        worker = Worker(HERE, 2000 + number)
        arrive(made, view(2 * number + 2, A), at_s)
        arrive(made, view(2 * number + 3, A, worker), at_s + every_s - lived_s)
        at_s += every_s
    return told


@pytest.mark.parametrize("code", [-9, -15, 143])
def test_whoever_is_killed_from_outside_is_replaced_at_once_however_often(code: int) -> None:
    made = training(A, B)
    assert replace_again_and_again(made, code, 500, every_s=1.5) == ["replacing it now"] * 500
    # None of them counts against a program that fails by itself.
    made = training(A, B, max_restarts=1)
    replace_again_and_again(made, code, 5, every_s=1.5)
    assert "replacing it now (restart 1 of 1)" in said(made.handle(Exited(A, 1), 100))


def fail_one_by_one(failures: Sequence[ProgramFailure | int | None], every_s: float = 18_000) -> list[Action]:
    """A member, and always the one that replaces it, ends by these errors, hours after the last one, or by these exit codes;
    what is done at the last end. Each is replaced before the next."""
    made, members, actions = training(A, B), [A, B], list[Action]()
    for number, failure in enumerate(failures):
        at_s, victim = (number + 1) * every_s, members.pop()
        code = failure if isinstance(failure, int) else 1
        known = failure if isinstance(failure, ProgramFailure) else None
        actions = made.handle(Exited(victim, code, failure=known), at_s)
        if made.failed:
            assert number == len(failures) - 1
            return actions
        made.handle(Tick(), at_s + 30)
        members.append(Worker(HERE, 2000 + number))
        arrive(made, view(2 * number + 2, *members[:1]), at_s + 31)
        arrive(made, view(2 * number + 3, *members), at_s + 32)
        change(made, Membership(number + 2, tuple(members), wanted=2 * number + 3), at_s + 33)
    return actions


BUG, SAME_LATER, OTHER = (ProgramFailure(*each) for each in ((7, b"bug"), (8, b"bug"), (7, b"other")))


def test_the_same_error_at_the_same_step_three_times_in_a_row_ends_the_job_however_late() -> None:
    actions = fail_one_by_one([BUG, BUG, BUG])
    what = "the same error at step 7, 3 times in a row: exit code 1"
    [report] = kinds(actions, ReportFailure)
    assert report == ReportFailure(Worker(HERE, 2001), what, "failed like those before it", is_repeated=True)
    assert SendStatus("failed", f"worker {Worker(HERE, 2001)} failed: {what}", 1) in actions
    assert kinds(actions, TerminateWorker) == [TerminateWorker(A)]


def test_the_same_error_of_several_at_once_is_no_repetition_as_no_replacement_has_run() -> None:
    made = training(A, B, C, D)
    for worker in (A, B, C):
        assert not kinds(made.handle(Exited(worker, 1, failure=BUG), 100), ReportFailure)
    made.handle(Tick(), 130)
    new = [Worker(HERE, 2000 + number) for number in range(4)]
    arrive(made, view(5, D, *new[:3]), 131)
    change(made, Membership(5, (D, *new[:3]), wanted=5), 132)
    for worker in new[:3]:
        assert not kinds(made.handle(Exited(worker, 1, failure=BUG), 200), ReportFailure), "for the second time"
    assert not kinds(made.handle(Exited(D, 1, failure=BUG), 201), ReportFailure), "for the first time"
    made.handle(Tick(), 300)
    arrive(made, view(9, new[3]), 301)
    change(made, Membership(9, new[3:], wanted=9), 302)
    assert kinds(made.handle(Exited(new[3], 1, failure=BUG), 400), ReportFailure)


@pytest.mark.parametrize(
    "failures",
    [(BUG, BUG, OTHER, BUG, BUG), (BUG, BUG, SAME_LATER, BUG, BUG), (BUG, BUG, -11, BUG, BUG), (None,) * 6, (-11,) * 6],
    ids=["another error", "at another step", "a crash without a word", "never a word", "signals"],
)
def test_other_failures_are_no_reason_to_give_up(failures: Sequence[ProgramFailure | int | None]) -> None:
    assert not kinds(fail_one_by_one(failures), ReportFailure)


def test_a_kill_from_outside_between_them_makes_the_same_error_no_other_one() -> None:
    assert kinds(fail_one_by_one([BUG, -9, BUG, LOST_PEER_EXIT, 143, BUG]), ReportFailure)


def test_one_that_is_killed_while_its_program_is_failing_has_failed_by_itself() -> None:
    made = training(A, B, max_restarts=1)
    made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
    assert "restart 1 of 1" in said(made.handle(Exited(B, 1, failure=BUG), 21))


def test_one_that_is_stuck_when_nobody_else_is_there_has_not_done_its_work() -> None:
    for others in ((), (B,)):
        made = training(A, *others)
        change(made, Membership(2, over=True, wanted=1), 6)
        for other in others:
            made.handle(Exited(other, 0), 7)
        assert react(made, Stopped(A, 10), 20, KillWorker)
        code = 0 if others else 137
        assert react(made, Exited(A, -9), 20, ExitRunner) == [ExitRunner(code)]


def test_nobody_is_replaced_where_no_restarts_are_allowed() -> None:
    made = training(A, B, C, max_restarts=0)
    for code in (-9, 1):
        actions = made.handle(Exited(B if code == 1 else C, code), 20)
        assert kinds(actions, RequestReplacement) == []
        assert said(actions).endswith("not replaced, as --max-restarts 0 says")


def test_a_killer_that_waits_for_every_start_cannot_make_the_runner_spin() -> None:
    made = training(A, B)
    told = replace_again_and_again(made, -9, 100, every_s=0.02, lived_s=0.01)
    assert told[:4] == ["replacing it now", "replacing it now", "replacing it now", told[3]]
    assert told[3] == "replacing it in 0.5s: workers are killed as soon as they start"
    assert told.count("replacing it now") < 60
    assert made._replacements._started_s[Worker(HERE, 2099)] > 15, "a hundred starts in 2 s would be a loop"


def test_a_program_that_takes_all_memory_fails_by_itself() -> None:
    made = training(A, B, max_restarts=1)
    actions = made.handle(Exited(B, -9, out_of_memory=True), 100)
    assert "was out of memory; replacing it now (restart 1 of 1)" in said(actions)
    assert "--max-restarts are used up" in said(made.handle(Exited(A, -9, out_of_memory=True), 200))


def test_one_that_is_killed_before_the_job_has_begun_is_replaced_too_if_the_job_is_watched() -> None:
    for watch, expected in ((True, [RequestReplacement()]), (False, [ReportFailure(A, "killed by SIGKILL")])):
        made = Supervisor(HERE, grace_s=10, watch=watch, slots=2, max_restarts=1)
        arrive(made, view(1, A, B), 0)
        actions = made.handle(Exited(A, -9), 1)
        assert kinds(actions, RequestReplacement, ReportFailure) == expected


def test_one_that_was_silent_and_comes_back_is_lost_and_replaced() -> None:
    made = training(A, B)
    made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
    actions = made.handle(Exited(B, 0), 25)
    assert kinds(actions, RequestReplacement) == [RequestReplacement()]
    assert said(actions).endswith("it was silent, and the others went on without it; replacing it now")
    assert (made.num_finished, made.num_lost) == (0, 1)


def test_one_that_the_others_have_given_up_is_killed_and_replaced() -> None:
    for code in (-9, GIVEN_UP_EXIT):  # it may have seen by itself that it is of no use
        made = training(A, B)
        lost = StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2))
        kill = KillWorker(B, "is of no use: the others have given it up", unless_ending=True)
        assert react(made, lost, 20, KillWorker) == []
        assert made.next_deadline_s == 20 + END_NOTICED_S
        assert react(made, Tick(), 20.5, KillWorker) == [kill]
        assert react(made, lost, 20.6, KillWorker) == []
        actions = made.handle(Exited(B, code), 20.7)
        assert kinds(actions, RequestReplacement) == [RequestReplacement()]
        assert said(actions).endswith("the others have given it up; replacing it now")
        assert (made.num_finished, made.num_lost) == (0, 1)


def test_one_whose_end_the_others_see_first_was_killed_and_not_given_up() -> None:
    made = training(A, B)
    assert react(made, StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20, KillWorker) == []
    assert said(made.handle(Exited(B, -9), 20.1)).endswith("killed by SIGKILL; replacing it now")
    assert react(made, Tick(), 21, KillWorker) == []


def test_one_that_a_request_has_removed_is_not_taken_for_given_up() -> None:
    made = training(A, B, C)
    arrive(made, view(2, A, C), 5)  # B leaves after its step, and C is lost before that
    made.handle(StateChanged(view(3, A), Membership(2, (A,), urgent=2, wanted=3)), 6)
    actions = made.handle(Tick(), 6 + END_NOTICED_S)
    assert [each.worker for each in kinds(actions, KillWorker) if isinstance(each, KillWorker)] == [C]


def test_one_whose_process_is_stopped_is_reported_killed_and_replaced() -> None:
    made = training(A, B)
    why = "its process was stopped for 10 s"
    assert react(made, Stopped(B, 10.2), 20, ReportLoss, KillWorker) == [
        ReportLoss(B, why),
        KillWorker(B, f"is of no use: {why}"),
    ]
    actions = made.handle(Exited(B, -9), 20.1)
    assert kinds(actions, RequestReplacement) == [RequestReplacement()]
    assert said(actions) == f"lost 10.0.0.1.1001: {why}; replacing it now"


def test_a_worker_that_does_nothing_before_it_trains_is_killed_and_replaced_later_each_time() -> None:
    made = started(A, B, watch=True)
    limit_s = 600.0
    for worker, at_s in ((B, 700.0), (C, 2000.0)):
        [killed] = react(made, Idle(worker, at_s, limit_s), at_s, KillWorker)
        assert isinstance(killed, KillWorker)
        assert killed.worker == worker
        assert react(made, Idle(worker, at_s, limit_s), at_s, KillWorker) == [], "it is on its way out"
        actions = made.handle(Exited(worker, -9), at_s + 1)
        assert kinds(actions, RequestReplacement, ReportFailure) == [RequestReplacement()]
        assert f"lost {worker.label}: it did nothing for" in said(actions)
        arrive(made, view(int(at_s), A, C if worker == B else D), at_s + 2)
        assert react(made, Idle(C, 1100, limit_s), at_s + 3, KillWorker) == [], "the next one has twice as long"


def test_members_and_jobs_that_are_not_watched_are_not_ended_for_doing_nothing() -> None:
    assert react(training(A, B), Idle(A, 1000, 600), 1000, KillWorker) == [], "the others decide about a member"
    assert react(started(A, B), Idle(A, 1000, 600), 1000, KillWorker) == []


def test_a_server_that_is_reset_while_the_job_trains_ends_it_with_a_word() -> None:
    made = training(A, B)
    actions = made.handle(StateChanged(None, Membership(2)), 20)
    assert "its config server was reset while it trained" in said(actions)
    assert set(kinds(actions, TerminateWorker)) == {TerminateWorker(A), TerminateWorker(B)}
    made.handle(Exited(A, -15), 21)
    assert react(made, Exited(B, -15), 21, ExitRunner) == [ExitRunner(ENDED_EXIT)]


def test_a_job_of_which_all_workers_are_stopped_is_left_alone() -> None:
    made = training(A, B)
    for worker in (A, B):
        assert react(made, Stopped(worker, 10.2, others_run=False), 20, ReportLoss, KillWorker) == []
    far = training(A, FAR)
    assert react(far, Stopped(A, 10.2, others_run=False), 20, KillWorker) != [], "on another host one may wait"


def test_one_that_is_stopped_when_the_others_have_finished_does_not_spoil_the_job() -> None:
    made = training(A, B)
    made.handle(StateChanged(None, Membership(2, over=True, wanted=1)), 21)
    made.handle(Exited(A, 0), 22)
    assert react(made, Stopped(B, 10.2), 30, ReportLoss, KillWorker) != []
    assert react(made, Exited(B, -9), 31, ExitRunner, ReportFailure) == [ExitRunner(0)]


def test_without_watch_a_stopped_worker_ends_the_job_by_its_name() -> None:
    made = started(A, B)
    assert react(made, Stopped(B, 10.2), 20, ReportLoss) == []
    assert react(made, Exited(B, -9), 20.1, ReportFailure) == [ReportFailure(B, "its process was stopped for 10 s")]


def test_one_that_is_silent_at_the_end_does_not_spoil_the_job() -> None:
    for code in (0, -9):
        made = training(A, B)
        made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
        made.handle(StateChanged(None, Membership(3, over=True, urgent=2, wanted=2)), 21)
        assert react(made, Exited(A, 0), 22, ExitRunner) == []
        assert react(made, Tick(), 30, TerminateWorker) == [TerminateWorker(B)]
        assert react(made, Tick(), 40, KillWorker) == [KillWorker(B)]
        assert react(made, Exited(B, code), 41, ExitRunner, ReportFailure) == [ExitRunner(0)]
        assert (made.num_started, made.num_finished, made.num_lost) == (2, 1, 1)


def test_the_last_crash_fails_the_job_and_is_blamed() -> None:
    made = training(A, B, max_restarts=0)
    made.handle(Exited(A, 3), 20)
    arrive(made, view(2, B), 21)
    actions = made.handle(Exited(B, -11), 22)
    assert kinds(actions, ReportLoss, ReportFailure, ExitRunner) == [
        ReportLoss(B, "killed by SIGSEGV"),
        ReportFailure(B, "killed by SIGSEGV", "was the last one, and failed"),
        ExitRunner(139),
    ]


def test_members_on_another_host_go_on() -> None:
    made = training(A, FAR, max_restarts=0, alone=False)
    actions = made.handle(Exited(A, 3), 20)
    assert kinds(actions, ExitRunner, ReportFailure, SendStatus) == [SendStatus("idle")]


def test_a_replacement_that_is_refused_may_be_the_end() -> None:
    made = training(A, B)
    made.handle(Exited(A, 3), 20)
    assert react(made, Exited(B, 4), 20, ReportFailure) == []  # one is coming
    change(made, Membership(3, over=True), 20.1)
    assert react(made, NotReplaced("the cluster was cleared"), 20.2, ReportFailure, ExitRunner) == [
        ReportFailure(B, "exit code 4", "was the last one, and failed"),
        ExitRunner(4),
    ]


def test_a_replacement_that_was_removed_again_before_this_runner_saw_it_is_not_waited_for() -> None:
    over = Membership(3, over=True, ended_by="somebody")
    for is_answered_first in (True, False):
        made = training(A, B)
        made.handle(Exited(B, -9), 20)
        made.handle(Exited(A, 0), 20)
        added, ended = ReplacementAdded(C, 3), StateChanged(view(4), over)  # view 3, with C, was never seen here
        first, last = (added, ended) if is_answered_first else (ended, added)
        assert react(made, first, 20.1, ExitRunner) == []
        assert react(made, last, 20.2, ExitRunner) == [ExitRunner(ENDED_EXIT)]


def test_after_a_replacement_that_was_never_seen_the_next_one_comes_too() -> None:
    for is_seen in (True, False):
        made = training(A, B, slots=2)
        made.handle(Exited(B, -9), 20)
        made.handle(ReplacementAdded(C, 3), 20.1)
        if is_seen:
            arrive(made, view(3, A, C), 20.2)
            assert react(made, Exited(C, -9), 20.3, RequestReplacement) == [RequestReplacement()]
            continue
        arrive(made, view(4, A), 20.2)  # somebody has asked for one worker
        arrive(made, view(5, A, D), 20.3)
        assert react(made, Exited(D, -9), 20.4, RequestReplacement) == [RequestReplacement()]


def test_a_refused_worker_is_reported_and_never_replaced() -> None:
    made = training(A, B)
    actions = made.handle(Exited(B, 78), 20)
    assert kinds(actions, ReportLoss, RequestReplacement) == [ReportLoss(B, "exit code 78")]
    assert "so it is not replaced" in said(actions)
    arrive(made, view(2, A), 21)
    assert react(made, Exited(A, 78), 22, ExitRunner) == [ExitRunner(78)]


def test_a_member_that_is_no_longer_wanted_leaves_by_itself() -> None:
    made = training(A, B)
    assert kinds(arrive(made, view(2, A), 5), TerminateWorker) == []
    assert made.next_deadline_s is None
    change(made, Membership(2, (A,), wanted=2), 50)
    assert made.next_deadline_s == 60
    assert react(made, Exited(B, 0), 51, ReportLoss, RequestReplacement, ExitRunner, ReportFailure) == []
    assert made.next_deadline_s is None
    assert (made.num_started, made.num_finished, made.num_lost) == (2, 1, 0)


def test_one_that_does_not_leave_is_told_and_then_killed() -> None:
    made = training(A, B)
    arrive(made, view(2, A), 5)
    change(made, Membership(2, (A,), wanted=2), 50)
    assert react(made, Tick(), 60, TerminateWorker) == [TerminateWorker(B)]
    assert react(made, Tick(), 70, KillWorker) == [KillWorker(B)]
    assert react(made, Exited(B, -9), 71, ReportLoss, RequestReplacement) == []


def test_a_newcomer_whose_wish_was_withdrawn_is_told_at_once() -> None:
    made = training(A)
    arrive(made, view(2, A, B), 5)
    assert kinds(arrive(made, view(3, A), 6), TerminateWorker) == [TerminateWorker(B)]
    assert react(made, Exited(B, -15), 7, ReportLoss, RequestReplacement) == []


def test_the_last_member_is_replaced_and_only_then_dropped_from_the_view() -> None:
    made = training(A)
    actions = made.handle(Exited(A, -9), 20)
    report = ReportLoss(A, "killed by SIGKILL")
    assert kinds(actions, ReportLoss, RequestReplacement, ExitRunner) == [report, RequestReplacement(), report]
    change(made, Membership(2, (), urgent=2, wanted=1), 20.1)
    arrive(made, view(2, A, B), 20.2)
    assert kinds(arrive(made, view(3, B), 20.3), ExitRunner) == []
    assert B in made.running


def test_a_newcomer_that_crashes_is_reported_so_that_nobody_waits_for_it() -> None:
    made = training(A)
    arrive(made, view(2, A, B), 5)
    assert react(made, Exited(B, 1), 6, ReportLoss, RequestReplacement) == [
        ReportLoss(B, "exit code 1"),
        RequestReplacement(),
    ]
    arrive(made, view(3, A, C), 7)
    actions = made.handle(Exited(C, 0), 8)
    assert kinds(actions, ReportLoss, RequestReplacement) == [ReportLoss(C, "it ended before it was ready")]
    assert react(made, StartFailed(D, "no memory"), 9, ReportLoss) == [ReportLoss(D, "could not be started: no memory")]


def test_one_that_left_and_is_wanted_again_is_started_again() -> None:
    made = training(A, B)
    arrive(made, view(2, A), 5)
    change(made, Membership(2, (A,), wanted=2), 6)
    assert kinds(arrive(made, view(3, A, B), 7), StartWorker) == []
    assert react(made, Exited(B, 0), 8, StartWorker) == [StartWorker(B, view(3, A, B), 1, shadow=True)]


def test_one_that_others_hold_for_lost_is_replaced_when_it_ends() -> None:
    for code, at_s in ((-9, 20.01), (1, 29), (-9, 31)):
        made = training(A, B)
        made.handle(StateChanged(view(2, A), Membership(2, (A,), urgent=2, wanted=2)), 20)
        told = [TerminateWorker(B)] if at_s > 30 else []
        assert react(made, Tick(), min(at_s, 30), TerminateWorker) == told
        assert RequestReplacement() in made.handle(Exited(B, code), at_s)


def test_a_new_member_that_a_loss_has_put_off_is_not_held_for_lost() -> None:
    made = training(A, C)
    arrive(made, view(2, A, C, B), 5)
    change(made, Membership(2, (A, C, B), wanted=2), 6)
    made.handle(Exited(C, -9), 7)
    made.handle(StateChanged(view(3, A, B), Membership(3, (A,), urgent=3, wanted=3)), 8)
    assert react(made, Tick(), 60, TerminateWorker) == [], "it stands by"
    arrive(made, view(4, A), 61)
    assert react(made, Tick(), 99, TerminateWorker) == [TerminateWorker(B)]
    assert react(made, Exited(B, -15), 99, ReportLoss, RequestReplacement) == [], "a request has removed it"


def test_one_that_sigterm_has_ended_at_once_is_replaced_unless_it_has_left() -> None:
    made = training(A, B)
    actions = made.handle(Exited(B, 143), 20)
    assert kinds(actions, ReportLoss, RequestReplacement) == [
        ReportLoss(B, "ended by SIGTERM (exit code 143)"),
        RequestReplacement(),
    ]
    made = training(A, B)
    arrive(made, view(2, A), 20)  # its first SIGTERM: it has asked to leave
    assert react(made, Exited(B, 143), 21, ReportLoss, RequestReplacement) == [
        ReportLoss(B, "ended by SIGTERM (exit code 143)")
    ]


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
    assert react(made, Exited(B, -15), 6, ExitRunner, ReportLoss) == []
    assert made.next_deadline_s is None
    assert react(made, Exited(A, 0), 500, ExitRunner) == [ExitRunner(0)]


def test_a_crash_after_the_end_is_still_a_failure() -> None:
    made = training(A)
    change(made, Membership(2, over=True, wanted=1), 6)
    assert react(made, Exited(A, 1), 7, ReportFailure, ExitRunner) == [ReportFailure(A, "exit code 1"), ExitRunner(1)]


@pytest.mark.parametrize("code", [0, -15])
def test_resize_to_nobody_is_no_failure(code: int) -> None:
    made = training(A, B)
    made.handle(Exited(B, 1), 5)
    arrive(made, view(2, A), 5)
    arrive(made, view(3, A, C), 5)
    change(made, Membership(3, (A, C), urgent=2, wanted=3), 6)
    arrive(made, View(4, (), ()), 7)
    assert kinds(change(made, Membership(4, over=True, wanted=4, ended_by="me"), 7), TerminateWorker) == []
    if code:
        assert react(made, Tick(), 17, TerminateWorker) == [TerminateWorker(A), TerminateWorker(C)]
    made.handle(Exited(A, code), 17)
    assert react(made, Exited(C, code), 17, ExitRunner, ReportFailure) == [ExitRunner(ENDED_EXIT)]


def test_a_job_that_has_begun_outlives_a_host() -> None:
    made = training(A, FAR, alone=False)
    actions = made.handle(RunnerGone(THERE), 1)
    assert kinds(actions, TerminateWorker, SendStatus, ReportLoss) == [
        ReportLoss(FAR, "the runner on 10.0.0.2 is gone")
    ]
    made.handle(Exited(A, 0), 2)
    assert react(made, Verdict("", 0), 3, ExitRunner) == [ExitRunner(0)]
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
    assert react(made, Exited(A, 0), 3, ExitRunner) == [ExitRunner(0)]


def test_keep_stays_until_a_signal() -> None:
    made = started(A, watch=True, keep=True)
    assert kinds(made.handle(Exited(A, 0), 1), ExitRunner) == []
    assert kinds(made.handle(StateChanged(view(2, A, B)), 2), StartWorker) == [StartWorker(B, view(2, A, B), 0)]
    made.handle(Exited(B, 0), 3)
    assert kinds(made.handle(Interrupted(signal.SIGTERM), 4), ExitRunner) == [ExitRunner(143)]


def test_with_keep_the_next_job_of_a_server_starts_afresh() -> None:
    made = Supervisor(HERE, grace_s=10, watch=True, keep=True, max_restarts=100)
    arrive(made, view(1, A), 0)
    change(made, Membership(1, (A,)), 0)
    change(made, Membership(2, over=True), 1)
    assert kinds(made.handle(Exited(A, 0), 2), ExitRunner) == []
    change(made, Membership(2), 3)
    assert kinds(arrive(made, view(3, A), 4), StartWorker) == [StartWorker(A, view(3, A), 0)]
    assert kinds(made.handle(Exited(A, 1), 5), ReportLoss, ReportFailure) == [ReportFailure(A, "exit code 1")]
