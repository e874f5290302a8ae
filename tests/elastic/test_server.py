"""The config server on a loopback port: its routes, its waits, its refusals, its memory."""

from __future__ import annotations

import io
import json
import random
import shutil
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from serving import A0, A1, A2, ONE, RUN_A, TWO, held, serving, until_held

from pliant.cluster import Host, PortRange, View, Worker
from pliant.elastic import inputs
from pliant.elastic.inputs import MAX_BODY_BYTES
from pliant.elastic.membership import Limits, Wanted
from pliant.elastic.roll import Membership
from pliant.elastic.server import ConfigClient, ConfigServer, ServerConfig
from pliant.elastic.store import Store
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    InvalidView,
    NoView,
    ServerUnavailable,
    StaleView,
)

# What a client sees


def test_put_then_get(client: ConfigClient) -> None:
    assert client.get() is None
    before = client.state().version
    put = client.put(TWO)
    assert put == View(before + 1, TWO.workers, TWO.runners) == client.get()


def test_the_version_never_goes_back(client: ConfigClient) -> None:
    first = client.put(TWO).number
    assert client.reset() == first + 1
    assert client.state() == Wanted(first + 1, None)
    assert client.put(TWO).number == first + 2


def test_workers_come_and_go(client: ConfigClient) -> None:
    assert client.add_worker(A0).workers == (A0,)
    assert client.add_worker(A1).workers == (A0, A1)
    assert client.resize(3).workers == (A0, A1, A2)
    view = client.remove_worker(A0)
    assert (view.workers, view.runners) == ((A1, A2), (RUN_A,))
    assert client.resize(1).workers == (A1,)


def test_a_cleared_cluster_refuses_until_the_reset(client: ConfigClient) -> None:
    client.put(TWO)
    assert client.clear().workers == ()
    changes: list[Callable[[], View]] = [
        lambda: client.put(TWO),
        lambda: client.resize(1),
        lambda: client.add_worker(A0),
    ]
    for change in changes:
        with pytest.raises(ClusterCleared, match="reset it"):
            change()
    client.reset()
    assert client.put(TWO).size == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda client, version: client.put(ONE, version),
        lambda client, version: client.resize(1, version),
        lambda client, version: client.add_worker(A2, version),
        lambda client, version: client.remove_worker(A0, version),
        lambda client, version: client.clear(version),
        lambda client, version: client.reset(version),
    ],
    ids=["put", "resize", "add", "remove", "clear", "reset"],
)
def test_every_change_is_compare_and_set(client: ConfigClient, change: Callable[[ConfigClient, int], object]) -> None:
    view = client.put(TWO)
    with pytest.raises(StaleView) as caught:
        change(client, view.number - 1)
    assert (caught.value.expected, caught.value.current) == (view.number - 1, view.number)
    assert client.get() == view
    change(client, view.number)
    assert client.state().version == view.number + 1


def test_refusals_are_pliants_errors(client: ConfigClient) -> None:
    with pytest.raises(NoView):
        client.resize(2)
    client.put(TWO)
    with pytest.raises(ConfigError, match="listed twice"):
        client.add_worker(A0)
    with pytest.raises(ConfigError, match="not in view"):
        client.remove_worker(A2)
    with pytest.raises(ConfigError, match="negative"):
        client.resize(-1)


def test_a_resize_keeps_to_the_limits_it_was_given() -> None:
    limits = Limits(hosts=(Host("127.0.0.1", 3),), ports=PortRange(10000, 10009))
    with serving(limits=limits, initial=ONE) as (_, client):
        assert client.resize(3).size == 3
        with pytest.raises(CapacityError, match="hold 3 workers"):
            client.resize(4)


def test_nobody_there_is_said_clearly() -> None:
    with serving() as (server, _):
        url = server.url
    with ConfigClient(url, timeout_s=5) as client, pytest.raises(ServerUnavailable, match="is it running"):
        client.get()


def test_somebody_else_there_is_said_clearly(server: ConfigServer) -> None:
    with ConfigClient(server.url.replace("/config", "/nowhere")) as client, pytest.raises(ConfigError, match="404"):
        client.get()
    with (
        ConfigClient(server.url.replace("/config", "/health")) as client,
        pytest.raises(ConfigError, match="not a con"),
    ):
        client.get()


@pytest.mark.parametrize("url", ["", "127.0.0.1:9100", "ftp://a/b", "http://", "http://[::1", "http://a:x/"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="http://10.0.0.1:9100/config"):
        ConfigClient(url)


def test_proxies_of_the_environment_are_ignored(client: ConfigClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with ConfigClient(str(client.url)) as fresh:
        assert fresh.get() is None


# KungFu's routes


def test_kungfus_table(http: httpx.Client) -> None:
    unset = http.get("/config")
    assert (unset.status_code, unset.json()["error"]) == (404, "No Config Found.")
    cluster = {"Runners": [{"IPv4": 2130706433, "Port": 38080}], "Workers": [{"IPv4": 2130706433, "Port": 10000}]}
    put = http.put("/config", json=cluster)
    got = http.get("/config")
    assert put.status_code == got.status_code == 200
    assert got.json() == put.json() == {"Version": int(got.headers["etag"].strip('"')), **cluster}
    assert http.put("/config", json={**cluster, "Workers": []}).status_code == 200
    assert http.put("/config", json=cluster).status_code == 403
    assert http.request("DELETE", "/config").status_code == 200
    assert http.get("/config").status_code == 404
    assert http.put("/config", json=cluster).status_code == 200
    assert http.post("/config").status_code == 200
    assert http.get("/config").status_code == 404


def test_the_artifacts_routes(http: httpx.Client) -> None:
    assert "/removeworker" in http.get("/").json()["routes"]
    assert http.put("/put", json=TWO.to_json()).status_code == 200
    assert len(http.get("/get").json()["Workers"]) == 2
    assert http.post("/addworker", json=A2.to_json()).json()["Workers"][-1] == A2.to_json()
    assert len(http.post("/removeworker", json=A2.to_json()).json()["Workers"]) == 2
    assert len(http.post("/resize?size=4").json()["Workers"]) == 4
    assert len(http.put("/resize", json={"size": 1}).json()["Workers"]) == 1
    assert http.post("/clear").json()["Workers"] == []
    assert http.put("/put", json=TWO.to_json()).status_code == 403
    assert http.post("/reset").status_code == 200
    assert http.get("/get").status_code == 404


def test_stop_stops_it() -> None:
    with serving() as (server, client):
        assert httpx.get(server.url.replace("/config", "/stop"), trust_env=False).json() == {"stopping": True}
        assert server.wait(10)
        with pytest.raises(ServerUnavailable):
            client.get()


def test_another_endpoint() -> None:
    with serving(endpoint="/job/7") as (server, client):
        assert server.url.endswith("/job/7")
        assert client.put(TWO).number == 1
        assert client.resize(1).number == 2


def test_health_and_metrics(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    assert http.get("/health").json() == {"status": "ok"}
    http.get("/nowhere")
    text = http.get("/metrics").text
    assert f"\npliant_config_version {version}\n" in text
    assert "\npliant_config_workers 2\n" in text
    assert "\npliant_config_held_requests 0\n" in text
    assert '\npliant_config_requests_total{status="404"}' in text
    assert "# TYPE pliant_config_requests_total counter" in text


# Conditions and waits


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
        unset = client.state().version
        arriving = pool.submit(client.wait, unset, 50)
        until_held(server, 1)
        view = client.put(TWO)
        assert arriving.result(30) == Wanted(unset + 1, view)
        leaving = pool.submit(client.wait, unset + 1, 50)
        until_held(server, 1)
        client.reset()
        assert leaving.result(30) == Wanted(unset + 2, None)


def test_a_held_get_is_304_when_nothing_happens(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    answer = http.get("/config?wait=0.05", headers={"If-None-Match": f'"{version}"'})
    assert (answer.status_code, answer.headers["etag"], answer.content) == (304, f'"{version}"', b"")
    assert client.wait(version, 0.05) == Wanted(version, None)
    assert client.wait(version - 1, 50).version == version


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
    assert client.state().version == version + rounds


# Refusals


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
        ("GET", "/reset", {}, 405), ("GET", "/addworker", {}, 405), ("GET", "/resize?size=1", {}, 405),
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
    monkeypatch.setattr(inputs, "BODY_TIMEOUT_S", 0.05)
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
         ("POST", "removeworker"), ("POST", "resize"), ("PATCH", "config"), ("GET", "clear"), ("GET", "config?wait=x"), ("PUT", "%00")]
    )  # fmt: skip
    if method == "POST" and path in ("config", "reset", "clear"):
        body = body.strip() or b"x"
    return b"%s /%s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (
        method.encode(), path.encode(), len(body), body,
    )  # fmt: skip


def test_ten_thousand_malformed_requests(server: ConfigServer, client: ConfigClient) -> None:
    view = client.put(TWO)
    chance = random.Random(2)
    requests = [malformed(chance) for _ in range(10_000)]
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


# Who may, and over what


def test_a_token_is_needed_where_there_is_one() -> None:
    with serving(token="s3cret", initial=TWO) as (server, client):
        assert client.get() is not None
        for token in ("", "wrong", "s3cre", "s3cret2"):
            with ConfigClient(server.url, token) as stranger, pytest.raises(ConfigError, match="needs its token"):
                stranger.clear()
        base = server.url.removesuffix("/config")
        for path in ("/config", "/", "/metrics", "/stop", "/nowhere"):
            answer = httpx.get(base + path, headers={"Authorization": "Basic s3cret"}, trust_env=False)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(base + "/config", headers={b"Authorization": b"\xff"}, trust_env=False).status_code == 401
        assert httpx.get(base + "/health", trust_env=False).status_code == 200
        assert client.state().version == 1


def make_certificate(folder: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


def test_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    config = ServerConfig(port=0, tls_cert=cert, tls_key=key, initial=TWO)
    with ConfigServer(config).running() as server:
        assert server.url.startswith("https://127.0.0.1:")
        with ConfigClient(server.url, ca_file=cert) as client:
            assert client.resize(1).number == 2
        with ConfigClient(server.url) as stranger, pytest.raises(ServerUnavailable, match="(?i)certificate"):
            stranger.get()
        with ConfigClient(server.url.replace("https", "http")) as plain, pytest.raises(ServerUnavailable):
            plain.get()
    with (
        pytest.raises(ConfigError, match="belong together"),
        ConfigServer(ServerConfig(port=0, tls_cert=cert, tls_key=cert)).running(),
    ):
        pass


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    with serving(host=host) as (server, client):
        assert server.url.startswith("http://[::1]:")
        assert client.put(View(0, (Worker("::1", 10000),), (Worker("::1", 38080),))).number == 1
        assert client.resize(2).workers[1] == Worker("::1", 10001)


# Opening, and remembering


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state, initial=ONE) as (_, client):
        assert client.put(TWO).number == 2
    with serving(state=state, initial=ONE) as (_, client):
        assert client.get() == View(2, TWO.workers, TWO.runners)
        client.clear()
    with serving(state=state, initial=ONE) as (_, client), pytest.raises(ClusterCleared):
        client.put(TWO)
    with serving(state=state, initial=ONE) as (_, client):
        assert client.reset() == 4
    with serving(state=state, initial=ONE) as (_, client):
        assert client.state() == Wanted(4, None)
        assert client.put(TWO).number == 5


def test_a_state_file_serves_one_server(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state), pytest.raises(ConfigError, match="locked.*stop any other server"), serving(state=state):
        pass


@pytest.mark.parametrize("content", [b"not a database, but long enough to be read as one" * 20, None])
def test_a_state_file_of_something_else(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state" if content else tmp_path / "nowhere" / "state"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"state file {path}"), serving(state=str(path)):
        pass


def test_what_cannot_be_saved_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(initial=TWO) as (server, client):

        def full(self: Store, state: Membership) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(Store, "save", full)
        with pytest.raises(ServerUnavailable, match="nothing has changed: database or disk is full"):
            client.put(ONE)
        assert client.state().version == server.wanted.version == 1


def test_one_server_can_run_again() -> None:
    server = ConfigServer(ServerConfig(port=0, initial=TWO))
    for _ in range(2):
        with server.running(), ConfigClient(server.url) as client:
            assert client.state().version == 1


def test_a_taken_port_is_said_clearly(shared: ConfigServer) -> None:
    again = ConfigServer(ServerConfig(port=shared.port))
    with pytest.raises(ConfigError, match=f"-port {shared.port}: .*in use; give a free port"), again.running():
        pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "a b"}, "neither an IP address"),
        ({"port": 65536}, "-port 65536"),
        ({"port": -1}, "-port -1"),
        ({"endpoint": "config"}, "-endpoint 'config'"),
        ({"endpoint": "/{x}"}, "-endpoint"),
        ({"endpoint": "/stop"}, "-endpoint"),
        ({"token": "a b"}, "printable ASCII"),
        ({"tls_cert": "x"}, "--tls-key"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerConfig(**settings)  # type: ignore[arg-type]


def test_an_impossible_first_view_opens_nothing() -> None:
    with pytest.raises(InvalidView):
        ServerConfig(initial=View(0, (A0,), ()))
