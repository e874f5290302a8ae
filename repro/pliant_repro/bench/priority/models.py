"""What the sides of `pliant bench priority` train: a paced net, a network of the benches, or a user's own."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import ConfigError
from pliant_repro.bench.priority.options import chosen_profile
from pliant_repro.bench.priority.worker import Task
from pliant_repro.paced import PacedNet
from pliant_repro.zoo import ReadyBatches, as_is, build, compute_loss, network

EPOCH_STEPS = 20_000
POOL = 61
"""Distinct batches; a prime, so that no number of ranks makes one of them see always the same."""
IMAGE = (3, 32, 32)


@dataclass(slots=True)
class Subject:
    """A model, the loss of a batch, and the data."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    dataset: Any
    batch: int = 1
    """Items of the dataset that make a batch."""
    paced: PacedNet | None = None
    """The model, where it only pretends to compute."""

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)


class Pool:
    """A map-style dataset of ready batches, one per index."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % len(self._batches)]

    def __getitems__(self, indices: list[int]) -> Any:
        return self[indices[0]]


def make(task: Task, waited_until: Callable[[], float] | None = None) -> Subject:
    """The task's model with the same first values in every process.

    Args:
        waited_until: when the program last stopped waiting for the network; None: it says so itself.

    Raises:
        ConfigError: the user's function cannot be had, or gives something else.
    """
    length = EPOCH_STEPS * task.num_workers
    torch.manual_seed(1)
    if task.compute == "paced":
        net = PacedNet(chosen_profile(task.model, task.batch), waited_until=waited_until)
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(net.num_inputs, generator=generator) for _ in range(POOL)]
        return Subject(net, lambda model, batch: model(batch), Pool(batches, length), paced=net)
    if ":" in task.model:
        model, inputs = _from_function(task.model, task.batch)
        return Subject(model, _mean_square, Pool(_varied(inputs), length))
    chosen = network(task.model)
    batch = task.batch or min(chosen.batch, 16)
    size = task.size or (64 if chosen.kind == "images" else chosen.size)
    dataset = ReadyBatches(chosen.kind, size, length * batch)
    return Subject(build(task.model), lambda model, pair: compute_loss(model, *pair), dataset, batch)


def _from_function(name: str, batch: int) -> tuple[nn.Module, Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}; give a function that can be imported from here") from None
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, torch.randn(batch or 16, *IMAGE))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name} gave a {type(model).__name__}: return a module, or (module, inputs)")
    return model, inputs


def _varied(inputs: Any) -> list[Any]:
    """Batches that differ, so that replicas do; whole numbers (words, say) stay as they are."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return [inputs]
    return [inputs * (1 + number / POOL) for number in range(POOL)]


def _mean_square(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"the model gave a {type(outputs).__name__}: one that returns a tensor is needed")
    return outputs.float().square().mean()


def endless(subject: Subject, rank: int, num_ranks: int) -> Iterator[Any]:
    """The batches of one rank as a plain DDP script loads them."""
    sampler: DistributedSampler[Any] = DistributedSampler(subject.dataset, num_ranks, rank, shuffle=False)
    loader: DataLoader[Any] = DataLoader(
        subject.dataset, batch_size=subject.batch, sampler=sampler, collate_fn=as_is
    )
    while True:
        yield from loader


def layer_times(subject: Subject, step: Callable[[], None], rounds: int) -> list[list[float]]:
    """Forward seconds, backward seconds and bytes of each module that owns parameters, in the order of their use.

    Coarse: a module's forward lasts until the next one begins; its backward, from the gradient before until its own
    is complete. Medians of `rounds` steps. A parameter that two modules share counts where it is used first.
    """
    starts: dict[str, float] = {}
    ready: dict[str, float] = {}
    owners: dict[str, list[nn.Parameter]] = {}
    seen: set[int] = set()
    handles = []
    for name, module in subject.model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            owners[name] = own
            handles.append(module.register_forward_pre_hook(lambda *_, key=name: _note(starts, key)))
            handles += [p.register_post_accumulate_grad_hook(lambda _, key=name: _renew(ready, key)) for p in own]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in owners}
    for _ in range(rounds):
        starts.clear()
        ready.clear()
        step()
        for name, pair in _durations(starts, ready).items():
            samples[name].append(pair)
    for handle in handles:
        handle.remove()
    used = [name for name in starts if samples[name]]
    return [[*_middle(samples[name]), float(sum(p.numel() * p.element_size() for p in owners[name]))] for name in used]


def _note(moments: dict[str, float], key: str) -> None:
    moments.setdefault(key, time.perf_counter())


def _renew(moments: dict[str, float], key: str) -> None:
    moments.pop(key, None)
    moments[key] = time.perf_counter()


def _durations(starts: dict[str, float], ready: dict[str, float]) -> dict[str, tuple[float, float]]:
    """(forward, backward) of each module, from when forwards began and when gradients were complete."""
    forward = list(starts.items())
    backward = list(ready.items())
    # The loss is between the last forward and the first gradient: a third of that is forward, as everywhere.
    turn_s = forward[-1][1] + (backward[0][1] - forward[-1][1]) / 3
    ends = [at_s for _, at_s in forward[1:]] + [turn_s]
    forward_s = {name: end_s - at_s for (name, at_s), end_s in zip(forward, ends, strict=True)}
    begins = [turn_s] + [at_s for _, at_s in backward[:-1]]
    backward_s = {name: at_s - begin_s for (name, at_s), begin_s in zip(backward, begins, strict=True)}
    return {name: (forward_s[name], backward_s.get(name, 0.0)) for name in forward_s}


def _middle(pairs: list[tuple[float, float]]) -> list[float]:
    return [sorted(values)[len(values) // 2] for values in zip(*pairs, strict=True)]
