"""The rules of a runner: who is started, stopped, blamed or replaced, when the job is over, and with which exit code.

Pure: events in, actions out; no process, socket, thread or clock. `process_manager` reports what happens and carries out
what comes back, so that every rule is tested without a process.

An elastic job has begun once it has a member. Before that, and in a job whose program never joins, one crash ends the job,
and a worker that is not wanted is told to end. After that, a crash is only a loss, and members that are no longer wanted
leave by themselves, at the end of a step. Independent workers (`--independent`) never join, and count as begun from the
start: each of them is replaced when it crashes, and the job is over when all have ended.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Set
from dataclasses import dataclass

from pliant.cluster import Membership, View, Worker
from pliant.errors import LOST_PEER_EXIT, PROGRAM_EXIT, REFUSED_EXIT, SHADOW_EXIT
from pliant.launch import events

VERDICT_WAIT_S = 5.0
"""After a failure here, how long to wait for the head to say what failed first in the whole job."""
BLAME_WAIT_S = 5.0
"""How long to wait for the end of the worker that failed, after another one has ended because it had lost it."""
TIMEOUT_EXIT = 124
NEVER_JOINED = (
    "the program ended without calling pliant.join(), so every worker did all of the work by itself: call it (see "
    "docs/coming-from.md), or add --plain if the workers are not meant to train together"
)
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""A member that lived this long shows that workers can live here: the next crash is replaced at once."""
QUICK_S = 10.0
"""A crash so soon after the start is likely to come again."""
MAX_QUICK = 3


def exit_code(code: int) -> int:
    """Return a shell's exit code for a process that ended with `code` (negative: killed by that signal)."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Return `exit code 3`, or `killed by SIGSEGV`."""
    if code == PROGRAM_EXIT:
        return f"a mistake in the program (exit code {code})"
    if code == LOST_PEER_EXIT:
        return f"it has lost another worker (exit code {code})"
    if code == 128 + signal.SIGTERM:
        return f"ended by SIGTERM (exit code {code})"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory? see dmesg)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


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
    def is_training(self) -> bool:
        """Whether some member still lives, as far as this runner knows."""
        return bool(set(self.membership.members) - self._crashed_members)

    def remove(self, worker: Worker) -> EndedWorker:
        """Forget a local worker that has ended."""
        ended = EndedWorker(worker in self._joined, worker in self._reported_lost)
        for group in (self._joined, self._reported_lost, self._dismissed):
            group.discard(worker)
        return ended


class Replacements:
    """Whether, and how soon, crashed workers of this host are replaced: those due, those requested, how many may come."""

    def __init__(self, max_restarts: int) -> None:
        self.due_s: list[float] = []
        """When the next ones are to be requested."""
        self.requested = 0
        """Requested of the config server, and not yet in the view."""
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._pause_s = 0.0
        self._started_s: dict[Worker, float] = {}
        self._joined_s: dict[Worker, float] = {}
        # A replacement inherits how many quick crashes in a row led to it. Several workers that are
        # killed at once are thus one crash, and a program that always fails is three.
        self._quick_before: dict[Worker, int] = {}
        self._num_quick = 0
        self._given_up = False

    def note_start(self, worker: Worker, at_s: float) -> None:
        self._started_s[worker] = at_s
        self._quick_before[worker] = self._num_quick
        self._joined_s.pop(worker, None)

    def note_join(self, worker: Worker, at_s: float) -> None:
        """Note that `worker` became a member."""
        self._joined_s.setdefault(worker, at_s)

    def decide(self, worker: Worker, at_s: float) -> tuple[bool, str]:
        """Decide about a replacement for `worker`, which crashed: whether one comes, and what to tell the user."""
        is_quick = at_s - self._started_s.get(worker, at_s) < QUICK_S
        self._num_quick = self._quick_before.get(worker, 0) + 1 if is_quick else 0
        self._given_up = self._given_up or self._num_quick >= MAX_QUICK
        if self._given_up:
            times = f"{MAX_QUICK} times in a row"
            return False, f"not replaced: workers on this host crashed within {QUICK_S:g}s of their start {times}"
        if self._num_restarts >= self._max_restarts:
            return False, f"not replaced: the {self._max_restarts} restarts of --max-restarts are used up"
        if at_s - self._joined_s.get(worker, at_s) >= STEADY_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        self._num_restarts += 1
        self.due_s.append(at_s + pause_s)
        when = f"in {pause_s:g}s" if pause_s else "now"
        return True, f"replacing it {when} (restart {self._num_restarts} of {self._max_restarts})"

    def note_view(self, added: Set[Worker], removed: Set[Worker]) -> None:
        """Note whom a new view adds to this host and whom it removes, other than by a loss.

        What was requested has then come. Or somebody else's request has filled the slot, or does not want it filled.
        """
        num_come = min(self.requested, len(added))
        self.requested -= num_come
        del self.due_s[: len(added) - num_come]
        if removed:
            self.due_s.clear()

    def take_due(self, at_s: float, num_free: int) -> int:
        """Return how many to request now, where `num_free` slots are free; others that are due are given up."""
        num_due = sum(1 for due_s in self.due_s if at_s >= due_s)
        self.due_s = [due_s for due_s in self.due_s if at_s < due_s]
        num_new = max(0, min(num_due, num_free - self.requested))
        self.requested += num_new
        return num_new

    def note_refusal(self) -> None:
        """Note that one that was requested will not come."""
        self.requested = max(0, self.requested - 1)


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
        self._bereaved: Worker | None = None  # the first worker that ended because it had lost another one
        self._blame_by_s = 0.0  # when it is blamed after all
        self._leave_by_s: dict[Worker, float] = {}  # members no longer wanted, and when they are told to end
        self._last_crash: tuple[Worker, str, int] | None = None
        self._outcome: tuple[str, int] | None = None
        self._has_verdict = alone
        self._verdict_by_s: float | None = None
        self._status = ""
        self._was_listed = False
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
        waits = [*self.leaving.values(), *self._leave_by_s.values(), *self._replacements.due_s]
        if self._verdict_by_s is not None and not self._has_verdict:
            waits.append(self._verdict_by_s)
        if self._bereaved is not None and not self.failed:
            waits.append(self._blame_by_s)
        return min(waits, default=None)

    def handle(self, event: events.Event, at_s: float) -> list[events.Action]:
        """Return what to do about `event`. Nothing comes back after ExitRunner."""
        if self._over:
            return []
        reactions = self._react(event, at_s)
        reactions += self._fail_if_nobody_is_left(at_s)
        reactions += self._blame_bereaved(at_s)
        # Workers are told to end before the user is told why, which may wait for the last lines of output.
        actions = self._stop_workers(at_s) + reactions
        actions += self._request_replacements(at_s)
        actions += self._start_workers(at_s)
        actions += self._send_status()
        actions += self._exit_if_over(at_s)
        return actions

    def _react(self, event: events.Event, at_s: float) -> list[events.Action]:
        match event:
            case events.StateChanged(view, membership):
                return self._on_state(view, membership, at_s)
            case events.Exited(worker, code, joined):
                return self._on_exit(worker, code, joined, at_s)
            case events.StartFailed(worker, why):
                self.running.pop(worker, None)
                self.leaving.pop(worker, None)
                if self._state.begun:
                    return self._on_crash(worker, f"could not be started: {why}", 1, at_s)
                return self._fail(f"worker {worker} could not be started: {why}", 1, at_s)
            case events.Interrupted(signum):
                return self._on_signal(signum, at_s)
            case events.TimedOut(timeout):
                return self._fail(f"the job was not done after -timeout {timeout}", TIMEOUT_EXIT, at_s)
            case events.Verdict(cause, code):
                return self._on_verdict(cause, code)
            case events.RunnerGone(host, was_head):
                return self._on_runner_gone(host, was_head, at_s)
            case events.NotReplaced(why):
                self._replacements.note_refusal()
                return [events.ShowMessage(f"no replacement: {why}")]
            case events.Tick() | events.WarmProcessUp():
                return []

    def _on_state(self, view: View | None, membership: Membership, at_s: float) -> list[events.Action]:
        is_new = view is not None and (self.view is None or view.number > self.view.number)
        messages: list[events.Action] = []
        if view is not None and is_new:
            if self._watch:
                messages = [events.ShowMessage(describe_arrival(self.view, view, self._host))]
            if not view.workers and self._others_remain():
                self._last_crash = None  # somebody asked for it: the last workers were not lost
        added, removed = self._state.update(view if is_new else None, membership, self.running)
        if view is not None and is_new:
            self._replacements.note_view(added, removed)
            self._was_listed = self._was_listed or self._is_listed(view)
        for worker in self.running.keys() & set(membership.members):
            self._replacements.note_join(worker, at_s)
        return messages

    def _on_exit(self, worker: Worker, code: int, joined: bool, at_s: float) -> list[events.Action]:
        self.running.pop(worker, None)
        self._leave_by_s.pop(worker, None)
        was_told = self.leaving.pop(worker, None) is not None
        had_shadow = worker in self._in_shadow
        self._in_shadow.discard(worker)
        ended = self._state.remove(worker)
        if self.failed:
            return []  # it follows another's failure, so how it ended says nothing new
        is_wanted = worker in self._state.wanted
        if code == SHADOW_EXIT and had_shadow and not ended.was_member and is_wanted and not self._state.over:
            # The others have never heard of it, so it is started again under the same address.
            self._has_shadow = False
            self.num_started -= 1
            text = f"{worker.label} could not warm up alone: it is started again without, as all that come later"
            return [events.ShowMessage(text)]
        if code == 0 and not (joined or was_told or self._plain or self._state.begun):
            return self._fail(NEVER_JOINED, PROGRAM_EXIT, at_s)
        if code == 0 or (was_told and not ended.was_reported_lost):
            self.num_finished += 1
            return [] if was_told else self._on_good_end(worker, was_early=is_wanted and not ended.was_member)
        what = describe_exit(code)
        is_mistake = code == PROGRAM_EXIT and ended.was_member  # a new worker's own mistake does not end the others
        if is_mistake or not self._state.begun or (self._state.over and is_wanted):
            if code == LOST_PEER_EXIT:
                if self._bereaved is None:
                    self._bereaved, self._blame_by_s = worker, at_s + BLAME_WAIT_S
                return []
            cause = f"worker {worker} failed: {what}"
            return [events.ReportFailure(worker, what), *self._fail(cause, exit_code(code), at_s, is_said=True)]
        return self._on_crash(worker, what, exit_code(code), at_s, is_wanted=is_wanted or ended.was_reported_lost)

    def _on_good_end(self, worker: Worker, *, was_early: bool) -> list[events.Action]:
        """React to a worker that ended with 0, and by itself."""
        state = self._state
        if self._independent:
            state.finished.add(worker)
        elif not state.begun or state.over or worker in state.membership.members:
            state.finished.add(worker)
            self._last_crash = None  # the job has outlived it
        elif was_early:
            state.add_crash(worker)
            why = "it ended before it was ready"  # and the others would wait for it for ever
            return [events.ReportLoss(worker, why), events.ShowMessage(f"lost {worker.label}: {why}")]
        return []

    def _on_crash(
        self, worker: Worker, what: str, code: int, at_s: float, *, is_wanted: bool = True
    ) -> list[events.Action]:
        """React to a loss in a job that has begun."""
        self._state.add_crash(worker)
        self.num_lost += 1
        is_replaced = False
        if self._state.over or not is_wanted:
            then = "it was told to leave anyway"
        elif code == PROGRAM_EXIT:
            then = "another one would make the same mistake, so it is not replaced (see its messages)"
        elif code == REFUSED_EXIT:
            then = "the job refused it, so it is not replaced (its own message says why)"
        else:
            is_replaced, then = self._replacements.decide(worker, at_s)
        if not (self._independent and is_replaced):
            self._last_crash = (worker, what, code)
        return [events.ReportLoss(worker, what), events.ShowMessage(f"lost {worker.label}: {what}; {then}")]

    def _others_remain(self) -> bool:
        """Whether somebody still trains, or will."""
        return bool(self._replacements.requested or self._replacements.due_s or self._state.known)

    def _fail_if_nobody_is_left(self, at_s: float) -> list[events.Action]:
        """Fail if the last worker anywhere was lost, and none comes."""
        if self._last_crash is None or self.failed or self.running or self._others_remain():
            return []
        worker, what, code = self._last_crash
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
        if self.running or self._bereaved or self._replacements.due_s or self._replacements.requested:
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

    def _send_status(self) -> list[events.Action]:
        status = events.FAILED if self.failed else self._current_status()
        if status == self._status:
            return []
        self._status = status
        return [] if status == events.FAILED else [events.SendStatus(status)]

    def _exit_if_over(self, at_s: float) -> list[events.Action]:
        if self.running:
            return []
        if self._outcome is not None:
            must_wait = not self._has_verdict and self._verdict_by_s is not None and at_s < self._verdict_by_s
            code = self._outcome[1]
        else:
            is_done = self._current_status() == events.DONE if self._alone else self._has_verdict
            must_wait, code = not is_done, 0
        if must_wait:
            return []
        self._over = True
        return [events.ExitRunner(code)]
