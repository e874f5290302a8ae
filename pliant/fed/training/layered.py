"""A model as `layers` of many models: found in a trace of its forward pass.

Knows what small image classifiers are made of. Of any other model it says so, and that one is left to `torch.func.vmap`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pliant.fed.training import layers

Op = Callable[[Mapping[str, Tensor], list[Tensor]], Tensor]
ELEMENTWISE_MODULES = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Dropout,
)  # fmt: skip
ELEMENTWISE = (
    F.relu, torch.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.elu, F.leaky_relu,
)  # fmt: skip
METHODS = ("relu", "tanh", "sigmoid")


class _Unknown(Exception):
    """Something in the model that is not known here."""


class Layered:
    """The forward pass of many models of one architecture; in training or not, as the traced module is then."""

    def __init__(self, ops: list[tuple[Op, list[int]]]) -> None:
        self._ops = ops

    def __call__(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Models x outputs x samples; `tensors` are parameters and buffers by their names, stacked; buffers change."""
        values = [inputs]
        for op, places in self._ops:
            values.append(op(tensors, [values[i] for i in places]))
        return values[-1]

    def alone(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Samples x outputs of one model, the module itself: what it would answer, but faster on CPUs."""
        tensors = {name: each.unsqueeze(0) for name, each in (*module.named_parameters(), *module.named_buffers())}
        return self(tensors, inputs.movedim(0, -1).contiguous().unsqueeze(0))[0].t()


def of(module: nn.Module) -> Layered | None:
    """None where the model has something that is not known here, or cannot be traced."""
    try:
        graph = fx.Tracer().trace(module)
        return Layered(_ops(module, graph))
    except Exception:
        # `_Unknown`; or tracing, which runs the user's code with stand-ins for tensors: it may raise whatever it likes.
        return None


def _ops(module: nn.Module, graph: fx.Graph) -> list[tuple[Op, list[int]]]:
    place: dict[fx.Node, int] = {}
    ops: list[tuple[Op, list[int]]] = []
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    for node in graph.nodes:
        if node.op == "placeholder":
            if place:
                raise _Unknown
            place[node] = 0
        elif node.op == "output":
            if place.get(node.args[0]) != len(ops):
                raise _Unknown  # several outputs, or another than the last
        else:
            made = _op(module, node, names)
            sources = [each for each in node.args if isinstance(each, fx.Node)]
            ops.append((made, [place[each] for each in sources]))
            place[node] = len(ops)
    return ops


def _op(module: nn.Module, node: fx.Node, names: set[str]) -> Op:
    if node.op == "call_module" and not node.kwargs and len(node.args) == 1:
        path = str(node.target)
        return _of_module(path, module.get_submodule(path), names)
    if node.op == "call_method":
        return _of_method(node)
    if node.op == "call_function":
        return _of_function(node)
    raise _Unknown


def _of_module(path: str, module: nn.Module, names: set[str]) -> Op:
    kind = type(module)
    if kind in ELEMENTWISE_MODULES:
        return lambda _, given: module(given[0])
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if f"{path}.{name}" not in names:
            raise _Unknown  # tied to another's
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return lambda t, given: layers.linear(_flat(given[0]), t[f"{path}.weight"], t.get(f"{path}.bias"))
    if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
        return _conv(path, module)
    if isinstance(module, nn.MaxPool2d) and kind is nn.MaxPool2d:
        return _pool(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    if isinstance(module, nn.AvgPool2d) and kind is nn.AvgPool2d:
        return _pool(module.kernel_size, module.stride, module.padding, 1, module.ceil_mode, mean=True)
    if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
        return lambda _, given: given[0].mean((2, 3), keepdim=True)
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return lambda _, given: _flattened(given[0])
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        return _norm(path, module)  # type: ignore[arg-type]
    raise _Unknown


def _conv(path: str, module: nn.Conv2d) -> Op:
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    if not plain or isinstance(module.padding, str):
        raise _Unknown
    stride, padding = (module.stride[0], module.stride[1]), (module.padding[0], module.padding[1])
    return lambda t, given: layers.conv2d(given[0], t[f"{path}.weight"], t.get(f"{path}.bias"), stride, padding)


def _norm(path: str, module: nn.BatchNorm2d) -> Op:
    if not module.track_running_stats or module.momentum is None:
        raise _Unknown
    part, epsilon = module.momentum, module.eps

    def normed(t: Mapping[str, Tensor], given: list[Tensor]) -> Tensor:
        if module.training:
            t[f"{path}.num_batches_tracked"].add_(1)
        mean, variance = t[f"{path}.running_mean"], t[f"{path}.running_var"]
        weight, bias = t.get(f"{path}.weight"), t.get(f"{path}.bias")
        return layers.batch_norm(given[0], weight, bias, mean, variance, part, epsilon, module.training)

    return normed


def _of_method(node: fx.Node) -> Op:
    name, rest = str(node.target), node.args[1:]
    if name in METHODS and not rest and not node.kwargs:
        return lambda _, given: getattr(given[0], name)()
    if name == "flatten" and rest in ((1,), (1, -1)) and not node.kwargs:
        return lambda _, given: _flattened(given[0])
    if name in ("view", "reshape") and len(rest) == 2 and rest[0] == -1 and isinstance(rest[1], int):
        features = rest[1]
        return lambda _, given: _flattened(given[0], features)
    raise _Unknown


def _of_function(node: fx.Node) -> Op:
    function: Any = node.target
    if function in ELEMENTWISE and len(node.args) == 1:
        options = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return lambda _, given: function(given[0], **options)
    if function is torch.flatten and node.args[1:] in ((1,), (1, -1)) and not node.kwargs:
        return lambda _, given: _flattened(given[0])
    if function in (F.max_pool2d, torch.max_pool2d):
        options = dict(zip(("kernel_size", "stride", "padding", "dilation", "ceil_mode"), node.args[1:], strict=False))
        options |= node.kwargs
        if options.pop("return_indices", False) or "kernel_size" not in options:
            raise _Unknown
        size = options["kernel_size"]
        return _pool(
            size,
            options.get("stride"),
            options.get("padding", 0),
            options.get("dilation", 1),
            options.get("ceil_mode", False),
        )
    if function in (operator.add, torch.add) and len(node.args) == 2 and all(isinstance(a, fx.Node) for a in node.args):
        return lambda _, given: _sum(given[0], given[1])
    raise _Unknown


def _pool(size: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, *, mean: bool = False) -> Op:
    window = _pair(size)
    if (
        _pair(stride if stride is not None else size) != window
        or _pair(padding) != (0, 0)
        or _pair(dilation) != (1, 1)
        or ceil
    ):
        raise _Unknown
    pool = layers.avg_pool2d if mean else layers.max_pool2d
    return lambda _, given: pool(given[0], window)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise _Unknown


def _sum(left: Tensor, right: Tensor) -> Tensor:
    if left.shape != right.shape:
        raise _Unknown
    return left + right


def _flat(values: Tensor) -> Tensor:
    if values.dim() != 3:
        raise _Unknown  # a linear layer over something else than all features
    return values


def _flattened(values: Tensor, features: int = -1) -> Tensor:
    return values.reshape(len(values), features, values.shape[-1])
