"""Values of the cluster: parsing, validation, and the way back from JSON and the environment."""

from __future__ import annotations

import pickle

import pytest

from pliant.cluster import Host, PortRange, View, Worker, parse_hostfile, parse_hosts, place
from pliant.errors import CapacityError, ConfigError, InvalidView, NotLaunched, StaleView, WorkerLost
from pliant.identity import WorkerSpec, worker_spec

A0, A1, B0 = Worker("10.0.0.1", 10000), Worker("10.0.0.1", 10001), Worker("10.0.0.2", 10000)
RUN_A, RUN_B = Worker("10.0.0.1", 38080), Worker("10.0.0.2", 38080)


@pytest.mark.parametrize("text", ["127.0.0.1:10000", "[::1]:10000", "node7.example:80"])
def test_a_worker_survives_text_and_json(text: str) -> None:
    worker = Worker.parse(text)
    assert str(worker) == text
    assert Worker.from_json(worker.to_json()) == worker


def test_json_has_kungfus_shape_plus_a_version() -> None:
    view = View(3, (Worker("127.0.0.1", 10000),), (Worker("127.0.0.1", 38080),))
    assert view.to_json() == {
        "Version": 3,
        "Runners": [{"IPv4": 2130706433, "Port": 38080}],
        "Workers": [{"IPv4": 2130706433, "Port": 10000}],
    }
    assert View.from_json(view.to_json()) == view


@pytest.mark.parametrize(
    ("workers", "runners", "reason"),
    [
        ((A0, A0), (RUN_A,), "listed twice"),
        ((A0,), (RUN_A, Worker("10.0.0.1", 38081)), "2 runners"),
        ((A0, B0), (RUN_A,), "unknown host"),
        ((RUN_A,), (RUN_A,), "listed twice"),
    ],
)
def test_impossible_views_are_refused(workers: tuple[Worker, ...], runners: tuple[Worker, ...], reason: str) -> None:
    with pytest.raises(InvalidView, match=reason):
        View(0, workers, runners)


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", {}, {"Workers": [], "Runners": "x"}, {"Workers": [1], "Runners": []},
        {"Workers": [{"IPv4": -1, "Port": 1}], "Runners": []},
        {"Workers": [{"IPv4": 1 << 40, "Port": 1}], "Runners": []},
        {"Workers": [{"IPv4": 1, "Port": 0}], "Runners": []},
        {"Workers": [{"IPv4": 1, "Port": True}], "Runners": []},
        {"Workers": [{"IPv4": True, "Port": 1}], "Runners": []},
        {"Workers": [{"Host": "a b", "Port": 1}], "Runners": []},
        {"Workers": [{"Port": 1}], "Runners": []},
        {"Workers": [], "Runners": [], "Version": "1"},
        {"Workers": [], "Runners": [], "Version": -1},
        {"Workers": [], "Runners": [], "Extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_json_is_an_invalid_view(value: object) -> None:
    with pytest.raises(InvalidView):
        View.from_json(value)


def test_host_lists() -> None:
    assert parse_hosts("10.0.0.1:4,10.0.0.2:2:1.2.3.4,node7,[::1]:3") == (
        Host("10.0.0.1", 4),
        Host("10.0.0.2", 2, "1.2.3.4"),
        Host("node7", 1),
        Host("::1", 3),
    )
    assert parse_hosts("10.0.0.1")[0].public == "10.0.0.1"


@pytest.mark.parametrize("text", ["", "10.0.0.1:x", "10.0.0.1:0", "::1:2", "10.0.0.1,10.0.0.1", "1.2.3", "a:1:b:2"])
def test_bad_host_lists(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_hosts(text)


def test_hostfiles() -> None:
    text = "# ours\n10.0.0.1 slots=4 public_addr=1.2.3.4\n\nnode7 # one slot\n::1 slots=2\n"
    assert parse_hostfile(text) == (Host("10.0.0.1", 4, "1.2.3.4"), Host("node7"), Host("::1", 2))
    with pytest.raises(ConfigError, match="hosts.txt:2: 'slot' not understood"):
        parse_hostfile("a\nb slot=2\n", "hosts.txt")
    with pytest.raises(ConfigError, match="lists no host"):
        parse_hostfile("# nothing\n")


def test_placement_fills_hosts_in_order() -> None:
    hosts = parse_hosts("10.0.0.1:2,10.0.0.2:2")
    assert place(hosts, 3, PortRange()) == (A0, A1, B0)
    assert place(hosts, 2, {"10.0.0.1": [10005, 10007], "10.0.0.2": []}) == (
        Worker("10.0.0.1", 10005),
        Worker("10.0.0.1", 10007),
    )
    with pytest.raises(CapacityError, match="-np 5: not enough capacity, 10.0.0.1:2,10.0.0.2:2 has 4 slots"):
        place(hosts, 5, PortRange())
    with pytest.raises(CapacityError, match="has 1 ports"):
        place(hosts, 2, PortRange(10000, 10000))


@pytest.mark.parametrize("text", ["", "1", "0-5", "5-1", "70000-70001", "a-b"])
def test_bad_port_ranges(text: str) -> None:
    with pytest.raises(ConfigError, match="-port-range"):
        PortRange.parse(text)


def test_who_am_i_survives_the_environment() -> None:
    view = View(7, (A0, A1, B0), (RUN_A, RUN_B))
    spec = WorkerSpec(
        worker=A1,
        view=view,
        secret=b"s" * 16,
        strategy="RING",
        listen_fd=5,
        config_server="http://x/config",
        tls_cert="c.pem",
    )
    assert worker_spec(spec.to_environ()) == spec


def test_not_launched() -> None:
    with pytest.raises(NotLaunched, match="pliant run"):
        worker_spec({})
    with pytest.raises(ConfigError, match="PLIANT_VIEW is unset"):
        worker_spec({"PLIANT_WORKER": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match="damaged"):
        worker_spec({"PLIANT_WORKER": "127.0.0.1:1", "PLIANT_VIEW": "{", "PLIANT_SECRET": "00"})


@pytest.mark.parametrize("error", [StaleView(3, 4), WorkerLost("10.0.0.1:1", 2, "closed")], ids=str)
def test_errors_survive_pickling(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
