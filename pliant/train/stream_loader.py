"""The batches of replicas that each have their own copy of an iterable dataset.

Each replica gets what a DDP rank with its own `DataLoader` would get. Without loader processes its stream runs here, in turn
with those of the other replicas. With W loader processes each of them is the w-th loader worker of every replica hosted here,
and has a copy of the dataset for each.

A replica that comes from another worker continues from the state that the dataset or its iterator has saved
(`state_dict`). Without one, all batches of the epoch are taken again and thrown away. A replica that stays, and repeats a
step, gets the same batches again from memory.

Loader workers are asked in turn; one whose stream has ended is passed over (torch 2.13).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch.utils.data._utils.pin_memory import pin_memory

from pliant.train.context import DataPosition, RngState, capture_rng, fill_states, restore_rng
from pliant.train.loader_pool import LoaderPool, PooledLoader
from pliant.train.loader_process import LoadedBatch, LoaderSpec
from pliant.train.outer_draws import DrawsBetween
from pliant.train.replica_copies import (
    GivenChanges,
    is_function_of_replica,
    pack_record,
    unpack_record,
)
from pliant.train.replica_stream import ReplicaStream, StreamEnd, StreamOptions, StreamResume, pack_start
from pliant.train.sampler_copies import draw_base_seed
from pliant.train.sampling import PREFETCH_FACTOR, LoaderOptions

_REPEATABLE = 2
"""How many steps may be taken back: with sync="priority" one more may have begun."""


@dataclass(frozen=True, slots=True)
class _TakenBatch:
    """A batch that was taken, to be taken again if its step is repeated."""

    before: DataPosition
    after: DataPosition
    random_before: RngState
    random_after: RngState
    data: tuple[Any, ...]
    """The batch; empty for the end of the data."""
    size: int


class _HostedStream(Protocol):
    """A replica's stream: in this process, or in loader processes."""

    position: DataPosition
    size: int
    repeatable: deque[_TakenBatch]
    again: deque[_TakenBatch]
    """Batches to be taken again."""

    def take(self) -> Any: ...
    @property
    def ended(self) -> bool: ...
    @property
    def has_state(self) -> bool: ...
    def begin_epoch(self, position: DataPosition) -> None: ...
    def drop(self) -> None: ...


class StreamLoader(PooledLoader[_HostedStream]):
    """Loads the batches of the replicas that this worker hosts. Use it in a `with`, or `close` it."""

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        *,
        repeats: bool = True,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`dataset` is an IterableDataset, or a function of the replica that returns one. `repeats` tells whether steps
        may be repeated, so that the last batches must be kept."""
        super().__init__(options)
        self.options, self.dataset, self.collate, self.pins = options, dataset, self._collate, self._pin
        self.tracks = itertools.count()
        self.notify = notify
        self._repeats = repeats
        self.changes = GivenChanges(dataset)
        self._has_told_cost = False

    def host(
        self, streams: Mapping[int, DataPosition], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None:
        """Load for these replicas from now on, from these positions. All must be in the same epoch."""
        before, self._hosted = self._hosted, {}
        if self._enter_epoch(streams):
            self.changes.begin_epoch(
                [each.stream.dataset for each in before.values() if isinstance(each, _LocalStream)]
            )
        for replica, position in streams.items():
            hosted = before.pop(replica, None)
            if hosted is not None and not self._continues(hosted, position):
                hosted.drop()
                hosted = None
            self._hosted[replica] = hosted or self._make(replica, position)
        for hosted in before.values():
            hosted.drop()
        self.prefetch()

    def _make(self, replica: int, position: DataPosition) -> _HostedStream:
        kind = _PooledStream if self.options.num_workers else _LocalStream
        return kind(self, replica, position)

    def _continues(self, hosted: _HostedStream, position: DataPosition) -> bool:
        """Go on with this stream at this position, or return False if it does not stand there."""
        num_workers = self.options.num_workers
        stands = hosted.again[0].before if hosted.again else hosted.position
        if position.is_same(stands, num_workers):
            return True
        if position.epoch == hosted.position.epoch:
            taken = [*hosted.repeatable]
            for first, each in enumerate(taken):
                if position.is_same(each.before, num_workers):
                    hosted.again = deque(taken[first:])
                    return True
            return False
        left = hosted.position
        while left.epoch < position.epoch:
            left = left.next_epoch(self.options)
        if hosted.again or not position.is_same(left, num_workers):
            return False
        if num_workers and not self.options.persistent_workers:
            return False  # new loader processes have new copies
        hosted.repeatable.clear()
        hosted.begin_epoch(position)
        return True

    def next(self, replica: int) -> Any:
        """Return the next batch of `replica`. Raises StopIteration at the end of its data, and what the dataset raises.

        The generators of this process must be those of the replica: its first batch of an epoch draws the base seed,
        and without loader processes the samples are made here.
        """
        hosted = self._hosted_replica(replica)
        if hosted.again:
            taken = hosted.again.popleft()
            if _fits(taken, capture_rng()):
                return _take_again(hosted, taken)
            hosted.drop()
            hosted = self._hosted[replica] = self._make(replica, taken.before)
        before, random = hosted.position, capture_rng() if self._repeats else None
        data: tuple[Any, ...] = ()
        with contextlib.suppress(StopIteration):
            data = (hosted.take(),)
        if random is not None and (not hosted.has_state or not data):
            with contextlib.suppress(Exception):  # what cannot be copied is loaded again
                kept = copy.deepcopy(data)  # the program may change the batch
                taken = _TakenBatch(before, hosted.position, random, capture_rng(), kept, hosted.size)
                hosted.repeatable.append(taken)
        if not data:
            raise StopIteration
        self.prefetch()
        return data[0]

    def last_size(self, replica: int) -> int:
        """Return the number of samples in the batch that `replica` took last."""
        return self._hosted_replica(replica).size

    def stream(self, replica: int) -> DataPosition:
        """Return the position of `replica` after the batches taken so far."""
        hosted = self._hosted_replica(replica)
        return hosted.again[0].before if hosted.again else hosted.position

    def has_more(self, replicas: Sequence[int]) -> bool:
        """Return whether these replicas may have another batch. That is not known before they are asked for it, and
        `next` raises StopIteration."""
        hosted = self._hosted_replica(replicas[0])
        return bool(hosted.again) or not hosted.ended

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the copies here and of all that are made from now on, where they have it. Persistent loader
        processes do not notice, as with a `DataLoader`."""
        local = [each.stream.dataset for each in self._hosted.values() if isinstance(each, _LocalStream)]
        self.changes.set_epoch(epoch, local)

    # --- for the streams ---

    @property
    def stream_options(self) -> StreamOptions:
        options = self.options
        return StreamOptions(options.batch_size, options.batches, options.drop_last, self.changes.epoch)

    def begin_epoch(self, position: DataPosition) -> tuple[DataPosition, int]:
        """Draw the base seed as `iter(DataLoader)` does; return the position with it, and the seed itself."""
        base_seed = draw_base_seed(self._generator, position.seeds)
        return replace(position, base_seed=base_seed, seeds=position.seeds + 1), base_seed

    def pool(self) -> LoaderPool:
        return self._running_pool()

    def _loader_spec(self) -> LoaderSpec:
        options = self.options
        return LoaderSpec(
            self.dataset,
            self.collate,
            options.worker_init_fn,
            options.num_workers,
            options.batches,
            self.stream_options,
        )

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    def prefetch(self) -> None:
        """Request batches of all replicas hosted here."""
        pooled = [hosted for hosted in self._hosted.values() if isinstance(hosted, _PooledStream)]
        depth = max(1, (self.options.prefetch_factor or PREFETCH_FACTOR) // max(1, len(pooled)))
        for ahead in range(1, depth + 1):
            for hosted in pooled:
                hosted.request(ahead)

    def receive(self, number: int) -> None:
        """Wait for loader processes, and give each replica its batches."""
        for loaded in self.pool().receive(number):
            for hosted in self._hosted.values():
                if isinstance(hosted, _PooledStream) and hosted.track == loaded.track:
                    hosted.arrived(loaded)

    @contextlib.contextmanager
    def telling_cost(self, replica: int, count: int, name: str) -> Iterator[None]:
        """Tell once what it costs to continue a stream without a state."""
        began_s = time.monotonic()
        yield
        if count and not self._has_told_cost:
            self._has_told_cost = True
            where = "in its loader processes" if self.options.num_workers else f"{time.monotonic() - began_s:.1f} s"
            self.notify(
                f"replica {replica} continues here: {count} batches of {name} are taken again ({where}), because it has no "
                "state_dict and load_state_dict"
            )


def _fits(taken: _TakenBatch, random: RngState) -> bool:
    """Return whether a batch would come out the same in this random state."""
    return taken.random_before == taken.random_after or taken.random_before == random


def _take_again(hosted: _HostedStream, taken: _TakenBatch) -> Any:
    hosted.size = taken.size
    if taken.random_before != taken.random_after:
        restore_rng(taken.random_after)
    if not taken.data:
        raise StopIteration
    return copy.deepcopy(taken.data[0])


class _LocalStream:
    """A replica's stream in this process."""

    def __init__(self, loader: StreamLoader, replica: int, position: DataPosition) -> None:
        self.position, self.size = position, 0
        self.repeatable: deque[_TakenBatch] = deque(maxlen=_REPEATABLE)
        self.again: deque[_TakenBatch] = deque()
        self.stream = ReplicaStream(loader.dataset, replica, loader.stream_options, loader.collate)
        self._loader, self._begun = loader, False
        self._between = DrawsBetween()
        present = capture_rng()
        try:
            self.stream.make()
            if position.extra:
                self._resume(replica, position)
        finally:
            restore_rng(present)

    def _resume(self, replica: int, position: DataPosition) -> None:
        record = unpack_record(position.extra)
        is_over = position.left is not None
        count = position.batch if position.left is None else position.left
        between = record["between"]
        resume = StreamResume(
            record["start"], count, record["kept"], is_over=is_over, checksum=position.checksum, between=between
        )
        with self._loader.telling_cost(replica, 0 if resume.kept else count, self.stream.name):
            self.stream.resume(resume)
        if is_over:
            self._loader.changes.apply_to(self.stream.dataset)
        self._begun, self._between = not is_over, DrawsBetween(between)

    @property
    def ended(self) -> bool:
        """Whether a batch was asked for after the last one of the epoch."""
        return self._begun and self.stream.ended

    @property
    def has_state(self) -> bool:
        return self.stream.has_state

    def begin_epoch(self, position: DataPosition) -> None:
        self.position, self._begun = position, False

    def take(self) -> Any:
        position, stream = self.position, self.stream
        if not self._begun:
            position, _ = self._loader.begin_epoch(DataPosition(position.epoch, seeds=position.seeds))
            stream.begin()
            self._begun, self._between = True, DrawsBetween()
        before, known = capture_rng(), len(self._between.entries)
        try:
            data = stream.fetch()
        except StopIteration:
            self.position = replace(position, checksum=stream.checksum, extra=self._record(position, False))
            raise
        self.size = stream.size
        if not stream.has_state:
            self._between.record(position.batch, before)
        is_same = position.batch > 0 and len(self._between.entries) == known
        record = self._record(position, is_same)
        self.position = replace(position, batch=position.batch + 1, checksum=stream.checksum, extra=record)
        return pin_memory(data) if self._loader.pins else data  # type: ignore[no-untyped-call]

    def _record(self, before: DataPosition, is_same: bool) -> bytes:
        """Return the record to continue from. Without a state it is the `same` as before while nothing else is drawn."""
        kept = self.stream.save()
        if kept is None and is_same:
            return before.extra
        start, between = (self.stream.start, self._between.entries) if kept is None else (None, [])
        return pack_record({"start": start, "kept": kept, "ended": self.stream.ended, "between": between})

    def drop(self) -> None:
        pass


@dataclass(slots=True)
class _Cursor:
    """Which loader worker is asked next, and how many batches were taken from each."""

    taken: list[int]
    next: int = 0

    @classmethod
    def after(cls, count: int, num_workers: int, ends: Mapping[int, int]) -> _Cursor:
        """Return the cursor after `count` batches, where the streams of loader workers in `ends` have so many."""
        cursor = cls([0] * num_workers)
        while sum(cursor.taken) < count:
            if ends.get(cursor.next) != cursor.taken[cursor.next]:
                cursor.taken[cursor.next] += 1
            cursor.advance()
        return cursor

    def advance(self) -> None:
        self.next = (self.next + 1) % len(self.taken)


class _PooledStream:
    """A replica's stream in loader processes. Batch n of loader worker w has the number n * W + w."""

    def __init__(self, loader: StreamLoader, replica: int, position: DataPosition) -> None:
        self.position, self.size = position, 0
        self.repeatable: deque[_TakenBatch] = deque(maxlen=_REPEATABLE)
        self.again: deque[_TakenBatch] = deque()
        self.loaded: dict[int, LoadedBatch] = {}
        self.track: int | None = None
        self._loader, self._replica = loader, replica
        num_workers = self._num_workers = loader.options.num_workers
        record = unpack_record(position.extra) if position.extra else {}
        self._starts: list[bytes | None] = record.get("starts", [None] * num_workers)
        self._kept: list[bytes | None] = record.get("kept", [None] * num_workers)
        self._ends: dict[int, int] = dict(record.get("ends", []))
        self._ended = bool(record.get("ended"))
        self._states = fill_states(position.workers, num_workers)
        count = position.batch if position.left is None else position.left
        self._cursor = _Cursor.after(count, num_workers, self._ends)
        self._asked = list(self._cursor.taken)
        self._has_state = any(self._kept)
        self._record: bytes = position.extra
        self._has_changed = False
        if position.base_seed is not None:
            self._open(position.base_seed)
            if position.left is not None:
                self._reset()

    @property
    def ended(self) -> bool:
        """Whether a batch was asked for after the last one of the epoch."""
        return self._ended

    @property
    def has_state(self) -> bool:
        return self._has_state

    def _open(self, base_seed: int) -> None:
        self.track = next(self._loader.tracks)
        is_over, taken = self.position.left is not None, self._cursor.taken
        columns = zip(self._starts, taken, self._kept, self._states, strict=True)
        resumes = [
            StreamResume(start, count, kept, state if count else None, is_over, unused=self._unused(worker, is_over))
            if count or is_over or start is not None
            else None
            for worker, (start, count, kept, state) in enumerate(columns)
        ]
        again = sum(count for count, kept in zip(taken, self._kept, strict=True) if kept is None)
        with self._loader.telling_cost(self._replica, again, _name_of(self._loader.dataset)):
            self._loader.pool().open_stream(self.track, base_seed, self._replica, resumes)

    def _unused(self, worker: int, is_over: bool) -> int:
        """Return how many more batches a persistent `DataLoader` has requested from a loader worker in an epoch that was left
        early: they are made and thrown away."""
        options = self._loader.options
        if not is_over or not options.persistent_workers or worker in self._ends:
            return 0
        return options.prefetch_factor or PREFETCH_FACTOR

    def _reset(self) -> None:
        """Forget the epoch that is over. Loader workers that have ended begin the next one as they are."""
        ended = zip(self._states, self._kept, strict=True)
        self._starts = [state and kept and pack_start(state, unpack_record(kept)["copy"]) for state, kept in ended]
        self._kept, self._ends, self._has_changed = [None] * self._num_workers, {}, True
        self._cursor, self._asked = _Cursor([0] * self._num_workers), [0] * self._num_workers
        self._ended, self.loaded = False, {}

    def begin_epoch(self, position: DataPosition) -> None:
        """Begin another epoch with persistent loader processes."""
        self.position = position
        for ahead in range(1, (self._loader.options.prefetch_factor or PREFETCH_FACTOR) + 1):
            self.request(ahead)  # they are made, and thrown away
        self._reset()
        if self.track is not None:  # a new one, so that what was requested too much is not taken for this epoch's
            before, self.track = self.track, next(self._loader.tracks)
            self._loader.pool().begin_stream(self.track, before)

    def request(self, ahead: int) -> None:
        """Request the batches of every loader worker up to so many ahead."""
        if self.track is None:
            return
        for worker in range(self._num_workers):
            if worker not in self._ends and self._asked[worker] < self._cursor.taken[worker] + ahead:
                self._loader.pool().load(self.track, self._asked[worker] * self._num_workers + worker, None)
                self._asked[worker] += 1

    def arrived(self, loaded: LoadedBatch) -> None:
        """Keep a batch until it is taken."""
        self.loaded[loaded.batch] = loaded
        if loaded.start is not None:
            self._starts[loaded.batch % self._num_workers], self._has_changed = loaded.start, True

    def take(self) -> Any:
        position = self.position
        if position.base_seed is None:
            position, base_seed = self._loader.begin_epoch(position)
            self._open(base_seed)
        loaded = self._next_batch()
        if loaded is None:
            self._ended = self._has_changed = True
            self.position = replace(position, left=None, workers=tuple(self._states), extra=self._pack())
            raise StopIteration
        self.size = loaded.size
        self.position = replace(
            position, batch=position.batch + 1, left=None, workers=tuple(self._states), extra=self._pack()
        )
        return loaded.take()

    def _next_batch(self) -> LoadedBatch | None:
        """Return the next batch of the loader workers in turn; None if the streams of all have ended."""
        cursor = self._cursor
        if self._loader.options.persistent_workers and not sum(cursor.taken) and not self._ends:
            # Whoever continues the epoch needs the state with which each loader worker has begun it.
            self._loader.prefetch()
            for first in range(self._num_workers):
                while first not in self.loaded:
                    self._loader.receive(first)
        while len(self._ends) < self._num_workers:
            worker = cursor.next
            if worker in self._ends:
                cursor.advance()
                continue
            number = cursor.taken[worker] * self._num_workers + worker
            self._loader.prefetch()
            while number not in self.loaded:
                self._loader.receive(number)
            loaded = self.loaded.pop(number)
            self._states[worker], self._kept[worker] = loaded.state, loaded.kept
            self._has_changed |= loaded.kept is not None
            cursor.advance()
            if isinstance(loaded.data, StreamEnd):
                self._ends[worker] = cursor.taken[worker]
                continue
            self._has_state = loaded.kept is not None
            cursor.taken[worker] += 1
            return loaded
        return None

    def _pack(self) -> bytes:
        """Return the record to continue from. Without a state it changes only when an epoch begins or a stream ends."""
        if self._has_changed:
            ends = [list(pair) for pair in sorted(self._ends.items())]
            starts = [None if kept else start for start, kept in zip(self._starts, self._kept, strict=True)]
            record = {"starts": starts, "kept": self._kept, "ends": ends, "ended": self._ended}
            self._record, self._has_changed = pack_record(record), False
        return self._record

    def drop(self) -> None:
        if self.track is not None and self._loader.is_running:
            self._loader.pool().drop(self.track)


def _name_of(dataset: Any) -> str:
    return "the dataset" if is_function_of_replica(dataset) else type(dataset).__name__
