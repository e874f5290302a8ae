"""Layers of many models at once: each model's tensors are one row of stacked tensors, and each has samples of its own.

Tensors are models x features x samples, images models x channels x height x width x samples. With the samples last, whatever is
done to pixels runs along contiguous memory, a convolution is a copy and a product of matrices, and every model's product is
one of a batch. A model's gradients come from the sum of all models' losses, since none depends on another's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` is models x outputs x features."""
    if bias is None:
        return torch.bmm(weight, inputs)
    return torch.baddbmm(bias.unsqueeze(-1), weight, inputs)


def conv2d(inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`weight` is models x outputs x channels x height x width."""
    if any(padding):
        inputs = F.pad(inputs, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    height, width = (
        (side - kernel) // step + 1
        for side, kernel, step in zip(inputs.shape[2:4], weight.shape[3:], stride, strict=True)
    )
    made: Tensor = _Convolution.apply(inputs, weight, bias, stride, height, width)  # type: ignore[no-untyped-call]
    # Not in there: what a function of our own returns may be changed in place only if it is no view.
    return made.view(len(inputs), -1, height, width, inputs.shape[-1])


class _Convolution(torch.autograd.Function):
    """A product of matrices for each row of the kernel, all added up.

    The inputs are copied once for each of the kernel's columns (`_strips`). One product of everything would need them
    once for each of its elements: that is more memory than caches hold, and takes half as long again.
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
            # kernel's rows x models x (channels, kernel's columns) x outputs
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
    """For each row of the kernel: models x outputs x (channels, columns)."""
    return [weight[:, :, :, i].flatten(2) for i in range(weight.shape[3])]


def _strips(images: Tensor, wide: int, stride: Pair) -> list[Tensor]:
    """Models x (channels, kernel's columns) x (rows, outputs' columns, samples): what the columns of a kernel see in each row.

    With strides, one for every row of a stride: rows that a row of the kernel sees one after the other shall lie so.
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
    """What each row of the kernel sees: for stride 1, each one begins a line further down."""
    return [strips[i % stride][:, :, i // stride * line : i // stride * line + length] for i in range(tall)]


def _joined(strips: Sequence[Tensor], shape: Sequence[int], wide: int, stride: Pair) -> Tensor:
    """The sum of what strips say of each pixel."""
    models, channels, _, _, samples = shape
    whole = strips[0].new_zeros(tuple(shape))
    for phase, strip in enumerate(strips):
        rows = whole[:, :, phase :: stride[0]]
        parts = strip.view(models, channels, wide, rows.shape[2], -1, samples)
        for j in range(wide):
            rows[:, :, :, j : j + stride[1] * parts.shape[4] : stride[1]] += parts[:, :, j]
    return whole


def max_pool2d(images: Tensor, size: Pair) -> Tensor:
    """Of windows that do not overlap; what is left at the edges does not count."""
    if not images.requires_grad:
        return functools.reduce(torch.maximum, windows(images, size))
    made: Tensor = _MaxPool.apply(images, size)  # type: ignore[no-untyped-call]
    return made


class _MaxPool(torch.autograd.Function):
    """Of equal pixels the first one is taken, as torch does: with another choice, plain backgrounds would learn differently."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: Pair) -> Tensor:
        first, *others = windows(images, size)
        best, greater = first, []
        for each in others:
            # Held as numbers: gradients are multiplied by them.
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
    """The first pixels of all windows, the second ones, ..."""
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
    """By each model's own batch; `mean` and `variance` (models x channels, contiguous) move by `part` towards it.

    Where nobody trains, by `mean` and `variance`.
    """
    flat = inputs.reshape(1, inputs.shape[0] * inputs.shape[1], -1)
    scale, shift = (None if each is None else each.reshape(-1) for each in (weight, bias))
    normed = F.batch_norm(flat, mean.view(-1), variance.view(-1), scale, shift, training, part, epsilon)
    return normed.view(inputs.shape)
