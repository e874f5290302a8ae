"""Whether, and how soon, a crashed worker of this host is replaced. Pure; `supervisor` asks."""

from __future__ import annotations

from collections.abc import Set

from pliant.cluster import Worker

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""A member that lived this long shows that workers can live here: the next crash is replaced at once."""
QUICK_S = 10.0
"""A crash so soon after the start is likely to come again."""
MAX_QUICK = 3


class Replacements:
    """The replacements of one runner: those due, those asked for, and how many may still come."""

    def __init__(self, max_restarts: int) -> None:
        self.due_s: list[float] = []
        """When the next ones are to be asked for."""
        self.asked = 0
        """Asked of the config server, and not yet in the view."""
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

    def start(self, worker: Worker, at_s: float) -> None:
        self._started_s[worker] = at_s
        self._quick_before[worker] = self._num_quick
        self._joined_s.pop(worker, None)

    def join(self, worker: Worker, at_s: float) -> None:
        """Note that `worker` became a member."""
        self._joined_s.setdefault(worker, at_s)

    def crash(self, worker: Worker, at_s: float) -> str:
        """Decide about a replacement for `worker`; what to tell the user."""
        self._note_quickness(worker, at_s)
        if self._given_up:
            return f"not replaced: workers on this host crashed within {QUICK_S:g}s of their start {MAX_QUICK} times in a row"
        if self._num_restarts >= self._max_restarts:
            return f"not replaced: the {self._max_restarts} restarts of --max-restarts are used up"
        if at_s - self._joined_s.get(worker, at_s) >= STEADY_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        self._num_restarts += 1
        self.due_s.append(at_s + pause_s)
        when = f"in {pause_s:g}s" if pause_s else "now"
        return f"replacing it {when} (restart {self._num_restarts} of {self._max_restarts})"

    def _note_quickness(self, worker: Worker, at_s: float) -> None:
        is_quick = at_s - self._started_s.get(worker, at_s) < QUICK_S
        self._num_quick = self._quick_before.get(worker, 0) + 1 if is_quick else 0
        self._given_up = self._given_up or self._num_quick >= MAX_QUICK

    def arrive(self, added: Set[Worker], dismissed: Set[Worker]) -> None:
        """Note whom a new view adds to this host and whom it takes away, other than by a loss.

        What was asked for has then come; somebody else's wish has filled the slot, or does not want it filled.
        """
        come = min(self.asked, len(added))
        self.asked -= come
        del self.due_s[: len(added) - come]
        if dismissed:
            self.due_s.clear()

    def ask(self, at_s: float, num_free: int) -> int:
        """How many to ask for now, where `num_free` slots are free; others that are due are given up."""
        due = sum(1 for due_s in self.due_s if at_s >= due_s)
        self.due_s = [due_s for due_s in self.due_s if at_s < due_s]
        asking = max(0, min(due, num_free - self.asked))
        self.asked += asking
        return asking

    def refuse(self) -> None:
        """Note that one that was asked for will not come."""
        self.asked = max(0, self.asked - 1)
