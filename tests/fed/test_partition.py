"""Every sample at most once, whatever the way of dealing; maps and tables as published; pickles that run nothing."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fed_jobs import Bomb
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import ConfigError
from pliant.fed.clients import read_availability, read_devices
from pliant.fed.data.partition import (
    Ints,
    Partition,
    by_map,
    by_sizes,
    dirichlet,
    draw_sizes,
    fit_sizes,
    iid,
    natural,
    shards,
)
from pliant.fed.tables import ClientMap, read_client_map, read_label_counts, read_pickle, read_sizes

LABELS = np.repeat(np.arange(10), 600)


def unused(partition: Partition) -> int:
    """Samples that belong to nobody."""
    return partition.num_samples - len(partition.order)


def covers(partition: Partition, num_samples: int) -> None:
    """By brute force: each sample exactly once, or as many left as it says."""
    seen = [int(sample) for client in range(len(partition)) for sample in partition.of(client)]
    assert len(seen) == len(set(seen)) == num_samples - unused(partition)
    assert set(seen) <= set(range(num_samples))
    assert [len(partition.of(client)) for client in range(len(partition))] == partition.sizes.tolist()


def label_counts(partition: Partition, labels: Ints, num_classes: int) -> Ints:
    """How many samples of each label each client has: clients x classes."""
    owned = [np.bincount(labels[partition.of(client)], minlength=num_classes) for client in range(len(partition))]
    return np.array(owned, dtype=np.int64)


def same(a: Partition, b: Partition) -> bool:
    return a.names == b.names and np.array_equal(a.order, b.order) and np.array_equal(a.starts, b.starts)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12), st.lists(st.integers(0, 4), min_size=40, max_size=90), st.integers(0, 5), st.floats(0.05, 50)
)
def test_each_sample_goes_to_one_client(clients: int, labels: list[int], seed: int, alpha: float) -> None:
    sizes = fit_sizes(draw_sizes(np.array([3, 40, 7, 12, 1]), clients, seed=seed), len(labels), may_scale=True)
    for partition, complete in (
        (iid(len(labels), clients, seed=seed), True),
        (shards(labels, clients, per_client=3, seed=seed), True),
        (dirichlet(labels, clients, alpha, seed=seed), True),
        (by_sizes(len(labels), sizes, seed=seed), False),
        (dirichlet(labels, clients, alpha, seed=seed, sizes=sizes), False),
        (natural([label * clients % 7 for label in labels]), True),
    ):
        covers(partition, len(labels))
        assert not (complete and unused(partition))
        if not complete:
            assert partition.sizes.tolist() == sizes.tolist()


@pytest.mark.parametrize(
    "deal",
    [
        lambda seed: iid(6000, 100, seed=seed),
        lambda seed: shards(LABELS, 100, seed=seed),
        lambda seed: dirichlet(LABELS, 100, 0.5, seed=seed),
        lambda seed: dirichlet(LABELS, 100, 0.1, seed=seed, sizes=np.full(100, 60)),
        lambda seed: by_sizes(6000, np.full(100, 30), seed=seed),
    ],
    ids=["iid", "shards", "dirichlet", "dirichlet-sizes", "sizes"],
)
def test_a_seed_is_a_partition(deal: Callable[[int], Partition]) -> None:
    assert same(deal(3), deal(3))
    assert not same(deal(3), deal(4))


def test_all_of_the_data_can_be_asked_for_with_sizes() -> None:
    """The hardest case: the last client must take exactly what is left, of whatever label."""
    partition = dirichlet(LABELS, 60, 0.05, sizes=np.full(60, 100))
    covers(partition, 6000)
    assert unused(partition) == 0


def test_the_smaller_alpha_the_fewer_labels_and_none_is_favoured() -> None:
    largest, kinds = [], []
    for alpha in (0.05, 0.3, 5.0, 1000.0):
        counts = label_counts(dirichlet(LABELS, 100, alpha, seed=1, sizes=np.full(100, 30)), LABELS, 10)
        assert counts.sum() == 3000
        largest.append((counts.max(axis=1) / 30).mean())
        kinds.append((counts > 0).sum(axis=1).mean())
    assert largest == sorted(largest, reverse=True)
    assert kinds == sorted(kinds)
    assert largest[0] > 0.8
    assert largest[-1] < 0.3  # of 30 samples with ten equal labels, the most frequent one has some 6
    # Dirichlet(a) over 10 labels: the expected sum of squared shares is (a + 1) / (10 a + 1).
    shares = label_counts(dirichlet(LABELS, 40, 0.3, seed=2, sizes=np.full(40, 30)), LABELS, 10) / 30
    unbiased = ((shares**2).sum(axis=1).mean() * 30 - 1) / 29
    assert unbiased == pytest.approx(1.3 / 4, abs=0.08)


def test_with_a_large_alpha_unbalanced_labels_stay_as_they_are() -> None:
    labels = np.repeat([0, 1], [9000, 1000])
    counts = label_counts(dirichlet(labels, 20, 1e5, sizes=np.full(20, 100)), labels, 2)
    assert counts[:, 1].mean() == pytest.approx(10, abs=2)


def test_shards_have_few_labels_and_equal_sizes() -> None:
    partition = shards(LABELS, 100, per_client=2, seed=5)
    assert set(partition.sizes.tolist()) == {60}
    assert (label_counts(partition, LABELS, 10) > 0).sum(axis=1).max() == 2
    assert (label_counts(iid(6000, 100), LABELS, 10) > 0).sum(axis=1).min() > 5


def test_natural_clients_are_those_of_the_column_in_order_of_appearance() -> None:
    partition = natural(["mia", "bo", "mia", "zoe", "bo", "mia"])
    assert partition.names == ("mia", "bo", "zoe")
    assert [partition.of(i).tolist() for i in range(3)] == [[0, 2, 5], [1, 4], [3]]


def test_small_and_large_clients_are_left_out_on_request() -> None:
    partition = natural(["a"] * 5 + ["b"] * 2 + ["c"] * 9)
    assert partition.with_sizes_between(3).names == ("a", "c")
    with_sizes_between = partition.with_sizes_between(2, 5)
    assert with_sizes_between.names == ("a", "b")
    assert with_sizes_between.of(1).tolist() == [5, 6]
    assert unused(with_sizes_between) == 9
    with pytest.raises(ConfigError, match="they have 2 to 9"):
        partition.with_sizes_between(10)


MAP = "client_id,sample_name,sample_category,category_id\n7,a.png,cat,0\n9,b.png,dog,1\n7,c.png,dog,1\n"


def test_fedscales_map_and_the_artifacts_pickle_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text(MAP)
    mapped = read_client_map(tmp_path / "map.csv")
    assert mapped == ClientMap(("a.png", "b.png", "c.png"), ("7", "9", "7"), ("0", "1", "1"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "map").write_bytes(pickle.dumps(OrderedDict([("a.png", 7), ("b.png", 9), ("c.png", 7)]), protocol))
        pickled = read_client_map(tmp_path / "map")
        assert (pickled.samples, pickled.clients) == (mapped.samples, mapped.clients)
    partition = by_map(mapped, ["c.png", "b.png", "a.png"])
    assert partition.names == ("7", "9")
    assert partition.of(0).tolist() == [0, 2]
    covers(partition, 3)


def test_samples_and_maps_that_do_not_fit_are_named() -> None:
    mapped = ClientMap(("a", "b"), ("1", "2"))
    assert by_map(mapped, ["x", "b"]).of(0).tolist() == [1]
    with pytest.raises(ConfigError, match="none of 2 samples is in the client map: they are as 'x', .*names as 'a'"):
        by_map(mapped, ["x", "y"])
    with pytest.raises(ConfigError, match="'a' to clients '1' and '2'"):
        by_map(ClientMap(("a", "a"), ("1", "2")), ["a"])


@pytest.mark.parametrize("read", [read_pickle, read_client_map, read_devices, read_availability])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_something_is_refused_before_it_does(
    tmp_path: Path, protocol: int, read: Callable[[Path], object]
) -> None:
    hit, file = tmp_path / "hit", tmp_path / "trace"
    file.write_bytes(pickle.dumps({"a.png": Bomb(hit)}, protocol))
    with pytest.raises(ConfigError, match=r"wants (posix|os)\.mkdir; only plain values"):
        read(file)
    assert not hit.exists()
    pickle.loads(file.read_bytes())
    assert hit.exists(), "the control: that pickle does run"


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(defaultdict(list)),
        pickle.dumps(np.zeros(2)),
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"cposix\nsystem\n(S'true'\ntR.",
    ],
    ids=["defaultdict", "numpy", "attribute", "eval", "protocol-0"],
)
def test_no_other_name_is_looked_up(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(ConfigError, match="only plain values"):
        read_pickle(tmp_path / "trace")


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x05x", b"hello", pickle.dumps([1, 2])[:-3], b"\x80\x04P1\n.", b"0."]
)
def test_what_is_no_pickle_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(ConfigError, match="trace: not a pickle"):
        read_pickle(tmp_path / "trace")


def test_plain_values_are_read_whole(tmp_path: Path) -> None:
    value = {
        1: {"active": [1, 2.5], "model": "x"},
        "perf": OrderedDict([(0, {"top_1: ": 1.0})]),
        "t": (None, True, b"q", {3}),
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol < 2:
            value.pop("t", None)  # sets and bytes need help there
        (tmp_path / "trace").write_bytes(pickle.dumps(value, protocol))
        assert read_pickle(tmp_path / "trace") == value


def test_tables_of_sizes_and_labels(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("num_samples,num_labels\n483,15\n12,8\n")
    assert read_sizes(table).tolist() == [483, 12]
    table.write_text("client,label,num_samples\n0,bed,1\n0,bird,2\n5,bed,4\n")
    assert read_sizes(table).tolist() == [3, 4]
    clients, labels, counts = read_label_counts(table)
    assert (clients, labels, counts.tolist()) == (("0", "5"), ("bed", "bird"), [[1, 2], [4, 0]])


def test_sizes_are_drawn_without_repetition_while_they_last_and_fitted_in_proportion() -> None:
    table = np.arange(1, 101)
    assert sorted(draw_sizes(table, 100, seed=1).tolist()) == table.tolist()
    assert sorted(draw_sizes(table, 200, seed=1).tolist()) == sorted([*table.tolist()] * 2)
    assert set(draw_sizes(table, 50, least=20, most=30).tolist()) <= set(range(20, 31))
    small = fit_sizes(np.array([1, 10, 100, 1000]), 600, may_scale=True)
    assert small.sum() <= 600
    assert small.tolist() == [1, 5, 54, 538]
    assert fit_sizes(np.array([5, 6]), 11, may_scale=False).tolist() == [5, 6]


def test_the_real_tables(fed_data: Path) -> None:
    sizes = read_sizes(fed_data / "openimage_clients.csv")
    assert len(sizes) == 55_440
    assert np.median(sizes) == 3
    assert sizes.max() == 6_316
    speech = read_sizes(fed_data / "google_speech_clients.csv")
    assert len(speech) == 2_187
    clients, labels, counts = read_label_counts(fed_data / "speech_labels.csv")
    assert counts.shape == (len(clients), len(labels)) == (2_187, 35)
    assert np.median((counts > 0).sum(axis=1)) == 20
    assert (int(counts.sum(axis=1).min()), int(counts.sum(axis=1).max())) == (16, 316)
    assert read_sizes(fed_data / "speech_labels.csv").tolist() == counts.sum(axis=1).tolist()
    dealt = dirichlet(np.arange(60_000) % 10, 500, 0.1, sizes=draw_sizes(sizes, 500, least=20, most=300))
    assert len(dealt) == 500
    assert read_pickle(fed_data / "training_perf" / "speech_yogi_oort")


def test_mistakes_are_named(tmp_path: Path) -> None:
    empty, odd = tmp_path / "empty.csv", tmp_path / "odd.csv"
    empty.write_text("client_id,sample_name\n")
    odd.write_text("num_samples,num_labels\nmany,1\n")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: iid(5, 6), "5 samples for 6 clients"),
        (lambda: iid(5, 0), "0 clients"),
        (lambda: dirichlet([], 2, 1.0), "labels of shape"),
        (lambda: shards([1, 2, 3], 2, per_client=2), "3 samples for 4 shards"),
        (lambda: natural([]), "no samples"),
        (lambda: draw_sizes(np.array([1]), 1, least=5, most=2), "5 to 2"),
        (lambda: read_client_map(tmp_path / "none"), "No such file"),
        (lambda: read_client_map(empty), "no rows"),
        (lambda: read_client_map(odd), "client_id and sample_name"),
        (lambda: read_sizes(odd), "'many'"),
        (lambda: read_sizes(tmp_path / "none"), "none"),
        (lambda: read_label_counts(odd), "no column 'client'"),
        (lambda: read_pickle(tmp_path / "none"), "No such file"),
    ]
    (tmp_path / "list").write_bytes(pickle.dumps([1, 2]))
    cases.append((lambda: read_client_map(tmp_path / "list"), "{sample: client}"))
    for call, words in cases:
        with pytest.raises(ConfigError, match=words):
            call()
