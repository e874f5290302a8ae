"""Sums of gradients of replicas in several workers: buckets in memory that the engine sums while backward goes on.

A bucket, or a unit of one, is taken when the hook on the parameter whose gradient usually comes last finds all gradients
there, and at the latest when backward is over. In the order "ddp" each hosted replica is an operand. In the order "tree" the
sums of the largest subtrees of this worker's block are, so sets of gradients are added on their device as turns end, and
little is left to send. On CUDA the operands leave the device on a stream beside the compute, the engine begins with a sum as
soon as they have arrived, and the sum comes back on another stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from pliant.comm.handle import Handle
from pliant.comm.order import Order, subtrees
from pliant.errors import TrainError
from pliant.train import notify_pull
from pliant.train.bucket_layout import BucketLayout, in_memory_order, parameter_views
from pliant.train.buckets import (
    DeviceCopier,
    UnitBuffer,
    allocate_buckets,
    cut_unit_buffers,
    flatten_set,
    whole_units,
)
from pliant.train.gradient_folds import GradientSet, SetAdder, count_merges, own_memory

if TYPE_CHECKING:
    from pliant.comm.engine import Engine
    from pliant.train.gradient_probe import GradientProbe
    from pliant.train.group_path import GroupPath
    from pliant.train.sync import SyncConfig

SMALL_ELEMENTS = 1 << 14
"""Gradients with fewer elements on average are copied by one call and scaled together; larger ones one by one, which reads
them only once."""


class BucketSums:
    """The buckets of one view, and their sums."""

    def __init__(
        self,
        engine: Engine,
        blocks: tuple[int, ...],
        order: Order,
        parameters: Sequence[torch.nn.Parameter],
        layout: BucketLayout,
        *,
        prefix: str,
        keeps_on_host: bool,
        probe: GradientProbe | None,
        copier: DeviceCopier,
        group: GroupPath | None = None,
    ) -> None:
        self.handles_updates = False
        """Whether each sum is applied when its parameter is used."""
        self._engine, self._blocks, self._order = engine, blocks, order
        self._parameters, self._probe, self._copier = parameters, probe, copier
        self._group, self._is_grouped = group, False
        """Sums whole buckets in the place of the engine, and whether it does so in this pass."""
        self._on_device = parameters[0].is_cuda
        begin, hosted, self._scale = sum(blocks[: engine.rank]), blocks[engine.rank], 1.0 / sum(blocks)
        block = range(begin, begin + hosted)
        trees = subtrees(block.start, block.stop, sum(blocks)) if order == "tree" else []
        self._adds = order == "tree" and len(trees) < hosted and not keeps_on_host
        """Whether replicas are added before they leave the device."""
        merges = count_merges(block, sum(blocks)) if order == "tree" else [0] * hosted
        self._merges = merges if self._adds else [0] * hosted
        self._host_merges = [0] * hosted if self._adds else merges
        """How many additions end with each hosted replica: where its gradients are, and after all of them are on the host."""
        ends = [tree.stop - 1 - begin for tree in trees] if self._adds else [*range(hosted)]
        self._part_of = {slot: part for part, slot in enumerate(ends)}
        """The operand that is complete with the turn of a hosted replica."""
        self._last = hosted - 1
        self.buckets = allocate_buckets(layout, parameters, engine, len(ends), prefix=prefix, on_device=self._on_device)
        self.units, self._is_whole = whole_units(self.buckets), True
        self._triggers: dict[int, UnitBuffer] = {}
        self._config: SyncConfig | None = None
        self._adder = SetAdder(())
        self._fetching = threading.Lock()
        self._slot = 0

    # --- before a step ---

    def plan(self, config: SyncConfig, wanted: Sequence[int]) -> None:
        """Decide how the sums of the next step travel. `wanted` is the order in which parameters are wanted."""
        self.handles_updates = config.mode != "fifo"
        if self.handles_updates and (self._is_whole or self._config != config):
            self.units, self._is_whole = cut_unit_buffers(self.buckets, config, self._engine.num_lanes), False
        elif not self.handles_updates and not self._is_whole:
            self.units, self._is_whole = whole_units(self.buckets), True
        self._config = config
        if self.handles_updates:
            places = {index: place for place, index in enumerate(wanted)}
            for unit in self.units:
                first = min(places.get(index, len(self._parameters)) for index in unit.indices)
                unit.priority = first if config.mode == "priority" else 0

    def choose_triggers(self, arrival: Mapping[int, int]) -> Collection[int]:
        """Choose the parameter of each unit whose hook finds the unit complete; return them all. `arrival` says in which
        order gradients have come before."""
        for unit in self.units:
            unit.last = max(unit.indices, key=lambda index: arrival.get(index, -1)) if arrival else unit.indices[-1]
        self._triggers = {unit.last: unit for unit in self.units}
        return self._triggers.keys()

    # --- turns ---

    def begin_turn(self, slot: int) -> None:
        self._slot = slot
        if slot == 0:
            self._is_grouped = self._group is not None and self._group.in_use and not self.handles_updates
            if self._group is not None:
                self._group.clear()
        for unit in self.units:
            unit.is_taken, unit.handle = False, None
            if slot == 0:
                unit.sets, unit.flat, unit.fetched = [], None, None

    def unit_at(self, index: int) -> UnitBuffer | None:
        """Return the unit whose gradients usually are complete with that of this parameter, if it leaves in this turn."""
        if self._is_grouped:
            return self._triggers.get(index)
        leaves = self._slot in self._part_of if self._on_device else self._slot == self._last
        return self._triggers.get(index) if leaves else None

    def take(self, unit: UnitBuffer, gradients: GradientSet) -> None:
        """Take the gradients of the present replica. Those that were not used are zeros."""
        unit.is_taken = True
        if self._is_grouped:
            self._give_to_group(unit, gradients)
            return
        part = self._part_of.get(self._slot)
        if self._adds:
            own_memory(gradients)
            self._adder.scale(gradients, self._scale)
            self._show(unit, lambda: list(map(in_memory_order, unit.parameters, gradients)))
            for _ in range(self._merges[self._slot]):
                left = unit.sets.pop()
                self._adder.add(left, gradients)
                gradients = left
            if part is None:
                unit.sets.append(gradients)
                return
        assert part is not None, "without additions every replica is an operand"
        if self._on_device:
            self._copy_from_device(unit, gradients, part)
        else:
            self._copy(unit, gradients, part)
            if self._slot == self._last:
                unit.handle = self._submit(unit)

    def _give_to_group(self, unit: UnitBuffer, gradients: GradientSet) -> None:
        assert self._group is not None, "it is in use"
        flat = flatten_set(unit, gradients).mul_(self._scale)
        self._show(unit, lambda: _split(flat.clone(), unit))  # the group may add to it
        self._group.add(self.units.index(unit), unit.name, flat)

    def _copy(self, unit: UnitBuffer, gradients: GradientSet, part: int) -> None:
        """Copy the operand to its place, and scale it if it is a replica's."""
        memory, views = unit.parts[part], unit.views[part]
        if self._adds:
            torch._foreach_copy_(views, gradients)
            return
        if len(memory) < SMALL_ELEMENTS * len(views):
            torch._foreach_copy_(views, gradients)
            torch.mul(memory, self._scale, out=memory)
        else:
            for view, gradient in zip(views, gradients, strict=True):
                torch.mul(gradient, self._scale, out=view)
        self._show(unit, lambda: _split(memory, unit))

    def _copy_from_device(self, unit: UnitBuffer, gradients: GradientSet, part: int) -> None:
        flat = flatten_set(unit, gradients)
        if not self._adds:
            flat.mul_(self._scale)
            self._show(unit, lambda: _split(flat, unit))
        unit.copied = self._copier.copy_to_host(flat, unit.parts[part])
        if self._slot == self._last:
            unit.handle = handle = self._engine.after(unit.copied, partial(self._submit, unit), unit.name)
            if not self.handles_updates:
                unit.flat = flat
                handle.add_done_callback(partial(self._fetch_early, unit, handle))

    def _show(self, unit: UnitBuffer, flats: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Show the scaled gradients of a replica to the probe."""
        if self._probe is not None and self._probe.wants_parts:
            if self._on_device:
                self._probe.add_gradients(unit.indices, flats())
            else:
                for index, flat in zip(unit.indices, flats(), strict=True):
                    self._probe.add_gradient(index, flat)

    # --- sums ---

    def _submit(self, unit: UnitBuffer) -> Handle:
        """Start the sum of a unit. (On CUDA this is called later, when there may be another view already.)"""
        is_plain, config = max(self._blocks) == 1, self._config
        if config is not None and config.mode == "baseline":
            if not is_plain:
                raise TrainError("sync='baseline' takes one replica per worker: start as many workers as replicas")
            assert unit.portion is not None, "buckets are cut"
            return notify_pull.all_reduce(self._engine, unit.name, unit.total, unit.portion, self._order)
        return self._engine.all_reduce(
            unit.name,
            unit.total,
            priority=unit.priority,
            portion=unit.portion,
            prompt=unit.portion is not None,
            contributions=None if is_plain else self._operands(unit),
            parts=None if is_plain else self._blocks,
            order=self._order,
        )

    def _operands(self, unit: UnitBuffer) -> list[torch.Tensor]:
        """Return what this worker contributes: its replicas one by one, or the sums of its largest subtrees."""
        if self._adds or not any(self._host_merges):
            return unit.parts
        found: list[torch.Tensor] = []
        for part, merges in zip(unit.parts, self._host_merges, strict=True):
            found.append(part)
            for _ in range(merges):
                right = found.pop()
                found[-1].add_(right)
        return found

    def wait(self) -> None:
        """Wait for all sums. Raises CommError if they cannot be had."""
        if self._is_grouped:
            assert self._group is not None, "it is in use"
            for number, unit in enumerate(self.units):
                unit.flat = self._group.wait(number)
                if self._probe is not None and self._probe.wants_sums:
                    self._show_sums(self._probe, unit)
                unit.sums = parameter_views(unit.flat, unit.parameters)
            return
        for unit in self.units:
            assert unit.handle is not None, "every unit was handed in"
            unit.handle.wait()
            if self._on_device:
                self._fetch(unit, unit.handle)
        for unit in self.units:
            if self._on_device:
                assert unit.flat is not None
                assert unit.fetched is not None, "it was fetched"
                torch.cuda.current_stream(unit.flat.device).wait_event(unit.fetched)
            if self._probe is not None and self._probe.wants_sums:
                self._show_sums(self._probe, unit)
            if self._on_device:
                assert unit.flat is not None
                unit.sums = parameter_views(unit.flat, unit.parameters)

    def _show_sums(self, probe: GradientProbe, unit: UnitBuffer) -> None:
        flats = _split(unit.flat if unit.flat is not None else unit.total, unit)
        if self._on_device:
            probe.add_sums(unit.indices, flats)
        else:
            for index, flat in zip(unit.indices, flats, strict=True):
                probe.add_sum(index, flat)

    def forget_sums(self) -> None:
        """Let go of the sums on the device: the gradients own the memory now."""
        if self._on_device or self._is_grouped:
            for unit in self.units:
                unit.sums, unit.flat, unit.fetched = (), None, None

    def _fetch_early(self, unit: UnitBuffer, handle: Handle) -> None:
        """Bring a sum back as soon as it is there. Called on the engine's thread."""
        if handle.error is None:
            with contextlib.suppress(RuntimeError):  # the thread that waits tries again, and shows the error
                self._fetch(unit, handle)

    def _fetch(self, unit: UnitBuffer, handle: Handle) -> None:
        """Bring the sum that `handle` stands for back, unless that was done, or the unit is in a later pass."""
        with self._fetching:
            if unit.handle is handle and unit.fetched is None and unit.flat is not None and unit.copied is not None:
                unit.fetched = self._copier.copy_to_device(unit.total, unit.flat, unit.copied)

    def total_of(self, index: int) -> torch.Tensor:
        """Return the sum of a parameter's gradients, flat."""
        for unit in self.units:
            if index in unit.indices:
                return _split(unit.total, unit)[unit.indices.index(index)]
        raise AssertionError("every parameter has a unit")


def _split(flat: torch.Tensor, unit: UnitBuffer) -> Sequence[torch.Tensor]:
    """Return the elements of each parameter."""
    return torch.split(flat, [parameter.numel() for parameter in unit.parameters])
