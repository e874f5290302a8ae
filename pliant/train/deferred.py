"""Deferred updates: the program goes on while sums are still on their way (P3's priority propagation).

With `sync="priority"` a parameter whose sum is under way becomes `Pending`. Whoever uses it waits for this one sum, has the
optimizer update this parameter alone, and goes on. The order of these uses is the order in which the sums of the next step
are wanted. Reading an optimizer's state and evaluating the model wait in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from pliant.comm.handle import Handle
from pliant.errors import CommError, EngineClosed, ViewChanged, WorkerLost
from pliant.train import trace
from pliant.train.pending import (
    DeferredStep,
    ParameterGroups,
    Pending,
    PendingSum,
    UndoLog,
    default_modes,
    members_of,
    options_of,
    release_parameter,
    suspend_parameter,
    why_inseparable,
    with_groups,
)

MAX_UPDATED_AT_ONCE = 16
"""The most parameters that are updated at once, if they may have to be restored."""


class GradientCollector(Protocol):
    """Who is told what happens to deferred sums."""

    def sum_arrived(self, index: int) -> None: ...
    def sums_complete(self) -> None: ...
    def halt(self) -> None: ...


def is_survivable(error: CommError) -> bool:
    """Return whether a new view cures this error."""
    return isinstance(error, WorkerLost | ViewChanged | EngineClosed)


@dataclass(slots=True)
class WaitTotals:
    """How long the program has waited for the network."""

    count: int = 0
    seconds: float = 0.0
    until_s: float = 0.0
    """When the last wait ended, by time.monotonic()."""

    def add(self, began_s: float, ended_s: float) -> None:
        self.count += 1
        self.seconds += ended_s - began_s
        self.until_s = ended_s


@dataclass(slots=True, eq=False)
class DeferredUpdates:
    """The parameters of a job between the sums of one step and their use in the next. Used by the program's thread."""

    parameters: Sequence[Parameter]
    names: Sequence[str]
    can_undo: bool
    """Whether a step may have to be undone. Its parameters are then saved until all of its sums have arrived."""
    notify: Callable[[str], None]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    stall_watch: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    """Wraps waits, for the stall detector."""
    lost: CommError | None = None
    """Why a sum of the last step will never come; the step has to be taken back."""
    waits: WaitTotals = field(default_factory=WaitTotals)
    order: list[int] = field(default_factory=list)
    """The order in which an observed forward used the parameters."""
    _pending: dict[int, PendingSum] = field(default_factory=dict)
    _sums: dict[int, torch.Tensor | None] = field(default_factory=dict)
    _deferred: dict[int, tuple[DeferredStep, int]] = field(default_factory=dict)
    """For each parameter, the deferred call and the number of its group."""
    _zeroed: dict[int, bool] = field(default_factory=dict)
    """Gradients that the program has cleared before they arrived; the value is `set_to_none`."""
    _open_handles: list[Handle] = field(default_factory=list)
    """The sums that may not have arrived; the last one wanted is at the end."""
    _undo_log: UndoLog = field(init=False)
    _collector: GradientCollector | None = None
    is_deferring: bool = False
    """Whether the sums of this step are applied one by one."""
    _observing: bool = False
    _is_updating: bool = False
    _warned: set[str] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._undo_log = UndoLog(self.optimizers)

    # --- the step's end ---

    def observe(self) -> None:
        """Record the order in which parameters are used from now on, without waiting for anything."""
        self.order = []
        self._observing = True
        for index, parameter in enumerate(self.parameters):
            if parameter.__class__ is Parameter:
                suspend_parameter(parameter, self, index)

    def stop_observing(self) -> None:
        if self._observing:
            self._observing = False
            for parameter in self.parameters:
                release_parameter(parameter)

    def begin(
        self, pending: Sequence[PendingSum], priorities: Sequence[int], collector: GradientCollector | None = None
    ) -> None:
        """Make every use of these parameters wait for their sums. Backward is over, and the sums are on their way.
        `collector` is told about their arrival."""
        self._collector = collector
        wanted = sorted(pending, key=lambda each: min(priorities[index] for index, _ in each.members))
        self._open_handles = [each.handle for each in wanted]
        for each in wanted:
            for index, total in each.members:
                self._pending[index] = each
                self._sums[index] = total
                suspend_parameter(self.parameters[index], self, index)
        self.is_deferring = True
        if self.can_undo:
            self._undo_log.begin()
        else:
            self._undo_log.clear()

    def step(self, optimizer: torch.optim.Optimizer, original: Callable[..., Any], **kwargs: Any) -> Any:
        """Run `optimizer.step()`: now for the parameters whose sums were waited for, for the others when they are used."""
        members = members_of(optimizer)
        if any(id(self.parameters[index]) in members for index in self._deferred):
            self.flush()  # a second step before the first is done
        waiting = any(id(self.parameters[index]) in members for index in self._pending)
        if waiting and (reason := why_inseparable(optimizer)):
            self.warn_once(f"sync: {reason}: all sums are waited for before its step, so priority cannot help")
            self.flush()
            return original(**kwargs)
        if not waiting:
            if members & {id(parameter) for parameter in self.parameters}:
                self.warn_once(
                    "sync: gradients were used between backward and the optimizer's step (clipping, inf checks, ...): that "
                    "needs all sums, so there is a barrier in every step and priority cannot help"
                )
            return original(**kwargs)
        call = DeferredStep(optimizer, options_of(optimizer), optimizer.state)
        self._undo_log.save_state(optimizer)
        at_once, later = self._split(optimizer)
        self._deferred |= {index: (call, place) for index, place in later.items()}
        with self._updating():
            return with_groups(optimizer, at_once, lambda: original(**kwargs))

    def _split(self, optimizer: torch.optim.Optimizer) -> tuple[ParameterGroups, dict[int, int]]:
        """Return the optimizer's groups without the pending parameters, and the group of each of those."""
        number = {id(self.parameters[index]): index for index in self._pending}
        at_once: ParameterGroups = []
        later: dict[int, int] = {}
        for place, group in enumerate(optimizer.param_groups):
            at_once.append({**group, "params": [each for each in group["params"] if id(each) not in number]})
            later |= {number[id(each)]: place for each in group["params"] if id(each) in number}
        return at_once, later

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Mark that optimizers read their own states."""
        before, self._is_updating = self._is_updating, True
        try:
            yield
        finally:
            self._is_updating = before

    def before_state_access(self) -> None:
        """Wait for all sums: the program is about to read an optimizer's state, or to change it."""
        if self._pending and not self._is_updating:
            self.flush()

    def zero_grad(self, optimizer: torch.optim.Optimizer, original: Callable[..., Any], set_to_none: bool) -> None:
        """Run `optimizer.zero_grad()`: for pending parameters right after their update."""
        at_once, later = self._split(optimizer)
        if any(index not in self._deferred for index in later):
            self.flush()  # cleared before the step: the program wants that
            at_once, later = self._split(optimizer)
        self._zeroed |= dict.fromkeys(later, set_to_none)
        with_groups(optimizer, at_once, lambda: original(set_to_none=set_to_none))

    # --- uses ---

    def use(self, index: int) -> None:
        """Make this parameter ready: something is about to use it."""
        with self._lock:
            if self._observing:
                self.order.append(index)
            pending = self._pending.get(index)
            if pending is None:
                release_parameter(self.parameters[index])
                return
            if self._wait_for(pending):
                whole = self._all_arrived()
                self._apply_sums(list(self._pending) if whole else self._ready_parameters(pending), whole)
                if not self._pending:
                    self._finish()

    def gradient_is_read(self, index: int) -> None:
        """Warn about gradients that are read after the step, which is probably a mistake."""
        if index in self._deferred:
            self.warn_once(
                "sync: gradients are read after the optimizer's step, which waits for all sums, so priority cannot help: to "
                "clear them, use optimizer.zero_grad() instead of model.zero_grad()"
            )

    def _ready_parameters(self, first: PendingSum) -> list[int]:
        """Return the parameters of `first`, and of other sums that have arrived, because each call of an optimizer has
        a cost. The number is limited if they must be saved."""
        ready = dict.fromkeys((index for index, _ in first.members if index in self._pending), None)
        for index, pending in self._pending.items():
            if self.can_undo and len(ready) >= MAX_UPDATED_AT_ONCE:
                break
            if pending.handle.succeeded:
                ready[index] = None
        return list(ready)

    def flush(self) -> None:
        """Wait for all sums, and update all parameters."""
        with self._lock:
            for pending in dict.fromkeys(self._pending.values()):
                if not self._wait_for(pending):
                    return
            if self._pending:
                self._apply_sums(list(self._pending), whole=True)
                self._finish()

    @property
    def is_pending(self) -> bool:
        """Whether sums of the last step may still be on their way."""
        return bool(self._pending)

    @property
    def cleared(self) -> dict[int, bool] | None:
        """The parameters whose sums are on their way, if the program has cleared all of their gradients already: to
        None if true, else to zeros. None if it has not."""
        if any(index not in self._zeroed for index in self._pending):
            return None
        return {index: self._zeroed[index] for index in self._pending}

    def unused_parameters(self) -> set[int]:
        """Return the parameters that nobody has used since the last step, though backward begins: they can have no
        gradient."""
        found = set(self._pending)
        self.flush()
        self.is_deferring = False
        self.stop_observing()
        return found

    def _wait_for(self, pending: PendingSum) -> bool:
        """Wait for a sum. If it will never come, give up the step in progress and return False."""
        began_s = time.monotonic()
        blocked = not pending.handle.done
        try:
            with self.stall_watch(pending.handle.name) if blocked else contextlib.nullcontext():
                pending.handle.wait()
        except CommError as error:
            if not self.can_undo or not is_survivable(error):
                raise
            self.lost = error
            if self._collector is not None:
                self._collector.halt()
            self._abandon()
            return False
        finally:
            if blocked:
                ended_s = time.monotonic()
                self.waits.add(began_s, ended_s)
                if trace.enabled():
                    trace.event("wait", self.names[pending.members[0][0]], began_s, ended_s)
        return True

    def _all_arrived(self) -> bool:
        """Return whether all sums of the step have arrived. Then it cannot be torn any more."""
        while self._open_handles and self._open_handles[-1].succeeded:
            self._open_handles.pop()
        return not self._open_handles

    def _apply_sums(self, indices: Sequence[int], whole: bool) -> None:
        """Make these sums the gradients, and run the deferred updates."""
        began_s = time.monotonic()
        by_call: dict[int, tuple[DeferredStep, list[list[Parameter]]]] = {}
        with torch._C.DisableTorchFunctionSubclass(), self._updating(), default_modes():
            for index in indices:
                parameter = self.parameters[index]
                release_parameter(parameter)
                if (total := self._sums[index]) is not None:
                    if self._collector is not None:
                        self._collector.sum_arrived(index)
                    parameter.grad = total.to(parameter.device, non_blocking=True)
                if index in self._deferred:
                    call, place = self._deferred[index]
                    groups = by_call.setdefault(id(call), (call, [[] for _ in call.options]))[1]
                    groups[place].append(parameter)
                if self.can_undo and not whole:
                    self._undo_log.save(parameter)
            try:
                for call, groups in by_call.values():
                    call.apply(groups)
            except BaseException:
                for index in indices:
                    suspend_parameter(self.parameters[index], self, index)  # not updated: the next use tries again
                raise
            for index in indices:
                del self._pending[index], self._sums[index]
                if self._deferred.pop(index, None) is not None and index in self._zeroed:
                    self._clear(self.parameters[index], self._zeroed.pop(index))
        if by_call and trace.enabled():
            trace.event("apply", self.names[indices[0]] + (" ..." if len(indices) > 1 else ""), began_s)

    def _clear(self, parameter: Parameter, set_to_none: bool) -> None:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()

    def _finish(self) -> None:
        self._open_handles.clear()
        self._undo_log.clear()
        self._zeroed.clear()
        if self._collector is not None:
            self._collector.sums_complete()

    # --- a step that does not count ---

    def _abandon(self) -> None:
        """Release all parameters: their sums will never come, and the program's work until its next batch does not
        count."""
        for index in list(self._pending):
            parameter = self.parameters[index]
            release_parameter(parameter)
            with torch._C.DisableTorchFunctionSubclass(), self._updating(), default_modes():
                if self.can_undo:
                    self._undo_log.save(parameter)  # the program may still change it
                if index in self._zeroed:
                    # It has this replica's gradient, but the program has cleared it.
                    self._clear(parameter, self._zeroed[index])
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # the program's own code may touch it
        self._pending.clear()
        self._sums.clear()
        self._deferred.clear()
        self._zeroed.clear()
        self._observing = False

    def undo_step(self) -> None:
        """Go back to the beginning of the torn step. Only what was updated too early has to change."""
        self._abandon()
        with self._updating():
            self._undo_log.restore()
        self._open_handles.clear()
        self.lost = None

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.notify(text)


# --- gates for optimizer states and evaluation ---


class GatedState(defaultdict[Any, Any]):
    """An optimizer's state. Every access waits until all updates are done."""

    deferred: DeferredUpdates | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


def _gated_method(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def method(self: GatedState, *args: Any, **kwargs: Any) -> Any:
        if self.deferred is not None:
            self.deferred.before_state_access()
        return original(self, *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "get", "items", "values", "keys",
    "pop", "popitem", "clear", "update", "setdefault", "copy",
):  # fmt: skip
    setattr(GatedState, _name, _gated_method(_name))


def watch_state(optimizer: torch.optim.Optimizer, deferred: DeferredUpdates) -> None:
    """Gate the optimizer's state, also after the program has replaced it."""
    if not isinstance(optimizer.state, GatedState):
        state = GatedState(dict, optimizer.state)
        state.deferred = deferred
        optimizer.state = state


def gate_state(optimizer: torch.optim.Optimizer, deferred: DeferredUpdates) -> None:
    """Make `state_dict` and the like of an optimizer wait until all updates are done."""
    watch_state(optimizer, deferred)
    optimizer.register_load_state_dict_pre_hook(lambda *_: deferred.before_state_access())
    optimizer.register_load_state_dict_post_hook(lambda _: watch_state(optimizer, deferred))
    optimizer.register_state_dict_pre_hook(lambda _: deferred.before_state_access())


class EvalGate:
    """A forward hook that waits for all updates before a module is evaluated.

    In evaluation some modules of torch run other code, with other bits, if the class of a parameter is unusual.
    """

    def __init__(self, deferred: DeferredUpdates | None) -> None:
        self._deferred = deferred

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        if self._deferred is not None and not module.training:
            self._deferred.flush()
            self._deferred.stop_observing()

    def __reduce__(self) -> tuple[Any, ...]:
        return EvalGate, (None,)  # a copy of the model is not part of the job


def gate_evaluation(model: torch.nn.Module, deferred: DeferredUpdates) -> Callable[[], None]:
    """Add the gates that are needed; return a function that removes them."""
    touchy = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
    gate = EvalGate(deferred)
    hooks = [
        module.register_forward_pre_hook(gate)
        for module in model.modules()
        if module is model or isinstance(module, touchy)
    ]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def hidden_uses(model: torch.nn.Module) -> str:
    """Return why uses of this model's parameters could go unnoticed; empty if they cannot."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'the model'} is scripted ({kind})"
        if getattr(module, "_compiled_call_impl", None) is not None or kind == "OptimizedModule":
            return f"{name or 'the model'} is compiled"
    runs: list[tuple[int, int, str]] = []
    for name, parameter in model.named_parameters():
        if type(parameter) not in (Parameter, Pending):
            return f"{name} is a {type(parameter).__name__}, not a plain Parameter"
        if parameter.numel() and parameter.device.type != "meta":
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            begin = parameter.data_ptr()
            runs.append((begin, begin + (last + 1) * parameter.element_size(), name))
    runs.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(runs):
        if begin < end:
            return f"{name} and {other} share memory"
    return ""
