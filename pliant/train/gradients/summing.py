"""The gradients of the replicas that a worker hosts, in buckets, and their sums over all replicas of the job.

Each gradient is scaled by 1/N (by multiplication, as DDP does) into the place it has in its replica's bucket. When the
last replica hosted here has filled a bucket, or a unit of one, the engine sums it in the exact order, while backward goes
on. The sums become the parameters' `.grad`.

When a gradient is to be taken is decided in `catching`. Which place it has follows from `layout` and `buckets`; `device`
takes gradients off a GPU. Sums that are taken in one by one, with priorities, are waited for by `priority.crossing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import TrainError, Unsliceable
from pliant.train.gradients import device
from pliant.train.gradients.buckets import Bucket, Place, Run, allocate, cut_runs, places_of, sum_bucket, sum_run
from pliant.train.gradients.flat import in_memory_order
from pliant.train.gradients.layout import Layout
from pliant.train.gradients.probing import GradientProbe
from pliant.train.priority.crossing import Awaited
from pliant.train.priority.tuning import Choice
from pliant.train.priority.units import FIRST


class Sums:
    """Sums the gradients of `parameters` for a job of N replicas: turn by turn into buckets, which then travel."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        num_replicas: int,
        layout: Layout,
        generation: int,
        *,
        wanted: bool,
        find_unused: bool,
    ) -> None:
        self.num_replicas = num_replicas
        self.wanted = wanted
        """Whether there is anything to sum: a single replica's gradients stay where backward puts them."""
        self.probe: GradientProbe | None = None
        """What looks at gradients and sums; set it before the first view."""
        self._names, self._parameters = names, parameters
        self._find_unused = find_unused
        self._layout, self._generation = layout, generation
        self._buckets: list[Bucket] = []
        self._places: list[Place] = []
        """Of each parameter."""
        self._on_device = parameters[0].is_cuda
        self._ferry = device.Ferry()
        self._engine: Engine | None = None
        self._blocks: tuple[int, ...] = ()
        self._buried: list[tuple[Engine, list[Bucket]]] = []
        self._way = Choice()
        """How sums travel in this step."""
        self._runs: list[Run] = []
        """Where sums do not travel by buckets: what does. Empty else."""
        self._run_of: list[Run] = []
        self._cut_for: Choice | None = None
        self._slot = 0
        self._scale = 1.0
        self._is_last = False
        self._held: Bucket | None = None
        self._used: torch.Tensor | None = None
        self._used_handle: Handle | None = None

    # --- where things lie ---

    def use_layout(self, layout: Layout, generation: int) -> None:
        """Put gradients there from now on; `generation` tells the names of one layout's buckets from another's."""
        self._layout, self._generation = layout, generation
        self._buckets, self._runs = [], []

    def arrange(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Work in this view from now on: rank r hosts `blocks[r]` replicas."""
        if self._engine is not None and self._engine.may_be_written_to:
            # A worker that was given up for its silence, and is only stopped, would finish its part of a sum of
            # the old view when it goes on: into this memory, which must therefore never be used again.
            self._buried.append((self._engine, self._buckets))
        self._ferry.wait()  # before the memory that is being copied to is given away
        self._engine, self._blocks = engine, tuple(blocks)
        self._buckets, self._runs = [], []
        if self.probe is not None:
            self.probe.arrange(engine, self._blocks)

    def _have_buckets(self, engine: Engine) -> None:
        if self._buckets or not self.wanted:
            return
        hosted = self._blocks[engine.rank]
        self._buckets = allocate(
            self._layout, self._parameters, engine, hosted, generation=self._generation, on_device=self._on_device
        )
        self._places = places_of(self._buckets)
        self._runs, self._cut_for = [], None

    def travel(self, way: Choice, order: Sequence[int]) -> None:
        """How the sums of the step that begins now travel; `order` is that in which they are wanted."""
        engine = self._engine
        assert engine is not None, "arrange() comes first"
        self._have_buckets(engine)
        self._way = way
        if way.mode == "fifo" or not self.wanted or engine.size == 1:
            self._runs = []
            return
        if not self._runs or self._cut_for != way:
            self._runs = cut_runs(self._buckets, way, engine.num_lanes)
            run_of = {index: run for run in self._runs for index in run.indices}
            self._run_of = [run_of[index] for index in range(len(self._parameters))]
        self._cut_for = way
        wanted = {index: place for place, index in enumerate(order)}
        for run in self._runs:
            first = min(wanted.get(index, len(self._parameters)) for index in run.indices)
            run.priority = first if way.mode == "priority" else 0

    # --- one replica's turn ---

    def begin_turn(self, slot: int) -> None:
        """The replica in this place among those hosted here computes next."""
        engine = self._engine
        assert engine is not None, "arrange() comes first"
        self._have_buckets(engine)
        for run in self._runs:
            run.missing, run.handle = len(run.indices), None
        for bucket in self._buckets:
            bucket.seen, bucket.handle = 0, None
        self._slot, self._is_last, self._held = slot, slot == self._blocks[engine.rank] - 1, None
        self._scale = 1.0 / self.num_replicas
        if self._find_unused and self.wanted and slot == 0:
            self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)

    def put(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete. Called for every parameter of every replica, so it does the least it can."""
        place = self._places[index]
        bucket = place.bucket
        if bucket.seen & place.bit:
            raise Unsliceable(
                f"{self._names[index]!r} got its gradient twice in one backward, as with re-entrant checkpointing: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.seen |= place.bit
        if not self._on_device:
            gradient = parameter.grad
            assert gradient is not None, "the hook runs after the gradient was accumulated"
            if gradient.is_sparse:
                raise Unsliceable(
                    f"{self._names[index]!r} has a sparse gradient, which has no fixed place in a bucket: use sparse=False"
                )
            torch.mul(gradient, self._scale, out=place.views[self._slot])
            if self.probe is not None and self.probe.wants_parts:
                self.probe.part(index, bucket.parts[self._slot][place.begin : place.end])
        if self._runs:
            run = self._run_of[index]
            run.missing -= 1
            if run.missing == 0:
                self._run_full(run)
        elif bucket.seen == bucket.whole:
            self._bucket_full(bucket)

    def end_turn(self) -> None:
        """Backward is over: every gradient is there, or was not used."""
        if any(bucket.seen != bucket.whole for bucket in self._buckets):
            self._fill_in_unused()
        if self._used is not None:
            self._used |= torch.tensor([self._has_come(index) for index in range(len(self._parameters))])
            if self._is_last:
                assert self._engine is not None
                self._used_handle = self._engine.all_reduce(
                    "grad:used", self._used, op="max", determinism="fast", priority=FIRST
                )
        if self._held is not None:
            self._send_off(self._held)
        if self.probe is not None and self.probe.wants_parts and self._is_last:
            self._parts_over(self.probe)

    def _has_come(self, index: int) -> bool:
        place = self._places[index]
        return bool(place.bucket.seen & place.bit)

    def _fill_in_unused(self) -> None:
        """Parameters that were not used contribute zeros."""
        unused = [index for index in range(len(self._parameters)) if not self._has_come(index)]
        if not self._find_unused:
            names = ", ".join(repr(self._names[index]) for index in unused[:8])
            raise TrainError(
                f"{len(unused)} parameters got no gradient in this backward ({names}): freeze them with "
                "requires_grad_(False), or pass find_unused_parameters=True to job.wrap as you would to DDP"
            )
        places = [self._places[index] for index in unused]
        if not self._on_device:
            for place in places:
                place.views[self._slot].zero_()
        if not self._runs:
            for bucket in dict.fromkeys(place.bucket for place in places):
                self._bucket_full(bucket)
        for run in self._runs:
            if run.missing:
                self._run_full(run)

    # --- what is full leaves ---

    def _bucket_full(self, bucket: Bucket) -> None:
        if self._on_device:
            # One bucket late: backward has then freed more memory than is taken here.
            late, self._held = self._held, bucket
            if late is not None:
                self._send_off(late)
        elif self._is_last:
            assert self._engine is not None
            bucket.handle = sum_bucket(self._engine, self._blocks, bucket)

    def _send_off(self, bucket: Bucket) -> None:
        """Have a full bucket leave the device; or fold it there, if this worker hosts all replicas."""
        flat = self._collected(bucket, bucket.gradients(), is_plain=bucket.is_plain)
        if self._is_last and len(self._blocks) == 1:
            bucket.copied = self._ferry.fold(flat, bucket.parts, self.num_replicas)
            bucket.flat = flat
        else:
            bucket.copied = self._ferry.carry(flat, bucket.parts[self._slot])

    def _run_full(self, run: Run) -> None:
        assert self._engine is not None
        if self._on_device:
            gradients = [
                parameter.grad if self._has_come(index) else None
                for index, parameter in zip(run.indices, run.parameters, strict=True)
            ]
            copied = self._ferry.carry(self._collected(run, gradients), run.parts[self._slot])
            if self._is_last:
                submit = partial(sum_run, self._engine, self._blocks, self._way, run)
                run.handle = self._engine.after(copied, submit, run.name)
        elif self._is_last:
            run.handle = sum_run(self._engine, self._blocks, self._way, run)

    def _collected(
        self, what: Bucket | Run, gradients: Sequence[torch.Tensor | None], *, is_plain: bool = False
    ) -> torch.Tensor:
        """The gradients of the replica whose turn it is, in one tensor on the device, which has been shown to the probe."""
        flat = device.collected(what.parameters, gradients, self.num_replicas, is_plain=is_plain)
        if self.probe is not None and self.probe.wants_parts:
            sizes = [parameter.numel() for parameter in what.parameters]
            self.probe.parts(what.indices, flat.split(sizes))  # type: ignore[no-untyped-call]
        if self._is_last:
            # The sum takes their place before the program sees them again.
            for parameter, found in zip(what.parameters, gradients, strict=True):
                if found is not None:
                    parameter.grad = None
        return flat

    # --- the sums ---

    @property
    def crosses(self) -> bool:
        """Whether sums are taken in one by one, when their parameters are used."""
        return bool(self._runs)

    def under_way(self) -> list[Awaited]:
        """What is to be waited for, parameter by parameter. Raises CommError if it is known already that it fails."""
        used = self._wait_for_used()
        return [
            Awaited(
                run.handle,
                [
                    (i, total if used is None or used[i] else None)
                    for i, total in zip(run.indices, run.sums, strict=True)
                ],
            )
            for run in self._runs
            if run.handle is not None
        ]

    def _wait_for_used(self) -> list[int] | None:
        """Which parameters any replica has used; None where all must be."""
        handle, self._used_handle = self._used_handle, None
        found = handle.wait() if handle is not None else None
        return found.tolist() if found is not None else None

    def wait(self) -> None:
        """Put the sums into `.grad`. Raises CommError if they cannot be had."""
        if self._on_device and len(self._blocks) > 1:
            for bucket in self._buckets:
                assert bucket.copied is not None, "every bucket was handed in"
                bucket.copied.synchronize()
                assert self._engine is not None
                bucket.handle = sum_bucket(self._engine, self._blocks, bucket)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            if self._on_device:
                self._fetch(bucket)
            elif self.probe is not None and self.probe.wants_sums:
                for index in bucket.indices:
                    self.sum_is_here(index)
        self.sums_are_whole()
        used = self._wait_for_used()
        # What no replica has used keeps whatever gradient it has, as with DDP.
        unused = {id(parameter) for index, parameter in enumerate(self._parameters) if used and not used[index]}
        for bucket in self._buckets:
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                if id(parameter) not in unused:
                    parameter.grad = total
            if self._on_device:
                bucket.sums = ()  # the memory is the gradients' now

    def _fetch(self, bucket: Bucket) -> None:
        """Bring the sum to the device, if it is not there."""
        flat = device.brought_back(bucket, was_folded=len(self._blocks) == 1)
        if self.probe is not None and self.probe.wants_sums:
            self.probe.totals(bucket.indices, flat.split(bucket.sizes))  # type: ignore[no-untyped-call]
        bucket.sums = device.uncollected(flat, bucket)

    # --- what is looked at ---

    def begin_step(self, step: int) -> None:
        """A step begins: have it looked at, if it is due."""
        if self.probe is not None:
            self.probe.begin(step)

    def took(self, samples: int, scale: Callable[[], float] = lambda: 1.0) -> None:
        """A replica is about to compute on so many samples in all; `scale` says what its loss will be multiplied with."""
        if self.probe is not None and self.probe.wants_parts:
            self.probe.took(samples, scale())

    def _parts_over(self, probe: GradientProbe) -> None:
        """The last replica hosted here is done."""
        if not self.wanted:
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    probe.part(index, in_memory_order(parameter, parameter.grad.detach()))
        probe.parts_over()

    def sum_is_here(self, index: int) -> None:
        """The sum of this parameter's gradients is there, and nobody has touched it yet."""
        if self.probe is not None and self.probe.wants_sums:
            place = self._places[index]
            self.probe.total(index, place.bucket.total[place.begin : place.end])

    def sums_are_whole(self) -> None:
        """All sums of the step are there."""
        if self.probe is not None:
            self.probe.sums_over()
