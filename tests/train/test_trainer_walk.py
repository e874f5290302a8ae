"""Whole programs on simulated workers that are lost and join at every moment: the result is that of one worker.

In each shape of program a worker dies at each moment of a run, and what it had sent reaches some of the others; and new
workers come, who first warm up in the shadow. At the end parameters, optimizers, buffers, contexts, data positions and tracked objects are those of an
undisturbed run on one worker, bit by bit, and so is everything that the program has seen on the way. Each worker's
listeners are told of every step once.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import (
    EAGER,
    LAZY,
    REVERSED,
    Actor,
    Arrival,
    Death,
    Notes,
    Program,
    Schedule,
    ServerLoss,
    World,
    differences,
)
from torch import Tensor, nn
from torch.utils.data import RandomSampler, TensorDataset

from pliant.adapt import Decision, Observation, Policy, SetBatchSize, SetLearningRate
from pliant.errors import MustBeReplaced, TrainError
from pliant.train import shadow
from pliant.train.adaptation import AdaptationSettings, adaptation_settings
from pliant.train.gradients import GradientReducer
from pliant.train.job import Job
from pliant.train.phases import PhaseMachine
from pliant.train.rendezvous import Left
from pliant.train.step import Step
from pliant.train.step_batches import StepBatches

Event = Death | Arrival | ServerLoss
IS_FULL = os.environ.get("PLIANT_FULL") == "1"
"""Whether all cases are tried, which takes more than an hour."""
pytestmark = [pytest.mark.timeout(7200 if IS_FULL else 120), pytest.mark.usefixtures("one_thread")]
CHANCE = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(24, 3, generator=CHANCE), torch.randint(2, (24,), generator=CHANCE))
"""Four steps of three replicas with two samples each."""
OTHERS = TensorDataset(torch.randn(12, 3, generator=CHANCE))


# --- the programs ---


def net(*sizes: int) -> nn.Sequential:
    first, hidden, last = sizes
    return nn.Sequential(nn.Linear(first, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.25), nn.Linear(hidden, last))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def prepare(job: Job, **loading: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = net(3, 4, 2)
    model, optimizer = job.wrap(model, sgd(model))
    return model, optimizer, job.loader(DATA, **{"batch_size": 4, **loading})


def turn(model: nn.Module, step: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    step.log(loss=loss)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def see(job: Job, notes: Notes, place: Any, value: Any) -> None:
    """Take a note, unless the program runs without effect."""
    trainer = job._run.trainer
    assert trainer is not None, "the job runs"
    if not trainer.is_taken_back and not job.in_shadow:
        notes[place] = value


def evaluate(job: Job, model: nn.Module) -> dict[str, float]:
    """With dropout, so that it draws."""
    for [x] in job.evaluate(OTHERS, 2):
        job.total(sum=model(x).sum().double(), seen=len(x))
    return job.total()


def one_pass(job: Job, notes: Notes) -> None:
    model, optimizer, loader = prepare(job)
    state = job.state(done=0, history=[])
    for epoch in job.epochs(2):
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            state.done += 1
            state.history.append(epoch)
            see(job, notes, ("loss", step.number), step["loss"])


def two_passes(job: Job, notes: Notes) -> None:
    """A GAN: the discriminator's pass keeps what the generator's pass uses."""
    torch.manual_seed(7)
    generator, judge = net(2, 4, 3), net(3, 4, 1)
    [generator, judge], [makes, judges] = job.wrap([generator, judge], [sgd(generator), sgd(judge)])
    loader = job.loader(DATA, batch_size=4)
    state = job.state(noise=0.0)
    for _ in job.epochs(2):
        for step in loader:
            for x, _ in step:
                noise = torch.randn(len(x), 2)
                step.keep(noise=noise)
                with torch.no_grad():
                    fake = generator(noise)
                loss = F.softplus(judge(fake)).mean() + F.softplus(-judge(x)).mean()
                loss.backward()
                step.log(judge=loss)
            update(judges)
            torch.rand(2)
            state.noise += step["judge"]
            see(job, notes, ("noise", step.number), state.noise)
            for x, _ in step:
                for parameter in judge.parameters():
                    parameter.requires_grad_(False)
                loss = F.softplus(-judge(generator(step.kept["noise"]))).mean() + 0 * x.sum()
                loss.backward()
                for parameter in judge.parameters():
                    parameter.requires_grad_(True)
                step.log(makes=loss)
            update(makes)
            see(job, notes, ("figures", step.number), (step["judge"], step["makes"]))


def together_before(job: Job, notes: Notes) -> None:
    """nanoGPT's shape: the first worker estimates the loss before the pass; and all evaluate."""
    model, optimizer, loader = prepare(job)
    state = job.state(iter_num=0, best=9.9)
    for _ in job.epochs(1):
        for step in loader:
            state.iter_num += 1
            torch.rand(2)
            found = job.on_first(lambda: float(torch.rand(1)) + float(model(OTHERS.tensors[0]).sum().detach()))
            totals = evaluate(job, model)
            state.best = min(state.best, totals["sum"], found)
            see(job, notes, ("before", step.number), (found, totals, state.best))
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            see(job, notes, ("loss", step.number), step["loss"])


def together_after(job: Job, notes: Notes) -> None:
    model, optimizer, loader = prepare(job)
    state = job.state(best=9.9)
    for _ in job.epochs(1):
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            totals = evaluate(job, model)
            state.best = min(state.best, job.all_reduce(totals["sum"], "max"))
            squares = job.on_replicas(lambda replica: replica**2 + float(torch.rand(1)))
            see(job, notes, ("after", step.number), (totals, state.best, squares, step["loss"]))


def end_of_epoch(job: Job, notes: Notes) -> None:
    model, optimizer, loader = prepare(job)
    scheduler = job.track("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    state = job.state(history=[])
    for epoch in job.epochs(2):
        state.history.append(epoch)
        evaluate(job, model)
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
        totals = evaluate(job, model)
        scheduler.step()
        state.history.append(totals["sum"])
        see(job, notes, ("epoch", epoch), totals)


def left_early(job: Job, notes: Notes) -> None:
    """Steps that are passed over, and an epoch that is left before a pass."""
    model, optimizer, loader = prepare(job, batch_size=2)
    state = job.state(passed=0)
    for epoch in job.epochs(2):
        for step in loader:
            if step.index == 1:
                state.passed += 1
                torch.rand(2)
                continue
            if step.index == 2 + epoch:
                break
            for x, y in step:
                if y.sum() == 1 and step.index == 0:
                    step.skip()
                    continue
                turn(model, step, x, y)
            update(optimizer)


def kept_iterator(job: Job, notes: Notes) -> None:
    model, optimizer, loader = prepare(job)
    iterators = []
    for epoch in job.epochs(2):
        iterators.append(iter(loader))
        while True:
            step = next(iterators[-1], None)
            if step is None:
                break
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            see(job, notes, ("loss", step.number), step["loss"])
            if step.index == 1 - epoch:
                break


def looks_first(job: Job, notes: Notes) -> None:
    """A pass without a backward, then one with it; gradients are cleared with every second step."""
    model, optimizer, loader = prepare(job)
    for _ in job.epochs(2):
        for step in loader:
            for x, _ in step:
                step.no_backward()
                step.log(size=x.abs().sum())
            for x, y in step:
                loss = F.cross_entropy(model(x), y) / step["size"]
                loss.backward()
            optimizer.step()
            if step.number % 2:
                optimizer.zero_grad()
            see(job, notes, ("size", step.number), step["size"])


def own_sampler(job: Job, notes: Notes) -> None:
    """The replicas draw from samplers of their own, so nobody knows when the data end; buffers are not synchronised."""
    torch.manual_seed(7)
    model = net(3, 4, 2)
    model, optimizer = job.wrap(model, sgd(model), sync_buffers=False)
    loader = job.loader(DATA, batch_size=4, sampler=RandomSampler(DATA, num_samples=8))
    for _ in job.epochs(2):
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            see(job, notes, ("loss", step.number), step["loss"])


def own_batches(job: Job, notes: Notes) -> None:
    """`job.steps`, with an average of the weights that is tracked and moved before the pass."""
    torch.manual_seed(7)
    model = net(3, 4, 2)
    model, optimizer = job.wrap(model, sgd(model))
    average = job.track("average", net(3, 4, 2))
    for number, step in enumerate(job.steps(4)):
        assert number == step.number, "also where it begins later, after a step in the shadow"
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
        for replica in step:
            chosen = torch.randint(24, (3,))
            turn(model, step, DATA.tensors[0][chosen] * (replica + 1), DATA.tensors[1][chosen])
        update(optimizer)
        see(job, notes, ("loss", step.number), step["loss"])


class Plans(Policy):
    """Decides by the number of the step."""

    def after_step(self, obs: Observation) -> Decision | None:
        if obs.step == 1:
            return SetBatchSize(size=1, reason="the plan")
        return SetLearningRate(factor=0.5, reason="the plan") if obs.step == 3 else None


def decides(job: Job, notes: Notes) -> None:
    """A policy changes the batch size and the learning rate."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25), nn.Linear(4, 2))
    model, optimizer = job.wrap(model, sgd(model))
    loader = job.loader(DATA, batch_size=2)
    for _ in job.epochs(1):
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            see(job, notes, ("loss", step.number), (step["loss"], job.batch_size))


def scheduled(job: Job, notes: Notes) -> None:
    """For priority: the learning rate changes, and the state changes, before the pass."""
    model, optimizer, loader = prepare(job, batch_size=2)
    scheduler = job.track("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7))
    state = job.state(begun=0, done=0)
    for _ in job.epochs(1):
        for step in loader:
            state.begun += 1
            if step.number:
                scheduler.step()
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            state.done += 1
            see(job, notes, ("loss", step.number), step["loss"])


def meets(job: Job, notes: Notes) -> None:
    """For priority: evaluations before and after a pass, and two epochs."""
    model, optimizer, loader = prepare(job, batch_size=2)
    state = job.state(best=9.9)
    for epoch in job.epochs(2 if IS_FULL else 1):
        for step in loader:
            if step.index == 2:
                found = job.on_first(lambda: float(model[0].weight.sum().detach()))
                see(job, notes, ("first", step.number), found)
            for x, y in step:
                turn(model, step, x, y)
            update(optimizer)
            if not step.index:
                state.best = min(state.best, job.all_reduce(float(model[3].weight.sum().detach()), "max"))
                see(job, notes, ("best", step.number), state.best)
        see(job, notes, ("epoch", epoch), evaluate(job, model))


SHAPES: dict[str, tuple[Program, str]] = {
    each.__name__: (each, "fifo")
    for each in (
        one_pass,
        two_passes,
        together_before,
        together_after,
        end_of_epoch,
        left_early,
        kept_iterator,
        looks_first,
        own_sampler,
        own_batches,
        decides,
    )
}
SHAPES |= {f"{each.__name__}, priority": (each, "priority") for each in (scheduled, meets, one_pass)}


def adapting(shape: str) -> AdaptationSettings:
    return adaptation_settings(None, [Plans()] if shape == "decides" else [], {}, "", "")


# --- what must hold ---


@functools.cache
def undisturbed(shape: str) -> Actor:
    """One worker that is alone."""
    world = World(SHAPES[shape][0], 1, sync=SHAPES[shape][1], adapting=lambda: adapting(shape))
    world.run()
    assert world.actors[0].state is not None, "it has come to its end"
    return world.actors[0]


SELDOM = 1000
"""Steps between two comparisons of the workers: only those that follow a change, and at the end."""


def play(
    shape: str, size: int = 3, schedule: Schedule = LAZY, events: Sequence[Event] = (), verify: int = SELDOM
) -> World:
    """Run a program on workers to whom this happens; fail if it is not as if nothing had happened."""
    program, sync = SHAPES[shape]
    settings = {"schedule": schedule, "events": events, "verify": verify}
    world = World(program, size, sync=sync, adapting=lambda: adapting(shape), **settings)  # type: ignore[arg-type]
    world.run()
    reference = undisturbed(shape)
    total = len(reference.commits)
    assert any(actor.state is not None for actor in world.actors), f"nobody has come to the end: {world.actors}"
    for actor in world.actors:
        what = f"worker {actor.number}"
        if actor.state is not None:
            found = differences(actor.state, reference.state, what)
            assert not found, f"{len(found)} differences: {found[:5]}"
        else:
            assert actor.is_dead or isinstance(actor.outcome, Left | MustBeReplaced), f"{what}: {actor.outcome!r}"
            is_left_behind = isinstance(actor.outcome, MustBeReplaced) and actor.commits
            assert sync == "priority" or not is_left_behind, f"{what} has the state: {actor.outcome}"
        for place, value in actor.notes.items():
            found = differences(value, reference.notes[place], f"{what} at {place}")
            assert not found, found
        counted = counts(actor.commits, may_repeat=sync == "priority")
        last = total if actor.state is not None else max(counted, default=total)
        assert counted == list(range(last + 1 - len(counted), last + 1)), f"{what}: {actor.commits} of {total}"
    return world


def counts(commits: Sequence[int], *, may_repeat: bool) -> list[int]:
    """The steps that were counted in the end. With priority a step may be taken back, and is counted again."""
    found: list[int] = []
    for step in commits:
        while may_repeat and found and found[-1] >= step:
            found.pop()
        found.append(step)
    return found


# --- each moment of each program ---


def every_case(shape: str) -> Iterator[tuple[int, Schedule, list[Event]]]:
    """A worker dies at each moment of a run, and what it had sent reaches any of the others; it is replaced, or not. Or
    a new worker comes."""
    for size, schedule in itertools.product((3, 2), (LAZY, EAGER, REVERSED)):
        moments = play(shape, size, schedule).moments
        for moment, (_, name) in enumerate(moments):
            if name == "request" and moments[moment - 1][1] == moments[min(moment + 1, len(moments) - 1)][1] == name:
                continue  # one of many in a row
            yield size, schedule, [Arrival(moment)]
            for victim in range(size):
                others = [number for number in range(size) if number != victim]
                for reached in range(1 << len(others)):
                    reaches = frozenset(number for place, number in enumerate(others) if reached >> place & 1)
                    yield size, schedule, [Death(moment, victim, reaches, bool(moment % 2))]


def some_cases(shape: str) -> Iterator[tuple[int, Schedule, list[Event]]]:
    """A few deaths, each at another kind of collective; and an arrival."""
    places: dict[str, list[int]] = {}
    for moment, (_, name) in enumerate(play(shape).moments):
        places.setdefault(name, []).append(moment)
    own = sorted(SHAPES).index(shape)  # other programs, other choices
    for number, moments in list(enumerate(places.values(), own))[own % 2 :: 4]:
        moment = moments[len(moments) // 2]
        victim, reached = number % 3, number // 3 % 4
        others = [each for each in range(3) if each != victim]
        reaches = frozenset(each for place, each in enumerate(others) if reached >> place & 1)
        schedule = (LAZY, REVERSED, EAGER)[number // 2 % 3]
        yield 3, schedule, [Death(moment, victim, reaches, bool(number // 2 % 2))]
    yield 2, EAGER, [Arrival(5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_whoever_dies_or_comes_at_whichever_moment_the_result_is_that_of_one_worker(shape: str) -> None:
    for number, (size, schedule, events) in enumerate(every_case(shape) if IS_FULL else some_cases(shape)):
        verify = SELDOM if number % 4 else 1
        try:
            play(shape, size, schedule, events, verify)
        except BaseException as error:
            said = f"play({shape!r}, {size}, {schedule}, {events}, {verify}): {error!r:.2000}"
            raise AssertionError(said) from error
        if number % 50 == 49:
            gc.collect()


# --- random walks ---


MOMENTS, WORKERS = st.integers(0, 200), st.integers(0, 4)
DEATHS = st.builds(Death, MOMENTS, WORKERS, st.frozensets(WORKERS), st.booleans())
EVENTS = st.lists(st.builds(Arrival, MOMENTS) | DEATHS | st.builds(ServerLoss, MOMENTS), min_size=1, max_size=5)


@settings(max_examples=3000 if IS_FULL else 25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 4), st.integers(0, 2**32), EVENTS)
def test_workers_come_and_die_in_any_order(shape: str, size: int, seed: int, events: list[Event]) -> None:
    play(shape, size, Schedule(seed=seed), events)


# --- errors have causes ---


def breaks(job: Job, notes: Notes) -> None:
    """The loop over a step is left before all replicas have had their turn."""
    model, optimizer, loader = prepare(job, batch_size=2)
    for _ in job.epochs(1):
        for step in loader:
            for x, y in step:
                turn(model, step, x, y)
                if step.index == 1:
                    break
            update(optimizer)


@pytest.mark.parametrize("events", [[], [Death(40, 0, frozenset({1}))], [Death(60, 2)]])
def test_a_loop_that_is_left_ends_the_job_with_its_cause(events: list[Event]) -> None:
    for schedule in (LAZY, EAGER):
        with pytest.raises(TrainError, match="before all replicas had their turn"):
            World(breaks, 3, replicas=6, schedule=schedule, events=events).run()


# --- negative controls: the walk notices what is missing ---


def is_caught(shape: str, cases: Sequence[tuple[int, Schedule, list[Event]]]) -> bool:
    undisturbed(shape)
    for size, schedule, events in cases:
        try:
            play(shape, size, schedule, events)
        except (AssertionError, TrainError):
            return True
    return False


def test_the_walk_notices_workers_that_go_on_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not ask whether all have the sums is one pass ahead after a loss."""
    last_sent = [moment for moment, sent in enumerate(play("one_pass").moments) if sent == (2, "buffers")]
    cases = [(3, LAZY, [Death(moment, 0, frozenset({1}))]) for moment in last_sent]
    assert not is_caught("one_pass", cases)
    original = PhaseMachine._arrived
    monkeypatch.setattr(PhaseMachine, "_arrived", lambda self, why, _: original(self, why, True))
    assert is_caught("one_pass", cases)


def test_the_walk_notices_gradients_that_are_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(3, LAZY, [Death(moment, 1, frozenset())]) for moment in (50, 60, 70)]
    assert not is_caught("one_pass", cases)
    monkeypatch.setattr(GradientReducer, "_reset_gradients", lambda self: None)
    assert is_caught("one_pass", cases)


def test_the_walk_notices_batches_that_are_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a change of view is no reason to load the batches again, the feeder is not where the step began."""
    cases = [(3, schedule, [Death(moment, 1, frozenset())]) for schedule in (LAZY, EAGER) for moment in (50, 60, 70)]
    assert not is_caught("together_before", cases)
    monkeypatch.setattr(StepBatches, "_host", _host_once)
    assert is_caught("together_before", cases)


def test_the_walk_notices_a_step_in_the_shadow_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker's `enumerate` has counted it, so it is one ahead of the others."""
    cases = [(2, schedule, [Arrival(moment)]) for schedule in (EAGER, Schedule(seed=1)) for moment in (5, 30)]
    assert not is_caught("own_batches", cases)
    monkeypatch.setattr(shadow, "Step", lambda *args, is_shadow: Step(*args))
    assert is_caught("own_batches", cases)


def _host_once(self: StepBatches, original: Any = StepBatches._host) -> None:
    """Do not go back to where the step began, as long as the same replicas are hosted."""
    hosted = getattr(self, "test_hosted", None)
    if hosted == self.hosted and self._replicas.times_dealt == getattr(self, "test_dealt", None):
        return
    self.test_hosted, self.test_dealt = self.hosted, self._replicas.times_dealt  # type: ignore[attr-defined]
    self._dealt = -1
    original(self)
