"""The batches of the replicas that this worker hosts, prefetched by one pool of loader processes.

Each batch is made in the random state that the loader worker of this replica would have had. Only batches that were taken
count: what was prefetched for a replica that moves away is loaded again elsewhere, to the same bits. The pool has W
processes, whatever the number of replicas. They end with their parent, however it ends.

This relies on facts of torch 2.13. `iter(DataLoader)` draws one int64, the base seed, from the default generator (or
`generator=`), with loader processes or without. A persistent loader does so in its first epoch only, and the random states
of its loader workers live on. Loader worker k mod W makes batch k of an epoch. The training process draws nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from pliant.train.context import DataPosition, fill_states
from pliant.train.loader_pool import PooledLoader
from pliant.train.loader_process import (
    LoadedBatch,
    LoaderSpec,
    fetch_batch,
)
from pliant.train.replica_copies import OwnGenerators
from pliant.train.sampler_copies import IndexDraws, SamplerCopies, draw_base_seed
from pliant.train.sampling import PREFETCH_FACTOR, Indices, LoaderOptions, batch_indices, num_batches, sample_order


@dataclass(slots=True)
class _HostedReplica:
    """A hosted replica: which batches were taken, and which are on their way."""

    stream: DataPosition
    """Its position when it was hosted; the fields below continue from there."""
    turn: int
    share: Indices
    num_batches: int
    """The batches of its epoch; with a sampler of its own, those whose indices are drawn."""
    batch: int
    base_seed: int | None
    workers: list[bytes | None]
    asked: int
    """The first batch that was not requested yet."""
    order: int | None = None
    """The epoch whose order of samples is used, if the program has set one."""
    track: int | None = None
    replays: dict[int, int] = field(default_factory=dict)
    """Tracks that load batches a second time, with the last batch of each."""
    tracks: dict[int, int] = field(default_factory=dict)
    """The track of each batch that was requested and not taken."""
    loaded: dict[int, LoadedBatch] = field(default_factory=dict)
    size: int = 0
    """The samples in the batch that was taken last."""
    draws: IndexDraws | None = None
    """Its own sampler, if samples are not dealt."""
    ended: bool = False
    """Whether a batch was asked for after the last one."""
    seeds: int = 0
    """How many base seeds were drawn from the loader's own generator."""
    unused: dict[int, Any] = field(default_factory=dict)
    """The indices of batches that a persistent `DataLoader` has requested in the epoch before, which was left early, and
    throws away: its loader workers make them all the same."""


class Feeder(Protocol):
    """Gives the replicas that this worker hosts their batches."""

    def host(
        self, streams: Mapping[int, DataPosition], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None: ...
    def next(self, replica: int) -> Any: ...
    def last_size(self, replica: int) -> int: ...
    def stream(self, replica: int) -> DataPosition: ...
    def has_more(self, replicas: Sequence[int]) -> bool: ...
    def set_epoch(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class NumberFeeder:
    """The feeder of a program that makes its own batches: each replica gets its number, or what a function of its number
    returns, so many times."""

    def __init__(self, count: int, make: Callable[[int], Any] | None = None) -> None:
        self._count, self._make = count, make
        self._positions: dict[int, DataPosition] = {}

    def host(
        self, streams: Mapping[int, DataPosition], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None:
        self._positions = dict(streams)

    def next(self, replica: int) -> Any:
        made = replica if self._make is None else self._make(replica)
        position = self._positions[replica]
        self._positions[replica] = replace(position, batch=position.batch + 1)
        return made

    def last_size(self, replica: int) -> int:
        return 1

    def stream(self, replica: int) -> DataPosition:
        return self._positions[replica]

    def has_more(self, replicas: Sequence[int]) -> bool:
        return self._positions[replicas[0]].batch < self._count

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the program makes its own batches."""

    def close(self) -> None:
        self._positions = {}


class ReplicaLoader(PooledLoader[_HostedReplica]):
    """Loads the batches of the replicas that this worker hosts. Use it in a `with`, or `close` it.

    The samples are dealt to the replicas, or each replica draws from its own copy of the program's sampler.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, num_replicas: int) -> None:
        super().__init__(options)
        self._dataset, self._num_replicas = dataset, num_replicas
        self._order_epoch: int | None = None
        self._samplers = None if options.is_dealt else SamplerCopies(dataset, options)
        self._track_numbers = itertools.count()
        self._sampler_epoch = getattr(options.dealer, "epoch", None)
        self._own_generators = OwnGenerators(dataset=dataset, collate_fn=self._collate) if num_replicas > 1 else None

    def host(
        self, streams: Mapping[int, DataPosition], num_replicas: int | None = None, options: LoaderOptions | None = None
    ) -> None:
        """Load for these replicas from now on, in this order of turns, from these positions.

        Called at the start of an epoch, after a change of the hosted replicas, and to repeat a step. Prefetched batches
        are kept if they still fit. All replicas must be in the same epoch. Loader processes are restarted with each
        epoch unless they are persistent, so that they see the present dataset. `num_replicas` and `options` tell how
        samples are dealt from now on; only `batch_size` may change.
        """
        before, self._hosted = self._hosted, {}
        redealt = (num_replicas or self._num_replicas, options or self._options) != (self._num_replicas, self._options)
        self._num_replicas, self._options = num_replicas or self._num_replicas, options or self._options
        if self._enter_epoch(streams):
            if self._samplers is not None:
                self._samplers.changes.begin_epoch([each.draws.sampler for each in before.values() if each.draws])
            elif self._options.dealer is not None and self._options.dealer.epoch != self._sampler_epoch:
                self._order_epoch = self._sampler_epoch = self._options.dealer.epoch
        orders: dict[int, Tensor] = {}
        for turn, (replica, stream) in enumerate(streams.items()):
            hosted = before.get(replica)
            if hosted is not None and not redealt and self._rewind(hosted, stream):
                hosted.turn = turn
                self._hosted[replica] = before.pop(replica)
                continue
            if self._samplers is not None:
                self._hosted[replica] = self._make_sampled(replica, stream, turn, hosted)
                continue
            if stream.consumed not in orders:
                orders[stream.consumed] = self._sample_order(stream)
            share = orders[stream.consumed].numpy()[replica :: self._num_replicas]
            self._hosted[replica] = self._make_hosted(replica, stream, turn, share)
        for hosted in before.values():
            self._drop_tracks(hosted)
        self._prefetch()

    def next(self, replica: int) -> Any:
        """Return the next batch of `replica`. Raises StopIteration at the end of its epoch, and what the dataset
        raises.

        The generators of this process must be those of the replica: its first batch of an epoch draws the base seed,
        and without loader processes the samples are made here.
        """
        hosted = self._hosted.get(replica) or self._hosted_replica(replica)
        if hosted.draws is not None:
            self._draw_indices(hosted, hosted.draws)
        elif hosted.base_seed is None:
            hosted.base_seed = draw_base_seed(self._generator, hosted.seeds)
            hosted.seeds += 1
        if hosted.batch >= hosted.num_batches:
            hosted.ended = True
            raise StopIteration
        number, options = hosted.batch, self._options
        if options.num_workers == 0:
            draws = hosted.draws
            indices = batch_indices(hosted.share, number, options) if draws is None else draws.pending.pop(number)
            hosted.size = 1 if isinstance(indices, int) or not options.batches else len(indices)
            hosted.batch = number + 1
            data = fetch_batch(self._dataset, self._collate, indices, options.batches)
            if self._own_generators is not None:
                self._own_generators.check()
            return pin_memory(data) if self._pin else data  # type: ignore[no-untyped-call]
        if hosted.unused:
            self._load_unused(hosted)
        self._prefetch()
        while number not in hosted.loaded:
            self._receive(number)
        loaded = hosted.loaded.pop(number)
        track = hosted.tracks.pop(number)
        if hosted.replays.get(track) == number:
            del hosted.replays[track]
            self._running_pool().drop(track)
        hosted.batch += 1
        hosted.size = loaded.size
        hosted.workers[number % options.num_workers] = loaded.state
        if hosted.draws is not None:
            del hosted.draws.pending[number]
            hosted.draws.draw()
            hosted.num_batches = hosted.draws.drawn
        self._prefetch()
        return loaded.take()

    def _load_unused(self, hosted: _HostedReplica) -> None:
        """Let the loader workers of a replica make the batches that are thrown away."""
        assert hosted.base_seed is not None, "the loader workers have made batches before"
        track = self._open(hosted.base_seed, hosted.workers)
        for number, indices in hosted.unused.items():
            self._running_pool().load(track, number, indices)
            hosted.tracks[number] = track
        for number in hosted.unused:
            while number not in hosted.loaded:
                self._receive(number)
            hosted.workers[number % self._options.num_workers] = hosted.loaded.pop(number).state
        hosted.tracks, hosted.unused = {}, {}
        self._running_pool().drop(track)

    def _draw_indices(self, hosted: _HostedReplica, draws: IndexDraws) -> None:
        """Draw from the replica's sampler what a DataLoader draws before it loads a batch."""
        if not draws.begun:
            hosted.base_seed = draws.begin(hosted.base_seed)
        if self._options.num_workers == 0:
            draws.draw()
        hosted.num_batches = draws.drawn

    def _indices_of(self, hosted: _HostedReplica, number: int) -> Any:
        """Return the samples of a batch that a loader process makes."""
        if hosted.draws is None:
            return batch_indices(hosted.share, number, self._options)
        return hosted.draws.pending[number]  # until it is taken

    def last_size(self, replica: int) -> int:
        """Return the number of samples in the batch that `replica` took last."""
        return (self._hosted.get(replica) or self._hosted_replica(replica)).size

    def set_epoch(self, epoch: int) -> None:
        """Use the order of samples of this epoch from the start of the next one on, as `DistributedSampler.set_epoch`.
        Samplers of the replicas' own that have a `set_epoch` get the call."""
        self._order_epoch = epoch
        if self._samplers is not None:
            copies = [hosted.draws.sampler for hosted in self._hosted.values() if hosted.draws]
            self._samplers.changes.set_epoch(epoch, copies)

    def stream(self, replica: int) -> DataPosition:
        """Return the position of `replica` after the batches taken so far."""
        return self.stream_at(self._hosted_replica(replica))

    def stream_at(self, hosted: _HostedReplica) -> DataPosition:
        begun = hosted.stream.epoch, hosted.batch, hosted.stream.consumed, hosted.base_seed, tuple(hosted.workers)
        if hosted.draws is None:
            if hosted.stream.left is not None and hosted.batch == 0:
                return hosted.stream
            return DataPosition(*begun, order=hosted.order, seeds=hosted.seeds)
        if not hosted.draws.begun:
            return hosted.stream
        return DataPosition(*begun, checksum=hosted.draws.checksum, extra=hosted.draws.record(hosted.ended))

    def has_more(self, replicas: Sequence[int]) -> bool:
        """Return whether these replicas may have another batch in their epoch. With samplers of their own that is not
        known before they are asked for it, and `next` raises StopIteration."""
        hosted = self._hosted.get(replicas[0]) or self._hosted_replica(replicas[0])
        return not hosted.ended if hosted.draws is not None else hosted.num_batches > hosted.batch

    def _make_hosted(self, replica: int, stream: DataPosition, turn: int, share: Indices) -> _HostedReplica:
        unused: dict[int, Any] = {}
        if stream.left is not None and stream.order is not None and stream.batch == 0:
            last = sample_order(len(self._dataset), self._num_replicas, stream.order, self._options, 0)
            count = num_batches(len(self._dataset), self._num_replicas, self._options)
            numbers = range(stream.left, min(count, stream.left + self._options.prefetched))
            own = last[replica :: self._num_replicas]
            unused = {number: batch_indices(own, number, self._options) for number in numbers}
        return _HostedReplica(
            stream=stream,
            turn=turn,
            share=share,
            num_batches=num_batches(len(self._dataset), self._num_replicas, self._options, stream.consumed),
            batch=stream.batch,
            base_seed=stream.base_seed,
            workers=fill_states(stream.workers, self._options.num_workers),
            asked=stream.batch,
            order=self._order_of(stream),
            seeds=stream.seeds,
            unused=unused,
        )

    def _make_sampled(
        self, replica: int, stream: DataPosition, turn: int, before: _HostedReplica | None
    ) -> _HostedReplica:
        """Host a replica that draws from its own sampler: from the copy that is here, if it stands there, else from a
        copy that draws again what was drawn before."""
        assert self._samplers is not None, "the samples are not dealt"
        draws = before.draws if before is not None and self._goes_on(before, stream) else None
        if draws is None:
            draws = IndexDraws(self._samplers.copy(replica), self._samplers.options)
            if stream.extra:
                draws.draw_again(replica, stream)
            if stream.left is not None:
                self._samplers.changes.apply_to(draws.sampler)
        draws.begun = draws.begun and stream.left is None
        unused = {} if draws.begun or not self._options.persistent_workers else dict(draws.pending)
        return _HostedReplica(
            stream=stream,
            turn=turn,
            share=np.empty(0, dtype=np.int64),
            num_batches=draws.drawn if draws.begun else 0,
            batch=stream.batch,
            base_seed=stream.base_seed,
            workers=fill_states(stream.workers, self._options.num_workers),
            asked=stream.batch,
            draws=draws,
            ended=draws.begun and draws.was_ended(stream),
            unused=unused,
        )

    def _goes_on(self, hosted: _HostedReplica, stream: DataPosition) -> bool:
        """Return whether the replica stands at the end of what was taken in the epoch before `stream`."""
        left = self.stream_at(hosted)
        if left.epoch >= stream.epoch:
            return False
        while left.epoch < stream.epoch:
            left = left.next_epoch(self._options)
        return stream.is_same(left, self._options.num_workers)

    def _order_of(self, stream: DataPosition) -> int | None:
        """Return the epoch whose order is used, if the program has set one. In an epoch that has begun it stays."""
        return self._order_epoch if stream.base_seed is None or stream.batch == 0 else stream.order

    def _sample_order(self, stream: DataPosition) -> Tensor:
        order = self._order_of(stream)
        epoch = stream.epoch if order is None else order
        return sample_order(len(self._dataset), self._num_replicas, epoch, self._options, stream.consumed)

    def _rewind(self, hosted: _HostedReplica, stream: DataPosition) -> bool:
        """Go back to this position, keeping what was prefetched; return False if that is not possible."""
        if hosted.draws is not None:
            return stream.is_same(self.stream_at(hosted), self._options.num_workers)
        again = range(stream.batch, hosted.batch)
        workers = fill_states(stream.workers, self._options.num_workers)
        if (stream.epoch, stream.consumed) != (hosted.stream.epoch, hosted.stream.consumed):
            return False
        if self._order_of(stream) != hosted.order:
            return False
        if stream.left is not None and hosted.batch:
            return False  # the batches that are thrown away come before the first one
        if stream.base_seed != hosted.base_seed or stream.batch > hosted.batch or len(again) > self._depth(1):
            return False
        if not again:
            return workers == hosted.workers
        if self._options.num_workers and hosted.base_seed is not None:
            # The loader workers' states have moved on to later batches, and stay there. The earlier batches come by a
            # track of their own.
            track = self._open(hosted.base_seed, workers)
            for number in again:
                self._request(hosted, track, number)
            hosted.replays[track] = again[-1]
        hosted.batch, hosted.workers = stream.batch, workers
        return True

    def _depth(self, num_hosted: int) -> int:
        """Return how many batches to request ahead per replica.

        Together as many as one stock loader has; but at least one for each loader process, because all replicas'
        batches of one step go to the same process, and the others would be idle.
        """
        factor = self._options.prefetch_factor or PREFETCH_FACTOR
        return self._options.num_workers * max(1, factor // num_hosted)

    def _prefetch(self) -> None:
        """Request batches in the order in which the replicas will take them."""
        if self._options.num_workers == 0 or not self._hosted:
            return
        depth = self._depth(len(self._hosted))
        while True:
            behind = [
                hosted
                for hosted in self._hosted.values()
                if hosted.base_seed is not None
                and not hosted.unused
                and hosted.asked < min(hosted.num_batches, hosted.batch + depth)
            ]
            if not behind:
                return
            hosted = min(behind, key=lambda hosted: (hosted.asked, hosted.turn))
            assert hosted.base_seed is not None, "only replicas with a base seed are behind"
            if hosted.track is None:
                hosted.track = self._open(hosted.base_seed, hosted.workers)
            self._request(hosted, hosted.track, hosted.asked)
            hosted.asked += 1

    def _open(self, base_seed: int, workers: Sequence[bytes | None]) -> int:
        track = next(self._track_numbers)
        self._running_pool().open(track, base_seed, workers)
        return track

    def _request(self, hosted: _HostedReplica, track: int, number: int) -> None:
        self._running_pool().load(track, number, self._indices_of(hosted, number))
        hosted.tracks[number] = track

    def _receive(self, number: int) -> None:
        arrived = {(each.track, each.batch): each for each in self._running_pool().receive(number)}
        for hosted in self._hosted.values():
            for batch, track in hosted.tracks.items():
                if (track, batch) in arrived:
                    hosted.loaded[batch] = arrived[track, batch]

    def _drop_tracks(self, hosted: _HostedReplica) -> None:
        """Stop loading for a replica that is no longer hosted here, or elsewhere in its epoch."""
        if self._pool is None:
            return
        tracks = [*hosted.replays] if hosted.track is None else [*hosted.replays, hosted.track]
        for track in tracks:
            self._running_pool().drop(track)

    def _loader_spec(self) -> LoaderSpec:
        options = self._options
        return LoaderSpec(
            self._dataset,
            self._collate,
            options.worker_init_fn,
            options.num_workers,
            options.batches,
            is_shared=self._num_replicas > 1,
        )
