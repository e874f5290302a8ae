"""What a runner does about what happens: events in, actions out.

Pure: no process, socket, thread or clock. `runner` feeds it with what it sees and carries out what
comes back; every rule of the launcher (who is blamed, who is stopped, when it is over, with which exit code) is
here and tested without a process.
"""

from __future__ import annotations

import signal

from pliant.cluster import View, Worker
from pliant.elastic.membership import arrival
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


class Supervisor:
    """The rules of one runner. Fed with events, answers with actions; does no I/O."""

    def __init__(
        self, host: str, *, grace_s: float, watch: bool = False, keep: bool = False, alone: bool = True
    ) -> None:
        self.running: dict[Worker, int] = {}
        """Local workers that live, with their slots."""
        self.leaving: dict[Worker, float] = {}
        """Those told to end, and when they will be killed."""
        self.finished: set[Worker] = set()
        """Those of the view that ended well."""
        self.num_started = self.num_finished = 0
        """Over the whole job; those that a view removed have finished too."""
        self.view: View | None = None
        self._host, self._grace_s = host, grace_s
        self._watch, self._keep, self._alone = watch, keep, alone
        self._outcome: tuple[str, int] | None = None
        self._verdict = alone
        self._verdict_by_s: float | None = None
        self._status = ""
        self._was_listed = False
        self._over = False

    @property
    def failed(self) -> bool:
        return self._outcome is not None

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due; None means that only events matter."""
        waits = list(self.leaving.values())
        if self._verdict_by_s is not None and not self._verdict:
            waits.append(self._verdict_by_s)
        return min(waits, default=None)

    def handle(self, event: Event, at_s: float) -> list[Action]:
        """What to do about `event`. Nothing comes back after Finish."""
        if self._over:
            return []
        reacted = self._react(event, at_s)
        # Telling workers to end comes before telling the user why, which may wait for last lines.
        actions = self._stop_some(at_s) + reacted
        actions += self._start_some()
        actions += self._tell_status()
        actions += self._finish_if_over(at_s)
        return actions

    def _react(self, event: Event, at_s: float) -> list[Action]:
        match event:
            case Arrived(view):
                return self._arrive(view)
            case Exited(worker, code):
                return self._lose(worker, code, at_s)
            case StartFailed(worker, why):
                self.running.pop(worker, None)
                return self._fail(f"worker {worker} could not be started: {why}", 1, at_s)
            case Interrupted(signum):
                return self._interrupt(signum, at_s)
            case TimedOut(timeout):
                return self._fail(f"the job was not done after -timeout {timeout}", TIMEOUT_EXIT, at_s)
            case Verdict(cause, code):
                return self._judge(cause, code)
            case Tick() | Warmed():
                return []

    def _arrive(self, view: View) -> list[Action]:
        if self.view is not None and view.number <= self.view.number:
            return []
        line = arrival(self.view, view, self._host)
        self.view = view
        self.finished &= set(view.workers)
        self._was_listed = self._was_listed or self._is_listed(view)
        return [Say(line)] if self._watch else []

    def _lose(self, worker: Worker, code: int, at_s: float) -> list[Action]:
        self.running.pop(worker, None)
        was_told = self.leaving.pop(worker, None) is not None
        if self.failed:
            return []  # it follows another's failure: no news in how it ended
        if was_told or code == 0:
            self.num_finished += 1
            self.finished |= set() if was_told else {worker}
            return []
        what = describe_exit(code)
        return [Blame(worker, what), *self._fail(f"worker {worker} failed: {what}", exit_code(code), at_s, said=True)]

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
        wanted = () if self.failed or self.view is None else self.view.workers
        for worker in self.running:
            if worker not in wanted and worker not in self.leaving:
                self.leaving[worker] = at_s + self._grace_s
                actions.append(Terminate(worker))
        return actions

    def _start_some(self) -> list[Action]:
        if self.failed or self.view is None:
            return []
        actions: list[Action] = []
        for worker in self.view.workers:
            # One that is still leaving under the same name is waited for: two cannot share a port.
            if worker.host == self._host and worker not in self.running and worker not in self.finished:
                slot = next(slot for slot in range(len(self.running) + 1) if slot not in self.running.values())
                self.running[worker] = slot
                self.num_started += 1
                actions.append(Start(worker, self.view, slot))
        return actions

    def _standing(self) -> str:
        if self.running:
            return BUSY
        if self.view is None:
            return IDLE
        if not self._watch:
            return DONE
        if self._keep:
            return IDLE
        was_removed = self._was_listed and not self._is_listed(self.view)
        return DONE if self.finished or not self.view.workers or was_removed else IDLE

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
