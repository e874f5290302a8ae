"""The batches of N replicas, as N processes with `DistributedSampler` and `DataLoader` would get them.

`batches` says which samples; `Stream` is where one replica stands in its epoch, small enough to travel;
`Feeder` loads the batches of the replicas that this worker hosts, ahead of time, and in the random state
that each loader worker of each replica would have had. Only what was taken counts: what was prefetched for
a replica that moves away is loaded again elsewhere, to the same bits.

Facts of torch 2.13 behind this. `iter(DataLoader)` draws one int64, the base seed, from the default generator
(or `generator=`), with loader processes or without; a persistent loader does so in its first epoch only, and
its loader workers' random states live on. Batch k of an epoch is made by loader worker k mod W. Nothing
else is drawn in the training process.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.errors import ConfigError, TrainError
from pliant.train import rng
from pliant.train.loader_options import LoaderOptions
from pliant.train.loader_process import Loaded, Recipe, fetch
from pliant.train.pool import Pool

_HEADER = struct.Struct("<qqq?q")
_WORKER = struct.Struct(f"<?{rng.SIZE}s")
_PREFETCH_FACTOR = 2


def batches(
    length: int, num_replicas: int, replica: int, epoch: int, options: LoaderOptions, consumed: int = 0
) -> list[list[int]]:
    """The samples of each batch of `replica` in `epoch`, of a dataset of `length`.

    The first `consumed` samples in the order of that epoch are left out, and the rest is dealt to the replicas.
    """
    share = _order(length, num_replicas, epoch, options, consumed)[replica::num_replicas]
    return [_batch(share, number, options) for number in range(num_batches(length, num_replicas, options, consumed))]


def num_batches(length: int, num_replicas: int, options: LoaderOptions, consumed: int = 0) -> int:
    """Batches of every replica in an epoch of which `consumed` samples are used."""
    share = _padded(length - consumed, num_replicas, options) // num_replicas
    return share // options.batch_size if options.drop_last else math.ceil(share / options.batch_size)


def samples_used(length: int, num_replicas: int, stream: Stream, options: LoaderOptions) -> int:
    """Samples of the epoch that are used when all replicas stand where `stream` does: where to deal anew."""
    return min(length, stream.consumed + stream.batch * options.batch_size * num_replicas)


def _padded(length: int, num_replicas: int, options: LoaderOptions) -> int:
    if options.sampler_drop_last:
        return length // num_replicas * num_replicas
    return math.ceil(length / num_replicas) * num_replicas


def _order(length: int, num_replicas: int, epoch: int, options: LoaderOptions, consumed: int) -> Tensor:
    """All samples in the order in which they are dealt to the replicas, round and round."""
    if options.shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(options.seed + epoch))
    else:
        order = torch.arange(length)
    order = order[consumed:]
    size = _padded(len(order), num_replicas, options)
    return order.repeat(math.ceil(size / max(1, len(order))))[:size]


def _batch(share: Tensor, number: int, options: LoaderOptions) -> list[int]:
    samples: list[int] = share[number * options.batch_size : (number + 1) * options.batch_size].tolist()
    return samples


@dataclass(frozen=True, slots=True)
class Stream:
    """Where one replica stands in its data."""

    epoch: int = 0
    batch: int = 0
    """The next one to take."""
    consumed: int = 0
    """Samples of the epoch that were used before it was dealt to this number of replicas."""
    base_seed: int | None = None
    """What the loader workers' random states come from; None: not drawn yet."""
    workers: tuple[bytes | None, ...] = ()
    """The random state (`RngState.to_bytes`) of each loader worker after its last taken batch; None: as seeded."""

    def next_epoch(self, options: LoaderOptions) -> Stream:
        """The beginning of the epoch after this one."""
        if options.persistent_workers:
            return Stream(self.epoch + 1, base_seed=self.base_seed, workers=self.workers)
        return Stream(self.epoch + 1)

    @staticmethod
    def size(num_workers: int) -> int:
        """Bytes of any stream with so many loader workers."""
        return _HEADER.size + num_workers * _WORKER.size

    def to_bytes(self, num_workers: int) -> bytes:
        """This stream in `size(num_workers)` bytes."""
        drawn = self.base_seed is not None
        parts = [_HEADER.pack(self.epoch, self.batch, self.consumed, drawn, self.base_seed or 0)]
        for state in _filled(self.workers, num_workers):
            parts.append(_WORKER.pack(state is not None, state or b""))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Stream:
        """What `to_bytes` wrote.

        Raises:
            ConfigError: `data` has a size that no stream has.
        """
        num_workers, rest = divmod(len(data) - _HEADER.size, _WORKER.size)
        if rest or num_workers < 0:
            raise ConfigError(f"{len(data)} bytes are no stream: written by another version?")
        epoch, batch, consumed, drawn, base_seed = _HEADER.unpack_from(data)
        states = _WORKER.iter_unpack(data[_HEADER.size :])
        workers = tuple(state if known else None for known, state in states)
        return cls(epoch, batch, consumed, base_seed if drawn else None, workers)


def _filled(workers: Sequence[bytes | None], num_workers: int) -> list[bytes | None]:
    if len(workers) > num_workers:
        raise ConfigError(
            f"a stream of {len(workers)} loader workers, but num_workers={num_workers}: it must not change"
        )
    return [*workers, *[None] * (num_workers - len(workers))]


@dataclass(slots=True)
class _Place:
    """A hosted replica: what was taken, and what is on its way."""

    stream: Stream
    """As it was hosted; the fields below go on from there."""
    turn: int
    share: Tensor
    num_batches: int
    batch: int
    base_seed: int | None
    workers: list[bytes | None]
    asked: int
    """The first batch that was not asked for."""
    track: int | None = None
    replays: dict[int, int] = field(default_factory=dict)
    """Tracks that load batches a second time, with the last one of each."""
    tracks: dict[int, int] = field(default_factory=dict)
    """By which track each batch comes that was asked for and not taken."""
    loaded: dict[int, Loaded] = field(default_factory=dict)


class Feeder:
    """Loads the batches of the replicas that this worker hosts. Use it in a `with`, or `close` it."""

    def __init__(self, dataset: Any, options: LoaderOptions, num_replicas: int) -> None:
        self._dataset, self._options, self._num_replicas = dataset, options, num_replicas
        self._collate = options.collate_fn or default_collate
        self._pin = options.pin_memory and torch.cuda.is_available()
        self._places: dict[int, _Place] = {}
        self._pool: Pool | None = None
        self._epoch: int | None = None
        self._track_numbers = itertools.count()
        # Replicas would take their draws from one generator here, but from N equal ones in N processes.
        self._generator = None if options.generator is None else options.generator.get_state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The loader processes that run now."""
        return [] if self._pool is None else self._pool.pids

    def host(
        self, streams: Mapping[int, Stream], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None:
        """Feed these replicas from now on, in this order of turns, from these positions on.

        `num_replicas` and `options` say how the samples are dealt from now on; of the latter only `batch_size` may
        be another than before.

        Called at the start of an epoch, after a change of the hosted replicas, and to do a step again. What was
        prefetched is kept where it still fits. All must be in the same epoch; loader processes are started anew with
        each epoch unless they are persistent, so that they see the dataset as it is then.
        """
        epochs = {stream.epoch for stream in streams.values()}
        if len(epochs) > 1:
            raise TrainError(f"replicas in different epochs {sorted(epochs)} cannot be fed by one worker")
        redealt = (num_replicas or self._num_replicas, options or self._options) != (self._num_replicas, self._options)
        self._num_replicas, self._options = num_replicas or self._num_replicas, options or self._options
        if epochs and epochs != {self._epoch}:
            (self._epoch,) = epochs
            if not self._options.persistent_workers:
                self._stop()
        before, self._places = self._places, {}
        orders: dict[int, Tensor] = {}
        for turn, (replica, stream) in enumerate(streams.items()):
            place = before.get(replica)
            if place is not None and not redealt and self._rewind(place, stream):
                place.turn = turn
                self._places[replica] = before.pop(replica)
                continue
            if stream.consumed not in orders:
                orders[stream.consumed] = self._dealt(stream)
            self._places[replica] = self._placed(stream, turn, orders[stream.consumed][replica :: self._num_replicas])
        for place in before.values():
            self._forget(place)
        self._prefetch()

    def next(self, replica: int) -> Any:
        """The next batch of `replica`; raises StopIteration at the end of its epoch, and what the dataset raises.

        The generators of this process must be those of the replica: its first batch of an epoch draws the base seed,
        and without loader processes the samples are made here.
        """
        place = self._place(replica)
        if place.base_seed is None:
            place.base_seed = self._draw(place.stream.epoch)
        if place.batch >= place.num_batches:
            raise StopIteration
        number = place.batch
        if self._options.num_workers == 0:
            place.batch += 1
            data = fetch(self._dataset, self._collate, _batch(place.share, number, self._options))
            return pin_memory(data) if self._pin else data  # type: ignore[no-untyped-call]
        self._prefetch()
        while number not in place.loaded:
            self._receive(number)
        loaded = place.loaded.pop(number)
        track = place.tracks.pop(number)
        if place.replays.get(track) == number:
            del place.replays[track]
            self._running().drop(track)
        place.batch += 1
        place.workers[number % self._options.num_workers] = loaded.state
        self._prefetch()
        return loaded.take()

    def next_size(self, replica: int) -> int:
        """How many samples the next batch of `replica` has; 0 at the end of its epoch."""
        place = self._place(replica)
        begin = place.batch * self._options.batch_size
        return max(0, min(len(place.share) - begin, self._options.batch_size))

    def stream(self, replica: int) -> Stream:
        """Where `replica` stands after what was taken by `next`."""
        place = self._place(replica)
        return Stream(place.stream.epoch, place.batch, place.stream.consumed, place.base_seed, tuple(place.workers))

    def remaining(self, replica: int) -> int:
        """Batches of `replica` that are left in its epoch."""
        place = self._place(replica)
        return place.num_batches - place.batch

    def close(self) -> None:
        """End the loader processes; may be called twice."""
        self._stop()
        self._places = {}

    def _place(self, replica: int) -> _Place:
        try:
            return self._places[replica]
        except KeyError:
            hosted = ", ".join(map(str, self._places)) or "none"
            raise TrainError(f"replica {replica} is not hosted here (hosted: {hosted}): call host() with it") from None

    def _placed(self, stream: Stream, turn: int, share: Tensor) -> _Place:
        return _Place(
            stream=stream,
            turn=turn,
            share=share,
            num_batches=num_batches(len(self._dataset), self._num_replicas, self._options, stream.consumed),
            batch=stream.batch,
            base_seed=stream.base_seed,
            workers=_filled(stream.workers, self._options.num_workers),
            asked=stream.batch,
        )

    def _dealt(self, stream: Stream) -> Tensor:
        return _order(len(self._dataset), self._num_replicas, stream.epoch, self._options, stream.consumed)

    def _draw(self, epoch: int) -> int:
        """The base seed, as `iter(DataLoader)` draws it."""
        if self._generator is None:
            return _int64(torch.default_generator)
        generator = torch.Generator()
        generator.set_state(self._generator)
        # One draw per epoch so far, except that persistent loader workers are seeded only once.
        for _ in range(0 if self._options.persistent_workers else epoch):
            _int64(generator)
        return _int64(generator)

    def _rewind(self, place: _Place, stream: Stream) -> bool:
        """Bring `place` to where `stream` is, keeping what was prefetched; False if it does not fit."""
        again = range(stream.batch, place.batch)
        workers = _filled(stream.workers, self._options.num_workers)
        if (stream.epoch, stream.consumed) != (place.stream.epoch, place.stream.consumed):
            return False
        if stream.base_seed != place.base_seed or stream.batch > place.batch or len(again) > self._depth(1):
            return False
        if not again:
            return workers == place.workers
        if self._options.num_workers and place.base_seed is not None:
            # The loader workers' states have moved on to later batches, and stay there; the earlier batches come by
            # a track of their own.
            track = self._open(place.base_seed, workers)
            for number in again:
                self._ask(place, track, number)
            place.replays[track] = again[-1]
        place.batch, place.workers = stream.batch, workers
        return True

    def _depth(self, num_hosted: int) -> int:
        """Batches to have asked for ahead, per replica.

        Together as many as one stock loader has; but at least one for each loader process, because all replicas'
        batches of one step go to the same one, and the others would be idle.
        """
        factor = self._options.prefetch_factor or _PREFETCH_FACTOR
        return self._options.num_workers * max(1, factor // num_hosted)

    def _prefetch(self) -> None:
        """Ask for batches in the order in which the replicas will take them."""
        if self._options.num_workers == 0 or not self._places:
            return
        depth = self._depth(len(self._places))
        while True:
            behind = [
                place
                for place in self._places.values()
                if place.base_seed is not None and place.asked < min(place.num_batches, place.batch + depth)
            ]
            if not behind:
                return
            place = min(behind, key=lambda place: (place.asked, place.turn))
            assert place.base_seed is not None, "only places with a seed are behind"
            if place.track is None:
                place.track = self._open(place.base_seed, place.workers)
            self._ask(place, place.track, place.asked)
            place.asked += 1

    def _open(self, base_seed: int, workers: Sequence[bytes | None]) -> int:
        track = next(self._track_numbers)
        self._running().open(track, base_seed, workers)
        return track

    def _ask(self, place: _Place, track: int, number: int) -> None:
        self._running().load(track, number, _batch(place.share, number, self._options))
        place.tracks[number] = track

    def _receive(self, number: int) -> None:
        arrived = {(each.track, each.batch): each for each in self._running().receive(number)}
        for place in self._places.values():
            for batch, track in place.tracks.items():
                if (track, batch) in arrived:
                    place.loaded[batch] = arrived[track, batch]

    def _forget(self, place: _Place) -> None:
        """Stop loading for a replica that is hosted here no more, or elsewhere in its epoch."""
        tracks = [*place.replays] if place.track is None else [*place.replays, place.track]
        for track in tracks:
            self._running().drop(track)

    def _running(self) -> Pool:
        if self._pool is None:
            recipe = Recipe(self._dataset, self._collate, self._options.worker_init_fn, self._options.num_workers)
            context, timeout_s = self._options.multiprocessing_context, self._options.timeout_s
            self._pool = Pool(recipe, context, pin=self._pin, timeout_s=timeout_s)
        return self._pool

    def _stop(self) -> None:
        """End the loader processes and forget all replicas, of whose prefetched batches nothing is left."""
        self._places = {}
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _int64(generator: torch.Generator) -> int:
    """Drawn as torch's loader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
