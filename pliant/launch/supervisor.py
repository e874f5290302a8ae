"""What a runner does about what happens: events in, actions out.

Pure: no process, socket, thread or clock. `crew` feeds it with what it sees and carries out what
comes back; every rule of the launcher (who is blamed, stopped or replaced, when it is over, with which exit code) is
here and tested without a process.

A job that follows the roll has begun once somebody is on it. Before that, and in a job that never
uses it, one crash ends the job and who is not wanted is told to end. After that, a crash is only a loss,
and members that are no longer wanted leave by themselves, at the end of a step.
"""

from __future__ import annotations

import signal

from pliant.cluster import View, Worker
from pliant.errors import REFUSED_EXIT
from pliant.launch.company import Company
from pliant.launch.events import (
    BUSY,
    DONE,
    FAILED,
    IDLE,
    Action,
    Arrived,
    Blame,
    Event,
    Exited,
    Finish,
    Interrupted,
    Kill,
    NotReplaced,
    Replace,
    Report,
    Rolled,
    RunnerGone,
    Say,
    Start,
    StartFailed,
    Tell,
    Terminate,
    Tick,
    TimedOut,
    Verdict,
    Warmed,
)
from pliant.launch.replacement import Replacements

VERDICT_WAIT_S = 5.0
"""After a failure here, how long to wait for the head to say what failed first in the whole job."""
TIMEOUT_EXIT = 124


def exit_code(code: int) -> int:
    """A shell's exit code for a process that ended with `code` (negative: killed by that signal)."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """`exit code 3`, or `killed by SIGSEGV`."""
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

    def count(workers: set[Worker], where: str = "") -> int:
        return sum(1 for worker in workers if where in ("", worker.host))

    local = f"+{count(now - before, host)}/-{count(before - now, host)}"
    return f"arrived at v{new.number}, new np={new.size}, local: {local}, global: +{count(now - before)}/-{count(before - now)}"


class Supervisor:
    """The rules of one runner. Fed with events, answers with actions; does no I/O."""

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
    ) -> None:
        self.running: dict[Worker, int] = {}
        """Local workers that live, with their slots."""
        self.leaving: dict[Worker, float] = {}
        """Those told to end, and when they will be killed."""
        self.num_started = self.num_finished = self.num_lost = 0
        """Over the whole job; those that a view removed have finished too."""
        self._independent = independent
        self._company = Company(host, begun=independent)
        self._host, self._grace_s, self._slots = host, grace_s, slots
        self._watch, self._keep, self._alone = watch, keep, alone
        self._replacements = Replacements(max_restarts)
        self._patience: dict[Worker, float] = {}  # members no longer wanted, and how long they may take
        self._last_crash: tuple[Worker, str, int] | None = None
        self._outcome: tuple[str, int] | None = None
        self._verdict = alone
        self._verdict_by_s: float | None = None
        self._status = ""
        self._was_listed = False
        self._over = False

    @property
    def view(self) -> View | None:
        return self._company.view

    @property
    def failed(self) -> bool:
        return self._outcome is not None

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due; None means that only events matter."""
        waits = [*self.leaving.values(), *self._patience.values(), *self._replacements.due_s]
        if self._verdict_by_s is not None and not self._verdict:
            waits.append(self._verdict_by_s)
        return min(waits, default=None)

    def handle(self, event: Event, at_s: float) -> list[Action]:
        """What to do about `event`. Nothing comes back after Finish."""
        if self._over:
            return []
        reacted = self._react(event, at_s)
        reacted += self._fail_if_deserted(at_s)
        # Telling workers to end comes before telling the user why, which may wait for last lines.
        actions = self._stop_some(at_s) + reacted
        actions += self._replace_some(at_s)
        actions += self._start_some(at_s)
        actions += self._tell_status()
        actions += self._finish_if_over(at_s)
        return actions

    def _react(self, event: Event, at_s: float) -> list[Action]:
        match event:
            case Arrived(view):
                return self._arrive(view, at_s)
            case Rolled(roll):
                self._company.follow(roll, self.running)
                for worker in self.running.keys() & set(roll.members):
                    self._replacements.join(worker, at_s)
                return []
            case Exited(worker, code):
                return self._lose(worker, code, at_s)
            case StartFailed(worker, why):
                self.running.pop(worker, None)
                self.leaving.pop(worker, None)
                if self._company.begun:
                    return self._crash(worker, f"could not be started: {why}", 1, at_s)
                return self._fail(f"worker {worker} could not be started: {why}", 1, at_s)
            case Interrupted(signum):
                return self._interrupt(signum, at_s)
            case TimedOut(timeout):
                return self._fail(f"the job was not done after -timeout {timeout}", TIMEOUT_EXIT, at_s)
            case Verdict(cause, code):
                return self._judge(cause, code)
            case RunnerGone(host, was_head):
                return self._miss(host, was_head, at_s)
            case NotReplaced(why):
                self._replacements.refuse()
                return [Say(f"no replacement: {why}")]
            case Tick() | Warmed():
                return []

    def _arrive(self, view: View, at_s: float) -> list[Action]:
        if self.view is not None and view.number <= self.view.number:
            return []
        line = describe_arrival(self.view, view, self._host)
        if not view.workers and self._others():
            self._last_crash = None  # a wish: the last workers were not lost
        added, dismissed = self._company.arrive(view, self.running, at_s)
        self._replacements.arrive(added, dismissed)
        self._was_listed = self._was_listed or self._is_listed(view)
        return [Say(line)] if self._watch else []

    def _lose(self, worker: Worker, code: int, at_s: float) -> list[Action]:
        self.running.pop(worker, None)
        self._patience.pop(worker, None)
        was_told = self.leaving.pop(worker, None) is not None
        bond = self._company.part(worker, at_s)
        if self.failed:
            return []  # it follows another's failure: no news in how it ended
        is_wanted = worker in self._company.wanted
        if code == 0 or (was_told and not bond.was_lost):
            self.num_finished += 1
            return [] if was_told else self._see_off(worker, is_stranger=is_wanted and not bond.was_member)
        what = describe_exit(code)
        if not self._company.begun or (self._company.over and is_wanted):
            cause = f"worker {worker} failed: {what}"
            return [Blame(worker, what), *self._fail(cause, exit_code(code), at_s, said=True)]
        return self._crash(worker, what, exit_code(code), at_s, is_wanted=is_wanted or bond.was_lost)

    def _see_off(self, worker: Worker, *, is_stranger: bool) -> list[Action]:
        """React to a worker that ended well, and by itself."""
        company = self._company
        if self._independent or not company.begun or company.over or worker in company.roll.members:
            company.finished.add(worker)
            self._last_crash = None  # the job has outlived it
        elif is_stranger:
            company.lose(worker)
            why = "it ended before it was ready"  # and the others would wait for it for ever
            return [Report(worker, why), Say(f"lost {worker.label}: {why}")]
        return []

    def _crash(self, worker: Worker, what: str, code: int, at_s: float, *, is_wanted: bool = True) -> list[Action]:
        """React to a loss in a job that has begun."""
        self._company.lose(worker)
        self._last_crash = (worker, what, code)
        self.num_lost += 1
        report = Report(worker, what)
        if self._company.over or not is_wanted:
            then = "it was told to leave anyway"
        elif code == REFUSED_EXIT:
            then = "the job will not have it, so it is not replaced (see its messages)"
        else:
            then = self._replacements.crash(worker, at_s)
        return [report, Say(f"lost {worker.label}: {what}; {then}")]

    def _others(self) -> bool:
        """Whether somebody still trains, or will."""
        return bool(self._replacements.asked or self._replacements.due_s or self._company.known)

    def _fail_if_deserted(self, at_s: float) -> list[Action]:
        """Fail if the last member anywhere was lost, and nobody comes."""
        if self._last_crash is None or self.failed or self.running or self._others():
            return []
        worker, what, code = self._last_crash
        cause = f"worker {worker} was lost, the last one: {what}"
        return [Blame(worker, what, "was the last one, and failed"), *self._fail(cause, code, at_s, said=True)]

    def _miss(self, host: str, was_head: bool, at_s: float) -> list[Action]:
        """React to the end of the runner on `host`, which takes its workers with it."""
        if not self._company.begun:
            return self._fail(f"the runner on {host} is gone", 1, at_s)
        if was_head:
            self._alone = self._verdict = True
        known = self._company.known
        theirs = sorted(worker for worker in known if worker.host == host)
        reports: list[Action] = [Report(worker, f"the runner on {host} is gone") for worker in theirs]
        if theirs and len(theirs) == len(known) and not self._replacements.asked:
            return [*reports, *self._fail(f"the runner on {host} is gone, and all workers with it", 1, at_s)]
        return [*reports, Say(f"the runner on {host} is gone; the job goes on without it")]

    def _interrupt(self, signum: int, at_s: float) -> list[Action]:
        name = signal.Signals(signum).name
        if self.failed:
            self._verdict = True  # nobody's word is waited for any more
            return [Say(f"{name} while ending: killing what is left", True), *map(Kill, self.running)]
        return self._fail(f"{name} received by the runner on {self._host}", 128 + signum, at_s)

    def _fail(self, cause: str, code: int, at_s: float, *, said: bool = False) -> list[Action]:
        if self.failed:
            return []
        self._outcome = (cause, code)
        self._verdict_by_s = at_s + self._grace_s + VERDICT_WAIT_S
        ending = [f"ending {len(self.running)} local workers"] if self.running else []
        text = "; ".join([*([] if said else [cause]), *ending])
        return [*([Say(text, True)] if text else []), Tell(FAILED, cause, code)]

    def _judge(self, cause: str, code: int) -> list[Action]:
        if self._verdict:
            return []
        self._verdict = True
        if not cause or (self._outcome is not None and self._outcome[0] == cause):
            return []
        # Whatever failed here may only have followed: the head saw what came first.
        self._outcome = (cause, code)
        return [Say(f"the job ends on every host: {cause}", True)]

    def _stop_some(self, at_s: float) -> list[Action]:
        overdue = [worker for worker, kill_at_s in self.leaving.items() if at_s >= kill_at_s]
        self.leaving |= dict.fromkeys(overdue, at_s + self._grace_s)  # again, should one not die
        actions: list[Action] = [Kill(worker) for worker in overdue]
        for worker in self.running:
            if worker in self.leaving:
                continue
            patience_s = self._patience_for(worker)
            if patience_s is None:
                self._patience.pop(worker, None)
            elif not patience_s or at_s >= self._patience.setdefault(worker, at_s + patience_s):
                self._patience.pop(worker, None)
                self.leaving[worker] = at_s + self._grace_s
                actions.append(Terminate(worker))
        return actions

    def _patience_for(self, worker: Worker) -> float | None:
        """How long `worker` may go on before it is told to end; None means for ever."""
        company = self._company
        is_wanted = worker in company.wanted
        if self.failed:
            return 0.0
        if not company.begun:
            return None if is_wanted else 0.0
        if company.over and company.is_stranger(worker):
            return 0.0
        if is_wanted or worker in company.roll.members:
            return None  # one that is on the roll leaves by itself, when the others' next roll lets it
        return 0.0 if company.is_stranger(worker) else self._grace_s

    def _replace_some(self, at_s: float) -> list[Action]:
        if self.failed or self._company.over:
            self._replacements.due_s.clear()
            return []
        asked = self._replacements.ask(at_s, self._slots - len(self._company.here))
        actions: list[Action] = [Replace()] * asked
        if asked and self._last_crash is not None and not self._company.known:
            # The server keeps the last worker of a view listed, lost or not, for else the job would be over. Now that
            # another is coming, it can go.
            actions.append(Report(*self._last_crash[:2]))
        return actions

    def _start_some(self, at_s: float) -> list[Action]:
        if self.failed or self.view is None or self._company.over:
            return []
        actions: list[Action] = []
        for worker in self.view.workers:
            # One that is still leaving under the same name is waited for: two cannot share a port.
            if self._company.is_to_start(worker) and worker not in self.running:
                slot = next(slot for slot in range(len(self.running) + 1) if slot not in self.running.values())
                self.running[worker] = slot
                self.num_started += 1
                self._replacements.start(worker, at_s)
                actions.append(Start(worker, self.view, slot))
        return actions

    def _standing(self) -> str:
        if self.running or self._replacements.due_s or self._replacements.asked:
            return BUSY
        if self.view is None:
            return IDLE
        if not self._watch:
            return DONE
        if self._keep:
            return IDLE
        if self._company.over:
            return DONE
        was_removed = self._was_listed and not self._is_listed(self.view)
        return DONE if self._company.finished or not self.view.workers or was_removed else IDLE

    def _is_listed(self, view: View) -> bool:
        return any(runner.host == self._host for runner in view.runners)

    def _tell_status(self) -> list[Action]:
        status = FAILED if self.failed else self._standing()
        if status == self._status:
            return []
        self._status = status
        return [] if status == FAILED else [Tell(status)]

    def _finish_if_over(self, at_s: float) -> list[Action]:
        if self.running:
            return []
        if self._outcome is not None:
            waiting = not self._verdict and self._verdict_by_s is not None and at_s < self._verdict_by_s
            code = self._outcome[1]
        else:
            # With -k only a signal ends the runner, and its own verdict is then the outcome above.
            fine = self._standing() == DONE if self._alone else self._verdict
            waiting, code = not fine, 0
        if waiting:
            return []
        self._over = True
        return [Finish(code)]
