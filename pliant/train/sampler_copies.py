"""The replicas' own samplers: each draws indices from its copy at the moments when a `DataLoader` would.

This relies on facts of torch 2.13. `iter(DataLoader)` calls `iter` of the batch sampler, then draws the base seed. With W
loader processes it calls `iter` once more, and draws `prefetch_factor * W` batches of indices at once; then one more after
each batch that is taken. Without loader processes the indices of a batch are drawn when it is asked for. A persistent loader
draws a base seed, and calls `iter` twice, in its first epoch only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from pliant.errors import ConfigError
from pliant.train.context import DataPosition, RngState, capture_rng, restore_rng
from pliant.train.outer_draws import DrawsBetween
from pliant.train.replica_copies import (
    GivenChanges,
    Record,
    copy_for,
    drifted,
    is_function_of_replica,
    load_attributes,
    pack_record,
    save_attributes,
    set_epoch_of,
    unpack_record,
)
from pliant.train.sampling import LoaderOptions

_REMEDY = (
    "Let the sampler draw everything at the start of its __iter__, or from a generator of its own (torch.Generator, "
    "random.Random, numpy.random.Generator) in an attribute"
)


def draw_int64(generator: torch.Generator) -> int:
    """Draw a number as torch's loader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def draw_base_seed(state: torch.Tensor | None, count: int) -> int:
    """Draw the base seed as `iter(DataLoader)` does: from the default generator, or the one after so many from a generator
    in this state."""
    if state is None:
        return draw_int64(torch.default_generator)
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(count):
        draw_int64(generator)
    return draw_int64(generator)


class SamplerCopies:
    """Makes the replicas' copies of the program's sampler, and keeps them as the program wants them."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.options = options
        self._dataset = dataset
        self._given = {"sampler": options.sampler, "batch_sampler": options.batch_sampler}
        [given] = [each for each in self._given.values() if each is not None]
        self.changes = GivenChanges(_innermost(given), dataset)

    def copy(self, replica: int) -> SimpleNamespace:
        """Return a new copy for a replica: `order`, which gives indices, and `generator`, which draws base seeds."""
        given = [each for each in self._given.values() if each is not None]
        name = next(name for name, each in self._given.items() if each is not None)
        generator = self.options.generator
        made: list[Any]
        if is_function_of_replica(given[0]):
            made = [given[0](replica), None if generator is None else generator.clone_state()]
        else:  # at once: they may share a generator
            made = copy_for(replica, [given[0], generator], self._dataset, name)
        if not hasattr(made[0], "__iter__") and not hasattr(made[0], "__getitem__"):
            raise ConfigError(
                f"{name}: the function of the replica has returned a {type(made[0]).__name__}, no sampler"
            )
        samplers = (made[0], None) if name == "sampler" else (None, made[0])
        order = self.options.index_source(*samplers)
        if self.changes.epoch is not None:
            set_epoch_of(order, self.changes.epoch)
        return SimpleNamespace(order=order, generator=made[1], shared=self._dataset)


def _innermost(order: Any) -> Any:
    """Return the sampler inside of a batch sampler, if it is one of torch's; else the batch sampler itself."""
    return order.sampler if type(order) is torch.utils.data.BatchSampler else order


class IndexDraws:
    """What one replica has drawn from its copy of the sampler in the present epoch."""

    def __init__(self, copy: SimpleNamespace, options: LoaderOptions) -> None:
        self.copy = copy
        self.begun = False
        """Whether the epoch has begun: `iter` was called."""
        self.drawn = 0
        """The batches whose indices were drawn."""
        self.pending: dict[int, Any] = {}
        """The indices of batches that were drawn and not requested."""
        self.checksum = 0
        self._options = options
        self._iterator: Any = iter(())
        self._is_exhausted = self._draws_again = False
        self._start: Record = {}
        self._between = DrawsBetween()
        self._records: dict[tuple[bool, int], bytes] = {}

    @property
    def sampler(self) -> Any:
        """The replica's copy of what the program has given."""
        return _innermost(self.copy.order)

    def begin(self, base_seed: int | None) -> int:
        """Begin an epoch, with the replica's generators in force. Draws the base seed unless there is one."""
        self._start = {
            "random": capture_rng().to_bytes(),
            "copy": save_attributes(self.copy, self.copy.shared),
            "seeds": base_seed is None,
        }
        self._records = {}
        return self._begin(base_seed)

    def _begin(self, base_seed: int | None, between: Sequence[Sequence[Any]] = ()) -> int:
        self.begun, self.drawn, self.checksum, self.pending, self._is_exhausted = True, 0, 0, {}, False
        self._iterator = iter(self.copy.order)
        if base_seed is None:
            base_seed = draw_int64(self.copy.generator or torch.default_generator)
            if self._options.num_workers:
                self._iterator = iter(self.copy.order)
        self._between = DrawsBetween(between)
        for _ in range(self._options.prefetched):
            self.draw()
        return base_seed

    def draw(self) -> None:
        """Draw the indices of one more batch, if there are any."""
        if self._is_exhausted:
            return
        before = capture_rng()
        try:
            indices = next(self._iterator)
        except StopIteration:
            self._is_exhausted = True
            return
        if not self._draws_again:
            self._between.record(self.drawn, before)
        self.pending[self.drawn] = indices
        self.checksum = zlib.crc32(repr(indices).encode(), self.checksum)
        self.drawn += 1

    def record(self, ended: bool) -> bytes:
        """Return what is needed to draw the same again. It changes when an epoch begins or ends, and when the training and
        the sampler draw from the same generator by turns."""
        between = self._between.entries
        key = ended, len(between)
        if key not in self._records:
            record = {**self._start, "ended": ended, "between": between}
            self._records = {key: pack_record(record, "the sampler")}
        return self._records[key]

    def was_ended(self, stream: DataPosition) -> bool:
        return bool(stream.extra) and bool(unpack_record(stream.extra)["ended"])

    def draw_again(self, replica: int, stream: DataPosition) -> None:
        """Draw what was drawn before this position, in the epoch that its record tells about.

        Raises:
            TrainError: something else comes out.
        """
        record = unpack_record(stream.extra)
        ended, between = record.pop("ended"), record.pop("between")
        count = stream.batch if stream.left is None else stream.left
        present = capture_rng()
        try:
            load_attributes(self.copy, record["copy"], self.copy.shared)
            restore_rng(RngState.from_bytes(record["random"]))
            self._start, self._records = record, {}
            self._draws_again = True
            # Any seed will do for a loader whose loader workers have theirs already.
            self._begin(None if record["seeds"] else 0, between)
            for _ in range(count + (ended and not self._options.num_workers)):
                self._between.draw_again(self.drawn)
                self.draw()
            self._between = DrawsBetween(between)
        finally:
            self._draws_again = False
            restore_rng(present)
        if self.checksum != stream.checksum:
            name = type(self.sampler).__name__
            raise drifted(f"the sampler {name}", replica, count, _REMEDY)
        self.pending = {number: indices for number, indices in self.pending.items() if number >= count}
