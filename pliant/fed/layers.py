"""Layers of many models at once: each model's tensors are one row of stacked tensors, and each has samples of its own.

Tensors are models x features x samples, images models x channels x height x width x samples. With the samples last, whatever is
done to pixels runs along contiguous memory, a convolution is a copy and a product of matrices, and every model's product is
one of a batch. A model's gradients come from the sum of all models' losses, since none depends on another's parameters.
"""

from __future__ import annotations

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
    kernel = (weight.shape[-2], weight.shape[-1])
    filters = weight.flatten(2)
    if bias is not None:
        # A row of ones among the patches: then the bias is a weight, and costs no pass of its own over the outputs.
        filters = torch.cat([filters, bias.unsqueeze(-1)], dim=2)
    made: Tensor = _Convolution.apply(inputs.contiguous(), filters, kernel, stride, bias is not None)  # type: ignore[no-untyped-call]
    return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, filters: Tensor, kernel: Pair, stride: Pair, biased: bool) -> Tensor:
        patches, out = _patches(inputs, kernel, stride, biased)
        ctx.save_for_backward(patches, filters)
        ctx.shape, ctx.kernel, ctx.stride, ctx.out = inputs.shape, kernel, stride, out
        return torch.bmm(filters, patches).view(len(inputs), filters.shape[1], *out, inputs.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        patches, filters = ctx.saved_tensors
        flat = gradient.reshape(*filters.shape[:2], -1)
        of_filters = torch.bmm(patches, flat.transpose(1, 2)).transpose(1, 2) if ctx.needs_input_grad[1] else None
        of_inputs = None
        if ctx.needs_input_grad[0]:
            models, channels, *_, samples = ctx.shape
            taps = channels * ctx.kernel[0] * ctx.kernel[1]
            columns = torch.bmm(filters[:, :, :taps].transpose(1, 2), flat)
            columns = columns.view(models, channels, *ctx.kernel, *ctx.out, samples)
            of_inputs = _folded(columns, ctx.shape, ctx.stride)
        return of_inputs, of_filters, None, None, None


def _patches(images: Tensor, kernel: Pair, stride: Pair, biased: bool) -> tuple[Tensor, Pair]:
    """What each output is made of, as columns: models x (channels, kernel) x (outputs' places, samples); their size."""
    models, channels, height, width, samples = images.shape
    out = (height - kernel[0]) // stride[0] + 1, (width - kernel[1]) // stride[1] + 1
    of_model, of_channel, of_row, of_column, of_sample = images.stride()
    taps = channels * kernel[0] * kernel[1]
    patches = images.new_empty(models, taps + biased, out[0] * out[1] * samples)
    seen = images.as_strided(
        (models, channels, *kernel, *out, samples),
        (of_model, of_channel, of_row, of_column, of_row * stride[0], of_column * stride[1], of_sample),
    )
    patches[:, :taps].view(seen.shape).copy_(seen)
    if biased:
        patches[:, taps].fill_(1)
    return patches, out


def _folded(columns: Tensor, shape: Sequence[int], stride: Pair) -> Tensor:
    """The sum of what all patches say of each input: along rows first, so that few additions see all of them."""
    models, channels, tall, wide, high, broad, samples = columns.shape
    rows = columns.new_zeros(models, channels, wide, shape[2], broad, samples)
    for i in range(tall):
        rows[:, :, :, i : i + stride[0] * high : stride[0]] += columns[:, :, i]
    whole = columns.new_zeros(tuple(shape))
    for j in range(wide):
        whole[:, :, :, j : j + stride[1] * broad : stride[1]] += rows[:, :, j]
    return whole


def max_pool2d(images: Tensor, size: Pair) -> Tensor:
    """Of windows that do not overlap; what is left at the edges does not count."""
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
        for greater, each in zip(reversed(ctx.saved_tensors), reversed(others), strict=True):
            torch.mul(gradient, greater, out=each)
            gradient = gradient - each
        first.copy_(gradient)
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
) -> Tensor:
    """By each model's own batch; `mean` and `variance` (models x channels, contiguous) move by `part` towards it."""
    flat = inputs.reshape(1, inputs.shape[0] * inputs.shape[1], -1)
    scale, shift = (None if each is None else each.reshape(-1) for each in (weight, bias))
    normed = F.batch_norm(flat, mean.view(-1), variance.view(-1), scale, shift, True, part, epsilon)
    return normed.view(inputs.shape)
