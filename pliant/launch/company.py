"""Who is wanted and who trains, as a runner knows it, and how its own workers stand to both. Pure.

The wanted view and the roll come to the runner by two ways, and neither waits for the other: what
one of them means can sometimes be told only from both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pliant.cluster import Membership, View, Worker

NEWS_S = 0.25
"""Within this, a new view and the roll that came with it have both arrived."""


@dataclass(frozen=True, slots=True)
class Bond:
    """How a local worker stood to the job when it ended."""

    was_member: bool
    """It has been on the roll."""
    was_lost: bool
    """It was reported lost by others, rather than dismissed by a wish, or neither."""


class Company:
    """The job as the runner on `host` knows it. Fed by `Supervisor`."""

    def __init__(self, host: str, *, begun: bool = False) -> None:
        self.view: View | None = None
        self.roll = Membership()
        self.begun = begun
        """Whether somebody has been on the roll: the program follows it. True from the start for independent workers."""
        self.finished: set[Worker] = set()
        """Those of the view that ended well."""
        self._host = host
        self._joined: set[Worker] = set()  # local workers that are or were members
        self._evicted: set[Worker] = set()  # local workers that others have reported lost
        self._dismissed: dict[Worker, tuple[int, float]] = {}  # local, not in the view: since which one, and when
        self._gone: set[Worker] = set()  # of the view, but crashed
        self._dead: set[Worker] = set()  # of the roll, but crashed
        self._closed_by: int | None = None  # the view with which a job ended that somebody has reset

    @property
    def over(self) -> bool:
        """Whether a job that had begun has ended."""
        return self.begun and self.roll.over

    @property
    def wanted(self) -> tuple[Worker, ...]:
        """Workers of the view, on all hosts."""
        return self.view.workers if self.view is not None else ()

    @property
    def known(self) -> set[Worker]:
        """Those who train or shall, and have neither crashed here nor finished."""
        return ((set(self.wanted) - self._gone) | (set(self.roll.members) - self._dead)) - self.finished

    @property
    def here(self) -> set[Worker]:
        """Wanted on this host, and not crashed."""
        return self._local(self.wanted) - self._gone

    def is_to_start(self, worker: Worker) -> bool:
        """Whether a wanted worker has still to do its work; a crashed one comes only under another name."""
        return worker.host == self._host and worker not in self.finished and worker not in self._gone

    def is_stranger(self, worker: Worker) -> bool:
        """Whether a local worker has never been on the roll."""
        return worker not in self._joined

    def arrive(self, view: View, living: Collection[Worker], at_s: float) -> tuple[set[Worker], set[Worker]]:
        """Take a newer view; whom it adds to this host, and whom a wish takes away."""
        before, now = self._local(self.wanted), self._local(view.workers)
        dismissed = before - now - self._gone
        for worker in dismissed.intersection(living):
            self._dismissed[worker] = (view.number, at_s)
        for worker in now:
            self._dismissed.pop(worker, None)
        self.view = view
        self.finished &= set(view.workers)
        self._gone &= set(view.workers)
        self._reopen()
        return now - before, dismissed - self._evicted

    def follow(self, roll: Membership, living: Collection[Worker]) -> None:
        """Take the roll as it is now."""
        old, self.roll = self.roll, roll
        if roll.over and not old.over:
            self._closed_by = self.view.number if self.view is not None else -1
        if old.over and not roll.over:  # somebody has reset the server
            self.begun = False
        self.begun = self.begun or bool(roll.members)
        self._dead &= set(roll.members)
        self._joined |= set(roll.members).intersection(living)
        if roll.urgent > old.number:
            left = set(old.members).difference(roll.members).intersection(living)
            # A wish would have taken it from the view first, and left it on the roll.
            self._evicted |= {
                worker for worker in left if self._dismissed.get(worker, (roll.wanted,))[0] == roll.wanted
            }
        self._reopen()

    def _reopen(self) -> None:
        """Forget how the last job ended, once the first view of the next one is there."""
        if self._closed_by is not None and not self.roll.over and self.view and self.view.number > self._closed_by:
            self._closed_by = None
            self.finished.clear()
            self._gone.clear()

    def lose(self, worker: Worker) -> None:
        """Note that `worker` has crashed: it is not started again under this name."""
        self._gone |= {worker}.intersection(self.wanted)
        self._dead |= {worker}.intersection(self.roll.members)

    def part(self, worker: Worker, at_s: float) -> Bond:
        """Forget a local worker that has ended."""
        _, since_s = self._dismissed.pop(worker, (0, -NEWS_S))
        # On the roll, but dismissed just now: the others' word that it is lost was faster than its end.
        is_fresh = worker in self.roll.members and since_s >= 0 and at_s - since_s < NEWS_S
        bond = Bond(was_member=worker in self._joined, was_lost=worker in self._evicted or is_fresh)
        self._joined.discard(worker)
        self._evicted.discard(worker)
        return bond

    def _local(self, workers: Collection[Worker]) -> set[Worker]:
        return {worker for worker in workers if worker.host == self._host}
