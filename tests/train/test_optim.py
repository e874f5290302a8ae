"""Optimizers that average models: their values, computed again by hand, and how they stand in for others."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import random
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from averaging import MOMENTUM, RATE
from gang import gang
from stage import new_workers, spec_of, view_of
from torch import nn

import pliant
from pliant.comm.engine import Engine
from pliant.comm.transport import loopback_engines
from pliant.errors import ConfigError, TrainError, Unsliceable
from pliant.train.optim import AveragingOptimizer, peer_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "averaging.py"
HOSTS = ("127.0.0.1", "127.0.0.1", "127.0.0.2")


def _sgd(*values: float, momentum: float = 0.0, dtype: torch.dtype = torch.float64) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.tensor(values, dtype=dtype))], RATE, momentum=momentum)


def _joined(optimizers: Sequence[AveragingOptimizer], ranks: Sequence[Engine]) -> None:
    for optimizer, engine in zip(optimizers, ranks, strict=True):
        optimizer.enter_view(engine, [1] * len(ranks))


def _value(optimizer: AveragingOptimizer) -> Any:
    return optimizer.param_groups[0]["params"][0].detach().numpy().copy()


def _step(optimizers: Sequence[AveragingOptimizer], step: int, gradient: Callable[[int, Any], Any]) -> None:
    """All workers do a step at the same time; `gradient` gives worker r's for its own model."""
    for optimizer in optimizers:
        optimizer.begin(step)
    for rank, optimizer in enumerate(optimizers):
        [parameter] = optimizer.param_groups[0]["params"]
        parameter.grad = torch.as_tensor(gradient(rank, _value(optimizer)), dtype=parameter.dtype)
        optimizer.wait()
    for optimizer in optimizers:
        optimizer.step()


# --- SMA ---


def test_the_vector_of_synchronous_averaging(no_leaks: None) -> None:
    """f = x^2 at 1 and 3: after a step 0.9 and 2.3."""
    optimizers = [pliant.SynchronousAveraging(_sgd(x, dtype=torch.float32), alpha=0.1) for x in (1.0, 3.0)]
    with loopback_engines(HOSTS[:2]) as ranks:
        _joined(optimizers, ranks)
        _step(optimizers, 0, lambda _, x: 2 * x)
    assert [float(_value(optimizer)[0]) for optimizer in optimizers] == pytest.approx([0.9, 2.3], rel=1e-6)


def test_three_workers_with_momentum_for_five_steps(no_leaks: None) -> None:
    begin = np.array([[1.0, -2.0], [3.0, 0.5], [-4.0, 7.0]])
    pull = np.array([[0.0, 1.0], [2.0, -1.0], [5.0, 3.0]])
    optimizers = [pliant.SynchronousAveraging(_sgd(*row, momentum=MOMENTUM), alpha=0.3) for row in begin]
    x, m = begin.copy(), np.zeros_like(begin)
    with loopback_engines(HOSTS) as ranks:
        _joined(optimizers, ranks)
        for step in range(5):
            _step(optimizers, step, lambda rank, value: value - pull[rank])
            m = MOMENTUM * m + (x - pull)
            x = (1 - 0.3) * x + 0.3 * x.mean(0) - RATE * m
            assert np.allclose([_value(optimizer) for optimizer in optimizers], x, rtol=1e-12), step


def test_parameters_of_all_kinds_are_averaged(no_leaks: None) -> None:
    """Types, an odd memory order, an empty one; those that are frozen stay."""
    torch.manual_seed(5)

    def parameters() -> list[nn.Parameter]:
        odd = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
        made = [nn.Parameter(t) for t in (torch.randn(5), torch.randn(4).bfloat16(), odd, torch.empty(0))]
        return [*made, nn.Parameter(torch.randn(3).double()), nn.Parameter(torch.randn(2), requires_grad=False)]

    held = [parameters() for _ in range(3)]
    before = [[parameter.detach().clone() for parameter in each] for each in held]
    optimizers = [pliant.SynchronousAveraging(torch.optim.SGD(each, 0.1), alpha=1.0) for each in held]
    with loopback_engines(HOSTS) as ranks:
        _joined(optimizers, ranks)
        for optimizer in optimizers:
            optimizer.begin(0)
        for optimizer in optimizers:
            optimizer.wait()
            optimizer.step()  # without gradients: only the mean
    for index, parameter in enumerate(held[0]):
        mean = torch.stack([each[index].double() for each in before]).mean(0)
        for each, old in zip(held, before, strict=True):
            wanted = mean if parameter.requires_grad else old[index].double()
            tolerance = 1e-2 if parameter.dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(each[index].detach().double(), wanted, rtol=tolerance, atol=1e-7)


def test_a_step_that_was_begun_and_dropped_leaves_nothing(no_leaks: None) -> None:
    """As at the end of an epoch in the middle of an accumulation."""
    optimizers = [pliant.SynchronousAveraging(_sgd(x), alpha=0.1) for x in (1.0, 3.0)]
    with loopback_engines(HOSTS[:2]) as ranks:
        _joined(optimizers, ranks)
        for optimizer in optimizers:
            optimizer.begin(0)
        _step(optimizers, 0, lambda _, x: 2 * x)
        for optimizer in optimizers:
            optimizer.step()  # once more, with the same gradients: nothing is averaged twice
    assert [float(_value(optimizer)[0]) for optimizer in optimizers] == pytest.approx([0.7, 1.7], rel=1e-12)


def test_the_mean_of_a_pass_that_counts_outlives_its_view(no_leaks: None) -> None:
    """The third worker is lost when all have the sums: the survivors enter their next view before they step."""
    optimizers = [pliant.SynchronousAveraging(_sgd(x), alpha=0.1) for x in (1.0, 3.0, 8.0)]
    with loopback_engines(HOSTS) as ranks, loopback_engines(HOSTS[:2]) as left:
        _joined(optimizers, ranks)
        for optimizer in optimizers:
            optimizer.begin(0)
        for optimizer in optimizers:
            optimizer.wait()
        survivors = optimizers[:2]
        _joined(survivors, left)
        for optimizer in survivors:
            optimizer.param_groups[0]["params"][0].grad = torch.zeros(1, dtype=torch.float64)
            optimizer.step()
        assert [float(_value(optimizer)[0]) for optimizer in survivors] == pytest.approx([1.3, 3.1], rel=1e-12)
        _step(survivors, 1, lambda _, x: 0 * x)  # the mean of two: 2.2
    assert [float(_value(optimizer)[0]) for optimizer in survivors] == pytest.approx([1.39, 3.01], rel=1e-12)


# --- AD-PSGD ---


def test_average_apply_save_in_this_order(no_leaks: None) -> None:
    """With two workers the other one is the peer: its model after its last step, not in the middle of this one."""
    optimizers = [pliant.PairAveraging(_sgd(x)) for x in (1.0, 3.0)]
    x = np.array([1.0, 3.0])
    with loopback_engines(HOSTS[:2]) as ranks:
        _joined(optimizers, ranks)
        saved = torch.empty(8, dtype=torch.uint8)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.begin(step)
                assert optimizer._asked is not None
                optimizer._asked[1].wait()
            gradients = 2 * x
            for optimizer, gradient in zip(optimizers, gradients, strict=True):
                optimizer.param_groups[0]["params"][0].grad = torch.tensor([gradient])
                optimizer.step()
            x = (x + x[::-1]) / 2 - RATE * gradients
            assert np.allclose([_value(optimizer)[0] for optimizer in optimizers], x, rtol=1e-12), step
            ranks[1].request(0, "model of a pair", saved).wait()
            assert saved.view(torch.float64).item() == x[0], "what is saved is not what was applied"
            assert [optimizer.peer for optimizer in optimizers] == [1, 0]


def test_peers_that_lag_behind_give_what_they_saved_last(no_leaks: None) -> None:
    fast, slow = (pliant.PairAveraging(_sgd(x)) for x in (1.0, 5.0))
    with loopback_engines(HOSTS[:2]) as ranks:
        _joined([fast, slow], ranks)
        value = 1.0
        for step in range(3):
            _step([fast], step, lambda _, x: 2 * x)
            value = (value + 5.0) / 2 - RATE * 2 * value
            assert _value(fast)[0] == pytest.approx(value, rel=1e-12)
        _step([slow], 0, lambda _, x: 2 * x)
        assert _value(slow)[0] == pytest.approx((5 + value) / 2 - RATE * 10, rel=1e-12)


def test_a_peer_that_cannot_be_had_is_done_without(no_leaks: None) -> None:
    optimizer = pliant.PairAveraging(_sgd(1.0))
    with loopback_engines(HOSTS[:2]) as ranks:
        _joined([optimizer], ranks[:1])
        optimizer.enter_view(ranks[0], [1, 1])
        _step([optimizer], 0, lambda _, x: 2 * x)
        assert (optimizer.peer, _value(optimizer)[0]) == (None, pytest.approx(0.8)), "the other has saved nothing yet"
        ranks[1].close()
        _step([optimizer], 1, lambda _, x: 2 * x)
        assert (optimizer.peer, _value(optimizer)[0]) == (None, pytest.approx(0.64)), "the other is gone"


def _statistic(choose: Callable[[int, int, int], int], size: int) -> float:
    """Chi-square of the choices of every rank over the others; the worst of them."""
    worst, steps = 0.0, 4000
    for rank in range(size):
        counts = np.bincount([choose(rank, size, step) for step in range(steps)], minlength=size)
        assert len(counts) == size
        assert counts[rank] == 0, "a worker chose itself"
        expected = steps / (size - 1)
        worst = max(
            worst, float(sum((counts[other] - expected) ** 2 / expected for other in range(size) if other != rank))
        )
    return worst


LIMITS = {2: 0.0, 3: 15.1, 5: 21.1}
"""Exceeded once in 10,000 by a uniform choice: chi-square with n - 2 degrees of freedom."""


@pytest.mark.parametrize("size", LIMITS)
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_peers_are_uniform_over_the_others(size: int, seed: int) -> None:
    assert _statistic(lambda rank, size, step: peer_of(rank, size, step, seed), size) <= LIMITS[size]


def test_choices_leave_the_programs_random_numbers_alone(no_leaks: None) -> None:
    optimizer = pliant.PairAveraging(_sgd(1.0))
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    with loopback_engines(HOSTS) as ranks:
        optimizer.enter_view(ranks[0], [1, 1, 1])
        for step in range(5):
            optimizer.begin(step)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[2])


# --- the example ---


def _example(_: int, environ: dict[str, str], optimizer: str) -> str:
    """In a worker: what the example says."""
    os.environ.update(environ)
    sys.argv = ["averaging.py", "--optimizer", optimizer, "--epochs", "2"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue().splitlines()[-1]


@pytest.mark.processes
@pytest.mark.parametrize(("optimizer", "models"), [("pair", 2), ("adaptive", 1)])
def test_the_example(optimizer: str, models: int) -> None:
    view = view_of(new_workers(2))
    with gang(_example, [(spec_of(worker, view).to_environ(), optimizer) for worker in view.workers]) as workers:
        lines = workers.results()
    assert [line.startswith(f"epoch 1 rank {rank} of 2: ") for rank, line in enumerate(lines)] == [True, True], lines
    assert len({line.rpartition(" ")[2] for line in lines}) == models, lines


# --- in the place of another optimizer ---


def test_it_is_the_optimizer_that_it_wraps() -> None:
    inner = _sgd(1.0, momentum=0.5)
    optimizer = pliant.SynchronousAveraging(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    [parameter] = inner.param_groups[0]["params"]
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(2):
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()
        scheduler.step()
    assert seen == [1, 1]
    assert float(parameter.detach()) == pytest.approx(1 - 0.1 * 2 - 0.05 * (0.5 * 2 + 2 * 0.8))
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.025
    assert optimizer.state[parameter].keys() == {"momentum_buffer"}
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(pliant.AdaptiveSGD(inner, 3)))):
        assert twin.state_dict().keys() == inner.state_dict().keys()
        assert twin.inner is not inner
    other = pliant.PairAveraging(_sgd(5.0, momentum=0.5))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.025
    assert "alpha=0.1" in repr(optimizer)


@pytest.mark.parametrize("alpha", [0, -0.1, 1.5, True, "much", float("nan")])
def test_bad_alphas(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="alpha="):
        pliant.SynchronousAveraging(_sgd(1.0), alpha=alpha)


def test_other_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="one of torch's optimizers"):
        pliant.PairAveraging([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="in one way only"):
        pliant.PairAveraging(pliant.SynchronousAveraging(_sgd(1.0)))
    with pytest.raises(Unsliceable, match="closure"):
        pliant.SynchronousAveraging(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))
    with pytest.raises(ConfigError, match="seed="):
        pliant.PairAveraging(_sgd(1.0), seed=0.5)  # type: ignore[arg-type]
    for change_step in (-1, 2.0, True):
        with pytest.raises(ConfigError, match="change_step="):
            pliant.AdaptiveSGD(_sgd(1.0), change_step)  # type: ignore[arg-type]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLIANT_WORKER", "PLIANT_VIEW"):
        monkeypatch.delenv(name, raising=False)


def _wrapped(job: Any, *, twice: bool = False) -> Any:
    model = nn.Linear(2, 1)
    more = [torch.optim.SGD([model.bias], 0.1)] if twice else []
    averaging = pliant.AdaptiveSGD(torch.optim.SGD(model.parameters(), 0.1), 2)
    return (
        *job.wrap(model, [averaging, *more] if more else averaging),
        job.loader([torch.ones(2) * index for index in range(24)], batch_size=2),
    )


def test_several_replicas_in_a_worker_are_refused(alone: None) -> None:
    with pliant.join(replicas=2) as job:
        _wrapped(job)
        with pytest.raises(ConfigError, match=r"2 replicas are on 1 workers: use pliant\.join\(replicas=None\)"):
            next(iter(job.epochs(1)))


def test_another_optimizer_beside_it_is_refused(alone: None) -> None:
    with pliant.join() as job, pytest.raises(ConfigError, match="one optimizer"):
        _wrapped(job, twice=True)


def test_what_needs_sums_of_gradients_is_refused(alone: None) -> None:
    with pliant.join(monitor={"noise_scale": 1}) as job:
        _wrapped(job)
        with pytest.raises(ConfigError, match="noise_scale"):
            next(iter(job.epochs(1)))


def test_an_unknown_scheduler_of_the_inner_optimizer_is_found(alone: None) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    with pliant.join() as job:
        job.wrap(model, pliant.PairAveraging(inner))
        job.loader([torch.ones(2)] * 8, batch_size=2)
        with pytest.raises(TrainError, match="job.track"):
            next(iter(job.epochs(1)))
        job.track("scheduler", scheduler)
        assert next(iter(job.epochs(1))) == 0


def test_priority_is_not_for_these_and_one_worker_just_trains(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    with pliant.join(sync="priority") as job:
        model, optimizer, loader = _wrapped(job)
        before = model.weight.detach().clone()
        for _ in job.epochs(1):
            for step in loader:
                for x in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert job.step == 12
        assert not torch.equal(before, model.weight.detach())
    assert "AdaptiveSGD(change_step=2, alpha=0.1) averages models; using 'fifo'" in capfd.readouterr().out
