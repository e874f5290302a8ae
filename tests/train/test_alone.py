"""A worker alone with the only replica keeps no contexts: its process is the context. The state must be the same as if it did."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pliant
from pliant import Job
from pliant.errors import TrainError
from pliant.train.events import StepCommitted
from pliant.train.lone_steps import LoneSteps
from pliant.train.outer_code import OuterCode
from pliant.train.phases import (
    Exchange,
    PassBegun,
    PhaseMachine,
    Report,
    StateMade,
    StepAsked,
    SumsArrived,
    TakeTurn,
    TurnTaken,
    ViewEntered,
)
from pliant.train.state_parts import digests_of, parts_of
from pliant.train.step import Step

STEPS, EPOCHS = 6, 2
Model = torch.nn.Module
Optimizer = torch.optim.Optimizer
Body = Callable[[Job, Step, Model, Optimizer], None]


class Noisy(Dataset[torch.Tensor]):
    """Samples that are drawn from all generators of the process."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + random.random() + np.random.rand() + index


class NoisyStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(4 * STEPS):
            yield Noisy()[index]


def build() -> tuple[Model, Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def seed_all() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def plain(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
    for x in step:
        loss = model(x).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()


def draw(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
    """The program's own code draws, and changes buffers, before and after the turns."""
    torch.rand(3)
    random.random()
    model[1].running_mean.add_(1.0)  # type: ignore[index]
    plain(job, step, model, optimizer)
    np.random.rand()
    with torch.no_grad():
        model(torch.randn(4, 3))  # changes running statistics


def evaluate(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
    """Shards run before or after the turns of every second step, and draw."""

    def shards() -> None:
        for x in job.evaluate(Noisy(), batch_size=8):
            job.total(seen=model(x).sum())
        job.report(total=job.total()["seen"])
        job.on_first(lambda: torch.rand(1))

    if step.index == 1:
        shards()
    plain(job, step, model, optimizer)
    if step.index == 3:
        shards()
    job.all_reduce(1)


def pass_often(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
    """Several passes, one without a backward, one skipped, kept values, steps without a pass."""
    if step.index == 2:
        return
    if step.index == 3:
        for _ in step:
            torch.rand(1)
            step.skip()
        optimizer.zero_grad()
    for x in step:
        step.keep(noise=torch.rand_like(x))
        step.no_backward()
    for x in step:
        model(x + step.kept["noise"]).square().mean().backward()
    plain(job, step, model, optimizer)


def accumulate(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
    """Gradients are carried over steps, and accumulated in a turn."""
    for x in step:
        with job.no_sync():
            model(x).sum().backward()
        model(x).square().mean().backward()
    if step.index % 2:
        optimizer.step()
        optimizer.zero_grad()


BODIES: dict[str, Body] = {each.__name__: each for each in (plain, draw, evaluate, pass_often, accumulate)}
DATA: dict[str, Callable[[Job], Any]] = {
    "dealt": lambda job: job.loader(Noisy(), batch_size=4, shuffle=True),
    "loader": lambda job: job.loader(DataLoader(Noisy(), batch_size=4)),
    "processes": lambda job: job.loader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
    "sampler": lambda job: job.loader(
        Noisy(), batch_size=4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)
    ),
    "stream": lambda job: job.loader(NoisyStream(), batch_size=4),
}


class Run:
    """The states after each step of a job with one replica in this process."""

    def __init__(self, body: Body, data: str = "dealt", *, load: str = "", save: str = "", at: int = 0) -> None:
        self.states: list[dict[str, str]] = []
        self.steps: list[tuple[int, int]] = []
        self.values: list[dict[str, float]] = []
        model, optimizer = self.model, self.optimizer = build()
        seed_all()
        with pliant.join(replicas=1) as job:
            job.wrap(model, optimizer)
            if load:
                job.load(load)
            loader = DATA[data](job)
            job.on_commit(lambda event: self._add(job, event))
            for _ in job.epochs(EPOCHS):
                for step in loader:
                    body(job, step, model, optimizer)
                    if save and step.number == at:
                        job.save(save)
        self.random = (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
        )

    def _add(self, job: Job, event: StepCommitted) -> None:
        assert job._run.trainer is not None
        state = job._run.trainer.state
        self.states.append(digests_of(parts_of(state, state.first_buffers)))
        self.steps.append((event.step, event.epoch_step))
        self.values.append(dict(event.values))


@pytest.fixture
def live_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose turns were taken without contexts."""
    seen, original = [], LoneSteps.turn

    def turn(lone: LoneSteps, step: Step, end_turn: Callable[[Step], None]) -> Iterator[Any]:
        seen.append(step.number)
        return original(lone, step, end_turn)

    monkeypatch.setattr(LoneSteps, "turn", turn)
    return seen


def keep_contexts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OuterCode, "begin_live", lambda *_: None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("body", "data"), [*((name, "dealt") for name in BODIES), *(("draw", name) for name in DATA if name != "dealt")]
)
def test_the_states_of_all_steps_are_those_of_kept_contexts(body: str, data: str, live_turns: list[int]) -> None:
    live = Run(BODIES[body], data)
    assert len(set(live_turns)) >= EPOCHS * (STEPS - 1) - 4
    with pytest.MonkeyPatch.context() as patch:
        keep_contexts(patch)
        live_turns.clear()
        kept = Run(BODIES[body], data)
    assert not live_turns
    assert live.steps == kept.steps
    assert len(live.steps) == EPOCHS * STEPS
    assert live.values == kept.values
    for number, (ours, theirs) in enumerate(zip(live.states, kept.states, strict=True)):
        assert ours == theirs, f"step {number}"


@pytest.mark.timeout(60)
def test_they_are_those_of_plain_pytorch(live_turns: list[int]) -> None:
    run = Run(draw, "loader")
    model, optimizer = build()
    seed_all()
    loader = DataLoader(Noisy(), batch_size=4)
    for _ in range(EPOCHS):
        for x in loader:
            draw(Any, PlainStep(x), model, optimizer)  # type: ignore[arg-type]
    assert live_turns
    for ours, theirs in zip(run.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    states = run.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(
        torch.equal(one[key], other[key])
        for one, other in zip(*(each.values() for each in states), strict=True)
        for key in one
    )
    assert torch.equal(run.random[0], torch.get_rng_state())
    assert run.random[1] == random.getstate()
    assert run.random[2] == np.random.get_state(legacy=False)["state"]["key"].tolist()


class PlainStep(list[torch.Tensor]):
    """The batch of a plain loop, behind the part of a step that the body uses."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__([x])

    def log(self, **figures: Any) -> None: ...


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", ["dealt", "sampler", "stream"])
def test_a_checkpoint_of_any_step_goes_on_to_the_same_end(data: str, tmp_path: Path) -> None:
    whole = Run(draw, data)
    for at in (0, 3, STEPS - 1, STEPS + 2):
        path = str(tmp_path / f"{at}.safetensors")
        Run(draw, data, save=path, at=at)
        again = Run(draw, data, load=path)
        assert again.states == whole.states[at + 1 :], f"after step {at}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", ["dealt", "stream"])
def test_what_is_drawn_behind_its_back_is_noticed(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: the comparison would find a context that is looked at too early."""
    whole, original = Run(draw, data), LoneSteps._end_pass

    def too_early(lone: LoneSteps, *about: Any) -> None:
        original(lone, *about)
        replicas = lone._replicas
        replicas.end_live()
        context = replicas.contexts[0]
        replicas.begin_live(lambda: context)

    monkeypatch.setattr(LoneSteps, "_end_pass", too_early)
    assert Run(draw, data).states != whole.states


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wrong", ["no backward", "two", "two, other", "two, kept", "two, no_sync", "update"])
def test_what_is_wrong_in_a_turn_is_an_error_in_later_steps_too(wrong: str, live_turns: list[int]) -> None:
    def body(job: Job, step: Step, model: Model, optimizer: Optimizer) -> None:
        for x in step:
            if step.number < 3 or wrong != "no backward":
                model(x).sum().backward()
            if step.number == 3 and wrong == "two":
                model(x).sum().backward()
            if step.number == 3 and wrong in ("two, other", "two, kept"):
                model[3](torch.ones(1, 4)).sum().backward()  # type: ignore[operator, index]
            if step.number == 3 and wrong == "two, kept":
                step.keep(x=x)
            if step.number == 3 and wrong == "two, no_sync":
                with job.no_sync():
                    model(x).sum().backward()
            if step.number == 3 and wrong == "update":
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

    expected = {
        "no backward": r"without a backward\(\)",
        **dict.fromkeys(("two", "two, other", "two, kept", "two, no_sync"), "second backward"),
        "update": "in the turn of replica 0",
    }
    with pytest.raises(TrainError, match=expected[wrong]):
        Run(body)
    assert live_turns == [1, 2, 3]


@pytest.mark.timeout(10)
def test_the_machine_goes_the_same_way_without_events() -> None:
    machines = [PhaseMachine(elastic=elastic) for elastic in (True, False) for _ in range(2)]
    for machine in machines:
        machine.handle(StateMade(0))
        machine.handle(ViewEntered((Report(0),), 1))
    for _ in range(3):
        for one, other in zip(machines[::2], machines[1::2], strict=True):
            one.handle(StepAsked())
            assert other.begin_step_alone()
            for _ in range(2):
                assert one.handle(PassBegun()) == TakeTurn(0)
                assert one.handle(TurnTaken()) == Exchange()
                one.handle(SumsArrived(for_sure=True))
                assert other.count_pass_alone() == one.passes
                assert vars(one) == vars(other)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_gradients_of_a_step_are_free_when_the_next_begins(replicas: int) -> None:
    seed_all()
    model, optimizer = build()
    before: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    collects = gc.isenabled()
    gc.disable()  # they must go by themselves
    try:
        with pliant.join(replicas=replicas) as job:
            model, optimizer = job.wrap(model, optimizer)
            loader = job.loader(Noisy(), batch_size=1)
            for _ in job.epochs(1):
                for step in loader:
                    for turn, x in enumerate(step):
                        if turn == 0:
                            alive.append(sum(each() is not None for each in before))
                        model(x.expand(4, 3)).square().mean().backward()
                    before = [weakref.ref(each.grad) for each in model.parameters() if each.grad is not None]
                    assert len(before) == len(list(model.parameters()))
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        if collects:
            gc.enable()
    assert alive == [0] * len(alive)
    assert len(alive) >= STEPS
