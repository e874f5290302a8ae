"""What a step leaves for the next one, told to everybody with the step's sums.

That is: contexts, replica 0's buffers, the order of its first gradients, and what each worker says of itself. Who has all
of it has the whole state of the job. What is done with it is the trainer's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.train.buffers import Buffers, Tensors
from pliant.train.context import Context
from pliant.train.placement import Placement
from pliant.train.priority.units import FIRST
from pliant.train.rows import Rows, Said


@dataclass(frozen=True, slots=True)
class Sent:
    """What is under way."""

    rows: Handle
    buffers: Handle | None
    order: Handle | None


class Exchange:
    """What the step in progress has made so far; after `receive`, of all replicas."""

    def __init__(self, buffers: Buffers, num_loader_workers: int) -> None:
        self.rows = Rows()
        self.new_contexts: dict[int, Context] = {}
        self.new_buffers: Tensors | None = None
        """Replica 0's."""
        self.new_order: list[int] | None = None
        """In which replica 0's gradients came; only where it decides on a layout."""
        self._buffers, self._num_loaders = buffers, num_loader_workers
        self._engine: Engine | None = None
        self._root = 0

    def arrange(self, engine: Engine, placement: Placement) -> None:
        """Work in this view from now on."""
        self._engine, self._root = engine, placement.owner_of(0)
        self.rows.arrange(placement.blocks, placement.hosted)
        self.forget()

    def forget(self) -> None:
        """The step is over, or does not count."""
        self.new_contexts, self.new_buffers, self.new_order = {}, None, None

    def send(self, said: Said, known: Sequence[Context], order_length: int) -> Sent:
        """Have this worker's part on its way; `known` are the contexts that everybody has. With `order_length`, so many
        parameters wait for replica 0's order."""
        engine = self._engine
        assert engine is not None, "arrange() comes first"
        row = self.rows.pack(said, self.new_contexts, known, self._num_loaders)
        rows = engine.all_gather(self.rows.name, row, priority=FIRST)
        buffers = order = None
        if self._buffers.num_bytes:
            buffers = engine.broadcast("buffers", self._packed_buffers(), self._root, priority=FIRST)
        if order_length:
            mine = self.new_order or [0] * order_length
            order = engine.broadcast("order", torch.tensor(mine, dtype=torch.int32), self._root, priority=FIRST)
        return Sent(rows, buffers, order)

    def _packed_buffers(self) -> torch.Tensor:
        if self.new_buffers is not None:
            return self._buffers.pack(self.new_buffers)
        return torch.empty(self._buffers.num_bytes, dtype=torch.uint8)

    def receive(self, sent: Sent, known: Sequence[Context], num_figures: int) -> list[Said]:
        """What everybody says, of which `num_figures` bytes are of adaptation; the rest is here afterwards.

        Raises:
            CommError: somebody is gone.
        """
        if sent.buffers is not None:
            found = sent.buffers.wait()
            if self.new_buffers is None and found is not None:
                self.new_buffers = self._buffers.unpack(found)
        if sent.order is not None:
            told = sent.order.wait()
            self.new_order = told.tolist() if told is not None else None
        return self._read_rows(sent.rows, known, num_figures)

    def _read_rows(self, row: Handle, known: Sequence[Context], num_figures: int) -> list[Said]:
        assert self._engine is not None
        new, loaders = self.new_contexts, self._num_loaders
        rows = row.wait()
        assert rows is not None, "an all_gather has a result on every rank"
        said, complete = self.rows.read(rows, new, known, loaders, num_figures)
        if not complete:
            rest = self._engine.all_gather("contexts", self.rows.rest(new, loaders), priority=FIRST).wait()
            assert rest is not None, "an all_gather has a result on every rank"
            self.rows.read_rest(rest, new, loaders)
        return said
