"""Which workers of a host are replaced when they were lost, and how soon.

Pure, as `supervisor`, which asks it: no process and no clock.
"""

from __future__ import annotations

from collections.abc import Set

from pliant.cluster import Worker
from pliant.launch.worker_ends import Cause
from pliant.progress_board import ProgramFailure

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""A member that lived this long shows that workers can live here: the next crash is replaced at once."""
QUICK_S = 10.0
"""A crash so soon after the start is likely to come again."""
MAX_QUICK = 3
KILL_WINDOW_S = 1.0
MAX_REPEATS = 3
"""If a worker, its replacement and so on have failed so many times by the same error at the same step, it will come again:
the job ends."""
MAX_KILLS = 3
KILL_PAUSE_S = 0.5
"""If so many workers are killed within `KILL_WINDOW_S`, each within that time of its start and before it has become a member,
the replacement of the last one waits this long. Otherwise a runner whose workers something kills at their start would do nothing
but fork."""


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
        # A replacement inherits how many quick crashes in a row led to it, and how many equal failures. Several workers that
        # end at once are thus one crash, and a program that always fails is three.
        self._quick_before: dict[Worker, int] = {}
        self._num_quick = 0
        self._given_up = False
        self._failure: ProgramFailure | None = None
        self._failures_before: dict[Worker, int] = {}
        self._num_failures = 0
        self._seen: set[Worker] = set()  # local workers that were in some view
        self._seen_number = -1
        # Requested ones that the config server has added, with the version of the view.
        self._added: dict[Worker, int] = {}
        self._killed_s: list[float] = []  # when workers were killed that had only just started

    @property
    def are_coming(self) -> bool:
        """Whether a replacement was requested, or is due later."""
        return bool(self.requested or self.due_s)

    def note_start(self, worker: Worker, at_s: float) -> None:
        self._started_s[worker] = at_s
        self._quick_before[worker] = self._num_quick
        self._failures_before[worker] = self._num_failures
        self._joined_s.pop(worker, None)

    def note_join(self, worker: Worker, at_s: float) -> None:
        """Note that `worker` became a member."""
        self._joined_s.setdefault(worker, at_s)

    def decide(self, worker: Worker, cause: Cause, at_s: float) -> tuple[bool, str]:
        """Decide about a replacement for `worker`, which was lost: whether one comes, and what to tell the user."""
        if self._max_restarts == 0:
            return False, "not replaced, as --max-restarts 0 says"
        if cause is Cause.OUTSIDE:
            return True, self._replace_killed(worker, at_s)
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

    def is_hopeless(self, worker: Worker, failure: ProgramFailure | None) -> bool:
        """Note how the program of a member has failed; return whether that was the same error at the same step as with those
        that it has replaced, so that every replacement would only come to it again."""
        if failure != self._failure:
            self._failure, self._num_failures = failure, 0
            self._failures_before.clear()
        num_failures = self._failures_before.get(worker, 0) + 1
        self._num_failures = max(self._num_failures, num_failures)
        return failure is not None and num_failures >= MAX_REPEATS

    def _replace_killed(self, worker: Worker, at_s: float) -> str:
        """Replace a worker that was killed from outside, which says nothing about the program."""
        pause_s = 0.0
        if worker not in self._joined_s and at_s - self._started_s.get(worker, at_s) < KILL_WINDOW_S:
            self._killed_s = [killed_s for killed_s in self._killed_s if at_s - killed_s < KILL_WINDOW_S] + [at_s]
            pause_s = KILL_PAUSE_S if len(self._killed_s) >= MAX_KILLS else 0.0
        self.due_s.append(at_s + pause_s)
        return (
            f"replacing it in {pause_s:g}s: workers are killed as soon as they start" if pause_s else "replacing it now"
        )

    def note_view(self, number: int, added: Set[Worker], removed: Set[Worker]) -> None:
        """Note whom the new view `number` adds to this host and whom it removes, other than by a loss.

        What was requested has then come. Or somebody else's request has filled the slot, or does not want it filled.
        """
        num_come = min(self.requested, len(added))
        self.requested -= num_come
        del self.due_s[: len(added) - num_come]
        if removed:
            self.due_s.clear()
        self._seen_number = number
        self._seen |= added
        self._drop_unseen()

    def note_added(self, worker: Worker, version: int) -> None:
        """Note that the config server has added a requested `worker` in the version `version` of the view."""
        self._added[worker] = version
        self._drop_unseen()

    def _drop_unseen(self) -> None:
        """Wait no longer for those that were added and removed again between two views that this runner has seen."""
        for worker in [worker for worker, version in self._added.items() if version <= self._seen_number]:
            del self._added[worker]
            if worker not in self._seen:
                self.requested = max(0, self.requested - 1)

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
