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
from typing import Any

import torch

from pliant.comm import order
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import TrainError, Unsliceable
from pliant.train.buckets import Item, Layout, first_layout, rebuilt_layout


@dataclass(slots=True)
class Bucket:
    """The memory of one bucket: a flat tensor for each replica hosted here, and one for the sum."""

    name: str
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int
    dtype: torch.dtype
    device: torch.device
    parts: list[torch.Tensor] = field(default_factory=list)
    """In host memory that the workers of a host share; one per replica hosted here."""
    total: torch.Tensor | None = None
    """The sum, in the same kind of memory; the only part itself where there is just one."""
    views: list[list[torch.Tensor]] = field(default_factory=list)
    """Where each parameter's gradient goes, for each replica."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Each parameter's view of the sum."""
    summed: torch.Tensor | None = None
    """CUDA: the sum."""
    copied: torch.cuda.Event | None = None
    """CUDA: when the bucket of the replica whose turn it is has left the device."""
    missing: int = 0
    handle: Handle | None = None

    @property
    def on_device(self) -> bool:
        return self.device.type == "cuda"


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
        self._on_backward = on_backward
        self._find_unused, self._cap_bytes = find_unused, cap_bytes
        self._items = [Item((p.dtype, p.device), p.numel() * p.element_size()) for p in self.parameters]
        self._layout = first_layout(self._items, find_unused=find_unused, cap_bytes=cap_bytes)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, tuple[Bucket, int]] = {}
        self._engine: Engine | None = None
        self._blocks: tuple[int, ...] = ()
        self._slot = 0
        self._is_last = False
        self._seen: set[int] = set()
        self._used: torch.Tensor | None = None
        self._used_handle: Handle | None = None
        self._expecting = self._queued = False
        self._side: torch.cuda.Stream | None = None
        self._buried: list[tuple[Engine, list[Bucket]]] = []
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
        self._buckets = []

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Replace L1 by L2, for good."""
        self.use_layout(rebuilt_layout(self._items, ready_order, cap_bytes=self._cap_bytes))

    def arrange(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Work in this view from now on: rank r hosts `blocks[r]` replicas."""
        if self._engine is not None and self._engine.may_be_written_to:
            # A worker that was given up for its silence, and is only stopped, would finish its part of a sum of
            # the old view when it goes on: into this memory, which must therefore never be used again.
            self._buried.append((self._engine, self._buckets))
        self._engine, self._blocks = engine, tuple(blocks)
        self._expecting = False
        self._buckets = []

    def _allocate(self) -> None:
        assert self._engine is not None, "arrange() comes first"
        hosted = self._blocks[self._engine.rank]
        generation = 1 if self.waits_for_order else 2
        for number, indices in enumerate(self._layout.buckets):
            bucket = self._make_bucket(f"grad:{generation}:{number}", indices)
            empty = partial(self._engine.empty, bucket.length, bucket.dtype)
            bucket.parts = [empty() for _ in range(hosted)]
            bucket.total = bucket.parts[0] if hosted == 1 else empty()
            if bucket.on_device:
                for part in (*bucket.parts, bucket.total):
                    self._engine.pin(part)
            else:
                bucket.views = [self._views(bucket, part) for part in bucket.parts]
                bucket.sums = self._views(bucket, bucket.total)
            self._buckets.append(bucket)
            for position, index in enumerate(indices):
                self._bucket_of[index] = (bucket, position)

    def _make_bucket(self, name: str, indices: tuple[int, ...]) -> Bucket:
        offsets, length = [], 0
        for index in indices:
            offsets.append(length)
            length += self.parameters[index].numel()
        first = self.parameters[indices[0]]
        return Bucket(name, indices, tuple(offsets), length, first.dtype, first.device)

    def _views(self, bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
        """In the memory order of each parameter, as DDP lays them out."""
        views = []
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            parameter = self.parameters[index]
            if _is_dense(parameter):
                views.append(flat.as_strided(parameter.size(), parameter.stride(), offset))
            else:
                views.append(flat[offset : offset + parameter.numel()].view(parameter.size()))
        return views

    # --- one replica's turn ---

    def begin_turn(self, slot: int) -> None:
        """The replica in this place among those hosted here computes next."""
        assert self._engine is not None, "arrange() comes first"
        if not self._buckets and self.sums:
            self._allocate()
        self._slot, self._is_last = slot, slot == self._blocks[self._engine.rank] - 1
        self._seen.clear()
        self._expecting, self._queued = True, False
        for bucket in self._buckets:
            bucket.missing, bucket.handle = len(bucket.indices), None
        if self._find_unused and self.sums and slot == 0:
            self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)

    @property
    def turn_done(self) -> bool:
        """Whether the replica whose turn it is has handed in all its gradients."""
        return not self._expecting

    def _caught(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete."""
        if self.no_sync:
            return
        if not self._expecting:
            if self._engine is None:
                return
            raise TrainError(
                f"a second backward reached {self.names[index]!r} before the next batch: each replica has one backward "
                "per step whose gradients are summed. To accumulate, put `with job.no_sync():` around all but the last"
            )
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
            self.ready_order = []
        if index in self._seen:
            return  # tied weights used in a re-entrant graph: DDP, too, takes the first time
        self._seen.add(index)
        self.ready_order.append(index)
        assert parameter.grad is not None, "the hook runs after the gradient was accumulated"
        if self.sums:
            self._hand_in(index, parameter.grad)

    def _hand_in(self, index: int, gradient: torch.Tensor | None) -> None:
        bucket, position = self._bucket_of[index]
        if gradient is not None and gradient.is_sparse:
            raise Unsliceable(
                f"{self.names[index]!r} has a sparse gradient, which has no fixed place in a bucket: use sparse=False"
            )
        if not bucket.on_device:
            view = bucket.views[self._slot][position]
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient.detach(), 1.0 / self.num_replicas, out=view)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._bucket_full(bucket)

    def _bucket_full(self, bucket: Bucket) -> None:
        if bucket.on_device:
            flat = self._collected(bucket)
            if self._is_last and len(self._blocks) == 1:
                self._fold_on_device(bucket, flat)
            else:
                self._copy_to_host(bucket, flat)
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
        unused = [index for index in range(len(self.parameters)) if index not in self._seen] if self.sums else []
        if unused and not self._find_unused:
            names = ", ".join(repr(self.names[index]) for index in unused[:8])
            raise TrainError(
                f"{len(unused)} parameters got no gradient in this backward ({names}): freeze them with "
                "requires_grad_(False), or pass find_unused_parameters=True to job.wrap as you would to DDP"
            )
        with torch.no_grad():
            if self._used is not None:
                self._used[list(self._seen)] = 1
                if self._is_last:
                    assert self._engine is not None
                    self._used_handle = self._engine.all_reduce("grad:used", self._used, op="max", determinism="fast")
            for index in unused:
                self._hand_in(index, None)
        self._expecting = False
        self._on_backward()

    # --- the sums ---

    def wait(self) -> None:
        """Put the sums into `.grad`. Raises CommError if they cannot be had."""
        for bucket in self._buckets:
            if bucket.on_device and len(self._blocks) > 1:
                assert bucket.copied is not None, "every bucket was handed in"
                bucket.copied.synchronize()
                self._submit(bucket)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            if bucket.on_device:
                self._fetch(bucket)
        used: Sequence[Any] | None = None
        if self._used_handle is not None:
            found = self._used_handle.wait()
            used = found.tolist() if found is not None else None
            self._used_handle = None
        for bucket in self._buckets:
            for index, total in zip(bucket.indices, bucket.sums, strict=True):
                if used is None or used[index]:
                    self.parameters[index].grad = total
            if bucket.on_device:
                bucket.sums = []

    # --- CUDA ---
    #
    # Memory on the device is taken when a bucket is full, in a backward that has freed more of it by then, and given
    # back when the bucket has left: the peak, at the end of a forward, does not know of replicas.

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where copies run beside the compute."""
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side

    def _collected(self, bucket: Bucket) -> torch.Tensor:
        """The bucket of the replica whose turn it is, scaled: few large operations in place of many small ones."""
        parameters = [self.parameters[index] for index in bucket.indices]
        seen = [index in self._seen for index in bucket.indices]
        gradients = [
            parameter.grad.detach() if there and parameter.grad is not None else torch.zeros_like(parameter)
            for parameter, there in zip(parameters, seen, strict=True)
        ]
        if all(parameter.is_contiguous() for parameter in parameters):
            flat = torch._utils._flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
            flat = flat.clone() if len(gradients) == 1 else flat
        else:
            flat = torch.empty(bucket.length, dtype=bucket.dtype, device=bucket.device)
            torch._foreach_copy_(self._views(bucket, flat), gradients)
        assert isinstance(flat, torch.Tensor)
        return flat.mul_(1.0 / self.num_replicas)

    def _copy_to_host(self, bucket: Bucket, flat: torch.Tensor) -> None:
        side = self._stream(bucket.device)
        side.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(side):
            bucket.parts[self._slot].copy_(flat, non_blocking=True)
            bucket.copied = side.record_event()
        flat.record_stream(side)

    def _fold_on_device(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """This worker hosts all replicas: fold where the last one's gradients lie, the others' brought back chunk by
        chunk, while backward goes on. The same additions in the same order as anywhere else."""
        side = self._stream(bucket.device)
        bucket.summed = torch.empty_like(flat)
        length = order.chunk_length(bucket.length, bucket.dtype.itemsize, self.num_replicas)
        scratch = torch.empty(min(length, bucket.length), dtype=bucket.dtype, device=bucket.device)
        side.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(side):
            for begin, end, chunk in order.chunks_between(0, bucket.length, length):
                total = bucket.summed[begin:end]
                for place, replica in enumerate(order.chain(chunk, self.num_replicas)):
                    if replica == self.num_replicas - 1:
                        operand = flat[begin:end]
                    else:
                        operand = total if place == 0 else scratch[: end - begin]
                        operand.copy_(bucket.parts[replica][begin:end], non_blocking=True)
                    if place > 0:
                        torch.add(operand, total, out=total)
                    elif operand is not total:
                        total.copy_(operand)
            bucket.copied = side.record_event()
        for tensor in (flat, bucket.summed, scratch):
            tensor.record_stream(side)

    def _fetch(self, bucket: Bucket) -> None:
        """Bring the sum to the device, if it is not there, and to the parameters."""
        present = torch.cuda.current_stream(bucket.device)
        if len(self._blocks) > 1:
            assert bucket.total is not None
            bucket.summed = bucket.total.to(bucket.device, non_blocking=True)
        elif bucket.copied is not None:
            present.wait_event(bucket.copied)
        assert bucket.summed is not None
        bucket.sums = self._views(bucket, bucket.summed)
        bucket.summed = None  # it lives as long as the parameters' gradients


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
