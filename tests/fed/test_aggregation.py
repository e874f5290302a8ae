"""Aggregators against steps that NumPy computes anew, planted liars, and the bits of any order of arrival."""

from __future__ import annotations

import copy
import io
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pliant.errors import ConfigError, TrainError
from pliant.fed.aggregation import (
    AGGREGATORS,
    Aggregator,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedBuff,
    FedYogi,
    Krum,
    Median,
    QFedAvg,
    TrimmedMean,
    Update,
    Weights,
    make_aggregator,
    proximal_,
    squared_distances,
)

SHAPES = [(7, 5), (11,), (1,)]
TYPES = [torch.float64, torch.float32, torch.float32]
"""One of float64: sums of a few float32 in float64 are exact, and would have the same bits in any order."""


def model(seed: int = 0) -> Weights:
    chance = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(shape, generator=chance, dtype=kind) for shape, kind in zip(SHAPES, TYPES, strict=True)]
    return Weights(parameters, [torch.randn(4, generator=chance), torch.tensor(10)])


def update(client: int, seed: int, *, scale: float = 1.0, samples: float = 1.0, **more: float) -> Update:
    chance = torch.Generator().manual_seed(1000 + seed)
    parameters = [
        torch.randn(shape, generator=chance, dtype=kind) * scale for shape, kind in zip(SHAPES, TYPES, strict=True)
    ]
    change = Weights(parameters, [torch.randn(4, generator=chance), torch.tensor(seed % 5)])
    return Update(client, change, samples, more.get("loss", math.nan), int(more.get("version", 0)))


def updates(count: int) -> list[Update]:
    return [update(3 * i + 1, i, samples=5 + 7 * i, loss=0.5 + 0.1 * i) for i in range(count)]


def flat(tensors: list[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([each.to(torch.float64).numpy().ravel() for each in tensors])


def bits(weights: Weights) -> bytes:
    return b"".join(each.numpy().tobytes() for each in weights.all)


def test_fedavg_is_the_hand_computed_weighted_mean() -> None:
    start = Weights([torch.tensor([1.0, 2.0])], [])
    sent = [
        Update(0, Weights([torch.tensor([1.0, 0.0])], []), 30),
        Update(1, Weights([torch.tensor([-1.0, 4.0])], []), 10),
    ]
    assert FedAvg().aggregate(start, sent).parameters[0].tolist() == [1.5, 3.0]
    assert FedAvg(even=True).aggregate(start, sent).parameters[0].tolist() == [1.0, 4.0]
    assert FedAvg(lr=0.5).aggregate(start, sent).parameters[0].tolist() == [1.25, 2.5]


def test_fedavg_of_whole_models_is_the_mean_of_their_values() -> None:
    """Buffers included: what a model with batch norm is at the clients."""
    torch.manual_seed(1)
    server = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    before, sent, clients = Weights.of(server), [], []
    for client, samples in ((4, 20), (9, 60), (2, 5)):
        local = copy.deepcopy(server)
        for _ in range(client):
            local.zero_grad()
            local(torch.randn(16, 6)).square().mean().backward()
            with torch.no_grad():
                for each in local.parameters():
                    each -= 0.1 * (each.grad if each.grad is not None else 0)
        clients.append((samples, local))
        sent.append(Update(client, before.change_to(Weights.of(local)), samples))
    new = copy.deepcopy(server)
    FedAvg().aggregate(before, sent).into(new)
    for name, value in new.state_dict().items():
        theirs = np.stack([local.state_dict()[name].numpy() for _, local in clients]).astype(np.float64)
        mean = np.average(theirs, axis=0, weights=[samples for samples, _ in clients])
        expected = np.round(mean) if name.endswith("num_batches_tracked") else mean
        np.testing.assert_allclose(value.numpy(), expected, atol=1e-6, err_msg=name)
    assert new[1].num_batches_tracked.dtype == torch.int64
    assert new[1].num_batches_tracked.item() == round((4 * 20 + 9 * 60 + 2 * 5) / 85)
    assert torch.equal(server[0].weight, before.parameters[0]), "the server's model was changed in place"


def test_integers_that_all_have_alike_stay_exact_and_flags_go_by_majority() -> None:
    huge = 2**60 + 1  # no float64
    start = Weights([], [torch.tensor([huge, 3]), torch.tensor([True, False, False])])
    values = [[True, True, False], [False, True, False], [True, False, True]]
    sent = [
        Update(i, start.change_to(Weights([], [torch.tensor([huge, 3 + i]), torch.tensor(flags)])))
        for i, flags in enumerate(values)
    ]
    for aggregator in (FedAvg(), Median(), TrimmedMean(trim=0.34)):
        new = aggregator.aggregate(start, sent)
        assert new.buffers[0].tolist() == [huge, 4]
        assert new.buffers[1].tolist() == [True, True, False]


def test_half_precision_is_folded_wide() -> None:
    start = Weights([torch.zeros(1, dtype=torch.bfloat16)], [])
    sent = [Update(0, Weights([torch.tensor([256.0], dtype=torch.bfloat16)], []))]
    sent += [Update(i, Weights([torch.tensor([1.0], dtype=torch.bfloat16)], [])) for i in range(1, 257)]
    new = FedAvg().aggregate(start, sent).parameters[0]
    assert new.dtype == torch.bfloat16
    assert new.item() == torch.tensor(512 / 257).to(torch.bfloat16).item()  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("name", sorted(AGGREGATORS))
def test_the_order_of_arrival_does_not_change_a_bit(name: str) -> None:
    options = {"krum": {"malicious": 1, "keep": 3}}.get(name, {})
    first = make_aggregator(name, options)
    expected = [bits(first.aggregate(model(), updates(9)))]
    expected.append(bits(first.aggregate(model(1), updates(7))))
    for seed in range(5):
        chance, again = random.Random(seed), make_aggregator(name, options)
        found = [bits(again.aggregate(model(), chance.sample(updates(9), 9)))]
        found.append(bits(again.aggregate(model(1), chance.sample(updates(7), 7))))
        assert found == expected


def test_a_fold_in_another_order_has_other_bits() -> None:
    """The control of the test before: float64 sums of these updates do depend on the order."""
    found = set()
    for order in itertools.permutations(range(5)):
        renamed = [Update(order[i], each.change, each.samples) for i, each in enumerate(updates(5))]
        found.add(bits(FedAvg().aggregate(model(), renamed)))
    assert len(found) > 1


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    start = Weights([torch.randn(40_003)], [])
    sent = [Update(i, Weights([torch.randn(40_003)], []), 3 + i, 1.0 + i) for i in range(4)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                [
                    bits(make_aggregator(name).aggregate(start, sent))
                    for name in ("fed-avg", "fed-yogi", "q-fedavg", "median")
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_the_fold_has_the_bits_of_single_operations() -> None:
    """No fused multiply-add, which other processors would not have."""
    start, sent = torch.zeros(500, dtype=torch.float64), [torch.randn(500, dtype=torch.float64) for _ in range(5)]
    total = np.zeros(500)
    for i, each in enumerate(sent):
        total = total + each.numpy() * (0.3 + i)
    total = total / sum(0.3 + i for i in range(5))
    new = FedAvg().aggregate(
        Weights([start], []), [Update(i, Weights([each], []), 0.3 + i) for i, each in enumerate(sent)]
    )
    assert new.parameters[0].numpy().tobytes() == total.tobytes()


@pytest.mark.parametrize("kind", ["yogi", "adam", "adagrad"])
def test_server_optimizers_follow_their_formulas_for_three_steps(kind: str) -> None:
    lr, beta1, beta2, tau = 0.03, 0.8, 0.95, 1e-2
    aggregator: Aggregator
    if kind == "yogi":
        aggregator = FedYogi(lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    elif kind == "adam":
        aggregator = FedAdam(lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    else:
        aggregator = FedAdagrad(lr=lr, beta1=beta1, tau=tau)
    now = model()
    x = flat(now.parameters)
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for step in range(3):
        sent = [update(i, 10 * step + i, scale=0.1 if step else 2.0, samples=2 + i) for i in range(4)]
        delta = np.average(
            [flat(each.change.parameters) for each in sent], axis=0, weights=[each.samples for each in sent]
        )
        m = beta1 * m + (1 - beta1) * delta
        if kind == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        elif kind == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v + delta**2
        x = x + lr * m / (np.sqrt(v) + tau)
        running = flat([now.buffers[0]]) + np.average(
            [flat([each.change.buffers[0]]) for each in sent], axis=0, weights=[each.samples for each in sent]
        )
        now = aggregator.aggregate(now, sent)
        np.testing.assert_allclose(flat(now.parameters), x, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(flat([now.buffers[0]]), running, rtol=1e-6)  # no optimizer for running means
    assert not np.allclose(x, flat(model().parameters))


def test_q_fedavg_follows_its_formula_and_favours_the_badly_served() -> None:
    lr, sent, x = 0.2, updates(4), flat(model().parameters)
    for q in (0.0, 1.0, 2.5):
        top, bottom = np.zeros_like(x), 0.0
        for each in sent:
            gradient = (x - (x + flat(each.change.parameters))) / lr
            top += each.loss**q * gradient
            bottom += q * each.loss ** (q - 1) * float(gradient @ gradient) + each.loss**q / lr
        new = QFedAvg(q=q, client_lr=lr).aggregate(model(), sent)
        np.testing.assert_allclose(flat(new.parameters), x - top / bottom, rtol=1e-6, atol=1e-6)
    even = FedAvg(even=True).aggregate(model(), sent)
    np.testing.assert_allclose(
        flat(QFedAvg(q=0, client_lr=lr).aggregate(model(), sent).parameters), flat(even.parameters), atol=1e-6
    )
    pull = [
        Update(0, Weights([torch.tensor([1.0])], []), loss=0.1),
        Update(1, Weights([torch.tensor([-1.0])], []), loss=9.0),
    ]
    assert QFedAvg().aggregate(Weights([torch.zeros(1)], []), pull).parameters[0].item() < 0


def test_fedprox_pulls_towards_the_server_the_more_the_greater_mu() -> None:
    """Its sign: the distance to the server's model falls as mu grows (with the reverse one it would rise)."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 5), torch.randn(64, 1)
    distances = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        torch.manual_seed(3)
        local = nn.Linear(5, 1)
        anchors = [each.detach().clone() for each in local.parameters()]
        for _ in range(50):
            local.zero_grad()
            (local(x) - y).square().mean().backward()
            parameters = list(local.parameters())
            proximal_([each.grad for each in parameters if each.grad is not None], parameters, anchors, mu)
            with torch.no_grad():
                for each in parameters:
                    assert each.grad is not None
                    each -= 0.05 * each.grad
        distances.append(math.dist(flat([each.detach() for each in local.parameters()]), flat(anchors)))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5 * distances[0]


def test_the_proximal_term_is_autograds_gradient_of_the_penalty_also_for_many_clients_at_once() -> None:
    anchors = [torch.randn(3, 2), torch.randn(4)]
    values = [torch.randn(6, *each.shape, requires_grad=True) for each in anchors]
    sum((0.35 * (value - anchor).square().sum() for value, anchor in zip(values, anchors, strict=True))).backward()  # type: ignore[union-attr]
    gradients = [torch.zeros_like(each) for each in values]
    proximal_(gradients, values, anchors, 0.7)
    for gradient, value in zip(gradients, values, strict=True):
        assert value.grad is not None
        assert torch.allclose(gradient, value.grad)


def test_robust_means_of_honest_clients_are_numpys() -> None:
    for count in (1, 2, 5, 8):
        sent, start = updates(count), model()
        stacked = np.sort(np.stack([flat(each.change.parameters) for each in sent]), axis=0)
        new = Median().aggregate(start, sent)
        np.testing.assert_allclose(flat(new.parameters), flat(start.parameters) + np.median(stacked, axis=0), atol=1e-6)
        cut = count // 5
        new = TrimmedMean(trim=0.2).aggregate(start, sent)
        expected = flat(start.parameters) + stacked[cut : count - cut].mean(axis=0)
        np.testing.assert_allclose(flat(new.parameters), expected, atol=1e-6)


def test_large_tensors_are_sorted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [bits(each.aggregate(model(), updates(7))) for each in (Median(), TrimmedMean(), Krum(malicious=1))]
    monkeypatch.setattr("pliant.fed.aggregation.STACK_ELEMENTS", 40)
    assert [bits(each.aggregate(model(), updates(7))) for each in (Median(), TrimmedMean(), Krum(malicious=1))] == whole


def _planted(honest: int, liars: int, lie: float) -> list[Update]:
    """Honest clients near 1 everywhere; liars far off, under low and high numbers, claiming many samples."""
    chance = torch.Generator().manual_seed(5)
    sent = []
    for i in range(honest + liars):
        lies = i % 2 == 0 and i // 2 < liars
        value = torch.full((50,), lie) if lies else 1 + 0.1 * torch.randn(50, generator=chance)
        sent.append(Update(i, Weights([value], []), 1000.0 if lies else 10.0))
    return sent


@pytest.mark.parametrize("lie", [1e15, -30.0, 1.0e4])
def test_liars_do_not_move_what_bears_them(lie: float) -> None:
    start, sent = Weights([torch.zeros(50)], []), _planted(15, 4, lie)
    for aggregator in (Median(), TrimmedMean(trim=4 / 19), Krum(malicious=4), Krum(malicious=4, keep=8)):
        new = aggregator.aggregate(start, sent).parameters[0]
        assert (new - 1).abs().max() < 0.5, type(aggregator)
    broken = FedAvg().aggregate(start, sent).parameters[0]
    assert (broken - 1).abs().min() > 5, "the lie should ruin a plain mean, or this shows nothing"
    # And each bears only what it was told to.
    assert (TrimmedMean(trim=0.1).aggregate(start, sent).parameters[0] - 1).abs().max() > 0.5


def test_krum_chooses_as_its_definition_says() -> None:
    for trial, malicious, keep in itertools.product(range(4), (0, 2, 3), (1, 4)):
        sent = [update(3 * i, 100 * trial + i) for i in range(9)]
        points = np.stack([flat(each.change.parameters) for each in sent])
        scores = []
        for i in range(9):
            away = sorted(float(((points[i] - points[j]) ** 2).sum()) for j in range(9) if j != i)
            scores.append(sum(away[: 9 - malicious - 2]))
        krum = Krum(malicious=malicious, keep=keep)
        new = krum.aggregate(model(), sent)
        best = sorted(np.argsort(scores, kind="stable")[:keep])
        assert krum.chosen == [sent[i].client for i in best]
        expected = flat(model().parameters) + points[best].mean(axis=0)
        np.testing.assert_allclose(flat(new.parameters), expected, atol=1e-6)
    brute = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances([each.change.parameters for each in sent]), brute, atol=1e-9)
    with pytest.raises(ConfigError, match="at least 9 updates"):
        Krum(malicious=3).aggregate(model(), sent[:8])


def test_fedbuff_moves_when_full_and_discounts_the_late() -> None:
    server, now = FedBuff(size=3, lr=0.5, max_staleness=2), model()
    x = flat(now.parameters)
    assert server.offer(now, update(5, 0)) is None
    assert server.offer(now, update(2, 1)) is None
    full = server.offer(now, update(9, 2))
    assert full is not None
    x = x + 0.5 * np.mean([flat(update(0, i).change.parameters) for i in range(3)], axis=0)
    np.testing.assert_allclose(flat(full.parameters), x, atol=1e-6)
    assert server.version == 1
    late = [update(1, 3, version=0), update(1, 4, version=1), update(0, 5, version=1)]
    assert [server.offer(full, each) is None for each in late[:2]] == [True, True]
    again = server.offer(full, late[2])
    assert again is not None
    parts = [flat(each.change.parameters) / math.sqrt(2 - each.version) for each in late]
    np.testing.assert_allclose(flat(again.parameters), x + 0.5 * sum(parts) / 3, atol=1e-6)
    server.version = 9
    assert server.offer(again, update(3, 6, version=6)) is None
    assert "3 versions late" in server.left_out[3]
    with pytest.raises(TrainError, match="newest is 9"):
        server.offer(again, update(3, 6, version=10))
    assert server.offer(again, update(3, 6, version=9)) is None
    with pytest.raises(TrainError, match="already"):
        server.offer(again, update(3, 7, version=9))


@pytest.mark.parametrize("name", sorted(AGGREGATORS))
def test_a_restarted_server_goes_on_with_the_same_bits(name: str) -> None:
    undisturbed, before = make_aggregator(name), make_aggregator(name)
    first = undisturbed.aggregate(model(), updates(5))
    assert bits(before.aggregate(model(), updates(5))) == bits(first)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = make_aggregator(name)
    after.load_state_dict(torch.load(file, weights_only=True))
    later = [Update(each.client, each.change, each.samples, each.loss, version=1) for each in updates(4)]
    assert bits(after.aggregate(first, later)) == bits(undisturbed.aggregate(first, later))


def test_what_waits_in_a_buffer_survives_a_restart() -> None:
    now, server = model(), FedBuff(size=4)
    for i in range(3):
        assert server.offer(now, update(i, i)) is None
    file = io.BytesIO()
    torch.save(server.state_dict(), file)
    file.seek(0)
    again = FedBuff(size=4)
    again.load_state_dict(torch.load(file, weights_only=True))
    ours, theirs = again.offer(now, update(7, 7)), server.offer(now, update(7, 7))
    assert ours is not None
    assert theirs is not None
    assert bits(ours) == bits(theirs)


def test_forgetting_the_state_of_yogi_would_show() -> None:
    """The control: a fresh optimizer makes another second step."""
    server = FedYogi()
    first = server.aggregate(model(), updates(5))
    assert bits(server.aggregate(first, updates(4))) != bits(FedYogi().aggregate(first, updates(4)))


@pytest.mark.parametrize("name", sorted(AGGREGATORS))
def test_what_is_no_number_is_left_out_and_named(name: str) -> None:
    bad = update(100, 50, loss=1.0)
    bad.change.parameters[1][3] = math.nan
    endless = update(101, 51, loss=1.0)
    endless.change.buffers[0][0] = math.inf
    options = {"krum": {"malicious": 1}}.get(name, {})
    aggregator = make_aggregator(name, options)
    found = aggregator.aggregate(model(), [*updates(6), bad, endless, update(102, 52, samples=0, loss=1.0)])
    assert sorted(aggregator.left_out) == [100, 101, 102]
    assert "not finite" in aggregator.left_out[100]
    assert bits(found) == bits(make_aggregator(name, options).aggregate(model(), updates(6)))
    alone = make_aggregator(name).aggregate(model(), [bad])
    assert bits(alone) == bits(model()), "nothing usable: the model stays"


def test_mistakes_are_named() -> None:
    for name, options, words in (
        ("fedsgd", {}, "fed-avg"),
        ("fed-yogi", {"eta": 1.0}, "beta1"),
        ("fed-yogi", {"beta2": 1.0}, "beta2=1.0"),
        ("fed-adam", {"tau": 0.0}, "tau=0.0"),
        ("trimmed-mean", {"trim": 0.5}, "trim=0.5"),
        ("krum", {"malicious": -1}, "malicious=-1"),
        ("fed-prox", {"mu": -0.1}, "mu=-0.1"),
        ("q-fedavg", {"q": math.nan}, "q=nan"),
        ("fed-buff", {"size": 0}, "size=0"),
        ("fed-avg", {"lr": 0.0}, "lr=0.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_aggregator(name, options)
    server = FedAvg()
    with pytest.raises(TrainError, match="begin"):
        server.add(update(1, 1))
    server.begin(model())
    server.add(update(5, 1))
    with pytest.raises(TrainError, match="finish"):
        server.state_dict()
    for client in (5, 4):
        with pytest.raises(TrainError, match="ascending order"):
            server.add(update(client, 2))
    with pytest.raises(TrainError, match=r"client 7 is not the server's model: tensor 1 is \[3\] instead of \[11\]"):
        server.add(Update(7, Weights([torch.zeros(7, 5), torch.zeros(3), torch.zeros(1)], model().buffers)))
    with pytest.raises(TrainError, match="1 parameters and 0 buffers instead of 3 and 2"):
        server.add(Update(7, Weights([torch.zeros(7, 5)], [])))
    with pytest.raises(ConfigError, match="'fed-adam', not of 'fed-yogi'"):
        FedYogi().load_state_dict(FedAdam().state_dict())
    other = FedYogi()
    other.aggregate(Weights([torch.zeros(2)], []), [Update(0, Weights([torch.ones(2)], []))])
    with pytest.raises(ConfigError, match="another model"):
        other.aggregate(model(), updates(2))
