"""The gradients of the hosted replicas, from backward to their sum over all replicas of the job.

Gradients are scaled by 1/N (by multiplication, as DDP does) and added in the order of the job. There are three ways to a sum.
Where this worker hosts all replicas, a hook on a single parameter tells that there was a backward. When it is over, all
gradients are taken at once and added on their device (`gradient_folds`). Else a hook on one parameter of each bucket tells
that it is complete, and the engine sums it while backward goes on (`bucket_sums`); or a process group of torch does, where
every worker has a GPU of its own (`group_path`). All parameters have hooks in the first
turns only, to find the order in which gradients come. A replica has one backward per turn whose gradients are summed; what
would lead to a wrong sum is refused. That is the same in all three ways: when the program calls backward again, or its turn
ends, the gradients tell what the last backward has reached (`backward_calls`).

While gradients of several replicas are summed, `.grad` belongs to the job from a turn's backward to the end of the loop over
the step: it is None after the backward, and the average over all replicas after the loop. The gradients of a single replica
are not touched at all. (docs/training.md says what that means for programs.)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.order import Order, subtrees
from pliant.errors import TrainError, Unsliceable
from pliant.train.bucket_layout import BucketItem, BucketLayout, first_layout, in_memory_order, rebuilt_layout
from pliant.train.bucket_sums import BucketSums
from pliant.train.buckets import FIRST_PRIORITY, DeviceCopier, UnitBuffer
from pliant.train.gradient_folds import GradientFold, GradientSet, SetAdder, make_fold, own_memory
from pliant.train.gradient_probe import GradientProbe
from pliant.train.group_path import GroupPath
from pliant.train.pending import Pending, PendingSum
from pliant.train.sync import SyncConfig


class GradientReducer:
    """Collects the gradients of `parameters` and sums them over N replicas: turn by turn into buckets."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        num_replicas: int,
        *,
        order: Order = "ddp",
        keeps_on_host: bool = False,
        find_unused: bool = False,
        cap_bytes: int | None = None,
        always_sums: bool = False,
        prefix: str = "",
        before_backward: Callable[[], set[int]] = set,
        group: GroupPath | None = None,
    ) -> None:
        """`order` is "ddp" or "tree". `keeps_on_host`: between turns, gradients of a GPU are kept in host memory."""
        self.order = order
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_replicas = num_replicas
        self.accumulates = False
        """Whether gradients only accumulate in `.grad`; set by `no_sync`."""
        self.wanted = num_replicas > 1 or always_sums
        """Whether there is anything to sum. The gradients of a single replica stay where backward puts them."""
        self.probe: GradientProbe | None = None
        """Is shown gradients and sums; set it before the first view."""
        self.ready_order: list[int] = []
        """The order in which the gradients of the last complete backward came."""
        self._handed_in = False
        self.group = group
        self._before_backward = before_backward
        self._prefix = prefix
        self._bases: list[torch.Tensor | None] | None = None
        """The gradients with which every turn of the pass begins; None if there are none."""
        self._has_carried = self._clears_late = self._leaves_gradients = False
        """Whether a step has ever added to the gradients of earlier ones, whether the program has cleared gradients at the
        beginning of a step, and whether the last step has left any."""
        self._in_pass = False
        """Whether a pass has begun that does not count yet: the parameters have gradients of turns."""
        self.is_clean = False
        """Whether it is known that no parameter has a gradient."""
        self._find_unused, self._cap_bytes = find_unused, cap_bytes
        self._items = [BucketItem((p.dtype, p.device), p.numel() * p.element_size()) for p in self.parameters]
        self._engine: Engine | None = None
        self._blocks: tuple[int, ...] = ()
        self._on_device = self.parameters[0].is_cuda
        self._keeps_on_host = keeps_on_host and self._on_device
        self._adder = SetAdder(self.parameters)
        self._fold: GradientFold | None = None
        """Adds the gradients if this worker hosts all replicas."""
        self._sentinel = 0
        """The parameter whose hook tells that there was a backward, if this worker hosts all replicas."""
        self._marks: list[tuple[torch.Tensor, int] | None] | None = None
        """The gradients of all parameters, and their versions, before what is to be noticed; None if there were none."""
        self._copier = DeviceCopier()
        self._sums: BucketSums | None = None
        """Sums the gradients if other workers host replicas, too."""
        self._arrival: dict[int, int] = {}
        """The place of each parameter in the order in which gradients have come in the first turn."""
        self._observed: list[int] | None = None
        """The parameters whose gradients have come in this backward; None if most have no hook."""
        self._retired: list[tuple[Engine, BucketSums | None]] = []
        self._expecting = self._queued = self._has_call = False
        """Whether the backward that counts is still to come; whether one is running that has reached a hook; whether the
        turn has called backward since gradients were last noticed."""
        self._halted = False
        """Whether the step is torn. Others may still read its memory, so that is left alone."""
        self._resting = True
        """Whether no replica has its turn. Backwards are then the program's own affair."""
        self._unseen: set[int] = set()
        """Parameters that the forward before this backward was not seen to use."""
        self._slot = 0
        self._scale = 1.0
        self._is_last = False
        self._used: torch.Tensor | None = None
        """Which parameters any replica hosted here has used; None if all must be used."""
        self._used_before: set[int] = set()
        """Those that this replica has used in backwards whose gradients only accumulate."""
        self._used_handle: Handle | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        self.use_layout(None)

    def remove_hooks(self) -> None:
        """Remove the hooks of the parameters, until the next turn begins."""
        if self._hooks:
            self._use_hooks(())

    def close(self) -> None:
        self.remove_hooks()
        if self.group is not None:
            self.group.close()

    def _use_hooks(self, indices: Collection[int]) -> None:
        """Have hooks on these parameters, and on no others."""
        for index in self._hooks.keys() - set(indices):
            self._hooks.pop(index).remove()
        for index in indices:
            if index not in self._hooks:
                hook = partial(self._collect, index)
                self._hooks[index] = self.parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # --- the layout ---

    def use_layout(self, layout: BucketLayout | None) -> None:
        """Use L2 as another worker or a checkpoint has it. None goes back to L1, as a restarted DDP would."""
        self.waits_for_order = layout is None and self.wanted and not self._find_unused
        """Whether L1 is still in use, to be replaced when the order of replica 0 is known."""
        self.layout = layout or first_layout(self._items, find_unused=self._find_unused, cap_bytes=self._cap_bytes)
        self._drop_memory()

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Replace L1 by L2 for good."""
        self._sentinel = ready_order[-1]  # so that its hook comes when backward is nearly over
        self.use_layout(rebuilt_layout(self._items, ready_order, cap_bytes=self._cap_bytes))
        self._left_layout = True

    _left_layout = False
    """Whether L1 was replaced in the step in progress."""

    def disable_sums(self) -> None:
        """Leave gradients where backward puts them."""
        self.wanted = self.waits_for_order = False

    # --- views and turns ---

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Use this engine from now on: rank r hosts `blocks[r]` replicas."""
        if self._engine is not None and self._engine.may_be_written_to:
            # A worker that was given up for its silence may only be stopped. When it goes on, it finishes its part of
            # an old sum, into this memory, which must therefore never be used again.
            self._retired.append((self._engine, self._sums))
        self._drop_memory()
        self._engine, self._blocks = engine, tuple(blocks)
        self._expecting = self._halted = False
        if self.group is not None:
            self.group.enter_view(engine, self._blocks)
        if self.probe is not None:
            self.probe.enter_view(engine, self._blocks)

    def _drop_memory(self) -> None:
        """Free what gradients were summed in, once no copy between host and device uses it: others may get the memory."""
        self._copier.wait()
        if self._fold is not None and self._keeps_on_host:
            torch.cuda.current_stream(self.parameters[0].device).synchronize()
        self._sums = self._fold = None

    def missing_memory(self, hosted: range, num_replicas: int) -> list[tuple[int, torch.dtype]]:
        """Return which tensors on the host the buckets of a coming view need, beside those of the present one. There this
        worker hosts the replicas `hosted` of `num_replicas`, and other workers the rest."""
        is_added = self.order == "tree" and not self._keeps_on_host
        operands = len(subtrees(hosted.start, hosted.stop, num_replicas)) if is_added else len(hosted)
        needed = Counter[tuple[int, torch.dtype]]()
        for indices in self.layout.buckets if self.wanted else ():
            length = sum(self.parameters[index].numel() for index in indices)
            needed[length, self.parameters[indices[0]].dtype] += operands + (operands > 1)
        for bucket in self._sums.buckets if self._sums is not None else ():
            for memory in {id(each): each for each in (*bucket.parts, bucket.total)}.values():
                needed[memory.numel(), memory.dtype] -= 1
        return list(needed.elements())

    @property
    def _is_alone(self) -> bool:
        """Whether this worker hosts all replicas."""
        return len(self._blocks) == 1

    @property
    def _is_summing(self) -> bool:
        """Whether gradients of several replicas are summed."""
        return self.wanted and (self.num_replicas > 1 or not self._is_alone)

    def _have_memory(self, engine: Engine) -> None:
        """Have what the gradients of this view are summed in."""
        if self._sums is not None or self._fold is not None or not self._is_summing:
            return
        if self._is_alone:
            memory = partial(_pinned_memory, engine) if self._keeps_on_host else None
            self._fold = make_fold(self.order, self.parameters, self.layout, self.num_replicas, memory)
            return
        self._sums = BucketSums(
            engine,
            self._blocks,
            self.order,
            self.parameters,
            self.layout,
            prefix=f"grad:{self._prefix}{1 if self.waits_for_order else 2}",
            keeps_on_host=self._keeps_on_host,
            probe=self.probe,
            copier=self._copier,
            group=self.group,
        )

    def plan_step(self, config: SyncConfig, order: Sequence[int]) -> None:
        """Decide how the sums of the step that begins now travel. `order` is the order in which they are wanted."""
        engine = self._engine
        assert engine is not None, "enter_view() comes first"
        self._have_memory(engine)
        if self._sums is not None:
            self._sums.plan(config, order)

    def begin_pass(self, *, cleared: Mapping[int, bool] = MappingProxyType({}), begins_step: bool = True) -> None:
        """Remember the gradients that there are: as with DDP, every replica adds its own to them.

        `cleared` holds the parameters whose last sums are on their way, and whose gradients the program has cleared
        already: to None if true, else to zeros.
        """
        self._bases, self._in_pass = None, True
        if not cleared and self._before_backward is set and not has_any_gradient(self.parameters):
            has_gradients = False
        else:
            with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
                has_gradients = bool(cleared) or has_any_gradient(self.parameters)
                if has_gradients and (self._is_summing or not self._is_alone):
                    bases = [self._base(index, parameter, cleared) for index, parameter in enumerate(self.parameters)]
                    self._bases = bases if any(base is not None for base in bases) else None
                    has_gradients = self._bases is not None
        self.is_clean = not has_gradients
        if begins_step and not cleared:
            if has_gradients:
                self._has_carried = True
            elif self._leaves_gradients:
                self._clears_late = True

    def begin_clean_pass(self, begins_step: bool) -> bool:
        """Begin a pass of the only replica, if no parameter has a gradient. Nothing has to be remembered of it then."""
        for gradient in map(_gradient_of, self.parameters):
            if gradient is not None:
                return False
        if self._hooks:
            self.remove_hooks()
        self._marks = None  # they hold the gradients of a step that was taken in the general way
        if self._leaves_gradients and begins_step:
            self._clears_late = True
        return True

    def begin_turn_of_clean_pass(self) -> None:
        """Begin the turn of a pass that has begun without gradients, though there may be some now."""
        self._bases, self._in_pass, self.is_clean = None, True, True
        self.begin_turn(0)

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
        if self._before_backward is not set:  # sums may be on their way
            with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
                self._leaves_gradients = self.parameters[0].grad is not None
        else:  # one of them tells enough: gradients that travel with the state and are cleared then do no harm
            self._leaves_gradients = self.parameters[0].grad is not None
        if self._left_layout:
            self._left_layout = False
            if self._engine is not None and not self._on_device:
                self._engine.release_unused()  # the buckets of L1, which nobody needs again

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
        self._have_memory(engine)
        if self._is_alone and not self._is_summing:
            self._marks = None if self.is_clean else self.versions()  # nothing is touched: no turn is taken again
        else:
            self._reset_gradients()
        self.is_clean = False
        self._use_hooks(self._hooks_of_turn(slot))
        if self._fold is not None and slot == 0:
            self._fold.clear()
        if self._sums is not None:
            self._sums.begin_turn(slot)
        self._slot, self._is_last = slot, slot == self._blocks[engine.rank] - 1
        self._scale = 1.0 / self.num_replicas
        if self._find_unused and self._is_summing and slot == 0:
            self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)
        self._unseen, self._used_before = set(), set()
        self._expecting, self._queued, self._resting, self._handed_in = True, False, False, False
        self._has_call = False

    def _hooks_of_turn(self, slot: int) -> Collection[int]:
        """Return the parameters that need a hook in this turn: all if the order of their gradients is to be found; else one
        for each part that travels, or a single one."""
        triggers = self._sums.choose_triggers(self._arrival) if self._sums is not None else (self._sentinel,)
        observes = (self.waits_for_order and slot == 0) or (self._sums is not None and not self._arrival)
        self._observed = [] if observes else None
        return range(len(self.parameters)) if observes else triggers

    def _reset_gradients(self) -> None:
        """Begin with the gradients of earlier passes, also where they are not summed: this turn may be taken again. One
        whose sum is on its way is cleared once more after its update."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            if self._bases is None:
                if not self.is_clean:
                    for parameter in self.parameters:
                        parameter.grad = None
                self._marks = None
                return
            for parameter, base in zip(self.parameters, self._bases, strict=True):
                parameter.grad = None if base is None else base.clone()
        self._marks = self.versions()

    # --- what happens to gradients without a hook ---

    def versions(self) -> list[tuple[torch.Tensor, int] | None]:
        """Return all gradients and their versions, which every backward changes."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            found = [parameter.grad for parameter in self.parameters]
        return [None if gradient is None else (gradient, gradient._version) for gradient in found]

    def changed_since(self, marks: Sequence[tuple[torch.Tensor, int] | None] | None) -> list[int]:
        """Return the parameters whose gradients have come, or have changed, since `versions` returned these marks; None
        stands for no gradients."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            found = [parameter.grad for parameter in self.parameters]
        if marks is None:
            return [index for index, gradient in enumerate(found) if gradient is not None]
        return [index for index, pair in enumerate(zip(found, marks, strict=True)) if _differs(*pair)]

    def _changed(self) -> list[int]:
        """Return the parameters whose gradients have come, or have changed, since the marks were made."""
        return self.changed_since(self._marks)

    def _notice(self) -> None:
        """Notice a backward that has not reached a parameter with a hook."""
        if not self._resting and not self._halted and not self._queued:
            changed = self._changed()
            if changed and self._expecting:
                self._prepare_backward()
                self._backward_done()
            elif changed and (self._has_call or self._is_summing):
                self.refuse_second_backward(changed[0])
            elif changed:  # by the program, such as clipping: gradients that are not summed are its own
                self._marks = self.versions()

    def expect_backward(self) -> None:
        """The program calls backward: notice the one before, if it was in this turn."""
        if not self.accumulates and not self._resting:
            if self._has_call or self._handed_in:
                self._notice()
            self._has_call = True

    @property
    def handed_in(self) -> bool:
        """Whether the replica whose turn it is has had the backward whose gradients are summed."""
        if not self.accumulates:
            self._notice()
        return self._handed_in

    @property
    def no_sync(self) -> bool:
        """While true, gradients only accumulate in `.grad`."""
        return self.accumulates

    @no_sync.setter
    def no_sync(self, is_on: bool) -> None:
        if is_on and not self.accumulates:
            self._notice()
        self.accumulates = is_on
        if not is_on and not self._resting:
            changed = self._changed() if self._handed_in or self._used is not None else []
            if changed and self._handed_in and not self._halted:
                self.refuse_second_backward(changed[0])
            if self._used is not None:
                self._used_before.update(changed)
            self._marks, self.is_clean = self.versions(), False

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

    def _collect(self, index: int, _: torch.nn.Parameter) -> None:
        """Take note of a complete gradient. Called for few parameters, after the first turn."""
        if self.accumulates or self._resting or self._halted:
            return
        if not self._queued:
            if not self._expecting:
                self.refuse_second_backward(index)
            self._prepare_backward()
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
        if self._observed is not None:
            if index in self._observed:
                self._refuse_twice(index)
            self._observed.append(index)
        unit = self._sums.unit_at(index) if self._sums is not None else None
        if unit is not None and not unit.is_taken:
            self._take_unit(unit)

    def _prepare_backward(self) -> None:
        """Have all sums of the step before. Parameters that nobody was seen to use must get no gradient."""
        if self._before_backward is set:
            return  # sums are never deferred
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            for index in self._changed():
                if self.parameters[index].__class__ is Pending:
                    self._refuse_unseen(index)
            self._unseen = self._before_backward()
            for index in self._unseen:
                gradient = self.parameters[index].grad
                if gradient is not None:  # cleared to zeros, after its update
                    self._marks = [None] * len(self.parameters) if self._marks is None else self._marks
                    self._marks[index] = (gradient, gradient._version)

    def _refuse_unseen(self, index: int) -> NoReturn:
        raise TrainError(
            f"{self.names[index]!r} got a gradient, but its last update was still under way when it was used: with "
            "sync='priority' every use of a parameter must go through torch's Python functions, which compiled or scripted "
            "code does not. Use sync='fifo'"
        )

    def _refuse_twice(self, index: int) -> NoReturn:
        raise Unsliceable(
            f"{self.names[index]!r} got its gradient twice in one backward, as with re-entrant checkpointing: "
            "use torch.utils.checkpoint with use_reentrant=False"
        )

    def refuse_second_backward(self, index: int) -> NoReturn:
        """Raise TrainError: a turn has had two backwards, of which the second has reached this parameter."""
        raise TrainError(
            f"a second backward reached {self.names[index]!r} in one turn: a turn has one backward whose gradients are "
            "summed. Add the losses and call backward once; or put `with job.no_sync():` around all but the last; or, for a "
            "second sum, iterate over the step once more"
        )

    def _refuse_sparse(self, index: int) -> NoReturn:
        raise Unsliceable(
            f"{self.names[index]!r} has a sparse gradient, which has no fixed place in a bucket: use sparse=False"
        )

    def _backward_done(self) -> None:
        with torch.no_grad():
            if self._fold is not None:
                self._take_all(self._fold)
            elif self._sums is not None:
                self._take_rest(self._sums)
            elif self.wanted:
                self._check_unused([i for i, parameter in enumerate(self.parameters) if parameter.grad is None])
            if self._is_last:
                self._end_turns()
        self._marks = None if self._is_summing else self.versions()
        if self._observed:
            self.ready_order = self._observed
            self._arrival = self._arrival or {index: place for place, index in enumerate(self._observed)}
        self._expecting = self._queued = self._has_call = False
        self._handed_in = True

    def contribute_zeros(self) -> None:
        """Let the replica whose turn it is contribute zeros."""
        if self._is_summing:
            with torch.no_grad():
                if self._fold is not None:
                    self._add_to(self._fold, [torch.zeros_like(parameter) for parameter in self.parameters])
                elif self._sums is not None:
                    for unit in self._sums.units:
                        self._sums.take(unit, [torch.zeros_like(parameter) for parameter in unit.parameters])
                if self._is_last:
                    self._end_turns()
            self.is_clean = False  # the program may have had backwards without sums
        self._expecting = False
        self._handed_in = True

    def _end_turns(self) -> None:
        """The last replica hosted here has handed in its gradients."""
        if self._used is not None and self._sums is not None:
            assert self._engine is not None
            self._used_handle = self._engine.all_reduce(
                f"grad:{self._prefix}used", self._used, op="max", order="fast", priority=FIRST_PRIORITY
            )
        if self.probe is not None and self.probe.wants_parts:
            if not self._is_summing:
                for index, parameter in enumerate(self.parameters):
                    if parameter.grad is not None:
                        self.probe.add_gradient(index, in_memory_order(parameter, parameter.grad.detach()))
            self.probe.gradients_complete()

    # --- all replicas are in this worker ---

    def _take_all(self, fold: GradientFold) -> None:
        """Take the gradients of all parameters, and add them to those of the replicas before."""
        gradients = self._take(range(len(self.parameters)), self.parameters)
        self.is_clean = True
        own_memory(gradients)
        self._adder.scale(gradients, self._scale)
        self._add_to(fold, gradients)

    def _take(self, indices: Sequence[int], parameters: Sequence[torch.nn.Parameter]) -> GradientSet:
        """Take the gradients of these parameters, with zeros for those that have none. As with DDP, one that this backward has
        not reached may still have a gradient: of earlier passes, or of backwards in `no_sync`."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            found = [parameter.grad for parameter in parameters]
        has_come = self._has_come(indices, found)
        if not all(has_come):
            self._check_unused([index for index, has in zip(indices, has_come, strict=True) if not has])
        if self._used is not None:
            self._used[list(indices)] |= torch.tensor(
                [has or index in self._used_before for index, has in zip(indices, has_come, strict=True)]
            )
        gradients: GradientSet = []
        for index, parameter, gradient, has in zip(indices, parameters, found, has_come, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif has and index in self._unseen:
                self._refuse_unseen(index)
            elif gradient.is_sparse:
                self._refuse_sparse(index)
            elif gradient.requires_grad:  # the program may still differentiate it
                gradient = gradient.detach().clone()
            gradients.append(gradient)
            parameter.grad = None
        return gradients

    def _has_come(self, indices: Sequence[int], found: Sequence[torch.Tensor | None]) -> list[bool]:
        """Return which of these gradients have come in this backward."""
        marks = self._marks
        if marks is None:
            return [gradient is not None for gradient in found]
        return [_differs(gradient, marks[index]) for index, gradient in zip(indices, found, strict=True)]

    def _add_to(self, fold: GradientFold, gradients: GradientSet) -> None:
        if self.probe is not None and self.probe.wants_parts:
            flats = map(in_memory_order, self.parameters, gradients)
            self._show_to(self.probe.add_gradient, self.probe.add_gradients, list(flats))
        fold.add(gradients)

    def _show_to(
        self,
        one: Callable[[int, torch.Tensor], None],
        several: Callable[[Sequence[int], Sequence[torch.Tensor]], None],
        flats: Sequence[torch.Tensor],
    ) -> None:
        """Show flat tensors of all parameters to the probe: at once on a device, where that costs less."""
        if self._on_device:
            several(range(len(flats)), flats)
        else:
            for index, flat in enumerate(flats):
                one(index, flat)

    def _take_sum(self, fold: GradientFold) -> None:
        """Make the sum over all replicas the gradients."""
        totals = fold.take_sum()
        if self.probe is not None and self.probe.wants_sums:
            flats = map(in_memory_order, self.parameters, totals)
            self._show_to(self.probe.add_sum, self.probe.add_sums, list(flats))
        self.sums_complete()
        used = self._used.tolist() if self._used is not None else None
        for index, (parameter, total) in enumerate(zip(self.parameters, totals, strict=True)):
            self._put_sum(index, parameter, total, used)
        self.is_clean = False

    # --- some replicas are in other workers ---

    def _take_unit(self, unit: UnitBuffer) -> None:
        """Take the gradients of a unit while backward goes on, if they are all there."""
        assert self._sums is not None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            if all(self._has_come(unit.indices, [parameter.grad for parameter in unit.parameters])):
                self._sums.take(unit, self._take(unit.indices, unit.parameters))

    def _take_rest(self, sums: BucketSums) -> None:
        """Take what is left when backward is over."""
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of the parameters
            for unit in sums.units:
                for index, parameter in zip(unit.indices, unit.parameters, strict=True):
                    if unit.is_taken and parameter.grad is not None:
                        self._refuse_twice(index)
            rest = [unit for unit in sums.units if not unit.is_taken]
            if rest and not self._find_unused:  # name all that are missing, whatever their units
                came = set(self._changed())
                self._check_unused(sorted(index for unit in rest for index in unit.indices if index not in came))
            for unit in rest:
                sums.take(unit, self._take(unit.indices, unit.parameters))
        self.is_clean = True

    def _check_unused(self, unused: Sequence[int]) -> None:
        """Raise TrainError if all parameters must be used."""
        if unused and not self._find_unused:
            names = ", ".join(repr(self.names[index]) for index in unused[:8])
            raise TrainError(
                f"{len(unused)} parameters got no gradient in this backward ({names}): freeze them with "
                "requires_grad_(False), or pass find_unused_parameters=True to job.wrap as you would to DDP. If another "
                "backward of the same turn reaches them, add the losses and call backward once"
            )

    # --- the sums ---

    @property
    def are_deferred(self) -> bool:
        """Whether each sum is applied when its parameter is used."""
        return self._sums is not None and self._sums.handles_updates

    def pending_sums(self) -> list[PendingSum]:
        """Return what is to be waited for, parameter by parameter. Raises CommError if it is known to fail."""
        used = self._wait_for_used()
        assert self._sums is not None, "only sums over several workers are deferred"
        return [
            PendingSum(
                unit.handle,
                [
                    (i, total if used is None or used[i] else None)
                    for i, total in zip(unit.indices, unit.sums, strict=True)
                ],
            )
            for unit in self._sums.units
            if unit.handle is not None
        ]

    def _wait_for_used(self) -> list[int] | None:
        """Return which parameters any replica has used; None if all must be used."""
        handle, self._used_handle = self._used_handle, None
        found = handle.wait() if handle is not None else None
        return found.tolist() if found is not None else None

    def wait(self) -> None:
        """Wait for all sums and put them into `.grad`. Raises CommError if they cannot be had."""
        if self._fold is not None:
            self._take_sum(self._fold)
            return
        if self._sums is not None:
            self._sums.wait()
        self.sums_complete()
        if self._sums is None:
            return
        used = self._wait_for_used()
        for unit in self._sums.units:
            for index, parameter, total in zip(unit.indices, unit.parameters, unit.sums, strict=True):
                self._put_sum(index, parameter, total, used)
        self._sums.forget_sums()
        self.is_clean = False

    def _put_sum(
        self, index: int, parameter: torch.nn.Parameter, total: torch.Tensor, used: Sequence[int] | None
    ) -> None:
        if used is None or used[index]:
            parameter.grad = total
        else:  # a parameter that no replica has used keeps its gradient, as with DDP
            base = self._bases[index] if self._bases is not None else None
            parameter.grad = None if base is None else base.clone()

    # --- calls to the probe ---

    def begin_step(self, step: int) -> None:
        if self.probe is not None:
            self.probe.begin(step)

    def record_samples(self, samples: int, scale: Callable[[], float] = lambda: 1.0) -> None:
        """Tell the probe that a replica computes on this many samples in all; `scale` returns the factor of its loss."""
        if self.probe is not None and self.probe.wants_parts:
            self.probe.record_samples(samples, scale())

    def sum_arrived(self, index: int) -> None:
        """Show the probe the sum of a parameter's gradients, before anybody has touched it."""
        if self.probe is not None and self.probe.wants_sums and self._sums is not None:
            self.probe.add_sum(index, self._sums.total_of(index))

    def sums_complete(self) -> None:
        if self.probe is not None:
            self.probe.sums_complete()


def _pinned_memory(engine: Engine, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory for fast copies from and to a GPU."""
    memory = engine.empty(length, dtype)
    engine.pin(memory)
    return memory


_gradient_of = operator.attrgetter("grad")


def has_any_gradient(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether one of these parameters has a gradient. (A loop over a `map` takes half as long as `any` with a
    generator.)"""
    for gradient in map(_gradient_of, parameters):  # noqa: SIM110
        if gradient is not None:
            return True
    return False


def _differs(gradient: torch.Tensor | None, mark: tuple[torch.Tensor, int] | None) -> bool:
    """Return whether a gradient has come, or has changed, since the mark was made."""
    if gradient is None:
        return False
    return mark is None or gradient is not mark[0] or gradient._version != mark[1]
