"""The guard: workers compare checksums of the whole state, so that no difference between them goes unnoticed.

Parameters, buffers, optimizer states, tracked objects and the contexts of all replicas must be the same on every worker
when the turns of a step begin. One checksum of 64 bits travels with the other messages of the step. If checksums differ,
the workers compare part by part, and the job ends with an error that names the first part that differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pliant.cluster import Worker
from pliant.comm.engine import Engine
from pliant.train.state_parts import SHA256, StatePart, checksum_of, digests_of, parts_of

if TYPE_CHECKING:
    from pliant.train.job_state import JobState

EVERY = 100
"""The number of steps between two comparisons."""
CAUSES = (
    "The usual causes: a learning rate or a decision from a counter of your own (use step.number or job.state), random "
    "numbers or updates on some workers only, an object with state that the job does not know (job.track), or damaged "
    "memory. `pliant check` finds the first step that differs"
)


class Guard:
    """One worker's part in the comparison."""

    def __init__(self, state: JobState, every: int = EVERY) -> None:
        """Compare every so many steps, and once in each view; 0: never."""
        self._state, self._every = state, every
        self._is_new_view = False
        """Whether nobody has asked yet in this view whether a comparison is due."""
        self._due_at: int | None = None
        """The step in which those of this view compare for the first time; None once they have."""
        self._equal_at: int | None = None
        """The step of the last comparison."""

    @property
    def is_on(self) -> bool:
        return self._every > 0

    def enter_view(self) -> None:
        """Compare soon: in the job's first step, and otherwise in the second one of the view: the first step after a change
        has more to do than others."""
        self._is_new_view = True

    def is_due(self, step: int, num_workers: int) -> bool:
        """Return whether the workers compare in this step: the same answer on all of them. To be asked once in each step that
        they do together. Models that are averaged differ by design."""
        if not self.is_on or num_workers == 1 or self._state.averaging is not None:
            return False
        if self._is_new_view:
            # Only now all are at the same step: after a loss, some enter the view a step later than others.
            self._is_new_view, self._due_at = False, step + 1 if step else 0
        return step % self._every == 0 or (self._due_at is not None and step >= self._due_at)

    def checksum(self) -> int:
        """Return a checksum of the state; never 0."""
        return checksum_of(self._parts())

    def _parts(self) -> Iterator[StatePart]:
        return parts_of(self._state, self._state.first_buffers)

    def compare_at_end(self, engine: Engine, step: int) -> str:
        """Compare once more when the job has done its last step; return what is wrong, as `compare` does."""
        own = self.checksum() if self.is_on and self._state.averaging is None else 0
        return self.compare(engine, [int(row) for row in engine.all_gather_bytes("end", str(own).encode())], step)

    def compare(self, engine: Engine, found: Sequence[int], step: int) -> str:
        """Return what is wrong if the checksums differ; empty if they do not. Every worker calls this.

        Raises:
            CommError: a worker is lost.
        """
        if not any(found):
            return ""
        if len(set(found)) == 1:
            self._due_at, self._equal_at = None, step
            return ""
        own = json.dumps(digests_of(self._parts())).encode()
        rows = [json.loads(row) for row in engine.all_gather_bytes("guard", own)]
        return describe_difference(rows, engine.view.workers, step, self._equal_at)


def describe_difference(
    rows: Sequence[dict[str, str]], workers: Sequence[Worker], step: int, equal_at: int | None
) -> str:
    """Return a message with the first part that differs and the workers that differ in it. `rows` are the digests of
    each worker's parts by name."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    differing = [name for name in names if len({row.get(name) for row in rows}) > 1]
    since = f" At step {equal_at} they were equal." if equal_at is not None else ""
    head = f"step {step}: the workers do not have the same state."
    if not differing:  # damaged memory, read twice
        return f"{head} Their checksums differ, but no longer part by part: look for damaged memory.{since}"
    values = [row.get(differing[0], "not there") for row in rows]
    usual = Counter(values).most_common(1)[0][0]
    strange = next(value for value in values if value != usual)
    shown = "" if usual.startswith(SHA256) or strange.startswith(SHA256) else f" ({strange} instead of {usual})"
    odd = [f"{worker} (rank {rank})" for rank, worker in enumerate(workers) if values[rank] != usual]
    ours = [f"{worker} (rank {rank})" for rank, worker in enumerate(workers) if values[rank] == usual]
    rest = f" and {len(ours) - 1} more" if len(ours) > 1 else ""
    more = f", and {len(differing) - 1} more of {len(names)} parts" if len(differing) > 1 else ""
    verb = "differs" if len(odd) == 1 else "differ"
    return f"{head} {', '.join(odd)} {verb} from {ours[0]}{rest} in: {differing[0]}{shown}{more}.{since} {CAUSES}"
