"""The N replicas of a job: where they are placed, their contexts, and the state that is swapped between turns.

Every worker knows all of it, whichever replicas it hosts.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from pliant.errors import ConfigError, TrainError
from pliant.train.context import DataPosition, ReplicaContext, RngState, capture_rng, restore_rng, seeded_rng
from pliant.train.sampling import LoaderOptions, num_batches, samples_used

Blocks = Callable[[int], Sequence[int]]
"""Returns how many replicas each of this many workers hosts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank r hosts `blocks[r]` replicas, as `rank` sees it."""

    blocks: tuple[int, ...] = ()
    rank: int = 0

    @property
    def hosted(self) -> range:
        """The replicas of this rank."""
        begin = sum(self.blocks[: self.rank])
        return range(begin, begin + self.blocks[self.rank]) if self.blocks else range(0)

    def owner_of(self, replica: int) -> int:
        """Return the rank that hosts a replica."""
        for rank, size in enumerate(self.blocks):
            replica -= size
            if replica < 0:
                return rank
        raise AssertionError(f"no such replica: {replica}")


def place_replicas(num_replicas: int, size: int, rank: int, wanted: Blocks | None = None) -> Placement:
    """Place the replicas on this many workers: evenly, or as the program wants it.

    Raises:
        TrainError: its wish does not place every replica, or leaves a worker without one.
    """
    blocks = tuple(wanted(size)) if wanted else even_blocks(num_replicas, size)
    if len(blocks) != size or sum(blocks) != num_replicas or min(blocks) < 1:
        raise TrainError(f"blocks {blocks} do not place {num_replicas} replicas on {size} workers, one or more on each")
    return Placement(blocks, rank)


def even_blocks(num_replicas: int, num_workers: int) -> tuple[int, ...]:
    """Return how many replicas each worker hosts; the first ones host one more if needed."""
    share, more = divmod(num_replicas, num_workers)
    return tuple(share + (rank < more) for rank in range(num_workers))


Tensors = list[torch.Tensor]


class BufferCopies(list[torch.Tensor]):
    """Copies of all buffers: views of one run of bytes per device, which is moved as a whole."""

    def __init__(self, groups: Sequence[Tensors], runs: Sequence[torch.Tensor], layout: BufferLayout) -> None:
        in_groups = list(chain.from_iterable(groups))
        super().__init__([in_groups[place] for place in layout.places_in_groups])
        self.groups, self.runs, self.layout = groups, runs, layout


class ModelBuffers:
    """The buffers of the models (such as BatchNorm's running statistics), saved and loaded as a whole.

    A copy from or to a GPU costs a synchronisation, whatever its size, so the copies of all buffers of a device are in one
    run of bytes, grouped by type.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        # Searched once: walking through the modules of a large model costs more than copying its buffers.
        owners = _buffer_owners(models)
        self._places = [(module._buffers, name) for _, module, name in owners]
        self._names = [path for path, _, _ in owners]
        self._use([buffers[name] for buffers, name in self._places])

    def _use(self, found: list[torch.Tensor | None]) -> None:
        """Lay out these buffers."""
        self._found = found
        known = [buffer for buffer in found if buffer is not None]
        self._lengths = [buffer.numel() for buffer in known]
        self._known, self._layout = known, BufferLayout(known)
        self._groups = self._layout.group(known)

    def _check(self) -> None:
        """Lay the buffers out again if the program has put other tensors there, or has resized them."""
        found = [buffers[name] for buffers, name in self._places]
        if (
            not all(map(operator.is_, found, self._found))
            or list(map(torch.Tensor.numel, self._known)) != self._lengths
        ):
            self._use(found)

    @property
    def num_bytes(self) -> int:
        """The size of what `to_host` returns."""
        self._check()
        return self._layout.num_bytes

    @property
    def names(self) -> list[str]:
        """The name of each buffer, as in the model's state_dict."""
        return [
            name for name, (buffers, key) in zip(self._names, self._places, strict=True) if buffers[key] is not None
        ]

    def save(self) -> Tensors:
        self._check()
        saved = self._layout.allocate()
        self._copy(saved.groups, self._groups)
        return saved

    def load(self, saved: Sequence[torch.Tensor]) -> None:
        self._check()
        if isinstance(saved, BufferCopies) and saved.layout is self._layout:
            self._copy(self._groups, saved.groups)
        else:
            self._copy(self._groups, self._layout.group(saved))

    def _copy(self, targets: Sequence[Tensors], sources: Sequence[Tensors]) -> None:
        if not targets:  # entering `no_grad` costs a sixth of a small model's switch
            return
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):  # of one type: few launches
                torch._foreach_copy_(target, source)

    # --- on the host ---

    def to_host(self, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all of them as one run of bytes on the host, grouped by type. Nobody may write to it."""
        self._check()
        if not isinstance(saved, BufferCopies) or saved.layout is not self._layout:
            copies = self._layout.allocate()
            self._copy(copies.groups, self._layout.group(saved))
            saved = copies
        return self._layout.to_host(saved.runs)

    def from_host(self, data: torch.Tensor) -> Tensors:
        """Return what `to_host` has returned, on the devices of the model's buffers."""
        self._check()
        return self._layout.view(self._layout.to_devices(data))

    def empty_on_host(self) -> torch.Tensor:
        """Return room for what `to_host` returns on another worker."""
        self._check()
        return self._layout.empty_on_host()

    def pack(self, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all of them as one run of bytes on the host, in the order of `names` and without gaps, as in a context
        and its checkpoint."""
        data = self.to_host(saved).numpy()
        pieces = [data[begin:end] for begin, end in self._layout.places]
        return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)

    def unpack(self, flat: torch.Tensor) -> Tensors:
        """Return what was packed, on the devices of the model's buffers."""
        self._check()
        data = self._layout.empty_on_host()
        target, source, done = data.numpy(), flat.numpy(), 0
        for begin, end in self._layout.places:
            target[begin:end] = source[done : done + end - begin]
            done += end - begin
        return self._layout.view(self._layout.to_devices(data))


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """The buffers of one type and device, which lie next to each other in a run of bytes."""

    indices: list[int]
    shapes: list[torch.Size]
    lengths: list[int]
    dimensions: set[int]
    dtype: torch.dtype
    run: int
    begin: int
    end: int


ALIGNMENT = 16
"""Each group of buffers begins at a multiple of this, that of the largest type."""


class BufferLayout:
    """Where copies of these buffers lie in runs of bytes, one for each device."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        alike: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for index, buffer in enumerate(buffers):
            alike.setdefault(buffer.device, {}).setdefault(buffer.dtype, []).append(index)
        self.devices = list(alike)
        self.sizes: list[int] = []
        """The length of each run in bytes."""
        self.groups: list[BufferGroup] = []
        self.places = [(0, 0)] * len(buffers)
        """Where each buffer begins and ends in the bytes of all runs."""
        self.num_bytes = 0
        for run, groups in enumerate(alike.values()):
            size = 0
            for dtype, indices in groups.items():
                begin = end = size
                for index in indices:
                    first, end = end, end + buffers[index].numel() * dtype.itemsize
                    self.places[index] = self.num_bytes + first, self.num_bytes + end
                shapes, lengths = ([buffers[i].shape for i in indices], [buffers[i].numel() for i in indices])
                dimensions = {len(shape) for shape in shapes}
                self.groups.append(BufferGroup(indices, shapes, lengths, dimensions, dtype, run, begin, end))
                size = -(-end // ALIGNMENT) * ALIGNMENT
            self.sizes.append(size)
            self.num_bytes += size
        in_groups = [index for group in self.groups for index in group.indices]
        self.places_in_groups = sorted(range(len(in_groups)), key=in_groups.__getitem__)
        """Where each buffer is if all groups are put one after another."""
        self._on_cuda = any(device.type == "cuda" for device in self.devices)

    def allocate(self) -> BufferCopies:
        pairs = zip(self.sizes, self.devices, strict=True)
        return self.view([torch.empty(size, dtype=torch.uint8, device=device) for size, device in pairs])

    def view(self, runs: Sequence[torch.Tensor]) -> BufferCopies:
        """Return the buffers in these runs."""
        groups = []
        for group in self.groups:
            flat = runs[group.run][group.begin : group.end].view(group.dtype)
            if group.dimensions == {0}:
                pieces = list(flat.unbind())  # in a third of the time of views
            else:
                pieces = list(flat.split_with_sizes(group.lengths))
                if group.dimensions != {1}:
                    pieces = [piece.view(shape) for piece, shape in zip(pieces, group.shapes, strict=True)]
            groups.append(pieces)
        return BufferCopies(groups, runs, self)

    def group(self, tensors: Sequence[torch.Tensor]) -> list[Tensors]:
        """Return tensors, one for each buffer, by groups."""
        return [[tensors[index] for index in group.indices] for group in self.groups]

    def empty_on_host(self) -> torch.Tensor:
        """Return host memory for all runs. It is pinned for CUDA, so that nobody has to wait for a copy from there."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)

    def to_host(self, runs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of all runs."""
        if len(runs) == 1 and not self._on_cuda:
            return runs[0]
        data, begin = self.empty_on_host(), 0
        for run in runs:
            data[begin : begin + len(run)].copy_(run, non_blocking=True)
            begin += len(run)
        for run in runs:
            if run.is_cuda:
                torch.cuda.current_stream(run.device).synchronize()
        return data

    def to_devices(self, data: torch.Tensor) -> Tensors:
        """Return copies of the runs in these bytes."""
        runs, begin = [], 0
        for size, device in zip(self.sizes, self.devices, strict=True):
            run = torch.empty(size, dtype=torch.uint8, device=device)
            # From pinned memory: its allocator keeps it until the copy is done.
            runs.append(run.copy_(data[begin : begin + size], non_blocking=run.is_cuda and data.is_pinned()))
            begin += size
        return runs


def _buffer_owners(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module, str]]:
    """Return the full name, the module and the name there of each buffer, in the order of `model.buffers()`."""
    owners, seen = [], set()
    for number, model in enumerate(models):
        prefix = f"model {number} " if len(models) > 1 else ""
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    owners.append((f"{prefix}{path}{'.' if path else ''}{name}", module, name))
    return owners


class Replicas:
    """The number of replicas, their contexts, and how the samples are dealt to them."""

    def __init__(self, count: int, num_samples: int, loading: LoaderOptions, steps: int | None = None) -> None:
        """`num_samples` are those of a dataset that is dealt; `steps` are those of an epoch of own data, if known."""
        self.steps = steps
        self.count = count
        """N. It is fixed, unless it follows the number of workers."""
        self._contexts: list[ReplicaContext] = []
        self._capture: Callable[[], ReplicaContext] | None = None
        """Returns the context of the only replica as it is now; None if contexts are kept."""
        self.is_live = False
        """Whether the context of the only replica is that of the process itself, and not kept."""
        self.num_samples = num_samples
        self.loading = loading
        """The present loader options. Decisions may change the batch size."""
        self.times_dealt = 0
        """How often the rest of an epoch was dealt anew."""

    @property
    def contexts(self) -> list[ReplicaContext]:
        """The contexts of all replicas at the last committed step."""
        if self._capture is not None:
            self._contexts = [self._capture()]
        return self._contexts

    @contexts.setter
    def contexts(self, contexts: list[ReplicaContext]) -> None:
        self._contexts, self._capture, self.is_live = contexts, None, False

    def begin_live(self, capture: Callable[[], ReplicaContext]) -> None:
        """Let the process itself be the context of the only replica. Whoever asks for it gets what `capture` returns
        then."""
        self._capture, self.is_live = capture, True

    def end_live(self) -> None:
        """Keep the context as it is now: something else than its replica will run."""
        self.contexts = self.contexts

    @property
    def num_loader_workers(self) -> int:
        return self.loading.num_workers

    @property
    def num_batches(self) -> int:
        """Batches of each replica in a whole epoch, at the present batch size; 0 if that is not known."""
        if not self.loading.is_dealt:
            return self.steps or 0
        return num_batches(self.num_samples, self.count, self.loading)

    def batches_left(self, epoch: int) -> int:
        """Return the batches of each replica that are left in this epoch; at least 1 if that is not known."""
        stream = self.stream_of(0, epoch)
        if not self.loading.is_dealt:
            return 1 if self.steps is None else self.steps - stream.batch
        return num_batches(self.num_samples, self.count, self.loading, stream.consumed) - stream.batch

    def stream_of(self, replica: int, epoch: int) -> DataPosition:
        """Return the data position of the replica in this epoch, which may be the one after its context's."""
        return self.position_in(self.contexts[replica], epoch)

    def position_in(self, context: ReplicaContext, epoch: int) -> DataPosition:
        stream = context.stream
        while stream.epoch < epoch:
            stream = stream.next_epoch(self.loading)
        return stream

    def _rest(self, epoch: int) -> DataPosition:
        """Return the position from which the rest of the epoch is dealt anew."""
        stream = self.stream_of(0, epoch)
        used = samples_used(self.num_samples, self.count, stream, self.loading)
        return DataPosition(stream.epoch, consumed=used, seeds=stream.seeds)

    def deal_to(self, count: int, epoch: int, step: int, device: torch.device) -> None:
        """Go on with another number of replicas: deal the rest of the epoch's samples to them."""
        rest = self._rest(epoch)
        states = [context.random for context in self.contexts[:count]]
        for replica in range(len(states), count):
            label = f"{step}:{replica}".encode()
            states.append(seeded_rng(int.from_bytes(hashlib.sha256(label).digest()[:4]), device))
        own = [context.buffers for context in self.contexts[:count]]
        own += [self.contexts[0].buffers] * (count - len(own))
        self.contexts = [ReplicaContext(state, rest, buffers) for state, buffers in zip(states, own, strict=True)]
        self.count = count
        self.times_dealt += 1

    def set_batch_size(self, size: int, epoch: int) -> None:
        """Change the batch size from the next step on: deal the rest of the epoch anew.

        Raises:
            ConfigError: an epoch would not have one such batch, or the data are not dealt.
        """
        if not self.loading.is_dealt:
            raise ConfigError(
                "the batch size cannot be changed: each replica draws batches from a sampler or stream of its own"
            )
        if not self.loading.batches:
            raise ConfigError("the batch size cannot be changed: with batch_size=None the dataset makes the batches")
        if num_batches(self.num_samples, self.count, replace(self.loading, batch_size=size)) == 0:
            raise ConfigError(
                f"{self.num_samples} samples are too few for a batch of {size} for each of {self.count} replicas: decide for "
                "less, or use drop_last=False"
            )
        rest = self._rest(epoch)
        self.contexts = [context.at(rest) for context in self.contexts]
        self.use_batch_size(size)

    def use_batch_size(self, size: int) -> None:
        """Change the batch size where the data positions already account for it."""
        self.times_dealt += 1
        self.loading = replace(self.loading, batch_size=size)


class ReplicaSwitch:
    """Swaps the state of one hosted replica for that of another: random generators and buffers.

    The trainer calls `restore` when a replica's turn begins, and the two captures when it ends. A benchmark may put a
    wrapper in its place (`job.replica_switch = ...`) to measure what the swap costs.
    """

    def __init__(self, buffers: ModelBuffers, device: torch.device, sync_buffers: bool) -> None:
        self._buffers, self._device, self._sync_buffers = buffers, device, sync_buffers

    def restore(self, context: ReplicaContext, first_buffers: Tensors) -> None:
        """Begin a turn: load the replica's random state, and the buffers of replica 0 or its own."""
        restore_rng(context.random, self._device)
        self.restore_buffers(context, first_buffers)

    def restore_buffers(self, context: ReplicaContext, first_buffers: Tensors) -> None:
        if self._sync_buffers or not context.buffers:
            self._buffers.load(first_buffers)
        else:
            flat = torch.frombuffer(bytearray(context.buffers), dtype=torch.uint8)
            self._buffers.load(self._buffers.unpack(flat))

    def capture_random(self) -> RngState:
        """Return the state of all random generators after a turn."""
        return capture_rng(self._device)

    def capture_buffers(self) -> Tensors:
        """Return copies of the model's buffers after a turn."""
        return self._buffers.save()
