"""One replica's copy of an iterable dataset, iterated as a `DataLoader` iterates over it.

The copy can be built again elsewhere, and continue where it was left: from its `state_dict` where the dataset or its iterator
has one, else by taking all batches of the epoch again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pliant.train.context import RngState, capture_rng, restore_rng
from pliant.train.outer_draws import DrawsBetween
from pliant.train.replica_copies import (
    Record,
    checksum_of,
    copy_for,
    drifted,
    has_state,
    load_attributes,
    pack_record,
    save_attributes,
    set_epoch_of,
    unpack_record,
)

REMEDY = "Give the dataset or its iterator state_dict and load_state_dict"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What a loader process sends after the last batch of a stream."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    batch_size: int
    batches: bool
    drop_last: bool
    epoch: int | None = None
    """The last call of `set_epoch`."""


@dataclass(frozen=True, slots=True)
class StreamResume:
    """Where a stream continues."""

    start: bytes | None
    """The state with which the epoch began (`ReplicaStream.start`); None: as made and seeded."""
    count: int
    """The batches that were taken since then."""
    kept: bytes | None = None
    """What `ReplicaStream.save` returned after the last of them."""
    random: bytes | None = None
    """The random state after the last of them."""
    is_over: bool = False
    """Whether that epoch is over; the caller begins the next one."""
    checksum: int | None = None
    """The checksum of the batches, if it is known."""
    between: Sequence[Sequence[Any]] = ()
    """What the training has drawn between the batches (`DrawsBetween.entries`)."""
    unused: int = 0
    """How many more batches are made, and thrown away, before an epoch that was left early is over."""


def pack_start(random: bytes, attributes: Record) -> bytes:
    """Return the state with which an epoch begins: of the generators, and of the copy."""
    return pack_record({"random": random, "copy": attributes})


class ReplicaStream:
    """A copy of an iterable dataset. The caller has put the right random state in force before each call."""

    def __init__(self, given: Any, replica: int, options: StreamOptions, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset: Any = None
        self.size = 0
        """The samples in the batch that was fetched last."""
        self.start = b""
        """The state with which the epoch began: of the generators, and of the copy."""
        self.checksum = 0
        """Of the batches fetched in this epoch."""
        self.ended = False
        self._given, self._replica, self._options, self._collate = given, replica, options, collate_fn
        self._iterator: Any = iter(())
        self._is_exhausted = False

    def make(self) -> None:
        """Make the copy."""
        self.dataset = copy_for(self._replica, self._given, None, "dataset")
        if self._options.epoch is not None:
            set_epoch_of(self.dataset, self._options.epoch)

    @property
    def has_state(self) -> bool:
        return has_state(self.dataset) or has_state(self._iterator)

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    def begin(self, start: bytes = b"") -> None:
        """Begin an epoch."""
        self.start = start or self.pack_start()
        self._iterator = iter(self.dataset)
        self.size, self.checksum, self.ended, self._is_exhausted = 0, 0, False, False

    def pack_start(self) -> bytes:
        """Return the present state of the generators and of the copy."""
        return pack_start(capture_rng().to_bytes(), save_attributes(SimpleNamespace(dataset=self.dataset)))

    def load_start(self, start: bytes) -> None:
        record = unpack_record(start)
        load_attributes(SimpleNamespace(dataset=self.dataset), record["copy"])
        restore_rng(RngState.from_bytes(record["random"]))

    def fetch(self) -> Any:
        """Return the next batch. Raises StopIteration at the end."""
        try:
            data = self._fetch()
        except StopIteration:
            self.ended = True
            raise
        self.checksum = checksum_of(data, self.checksum)
        return data

    def _fetch(self) -> Any:
        options = self._options
        if self._is_exhausted:
            raise StopIteration
        if not options.batches:
            data, self.size = self._collate(next(self._iterator)), 1
            return data
        samples: list[Any] = []
        while len(samples) < options.batch_size:
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._is_exhausted = True
                break
        if not samples or (options.drop_last and len(samples) < options.batch_size):
            raise StopIteration
        self.size = len(samples)
        return self._collate(samples)

    def save(self) -> bytes | None:
        """Return the state after the last batch, or after the end. None if all batches must be taken again."""
        if not self.has_state and not self.ended:
            return None
        states = {
            name: thing.state_dict() if has_state(thing) else None
            for name, thing in (("dataset", self.dataset), ("iterator", self._iterator))
        }
        own = save_attributes(SimpleNamespace(dataset=self.dataset))
        ends = {"ended": self.ended, "exhausted": self._is_exhausted, "checksum": self.checksum}
        return pack_record({"copy": own, **states, **ends}, f"the state_dict of {self.name}")

    def resume(self, resume: StreamResume) -> None:
        """Continue where the stream was left."""
        record = unpack_record(resume.kept) if resume.kept is not None else None
        if resume.is_over and not resume.unused and (record is not None or not resume.count):
            if record is not None:
                load_attributes(SimpleNamespace(dataset=self.dataset), record["copy"])
        elif record is not None:
            self._load(record)
        else:
            self._take_again(resume)
        if resume.random is not None:
            restore_rng(RngState.from_bytes(resume.random))

    def _load(self, record: dict[str, Any]) -> None:
        """Load what `save` returned. The dataset's state is loaded before `iter`, that of its iterator after it."""
        load_attributes(SimpleNamespace(dataset=self.dataset), record["copy"])
        if not record["ended"]:
            if record["dataset"] is not None:
                self.dataset.load_state_dict(record["dataset"])
            self.begin(self.start)
            if record["iterator"] is not None and self._iterator is not self.dataset:
                self._iterator.load_state_dict(record["iterator"])
            if record["dataset"] is None:  # what `iter` has changed, it had changed before
                load_attributes(SimpleNamespace(dataset=self.dataset), record["copy"])
        self.ended, self._is_exhausted, self.checksum = record["ended"], record["exhausted"], record["checksum"]

    def _take_again(self, resume: StreamResume) -> None:
        """Take all batches of the epoch again."""
        if resume.start is not None:
            self.load_start(resume.start)
        self.begin(resume.start or b"")
        between = DrawsBetween(resume.between)
        for number in range(resume.count):
            try:
                between.draw_again(number)
                self.fetch()
            except StopIteration:
                raise drifted(f"the stream {self.name}", self._replica, resume.count, REMEDY) from None
        differs = resume.checksum is not None and self.checksum != resume.checksum
        if differs or (resume.random is not None and capture_rng().to_bytes() != resume.random):
            raise drifted(f"the stream {self.name}", self._replica, resume.count, REMEDY)
