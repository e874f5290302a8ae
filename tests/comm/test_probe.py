"""Measurement of links: the tournament's rounds, the rate that follows from arrivals, and real connections."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator

import pytest
import torch
from pliant_repro.lab.hosts import Lab, missing_for_lab
from views import on_all

from pliant.comm import probe
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.strategy_selection import Network
from pliant.comm.transport import Transport, loopback_engines, view_of
from pliant.errors import CommError, ConfigError

pytestmark = pytest.mark.usefixtures("no_leaks")

QUICK = EngineConfig(collective_timeout_s=20)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 33])
def test_everybody_meets_everybody_once(size: int) -> None:
    played = probe.rounds(size, most=1000)
    assert len(played) == (size - 1 if size % 2 == 0 else size if size > 1 else 1)
    met = sorted(pair for pairs in played for pair in pairs)
    assert met == [(i, j) for i in range(size) for j in range(i + 1, size)]
    for pairs in played:
        seats = [rank for pair in pairs for rank in pair]
        assert len(set(seats)) == len(seats)


def test_among_many_only_some_rounds_are_played_and_the_rest_is_estimated() -> None:
    played = probe.rounds(200)
    assert len(played) <= probe.MAX_ROUNDS
    assert all(len(pairs) >= 99 for pairs in played)
    # Host 0 sends slowly; the links 0 -> 3 and 3 -> 0 were not measured.
    known = [[0.0, 2.0, 2.0, 0.0], [9.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, 9.0], [0.0, 9.0, 9.0, 0.0]]
    full = probe.complete_rates(known)
    assert full[0][3] == 2.0
    assert full[3][0] == 9.0
    assert [full[i][i] for i in range(4)] == [0.0] * 4


def test_pieces_that_pass_a_shaper_on_credit_do_not_count() -> None:
    # Eight pieces on credit, eight at 1000 bytes per 0.1 s.
    arrivals = [0.2 + 0.001 * i for i in range(8)] + [0.3 + 0.1 * i for i in range(8)]
    assert probe.rate_of(arrivals, 0.0, 1000) == pytest.approx(1e4, rel=0.02)
    assert probe.rate_of([0.5], 0.0, 1000) == pytest.approx(2000)


def test_pieces_that_are_noticed_together_are_not_fast() -> None:
    # Four pieces at 1000 bytes per 0.1 s, the last three noticed at once.
    assert probe.rate_of([0.1, 0.4, 0.4, 0.4], 0.0, 1000) == pytest.approx(1e4)
    assert probe.rate_of([0.0, 0.0], 0.0, 1000) > 1e6  # at the same moment: fast, not infinite


@pytest.mark.parametrize("hosts", ["A", "AA", "AB", "ABC", "AABBC"])
def test_all_ranks_have_the_same_rates(hosts: str) -> None:
    with loopback_engines(hosts, QUICK) as ranks:
        found = on_all(ranks, lambda engine: probe.measure(engine, 1 << 16, 10))
        assert all(rates == found[0] for rates in found)
        for i, row in enumerate(found[0]):
            for j, rate in enumerate(row):
                if i == j:
                    assert rate == 0
                elif hosts[i] == hosts[j]:
                    assert rate == probe.SAME_HOST_RATE
                else:
                    assert 1e3 < rate < 1e12
        on_all(ranks, lambda engine: engine.barrier())  # and life goes on


def test_links_can_be_measured_again_and_between_collectives() -> None:
    with loopback_engines("ABC", QUICK) as ranks:

        def work(engine: Engine) -> float:
            for _ in range(3):
                probe.measure(engine, 1 << 14, 10)
                assert float(engine.all_reduce("x", torch.ones(10)).wait().sum()) == 30  # type: ignore[union-attr]
            return 1.0

        assert on_all(ranks, work) == [1.0] * 3


def test_a_peer_that_does_not_come_is_an_error_in_time() -> None:
    with loopback_engines("AB", QUICK) as ranks:
        begun_s = time.monotonic()
        with pytest.raises(CommError):
            probe.measure(ranks[0], 1 << 14, 0.2)
        assert time.monotonic() - begun_s < 5
        with pytest.raises(ConfigError, match="use 16 or more"):
            probe.measure(ranks[0], 3)


def test_shares_on_some_hosts_only() -> None:
    with loopback_engines("AABC", QUICK) as ranks:

        def work(engine: Engine) -> None:
            engine.set_strategy("MULTI_STAR@2,3")
            assert engine.num_lanes == 2
            found = engine.all_reduce("x", torch.full((1 << 18,), float(engine.rank))).wait()
            assert found is not None
            assert bool((found == 6).all())
            if engine.rank < 2:  # ranks 2 and 3 are not here: the shares cannot be theirs
                within = engine.all_reduce("y", torch.ones(1 << 18), ranks=(0, 1)).wait()
                assert within is not None
                assert bool((within == 2).all())
            with pytest.raises(ConfigError):
                engine.set_strategy("MULTI_STAR@4")
            before = engine.counters().egress_bytes
            engine.all_reduce("z", torch.ones(1 << 18)).wait()
            after = engine.counters().egress_bytes
            sent = sum(after[peer] - before[peer] for peer in after if not peer.startswith("A"))
            assert engine.rank > 1 or sent <= 2 << 20  # its own and its neighbour's gradients, and no result

        on_all(ranks, work)


def across(lab: Lab, server: int, client: int) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection between two hosts of a lab."""
    with lab.call(server, lambda: socket.create_server((lab.addresses[server], 0))) as listener:
        there = lab.call(client, lambda: socket.create_connection(listener.getsockname(), timeout=5))
        return listener.accept()[0], there


@contextlib.contextmanager
def lab_engines(lab: Lab) -> Iterator[list[Engine]]:
    """Yield an engine on each host of a lab, all in this process."""
    view = view_of(lab.addresses)
    made = [Transport(worker, MeshConfig(secret=b"lab"), QUICK) for worker in view.workers]
    with contextlib.ExitStack() as stack:
        for transport in made:
            transport.start()
            stack.callback(transport.close)
        for server, client in itertools.combinations(range(view.size), 2):
            here, there = across(lab, server, client)
            made[server].add_connection(view.workers[client], here)
            made[client].add_connection(view.workers[server], there)
        yield [transport.enter(view) for transport in made]


@pytest.mark.root
@pytest.mark.skipif(bool(missing_for_lab()), reason="; ".join(missing_for_lab()) or "a lab is possible")
def test_in_a_lab_the_slow_host_is_seen() -> None:
    with Lab(num_hosts=4, rate="100mbit").up() as lab, lab_engines(lab) as ranks:
        lab.set_rate(1, "20mbit")
        for _ in range(5):  # the machine may be busy
            begun_s = time.monotonic()
            rates = on_all(ranks, lambda engine: probe.measure(engine, timeout_s=10))[0]
            took_s = time.monotonic() - begun_s
            slow, *others = (Network(lab.addresses, rates).egress[host] * 8e-6 for host in (1, 0, 2, 3))
            if 4 < slow < 40 < min(others) and took_s < 0.5:
                break
        else:
            pytest.fail(f"five times {slow:.0f} and {others} Mbit/s in {took_s:.1f} s")
