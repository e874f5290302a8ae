"""Where a program could see or change half a step without using a parameter: what is put there, and what cannot be seen.

With updates under way, an optimizer's state and the evaluation of a model wait for them as the use of a parameter does.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from pliant.train.priority.crossing import Crossing
from pliant.train.priority.pending import Pending


class State(defaultdict[Any, Any]):
    """An optimizer's state: whoever looks at it sees all updates done."""

    crossing: Crossing | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


def _seeing(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def method(self: State, *args: Any, **kwargs: Any) -> Any:
        if self.crossing is not None:
            self.crossing.before_state()
        return original(self, *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "get", "items", "values", "keys",
    "pop", "popitem", "clear", "update", "setdefault", "copy",
):  # fmt: skip
    setattr(State, _name, _seeing(_name))


def watch_state(optimizer: torch.optim.Optimizer, crossing: Crossing) -> None:
    """See who looks at the state; also after the program has put another in its place."""
    if not isinstance(optimizer.state, State):
        state = State(dict, optimizer.state)
        state.crossing = crossing
        optimizer.state = state


def gate_state(optimizer: torch.optim.Optimizer, crossing: Crossing) -> None:
    """Have the optimizer's state looked at only when it is what it should be."""

    watch_state(optimizer, crossing)
    optimizer.register_load_state_dict_pre_hook(lambda *_: crossing.before_state())
    optimizer.register_load_state_dict_post_hook(lambda _: watch_state(optimizer, crossing))
    optimizer.register_state_dict_pre_hook(lambda _: crossing.before_state())


class EvalGate:
    """A forward hook: before a module is evaluated, all of the job's parameters are what they should be.

    Some modules of torch take another way, with other bits, where their parameters are of an unusual class; in
    training they do not.
    """

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        if not module.training:
            self._crossing.flush()
            self._crossing.stop_observing()

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle_gate, ()  # a copy of the model is no part of the job


def _idle_gate() -> EvalGate:
    return EvalGate(Crossing((), (), can_undo=False, say=lambda _: None))


def gate_evaluation(model: torch.nn.Module, crossing: Crossing) -> Callable[[], None]:
    """Put gates where they are needed; returns how to take them away."""
    touchy = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
    gate = EvalGate(crossing)
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
    """Why uses of this model's parameters could go unseen; empty if they cannot."""
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
