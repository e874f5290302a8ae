"""The messages that workers exchange with the sums of each step: measurements, contexts, buffers.

After the exchange every worker has the whole state of the job. A context has about ten kilobytes, nearly all of it the
words of random generators, which rarely change. So from the second step of a view on a message holds only the changes, in
a small fixed room. If they do not fit (dropout on the host draws a word for every element), the whole contexts follow in a
second round, and come first in the next step. All workers see the same messages, so all know which form comes next.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.train.buckets import FIRST_PRIORITY
from pliant.train.context import ReplicaContext
from pliant.train.step import TURN_BYTES
from pliant.train.sync import SYNC_BYTES, StepMeasurement, SyncConfig, pack_sync, unpack_sync

if TYPE_CHECKING:
    from pliant.train.replicas import ModelBuffers, Placement, Tensors


class StepExchange:
    """What the step in progress leaves for the next one; after `receive`, that of all replicas."""

    def __init__(self, buffers: ModelBuffers, num_loader_workers: int) -> None:
        self.codec = StepMessageCodec(num_loader_workers)
        self.new_contexts: dict[int, ReplicaContext] = {}
        self.new_buffers: Tensors | None = None
        """The buffers of replica 0."""
        self._buffers = buffers
        self._engine: Engine | None = None
        self._root = 0
        self._sent: tuple[Handle, Handle | None]
        """The collectives on their way: messages, buffers."""

    def enter_view(self, engine: Engine, placement: Placement) -> None:
        self._engine, self._root = engine, placement.owner_of(0)
        self.codec.enter_view(placement.blocks, placement.hosted)
        self.clear()

    def clear(self) -> None:
        """Drop everything: the step is over, or does not count."""
        self.new_contexts, self.new_buffers = {}, None

    def send(self, message: StepMessage, known: Sequence[ReplicaContext]) -> None:
        """Send this worker's part. `known` are the contexts that everybody has."""
        engine, buffers = self._engine, None
        assert engine is not None, "enter_view() comes first"
        row = self.codec.pack(message, self.new_contexts, known)
        rows = engine.all_gather(self.codec.name, row, priority=FIRST_PRIORITY)
        if self._buffers.num_bytes:
            own = self.new_buffers
            packed = self._buffers.to_host(own) if own is not None else self._buffers.empty_on_host()
            buffers = engine.broadcast("buffers", packed, self._root, priority=FIRST_PRIORITY)
        self._sent = rows, buffers

    def receive(self, known: Sequence[ReplicaContext], figures_bytes: int) -> list[StepMessage]:
        """Return everybody's messages, of which `figures_bytes` are adaptation's; the rest is in the attributes.

        Raises:
            CommError: a worker is lost.
        """
        assert self._engine is not None, "enter_view() comes first"
        rows, buffers = self._sent
        found = buffers.wait() if buffers is not None else None
        if self.new_buffers is None and found is not None:
            self.new_buffers = self._buffers.from_host(found)
        own = dict(self.new_contexts)
        messages, complete = self.codec.read(_rows_of(rows), self.new_contexts, known, figures_bytes)
        if not complete:
            contexts = self.codec.pack_contexts(self.new_contexts)
            gathered = self._engine.all_gather("contexts", contexts, priority=FIRST_PRIORITY)
            self.codec.read_contexts(_rows_of(gathered), self.new_contexts, known)
        if any(each.has_extras for each in messages):
            extras = self._engine.all_gather_bytes("extras", self.codec.pack_extras(own, known))
            self.codec.read_extras(extras, self.new_contexts)
        return messages

    def share_order(self, name: str, order: Sequence[int], length: int) -> list[int]:
        """Return the order in which the gradients of replica 0 became ready, on every worker."""
        assert self._engine is not None, "enter_view() comes first"
        indices = torch.tensor(order if len(order) == length else [0] * length, dtype=torch.int32)
        found = self._engine.broadcast(name, indices, self._root, priority=FIRST_PRIORITY).wait()
        assert found is not None, "a broadcast has a result on every rank"
        shared: list[int] = found.tolist()
        return shared


def _rows_of(gathered: Handle) -> list[bytes]:
    """Wait for everybody's rows."""
    rows = gathered.wait()
    assert rows is not None, "an all_gather has a result on every rank"
    return [bytes(row.numpy()) for row in rows]


# --- the messages ---


_HEAD = struct.Struct("<QQ???QQ")
"""The step and pass, the newest membership that the worker is prepared for, whether its changes fit, whether extras follow, whether
it has a process group, two checksums."""
_EXTRA = struct.Struct("<IQ")
"""The replica, and the size of what its own data have kept."""
_WORD = np.dtype("<u8")
_CHANGE = np.dtype([("place", "<u2"), ("word", _WORD)])
_COUNT = struct.Struct("<H")
MAX_CHANGES = 16
CHANGES_BYTES = _COUNT.size + MAX_CHANGES * _CHANGE.itemsize
"""The room for the changes of one context."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One worker's message of a step, without the contexts."""

    number: int
    """The step, and the pass in it."""
    prepared: int
    sync_config: SyncConfig
    """How this worker would have the sums travel."""
    measured: StepMeasurement
    figures: bytes
    turns: Sequence[bytes]
    """The rows of the turns taken here."""
    draws: int = 0
    """A checksum of the random numbers that were drawn outside of turns."""
    checksum: int = 0
    """Of parameters and state, where they are compared; else 0."""
    has_group: bool = False
    """Whether this worker could sum gradients on a process group."""
    fits: bool = True
    has_extras: bool = False
    """Whether the own data of replicas here have kept something new (`DataPosition.extra`), which follows in a round of
    its own."""


class StepMessageCodec:
    """Packs this worker's message, and reads those of all. `known` are the contexts that everybody has."""

    def __init__(self, num_loaders: int) -> None:
        self._num_loaders = num_loaders
        self.is_brief = False
        """Whether the next messages hold changes instead of contexts."""
        self._blocks: tuple[int, ...] = ()
        self._hosted = range(0)

    def enter_view(self, blocks: Sequence[int], hosted: range) -> None:
        """Set the placement: rank r hosts `blocks[r]` replicas, and this worker `hosted`."""
        self._blocks, self._hosted, self.is_brief = tuple(blocks), hosted, False

    @property
    def name(self) -> str:
        """The name of the collective for the next messages."""
        return "changes" if self.is_brief else "step"

    def pack(
        self, message: StepMessage, new: Mapping[int, ReplicaContext], known: Sequence[ReplicaContext]
    ) -> torch.Tensor:
        """Return this worker's message."""
        whole = self._whole(new)
        changes = [
            encode_changes(known[replica].to_bytes(self._num_loaders), data)
            for replica, data in zip(self._hosted, whole, strict=True)
        ]
        flags = None not in changes, bool(self._changed_extras(new, known)), message.has_group
        head = _HEAD.pack(message.number, message.prepared, *flags, message.draws, message.checksum)
        head += pack_sync(message.sync_config, message.measured) + message.figures
        head += b"".join(message.turns).ljust(TURN_BYTES * max(self._blocks), b"\0")
        if self.is_brief:
            return self._padded(head, [change or b"" for change in changes], CHANGES_BYTES)
        return self._padded(head, whole, len(whole[0]))

    def pack_contexts(self, new: Mapping[int, ReplicaContext]) -> torch.Tensor:
        """Return this worker's contexts, for when the changes did not fit."""
        whole = self._whole(new)
        return self._padded(b"", whole, len(whole[0]))

    def _whole(self, new: Mapping[int, ReplicaContext]) -> list[bytes]:
        return [new[replica].to_bytes(self._num_loaders) for replica in self._hosted]

    def _padded(self, head: bytes, bodies: Sequence[bytes], room: int) -> torch.Tensor:
        row = head + b"".join(body.ljust(room, b"\0") for body in bodies)
        return torch.frombuffer(bytearray(row.ljust(len(head) + room * max(self._blocks), b"\0")), dtype=torch.uint8)

    def read(
        self, rows: Sequence[bytes], new: dict[int, ReplicaContext], known: Sequence[ReplicaContext], figures_bytes: int
    ) -> tuple[list[StepMessage], bool]:
        """Return all messages, and whether the contexts in them are complete. The contexts of other workers' replicas
        go to `new`. If they are not complete, everybody must send `pack_contexts`."""
        begin = _HEAD.size + SYNC_BYTES
        turns = begin + figures_bytes
        end = turns + TURN_BYTES * max(self._blocks)
        messages = []
        for row, count in zip(rows, self._blocks, strict=True):
            number, prepared, fits, has_extras, has_group, draws, checksum = _HEAD.unpack_from(row)
            own = [row[turns + slot * TURN_BYTES : turns + (slot + 1) * TURN_BYTES] for slot in range(count)]
            sync = unpack_sync(row[_HEAD.size : begin])
            messages.append(
                StepMessage(
                    number, prepared, *sync, row[begin:turns], own, draws, checksum, has_group, fits, has_extras
                )
            )
        was_brief, self.is_brief = self.is_brief, all(each.fits for each in messages)
        if was_brief and not self.is_brief:
            return messages, False
        for replica, body in self._of_replicas([row[end:] for row in rows], CHANGES_BYTES if was_brief else 0):
            if replica not in new:
                whole = apply_changes(known[replica].to_bytes(self._num_loaders), body) if was_brief else body
                new[replica] = ReplicaContext.from_bytes(whole, self._num_loaders, known[replica].extra)
        return messages, True

    def read_contexts(
        self, rows: Sequence[bytes], new: dict[int, ReplicaContext], known: Sequence[ReplicaContext]
    ) -> None:
        for replica, whole in self._of_replicas(rows, 0):
            if replica not in new:
                new[replica] = ReplicaContext.from_bytes(whole, self._num_loaders, known[replica].extra)

    def _changed_extras(
        self, new: Mapping[int, ReplicaContext], known: Sequence[ReplicaContext]
    ) -> list[tuple[int, bytes]]:
        contexts = [(replica, new[replica]) for replica in self._hosted]
        return [(replica, context.extra) for replica, context in contexts if context.extra != known[replica].extra]

    def pack_extras(self, own: Mapping[int, ReplicaContext], known: Sequence[ReplicaContext]) -> bytes:
        """Return what the own data of the replicas here have kept since `known`."""
        changed = self._changed_extras(own, known)
        return b"".join(_EXTRA.pack(replica, len(extra)) + extra for replica, extra in changed)

    def read_extras(self, rows: Sequence[bytes], new: dict[int, ReplicaContext]) -> None:
        """Add what `pack_extras` returned on every worker."""
        for row in rows:
            place = 0
            while place < len(row):
                replica, size = _EXTRA.unpack_from(row, place)
                place += _EXTRA.size + size
                if replica not in self._hosted:
                    data = new[replica].to_bytes(self._num_loaders)
                    new[replica] = ReplicaContext.from_bytes(data, self._num_loaders, row[place - size : place])

    def _of_replicas(self, bodies: Sequence[bytes], room: int) -> list[tuple[int, bytes]]:
        """Cut the bodies into one part per replica: of `room` bytes, or of equal size if `room` is 0."""
        found: list[tuple[int, bytes]] = []
        room = room or len(bodies[0]) // max(self._blocks)
        for body, count in zip(bodies, self._blocks, strict=True):
            found += [(len(found) + slot, body[slot * room : (slot + 1) * room]) for slot in range(count)]
        return found


def encode_changes(before: bytes, after: bytes) -> bytes | None:
    """Return what turns `before` into `after`, in at most `CHANGES_BYTES`; None if that is too little."""
    old, new = _words(before), _words(after)
    if len(old) != len(new) or len(old) > 1 << 16:
        return None
    places = np.flatnonzero(old != new)
    if len(places) > MAX_CHANGES:
        return None
    changes = np.empty(len(places), dtype=_CHANGE)
    changes["place"], changes["word"] = places, new[places]
    return _COUNT.pack(len(places)) + changes.tobytes()


def apply_changes(before: bytes, change: bytes) -> bytes:
    """Apply what `encode_changes` returned."""
    [count] = _COUNT.unpack_from(change)
    changes = np.frombuffer(change, dtype=_CHANGE, count=count, offset=_COUNT.size)
    words = _words(before).copy()
    words[changes["place"]] = changes["word"]
    return words.tobytes()[: len(before)]


def _words(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(data.ljust(-(-len(data) // _WORD.itemsize) * _WORD.itemsize, b"\0"), dtype=_WORD)
