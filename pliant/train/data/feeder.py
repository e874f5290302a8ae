"""The batches of the replicas that this worker hosts: loaded ahead of time, by one pool of loader processes.

Each batch is made in the random state that this loader worker of this replica would have had. Only what was taken
counts: what was prefetched for a replica that moves away is loaded again elsewhere, to the same bits. Which samples are
in a batch is said by `dealing`, where a replica stands by `stream`.

Facts of torch 2.13 behind this. `iter(DataLoader)` draws one int64, the base seed, from the default generator
(or `generator=`), with loader processes or without; a persistent loader does so in its first epoch only, and
its loader workers' random states live on. Batch k of an epoch is made by loader worker k mod W. Nothing
else is drawn in the training process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.errors import TrainError
from pliant.train.data import dealing
from pliant.train.data.loader_process import Loaded, Recipe, fetch
from pliant.train.data.options import LoaderOptions
from pliant.train.data.pool import Pool
from pliant.train.data.stream import Stream, filled

_PREFETCH_FACTOR = 2


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
            data = fetch(self._dataset, self._collate, dealing.batch(place.share, number, self._options))
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
            num_batches=dealing.num_batches(len(self._dataset), self._num_replicas, self._options, stream.consumed),
            batch=stream.batch,
            base_seed=stream.base_seed,
            workers=filled(stream.workers, self._options.num_workers),
            asked=stream.batch,
        )

    def _dealt(self, stream: Stream) -> Tensor:
        return dealing.dealt(len(self._dataset), self._num_replicas, stream.epoch, self._options, stream.consumed)

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
        workers = filled(stream.workers, self._options.num_workers)
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
        self._running().load(track, number, dealing.batch(place.share, number, self._options))
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
