"""A sum as an early parameter server does it (push, notify, pull): the baseline that priority is compared with.

Each part of an array has one owner, which sums what all workers push and then only notifies them. A worker pulls the parts
of an array when it has been notified of all of them. So no part of an array comes back before all of it is summed, and
each array costs one more round trip. The order of summation, and so the bits, are the same.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.handle import Handle
from pliant.comm.order import Order, even_partition
from pliant.comm.plan import Portion
from pliant.errors import CommError

if TYPE_CHECKING:
    from pliant.comm.engine import Engine


def all_reduce(engine: Engine, name: str, tensor: torch.Tensor, portion: Portion, order: Order) -> Handle:
    """Sum `tensor`, a part of a larger one, over all ranks, in place; its slices are the parts."""
    owners = [_owner(engine, lane) for lane in portion.lanes]
    sum_of_all = _Sum(engine, name, tensor, owners, order)
    for part, (begin, end) in enumerate(sum_of_all.ranges):
        sum_of_all.push(part, Portion(portion.whole, portion.begin + begin, (0,)), tensor[begin:end])
    return sum_of_all.handle


def _owner(engine: Engine, lane: int) -> int:
    return engine.cross_ranks[lane] if len(engine.cross_ranks) > 1 else lane


class _Sum:
    """One array on its way. The engine's thread calls its methods, too."""

    def __init__(self, engine: Engine, name: str, tensor: torch.Tensor, owners: list[int], order: Order) -> None:
        self.handle = Handle(name, engine, owners[0])
        self.ranges = even_partition(len(tensor), len(owners))
        self._engine, self._name, self._tensor, self._owners = engine, name, tensor, owners
        self._order, self._lock = order, threading.Lock()
        self._to_notify = self._to_pull = len(owners)

    def push(self, part: int, portion: Portion, piece: torch.Tensor) -> None:
        """Send this rank's operand to the part's owner."""
        engine, owner = self._engine, self._owners[part]
        pushed = engine.reduce(f"{self._name}/{part}", piece, owner, portion=portion, prompt=True, order=self._order)
        if engine.rank == owner:
            pushed.add_done_callback(partial(self._summed, part, pushed))
        else:
            notice = engine.broadcast(
                f"{self._name}/{part}/notice", torch.zeros(1, dtype=torch.uint8), owner, prompt=True
            )
            notice.add_done_callback(partial(self._notified, notice))

    def _summed(self, part: int, pushed: Handle) -> None:
        """At the owner: keep the sum for those who will ask, and notify them."""
        if pushed.error is None:
            begin, end = self.ranges[part]
            self._engine.save(f"{self._name}/{part}", self._tensor[begin:end])
            self._engine.broadcast(
                f"{self._name}/{part}/notice", torch.zeros(1, dtype=torch.uint8), self._engine.rank, prompt=True
            )
        self._notified(pushed)
        self._pulled(pushed)

    def _notified(self, notice: Handle) -> None:
        if self._failed(notice):
            return
        with self._lock:
            self._to_notify -= 1
            all_notified = self._to_notify == 0
        if all_notified:
            for part, (begin, end) in enumerate(self.ranges):
                owner = self._owners[part]
                if owner == self._engine.rank:
                    continue
                try:
                    pulled = self._engine.request(owner, f"{self._name}/{part}", self._tensor[begin:end])
                except CommError as error:  # in the engine's thread nobody else would see it
                    self.handle.fail(error)
                    return
                pulled.add_done_callback(partial(self._pulled, pulled))

    def _pulled(self, pulled: Handle) -> None:
        if self._failed(pulled):
            return
        with self._lock:
            self._to_pull -= 1
            all_pulled = self._to_pull == 0
        if all_pulled:
            self.handle.finish(self._tensor)

    def _failed(self, handle: Handle) -> bool:
        if handle.error is not None and not self.handle.done:
            self.handle.fail(handle.error)
        return handle.error is not None
