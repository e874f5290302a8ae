"""SGD and AdamW over lists of tensors: the updates of torch's optimizers, operation for operation and so bit for bit.

Made for one round of clients: nothing is kept beyond it, there are no groups and no hooks. Everything is by element, so tensors may
hold many clients in their first dimension; a step may then be taken by the first few only.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pliant.fed.config import LocalConfig
from pliant.fed.fold.aggregators import proximal_


class Optimizer(Protocol):
    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Move the parameters. Both lists are of the same tensors each time, or of fewer of their first rows."""
        ...


class SGD:
    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._buffers: list[Tensor] = []

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if self._weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self._weight_decay))
        if self._momentum:
            if not self._buffers:
                self._buffers = [each.clone() for each in gradients]
                gradients = self._buffers
            else:
                gradients = self._gathered(gradients)
        torch._foreach_add_(parameters, gradients, alpha=-self._lr)

    def _gathered(self, gradients: list[Tensor]) -> list[Tensor]:
        buffers = rows(self._buffers, gradients)
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, gradients)
        return buffers


class AdamW:
    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, lr: float, weight_decay: float) -> None:
        self._lr, self._weight_decay = lr, weight_decay
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []
        self._count = 0

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._first:
            self._first = [torch.zeros_like(each) for each in gradients]
            self._second = [torch.zeros_like(each) for each in gradients]
        self._count += 1
        first, second = rows(self._first, gradients), rows(self._second, gradients)
        torch._foreach_mul_(parameters, 1 - self._lr * self._weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - self.BETAS[0])
        torch._foreach_mul_(second, self.BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - self.BETAS[1])
        step_size = self._lr / (1 - self.BETAS[0] ** self._count)
        scale = math.sqrt(1 - self.BETAS[1] ** self._count)
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, scale)
        torch._foreach_add_(below, self.EPSILON)
        torch._foreach_addcdiv_(parameters, first, below, -step_size)


def rows(kept: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The first rows of each, as many as `like` has."""
    if kept and kept[0].shape == like[0].shape:
        return list(kept)
    return [each[: len(other)] for each, other in zip(kept, like, strict=True)]


def move(
    optimizer: Optimizer, parameters: list[Tensor], gradients: list[Tensor], anchors: list[Tensor], mu: float
) -> None:
    """A step, after FedProx' part of the gradients; `mu` 0: there is none."""
    with torch.no_grad():
        if mu:
            proximal_(gradients, parameters, anchors, mu)
        optimizer.step(parameters, gradients)


def make(config: LocalConfig, lr: float) -> Optimizer:
    """A fresh one, as each client has in each round."""
    if config.optimizer == "adamw":
        return AdamW(lr, config.weight_decay)
    return SGD(lr, config.momentum, config.weight_decay)
