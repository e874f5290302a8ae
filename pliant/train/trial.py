"""A few steps of a model on a device, outside of a job, for `pliant doctor`.

They show which operators have no deterministic kernel, and what determinism costs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pliant.errors import ConfigError
from pliant.train import determinism, operators
from pliant.train.operators import FoundOperator, OperatorSearch

MakeLoss = Callable[[nn.Module], Any]
"""What a step does: it computes the loss of the model on a batch."""
ROUND_S = 0.3
"""The steps of one round of the measurement take about so long."""


@dataclass(frozen=True, slots=True)
class Price:
    """What determinism costs on this device. A step is forward and backward."""

    device: str
    free_ms: float
    strict_ms: float
    steps: int
    """Steps that were measured in each mode."""


def make_loss(given: Any, device: torch.device) -> MakeLoss:
    """Return the function for the second value of `return model, given`: it is such a function, or a batch."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    batch = tree_map_only(torch.Tensor, lambda each: each.to(device), given)

    def compute(model: nn.Module) -> torch.Tensor:
        if isinstance(batch, Mapping):
            return loss_of(model(**batch))
        return loss_of(model(*batch) if isinstance(batch, tuple | list) else model(batch))

    return compute


def loss_of(output: Any) -> torch.Tensor:
    """Return a number to call backward on: the model's own loss if it returns one, else the mean of what it returns."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [own] if isinstance(own, torch.Tensor) else tree_leaves(output)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    if not tensors:
        raise ConfigError(
            "the model returned no tensor that depends on its parameters: return `model, step`, where step(model) returns "
            "the loss"
        )
    means = [each.float().mean() for each in tensors]
    return torch.stack(means).sum()


def find_operators(model: nn.Module, compute: MakeLoss) -> list[FoundOperator]:
    """Run a step in strict mode; return the operators that have no deterministic kernel, in the order of their calls."""
    search = OperatorSearch(model)
    with _mode(is_strict=True), torch.compiler.set_stance("force_eager"):
        try:
            with search:
                compute(model).backward()
        except RuntimeError as error:  # it was raised above the kernels: the step cannot go on
            if not (alert := operators.alert_of(error)):
                raise
            search.found.setdefault(FoundOperator(operators.operator_name(alert), "", "", "forward"))
    model.zero_grad(set_to_none=True)
    return list(search.found)


def measure_price(
    model: nn.Module, compute: MakeLoss, device: torch.device, found: Sequence[FoundOperator], rounds: int = 7
) -> Price:
    """Return the time of a step free and strict, by turns. The operators that were found run as if they were allowed."""
    times: dict[bool, list[float]] = {False: [], True: []}
    disallow = operators.allow({each.operator for each in found})
    try:
        for is_strict in times:
            with _mode(is_strict):
                _time_steps(model, compute, device, 2)  # libraries and compilers prepare themselves
                slowest_s = _time_steps(model, compute, device, 1)
        count = max(1, min(100, int(ROUND_S / max(slowest_s, 1e-6))))
        for _ in range(rounds):
            for is_strict, seconds in times.items():
                with _mode(is_strict):
                    seconds.append(_time_steps(model, compute, device, count) / count)
    finally:
        disallow()
    free_s, strict_s = (statistics.median(seconds) for seconds in times.values())
    return Price(str(device), round(free_s * 1000, 3), round(strict_s * 1000, 3), rounds * count)


def _time_steps(model: nn.Module, compute: MakeLoss, device: torch.device, count: int) -> float:
    """Return the seconds of so many steps."""
    _synchronise(device)
    began_s = time.perf_counter()
    for _ in range(count):
        compute(model).backward()
        model.zero_grad(set_to_none=True)
    _synchronise(device)
    return time.perf_counter() - began_s


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _mode(is_strict: bool) -> Iterator[None]:
    """Run in strict mode as D1 does on CUDA, or with torch free to choose; then set what was set before."""
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if is_strict:
            determinism.set_strict()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                determinism.free_cublas_of_its_variable()
        else:
            torch.use_deterministic_algorithms(False)
            cudnn.deterministic = False
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
