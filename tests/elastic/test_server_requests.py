"""Requests to the config server: bad ones are refused, waiting ones are told of every change, notices change the membership."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import httpx
import pytest
from gang import FULL
from serving import A0, A1, A2, ONE, RUN_A, TWO, held, serving, until_held

from pliant.cluster import ClusterSnapshot, Membership, View, Wanted, Worker
from pliant.elastic import http_server
from pliant.elastic.client import ConfigClient, ConfigFollower, ConfigSender
from pliant.elastic.http_server import MAX_BODY_BYTES
from pliant.elastic.member import Member
from pliant.elastic.membership import (
    AddWorker,
    ElasticState,
    LeaveNotice,
    LossNotice,
    PutView,
    ReadyNotice,
    SettledNotice,
)
from pliant.elastic.server import ConfigServer
from pliant.elastic.store import StateStore
from pliant.errors import NotWanted, ServerUnavailable, StaleView
from pliant.identity import WorkerSpec

WORKER = {"IPv4": 2130706433, "Port": 10000}
RUNNER = {"IPv4": 2130706433, "Port": 38080}
BAD_BODIES = [
    b"", b" ", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}" * 2,
    b"[" * 100_000, b'{"Workers":' * 2_000, b"[" * 900 + b"]" * 900,
    b'{"Workers": ' + b"[" * 700 + b"]" * 700 + b', "Runners": []}',
    b"9" * 5000, b'{"Workers": NaN, "Runners": []}', b'{"Workers": [], "Runners": Infinity}',
    b'{"Workers": [], "Runners": [], "Version": 1e999}', b'{"Workers": [], "Runners": [], "Version": -1}',
    b'{"Workers": [], "Workers": [], "Runners": []}', b'{"Workers": [], "Runners": [], "\\ud800": 1}',
    b'{"Workers": [{"Host": "\\ud800", "Port": 1}], "Runners": []}',
    b'{"Workers": [{"IPv4": %s, "Port": 1}], "Runners": []}' % (b"9" * 4000),
    b'{"Workers": [{"IPv4": 1, "Port": %s}], "Runners": []}' % (b"9" * 4000),
    b'{"Workers": [{"IPv4": 1.5, "Port": 1}], "Runners": []}',
    json.dumps({"Workers": [WORKER, WORKER], "Runners": [RUNNER]}).encode(),
    json.dumps({"Workers": [WORKER], "Runners": []}).encode(),
    json.dumps({"Workers": [WORKER], "Runners": [RUNNER, {**RUNNER, "Port": 1}]}).encode(),
    json.dumps({"Workers": [{**WORKER, "Port": 65536}], "Runners": [RUNNER]}).encode(),
    json.dumps({"Workers": [{**WORKER, "Port": 0}], "Runners": [RUNNER]}).encode(),
    json.dumps({"Workers": [{"Host": "x" * 70_000, "Port": 1}], "Runners": [RUNNER]}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:30]))
@pytest.mark.parametrize("path", ["/config", "/put", "/addworker", "/removeworker", "/resize"])
def test_bad_bodies_are_400_with_a_reason_and_change_nothing(
    http: httpx.Client, client: ConfigClient, path: str, body: bytes
) -> None:
    view = client.put(TWO)
    answer = http.put(path, content=body)
    assert answer.status_code == 400
    assert 10 < len(answer.json()["error"]) <= 500
    assert client.get() == view


@pytest.mark.parametrize(
    ("method", "target", "headers", "status"),
    [
        ("PATCH", "/config", {}, 405), ("DELETE", "/get", {}, 405), ("GET", "/put", {}, 405), ("GET", "/clear", {}, 405),
        ("GET", "/addworker", {}, 405), ("GET", "/resize", {}, 405),
        ("BREW", "/config", {}, 405), ("POST", "/health", {}, 405), ("PUT", "/metrics", {}, 405),
        ("GET", "/nowhere", {}, 404), ("GET", "/config/", {}, 404), ("GET", "/%ff%00", {}, 404), ("GET", "/../etc", {}, 404),
        ("GET", "/config?wait=x", {}, 400), ("GET", "/config?wait=nan", {}, 400), ("GET", "/config?wait=-1", {}, 400),
        ("GET", "/config?wait=inf", {}, 400), ("GET", "/config?wait=1&wait=2", {}, 400), ("GET", "/config?wait=", {}, 400),
        ("GET", "/config", {"If-None-Match": "x"}, 400), ("GET", "/config", {"If-None-Match": '"1", "2"'}, 400),
        ("POST", "/clear", {"If-Match": '"x"'}, 400), ("POST", "/clear", {"If-Match": "9" * 30}, 400),
        ("POST", "/clear", {"If-Match": '"999999999"'}, 412), ("POST", "/reset", {"If-Match": "0"}, 412),
        ("POST", "/clear", {"If-Match": "*"}, 400), ("POST", "/resize", {}, 400),
        ("POST", "/membership", {}, 405), ("PUT", "/membership", {}, 405), ("GET", "/ready", {}, 405), ("GET", "/lost", {}, 405),
        ("DELETE", "/leave", {}, 405), ("GET", "/finish", {}, 405), ("GET", "/membership/", {}, 404),
        ("GET", "/state?wait=x", {}, 400), ("GET", "/state?wait=nan", {}, 400), ("GET", "/state?wait=1&wait=2", {}, 400),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_methods_paths_queries_and_headers(
    http: httpx.Client, client: ConfigClient, method: str, target: str, headers: dict[str, str], status: int
) -> None:
    view = client.put(TWO)
    answer = http.request(method, target, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]
    assert client.get() == view


def test_who_posts_a_view_means_put(http: httpx.Client, client: ConfigClient) -> None:
    view = client.put(TWO)
    for method, path in [("POST", "/config"), ("DELETE", "/config"), ("POST", "/reset"), ("POST", "/clear")]:
        answer = http.request(method, path, json=ONE.to_json())
        assert answer.status_code == 400
        assert "PUT it" in answer.json()["error"]
    assert client.get() == view


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 8 * MAX_BODY_BYTES])
def test_large_bodies_are_413(http: httpx.Client, client: ConfigClient, size: int) -> None:
    view = client.put(TWO)
    assert http.put("/config", content=b" " * size).status_code == 413
    assert client.get() == view


def test_a_megabyte_of_runners_is_refused_quickly(http: httpx.Client) -> None:
    runners = [{"IPv4": number, "Port": 1} for number in range(30_000)]
    body = json.dumps({"Workers": [WORKER], "Runners": runners}, separators=(",", ":")).encode()
    assert len(body) < MAX_BODY_BYTES
    assert http.put("/config", content=body, timeout=10).status_code == 400


GARBAGE = [
    b"\r\n\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX" + b"x" * 70_000, b"PUT /config HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"PUT /config HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    b"PUT /config HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"PUT /config HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100,
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: repr(garbage[:40]))
def test_what_is_not_http_gets_400_or_the_door(server: ConfigServer, client: ConfigClient, garbage: bytes) -> None:
    view = client.put(TWO)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1 << 16)[:12] in (b"", b"HTTP/1.1 400")
    assert client.get() == view


def test_half_a_body_and_then_nothing_harms_nobody(server: ConfigServer, client: ConfigClient) -> None:
    view = client.put(TWO)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"PUT /config HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
    assert client.get() == view


def test_a_body_that_does_not_come_is_408(server: ConfigServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"PUT /config HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def malformed(chance: random.Random) -> bytes:
    """A request that is HTTP, so that the connection lives on, and wrong in some other way."""
    good = json.dumps(TWO.to_json()).encode()
    at = chance.randrange(len(good))
    body = chance.choice(
        [
            *(body for body in BAD_BODIES if len(body) < 5000),
            good[:at],
            good[:at] + bytes([chance.randrange(256)]) * 3 + good[at:],
            chance.randbytes(chance.randrange(1, 200)),
        ]
    )
    method, path = chance.choice(
        [("PUT", "config"), ("PUT", "put"), ("POST", "config"), ("POST", "reset"), ("POST", "clear"), ("POST", "addworker"),
         ("POST", "removeworker"), ("POST", "resize"), ("PATCH", "config"), ("GET", "clear"), ("GET", "config?wait=x"), ("PUT", "%00"),
         ("POST", "ready"), ("POST", "lost"), ("POST", "leave"), ("GET", "state?wait=x")]
    )  # fmt: skip
    if method == "POST" and path in ("config", "reset", "clear"):
        body = body.strip() or b"x"
    return b"%s /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        method.encode(), path.encode(), len(body), body,
    )  # fmt: skip


def test_thousands_of_malformed_requests(server: ConfigServer, client: ConfigClient) -> None:
    view = client.put(TWO)
    chance = random.Random(2)
    requests = [malformed(chance) for _ in range(10_000 if FULL else 2_000)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock, sock.makefile("rb") as answers:
        # Pipelined: a batch goes out at once, small enough that neither side blocks on a full buffer.
        for start in range(0, len(requests), 20):
            sock.sendall(b"".join(requests[start : start + 20]))
            for request in requests[start : start + 20]:
                assert 400 <= answered(answers) < 500, request
    assert client.get() == view


def answered(answers: io.BufferedReader) -> int:
    """The status of the next answer, which is read to its end."""
    status = int(answers.readline().split()[1])
    length = 0
    while (line := answers.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    answers.read(length)
    return status


def test_etags(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    tag = f'"{version}"'
    assert http.get("/config").headers["etag"] == tag
    assert http.get("/config", headers={"If-None-Match": tag}).status_code == 304
    assert http.get("/config", headers={"If-None-Match": f'"{version - 1}"'}).status_code == 200
    stale = http.put("/config", json=ONE.to_json(), headers={"If-Match": f'"{version - 1}"'})
    assert (stale.status_code, stale.headers["etag"]) == (412, tag)
    assert "read the view again" in stale.json()["error"]
    read = client.get()
    assert read is not None
    client.put(ONE)
    assert http.put("/config", json=read.to_json()).status_code == 412, "the body was made from an older version"


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


def running(client: ConfigClient) -> Membership:
    """The membership of a job of two workers."""
    client.put(TWO)
    client.ready(A0)
    return client.ready(A1)


def test_a_job_from_its_first_worker_to_its_end(client: ConfigClient) -> None:
    start = client.membership()
    assert (start.members, start.over) == ((), False)
    membership = running(client)
    assert (membership.number, membership.members) == (start.number + 1, (A0, A1))
    client.add_worker(A2)
    assert client.membership() == membership
    grown = client.ready(A2)
    assert (grown.number, grown.members) == (membership.number + 1, (A0, A1, A2))
    after_loss = client.lost(A1, "killed by SIGKILL")
    assert (after_loss.members, after_loss.urgent) == ((A0, A2), after_loss.number)
    assert client.lost(A1, "silent") == client.leave(A1) == after_loss
    left = client.leave(A2)
    assert (left.members, left.urgent) == ((A0,), after_loss.number)
    ended = client.finish(A0)
    assert (ended.number, ended.members, ended.over) == (left.number + 1, (), True)
    assert client.finish(A1) == client.membership() == ended


def test_the_json_of_a_membership(client: ConfigClient, http: httpx.Client) -> None:
    membership = running(client)
    members = [{"IPv4": 2130706433, "Port": 10000}, {"IPv4": 2130706433, "Port": 10001}]
    expected = {
        "Number": membership.number,
        "Members": members,
        "Urgent": membership.urgent,
        "Over": False,
        "Wanted": membership.wanted,
        "Begun": False,
        "EndedBy": "",
    }
    assert http.get("/membership").json() == http.post("/ready", json={"Worker": members[0]}).json() == expected
    ended = http.post("/finish", headers={"Pliant-Origin": "pliant\x7f test"}).json()
    assert (ended["Over"], ended["EndedBy"]) == (True, "pliant test (POST /finish from 127.0.0.1)")
    text = http.get("/metrics").text
    assert f"\npliant_config_membership {membership.number + 1}.0\n" in text
    assert "\npliant_config_members 0.0\n" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.lost(A1, "gone"),
        lambda client: client.leave(A1),
        lambda client: client.resize(1),
        lambda client: client.clear(),
        lambda client: client.finish(A0),
        lambda client: client.reset(),
    ],
    ids=["lost", "leave", "resize", "clear", "finish", "reset"],
)
def test_who_waits_is_told_of_every_change(
    server: ConfigServer, client: ConfigClient, change: Callable[[ConfigClient], object]
) -> None:
    membership = running(client)
    with ThreadPoolExecutor(1) as pool, ConfigClient(server.url) as waiting:
        told = pool.submit(waiting.wait_for_membership, membership.number, 50)
        until_held(server, 1)
        change(client)
        assert told.result(30) == client.membership()
    assert client.membership().number == membership.number + 1


def test_a_snapshot_has_the_wanted_view_and_the_membership_of_one_moment(
    server: ConfigServer, client: ConfigClient
) -> None:
    running(client)
    before = client.snapshot()
    assert (before.wanted, before.membership) == (client.wanted(), client.membership())
    with ThreadPoolExecutor(1) as pool, ConfigClient(server.url) as waiting:
        told = pool.submit(waiting.wait_for_change, before, 50)
        until_held(server, 1)
        client.add_worker(A2)
        added = told.result(30)
        assert (added.wanted.workers, added.membership) == ((A0, A1, A2), before.membership)
        told = pool.submit(waiting.wait_for_change, added, 50)
        until_held(server, 1)
        client.lost(A1, "gone")
        lost = told.result(30)
    assert (lost.wanted.workers, lost.membership.members) == ((A0, A2), (A0,))
    assert len({before.tag, added.tag, lost.tag}) == 3


def test_nobody_waits_for_what_is_there_already(client: ConfigClient) -> None:
    membership = running(client)
    assert client.wait_for_membership(membership.number - 1, 50) == membership
    assert client.wait_for_membership(membership.number, 0.05) == membership
    over = client.finish(A0)
    assert client.wait_for_membership(over.number, 50) == over


def test_sixty_four_waiting_workers_are_told_at_once(server: ConfigServer, client: ConfigClient) -> None:
    membership = running(client)
    with ThreadPoolExecutor(64) as pool, ConfigClient(server.url) as waiting:
        told = [
            pool.submit(lambda: (waiting.wait_for_membership(membership.number, 50), time.monotonic()))
            for _ in range(64)
        ]
        until_held(server, 64)
        begun_s = time.monotonic()
        lost = client.lost(A1, "gone")
        answers = [answer.result(30) for answer in told]
    assert {answer for answer, _ in answers} == {lost}
    # Measured on a quiet core: the last of 64 after 13 ms. Far more means that they wait for one another.
    assert max(at_s for _, at_s in answers) - begun_s < 2.0


# Refusals

BAD_NOTICES = [
    b"", b" ", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}", b'{"Worker": null}',
    b'{"Worker": "127.0.0.1:10000"}', b'{"Worker": {"Host": "127.0.0.1"}}', b'{"Worker": {"Port": 10000}}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 0}}', b'{"Worker": {"Host": "127.0.0.1", "Port": 99999}}',
    b'{"Worker": {"Host": "a b", "Port": 10000}}', b'{"Worker": {"IPv4": 1.5, "Port": 10000}}',
    b'{"Worker": {"Host": "\\ud800", "Port": 1}}', b'{"Host": "127.0.0.1", "Port": 10000}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Reason": 7}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Reason": null}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Why": "x"}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Membership": -1}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Replicas": true}',
    b'{"Worker": {"Host": "127.0.0.1", "Port": 10000}, "Worker": {"Host": "127.0.0.1", "Port": 10001}}',
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_NOTICES, ids=lambda body: repr(body[:60]))
@pytest.mark.parametrize("path", ["/ready", "/settled", "/lost", "/leave", "/finish"])
def test_bad_notices_are_400_with_a_reason_and_change_nothing(
    http: httpx.Client, client: ConfigClient, path: str, body: bytes
) -> None:
    if path == "/finish" and not body.strip():
        pytest.skip("an end needs no body")
    membership, wanted = running(client), client.wanted()
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert 10 < len(answer.json()["error"]) <= 500
    assert (client.membership(), client.wanted()) == (membership, wanted)


def test_long_reasons_are_cut_and_large_bodies_refused(client: ConfigClient, http: httpx.Client) -> None:
    running(client)
    assert http.post("/lost", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert http.post("/lost", json={"Worker": A2.to_json(), "Reason": "x\n" * 10_000}).status_code == 200
    assert client.lost(A1, "\ud800" + "y" * 10_000).members == (A0,)


# Remembering


def test_a_restart_forgets_no_membership(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state) as (_, client):
        client.put(View(0, (A0, A1, A2), (RUN_A,)))
        for worker in (A0, A1, A2):
            client.ready(worker)
        lost = client.lost(A2, "gone")
        client.put(View(0, (A1, A2), (RUN_A,)))
    with serving(state=state) as (server, client):
        assert client.membership() == server.membership == lost
        # That A1 is ready has been remembered: only A2 was missing.
        replaced = client.ready(A2)
        assert replaced == Membership(lost.number + 1, (A1, A2), lost.urgent, False, 3)
        over = client.finish(A0)
    with serving(state=state, initial=ONE) as (_, client):
        assert client.membership() == over
        assert client.reset() == 4
    with serving(state=state, initial=ONE) as (_, client):
        assert client.wanted() == Wanted(4, None), "the first view is for a server that has never had one"
        assert (client.membership().number, client.membership().over) == (over.number, False)
        assert running(client).number == over.number + 1


def test_the_store_keeps_the_whole_state(tmp_path: Path) -> None:
    state = ElasticState()
    for request in (
        PutView(View(0, (A0, A1), (RUN_A,))),
        *map(ReadyNotice, (A0, A1)),
        *(SettledNotice(worker, 4, 1) for worker in (A0, A1)),
        AddWorker(A2),
        ReadyNotice(A2),
        LeaveNotice(A1),
    ):
        state = state.after(request)
    some = {"unheard": frozenset({A0}), "lost": frozenset({A1})}
    state = replace(state, id="5eed", restored=2, unused=7, first=1, **some)  # type: ignore[arg-type]
    assert all(getattr(state, each.name) for each in fields(state)), "nothing is left at its default"
    with StateStore(str(tmp_path / "state")) as store:
        store.save(state)
    with StateStore(str(tmp_path / "state")) as store:
        assert store.state == state


def test_a_restart_forgets_nobody_whom_a_loss_has_put_off(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state) as (_, client):
        first = running(client)
        for worker in (A0, A1):
            client.settled(worker, 4, first.number)
        client.add_worker(A2)
        assert client.ready(A2).members == (A0, A1, A2)
        lost = client.lost(A1, "gone")
        assert lost.members == (A0,)
    with serving(state=state) as (_, client):
        assert client.settled(A0, 4) == lost
        assert client.settled(A0, 4, lost.number).members == (A0, A2)


def test_a_state_file_of_version_0_1_is_still_read(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "state")) as old:
        for table, *row in (
            ("wanted", 3, json.dumps(TWO.to_json())),
            ("roll", json.dumps(Membership(2, (A0,), wanted=3).to_json()), json.dumps([A0.to_json()])),
            ("settled", json.dumps([A0.to_json()]), 4),
        ):
            old.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, a, b)")
            old.execute(f"INSERT INTO {table} VALUES (1, ?, ?)", row)
        old.commit()
    with StateStore(str(tmp_path / "state")) as store:
        assert store.state.id, "a state of 0.1 is of no job that is known"
        assert replace(store.state, id="") == ElasticState(
            Wanted(3, replace(TWO, number=3)), Membership(2, (A0,), wanted=3), frozenset({A0}), frozenset({A0}), 4
        )
        changed = store.state.after(LossNotice(A0))
        store.save(changed)
    with StateStore(str(tmp_path / "state")) as store:
        assert store.state == changed


def test_what_cannot_be_saved_changes_nothing_in_the_file_and_is_saved_later(tmp_path: Path) -> None:
    with StateStore(str(tmp_path / "state")) as store:
        for request in (PutView(TWO), ReadyNotice(A0), ReadyNotice(A1)):
            store.save(store.state.after(request))
        before = store.state
        assert store._database is not None
        store._database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON state BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        after = before.after(LossNotice(Worker("127.0.0.1", 10001)))
        store.save(after)
        assert store.state == after != before
        with contextlib.closing(sqlite3.connect(f"file:{tmp_path / 'state'}?immutable=1", uri=True)) as reader:
            kept = reader.execute("SELECT state FROM state").fetchone()[0]
            assert ElasticState.from_json(json.loads(kept)) == before
        store._database.execute("DROP TRIGGER full")
        store._tried_s -= 10
        store.retry()
    with StateStore(str(tmp_path / "state")) as again:
        assert again.state == after


# Following the server, and sending to it


def test_a_follower_hands_over_every_new_state(server: ConfigServer, client: ConfigClient) -> None:
    seen: queue.SimpleQueue[ClusterSnapshot] = queue.SimpleQueue()
    follower = ConfigFollower(server.url, "", seen.put)
    follower.start(client.snapshot())
    try:
        view = client.put(TWO)
        assert seen.get(timeout=30).wanted.view == view
        assert running(client) in (seen.get(timeout=30).membership for _ in range(2))
    finally:
        follower.stop()
        client.reset()  # ends the held request


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\xff\xfe", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 409 Conflict\r\nETag: 1\r\nConnection: close\r\n\r\n" + b'{"error":' * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["nothing", "bytes", "no state", "deep", "a deep refusal", "half compressed"],
)  # fmt: skip
def test_whoever_answers_in_place_of_the_server_is_asked_again(answer: bytes) -> None:
    seen: list[ClusterSnapshot] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        follower = ConfigFollower(f"http://127.0.0.1:{listener.getsockname()[1]}/config", "", seen.append)
        follower.start(ClusterSnapshot())
        try:
            for _ in range(2):
                with listener.accept()[0] as sock, suppress(ConnectionError):
                    sock.recv(10_000)
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(10_000)
        finally:
            follower.stop()
    assert not seen


def test_a_sender_repeats_what_the_server_did_not_answer_and_passes_refusals_on(client: ConfigClient) -> None:
    sender = ConfigSender(str(client.url), "")
    client.put(TWO)
    failures = [ServerUnavailable("no"), ServerUnavailable("no")]

    def resize(to: ConfigClient) -> View:
        if failures:
            raise failures.pop()
        return to.resize(3)

    with contextlib.closing(sender):
        assert sender.submit(resize).result(30).size == 3
        with pytest.raises(NotWanted):
            sender.submit(lambda to: to.ready(Worker("127.0.0.1", 9))).result(30)
        failures = [ServerUnavailable("no")]
        with pytest.raises(ServerUnavailable):
            sender.submit(resize, give_up_s=0).result(30)


def test_a_signal_handler_can_send_whatever_it_has_interrupted(client: ConfigClient) -> None:
    sender = ConfigSender(str(client.url), "")
    with contextlib.closing(sender):
        sender.start()
        with sender._starting:  # as where the signal comes while another message starts the thread
            assert sender.submit(lambda to: to.membership()).result(30) == client.membership()


@pytest.mark.parametrize(
    ("latest", "is_reported"),
    [(Membership(3, (A0, A1)), True), (Membership(4, (A0,)), False), (Membership(4, (A0, A1), over=True), False)],
    ids=["counted on", "on its way out", "the job is over"],
)
def test_a_member_that_says_goodbye_while_the_others_count_on_it_is_reported(
    latest: Membership, is_reported: bool
) -> None:
    """As one that gets a second SIGTERM, or whose program ends by itself."""
    member, client = Member.__new__(Member), mock.Mock()
    member.me, member._latest, member._sender = A0, latest, mock.Mock()
    member._on_left(A1)
    for call in member._sender.report.call_args_list:
        call.args[1](client)
    assert client.mock_calls == [mock.call.lost(A1, "it has left", by=A0)] * is_reported


def test_a_worker_that_needs_the_server_says_so_and_waits_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pliant.elastic.member.SAY_AWAY_S", 0.1)
    monkeypatch.setattr("pliant.elastic.member.SERVER_AWAY_S", 1.0)
    view = View(1, (A0, A1), (RUN_A,))
    url = "http://127.0.0.1:9/config"  # nobody listens there
    member = Member(WorkerSpec(worker=A0, view=view, secret=b"s", elastic=True, config_server=url), mock.Mock())
    member._current, member._entered = view.workers, 1
    member._on_lost(A1, "cut off")
    member._follower.start(ClusterSnapshot())
    with (
        contextlib.closing(member),
        pytest.raises(ServerUnavailable, match=r"not answered for [1-9] s: this worker stops"),
    ):
        member.wait_for_membership(1)
    waits = "127.0.0.1:10000 waits: 127.0.0.1:10001 was lost, and only the config server"
    assert f"{waits} {url} can say who goes on, but it does not answer: start it again at this address" in caplog.text


def test_a_member_reports_again_what_a_server_that_was_restored_has_forgotten() -> None:
    sender, client = mock.Mock(), mock.Mock()
    view = View(1, (A0, A1), (RUN_A,))
    spec = WorkerSpec(worker=A0, view=view, secret=b"s", elastic=True, config_server="http://127.0.0.1:9")
    member = Member(spec, mock.Mock())
    member._sender, member.max_members, member._entered = sender, 4, 3
    member.ready()
    member.settled(after_step=True)
    snapshot = ClusterSnapshot(Wanted(1, view), Membership(3, (A0, A1)), "5eed")
    sender.reset_mock()
    member._on_change(snapshot)
    assert sender.job == "5eed"
    assert not sender.mock_calls
    member._on_change(replace(snapshot, restored=1))
    member._on_change(replace(snapshot, restored=1))
    for call in sender.report.call_args_list:
        call.args[1](client)
    assert client.mock_calls == [mock.call.settled(A0, 4, 3), mock.call.ready(A0)], "that it is ready comes last"


def test_what_cannot_be_delivered_keeps_nobody_beyond_its_time_and_nothing_is_awaited_after_the_end() -> None:
    sender = ConfigSender("http://127.0.0.1:9", "")  # nobody listens there
    with contextlib.closing(sender):
        sender.report("nothing is there", lambda to: to.resize(1))
        with pytest.raises(ServerUnavailable):
            sender.ask(lambda to: to.resize(2), 0.0)
        waiting = sender.submit(lambda to: to.resize(3))
    with pytest.raises(CancelledError):
        waiting.result(30)
    with pytest.raises(ServerUnavailable, match="has left the job"):
        sender.ask(lambda to: to.resize(4), 60.0)
