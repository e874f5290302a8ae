"""What the config server refuses: bad bodies, wrong requests, what is not HTTP. The view stays as it is."""

from __future__ import annotations

import io
import json
import random
import socket

import httpx
import pytest
from gang import FULL
from serving import ONE, TWO

from pliant.elastic import http_server
from pliant.elastic.client import ConfigClient
from pliant.elastic.http_server import MAX_BODY_BYTES
from pliant.elastic.server import ConfigServer

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
        ("GET", "/addworker", {}, 405), ("GET", "/resize?size=1", {}, 405),
        ("BREW", "/config", {}, 405), ("POST", "/health", {}, 405), ("PUT", "/metrics", {}, 405), ("POST", "/", {}, 405),
        ("GET", "/nowhere", {}, 404), ("GET", "/config/", {}, 404), ("GET", "/%ff%00", {}, 404), ("GET", "/../etc", {}, 404),
        ("GET", "/config?wait=x", {}, 400), ("GET", "/config?wait=nan", {}, 400), ("GET", "/config?wait=-1", {}, 400),
        ("GET", "/config?wait=inf", {}, 400), ("GET", "/config?wait=1&wait=2", {}, 400), ("GET", "/config?wait=", {}, 400),
        ("GET", "/config", {"If-None-Match": "x"}, 400), ("GET", "/config", {"If-None-Match": '"1", "2"'}, 400),
        ("POST", "/clear", {"If-Match": '"x"'}, 400), ("POST", "/clear", {"If-Match": "9" * 30}, 400),
        ("POST", "/clear", {"If-Match": '"999999999"'}, 412), ("POST", "/reset", {"If-Match": "0"}, 412),
        ("POST", "/resize?size=-1", {}, 400), ("POST", "/resize?size=x", {}, 400), ("POST", "/resize?size=1&size=2", {}, 400),
        ("POST", "/resize?size=\u0664", {}, 400), ("POST", "/resize?size=99999999", {}, 409), ("POST", "/resize", {}, 400),
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
    b"\r\n\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX" + b"x" * 70_000, b"PUT /config HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"PUT /config HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    b"PUT /config HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"PUT /config HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nBad Header: 1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100,
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
        sock.sendall(b"PUT /config HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
    assert client.get() == view


def test_a_body_that_does_not_come_is_408(server: ConfigServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"PUT /config HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
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
    return b"%s /%s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (
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
