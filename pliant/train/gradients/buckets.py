"""The buckets of a layout in the memory of one view, and the units that they are cut into; how the engine sums both.

Who puts gradients there, and when they are summed, is in `catching`; what is in which bucket is decided by `layout`, and how
buckets are cut by `priority.units`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.plan import Portion
from pliant.errors import TrainError
from pliant.train.gradients.flat import cut
from pliant.train.gradients.layout import Layout
from pliant.train.priority import notify_pull
from pliant.train.priority.tuning import Choice
from pliant.train.priority.units import cut_units, layer_units


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket: a flat tensor for each replica hosted here, and one for the sum."""

    name: str
    indices: list[int]
    """Of its parameters."""
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    """Elements of each parameter."""
    parts: list[torch.Tensor]
    """In host memory that the workers of a host share; one per replica hosted here."""
    total: torch.Tensor
    """The sum, in the same kind of memory; the only part itself where there is just one."""
    whole: int
    """A bit for each parameter."""
    is_plain: bool
    """Whether all parameters are contiguous."""
    sums: Sequence[torch.Tensor] = ()
    """Each parameter's view of the sum."""
    flat: torch.Tensor | None = None
    """CUDA: the sum, where it was folded on the device."""
    copied: torch.cuda.Event | None = None
    """CUDA: when the bucket of the replica whose turn it is has left the device, or was folded there."""
    seen: int = 0
    """The bits of those whose gradient has come in this turn."""
    handle: Handle | None = None

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def gradients(self) -> list[torch.Tensor | None]:
        """Of the replica whose turn it is; None for what it has not used."""
        found = [parameter.grad for parameter in self.parameters]
        if self.seen == self.whole:
            return found
        return [gradient if self.seen >> number & 1 else None for number, gradient in enumerate(found)]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one parameter's gradient lies."""

    bucket: Bucket
    bit: int
    """Of `Bucket.seen`."""
    begin: int
    end: int
    """Of its elements, in the bucket's flat tensors."""
    views: list[torch.Tensor]
    """On the CPU: where it goes, for each replica hosted here."""


@dataclass(slots=True, eq=False)
class Run:
    """A unit of a bucket, and its sum in the step in progress."""

    name: str
    indices: list[int]
    """Of its parameters."""
    parameters: list[torch.nn.Parameter]
    parts: list[torch.Tensor]
    total: torch.Tensor
    sums: Sequence[torch.Tensor]
    portion: Portion
    priority: int = 0
    missing: int = 0
    """Gradients that have not come yet in this turn."""
    handle: Handle | None = None


def allocate(
    layout: Layout,
    parameters: Sequence[torch.nn.Parameter],
    engine: Engine,
    hosted: int,
    *,
    generation: int,
    on_device: bool,
) -> list[Bucket]:
    """Buckets for `hosted` replicas, named alike on all workers. Where gradients are `on_device`, their memory is made for
    copies from there."""
    made = []
    for number, indices in enumerate(layout.buckets):
        members = [parameters[index] for index in indices]
        sizes = [parameter.numel() for parameter in members]
        empty = partial(engine.empty, sum(sizes), members[0].dtype)
        parts = [empty() for _ in range(hosted)]
        bucket = Bucket(
            f"grad:{generation}:{number}",
            list(indices),
            members,
            sizes,
            parts,
            total=parts[0] if hosted == 1 else empty(),
            whole=(1 << len(members)) - 1,
            is_plain=all(parameter.is_contiguous() for parameter in members),
        )
        if on_device:
            for memory in (*bucket.parts, bucket.total):
                engine.pin(memory)
        else:
            bucket.sums = cut(bucket.total, members)
        made.append(bucket)
    return made


def places_of(buckets: Sequence[Bucket]) -> list[Place]:
    """Of each parameter, by its index."""
    places: dict[int, Place] = {}
    for bucket in buckets:
        views = zip(*(cut(part, bucket.parameters) for part in bucket.parts), strict=True)
        begins = accumulate(bucket.sizes, initial=0)
        for number, (index, begin, size, of_replicas) in enumerate(
            zip(bucket.indices, begins, bucket.sizes, views, strict=False)
        ):
            places[index] = Place(bucket, 1 << number, begin, begin + size, list(of_replicas))
    return [places[index] for index in range(len(places))]


def cut_runs(buckets: Sequence[Bucket], way: Choice, num_lanes: int) -> list[Run]:
    """The units that travel by themselves, where sums go this way."""
    sizes = [bucket.sizes for bucket in buckets]
    item_bytes = [bucket.total.dtype.itemsize for bucket in buckets]
    if way.mode == "baseline":
        units = layer_units(sizes, item_bytes, way.slice_bytes // 4, num_lanes)
    else:
        units = cut_units(sizes, item_bytes, way.slice_bytes, num_lanes)
    runs = []
    for unit in units:
        bucket = buckets[unit.bucket]
        members, elements = (
            slice(unit.first, unit.last + 1),
            slice(unit.portion.begin, unit.portion.begin + unit.length),
        )
        parameters, total = bucket.parameters[members], bucket.total[elements]
        runs.append(
            Run(
                f"{bucket.name}:{unit.first}",
                bucket.indices[members],
                parameters,
                [part[elements] for part in bucket.parts],
                total,
                cut(total, parameters),
                unit.portion,
            )
        )
    return runs


def sum_bucket(engine: Engine, blocks: tuple[int, ...], bucket: Bucket) -> Handle:
    """Have a bucket summed over all replicas, of which rank r hosts `blocks[r]`."""
    if len(bucket.parts) == 1 and max(blocks) == 1:
        return engine.all_reduce(bucket.name, bucket.total)
    return engine.all_reduce(bucket.name, bucket.total, contributions=bucket.parts, parts=blocks)


def sum_run(engine: Engine, blocks: tuple[int, ...], way: Choice, run: Run) -> Handle:
    """Have a unit summed. (On CUDA it is called later, when there may be another view already.)"""
    plain = len(run.parts) == 1 and max(blocks) == 1
    if way.mode == "baseline":
        if not plain:
            raise TrainError("sync='baseline' takes one replica per worker: start as many workers as replicas")
        return notify_pull.all_reduce(engine, run.name, run.total, run.portion)
    return engine.all_reduce(
        run.name,
        run.total,
        priority=run.priority,
        portion=run.portion,
        prompt=True,
        contributions=None if plain else run.parts,
        parts=None if plain else blocks,
    )
