"""Conditional and held requests to the config server, and changes that compete."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
from serving import ONE, RUN_A, TWO, held, serving, until_held

from pliant.cluster import ClusterSnapshot, View, Wanted, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer
from pliant.errors import (
    StaleView,
)


def test_etags(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    tag = f'"{version}"'
    assert http.get("/config").headers["etag"] == tag
    assert http.get("/config", headers={"If-None-Match": tag}).status_code == 304
    assert http.get("/config", headers={"If-None-Match": f'"{version - 1}"'}).status_code == 200
    stale = http.put("/config", json=ONE.to_json(), headers={"If-Match": f'"{version - 1}"'})
    assert (stale.status_code, stale.headers["etag"]) == (412, tag)
    assert "read the view again" in stale.json()["error"]
    assert http.put("/config", json=ONE.to_json(), headers={"If-Match": "*"}).status_code == 200
    client.reset()
    assert http.put("/config", json=ONE.to_json(), headers={"If-Match": "*"}).status_code == 412


def test_a_body_made_from_an_older_version_is_stale(http: httpx.Client, client: ConfigClient) -> None:
    read = client.put(TWO)
    client.put(ONE)
    assert http.put("/config", json=read.to_json()).status_code == 412
    assert client.get() == View(read.number + 1, ONE.workers, ONE.runners)


def test_a_held_get_answers_at_the_change(server: ConfigServer, client: ConfigClient) -> None:
    version = client.put(TWO).number
    with held(server, version) as first, held(server, version) as second:
        until_held(server, 2)
        client.put(ONE)
        for sock in (first, second):
            answer = sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b'"%d"' % (version + 1) in answer
    until_held(server, 0)


def test_a_client_waits_for_a_change_also_from_and_to_unset(server: ConfigServer, client: ConfigClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        unset = client.snapshot()
        arriving = pool.submit(client.wait_for_change, unset, 50)
        until_held(server, 1)
        view = client.put(TWO)
        put = arriving.result(30)
        assert put.wanted == Wanted(unset.wanted.version + 1, view)
        leaving = pool.submit(client.wait_for_change, put, 50)
        until_held(server, 1)
        client.reset()
        assert leaving.result(30).wanted == Wanted(unset.wanted.version + 2, None)


def test_a_held_get_is_304_when_nothing_happens(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    answer = http.get("/config?wait=0.05", headers={"If-None-Match": f'"{version}"'})
    assert (answer.status_code, answer.headers["etag"], answer.content) == (304, f'"{version}"', b"")
    snapshot = client.snapshot()
    assert client.wait_for_change(snapshot, 0.05) is snapshot
    assert client.wait_for_change(ClusterSnapshot(), 50) == snapshot


def test_who_hangs_up_is_not_held(server: ConfigServer, client: ConfigClient) -> None:
    with held(server, client.put(TWO).number):
        until_held(server, 1)
    until_held(server, 0)


def test_a_stop_answers_who_waits_and_leaves_nothing() -> None:
    threads = threading.active_count()
    with serving(initial=TWO) as (server, _):
        sock = held(server, 1)
        until_held(server, 1)
    with sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 304")
    assert threading.active_count() == threads
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_of_conflicting_changes_exactly_one_wins_each_round(server: ConfigServer, client: ConfigClient) -> None:
    rounds, rivals = 20, 4
    version = client.put(ONE).number
    barrier = threading.Barrier(rivals)

    def rival(number: int) -> list[int]:
        won = []
        with ConfigClient(server.url) as mine:
            for turn in range(rounds):
                barrier.wait(30)
                view = View(0, (Worker("127.0.0.1", 11000 + number),), (RUN_A,))
                with suppress(StaleView):
                    won.append(mine.put(view, expected=version + turn).number)
                barrier.wait(30)
        return won

    with ThreadPoolExecutor(rivals) as pool:
        wins = [number for won in pool.map(rival, range(rivals)) for number in won]
    assert sorted(wins) == list(range(version + 1, version + rounds + 1))
    assert client.wanted().version == version + rounds
