"""The rules of a runner: who is started, stopped, blamed or replaced, when the job is over, and with which exit code.

Pure: events in, actions out; no process, socket, thread or clock. `process_manager` reports what happens and carries out
what comes back, so that every rule is tested without a process.

An elastic job has begun once it has a member. Before that, and in a job whose program never joins, one crash ends the job,
and a worker that is not wanted is told to end. After that, a crash is only a loss, and members that are no longer wanted
leave by themselves, at the end of a step. Independent workers (`--independent`) never join, and count as begun from the
start: each of them is replaced when it crashes, and the job is over when all have ended.

A watched worker that is killed from outside is always only a loss, and is replaced at once, however often: machines come and
go. Pauses and limits are for programs that fail by themselves.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from pliant.cluster import Membership, View, Worker
from pliant.duration import span_text
from pliant.errors import ENDED_EXIT, GIVEN_UP, GIVEN_UP_EXIT, LOST_PEER_EXIT, PROGRAM_EXIT, REFUSED_EXIT, SHADOW_EXIT
from pliant.launch import events
from pliant.launch.replacements import MAX_REPEATS, Replacements
from pliant.launch.worker_ends import Cause, cause_of, describe_exit, exit_code

VERDICT_WAIT_S = 5.0
"""After a failure here, how long to wait for the head to say what failed first in the whole job."""
BLAME_WAIT_S = 5.0
"""How long to wait for the end of the worker that failed, after another one has ended because it had lost it."""
MOST_DOUBLINGS = 6
STRANDED_S = 60.0
"""A runner without workers waits so long for a config server that does not answer."""
TIMEOUT_EXIT = 124
NEVER_JOINED = (
    "the program ended without calling pliant.join(), so every worker did all of the work by itself: call it (see "
    "docs/coming-from.md), or add --plain if the workers are not meant to train together"
)
END_NOTICED_S = 0.5
"""The others may see that a worker has been killed before its runner does. So one that they have given up has this long
until it counts as one that lives, and is ended."""
SILENT = "it was silent, and the others went on without it"


def describe_arrival(old: View | None, new: View, host: str) -> str:
    """Return KungFu's log line for the runner of `host`: `arrived at v3, new np=4, local: +1/-0, global: +2/-0`."""
    before, now = set(old.workers if old else ()), set(new.workers)
    added, removed = now - before, before - now
    local = f"+{len(_on(host, added))}/-{len(_on(host, removed))}"
    return f"arrived at v{new.number}, new np={new.size}, local: {local}, global: +{len(added)}/-{len(removed)}"


def _on(host: str, workers: Collection[Worker]) -> set[Worker]:
    return {worker for worker in workers if worker.host == host}


# --- what the runner knows ---


@dataclass(frozen=True, slots=True)
class EndedWorker:
    """What a local worker was to the job when it ended."""

    was_member: bool
    """It has been a member."""
    was_reported_lost: bool
    """Other members had reported it lost, rather than a request removed it."""


class HostState:
    """The job as the runner on `host` knows it: who is wanted, who trains, and what became of its own workers."""

    def __init__(self, host: str, *, independent: bool = False) -> None:
        self.view: View | None = None
        self.membership = Membership()
        self.begun = independent
        """Whether somebody has been a member, so that a crash is only a loss."""
        self.finished: set[Worker] = set()
        """Workers of the view that ended well."""
        self._host, self._independent = host, independent
        self._closed_by: int | None = None  # the view with which a job ended, until the next job of the server begins
        self._joined: set[Worker] = set()  # local workers that are or were members
        self._reported_lost: set[Worker] = set()  # local workers that others have reported lost
        self._dismissed: set[Worker] = set()  # local workers that live, but are not in the view any more
        self._crashed: set[Worker] = set()  # of the view
        self._crashed_members: set[Worker] = set()

    @property
    def over(self) -> bool:
        """Whether a job that had begun has ended."""
        return self.begun and self.membership.over

    @property
    def wanted(self) -> tuple[Worker, ...]:
        """Workers of the view, on all hosts."""
        return self.view.workers if self.view is not None else ()

    @property
    def known(self) -> set[Worker]:
        """Workers that train or shall, and have neither crashed here nor finished."""
        members = set(self.membership.members) - self._crashed_members
        return ((set(self.wanted) - self._crashed) | members) - self.finished

    @property
    def here(self) -> set[Worker]:
        """Workers wanted on this host that have not crashed."""
        return _on(self._host, self.wanted) - self._crashed

    def must_start(self, worker: Worker) -> bool:
        """Whether a wanted worker has still to do its work. A crashed one is replaced by one with another address."""
        return worker.host == self._host and worker not in self.finished and worker not in self._crashed

    @property
    def reported_lost(self) -> frozenset[Worker]:
        """Local workers that live, and that others have reported lost."""
        return frozenset(self._reported_lost)

    def never_joined(self, worker: Worker) -> bool:
        """Whether a local worker has never been a member."""
        return worker not in self._joined

    def update(
        self, view: View | None, membership: Membership, living: Collection[Worker]
    ) -> tuple[set[Worker], set[Worker]]:
        """Take the newest view and membership; return whom the view adds to this host, and whom a request removed.

        `view` is None where the wanted view is unset; the old one then stays. `living` are the local workers that run.
        """
        old, self.membership = self.membership, membership
        if membership.urgent > old.number:
            # A request would have removed it from the view first, and left it a member until the next step. A new member
            # that the loss of another has put off is still wanted.
            left = set(old.members).difference(membership.members).intersection(living)
            wanted = view.workers if view is not None else self.wanted
            self._reported_lost |= left - self._dismissed - set(wanted)
        if old.over and not membership.over:  # somebody has reset the server
            self.begun = self._independent
        self.begun = self.begun or bool(membership.members)
        if membership.over and not old.over:
            self._closed_by = self.view.number if self.view is not None else -1
        self._joined |= set(membership.members).intersection(living)
        added, removed = self._update_view(view, living) if view is not None else (set[Worker](), set[Worker]())
        if self._closed_by is not None and not membership.over and self.view and self.view.number > self._closed_by:
            self._closed_by = None
            self.finished.clear()
            self._crashed.clear()
        self._crashed &= set(self.wanted)
        self._crashed_members &= set(membership.members)
        return added, removed

    def _update_view(self, view: View, living: Collection[Worker]) -> tuple[set[Worker], set[Worker]]:
        before, now = _on(self._host, self.wanted), _on(self._host, view.workers)
        removed = before - now - self._crashed
        self._dismissed = (self._dismissed | removed.intersection(living)) - now
        self.view = view
        self.finished &= set(view.workers)
        return now - before, removed - self._reported_lost

    def add_crash(self, worker: Worker) -> None:
        """Note that `worker` has crashed: it is not started again under this address."""
        self._crashed |= {worker}.intersection(self.wanted)
        self._crashed_members |= {worker}.intersection(self.membership.members)

    @property
    def crashed(self) -> set[Worker]:
        """Local workers that have crashed, and are still listed as wanted or as members."""
        return self._crashed | self._crashed_members

    @property
    def is_training(self) -> bool:
        """Whether some member still lives, as far as this runner knows."""
        return bool(set(self.membership.members) - self._crashed_members)

    def remove(self, worker: Worker) -> EndedWorker:
        """Forget a local worker that has ended."""
        ended = EndedWorker(worker in self._joined, worker in self._reported_lost)
        for group in (self._joined, self._reported_lost, self._dismissed):
            group.discard(worker)
        return ended


# --- what the runner does ---


class Supervisor:
    """The rules of one runner. Takes events and returns actions; does no I/O."""

    def __init__(
        self,
        host: str,
        *,
        grace_s: float,
        watch: bool = False,
        keep: bool = False,
        alone: bool = True,
        slots: int = 1,
        max_restarts: int = 0,
        independent: bool = False,
        plain: bool = False,
    ) -> None:
        """With `plain`, the program need not join."""
        self.running: dict[Worker, int] = {}
        """Local workers that live, with their slots."""
        self.leaving: dict[Worker, float] = {}
        """Local workers told to end, and when they will be killed."""
        self.num_started = self.num_finished = self.num_lost = 0
        """Over the whole job; workers that a view removed have finished too."""
        self._state = HostState(host, independent=independent)
        self._host, self._grace_s, self._slots = host, grace_s, slots
        self._watch, self._keep, self._alone, self._independent = watch, keep, alone, independent
        self._plain = plain or independent
        self._has_shadow = watch and not independent
        """Whether new workers can warm up while others train, as far as this runner knows."""
        self._in_shadow: set[Worker] = set()
        """Local workers that were started to warm up."""
        self._replacements = Replacements(max_restarts)
        self._given_up: dict[Worker, str] = {}
        """Local workers that live, but are lost to the job, with the reason."""
        self._kill_by_s: dict[Worker, float] = {}  # workers that the others have reported lost, and when they are ended
        self._num_idle = 0
        """Workers that were ended because they did nothing."""
        self._bereaved: Worker | None = None  # the first worker that ended because it had lost another one
        self._blame_by_s = 0.0  # when it is blamed after all
        self._leave_by_s: dict[Worker, float] = {}  # members no longer wanted, and when they are told to end
        self._last_crash: tuple[Worker, str, int] | None = None
        self._undone: tuple[Worker, str, int] | None = None
        """The first crash of an independent worker that is not replaced: nobody does its work."""
        self._ended_by = ""  # who has ended the job before its last step
        self._outcome: tuple[str, int] | None = None
        self._has_verdict = alone
        self._verdict_by_s: float | None = None
        self._status = ""
        self._was_listed = False
        self._restored = 0
        self._server_lost = ""  # why the config server cannot be reached; empty while it can
        self._stranded_s: float | None = None  # since when there is neither a config server nor a local worker
        self._over = False

    @property
    def view(self) -> View | None:
        """The newest view that the runner has seen."""
        return self._state.view

    @property
    def failed(self) -> bool:
        """Whether the job ends with a failure."""
        return self._outcome is not None

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due; None means that only events matter."""
        waits = [
            *self.leaving.values(), *self._leave_by_s.values(), *self._replacements.due_s, *self._kill_by_s.values()
        ]  # fmt: skip
        if self._verdict_by_s is not None and not self._has_verdict:
            waits.append(self._verdict_by_s)
        if self._bereaved is not None and not self.failed:
            waits.append(self._blame_by_s)
        if self._stranded_s is not None and self._status != events.STRANDED:
            waits.append(self._stranded_s + STRANDED_S)
        return min(waits, default=None)

    def handle(self, event: events.Event, at_s: float) -> list[events.Action]:
        """Return what to do about `event`. Nothing comes back after ExitRunner."""
        if self._over:
            return []
        reactions = self._react(event, at_s)
        reactions += self._fail_if_nobody_is_left(at_s)
        reactions += self._blame_bereaved(at_s)
        reactions += self._give_up_if_stranded(at_s)
        # Workers are told to end before the user is told why, which may wait for the last lines of output.
        actions = self._kill_given_up(at_s) + self._stop_workers(at_s) + reactions
        actions += self._request_replacements(at_s)
        actions += self._start_workers(at_s)
        actions += self._send_status(at_s)
        actions += self._exit_if_over(at_s)
        return actions

    def _react(self, event: events.Event, at_s: float) -> list[events.Action]:
        match event:
            case events.StateChanged(view, membership, restored):
                return self._on_state(view, membership, at_s) + self._repeat_losses(restored)
            case events.Exited():
                return self._on_exit(event, at_s)
            case events.Stopped():
                return self._on_stopped(event)
            case events.Idle():
                return self._on_idle(event)
            case events.StartFailed(worker, why):
                self.running.pop(worker, None)
                self.leaving.pop(worker, None)
                if self._state.begun:
                    return self._on_loss(worker, f"could not be started: {why}", 1, Cause.PROGRAM, at_s)
                return self._fail(f"worker {worker} could not be started: {why}", 1, at_s)
            case events.ServerContact(why):
                self._server_lost = why
                return []
            case events.Interrupted(signum):
                return self._on_signal(signum, at_s)
            case events.TimedOut(timeout):
                return self._fail(f"the job was not done after -timeout {timeout}", TIMEOUT_EXIT, at_s)
            case events.Verdict(cause, code):
                return self._on_verdict(cause, code)
            case events.RunnerGone(host, was_head):
                return self._on_runner_gone(host, was_head, at_s)
            case events.ReplacementAdded(worker, version):
                self._replacements.note_added(worker, version)
                return []
            case events.NotReplaced(why):
                self._replacements.note_refusal()
                if self._independent:
                    self._undone = self._undone or self._last_crash
                return [events.ShowMessage(f"no replacement: {why}")]
            case events.Tick() | events.WarmProcessChanged():
                return []

    def _on_state(self, view: View | None, membership: Membership, at_s: float) -> list[events.Action]:
        is_new = view is not None and (self.view is None or view.number > self.view.number)
        was_reset = (
            self._state.is_training and view is None and not (membership.members or membership.over or self._keep)
        )
        messages: list[events.Action] = []
        if view is not None and is_new:
            if self._watch:
                messages = [events.ShowMessage(describe_arrival(self.view, view, self._host))]
            if not view.workers and self._others_remain():
                self._last_crash = self._undone = None  # somebody asked for it: the last workers were not lost
        added, removed = self._state.update(view if is_new else None, membership, self.running)
        if view is not None and is_new:
            self._replacements.note_view(view.number, added, removed)
            self._was_listed = self._was_listed or self._is_listed(view)
        for worker in self.running.keys() & set(membership.members):
            self._replacements.note_join(worker, at_s)
        if was_reset:
            cause = "the job was ended before its last step: its config server was reset while it trained"
            return [*messages, *self._fail(cause, ENDED_EXIT, at_s)]
        if not membership.over:
            self._ended_by = ""  # with --keep, the next job has begun
            return messages
        return [*messages, *self._note_end(membership.ended_by)]

    def _note_end(self, by: str) -> list[events.Action]:
        """Note that somebody has ended the job before its last step; empty if its program has run to its end."""
        if not by or self._ended_by:
            return []
        # After a failure here, such as Ctrl-C, the config server has only seen that the last worker left.
        self._ended_by = self._outcome[0] if self._outcome is not None else by
        return [events.ShowMessage(f"the job was ended before its last step: {self._ended_by}", True)]

    def _repeat_losses(self, restored: int) -> list[events.Action]:
        """Report again what a config server that was restored may not know."""
        if restored <= self._restored:
            return []
        self._restored = restored
        return [events.ReportLoss(worker, "it was lost before") for worker in sorted(self._state.crashed)]

    def _on_exit(self, exited: events.Exited, at_s: float) -> list[events.Action]:
        worker, code = exited.worker, exited.code
        self.running.pop(worker, None)
        self._leave_by_s.pop(worker, None)
        was_told = self.leaving.pop(worker, None) is not None
        had_shadow = worker in self._in_shadow
        self._in_shadow.discard(worker)
        ended = self._state.remove(worker)
        given_up = self._given_up.pop(worker, "")
        self._kill_by_s.pop(worker, None)
        if self.failed:
            return []  # it follows another's failure, so how it ended says nothing new
        is_wanted = worker in self._state.wanted
        if code == SHADOW_EXIT and had_shadow and not ended.was_member and is_wanted and not self._state.over:
            # The others have never heard of it, so it is started again under the same address.
            self._has_shadow = False
            self.num_started -= 1
            text = f"{worker.label} could not warm up alone: it is started again without, as all that come later"
            return [events.ShowMessage(text)]
        if code == 0 and not (exited.joined or was_told or self._plain or self._state.begun):
            return self._fail(NEVER_JOINED, PROGRAM_EXIT, at_s)
        if (code == 0 or was_told) and not ended.was_reported_lost:
            self.num_finished += 1
            return [] if was_told else self._on_good_end(worker, was_early=is_wanted and not ended.was_member)
        # The others may have noticed the end of its program before the process had ended.
        given_up = given_up if code in (-signal.SIGKILL, GIVEN_UP_EXIT) and exited.failure is None else ""
        what = given_up or (describe_exit(code, out_of_memory=exited.out_of_memory) if code else SILENT)
        is_outside = code == 0 or was_told or cause_of(code, out_of_memory=exited.out_of_memory) is Cause.OUTSIDE
        cause = Cause.OUTSIDE if is_outside or given_up else Cause.PROGRAM
        # Nobody misses one that is stuck when others have done the last step; but somebody must have.
        is_missed_by_nobody = (
            given_up and self._state.begun and (self._state.finished or self.running or not self._alone)
        )
        if self._is_failure(code, cause, ended, is_wanted=is_wanted) and not is_missed_by_nobody:
            if code == LOST_PEER_EXIT:
                if self._bereaved is None:
                    self._bereaved, self._blame_by_s = worker, at_s + BLAME_WAIT_S
                return []
            text = f"worker {worker} failed: {what}"
            return [events.ReportFailure(worker, what), *self._fail(text, exit_code(code), at_s, is_said=True)]
        is_own = cause is Cause.PROGRAM and code != REFUSED_EXIT and ended.was_member and not self._state.over
        if is_own and self._replacements.is_hopeless(worker, exited.failure):
            assert exited.failure is not None, "several were equal"
            again = f"the same error at step {exited.failure.step}, {MAX_REPEATS} times in a row: {what}"
            report = events.ReportFailure(worker, again, "failed like those before it", is_repeated=True)
            return [report, *self._fail(f"worker {worker} failed: {again}", exit_code(code), at_s, is_said=True)]
        is_missed = is_wanted or ended.was_reported_lost
        return self._on_loss(worker, what, exit_code(code), cause, at_s, is_wanted=is_missed)

    def _is_failure(self, code: int, cause: Cause, ended: EndedWorker, *, is_wanted: bool) -> bool:
        """Return whether this end of a worker ends the job, rather than being a loss."""
        if code == 0:
            return False
        if code == PROGRAM_EXIT and ended.was_member:  # a new worker's own mistake does not end the others
            return True
        if not self._state.begun:
            return not (self._watch and cause is Cause.OUTSIDE and code != LOST_PEER_EXIT)
        return self._state.over and is_wanted

    # --- workers that the others have given up, or are about to ---

    def _on_stopped(self, stopped: events.Stopped) -> list[events.Action]:
        """End a worker whose process has been stopped for too long, if there are others that wait for it."""
        worker, elsewhere = stopped.worker, [each for each in self._state.known if each.host != self._host]
        if worker not in self.running or worker in self.leaving or self.failed:
            return []
        if not (stopped.others_run or elsewhere) and not self._state.over:
            return []  # somebody lets the whole job pause
        why = self._given_up[worker] = f"its process was stopped for {stopped.for_s:.0f} s"
        report = [events.ReportLoss(worker, why)] if self._state.begun and not self._state.over else []
        return [*report, events.KillWorker(worker, f"is of no use: {why}")]

    def _on_idle(self, idle: events.Idle) -> list[events.Action]:
        """End a worker that has never trained and does nothing: the job, or its place in it, waits for it. Where that
        happens again and again, each has twice as long as the one before."""
        worker = idle.worker
        is_late = worker in self.running and self._state.never_joined(worker) and worker not in self.leaving
        if not (self._watch and is_late) or self.failed or worker in self._given_up:
            return []
        if idle.for_s < idle.limit_s * 2 ** min(self._num_idle, MOST_DOUBLINGS):
            return []
        self._num_idle += 1
        why = self._given_up[worker] = (
            f"it did nothing for {span_text(idle.for_s)} before its first step (--stall-timeout)"
        )
        return [events.KillWorker(worker, f"is of no use: {why}")]

    def _kill_given_up(self, at_s: float) -> list[events.Action]:
        """End workers that the others have reported lost though they live: they cannot come back into the job."""
        found = self._state.reported_lost & self.running.keys() - self._given_up.keys() - self.leaving.keys()
        self._kill_by_s = {worker: self._kill_by_s.get(worker, at_s + END_NOTICED_S) for worker in sorted(found)}
        due = [worker for worker, by_s in self._kill_by_s.items() if at_s >= by_s]
        self._given_up |= dict.fromkeys(due, GIVEN_UP)
        return [events.KillWorker(worker, f"is of no use: {GIVEN_UP}", unless_ending=True) for worker in due]

    def _on_good_end(self, worker: Worker, *, was_early: bool) -> list[events.Action]:
        """React to a worker that ended with 0, and by itself."""
        state = self._state
        if self._independent:
            state.finished.add(worker)
            if not self._replacements.are_coming:
                self._last_crash = None  # others do its work, unless it is `_undone`
        elif not state.begun or state.over or worker in state.membership.members:
            state.finished.add(worker)
            self._last_crash = None  # the job has outlived it
        elif was_early:
            state.add_crash(worker)
            why = "it ended before it was ready"  # and the others would wait for it for ever
            return [events.ReportLoss(worker, why), events.ShowMessage(f"lost {worker.label}: {why}")]
        return []

    def _on_loss(
        self, worker: Worker, what: str, code: int, cause: Cause, at_s: float, *, is_wanted: bool = True
    ) -> list[events.Action]:
        """React to the end of a worker that does not end the job."""
        self._state.add_crash(worker)
        self.num_lost += 1
        is_replaced = False
        if self._state.over:
            then = "the job is over"
        elif not is_wanted:
            then = "it was told to leave anyway"
        elif code == PROGRAM_EXIT:
            then = "another one would make the same mistake, so it is not replaced (see its messages)"
        elif code == REFUSED_EXIT:
            then = "the job refused it, so it is not replaced (its own message says why)"
        else:
            is_replaced, then = self._replacements.decide(worker, cause, at_s)
        if not self._state.over:  # after it, others have done the last step
            self._last_crash = (worker, what, code)
            if self._independent and not is_replaced:
                self._undone = self._undone or self._last_crash
        return [events.ReportLoss(worker, what), events.ShowMessage(f"lost {worker.label}: {what}; {then}")]

    def _others_remain(self) -> bool:
        """Whether somebody still trains, or will."""
        return bool(self._replacements.are_coming or self._state.known)

    def _fail_if_nobody_is_left(self, at_s: float) -> list[events.Action]:
        """Fail if the last worker anywhere was lost, and none comes."""
        crash = self._undone or self._last_crash
        if crash is None or self.failed or self.running or self._others_remain():
            return []
        worker, what, code = crash
        cause = f"worker {worker} was lost, the last one: {what}"
        report = events.ReportFailure(worker, what, "was the last one, and failed")
        return [report, *self._fail(cause, code, at_s, is_said=True)]

    def _blame_bereaved(self, at_s: float) -> list[events.Action]:
        """Fail by a worker that had lost another one, if that one has not failed by itself in time."""
        worker = self._bereaved
        if worker is None or self.failed or (at_s < self._blame_by_s and (self.running or not self._alone)):
            return []
        report = events.ReportFailure(worker, describe_exit(LOST_PEER_EXIT), "ended")
        cause = f"worker {worker} has lost another worker"
        return [report, *self._fail(cause, LOST_PEER_EXIT, at_s, is_said=True)]

    def _is_stranded(self, at_s: float) -> bool:
        """Whether no worker is left here, and none can be started because the config server has not answered for long."""
        is_left = not (self.running or self._keep or self.failed or self._state.over)
        if not (is_left and self._server_lost):
            self._stranded_s = None
        elif self._stranded_s is None:
            self._stranded_s = at_s
        return self._stranded_s is not None and at_s >= self._stranded_s + STRANDED_S

    def _give_up_if_stranded(self, at_s: float) -> list[events.Action]:
        return self._fail(self._why_stranded(), 1, at_s) if self._is_stranded(at_s) and self._alone else []

    def _why_stranded(self) -> str:
        return (
            f"no worker is left on {self._host}, and for {STRANDED_S:g} s none could come, because the config server is away "
            f"({self._server_lost}): start it again, and then the job, with `--resume auto` if it has checkpoints"
        )

    def _on_runner_gone(self, host: str, was_head: bool, at_s: float) -> list[events.Action]:
        """React to the end of the runner on `host`, which takes its workers with it."""
        if not self._state.begun:
            return self._fail(f"the runner on {host} is gone", 1, at_s)
        if was_head:
            self._alone = self._has_verdict = True
        known = self._state.known
        theirs = sorted(worker for worker in known if worker.host == host)
        reports: list[events.Action] = [events.ReportLoss(worker, f"the runner on {host} is gone") for worker in theirs]
        if theirs and len(theirs) == len(known) and not self._replacements.requested:
            return [*reports, *self._fail(f"the runner on {host} is gone, and all workers with it", 1, at_s)]
        return [*reports, events.ShowMessage(f"the runner on {host} is gone; the job goes on without it")]

    def _on_signal(self, signum: int, at_s: float) -> list[events.Action]:
        name = signal.Signals(signum).name
        if self.failed:
            self._has_verdict = True  # the head's verdict is not waited for any more
            return [
                events.ShowMessage(f"{name} while ending: killing what is left", True),
                *map(events.KillWorker, self.running),
            ]
        return self._fail(f"{name} received by the runner on {self._host}", 128 + signum, at_s)

    def _fail(self, cause: str, code: int, at_s: float, *, is_said: bool = False) -> list[events.Action]:
        if self.failed:
            return []
        self._outcome = (cause, code)
        self._verdict_by_s = at_s + self._grace_s + VERDICT_WAIT_S
        ending = [f"ending {len(self.running)} local workers"] if self.running else []
        text = "; ".join([*([] if is_said else [cause]), *ending])
        return [*([events.ShowMessage(text, True)] if text else []), events.SendStatus(events.FAILED, cause, code)]

    def _on_verdict(self, cause: str, code: int) -> list[events.Action]:
        if self._has_verdict:
            return []
        self._has_verdict = True
        if code == ENDED_EXIT:
            return self._note_end(cause)
        if not cause or (self._outcome is not None and self._outcome[0] == cause):
            return []
        # What failed here may only have followed: the head saw what came first.
        self._outcome = (cause, code)
        return [events.ShowMessage(f"the job ends on every host: {cause}", True)]

    def _stop_workers(self, at_s: float) -> list[events.Action]:
        overdue = [worker for worker, kill_at_s in self.leaving.items() if at_s >= kill_at_s]
        self.leaving |= dict.fromkeys(overdue, at_s + self._grace_s)  # again, should one not die
        actions: list[events.Action] = [events.KillWorker(worker) for worker in overdue]
        for worker in self.running:
            if worker in self.leaving:
                continue
            wait_s = self._wait_before_stop(worker)
            if wait_s is None:
                self._leave_by_s.pop(worker, None)
            elif not wait_s or at_s >= self._leave_by_s.setdefault(worker, at_s + wait_s):
                self._leave_by_s.pop(worker, None)
                self.leaving[worker] = at_s + self._grace_s
                actions.append(events.TerminateWorker(worker))
        return actions

    def _wait_before_stop(self, worker: Worker) -> float | None:
        """Return how long `worker` may go on before it is told to end; None means for ever."""
        state = self._state
        is_wanted = worker in state.wanted
        if self.failed:
            return 0.0
        if not state.begun:
            return None if is_wanted else 0.0
        if state.over and state.never_joined(worker):
            return 0.0
        if is_wanted or worker in state.membership.members:
            return None  # a member leaves by itself, when the next membership of the others lets it
        return 0.0 if state.never_joined(worker) else self._grace_s

    def _request_replacements(self, at_s: float) -> list[events.Action]:
        if self.failed or self._state.over:
            self._replacements.due_s.clear()
            return []
        num_new = self._replacements.take_due(at_s, self._slots - len(self._state.here))
        actions: list[events.Action] = [events.RequestReplacement()] * num_new
        if num_new and self._last_crash is not None and not self._state.known:
            # The server keeps the last worker of a view listed, lost or not, because without any the job would be over.
            # Now that another is coming, it can go.
            actions.append(events.ReportLoss(*self._last_crash[:2]))
        return actions

    def _start_workers(self, at_s: float) -> list[events.Action]:
        if self.failed or self._bereaved or self.view is None or self._state.over:
            return []
        actions: list[events.Action] = []
        for worker in self.view.workers:
            # A worker with the same address that is still leaving is waited for: two cannot share a port.
            if self._state.must_start(worker) and worker not in self.running:
                slot = next(slot for slot in range(len(self.running) + 1) if slot not in self.running.values())
                self.running[worker] = slot
                self.num_started += 1
                self._replacements.note_start(worker, at_s)
                shadow = self._has_shadow and self._state.begun and self._state.is_training
                if shadow:
                    self._in_shadow.add(worker)
                actions.append(events.StartWorker(worker, self.view, slot, shadow))
        return actions

    def _current_status(self) -> str:
        if self.running or self._bereaved or self._replacements.are_coming:
            return events.BUSY
        if self.view is None:
            return events.IDLE
        if not self._watch:
            return events.DONE
        if self._keep:
            return events.IDLE  # only a signal ends it
        if self._state.over:
            return events.DONE
        was_removed = self._was_listed and not self._is_listed(self.view)
        return events.DONE if self._state.finished or not self.view.workers or was_removed else events.IDLE

    def _is_listed(self, view: View) -> bool:
        return any(runner.host == self._host for runner in view.runners)

    def _send_status(self, at_s: float) -> list[events.Action]:
        is_stranded = self._is_stranded(at_s)
        status = events.FAILED if self.failed else events.STRANDED if is_stranded else self._current_status()
        if status == self._status:
            return []
        self._status = status
        if is_stranded:
            return [events.SendStatus(status, self._why_stranded(), 1)]
        if status == events.FAILED:
            return []
        is_ended = bool(self._ended_by) and status == events.DONE
        return [events.SendStatus(status, self._ended_by, ENDED_EXIT) if is_ended else events.SendStatus(status)]

    def _exit_if_over(self, at_s: float) -> list[events.Action]:
        if self.running:
            return []
        if self._outcome is not None:
            must_wait = not self._has_verdict and self._verdict_by_s is not None and at_s < self._verdict_by_s
            code = self._outcome[1]
        else:
            is_done = self._current_status() == events.DONE if self._alone else self._has_verdict
            must_wait, code = not is_done, ENDED_EXIT if self._ended_by else 0
        if must_wait:
            return []
        self._over = True
        return [events.ExitRunner(code)]
