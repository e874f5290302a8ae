"""How a worker has a say in who the workers are: scheduled and requested resizes, and its own leaving after a notice."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping

from pliant.elastic.member import Member
from pliant.errors import PliantError
from pliant.train.events import StepCommitted, ViewChange
from pliant.train.trainer import Trainer


class WorkerRequests:
    """Requests other workers for the job, and lets this one leave."""

    def __init__(
        self,
        member: Member,
        schedule: Mapping[int, int],
        has_state: Callable[[], bool],
        notify: Callable[[str], None],
    ) -> None:
        """
        Args:
            schedule: numbers of workers, by the number of steps after which they are requested.
            has_state: returns whether this worker has the state of the job.
        """
        self._member, self._schedule = member, schedule
        self._has_state, self._notify = has_state, notify
        self._is_leaving = False
        self.exits_at_once = False
        """Whether this worker was told to end without waiting for anything."""

    def request_workers(self, num_workers: int) -> None:
        """Request a number of workers in the background."""

        def request() -> None:
            try:
                self._member.resize(num_workers)
            except PliantError as error:
                self._notify(f"the job stays as it is, because {num_workers} workers could not be requested: {error}")

        threading.Thread(target=request, daemon=True).start()

    def follow_schedule(self, event: StepCommitted) -> None:
        """Request the workers that are scheduled for this step. The first worker does so."""
        size = self._schedule.get(event.step)
        if size is not None and event.rank == 0:
            self.request_workers(size)

    def leave_on_sigterm(self) -> None:
        """Take SIGTERM for the notice that this machine will be taken away, unless the program handles it itself."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, signum: int, frame: object) -> None:
        """Leave the job at the next step's boundary. Exit at once if the job has not begun, or if it is being left
        already.

        Who exits at once has not left in good order, so its exit code is that of a process which SIGTERM has killed: the
        others are told of a loss. It is replaced unless its request to leave has arrived before.
        """
        if not self._has_state() or self._is_leaving:
            self.exits_at_once = True
            sys.exit(128 + signum)
        self._is_leaving = True
        self._member.leave()


def announce(change: ViewChange, trainer: Trainer, notify: Callable[[str], None]) -> None:
    """Print and record a change of the workers. The first of those that were there before does so."""
    if trainer.views.announces:
        what = f"recovered at step {change.step}:" if change.lost else "resize"
        again = f", {change.repeated} steps are done again" if change.repeated > 1 else ""
        notify(f"{what} {change.old_size} -> {change.new_size} took {change.pause_s * 1e3:.1f}ms{again}")
        trainer.adaptation.record(
            "view",
            change.step,
            old=change.old_size,
            new=change.new_size,
            pause_s=change.pause_s,
            lost=change.lost,
            repeated=change.repeated,
        )
