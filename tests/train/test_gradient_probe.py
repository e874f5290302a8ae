"""The probe sees what NumPy sees: squares and variances of real gradients, on any number of workers, in any mode.

Each worker is a thread with an engine of its own, as in a job; the gradients come from backward through hooks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pliant.comm.engine import Engine
from pliant.comm.transport import loopback_engines
from pliant.train import gradient_probe
from pliant.train.deferred import DeferredUpdates
from pliant.train.gradient_probe import GradientProbe
from pliant.train.gradients import GradientReducer
from pliant.train.replicas import even_blocks
from pliant.train.sync import SyncConfig

BATCH = 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that parameters of a test have several, and are shared between workers."""
    monkeypatch.setattr(gradient_probe, "CHUNK", 64)
    monkeypatch.setattr(gradient_probe, "VARIANCE_CHUNK", 64)


class Net(nn.Module):
    """Variables of one element and of thousands, and one that some replicas do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 53), nn.Linear(53, 7), nn.Linear(7, 1, bias=False)
        self.shift, self.sometimes = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(131))

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.relu(self.first(inputs))))
        found: torch.Tensor = self.third(hidden).squeeze(1) + self.shift
        return found + self.sometimes.square().mean() if uses_all else found


def _data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    draw = torch.Generator().manual_seed(1000 * step + replica)
    inputs = torch.randn(BATCH, 20, generator=draw)
    return inputs, inputs.sum(1) + torch.randn(BATCH, generator=draw), replica != 1


def _net() -> Net:
    """Always the same, in whichever thread: the global generator is not asked."""
    model, draw = Net(), torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) / 4
    return model


def _backward(model: nn.Module, step: int, replica: int) -> None:
    inputs, targets, uses_all = _data(step, replica)
    nn.functional.mse_loss(model(inputs, uses_all), targets).backward()  # type: ignore[no-untyped-call]


def _worker(
    engine: Engine,
    replicas: int,
    steps: int,
    sync: str,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    kwargs: Any,
) -> dict[str, Any]:
    """One worker's training loop, without a trainer around it."""
    model = _net()
    optimizer = make_optimizer(model.parameters())
    placed = even_blocks(replicas, engine.size)
    begin = sum(placed[: engine.rank])
    gradients = GradientReducer(list(model.named_parameters()), replicas, find_unused=True)
    deferred = DeferredUpdates(
        gradients.parameters, gradients.names, can_undo=False, notify=print, optimizers=[optimizer]
    )
    probe = gradients.probe = GradientProbe(gradients.parameters, [optimizer], **kwargs)
    gradients.enter_view(engine, placed)
    told: list[dict[str, float | None]] = []
    for step in range(steps + 1):
        gradients.plan_step(SyncConfig(sync, slice_bytes=1024), range(len(gradients.parameters)))
        gradients.begin_step(step)
        for slot in range(placed[engine.rank]):
            optimizer.zero_grad()
            gradients.begin_turn(slot)
            gradients.record_samples(BATCH)
            _backward(model, step, begin + slot)
        row = engine.all_gather("row", torch.frombuffer(bytearray(probe.pack_row()), dtype=torch.uint8))
        if gradients.are_deferred:
            for awaited in gradients.pending_sums():
                awaited.handle.wait()
                for index, total in awaited.members:
                    if total is not None:
                        gradients.sum_arrived(index)
                        gradients.parameters[index].grad = total
            gradients.sums_complete()
        else:
            gradients.wait()
        optimizer.step()
        rows = row.wait()
        assert rows is not None
        probe.learn([bytes(each.numpy()) for each in rows])
        if step:
            told.append(probe.figures())  # of the step before, as it travels with this one's row
    gradients.close()
    deferred.flush()
    return {"told": told, "weights": [parameter.detach().clone() for parameter in model.parameters()], "probe": probe}


def _run(
    replicas: int, workers: int, steps: int = 3, sync: str = "fifo", optimizer: Any = None, **kwargs: Any
) -> list[dict[str, Any]]:
    make = optimizer or partial(torch.optim.SGD, lr=0.05)
    with loopback_engines(["host"] * workers) as made, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_worker, engine, replicas, steps, sync, make, kwargs) for engine in made]
        return [future.result(timeout=30) for future in futures]


def _denominators(squares: np.ndarray, steps: float) -> np.ndarray:
    """Adam's; infinite for what has never had a gradient, which shall not count."""
    return np.where(squares == 0, np.inf, np.sqrt(squares / (1 - 0.999**steps)) + 1e-8)


def _truth(replicas: int, steps: int, optimizer: Any = None) -> list[tuple[list[list[np.ndarray]], list[np.ndarray]]]:
    """Each step's gradients of each replica, and what Adam would divide them by."""
    model = _net()
    used = (optimizer or partial(torch.optim.SGD, lr=0.05))(model.parameters())
    found = []
    for step in range(steps):
        each: list[list[np.ndarray]] = []
        under = [
            _denominators(state["exp_avg_sq"].double().numpy(), float(state["step"]))
            if (state := used.state.get(parameter))
            else np.ones(())
            for parameter in model.parameters()
        ]
        for replica in range(replicas):
            other = copy.deepcopy(model)
            other.zero_grad()
            _backward(other, step, replica)
            each.append([np.zeros(p.shape) if p.grad is None else p.grad.double().numpy() for p in other.parameters()])
        found.append((each, under))
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.tensor(np.mean([one[number] for one in each], 0), dtype=torch.float32)
        used.step()
    return found


def _noise(each: Sequence[Sequence[np.ndarray]]) -> tuple[float, float]:
    """(|G|^2, S) of one step, by the book."""
    flat = np.stack([np.concatenate([gradient.ravel() for gradient in one]) for one in each])
    n, whole = len(each), BATCH * len(each)
    small, big = (flat**2).sum(1).mean(), (flat.mean(0) ** 2).sum()
    return (whole * big - BATCH * small) / (whole - BATCH), (small - big) / (1 / BATCH - 1 / (n * BATCH))


def _spread(each: Sequence[Sequence[np.ndarray]]) -> float:
    return sum(float(np.linalg.norm(np.var(np.stack(variable), axis=0))) for variable in zip(*each, strict=True))


@pytest.mark.parametrize("sync", ["fifo", "priority"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_it_finds_what_numpy_finds(workers: int, sync: str) -> None:
    expected = [(*_noise(each), _spread(each)) for each, _ in _truth(3, 3)]
    for found in _run(3, workers, sync=sync, noise_scale=1, variance=1):
        for step, told in enumerate(found["told"]):
            sqr, var = (np.mean([one[place] for one in expected[: step + 1]]) for place in (0, 1))
            assert told["gradient_sqr"] == pytest.approx(sqr, rel=2e-5)
            assert told["gradient_var"] == pytest.approx(var, rel=2e-5)
            assert told["variance"] == pytest.approx(expected[step][2], rel=2e-5)


def test_the_noise_scale_has_the_same_bits_on_any_number_of_workers() -> None:
    found = {
        tuple(told["noise_scale"] for told in each["told"])
        for workers, sync in ((1, "fifo"), (2, "fifo"), (3, "fifo"), (4, "fifo"), (3, "priority"))
        for each in _run(4, workers, sync=sync, noise_scale=1)
    }
    assert len(found) == 1
    assert None not in found.pop()


@pytest.mark.parametrize("workers", [1, 3])
def test_only_on_due_steps_and_without_changing_a_bit(workers: int) -> None:
    plain = _run(3, workers, 5)
    watching_uses = _run(3, workers, 5, noise_scale=2, variance=4)
    for one, other in zip(plain, watching_uses, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
        told = other["told"]
        changes = [step for step in range(1, 5) if told[step]["gradient_var"] != told[step - 1]["gradient_var"]]
        assert changes == [2, 4]
        assert [step for step in range(1, 5) if told[step]["variance"] != told[step - 1]["variance"]] == [4]
        assert all(value is None for told in one["told"] for value in told.values())


def test_adam_counts_what_its_updates_see() -> None:
    """Known from the second step on, when there is something to divide by."""
    adam = partial(torch.optim.Adam, lr=0.01)
    truth = _truth(3, 3, adam)
    scaled = [[[g / d for g, d in zip(one, under, strict=True)] for one in each] for each, under in truth]
    for found in _run(3, 2, optimizer=adam, noise_scale=1):
        told = found["told"]
        assert told[0]["noise_scale"] is None
        assert told[1]["gradient_var"] == pytest.approx(_noise(scaled[1])[1], rel=1e-4)
        assert told[2]["gradient_sqr"] == pytest.approx(np.mean([_noise(s)[0] for s in scaled[1:]]), rel=1e-3)


def test_one_replica_compares_each_step_with_the_one_before() -> None:
    """It needs no sums, so a step's row speaks of the step itself: from the second step on."""
    [found] = _run(1, 1, 3, noise_scale=1)
    truth = [each[0] for each, _ in _truth(1, 4)]
    for step in (1, 2, 3):
        pairs = [_noise([truth[later - 1], truth[later]]) for later in range(1, step + 1)]
        told = found["told"][step - 1]
        assert told["gradient_sqr"] == pytest.approx(np.mean([sqr for sqr, _ in pairs]), rel=1e-3)
        assert told["gradient_var"] == pytest.approx(np.mean([var for _, var in pairs]), rel=1e-3)


def test_one_replica_with_adam_sees_both_steps_alike() -> None:
    adam = partial(torch.optim.Adam, lr=0.01)
    [found] = _run(1, 1, 2, optimizer=adam, noise_scale=1)
    truth = _truth(1, 3, adam)
    pair = [[g / d for g, d in zip(truth[step][0][0], truth[1][1], strict=True)] for step in (0, 1)]
    assert found["told"][0]["gradient_var"] == pytest.approx(_noise(pair)[1], rel=1e-3)


def test_one_replica_at_an_interval_keeps_the_step_before() -> None:
    [found] = _run(1, 1, 6, noise_scale=3)
    values = [None, *(told["gradient_var"] for told in found["told"])]
    assert values[:3] == [None] * 3
    assert values[3] == values[5] != values[6]
    truth = [each[0] for each, _ in _truth(1, 4)]
    assert values[3] == pytest.approx(_noise([truth[2], truth[3]])[1], rel=1e-3)


def test_what_overflows_is_left_out_and_the_state_goes_on() -> None:
    [found] = _run(2, 1, 3, noise_scale=1, variance=1)
    probe: GradientProbe = found["probe"]
    before = probe.figures()
    other = GradientProbe(list(_net().parameters()), noise_scale=1, variance=1)
    other.load_state_dict(probe.state_dict())
    assert other.figures() == before
    assert not any(isinstance(value, float) and math.isnan(value) for value in before.values())
    with loopback_engines(["host"]) as [engine]:
        probe.enter_view(engine, (2,))
        probe.learn([probe.pack_row()])
        for value in (math.inf, math.nan, 1e30):
            assert probe.begin(0)
            probe.record_samples(BATCH)
            probe.add_gradient(2, torch.full((53 * 20,), value))
            probe.gradients_complete()
            probe.add_sum(2, torch.full((53 * 20,), value))
            probe.sums_complete()
            probe.learn([probe.pack_row()])
            assert probe.figures() == before


def test_rows_that_speak_of_different_steps_say_nothing() -> None:
    [found] = _run(2, 1, 2, noise_scale=1)
    probe: GradientProbe = found["probe"]
    before = probe.figures()
    with loopback_engines(["host"]) as [engine]:
        probe.enter_view(engine, (2,))
        nothing = probe.pack_row()
        probe.begin(7)
        probe.record_samples(BATCH)
        probe.add_gradient(2, torch.ones(53 * 20))
        probe.gradients_complete()
        probe.sums_complete()
        probe.learn([probe.pack_row(), nothing])
        assert probe.figures() == before
        assert probe.pack_row() == nothing


def test_several_at_once_are_the_same_as_one_by_one() -> None:
    """As buckets are shown on a device, where each call has its price."""
    parameters = list(_net().parameters())
    draw = torch.Generator().manual_seed(3)
    common = [torch.randn(p.numel(), generator=draw) for p in parameters]
    flats = [[each + torch.randn(each.shape, generator=draw) for each in common] for _ in range(2)]
    sums = [a + b for a, b in zip(*flats, strict=True)]
    found = []
    for at_once in (False, True):
        probe = GradientProbe(parameters, noise_scale=1, variance=1)
        with loopback_engines(["host"]) as [engine]:
            probe.enter_view(engine, (2,))
            probe.begin(0)
            probe.record_samples(BATCH)
            for each in flats:
                if at_once:
                    probe.add_gradients(range(len(parameters)), each)
                else:
                    for index, flat in enumerate(each):
                        probe.add_gradient(index, flat)
            probe.gradients_complete()
            if at_once:
                probe.add_sums(range(len(parameters)), sums)
            else:
                for index, flat in enumerate(sums):
                    probe.add_sum(index, flat)
            probe.sums_complete()
            probe.learn([probe.pack_row()])
        found.append(probe.figures())
    assert found[1] == {name: pytest.approx(value, rel=1e-6) for name, value in found[0].items()}
