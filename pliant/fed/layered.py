"""Layers of many models at once: the forward pass of stacked models, traced from one module.

Tensors are models x features (or channels x rows x columns) x samples: with the samples last, all operations run over
contiguous memory, and the models are a batch of matrix products. Convolutions, pooling and batch norm are ours, because
torch's cannot be stacked, or are slow for small models. `trace_layers` returns None for a model with other layers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Pair = tuple[int, int]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer; `weight` is models x outputs x features."""
    if bias is None:
        return torch.bmm(weight, inputs)
    return torch.baddbmm(bias.unsqueeze(-1), weight, inputs)


def conv2d(inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Apply a convolution; `weight` is models x outputs x channels x height x width."""
    if any(padding):
        inputs = F.pad(inputs, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    height, width = (
        (side - kernel) // step + 1
        for side, kernel, step in zip(inputs.shape[2:4], weight.shape[3:], stride, strict=True)
    )
    made: Tensor = _Convolution.apply(inputs, weight, bias, stride, height, width)  # type: ignore[no-untyped-call]
    # Outside of the function: what a custom function returns may be changed in place only if it is no view.
    return made.view(len(inputs), -1, height, width, inputs.shape[-1])


class _Convolution(torch.autograd.Function):
    """A sum of matrix products, one for each row of the kernel.

    The inputs are copied once for each column of the kernel (`_strips`). One product of everything would need a copy for each
    element of the kernel: more memory than caches hold, and half as long again.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, height: int, width: int
    ) -> Tensor:
        tall, wide = weight.shape[-2:]
        strips, taps = _strips(inputs, wide, stride), _taps(weight)
        ctx.save_for_backward(weight, *strips)
        ctx.shape, ctx.stride = inputs.shape, stride
        ctx.line = width * inputs.shape[-1]
        ctx.length = height * ctx.line
        seen = _seen(strips, tall, stride[0], ctx.line, ctx.length)
        made = linear(seen[0], taps[0], bias)
        for tap, part in zip(taps[1:], seen[1:], strict=True):
            made.baddbmm_(tap, part)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        weight, *strips = ctx.saved_tensors
        models, outputs, channels, tall, wide = weight.shape
        flat = gradient.contiguous()
        of_inputs, of_weight, of_bias = None, None, None
        if ctx.needs_input_grad[1]:
            across = flat.transpose(1, 2)
            parts = [torch.bmm(each, across) for each in _seen(strips, tall, ctx.stride[0], ctx.line, ctx.length)]
            # kernel rows x models x (channels, kernel columns) x outputs
            of_weight = (
                torch.stack(parts).view(tall, models, channels, wide, outputs).permute(1, 4, 2, 0, 3).contiguous()
            )
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(-1)
        if ctx.needs_input_grad[0]:
            told = [torch.zeros_like(each) for each in strips]
            for tap, part in zip(_taps(weight), _seen(told, tall, ctx.stride[0], ctx.line, ctx.length), strict=True):
                part.baddbmm_(tap.transpose(1, 2), flat)
            of_inputs = _joined(told, ctx.shape, wide, ctx.stride)
        return of_inputs, of_weight, of_bias, None, None, None


def _taps(weight: Tensor) -> list[Tensor]:
    """Return, for each row of the kernel, models x outputs x (channels, columns)."""
    return [weight[:, :, :, i].flatten(2) for i in range(weight.shape[3])]


def _strips(images: Tensor, wide: int, stride: Pair) -> list[Tensor]:
    """Return models x (channels, kernel columns) x (rows, output columns, samples): what the kernel's columns see in each row.

    With strides there is one result for every row of a stride, so that rows that are used together lie together.
    """
    models, channels = images.shape[:2]
    return [
        images[:, :, phase :: stride[0]]
        .unfold(3, wide, stride[1])
        .permute(0, 1, 5, 2, 3, 4)
        .reshape(models, channels * wide, -1)
        for phase in range(stride[0])
    ]


def _seen(strips: Sequence[Tensor], tall: int, stride: int, line: int, length: int) -> list[Tensor]:
    """Return what each row of the kernel sees; for stride 1, each begins one line further down."""
    return [strips[i % stride][:, :, i // stride * line : i // stride * line + length] for i in range(tall)]


def _joined(strips: Sequence[Tensor], shape: Sequence[int], wide: int, stride: Pair) -> Tensor:
    """Return the sum of the strips' contributions to each pixel."""
    models, channels, _, _, samples = shape
    whole = strips[0].new_zeros(tuple(shape))
    for phase, strip in enumerate(strips):
        rows = whole[:, :, phase :: stride[0]]
        parts = strip.view(models, channels, wide, rows.shape[2], -1, samples)
        for j in range(wide):
            rows[:, :, :, j : j + stride[1] * parts.shape[4] : stride[1]] += parts[:, :, j]
    return whole


def max_pool2d(images: Tensor, size: Pair) -> Tensor:
    """Take the maximum of windows that do not overlap; incomplete windows at the edges are ignored."""
    if not images.requires_grad:
        return functools.reduce(torch.maximum, windows(images, size))
    made: Tensor = _MaxPool.apply(images, size)  # type: ignore[no-untyped-call]
    return made


class _MaxPool(torch.autograd.Function):
    """Takes the first of equal pixels, as torch does; otherwise plain backgrounds would get other gradients."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: Pair) -> Tensor:
        first, *others = windows(images, size)
        best, greater = first, []
        for each in others:
            # Kept as numbers: gradients are multiplied by them.
            greater.append(torch.gt(each, best, out=torch.empty_like(best, memory_format=torch.contiguous_format)))
            best = torch.maximum(best, each)
        ctx.save_for_backward(*greater)
        ctx.shape, ctx.size = images.shape, size
        return best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exact = all(side % part == 0 for side, part in zip(ctx.shape[2:4], ctx.size, strict=True))
        whole = gradient.new_empty(ctx.shape) if exact else gradient.new_zeros(ctx.shape)
        first, *others = windows(whole, ctx.size)
        left = gradient
        for greater, each in zip(reversed(ctx.saved_tensors), reversed(others), strict=True):
            torch.mul(left, greater, out=each)
            left = left - each if left is gradient else left.sub_(each)
        first.copy_(left)
        return whole, None


def windows(images: Tensor, size: Pair) -> list[Tensor]:
    """Return the first pixels of all windows, the second ones, and so on."""
    high, broad = images.shape[2] // size[0] * size[0], images.shape[3] // size[1] * size[1]
    return [images[:, :, i : high : size[0], j : broad : size[1]] for i in range(size[0]) for j in range(size[1])]


def avg_pool2d(images: Tensor, size: Pair) -> Tensor:
    parts = windows(images, size)
    total = parts[0]
    for each in parts[1:]:
        total = total + each
    return total / len(parts)


def batch_norm(
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    part: float,
    epsilon: float,
    training: bool,
) -> Tensor:
    """Normalise by each model's own batch; `mean` and `variance` (models x channels, contiguous) move by `part` towards it.

    If not training, normalise by `mean` and `variance`.
    """
    flat = inputs.reshape(1, inputs.shape[0] * inputs.shape[1], -1)
    scale, shift = (None if each is None else each.reshape(-1) for each in (weight, bias))
    normed = F.batch_norm(flat, mean.view(-1), variance.view(-1), scale, shift, training, part, epsilon)
    return normed.view(inputs.shape)


Op = Callable[[Mapping[str, Tensor], list[Tensor]], Tensor]
ELEMENTWISE_MODULES = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Dropout,
)  # fmt: skip
ELEMENTWISE = (
    F.relu, torch.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.elu, F.leaky_relu,
)  # fmt: skip
METHODS = ("relu", "tanh", "sigmoid")


class _Unknown(Exception):
    """The model has something that these layers do not support."""


class Layered:
    """The forward pass of many models of one architecture; in training mode if the traced module is."""

    def __init__(self, ops: list[tuple[Op, list[int]]]) -> None:
        self._ops = ops

    def __call__(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return models x outputs x samples. `tensors` are stacked parameters and buffers by name; buffers change."""
        values = [inputs]
        for op, places in self._ops:
            values.append(op(tensors, [values[i] for i in places]))
        return values[-1]

    def alone(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return samples x outputs of one model, as the module would, but faster on CPUs."""
        tensors = {name: each.unsqueeze(0) for name, each in (*module.named_parameters(), *module.named_buffers())}
        return self(tensors, inputs.movedim(0, -1).contiguous().unsqueeze(0))[0].t()


def trace_layers(module: nn.Module) -> Layered | None:
    """Trace a module; None if it has unsupported layers, or cannot be traced."""
    try:
        graph = fx.Tracer().trace(module)
        return Layered(_ops(module, graph))
    except Exception:
        # `_Unknown`, or whatever the user's code raises when it is traced with stand-ins for tensors.
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
            raise _Unknown  # tied to another layer's tensors
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return lambda t, given: linear(_flat(given[0]), t[f"{path}.weight"], t.get(f"{path}.bias"))
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
    return lambda t, given: conv2d(given[0], t[f"{path}.weight"], t.get(f"{path}.bias"), stride, padding)


def _norm(path: str, module: nn.BatchNorm2d) -> Op:
    if not module.track_running_stats or module.momentum is None:
        raise _Unknown
    part, epsilon = module.momentum, module.eps

    def normed(t: Mapping[str, Tensor], given: list[Tensor]) -> Tensor:
        if module.training:
            t[f"{path}.num_batches_tracked"].add_(1)
        mean, variance = t[f"{path}.running_mean"], t[f"{path}.running_var"]
        weight, bias = t.get(f"{path}.weight"), t.get(f"{path}.bias")
        return batch_norm(given[0], weight, bias, mean, variance, part, epsilon, module.training)

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
    pool = avg_pool2d if mean else max_pool2d
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
