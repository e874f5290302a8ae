"""The gradients of the hosted replicas, from backward to their sum over all replicas of the job.

A hook on each parameter catches its gradient, scales it by 1/N (by multiplication, as DDP does) and writes it to its place
in the replica's bucket. When the last replica hosted here has filled a bucket, or a unit of one, the engine sums it in the
exact order while backward goes on. The sums become the parameters' `.grad`. A replica has one backward per turn whose
gradients are summed; what would lead to a wrong sum is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import TrainError, Unsliceable
from pliant.train import notify_pull
from pliant.train.buckets import (
    FIRST_PRIORITY,
    Bucket,
    BucketItem,
    BucketLayout,
    DeviceCopier,
    GradientSlot,
    UnitBuffer,
    allocate_buckets,
    cut_unit_buffers,
    fetch_sum,
    first_layout,
    flatten_gradients,
    gradient_slots,
    in_memory_order,
    rebuilt_layout,
    unflatten_sum,
)
from pliant.train.gradient_probe import GradientProbe
from pliant.train.pending import Pending, PendingSum
from pliant.train.sync import SyncConfig


class GradientReducer:
    """Collects the gradients of `parameters` and sums them over N replicas: turn by turn into buckets."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        num_replicas: int,
        *,
        find_unused: bool = False,
        cap_bytes: int | None = None,
        always_sums: bool = False,
        prefix: str = "",
        before_backward: Callable[[], set[int]] = set,
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_replicas = num_replicas
        self.no_sync = False
        """While true, gradients only accumulate in `.grad`."""
        self.wanted = num_replicas > 1 or always_sums
        """Whether there is anything to sum. The gradients of a single replica stay where backward puts them."""
        self.probe: GradientProbe | None = None
        """Is shown gradients and sums; set it before the first view."""
        self.ready_order: list[int] = []
        """The order in which the gradients of the last complete backward came."""
        self.handed_in = False
        """Whether the replica whose turn it is has had the backward whose gradients are summed."""
        self._before_backward = before_backward
        self._prefix = prefix
        self._bases: list[torch.Tensor | None] | None = None
        """The gradients with which every turn of the pass begins; None if there are none."""
        self._has_carried = self._clears_late = self._leaves_gradients = False
        """Whether a step has ever added to the gradients of earlier ones, whether the program has cleared gradients at the
        beginning of a step, and whether the last step has left any."""
        self._in_pass = False
        """Whether a pass has begun that does not count yet: the parameters have gradients of turns."""
        self._find_unused, self._cap_bytes = find_unused, cap_bytes
        self._items = [BucketItem((p.dtype, p.device), p.numel() * p.element_size()) for p in self.parameters]
        self._engine: Engine | None = None
        self._blocks: tuple[int, ...] = ()
        self._on_device = self.parameters[0].is_cuda
        self._copier = DeviceCopier()
        self._buckets: list[Bucket] = []
        self._slots: list[GradientSlot] = []
        """The place of each parameter's gradient."""
        self._retired: list[tuple[Engine, list[Bucket]]] = []
        self._config = SyncConfig()
        """How sums travel in this step."""
        self._units: list[UnitBuffer] = []
        """The units that travel by themselves; empty if whole buckets do."""
        self._unit_of: list[UnitBuffer] = []
        self._cut_for: SyncConfig | None = None
        self._expecting = self._queued = False
        self._halted = False
        """Whether the step is torn. Others may still read its memory, so that is left alone."""
        self._resting = True
        """Whether no replica has its turn. Backwards are then the program's own affair."""
        self._unseen: set[int] = set()
        """Parameters that the forward before this backward was not seen to use."""
        self._slot = 0
        self._scale = 1.0
        self._is_last = False
        self._held_back: Bucket | None = None
        self._used: torch.Tensor | None = None
        self._used_handle: Handle | None = None
        self.use_layout(None)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._collect, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # --- the layout ---

    def use_layout(self, layout: BucketLayout | None) -> None:
        """Use L2 as another worker or a checkpoint has it. None goes back to L1, as a restarted DDP would."""
        self.waits_for_order = layout is None and self.wanted and not self._find_unused
        """Whether L1 is still in use, to be replaced when the order of replica 0 is known."""
        self.layout = layout or first_layout(self._items, find_unused=self._find_unused, cap_bytes=self._cap_bytes)
        self._buckets, self._units = [], []

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Replace L1 by L2 for good."""
        self.use_layout(rebuilt_layout(self._items, ready_order, cap_bytes=self._cap_bytes))

    def disable_sums(self) -> None:
        """Leave gradients where backward puts them."""
        self.wanted = self.waits_for_order = False

    # --- views and turns ---

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Use this engine from now on: rank r hosts `blocks[r]` replicas."""
        if self._engine is not None and self._engine.may_be_written_to:
            # A worker that was given up for its silence may only be stopped. When it goes on, it finishes its part of
            # an old sum, into this memory, which must therefore never be used again.
            self._retired.append((self._engine, self._buckets))
        self._copier.wait()  # before the memory of its copies is freed
        self._engine, self._blocks = engine, tuple(blocks)
        self._buckets, self._units = [], []
        self._expecting = self._halted = False
        if self.probe is not None:
            self.probe.enter_view(engine, self._blocks)

    def _have_buckets(self, engine: Engine) -> None:
        if self._buckets or not self.wanted:
            return
        hosted = self._blocks[engine.rank]
        self._buckets = allocate_buckets(
            self.layout,
            self.parameters,
            engine,
            hosted,
            prefix=f"grad:{self._prefix}{1 if self.waits_for_order else 2}",
            on_device=self._on_device,
        )
        self._slots = gradient_slots(self._buckets)
        self._units, self._cut_for = [], None

    def plan_step(self, config: SyncConfig, order: Sequence[int]) -> None:
        """Decide how the sums of the step that begins now travel. `order` is the order in which they are wanted."""
        engine = self._engine
        assert engine is not None, "enter_view() comes first"
        self._have_buckets(engine)
        self._config = config
        if config.mode == "fifo" or not self.wanted or engine.size == 1:
            self._units = []
            return
        if not self._units or self._cut_for != config:
            self._units = cut_unit_buffers(self._buckets, config, engine.num_lanes)
            unit_of = {index: unit for unit in self._units for index in unit.indices}
            self._unit_of = [unit_of[index] for index in range(len(self.parameters))]
        self._cut_for = config
        wanted = {index: place for place, index in enumerate(order)}
        for unit in self._units:
            first = min(wanted.get(index, len(self.parameters)) for index in unit.indices)
            unit.priority = first if config.mode == "priority" else 0

    def begin_pass(self, *, cleared: Mapping[int, bool] = MappingProxyType({}), begins_step: bool = True) -> None:
        """Remember the gradients that there are: as with DDP, every replica adds its own to them.

        `cleared` holds the parameters whose last sums are on their way, and whose gradients the program has cleared
        already: to None if true, else to zeros.
        """
        self._bases, self._in_pass = None, True
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            bases = [self._base(index, parameter, cleared) for index, parameter in enumerate(self.parameters)]
        if any(base is not None for base in bases):
            self._bases = bases
        if begins_step and not cleared:
            self._has_carried = self._has_carried or self._bases is not None
            self._clears_late = self._clears_late or (self._leaves_gradients and self._bases is None)

    def _base(self, index: int, parameter: torch.nn.Parameter, cleared: Mapping[int, bool]) -> torch.Tensor | None:
        if index in cleared:
            if cleared[index]:
                return None
            # The parameter's form, but not its memory: its update may be under way.
            zeros = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
            return zeros.zero_()
        return None if parameter.grad is None else parameter.grad.clone()

    @property
    def bases(self) -> Sequence[torch.Tensor | None] | None:
        """The gradients of earlier passes that the turns of this pass add to; None if there are none."""
        return self._bases

    def end_pass(self) -> None:
        """End the pass: it counts, and the parameters have its sums."""
        self._in_pass = False

    def end_step(self) -> None:
        """End the step: it is committed. What it leaves is what the next one may add to."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            self._leaves_gradients = any(parameter.grad is not None for parameter in self.parameters)

    def carried(self) -> list[torch.Tensor | None] | None:
        """Return copies of the gradients that the next pass may add to; None if there are none, or if the program clears
        them at the beginning of each step."""
        if not self.wanted and self.num_replicas > 1:  # every worker has gradients of its own
            return None
        if any(p.__class__ is Pending for p in self.parameters):
            return None
        if self._clears_late and not self._has_carried:
            return None
        found = self._bases if self._in_pass else [parameter.grad for parameter in self.parameters]
        if found is None or all(gradient is None for gradient in found):
            return None
        return [None if gradient is None else gradient.detach().clone() for gradient in found]

    def carry(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Go on with the gradients of another worker or of a checkpoint."""
        for index, parameter in enumerate(self.parameters):
            gradient = gradients[index] if gradients is not None else None
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def begin_turn(self, slot: int) -> None:
        """Begin the turn of the replica in this slot of those hosted here."""
        engine = self._engine
        assert engine is not None, "enter_view() comes first"
        self._have_buckets(engine)
        # Also where they are not summed: this turn may be taken again. One whose sum is on its way is cleared once more
        # after its update.
        self._reset_gradients()
        for unit in self._units:
            unit.missing, unit.handle = len(unit.indices), None
        for bucket in self._buckets:
            bucket.seen, bucket.handle = 0, None
        self._slot, self._is_last, self._held_back = slot, slot == self._blocks[engine.rank] - 1, None
        self._scale = 1.0 / self.num_replicas
        if self._find_unused and self.wanted and slot == 0:
            self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)
        self._unseen = set()
        self._expecting, self._queued, self._resting, self.handed_in = True, False, False, False

    def _reset_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            if self._bases is None:
                for parameter in self.parameters:
                    parameter.grad = None
                return
            for parameter, base in zip(self.parameters, self._bases, strict=True):
                parameter.grad = None if base is None else base.clone()

    def halt(self) -> None:
        """Collect nothing until the next view: the step is torn."""
        self._halted = True

    def end_turns(self) -> None:
        """End the turns: no replica computes now."""
        self._resting = True

    def fill_missing(self) -> None:
        """Give each parameter a gradient: the step is torn, but the program may touch gradients before its next batch."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # --- backward ---

    def _collect(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Take a complete gradient. Called for every parameter of every replica, so it does as little as possible."""
        if parameter.__class__ is Pending or index in self._unseen:
            raise TrainError(
                f"{self.names[index]!r} got a gradient, but its last update was still under way when it was used: with "
                "sync='priority' every use of a parameter must go through torch's Python functions, which compiled or scripted "
                "code does not. Use sync='fifo'"
            )
        if self.no_sync or self._resting or self._halted:
            return
        if not self._queued:
            self._begin_backward(index)
        if self.wanted:
            self._put(index, parameter)
            if self.waits_for_order:
                self.ready_order.append(index)

    def _begin_backward(self, index: int) -> None:
        if not self._expecting:
            raise TrainError(
                f"a second backward reached {self.names[index]!r} in one turn: a turn has one backward whose gradients are "
                "summed. To accumulate, put `with job.no_sync():` around all but the last; for a second sum, iterate over "
                "the step once more"
            )
        self._unseen = self._before_backward()
        if index in self._unseen:
            self._collect(index, self.parameters[index])
        self._queued = True
        self.ready_order = []
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)

    def _put(self, index: int, parameter: torch.nn.Parameter) -> None:
        place = self._slots[index]
        bucket = place.bucket
        if bucket.seen & place.bit:
            raise Unsliceable(
                f"{self.names[index]!r} got its gradient twice in one backward, as with re-entrant checkpointing: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.seen |= place.bit
        if not self._on_device:
            gradient = parameter.grad
            assert gradient is not None, "the hook runs after the gradient was accumulated"
            if gradient.is_sparse:
                raise Unsliceable(
                    f"{self.names[index]!r} has a sparse gradient, which has no fixed place in a bucket: use sparse=False"
                )
            torch.mul(gradient, self._scale, out=place.views[self._slot])
            if self.probe is not None and self.probe.wants_parts:
                self.probe.add_gradient(index, bucket.parts[self._slot][place.begin : place.end])
        if self._units:
            unit = self._unit_of[index]
            unit.missing -= 1
            if unit.missing == 0:
                self._unit_full(unit)
        elif bucket.seen == bucket.whole:
            self._bucket_full(bucket)

    def _backward_done(self) -> None:
        with torch.no_grad():
            self._end_turn()
        self._expecting = self._queued = False
        self.handed_in = True

    def contribute_zeros(self) -> None:
        """Let the replica whose turn it is contribute zeros."""
        if self.wanted:
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.seen = 0
                self._fill_in([*range(len(self.parameters))])
                if self._held_back is not None:
                    self._send_from_device(self._held_back)
        self._expecting = False
        self.handed_in = True

    def _end_turn(self) -> None:
        """End a turn: every gradient has come, or was not used."""
        if any(bucket.seen != bucket.whole for bucket in self._buckets):
            self._fill_in_unused()
        if self._used is not None:
            self._used |= torch.tensor([self._has_come(index) for index in range(len(self.parameters))])
            if self._is_last:
                assert self._engine is not None
                self._used_handle = self._engine.all_reduce(
                    "grad:used", self._used, op="max", order="fast", priority=FIRST_PRIORITY
                )
        if self._held_back is not None:
            self._send_from_device(self._held_back)
        if self.probe is not None and self.probe.wants_parts and self._is_last:
            self._gradients_complete(self.probe)

    def _has_come(self, index: int) -> bool:
        place = self._slots[index]
        return bool(place.bucket.seen & place.bit)

    def _fill_in_unused(self) -> None:
        """Let unused parameters contribute zeros."""
        unused = [index for index in range(len(self.parameters)) if not self._has_come(index)]
        if not self._find_unused:
            names = ", ".join(repr(self.names[index]) for index in unused[:8])
            raise TrainError(
                f"{len(unused)} parameters got no gradient in this backward ({names}): freeze them with "
                "requires_grad_(False), or pass find_unused_parameters=True to job.wrap as you would to DDP"
            )
        self._fill_in(unused)

    def _fill_in(self, unused: Sequence[int]) -> None:
        places = [self._slots[index] for index in unused]
        if not self._on_device:
            for place in places:
                place.views[self._slot].zero_()
        if not self._units:
            for bucket in dict.fromkeys(place.bucket for place in places):
                self._bucket_full(bucket)
        for unit in self._units:
            if unit.missing:
                self._unit_full(unit)

    # --- sending full buckets ---

    def _bucket_full(self, bucket: Bucket) -> None:
        if self._on_device:
            # One bucket late: backward has then freed more memory than is taken here.
            late, self._held_back = self._held_back, bucket
            if late is not None:
                self._send_from_device(late)
        elif self._is_last:
            assert self._engine is not None
            bucket.handle = sum_bucket(self._engine, self._blocks, bucket)

    def _send_from_device(self, bucket: Bucket) -> None:
        """Copy a full bucket to the host; or fold it on the device, if this worker hosts all replicas."""
        flat = self._flatten(bucket, bucket.gradients(), is_plain=bucket.is_plain)
        if self._is_last and len(self._blocks) == 1:
            bucket.copied = self._copier.fold(flat, bucket.parts, self.num_replicas)
            bucket.flat = flat
        else:
            bucket.copied = self._copier.copy_to_host(flat, bucket.parts[self._slot])

    def _unit_full(self, unit: UnitBuffer) -> None:
        assert self._engine is not None
        if self._on_device:
            gradients = [
                parameter.grad if self._has_come(index) else None
                for index, parameter in zip(unit.indices, unit.parameters, strict=True)
            ]
            copied = self._copier.copy_to_host(self._flatten(unit, gradients), unit.parts[self._slot])
            if self._is_last:
                submit = partial(sum_unit, self._engine, self._blocks, self._config, unit)
                unit.handle = self._engine.after(copied, submit, unit.name)
        elif self._is_last:
            unit.handle = sum_unit(self._engine, self._blocks, self._config, unit)

    def _flatten(
        self, what: Bucket | UnitBuffer, gradients: Sequence[torch.Tensor | None], *, is_plain: bool = False
    ) -> torch.Tensor:
        """Return the gradients of the present replica as one tensor on the device, and show them to the probe."""
        flat = flatten_gradients(what.parameters, gradients, self.num_replicas, is_plain=is_plain)
        if self.probe is not None and self.probe.wants_parts:
            sizes = [parameter.numel() for parameter in what.parameters]
            self.probe.add_gradients(what.indices, flat.split(sizes))  # type: ignore[no-untyped-call]
        if self._is_last:
            # The sum takes their place before the program sees them again.
            for parameter, found in zip(what.parameters, gradients, strict=True):
                if found is not None:
                    parameter.grad = None
        return flat

    # --- the sums ---

    @property
    def are_deferred(self) -> bool:
        """Whether each sum is applied when its parameter is used."""
        return bool(self._units)

    def pending_sums(self) -> list[PendingSum]:
        """Return what is to be waited for, parameter by parameter. Raises CommError if it is known to fail."""
        used = self._wait_for_used()
        return [
            PendingSum(
                unit.handle,
                [
                    (i, total if used is None or used[i] else None)
                    for i, total in zip(unit.indices, unit.sums, strict=True)
                ],
            )
            for unit in self._units
            if unit.handle is not None
        ]

    def _wait_for_used(self) -> list[int] | None:
        """Return which parameters any replica has used; None if all must be used."""
        handle, self._used_handle = self._used_handle, None
        found = handle.wait() if handle is not None else None
        return found.tolist() if found is not None else None

    def wait(self) -> None:
        """Wait for all sums and put them into `.grad`. Raises CommError if they cannot be had."""
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
                    self.sum_arrived(index)
        self.sums_complete()
        used = self._wait_for_used()
        # A parameter that no replica has used keeps its gradient, as with DDP.
        unused = {id(parameter) for index, parameter in enumerate(self.parameters) if used and not used[index]}
        for bucket in self._buckets:
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                if id(parameter) not in unused:
                    parameter.grad = total
            if self._on_device:
                bucket.sums = ()  # the gradients own the memory now

    def _fetch(self, bucket: Bucket) -> None:
        """Bring the sum of a bucket to the device."""
        flat = fetch_sum(bucket, was_folded=len(self._blocks) == 1)
        if self.probe is not None and self.probe.wants_sums:
            self.probe.add_sums(bucket.indices, flat.split(bucket.sizes))  # type: ignore[no-untyped-call]
        bucket.sums = unflatten_sum(flat, bucket)

    # --- calls to the probe ---

    def begin_step(self, step: int) -> None:
        if self.probe is not None:
            self.probe.begin(step)

    def record_samples(self, samples: int, scale: Callable[[], float] = lambda: 1.0) -> None:
        """Tell the probe that a replica computes on this many samples in all; `scale` returns the factor of its loss."""
        if self.probe is not None and self.probe.wants_parts:
            self.probe.record_samples(samples, scale())

    def _gradients_complete(self, probe: GradientProbe) -> None:
        """Tell the probe that the last replica hosted here is done."""
        if not self.wanted:
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None:
                    probe.add_gradient(index, in_memory_order(parameter, parameter.grad.detach()))
        probe.gradients_complete()

    def sum_arrived(self, index: int) -> None:
        """Show the probe the sum of a parameter's gradients, before anybody has touched it."""
        if self.probe is not None and self.probe.wants_sums:
            place = self._slots[index]
            self.probe.add_sum(index, place.bucket.total[place.begin : place.end])

    def sums_complete(self) -> None:
        if self.probe is not None:
            self.probe.sums_complete()


# --- starting a sum ---


def sum_bucket(engine: Engine, blocks: tuple[int, ...], bucket: Bucket) -> Handle:
    """Start the sum of a bucket over all replicas, of which rank r hosts `blocks[r]`."""
    if len(bucket.parts) == 1 and max(blocks) == 1:
        return engine.all_reduce(bucket.name, bucket.total)
    return engine.all_reduce(bucket.name, bucket.total, contributions=bucket.parts, parts=blocks)


def sum_unit(engine: Engine, blocks: tuple[int, ...], config: SyncConfig, unit: UnitBuffer) -> Handle:
    """Start the sum of a unit. (On CUDA this is called later, when there may be another view already.)"""
    plain = len(unit.parts) == 1 and max(blocks) == 1
    if config.mode == "baseline":
        if not plain:
            raise TrainError("sync='baseline' takes one replica per worker: start as many workers as replicas")
        return notify_pull.all_reduce(engine, unit.name, unit.total, unit.portion)
    return engine.all_reduce(
        unit.name,
        unit.total,
        priority=unit.priority,
        portion=unit.portion,
        prompt=True,
        contributions=None if plain else unit.parts,
        parts=None if plain else blocks,
    )
