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
from torch.utils.data import DataLoader

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


Parts = tuple[Any, Any, Any]
"""Model, optimizer and loader."""


def _wrapped(job: Any, model: nn.Module | None = None, optimizer: Any = None, **loading: Any) -> Parts:
    model = model or _model()
    wrapped = job.wrap(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    return (*wrapped, job.loader(Numbers(), **{"batch_size": 2, **loading}))


def _loop(
    job: Any,
    parts: Parts,
    turn: Callable[[Any, torch.Tensor], Any] = lambda step, batch: None,
    after: Callable[[Any], Any] = lambda step: None,
) -> None:
    for _ in job.epochs(1):
        for step in parts[2]:
            for batch in step:
                turn(step, batch)
            after(step)


def _sync_batch_norm(job: Any) -> None:
    _wrapped(job, _model(nn.SyncBatchNorm(4)))


def _lbfgs(job: Any) -> None:
    model = _model()
    _wrapped(job, model, torch.optim.LBFGS(model.parameters()))


def _closure(job: Any) -> None:
    model, optimizer, _ = parts = _wrapped(job)
    _loop(
        job,
        parts,
        lambda step, batch: model(batch).sum().backward(),
        lambda step: optimizer.step(lambda: model(torch.ones(4)).sum()),
    )


def _second_backward(job: Any) -> None:
    model, _, _ = parts = _wrapped(job)

    def turn(step: Any, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        model(batch).sum().backward()

    _loop(job, parts, turn)


def _untracked_scheduler(job: Any) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _loop(job, _wrapped(job, model, optimizer))


def _untracked_scaler(job: Any) -> None:
    model, optimizer, _ = parts = _wrapped(job)
    scaler = torch.amp.GradScaler("cpu")

    def after(step: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    _loop(job, parts, lambda step, batch: scaler.scale(model(batch).sum()).backward(), after)


def _loader_outside(job: Any) -> None:
    next(iter(_wrapped(job)[2]))


def _step_in_a_turn(job: Any) -> None:
    model, optimizer, _ = parts = _wrapped(job)

    def turn(step: Any, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    _loop(job, parts, turn)


def _no_backward(job: Any) -> None:
    model, optimizer, _ = parts = _wrapped(job)
    _loop(job, parts, lambda step, batch: model(batch), lambda step: optimizer.step())


def _no_backward_of_one(job: Any) -> None:
    model, _, _ = parts = _wrapped(job)
    _loop(job, parts, lambda step, batch: None if step.number + step.replica == 2 else model(batch).sum().backward())


def _skip_after_backward(job: Any) -> None:
    model, _, _ = parts = _wrapped(job)
    _loop(job, parts, lambda step, batch: (model(batch).sum().backward(), step.skip()))


def _left_turns(job: Any) -> None:
    model, optimizer, loader = _wrapped(job)
    for _ in job.epochs(1):
        for step in loader:
            for batch in step:
                model(batch).sum().backward()
                break
            optimizer.step()


def _old_step(job: Any) -> None:
    model, _, loader = _wrapped(job)
    for _ in job.epochs(1):
        first, second = (step for step, _ in zip(loader, range(2), strict=False))
        assert second.number == 1
        for batch in first:
            model(batch)


def _other_figures(job: Any) -> None:
    model, _, _ = parts = _wrapped(job)

    def turn(step: Any, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        step.log(**{f"of {step.replica}": 1.0})

    _loop(job, parts, turn)


def _old_loop(job: Any) -> None:
    model = _model()
    job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), Numbers(), batch_size=2)


def _unused_parameter(job: Any) -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    _loop(job, _wrapped(job, model), lambda step, batch: model[0](batch).sum().backward())


def _foreign_parameter(job: Any) -> None:
    model = _model()
    _wrapped(job, model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1))


def _sparse(job: Any) -> None:
    model = nn.Sequential(nn.Embedding(16, 4, sparse=True))
    _loop(job, _wrapped(job, model), lambda step, batch: model(batch.long()).sum().backward())


def _twice(job: Any) -> None:
    _wrapped(job)
    _wrapped(job)


def _no_checkpoint(job: Any) -> None:
    _wrapped(job)
    job.load("/nowhere/at/all")


def _frozen(job: Any) -> None:
    _wrapped(job, _model().requires_grad_(False), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def _no_batch(job: Any) -> None:
    _wrapped(job, batch_size=16, drop_last=True)


REFUSALS: list[tuple[Callable[[Any], None], type[PliantError], str]] = [
    (_sync_batch_norm, Unsliceable, "SyncBatchNorm"),
    (_lbfgs, Unsliceable, "use another optimizer"),
    (_closure, Unsliceable, "closure"),
    (_second_backward, TrainError, "no_sync"),
    (_untracked_scheduler, TrainError, r"job\.track\('scheduler'"),
    (_untracked_scaler, TrainError, r"job\.track\('scaler'"),
    (_loader_outside, TrainError, r"job\.epochs"),
    (_step_in_a_turn, TrainError, r"optimizer\.step\(\) in the turn of replica 0: it belongs after the loop"),
    (_no_backward, TrainError, r"replica 0 ended its turn of step 0 without a backward\(\)"),
    (_no_backward_of_one, TrainError, r"replica 1 ended its turn of step 1 without a backward\(\)"),
    (_skip_after_backward, TrainError, "after the backward of replica 0"),
    (_left_turns, TrainError, "left before all replicas had their turn"),
    (_old_step, TrainError, "step 0 is over"),
    (_other_figures, TrainError, "replicas 0 and 1 logged different figures in step 0"),
    (_old_loop, TrainError, "since version 0.2"),
    (_unused_parameter, TrainError, "find_unused_parameters=True"),
    (_foreign_parameter, ConfigError, "Give job.wrap all models"),
    (_sparse, Unsliceable, "sparse=False"),
    (_twice, TrainError, "twice"),
    (_no_checkpoint, CheckpointError, "no such checkpoint"),
    (_frozen, ConfigError, "nothing to train"),
    (_no_batch, ConfigError, "smaller batch_size"),
]


@pytest.mark.parametrize(("act", "error", "says"), REFUSALS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_keep_the_bits_is_refused(
    act: Callable[[Any], None], error: type[PliantError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "update", torch.amp.GradScaler.update)
    with pytest.raises(error, match=says), pliant.join(replicas=2) as job:
        act(job)


def _outer(act: Callable[[Any, Any], object]) -> Callable[[Any], None]:
    """Return a program that does this after the turns of its first step."""

    def program(job: Any) -> None:
        model, _, _ = parts = _wrapped(job)
        _loop(job, parts, lambda step, batch: model(batch).sum().backward(), lambda step: act(job, step))

    return program


def _epochs(*args: Any, **kwargs: Any) -> Callable[[Any], object]:
    return lambda job: (_wrapped(job), next(job.epochs(*args, **kwargs)))


def _wrap(**options: Any) -> Callable[[Any], object]:
    model = _model()
    return lambda job: job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


WRONG_VALUES: list[tuple[Callable[[Any], object], str]] = [
    (lambda job: job.wrap(torch.optim.SGD(_model().parameters()), _model()), "SGD is no torch.nn.Module"),
    (lambda job: job.wrap(_model(), None), r"NoneType is no .*\. Write job\.wrap\(model, optimizer\)"),
    (_wrap(device_ids=[0]), "no option device_ids: leave it out"),
    (_wrap(bucket_cap_mb="25"), "bucket_cap_mb='25'.*: use a number of MiB above 0"),
    (_epochs("10"), r"job\.epochs\('10'\): use a whole number"),
    (_epochs(10, start=-1), r"job\.epochs\(start=-1\): use a whole number, 0 or more"),
    (lambda job: job.steps(10, batch=5), r"job\.steps\(batch=5\): give it a function of the replica"),
    (lambda job: job.seed("x"), r"job\.seed\('x'\): use a whole number"),
    (lambda job: job.loader(Numbers(), batch_size=2).set_epoch("1"), r"loader\.set_epoch\('1'\): use a whole number"),
    (lambda job: job.loader(Numbers(), batch_size=2, seed="1"), "seed='1': must be a whole number"),
    (lambda job: job.track("number", 5), r"job\.track\('number'\): a int has no state_dict .* job\.state"),
    (_outer(lambda job, step: step[0]), r"step\[0\]: a step is no batch\. Write `for x, y in step:`"),
    (_outer(lambda job, step: job.evaluate(DataLoader(Numbers()))), "job.evaluate got a DataLoader: give it a dataset"),
    (_outer(lambda job, step: job.evaluate(Numbers(), 0)), "job.evaluate: batch_size should be a positive integer"),
    (_outer(lambda job, step: job.evaluate(Numbers(), shuffle=True)), "evaluates a fixed share"),
    (_outer(lambda job, step: job.all_reduce("x")), r"job\.all_reduce\('x'\): use a number or a tensor"),
    (_outer(lambda job, step: job.on_first(5)), r"job\.on_first\(5\): give it a function"),
    (
        _outer(lambda job, step: job.on_first(object)),
        "the result of job.on_first is builtins.object, .*: use only tensors",
    ),
    (_outer(lambda job, step: job.report(loss="x")), r"job\.report\(loss='x'\): use a number"),
]


@pytest.mark.parametrize(("act", "says"), WRONG_VALUES, ids=[says for _, says in WRONG_VALUES])
def test_a_wrong_value_is_named_with_its_remedy(act: Callable[[Any], object], says: str) -> None:
    with pliant.join(replicas=2) as job, pytest.raises(PliantError, match=says):
        act(job)


@pytest.mark.parametrize(
    "wrong", [{"policies": 5}, {"monitor": "noise_scale"}, {"seed": "x"}, {"blocks": 5}, {"verify": "off"}], ids=str
)
def test_a_wrong_option_of_join_is_named_with_its_remedy(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}: use a "):
        pliant.join(replicas=2, **wrong)
