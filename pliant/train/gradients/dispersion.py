"""The variance of gradients between replicas: var = mean(g^2) - mean(g)^2, and of each variable the L2 norm of that.

The elements of all parameters, one after the other, are cut into one equal share per worker. Each worker adds up the
squares of its own replicas; then each share of these is summed over all workers by the one whose share it is.
A variable that two shares have parts of is put together when all have told what they found.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError

Shares = tuple[float, float, float]
"""The square of the norm of the variable that begins before the share, the sum of the norms of those that lie in it, the
square of that which ends after it."""
NEVER = -1
"""No step's number."""
LAST = 1 << 20
"""A priority behind everything that training needs."""
CHUNK = 1 << 16
"""Elements that are worked on at once, so that what lies between is never written to memory."""


class Dispersion:
    """One worker's part in it. `offsets`: where each parameter begins, and where the last one ends."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = list(offsets)
        self._engine: Engine | None = None
        self._bounds = [0, self._offsets[-1]]
        """Where each worker's share begins."""
        self._squares: torch.Tensor | None = None
        """Of all parameters, summed over the replicas hosted here; of this worker's share finally over all."""
        self._host: torch.Tensor | None = None
        """CUDA: the same in memory that collectives can use."""
        self._means: torch.Tensor | None = None
        """This worker's share of the mean gradient."""
        self._written: set[int] = set()
        self._handles: list[Handle] = []
        self._pending = NEVER
        """The step that is still to be looked at."""
        self._found: tuple[int, Shares | None] = (NEVER, None)
        """The step that was looked at last, and what was found."""
        self._replicas = 1
        self._buried: list[object] = []

    def arrange(self, engine: Engine, replicas: int) -> None:
        """Work in this view from now on."""
        if self._engine is not None and self._engine.may_be_written_to:
            self._buried.append((self._engine, self._squares, self._host))  # as with gradients: never use it again
        self._engine, self._replicas = engine, replicas
        length = self._offsets[-1]
        self._bounds = [length * rank // engine.size for rank in range(engine.size + 1)]
        self._squares = self._host = self._means = None
        self._handles, self._written = [], set()
        self._pending, self._found = NEVER, (NEVER, None)

    # --- collecting ---

    def begin(self) -> None:
        """Another step, which may be one that is done again."""
        self._written = set()

    def add(self, index: int, flat: torch.Tensor) -> None:
        """A replica's gradient of this parameter, divided by N."""
        self._settle()  # before the last step's are overwritten
        if self._squares is None:
            self._allocate(flat)
        assert self._squares is not None
        place = self._squares[self._offsets[index] : self._offsets[index + 1]]
        if index in self._written:
            place.addcmul_(flat, flat)
        else:
            self._written.add(index)
            if flat.dtype == place.dtype:
                torch.mul(flat, flat, out=place)
            else:
                place.copy_(flat).square_()

    def _allocate(self, flat: torch.Tensor) -> None:
        assert self._engine is not None, "arrange() comes first"
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        shared = self._engine.empty(self._offsets[-1], dtype)
        if flat.is_cuda:
            self._engine.pin(shared)
            self._host, self._squares = shared, torch.empty(len(shared), dtype=dtype, device=flat.device)
        else:
            self._squares = shared
        low, high = self._share
        self._means = torch.empty(high - low, dtype=dtype, device=flat.device)

    @property
    def _share(self) -> tuple[int, int]:
        assert self._engine is not None, "arrange() comes first"
        rank = self._engine.rank
        return self._bounds[rank], self._bounds[rank + 1]

    def exchange(self, step: int) -> None:
        """All replicas hosted here have added theirs: have each share summed."""
        squares = self._squares
        assert squares is not None, "parameters without a gradient"
        for index in range(len(self._offsets) - 1):
            if index not in self._written:
                squares[self._offsets[index] : self._offsets[index + 1]].zero_()
        self._written, self._pending = set(), step
        assert self._means is not None
        self._means.zero_()  # what no replica has used has no sum
        if len(self._bounds) == 2:
            return
        if self._host is None:
            self._submit(squares)
            return
        self._host.copy_(squares, non_blocking=True)
        torch.cuda.current_stream(squares.device).synchronize()
        self._submit(self._host)

    def _submit(self, squares: torch.Tensor) -> None:
        assert self._engine is not None, "arrange() comes first"
        for root in range(self._engine.size):
            low, high = self._bounds[root], self._bounds[root + 1]
            if low < high:
                handle = self._engine.reduce(
                    f"variance:{root}", squares[low:high], root, determinism="fast", priority=LAST
                )
                self._handles.append(handle)

    def keep_mean(self, index: int, flat: torch.Tensor) -> None:
        """The mean gradient of this parameter; kept as far as it is this worker's."""
        low, high = self._share
        begin, end = max(low, self._offsets[index]), min(high, self._offsets[index + 1])
        if begin < end:
            assert self._means is not None
            start = self._offsets[index]
            self._means[begin - low : end - low].copy_(flat[begin - start : end - start])

    # --- finding out ---

    def shares(self, step: int) -> Shares | None:
        """What this worker's share says of that step; None if a worker was lost. The next step's may be under way."""
        if self._pending == step:
            self._settle()
        return self._found[1] if self._found[0] == step else None

    def _settle(self) -> None:
        """Wait for the collectives of the last step, and look at what they have brought."""
        if self._pending == NEVER:
            return
        step, self._pending = self._pending, NEVER
        handles, self._handles = self._handles, []
        try:
            for handle in handles:
                handle.wait()
        except CommError:
            return  # whoever trains will notice it, too
        assert self._squares is not None
        low, high = self._share
        if self._host is not None and len(self._bounds) > 2:  # alone there was nothing to exchange
            self._squares[low:high].copy_(self._host[low:high], non_blocking=True)
        self._found = (step, self._look(self._squares[low:high], low))

    def _look(self, squares: torch.Tensor, low: int) -> Shares:
        assert self._means is not None
        longest = len(squares) if squares.is_cuda else CHUNK
        scratch = torch.empty(min(longest, len(squares)), dtype=squares.dtype, device=squares.device)
        norms: list[torch.Tensor] = []
        owners: list[int] = []
        """The variable that each of these belongs to."""
        begin, end = low, low + len(squares)
        index = bisect_right(self._offsets, low) - 1
        while begin < end:
            until = min(self._offsets[index + 1], end, begin + longest)
            if begin < until:
                place = slice(begin - low, until - low)
                mean, variance = self._means[place], scratch[: until - begin]
                torch.mul(squares[place], float(self._replicas), out=variance)
                norms.append(torch.linalg.vector_norm(variance.addcmul_(mean, mean, value=-1.0)))
                owners.append(index)
                begin = until
            if begin == self._offsets[index + 1]:
                index += 1
        sums: dict[int, float] = {}
        for owner, norm in zip(owners, torch.stack(norms).tolist() if norms else [], strict=True):
            sums[owner] = sums.get(owner, 0.0) + norm * norm
        first, last = self._cut(low), self._cut(end)
        inner = math.fsum(math.sqrt(square) for owner, square in sums.items() if owner not in (first, last))
        return sums.get(first, 0.0), inner, sums.get(last, 0.0) if last != first else 0.0

    def _cut(self, place: int) -> int:
        """The variable that a bound between two shares goes through; -1 if it lies between variables."""
        index = bisect_right(self._offsets, place) - 1
        return index if 0 <= index < len(self._offsets) - 1 and self._offsets[index] < place else -1

    def merge(self, told: Sequence[Sequence[float]]) -> list[float]:
        """The norms, or sums of several, that follow from everybody's shares, in the order of ranks."""
        norms = [inner for _, inner, _ in told]
        split: dict[int, float] = {}
        for rank, (head, _, tail) in enumerate(told):
            first, last = self._cut(self._bounds[rank]), self._cut(self._bounds[rank + 1])
            split[first] = split.get(first, 0.0) + head
            if last != first:
                split[last] = split.get(last, 0.0) + tail
        return norms + [math.sqrt(square) for index, square in split.items() if index >= 0]
