"""Paced nets: real parameters and gradients, and the time of a device that only sleeps."""

from __future__ import annotations

import pytest
import torch
from pliant_repro.paced import WIDTH, Device, PacedNet
from pliant_repro.profiles import LayerShape, Profile, layers_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pliant.errors import ConfigError
from pliant.train import trace

SHAPES = (LayerShape("first", (7,), 1), LayerShape("heavy", (5 * WIDTH + 3,), 4), LayerShape("free", (300,), 0))
TINY = Profile("tiny", (*SHAPES, LayerShape("last", (WIDTH,), 3)), compute_s=0.24, batch=32, scale=1.0)


class Clock:
    """A time that passes only where somebody sleeps, or the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def device(self, waited: list[float] | None = None) -> Device:
        until = None if waited is None else lambda: waited[0]
        return Device(until, now_s=lambda: self.now_s, sleep=self.pass_by)

    def pass_by(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def run(device: Device, seconds: float) -> tuple[float, float]:
    begin_and_end = device.launch(seconds)
    device.synchronize()
    return begin_and_end


def samples(replica: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(replica))


def gradients(net: nn.Module, data: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(data).backward()
    found = [each.grad for each in net.parameters()]
    assert all(each is not None for each in found)
    return [each.clone() for each in found if each is not None]


# The device


def test_time_between_layers_costs_nothing() -> None:
    clock = Clock()
    device = clock.device()
    assert run(device, 1.0) == (100.0, 101.0)
    clock.now_s += 0.03
    assert run(device, 1.0) == (101.0, 102.0)
    assert clock.now_s == 102.0


def test_a_late_program_catches_up() -> None:
    clock = Clock()
    device = clock.device()
    run(device, 1.0)
    clock.now_s += 0.04
    run(device, 0.01)
    assert clock.now_s == pytest.approx(101.04)  # had nothing to sleep for
    run(device, 0.1)
    assert clock.now_s == pytest.approx(101.11)


def test_what_is_launched_after_a_stall_begins_now() -> None:
    clock = Clock()
    device = clock.device()
    run(device, 1.0)
    clock.now_s += 0.02
    device.stalled()
    clock.now_s += 0.01  # the overhead of the layer itself
    assert run(device, 1.0) == (pytest.approx(101.02), pytest.approx(102.02))


def test_a_stall_that_the_device_did_not_notice_costs_nothing() -> None:
    clock = Clock()
    device = clock.device()
    device.launch(1.0)
    clock.now_s += 0.5
    device.stalled()  # waited while the device was computing
    assert run(device, 1.0) == (101.0, 102.0)


def test_the_clock_goes_on_from_the_end_of_a_wait() -> None:
    clock, waited = Clock(), [3.0]
    device = clock.device(waited)
    run(device, 1.0)
    clock.now_s += 0.02
    run(device, 1.0)
    assert clock.now_s == pytest.approx(102.0)
    waited[0] = clock.now_s = clock.now_s + 0.02
    clock.now_s += 0.01  # an update, say: it is paced already
    run(device, 1.0)
    assert clock.now_s == pytest.approx(103.02)
    run(device, 1.0)
    assert clock.now_s == pytest.approx(104.02)


def test_a_pause_gives_no_time_away() -> None:
    clock = Clock()
    device = clock.device()
    run(device, 1.0)
    clock.now_s += 60.0
    assert run(device, 1.0) == (161.0, 162.0)


# The net


def test_one_parameter_per_layer_in_its_order_with_the_same_bits_everywhere() -> None:
    net = PacedNet(TINY)
    torch.rand(3)
    again = PacedNet(TINY)
    sizes = {name: each.numel() for name, each in net.named_parameters()}
    assert sizes == {f"layers.{shape.name}.weight": shape.num_parameters for shape in TINY.layers}
    assert list(sizes) == [f"layers.{shape.name}.weight" for shape in TINY.layers]
    assert all(map(torch.equal, net.parameters(), again.parameters()))
    assert not torch.equal(next(PacedNet(TINY, seed=2).parameters()), next(net.parameters()))


def test_gradients_are_dense_and_tell_data_weights_and_layers_apart() -> None:
    net = PacedNet(TINY, device=Clock().device())
    of_0, of_1 = gradients(net, samples(0)), gradients(net, samples(1))
    assert all(map(torch.equal, of_0, gradients(net, samples(0))))
    for mine, other in zip(of_0, of_1, strict=True):
        assert mine.count_nonzero() == mine.numel()
        assert (mine != other).all()
        assert len(mine.unique()) > 0.9 * mine.numel()  # so a run in another place would be seen
    assert len({float(each[0]) for each in of_0}) == len(of_0)
    with torch.no_grad():
        net.layers["heavy"].weight[7] += 1.0
    changed = gradients(net, samples(0))
    assert (changed[1] != of_0[1]).nonzero().tolist()[0] == [7]


def test_training_stays_finite_and_alive() -> None:
    net = PacedNet(TINY, device=Clock().device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for step in range(400):
        optimizer.zero_grad()
        net(samples(step % 7)).backward()
        optimizer.step()
    for each in net.parameters():
        assert each.grad is not None
        assert each.isfinite().all()
        assert each.abs().max() < 1e3
        assert each.grad.abs().min() > 1e-20


def test_a_batch_counts_every_sample() -> None:
    net = PacedNet(TINY, device=Clock().device())
    batch = torch.stack([samples(0), samples(1)])
    both = gradients(net, batch)
    assert all((one != two).any() for one, two in zip(both, gradients(net, batch[:1]), strict=True))
    with pytest.raises(ConfigError, match=r"\[3\].*256"):
        net(torch.zeros(3))


def test_a_step_takes_its_time_layer_by_layer() -> None:
    clock = Clock()
    net = PacedNet(TINY, device=clock.device())
    costs = layers_of(TINY)
    left_s: list[float] = []
    for each in net.parameters():
        each.register_post_accumulate_grad_hook(lambda _: left_s.append(clock.now_s))
    loss = net(samples(0))
    assert clock.now_s == pytest.approx(100.0 + TINY.compute_s / 3)
    loss.backward()
    assert clock.now_s == pytest.approx(100.0 + TINY.compute_s)
    expected_s = 100.0 + TINY.compute_s / 3
    for found_s, cost in zip(left_s, reversed(costs), strict=True):
        expected_s += cost.backward_s  # no gradient leaves before its layer is computed
        assert found_s == pytest.approx(expected_s)


def test_the_weight_is_waited_for_before_the_device_runs() -> None:
    clock, waited = Clock(), [0.0]
    net = PacedNet(TINY, device=clock.device(waited))
    heavy = net.layers["heavy"].weight

    class LateWeight(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if not waited[0] and any(each is heavy for each in args):
                clock.now_s += 5.0
                waited[0] = clock.now_s
            return func(*args, **(kwargs or {}))

    with LateWeight():
        net(samples(0)).backward()
    assert clock.now_s == pytest.approx(105.0 + TINY.compute_s)


def test_layers_appear_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str, float, float]] = []
    monkeypatch.setattr(trace, "event", lambda *event: events.append(event))
    PacedNet(TINY, device=Clock().device())(samples(0)).backward()
    names = [shape.name for shape in TINY.layers]
    assert [event[:2] for event in events] == [
        *(("forward", name) for name in names),
        *(("backward", name) for name in reversed(names)),
    ]
    lasted_s = [end_s - begin_s for _, _, begin_s, end_s in events]
    costs = layers_of(TINY)
    expected_s = [each.forward_s for each in costs] + [each.backward_s for each in reversed(costs)]
    assert lasted_s == pytest.approx(expected_s)
