"""Tables of devices, seconds of a round, and who is there: against a brute force that walks the intervals."""

from __future__ import annotations

import math
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fed_jobs import Bomb
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import ConfigError
from pliant.fed.clients import (
    DAY_S,
    HOUR_S,
    Availability,
    Devices,
    read_availability,
    read_devices,
    synthetic_availability,
    synthetic_devices,
)
from pliant.fed.tables import read_client_map, read_sizes


def test_seconds_of_a_round_by_hand() -> None:
    devices = Devices(np.array([40.0, 100.0]), np.array([8_000.0, 1_000.0]))
    # 3 x 200 samples x 40 ms = 24 s; 250 kB = 2,000 kbit each way at 8,000: 0.25 s.
    assert devices.round_s(200, model_bytes=250_000).tolist() == pytest.approx([24.5, 60 + 2 + 2])
    assert devices.round_s([200, 0], model_bytes=250_000).tolist() == pytest.approx([24.5, 4])
    only = devices.round_s(10, model_bytes=0, passes=1, clients=np.array([1]))
    assert only.tolist() == pytest.approx([1.0])
    assert devices.for_clients(5).compute_ms.tolist() == [40, 100, 40, 100, 40]


def test_all_forms_of_a_table_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("compute_ms_per_sample,bandwidth_kbps\n153,2209.62\n39,18437.3\n")
    np.savez(tmp_path / "d.npz", compute_ms_per_sample=[153, 39], bandwidth_kbps=[2209.62, 18437.3])
    fedscale = {2: {"computation": 39, "communication": 18437.3}, 1: {"computation": 153.0, "communication": 2209.62}}
    (tmp_path / "fedscale").write_bytes(pickle.dumps(fedscale))
    (tmp_path / "ordered").write_bytes(pickle.dumps(OrderedDict(sorted(fedscale.items())), protocol=0))
    (tmp_path / "client.cfg").write_bytes(pickle.dumps({1: [153, 2209.62], 2: [39, 18437.3]}))
    for name in ("d.csv", "d.npz", "fedscale", "ordered", "client.cfg"):
        found = read_devices(tmp_path / name)
        assert found.compute_ms.tolist() == [153, 39], name
        assert found.kbps.tolist() == [2209.62, 18437.3], name
        assert found.note == name


def test_numpys_files_may_hold_no_pickle(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", compute_ms_per_sample=np.array([Bomb(tmp_path / "hit")], dtype=object))
    with pytest.raises(ConfigError, match="npz"):
        read_devices(tmp_path / "d.npz")
    assert not (tmp_path / "hit").exists()


def test_synthetic_devices_say_so_and_are_as_spread_as_real_ones() -> None:
    devices = synthetic_devices(20_000, seed=4)
    assert devices.note.startswith("synthetic")
    assert np.median(devices.compute_ms) == pytest.approx(41, rel=0.05)
    assert np.median(devices.kbps) == pytest.approx(6_075, rel=0.05)
    assert abs(np.corrcoef(devices.compute_ms, devices.kbps)[0, 1]) < 0.03
    assert np.array_equal(devices.compute_ms, synthetic_devices(20_000, seed=4).compute_ms)
    assert not np.array_equal(devices.compute_ms, synthetic_devices(20_000, seed=5).compute_ms)


def test_the_real_table(fed_data: Path) -> None:
    real = read_devices(fed_data / "devices.csv")
    assert len(real) == 51_496
    assert (np.median(real.compute_ms), real.compute_ms.max()) == (41, 199)
    drawn = synthetic_devices(50_000)
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        for ours, theirs in ((drawn.compute_ms, real.compute_ms), (drawn.kbps, real.kbps)):
            assert np.quantile(ours, part) == pytest.approx(np.quantile(theirs, part), rel=0.15)
    # The reference's experiment: 0.2 MB, 10 steps of 20; the 20th of 26 random picks, all 20 of 20, the 30th percentile.
    seconds = real.for_clients(500).round_s(200, model_bytes=2e5)
    chance = np.random.default_rng(0)
    picks = [np.sort(chance.choice(seconds, 26, replace=False))[19] for _ in range(1000)]
    assert np.mean(picks) == pytest.approx(83, abs=3)
    assert np.mean([chance.choice(seconds, 20, replace=False).max() for _ in range(1000)]) == pytest.approx(113, abs=2)
    assert np.quantile(seconds, 0.3) == pytest.approx(15.6, abs=0.5)


def brute(intervals: list[tuple[float, float]], period: float, now: float) -> tuple[bool, float, float]:
    """By walking over copies of the intervals, one period after the other."""
    if not intervals:
        return False, -math.inf, math.inf
    cycle = math.floor(now / period)
    copies = [(begin + c * period, end + c * period) for c in range(cycle - 1, cycle + 3) for begin, end in intervals]
    joined: list[list[float]] = []
    for begin, end in sorted(copies):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    for begin, end in joined:
        if begin <= now < end:
            return True, math.inf if len(joined) == 1 else end, now
    return False, -math.inf, min(begin for begin, _ in joined if begin > now)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(-3, 21), st.integers(-3, 25)), max_size=6), st.integers(5, 20)),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 300), min_size=1, max_size=8),
)
def test_presence_is_what_walking_the_intervals_says(
    clients: list[tuple[list[tuple[int, int]], int]], times: list[int]
) -> None:
    owner = [i for i, (given_, _) in enumerate(clients) for _ in given_]
    begin, end = ([pair[k] for given_, _ in clients for pair in given_] for k in (0, 1))
    availability = Availability(owner, begin, end, [period for _, period in clients])
    for half in times:  # in any order: the clock may also be set back
        now = half / 2
        found = availability.at(now)
        direct = availability.of(np.arange(len(clients)), now)
        for i, (given_, period) in enumerate(clients):
            cut = [(max(0.0, float(b)), min(float(e), float(period))) for b, e in given_]
            expected = brute([pair for pair in cut if pair[1] > pair[0]], period, now)
            for one in (found, direct):
                assert (bool(one.there[i]), one.until_s[i], one.back_s[i]) == expected


def test_the_end_is_open_and_the_period_wraps() -> None:
    availability = Availability([0, 0, 1], [0, 80, 30], [10, 100, 50], [100, 100])
    asked = availability.of(np.array([0, 0, 0, 1, 1, 1]), [9.9, 10, 1095, 30, 50, 129])
    assert asked.there.tolist() == [True, False, True, True, False, False]
    assert asked.until_s.tolist()[::2] == [10, 1110, -math.inf]
    assert asked.back_s.tolist() == [9.9, 80, 1095, 30, 130, 130]
    always = Availability.always(3).at(12345.6)
    assert always.there.all()
    assert np.isinf(always.until_s).all()


def test_an_answer_stays_as_it_was_when_the_clock_goes_on() -> None:
    availability = Availability([0], [0], [10], [20])
    early = availability.at(5)
    availability.at(15)
    assert (early.there.tolist(), early.until_s.tolist()) == ([True], [10])


def test_fedscales_trace_is_read(tmp_path: Path) -> None:
    trace = {
        5: {"duration": 30, "active": [10, 60], "inactive": [20, 80], "finish_time": 100, "model": "x"},
        2: {"duration": 0, "active": [], "inactive": [], "finish_time": 50, "model": "y"},
        9: {"duration": 0, "active": [5, 90], "inactive": [15], "finish_time": 95, "model": "z"},
    }
    (tmp_path / "trace").write_bytes(pickle.dumps(trace))
    availability = read_availability(tmp_path / "trace")
    assert [availability.intervals(i) for i in range(3)] == [[], [(10, 20), (60, 80)], [(5, 15), (90, 95)]]
    assert availability.at(65).there.tolist() == [False, True, False]


def test_the_synthetic_trace_says_so_and_has_nights() -> None:
    availability = synthetic_availability(2_000, seed=1)
    assert availability.note.startswith("synthetic")
    share = [[availability.at(day * DAY_S + hour * HOUR_S).there.mean() for hour in range(24)] for day in range(7)]
    by_hour = np.mean(share, axis=0)
    assert by_hour[2] > 0.6
    assert by_hour[15] < 0.15
    assert np.ptp([row[2] for row in share]) < 0.1, "each night is like the others, also the one over the end"
    assert availability.at(3 * HOUR_S).there.tolist() == availability.at(7 * DAY_S + 3 * HOUR_S).there.tolist()
    assert availability.intervals(3) == synthetic_availability(2_000, seed=1).intervals(3)
    assert availability.intervals(3) != synthetic_availability(2_000, seed=2).intervals(3)


def test_rows_are_followed_in_turn() -> None:
    few = synthetic_availability(5)
    many = few.for_clients(12)
    assert [many.intervals(i) for i in range(12)] == [few.intervals(i % 5) for i in range(12)]
    assert len(few.for_clients(2)) == 2


def test_the_next_minute_of_many_clients_takes_no_time() -> None:
    availability = synthetic_availability(3_000, seed=3).for_clients(200_000)
    availability.at(0)
    started = time.process_time()
    for step in range(20):
        availability.at(step * 60.0)
    assert (time.process_time() - started) / 20 < 0.05  # some 4 ms; a loop over clients would take 200


def test_mistakes_are_named(tmp_path: Path) -> None:
    def reads(data: object, read: Callable[[Path], object], name: str = "file") -> Callable[[], object]:
        def call() -> object:
            path = tmp_path / name
            path.write_bytes(data.encode() if isinstance(data, str) else pickle.dumps(data))
            return read(path)

        return call

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: read_devices(tmp_path / "none"), "No such file"),
        (lambda: read_availability(tmp_path / "none"), "No such file"),
        (reads("a,b\n1,2\n", read_devices), "compute_ms_per_sample"),
        (
            reads("compute_ms_per_sample,bandwidth_kbps\n1,5\n\n1,fast\n", read_devices),
            "file:4: bandwidth_kbps 'fast': speeds are numbers above 0",
        ),
        (reads("compute_ms_per_sample,bandwidth_kbps\n1,0\n", read_devices), ":2: bandwidth_kbps '0': speeds"),
        (reads("PK,\n", read_devices), "npz"),
        (reads("not an archive", read_devices, "x.npz"), "x.npz: not NumPy's .npz, or damaged"),
        (reads("", read_devices, "x.csv"), "x.csv: the file is empty; give a table of devices"),
        (reads("fast\n1\n", read_devices, "x.csv"), "x.csv: it has none of the columns of a table of devices"),
        (reads("", read_client_map, "x.csv"), "x.csv: the file is empty; give a client map"),
        (reads("num_samples\n1\nmany\n", read_sizes, "x.csv"), "x.csv:3: num_samples 'many': use a whole"),
        (reads("", read_availability), "file: the file is empty; give a trace"),
        (reads("a,b\n", read_availability, "x.csv"), "x.csv: this is no pickle; give a trace"),
        (reads({1: {"computation": 3}}, read_devices), r"device 1 is \{'computation': 3\}"),
        (reads([1], read_devices), "dictionary"),
        (reads([1], read_availability), "dictionary"),
        (reads({7: {"active": [1], "inactive": [2]}}, read_availability), "device 7 has no"),
        (
            reads({7: {"active": [1], "inactive": [2, 3], "finish_time": 9}}, read_availability),
            "comes 1 times and goes 2",
        ),
        (reads({7: {"active": ["x"], "inactive": [2], "finish_time": 9}}, read_availability), "device 7 has no"),
        (reads({1: [5, math.nan]}, read_devices), r"bandwidth_kbps\[0\] is nan: speeds are numbers above 0"),
        (reads({7: {"active": [math.nan], "inactive": [], "finish_time": 9}}, read_availability), "finite times"),
    ]
    for call, words in cases:
        with pytest.raises(ConfigError, match=words):
            call()
