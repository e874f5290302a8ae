"""Seats of a job on Ray, and what is made of Ray's lists: values only."""

from __future__ import annotations

import pytest

from pliant.cluster import View, Worker
from pliant.errors import CapacityError, ConfigError
from pliant.launch.on_ray.cluster import bundle_of, check_devices, devices_in, nodes_of, total
from pliant.launch.on_ray.slots import DeviceSlots

HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2"}


def seated(*nodes: str) -> tuple[DeviceSlots, View]:
    """A job with a worker on each of `nodes`, in this order."""
    seats = DeviceSlots(("cpu",))
    seats.want({"cpu": len(nodes)}, None)
    for number, node in enumerate(nodes):
        seats.all[number].node = node
        seats.all[number].worker = Worker(HOSTS[node], 10000 + number)
    return seats, view_of(seats)


def view_of(seats: DeviceSlots, *more: Worker) -> View:
    runners = tuple(Worker(host, 38080) for host in HOSTS.values())
    return View(1, (*seats.wanted, *more), runners)


def test_the_last_leave_first_and_free_their_seats_when_they_are_gone() -> None:
    seats, view = seated("a", "b", "a")
    seats.want({"cpu": 1}, view)
    assert [seat.number for seat in seats.leaving] == [1, 2]
    assert seats.wanted == [Worker("10.0.0.1", 10000)]
    assert seats.occupied() == {"cpu": 3}, "their processes still live"
    seats.leave({Worker("10.0.0.1", 10000), Worker("10.0.0.1", 10002)}, "a")
    seats.leave({}, "b")
    assert sorted(seats.all) == [0, 2]
    seats.leave({Worker("10.0.0.1", 10000)}, "a")
    assert sorted(seats.all) == [0]


def test_seats_without_a_worker_are_given_up_before_any_other() -> None:
    seats, view = seated("a", "b")
    seats.want({"cpu": 4}, view)
    assert len(seats.unplaced) == 2
    seats.want({"cpu": 2}, view)
    assert sorted(seats.all) == [0, 1]
    assert not seats.leaving
    crashed = View(2, view.workers[1:], view.runners)
    seats.want({"cpu": 1}, crashed)
    assert [seat.number for seat in seats.leaving] == [0]


def test_a_lost_node_leaves_seats_without_a_place() -> None:
    seats, view = seated("a", "b", "b")
    seats.want({"cpu": 2}, view)
    seats.lose("b")
    assert [seat.number for seat in seats.unplaced] == [1], "the one that was leaving anyway is gone"
    seats.all[1].node = "a"
    assert [seat.number for seat in seats.vacant] == [1]


def test_whom_a_runner_replaces_sits_where_the_lost_one_sat() -> None:
    seats, view = seated("a", "b")
    new = Worker("10.0.0.2", 10077)
    seats.follow(View(2, (view.workers[0], new), view.runners), HOSTS)
    assert seats.all[1].worker == new
    stranger = Worker("10.0.0.1", 10078)
    seats.follow(view_of(seats, stranger), HOSTS)
    assert stranger not in seats.wanted, "there is no seat for it"


def test_workers_sit_where_their_slots_have_their_devices() -> None:
    seats, view = seated("a", "a", "b")
    first, second, other = view.workers
    seats.reassign("a", [0, 1], {first: 1, second: 0})
    assert [seat.worker for seat in seats.all.values()] == [second, first, other]
    seats.want({"cpu": 2}, view)
    assert [seat.worker for seat in seats.leaving] == [other]
    seats.reassign("b", [2], {other: 0})
    assert seats.all[2].worker == other


def test_devices_of_a_size_are_the_best_there_may_be() -> None:
    seats = DeviceSlots(("v100", "t4"), {"v100": 2, "t4": 2})
    assert seats.devices_for(3) == {"v100": 2, "t4": 1}
    with pytest.raises(CapacityError, match="size 5: --devices v100=2, t4=2 holds 4"):
        seats.devices_for(5)
    assert DeviceSlots(("cpu",)).devices_for(5) == {"cpu": 5}


def listed(name: str, address: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_nodes_and_their_devices() -> None:
    found = nodes_of(
        [
            listed("0a", "10.0.0.1", CPU=4.0, t4=2.0, GPU=2.0, memory=1e9, **{"node:10.0.0.1": 1.0}),
            listed("0b", "10.0.0.2", CPU=2.0, CPU_group_0_17=1.0),
            listed("0c", "10.0.0.2", alive=False, CPU=2.0),
        ]
    )
    assert {name: node.host for name, node in found.items()} == {"0a": "10.0.0.1", "0b": "10.0.0.2"}
    assert total(found) == {"cpu": 6, "t4": 2, "gpu": 2}
    assert devices_in({"v100": 1.0, "object_store_memory": 5.0}) == {"v100": 1}
    assert bundle_of("cpu", found) == {"CPU": 1}
    assert bundle_of("t4", found) == {"t4": 1, "GPU": 1}
    check_devices({"t4": 2, "cpu": 1}, found)
    with pytest.raises(CapacityError, match="t4=3: the Ray cluster has cpu=6, gpu=2, t4=2; ask for 2"):
        check_devices({"t4": 3}, found)
    with pytest.raises(ConfigError, match="v100=1: the Ray cluster has no v100"):
        check_devices({"v100": 1}, found)


def test_nodes_that_share_one_machine_get_addresses_of_their_own() -> None:
    names = [f"{number:056x}" for number in (1, 2, 1 << 20)]
    shared = nodes_of([listed(name, "127.0.0.1", CPU=1.0) for name in names])
    hosts = {node.host for node in shared.values()}
    assert len(hosts) == 3
    assert all(host.startswith("127.") and host != "127.0.0.1" for host in hosts)
    with pytest.raises(ConfigError, match="2 nodes of the Ray cluster have the address 10.0.0.1"):
        nodes_of([listed("01", "10.0.0.1"), listed("02", "10.0.0.1"), listed("03", "10.0.0.2")])
