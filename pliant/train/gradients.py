"""The gradients of the replicas that a worker hosts: caught as backward makes them, summed as DDP would.

A hook on each parameter scales its gradient by 1/N (by multiplication, as DDP does) into the place it has in
its replica's bucket. When the last replica hosted here has filled a bucket, the engine sums it over all
replicas of the job, in the exact order, while backward goes on. The sums become the parameters'
`.grad`. On CUDA, buckets leave the device on a stream of their own, so the device holds one set of
them, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from pliant.comm import order
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.slices import Portion
from pliant.errors import TrainError, Unsliceable
from pliant.train import notify_pull
from pliant.train.buckets import Item, Layout, first_layout, rebuilt_layout
from pliant.train.priority import Awaited, Pending
from pliant.train.probing import GradientProbe
from pliant.train.tuning import Choice
from pliant.train.units import cut_units, layer_units

FIRST = -1
"""The priority of what every worker needs before it can begin its next step."""
PIECE_BYTES = 2 << 20
"""What is brought back to the device at once when it folds."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket: a flat tensor for each replica hosted here, and one for the sum."""

    name: str
    indices: list[int]
    """Of its parameters."""
    parameters: list[torch.nn.Parameter]
    length: int
    whole: int
    """A bit for each parameter."""
    is_plain: bool
    """Whether all parameters are contiguous."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """In host memory that the workers of a host share; one per replica hosted here."""
    total: torch.Tensor | None = None
    """The sum, in the same kind of memory; the only part itself where there is just one."""
    views: list[list[torch.Tensor]] = field(default_factory=list)
    """On the CPU: where each parameter's gradient goes, for each replica."""
    sums: Sequence[torch.Tensor] = ()
    """Each parameter's view of the sum."""
    flat: torch.Tensor | None = None
    """CUDA: the sum, where it was folded on the device."""
    copied: torch.cuda.Event | None = None
    """CUDA: when the bucket of the replica whose turn it is has left the device, or was folded there."""
    seen: int = 0
    """The bits of those whose gradient has come in this turn."""
    handle: Handle | None = None

    sizes: list[int] = field(default_factory=list)
    """Elements of each parameter."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's view of a flat tensor."""
        return _cut(flat, self.parameters)


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


class Gradients:
    """Catches and sums the gradients of `parameters`, for a job of N replicas."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        num_replicas: int,
        *,
        find_unused: bool = False,
        cap_bytes: int | None = None,
        always_sums: bool = False,
        on_backward: Callable[[], None],
        before_backward: Callable[[], set[int]] = set,
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_replicas = num_replicas
        self.sums = num_replicas > 1 or always_sums
        """Whether there is anything to sum: a single replica's gradients stay where backward puts them."""
        self.waits_for_order = self.sums and not find_unused
        """Whether the first layout is still in use, to be replaced when replica 0's order is known."""
        self.no_sync = False
        """While set, gradients only accumulate in `.grad`."""
        self.ready_order: list[int] = []
        """In which order the gradients of the last complete backward came."""
        self.probe: GradientProbe | None = None
        """What looks at gradients and sums; set it before the first view."""
        self._probing = self._probing_sums = False
        """Whether it looks at those of this step; and at the sums of the last one begun, which may still come."""
        self._offsets: list[int] = []
        """Where each parameter begins in its bucket."""
        self._on_backward, self._before_backward = on_backward, before_backward
        self._find_unused, self._cap_bytes = find_unused, cap_bytes
        self._items = [Item((p.dtype, p.device), p.numel() * p.element_size()) for p in self.parameters]
        self._layout = first_layout(self._items, find_unused=find_unused, cap_bytes=cap_bytes)
        self._buckets: list[Bucket] = []
        self._places: list[tuple[Bucket, int]] = []
        """For each parameter, its bucket and its place in it."""
        self._on_device = self.parameters[0].is_cuda
        self._engine: Engine | None = None
        self._blocks: tuple[int, ...] = ()
        self._slot = 0
        self._is_last = False
        self._held: Bucket | None = None
        self._used: torch.Tensor | None = None
        self._used_handle: Handle | None = None
        self._expecting = self._queued = False
        self._halted = False
        """Whether the step does not count any more: its memory may still be read by others, and is left alone."""
        self._resting = True
        """Whether no replica has its turn: what the program differentiates now is its own affair."""
        self._side: torch.cuda.Stream | None = None
        self._buried: list[tuple[Engine, list[Bucket]]] = []
        self._way = Choice()
        """How sums travel in this step."""
        self._runs: list[Run] = []
        """Where sums do not travel by buckets: what does. Empty else."""
        self._run_of: list[Run] = []
        self._cut_for: Choice | None = None
        self._leftover: set[int] = set()
        """Parameters that were not used in the forward before this backward, as far as can be seen."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._caught, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # --- where things lie ---

    @property
    def layout(self) -> Layout:
        return self._layout

    def use_layout(self, layout: Layout | None) -> None:
        """Use L2 as another worker, or a checkpoint, has it; None goes back to L1, as a restarted DDP would."""
        self.waits_for_order = layout is None and self.sums and not self._find_unused
        self._layout = layout or first_layout(self._items, find_unused=self._find_unused, cap_bytes=self._cap_bytes)
        self._buckets, self._runs = [], []

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Replace L1 by L2, for good."""
        self.use_layout(rebuilt_layout(self._items, ready_order, cap_bytes=self._cap_bytes))

    def arrange(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Work in this view from now on: rank r hosts `blocks[r]` replicas."""
        if self._engine is not None and self._engine.may_be_written_to:
            # A worker that was given up for its silence, and is only stopped, would finish its part of a sum of
            # the old view when it goes on: into this memory, which must therefore never be used again.
            self._buried.append((self._engine, self._buckets))
        if self._side is not None:
            self._side.synchronize()  # before the memory that is being copied to is given away
        self._engine, self._blocks = engine, tuple(blocks)
        self._expecting = self._halted = False
        self._buckets, self._runs = [], []
        self._probing = self._probing_sums = False
        if self.probe is not None:
            self.probe.arrange(engine, self._blocks)

    def _allocate(self) -> None:
        assert self._engine is not None, "arrange() comes first"
        hosted = self._blocks[self._engine.rank]
        generation = 1 if self.waits_for_order else 2
        places: dict[int, tuple[Bucket, int]] = {}
        offsets: dict[int, int] = {}
        for number, indices in enumerate(self._layout.buckets):
            bucket = _make_bucket(f"grad:{generation}:{number}", indices, [self.parameters[index] for index in indices])
            empty = partial(self._engine.empty, bucket.length, bucket.dtype)
            bucket.parts = [empty() for _ in range(hosted)]
            bucket.total = bucket.parts[0] if hosted == 1 else empty()
            if self._on_device:
                for part in (*bucket.parts, bucket.total):
                    self._engine.pin(part)
            else:
                bucket.views = [bucket.cut(part) for part in bucket.parts]
                bucket.sums = bucket.cut(bucket.total)
            self._buckets.append(bucket)
            places |= {index: (bucket, place) for place, index in enumerate(indices)}
            offsets |= dict(zip(indices, accumulate(bucket.sizes, initial=0), strict=False))
        self._offsets = [offsets[index] for index in range(len(self.parameters))]
        self._places = [places[index] for index in range(len(self.parameters))]
        self._runs, self._cut_for = [], None

    def travel(self, way: Choice, order: Sequence[int]) -> None:
        """How the sums of the step that begins now travel; `order` is that in which they are wanted."""
        assert self._engine is not None, "arrange() comes first"
        if not self._buckets and self.sums:
            self._allocate()
        self._way = way
        if way.mode == "fifo" or not self.sums or self._engine.size == 1:
            self._runs = []
            return
        if not self._runs or self._cut_for != way:
            self._cut_runs(way)
        self._cut_for = way
        wanted = {index: place for place, index in enumerate(order)}
        for run in self._runs:
            first = min(wanted.get(index, len(self.parameters)) for index in run.indices)
            run.priority = first if way.mode == "priority" else 0

    def _cut_runs(self, way: Choice) -> None:
        assert self._engine is not None
        sizes = [bucket.sizes for bucket in self._buckets]
        item_bytes = [bucket.dtype.itemsize for bucket in self._buckets]
        lanes = self._engine.num_lanes
        if way.mode == "baseline":
            units = layer_units(sizes, item_bytes, way.slice_bytes // 4, lanes)
        else:
            units = cut_units(sizes, item_bytes, way.slice_bytes, lanes)
        number = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._runs = []
        run_of: dict[int, Run] = {}
        for unit in units:
            bucket = self._buckets[unit.bucket]
            begin, end = unit.portion.begin, unit.portion.begin + unit.length
            assert bucket.total is not None
            places = slice(unit.first, unit.last + 1)
            total = bucket.total[begin:end]
            run = Run(
                f"{bucket.name}:{unit.first}",
                [number[id(parameter)] for parameter in bucket.parameters[places]],
                bucket.parameters[places],
                [part[begin:end] for part in bucket.parts],
                total,
                _cut(total, bucket.parameters[places]),
                unit.portion,
            )
            self._runs.append(run)
            run_of |= dict.fromkeys(run.indices, run)
        self._run_of = [run_of[index] for index in range(len(self.parameters))]

    # --- what is looked at ---

    def begin_step(self, step: int) -> None:
        """A step begins: have it looked at, if it is due."""
        self._probing = self.probe is not None and self.probe.begin(step)

    def took(self, samples: int, scale: Callable[[], float] = lambda: 1.0) -> None:
        """A replica is about to compute on so many samples in all; `scale` says what its loss will be multiplied with."""
        if self._probing:
            assert self.probe is not None
            self.probe.took(samples, scale())

    def _show(self, index: int, flats: torch.Tensor) -> None:
        """Have the probe look at a parameter's gradient in a bucket's tensor."""
        assert self.probe is not None
        begin = self._offsets[index]
        self.probe.part(index, flats[begin : begin + self._items_of(index)])

    def _items_of(self, index: int) -> int:
        bucket, place = self._places[index]
        return bucket.sizes[place]

    def _parts_over(self) -> None:
        """The last replica hosted here is done."""
        assert self.probe is not None
        if not self.sums:
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None:
                    self.probe.part(index, _in_memory_order(parameter, parameter.grad.detach()))
        self.probe.parts_over()
        self._probing, self._probing_sums = False, self.sums

    def sum_is_here(self, index: int) -> None:
        """The sum of this parameter's gradients is there, and nobody has touched it yet."""
        if self._probing_sums:
            assert self.probe is not None
            bucket, begin = self._places[index][0], self._offsets[index]
            assert bucket.total is not None
            self.probe.total(index, bucket.total[begin : begin + self._items_of(index)])

    def sums_are_whole(self) -> None:
        """All sums of the step are there."""
        if self._probing_sums:
            assert self.probe is not None
            self.probe.sums_over()
            self._probing_sums = False

    # --- one replica's turn ---

    def begin_turn(self, slot: int) -> None:
        """The replica in this place among those hosted here computes next."""
        assert self._engine is not None, "arrange() comes first"
        if not self._buckets and self.sums:
            self._allocate()
        for run in self._runs:
            run.missing, run.handle = len(run.indices), None
        self._leftover = set()
        self._slot, self._is_last = slot, slot == self._blocks[self._engine.rank] - 1
        self._expecting, self._queued, self._resting, self._held = True, False, False, None
        for bucket in self._buckets:
            bucket.seen, bucket.handle = 0, None
        if self._find_unused and self.sums and slot == 0:
            self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)

    def halt(self) -> None:
        """The step is torn: catch nothing until there is another view."""
        self._halted = True

    def rest(self) -> None:
        """No replica has its turn."""
        self._resting = True

    def _caught(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete. Called for every parameter of every replica, so it does the least it can."""
        if parameter.__class__ is Pending or index in self._leftover:
            raise TrainError(
                f"{self.names[index]!r} got a gradient, but its last update was still under way when it was used: something "
                "(compiled or scripted code?) uses it where torch's Python functions do not see it. Use sync='fifo'"
            )
        if self.no_sync or self._resting or self._halted:
            return
        if not self._queued:
            self._begin_backward(index)
        if not self.sums:
            return
        bucket, place = self._places[index]
        bit = 1 << place
        if bucket.seen & bit:
            raise Unsliceable(
                f"{self.names[index]!r} got its gradient twice in one backward, as with re-entrant checkpointing: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.seen |= bit
        if self.waits_for_order:
            self.ready_order.append(index)
        if not self._on_device:
            gradient = parameter.grad
            assert gradient is not None, "the hook runs after the gradient was accumulated"
            if gradient.is_sparse:
                raise Unsliceable(
                    f"{self.names[index]!r} has a sparse gradient, which has no fixed place in a bucket: use sparse=False"
                )
            torch.mul(gradient, 1.0 / self.num_replicas, out=bucket.views[self._slot][place])
            if self._probing:
                self._show(index, bucket.parts[self._slot])
        if self._runs:
            run = self._run_of[index]
            run.missing -= 1
            if run.missing == 0:
                self._run_full(run)
        elif bucket.seen == bucket.whole:
            self._bucket_full(bucket)

    def _run_full(self, run: Run) -> None:
        if self._on_device:
            copied = self._send_off_run(run)
            if self._is_last:
                assert self._engine is not None
                submit = partial(_submit_run, self._engine, self._blocks, self._way, run)
                run.handle = self._engine.after(copied, submit, run.name)
        elif self._is_last:
            assert self._engine is not None
            run.handle = _submit_run(self._engine, self._blocks, self._way, run)

    def _begin_backward(self, index: int) -> None:
        if not self._expecting:
            raise TrainError(
                f"a second backward reached {self.names[index]!r} before the next batch: each replica has one backward "
                "per step whose gradients are summed. To accumulate, put `with job.no_sync():` around all but the last"
            )
        self._leftover = self._before_backward()
        if index in self._leftover:
            self._caught(index, self.parameters[index])
        self._queued = True
        self.ready_order = []
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)

    def _bucket_full(self, bucket: Bucket) -> None:
        if self._on_device:
            # One bucket late: backward has then freed more memory than is taken here.
            late, self._held = self._held, bucket
            if late is not None:
                self._send_off(late)
        elif self._is_last:
            self._submit(bucket)

    def _submit(self, bucket: Bucket) -> None:
        assert self._engine is not None
        assert bucket.total is not None
        if len(bucket.parts) == 1 and max(self._blocks) == 1:
            bucket.handle = self._engine.all_reduce(bucket.name, bucket.total)
        else:
            bucket.handle = self._engine.all_reduce(
                bucket.name, bucket.total, contributions=bucket.parts, parts=self._blocks
            )

    def _backward_done(self) -> None:
        """Backward is over: every gradient is there, or was not used."""
        with torch.no_grad():
            if any(bucket.seen != bucket.whole for bucket in self._buckets):
                self._fill_in_unused()
            if self._used is not None:
                self._used |= torch.tensor([self._has_come(index) for index in range(len(self.parameters))])
                if self._is_last:
                    assert self._engine is not None
                    self._used_handle = self._engine.all_reduce(
                        "grad:used", self._used, op="max", determinism="fast", priority=FIRST
                    )
            if self._held is not None:
                self._send_off(self._held)
            if self._probing and self._is_last:
                self._parts_over()
        self._expecting = False
        self._queued = False
        self._on_backward()

    def _has_come(self, index: int) -> bool:
        bucket, place = self._places[index]
        return bool(bucket.seen >> place & 1)

    def _fill_in_unused(self) -> None:
        """Parameters that were not used contribute zeros."""
        unused = [index for index in range(len(self.parameters)) if not self._has_come(index)]
        if not self._find_unused:
            names = ", ".join(repr(self.names[index]) for index in unused[:8])
            raise TrainError(
                f"{len(unused)} parameters got no gradient in this backward ({names}): freeze them with "
                "requires_grad_(False), or pass find_unused_parameters=True to job.wrap as you would to DDP"
            )
        for bucket in dict.fromkeys(self._places[index][0] for index in unused):
            if not self._on_device:
                for place, view in enumerate(bucket.views[self._slot]):
                    if not bucket.seen >> place & 1:
                        view.zero_()
            if not self._runs:
                self._bucket_full(bucket)
        for run in self._runs:
            if run.missing:
                self._run_full(run)

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
        self._await_sums()

    def fill_in(self) -> None:
        """The step is torn, but the program's own code may touch gradients before its next batch."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _await_sums(self) -> None:
        if self._on_device and len(self._blocks) > 1:
            for bucket in self._buckets:
                assert bucket.copied is not None, "every bucket was handed in"
                bucket.copied.synchronize()
                self._submit(bucket)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            if self._on_device:
                self._fetch(bucket)
            elif self._probing_sums:
                for index in bucket.indices:
                    self.sum_is_here(index)
        self.sums_are_whole()
        used = self._wait_for_used()
        # What no replica has used keeps whatever gradient it has, as with DDP.
        unused = {id(parameter) for index, parameter in enumerate(self.parameters) if used and not used[index]}
        for bucket in self._buckets:
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                if id(parameter) not in unused:
                    parameter.grad = total
            if self._on_device:
                bucket.sums = ()  # the memory is the gradients' now

    # --- CUDA ---
    #
    # Memory on the device is taken when a bucket is full, in a backward that has freed more of it by then, and given
    # back when the bucket has left: the peak, at the end of a forward, does not know of replicas.

    def _send_off(self, bucket: Bucket) -> None:
        """Have a full bucket leave the device; or fold it there, if this worker hosts all replicas."""
        present = torch.cuda.current_stream(bucket.device)
        flat = self._collected(bucket)
        if self._probing:
            assert self.probe is not None
            self.probe.parts(bucket.indices, flat.split(bucket.sizes))  # type: ignore[no-untyped-call]
        if self._is_last:
            # The sum takes their place before the program sees them again.
            for place, parameter in enumerate(bucket.parameters):
                if bucket.seen >> place & 1:
                    parameter.grad = None
        if self._side is None:
            self._side = torch.cuda.Stream(bucket.device)  # type: ignore[no-untyped-call]
        side = self._side
        side.wait_stream(present)
        with torch.cuda.stream(side):
            if self._is_last and len(self._blocks) == 1:
                self._fold(bucket, flat)
                bucket.flat = flat
            else:
                bucket.parts[self._slot].copy_(flat, non_blocking=True)
            bucket.copied = side.record_event()
        flat.record_stream(side)

    def _send_off_run(self, run: Run) -> torch.cuda.Event:
        """Have the gradients of a unit leave the device; when they have."""
        device = run.parameters[0].device
        present = torch.cuda.current_stream(device)
        gradients = [
            parameter.grad if self._has_come(index) else None
            for index, parameter in zip(run.indices, run.parameters, strict=True)
        ]
        there = [
            torch.zeros_like(parameter) if found is None else found
            for parameter, found in zip(run.parameters, gradients, strict=True)
        ]
        flat = torch.empty(len(run.total), dtype=run.total.dtype, device=device)
        torch._foreach_copy_(_cut(flat, run.parameters), there)
        flat.mul_(1.0 / self.num_replicas)
        if self._probing:
            assert self.probe is not None
            self.probe.parts(run.indices, flat.split([each.numel() for each in run.parameters]))  # type: ignore[no-untyped-call]
        if self._is_last:
            for parameter, found in zip(run.parameters, gradients, strict=True):
                if found is not None:
                    parameter.grad = None  # the sum takes its place
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(present)
        with torch.cuda.stream(self._side):
            run.parts[self._slot].copy_(flat, non_blocking=True)
            copied: torch.cuda.Event = self._side.record_event()
        flat.record_stream(self._side)
        return copied

    def _collected(self, bucket: Bucket) -> torch.Tensor:
        """The gradients of the replica whose turn it is, scaled: few large operations in place of many small ones."""
        gradients = [parameter.grad for parameter in bucket.parameters]
        if bucket.seen != bucket.whole:
            gradients = [found if bucket.seen >> place & 1 else None for place, found in enumerate(gradients)]
        there = [
            torch.zeros_like(parameter) if found is None else found
            for parameter, found in zip(bucket.parameters, gradients, strict=True)
        ]
        if bucket.is_plain and len(there) > 1:
            flat: torch.Tensor = torch._utils._flatten_dense_tensors(there)  # type: ignore[no-untyped-call]
        else:
            flat = torch.empty(bucket.length, dtype=bucket.dtype, device=bucket.device)
            torch._foreach_copy_(bucket.cut(flat), there)
        return flat.mul_(1.0 / self.num_replicas)

    def _fold(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Add the other replicas' gradients, brought back piece by piece, to those of the last one, in place. The same
        additions in the same order as anywhere else."""
        last, itemsize = self.num_replicas - 1, flat.element_size()
        size = min(flat.numel(), PIECE_BYTES // itemsize)
        before, scratch = torch.empty_like(flat[:size]), torch.empty_like(flat[:size])
        length = order.chunk_length(bucket.length, itemsize, self.num_replicas)
        for chunk_begin, chunk_end, chunk in order.chunks_between(0, bucket.length, length):
            replicas = order.chain(chunk, self.num_replicas)
            turn = replicas.index(last)
            for begin in range(chunk_begin, chunk_end, size):
                end = min(begin + size, chunk_end)
                total = flat[begin:end]
                for place, replica in enumerate(replicas):
                    if replica == last:
                        if place:
                            total.add_(before[: end - begin])
                        continue
                    target = before if place == 0 else scratch
                    operand = target[: end - begin]
                    operand.copy_(bucket.parts[replica][begin:end], non_blocking=True)
                    if place:
                        (total if place > turn else before[: end - begin]).add_(operand)

    def _fetch(self, bucket: Bucket) -> None:
        """Bring the sum to the device, if it is not there."""
        if len(self._blocks) > 1:
            assert bucket.total is not None
            flat = bucket.total.to(bucket.device, non_blocking=True)
        else:
            assert bucket.flat is not None, "every bucket was folded"
            assert bucket.copied is not None
            torch.cuda.current_stream(bucket.device).wait_event(bucket.copied)
            flat, bucket.flat = bucket.flat, None
        if self._probing_sums:
            assert self.probe is not None
            self.probe.totals(bucket.indices, flat.split(bucket.sizes))  # type: ignore[no-untyped-call]
        if bucket.is_plain:
            bucket.sums = torch._utils._unflatten_dense_tensors(flat, bucket.parameters)  # type: ignore[no-untyped-call]
        else:
            bucket.sums = bucket.cut(flat)


def _submit_run(engine: Engine, blocks: tuple[int, ...], way: Choice, run: Run) -> Handle:
    """Have a unit summed. (A function: on CUDA it is called later, when there may be another view already.)"""
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


def _cut(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Each parameter's view of a flat tensor, in the memory order of the parameter, as DDP lays them out."""
    views, offset = [], 0
    for parameter in parameters:
        if _is_dense(parameter):
            views.append(flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset))
        else:
            views.append(flat[offset : offset + parameter.numel()].view(parameter.size()))
        offset += parameter.numel()
    return views


def _in_memory_order(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a flat tensor, in the order in which the parameter lies in memory."""
    if not _is_dense(parameter) or gradient.is_sparse:
        return gradient.to_dense().reshape(-1) if gradient.is_sparse else gradient.reshape(-1)
    flat = torch.empty(parameter.numel(), dtype=gradient.dtype, device=gradient.device)
    if gradient.stride() == parameter.stride():
        return gradient.as_strided((parameter.numel(),), (1,))
    flat.as_strided(parameter.size(), parameter.stride()).copy_(gradient)
    return flat


def _make_bucket(name: str, indices: Sequence[int], parameters: list[torch.nn.Parameter]) -> Bucket:
    return Bucket(
        name,
        list(indices),
        parameters,
        length=sum(parameter.numel() for parameter in parameters),
        whole=(1 << len(parameters)) - 1,
        is_plain=all(parameter.is_contiguous() for parameter in parameters),
        sizes=[parameter.numel() for parameter in parameters],
    )


def _is_dense(parameter: torch.nn.Parameter) -> bool:
    """Whether its elements fill a run of memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
