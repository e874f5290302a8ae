"""Negative controls: whatever keeps the bits changes them when it is taken away. And what is refused, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import FULL
from golden import golden
from stage import ALL, new_workers, run_fixed, staged
from subject import Task, compare, differing
from torch import nn

import pliant
from pliant.errors import CheckpointError, ConfigError, PliantError, TrainError, Unsliceable

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SPOILED = ["no_random_state", "no_buffers", "first_layout_for_ever", "parameters_order", "division", "ascending_fold"]


@pytest.mark.parametrize("size", [0, 2] if FULL else [0])
def test_each_part_that_is_taken_away_changes_the_bits(size: int, tmp_path: Path) -> None:
    names = ["nothing", *SPOILED, "nothing"]
    tasks = [
        Task(program="conv", replicas=3, epochs=2, journal=str(tmp_path / f"{number}"), tampering=name)
        for number, name in enumerate(names)
    ]
    oracle = golden("conv", 3, 2)
    same = {name for name, found in zip(names, run_fixed(tasks, size), strict=True) if not differing(found, oracle)}
    assert same == {"nothing"}


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_3_workers_goes_on_with_any_number(size: int, tmp_path: Path) -> None:
    """In the middle of an epoch, with loader processes; without their state, or their position, the bits change."""
    saved = tmp_path / "saved.safetensors"
    base = Task(program="conv-loaders", replicas=4, epochs=2, journal=str(tmp_path / "saving"))
    oracle = golden("conv-loaders", 4, 2)
    [found] = run_fixed([replace(base, save=str(saved), save_at=7)], 3)
    compare(found, oracle)
    names = ["nothing", "no_loader_state", "no_loader_position"] if size == 1 else ["nothing"]
    tasks = [replace(base, load=str(saved), journal=str(tmp_path / name), tampering=name) for name in names]
    histories = dict(zip(names, run_fixed(tasks, size), strict=True))
    compare(histories.pop("nothing"), oracle, begin=7)
    assert all(differing(found, oracle) for found in histories.values()), "a control has the right bits"


def test_d0_holds_until_the_workers_change(tmp_path: Path) -> None:
    """And then has the bits of a DDP that was restarted there, which are not those of one that ran through."""
    first, second, third, fourth = new_workers(4)
    task = Task(program="conv", replicas=4, epochs=2, journal="", determinism="D0")
    with staged(task, tmp_path) as stage:
        stage.change([first, second, fourth])
        stage.advance(6)
        stage.change([first, second, third, fourth])
        stage.open_gate(ALL)
        stage.until_over()
        found = stage.history
    assert differing(found, golden("conv", 4, 4)[:10]) == [7, 8, 9]
    compare(found, golden("conv", 4, 2, restarts=(7,)))


# --- refusals ---


def _model(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *more)


class Numbers:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _loop(job: Any, model: nn.Module, optimizer: Any, loader: Any, body: Callable[[torch.Tensor], None]) -> None:
    for _ in job.epochs(1):
        for batch in loader:
            body(batch)


def _wrapped(job: Any, model: nn.Module | None = None, optimizer: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    model = model or _model()
    return job.wrap(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), Numbers(), batch_size=2, **more)  # type: ignore[no-any-return]


def _sync_batch_norm(job: Any) -> None:
    _wrapped(job, _model(nn.SyncBatchNorm(4)))


def _lbfgs(job: Any) -> None:
    model = _model()
    _wrapped(job, model, torch.optim.LBFGS(model.parameters()))


def _closure(job: Any) -> None:
    model, optimizer, loader = _wrapped(job)
    _loop(job, model, optimizer, loader, lambda batch: optimizer.step(lambda: model(batch).sum()))


def _second_backward(job: Any) -> None:
    model, optimizer, loader = _wrapped(job)

    def body(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        model(batch).sum().backward()

    _loop(job, model, optimizer, loader, body)


def _untracked_scheduler(job: Any) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader = _wrapped(job, model, optimizer)
    _loop(job, model, optimizer, loader, lambda batch: None)


def _untracked_scaler(job: Any) -> None:
    model, optimizer, loader = _wrapped(job)
    scaler = torch.amp.GradScaler("cpu")

    def body(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    _loop(job, model, optimizer, loader, body)


def _loader_outside(job: Any) -> None:
    _, _, loader = _wrapped(job)
    next(iter(loader))


def _no_backward(job: Any) -> None:
    model, optimizer, loader = _wrapped(job)
    _loop(job, model, optimizer, loader, lambda batch: optimizer.step())


def _unused_parameter(job: Any) -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model, optimizer, loader = _wrapped(job, model)
    _loop(job, model, optimizer, loader, lambda batch: model[0](batch).sum().backward())


def _foreign_parameter(job: Any) -> None:
    model = _model()
    _wrapped(job, model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1))


def _sparse(job: Any) -> None:
    model, optimizer, loader = _wrapped(job, nn.Sequential(nn.Embedding(16, 4, sparse=True)))
    _loop(job, model, optimizer, loader, lambda batch: model(batch.long()).sum().backward())


def _twice(job: Any) -> None:
    _wrapped(job)
    _wrapped(job)


def _no_checkpoint(job: Any) -> None:
    _wrapped(job)
    job.load("/nowhere/at/all")


def _frozen(job: Any) -> None:
    _wrapped(job, _model().requires_grad_(False), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def _no_batch(job: Any) -> None:
    model = _model()
    job.wrap(model, torch.optim.SGD(model.parameters()), Numbers(), batch_size=16, drop_last=True)


REFUSALS: list[tuple[Callable[[Any], None], type[PliantError], str]] = [
    (_sync_batch_norm, Unsliceable, "SyncBatchNorm"),
    (_lbfgs, Unsliceable, "use another optimizer"),
    (_closure, Unsliceable, "closure"),
    (_second_backward, TrainError, "no_sync"),
    (_untracked_scheduler, TrainError, r"job\.track\('scheduler'"),
    (_untracked_scaler, TrainError, r"job\.track\('scaler'"),
    (_loader_outside, TrainError, r"job\.epochs"),
    (_no_backward, TrainError, r"call backward\(\)"),
    (_unused_parameter, TrainError, "find_unused_parameters=True"),
    (_foreign_parameter, ConfigError, "ModuleList"),
    (_sparse, Unsliceable, "sparse=False"),
    (_twice, TrainError, "ModuleList|once|twice"),
    (_no_checkpoint, CheckpointError, "no such checkpoint"),
    (_frozen, ConfigError, "nothing to train"),
    (_no_batch, ConfigError, "smaller batch_size"),
]


@pytest.mark.parametrize(("act", "error", "says"), REFUSALS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_keep_the_bits_is_refused(
    act: Callable[[Any], None], error: type[PliantError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "update", torch.amp.GradScaler.update)
    with pliant.join(replicas=2) as job, pytest.raises(error, match=says):
        act(job)
