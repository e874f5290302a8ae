"""Many connections that never send a request: those of who has the token go on, and the log stays short."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate
from patience import until
from serving import TWO
from starlette.applications import Starlette
from starlette.responses import Response

from pliant.elastic import connections, http_server
from pliant.elastic.client import ConfigClient
from pliant.elastic.http_server import Gate, listening, serving, single_page, uvicorn_config
from pliant.tokens import find_token
from pliant.ui.server import PageGate

TOKEN = "s3cret"
ASKS = b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n\r\n"
MOST = 8


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
)
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@contextlib.contextmanager
def small_server(tls: tuple[str, str] = ("", ""), app: Gate | None = None) -> Iterator[int]:
    """A server for `MOST` connections; yields its port."""
    page = app or single_page("/", lambda: Response("hello"), TOKEN)
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn_config(page, tls_cert=tls[0], tls_key=tls[1], is_page=app is not None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_server, "MOST_OF_FEW", MOST)
            with serving(config, listener, "small"):
                yield listener.getsockname()[1]


def connected(port: int, sends: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(sends)
    return sock


def greets(sock: socket.socket) -> bool:
    """Whether the server answers on this connection."""
    sock.settimeout(20)
    answer = b""
    while not answer.endswith(b"hello") and (part := sock.recv(1000)):
        answer += part
    return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"hello")


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it, as far as can be seen without waiting."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_the_oldest_stranger_makes_room_and_who_has_the_token_stays() -> None:
    with small_server() as port, contextlib.ExitStack() as stack:
        friend = stack.enter_context(connected(port, ASKS))
        assert greets(friend)
        strangers = [stack.enter_context(connected(port, b"GET / HT")) for _ in range(3 * MOST)]
        until(lambda: is_closed(strangers[-MOST]), "room for the last")
        assert all(is_closed(each) for each in strangers[: -MOST + 1])
        assert not is_closed(strangers[-1])
        friend.sendall(ASKS)
        assert greets(friend), "it is the oldest of all, and goes on"


def test_with_nobody_but_friends_the_next_is_closed_at_once() -> None:
    with small_server() as port, contextlib.ExitStack() as stack:
        friends = [stack.enter_context(connected(port, ASKS)) for _ in range(MOST)]
        for friend in friends:
            assert greets(friend)
        with connected(port) as late, contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
        assert not any(is_closed(friend) for friend in friends)


def test_as_many_as_there_is_room_for_come_at_once_and_none_is_closed() -> None:
    with small_server() as port:
        for _ in range(40):
            with contextlib.ExitStack() as stack:
                friends = [stack.enter_context(connected(port, ASKS)) for _ in range(MOST)]
                assert all(greets(friend) for friend in friends)
                for friend in friends:
                    friend.shutdown(socket.SHUT_WR)
                    assert friend.recv(1) == b"", "the server has let go of it"


@pytest.mark.parametrize(
    "begun",
    [
        b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc",
        ASKS + b"GET", ASKS.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"),
    ],
    ids=["nothing", "half a header", "half a body", "half of a second header", "no body with the token"],
)  # fmt: skip
def test_what_a_client_begins_must_come_soon(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    for name in ("HEADER_TIMEOUT_S", "BODY_TIMEOUT_S", "BODY_GRACE_S"):
        monkeypatch.setattr(connections, name, 0.1)
    with small_server() as port, connected(port, begun) as late:
        with contextlib.suppress(ConnectionResetError):
            while late.recv(1000):
                continue
        with connected(port, ASKS) as friend, connected(port) as later:
            assert greets(friend)
            until(lambda: is_closed(later), "the end of one that came after the friend's answer")
            friend.sendall(ASKS)
            assert greets(friend), "a pause between requests is no delay"


def test_handshakes_of_tls_that_never_end_are_strangers_too(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    trusting = ssl.create_default_context(cafile=cert)
    with small_server((cert, key)) as port, contextlib.ExitStack() as stack:
        plain = stack.enter_context(connected(port))
        friend = stack.enter_context(trusting.wrap_socket(plain, server_hostname="127.0.0.1"))
        friend.sendall(ASKS)
        assert greets(friend)
        strangers = [stack.enter_context(connected(port, b"\x16\x03\x01")) for _ in range(3 * MOST)]
        until(lambda: is_closed(strangers[MOST]), "room for the last")
        friend.sendall(ASKS)
        assert greets(friend)


def test_a_flood_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connections, "GATHER_S", 0.3)
    with small_server() as port, contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        for _ in range(200):
            stack.enter_context(connected(port))
        until(lambda: bool(caplog.messages), "the line")
        for _ in range(200):
            stack.enter_context(connected(port))
        with connected(port, ASKS) as friend:
            assert greets(friend)
    (line,) = caplog.messages
    assert re.fullmatch(r"\d+ connections were closed before they sent a request", line)


HOST = b"Host: localhost\r\n"
NONSENSE: dict[str, tuple[bytes, ...]] = {
    "bytes": (b"\x16\x03\x01\x00\xa5\x00\xff HTTP\r\n\r\n",),
    "no host": (b"GET / HTTP/1.1\r\n\r\n",),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",),
    "a host that is no name": (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",),
    "an origin that is no URL": (b"GET / HTTP/1.1\r\n" + HOST + b"Origin: http://[\r\n\r\n",),
    "an origin beyond ASCII": (b"GET / HTTP/1.1\r\n" + HOST + b"Origin: http://a\xbc\r\n\r\n",),
    "a huge header": (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 200_000 + b"\r\n\r\n",),
    "a negative length": (b"POST /enter HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\nabc",),
    "two lengths": (b"POST /enter HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",),
    "half a body": (b"POST /enter HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\nabc",),
    "a body that nobody reads": (b"POST /enter HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",),
    "a bad chunk": (b"POST /enter HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc",),
    "a bad chunk later": (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\nabc"),
    "a request, and no other": (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", b"\x00zz\r\nabc\r\n\r\n"),
    "a token that is no text": (b"GET /?token=%ff%ed%a0%80 HTTP/1.1\r\n" + HOST + b"Authorization: \xff\r\n\r\n",),
    "another upgrade": (UPGRADE.replace(b"websocket", b"h2c") + b"\r\n",),
    "an upgrade without a key": (UPGRADE + b"\r\n",),
    "an upgrade with a wrong key": (UPGRADE + b"Sec-WebSocket-Key: x\r\n\r\n",),
    "an upgrade of another version": (UPGRADE.replace(b"13", b"99") + KEY + b"\r\n",),
    "an upgrade without the token": (UPGRADE + KEY + b"\r\n", b"\xff" * 100),
    "an upgrade with many headers": (UPGRADE + KEY + b"X: y\r\n" * 500 + b"\r\n",),
    "an upgrade from elsewhere": (UPGRADE + KEY + b"Origin: http://[\r\n\r\n",),
    "an upgrade with wrong extensions": (UPGRADE + KEY + b"Sec-WebSocket-Extensions: ;==\r\n\r\n",),
}  # fmt: skip


@pytest.mark.parametrize("server", ["with a token", "page", "TLS"])
def test_nonsense_of_strangers_leaves_nothing_in_the_log(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = make_certificate(tmp_path, "server") if server == "TLS" else ("", "")
    page = PageGate(Starlette(), TOKEN) if server == "page" else None
    with small_server(tls, page) as port, caplog.at_level(logging.WARNING):
        for parts in NONSENSE.values():
            for reads in (True, False):
                with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                    sock = stack.enter_context(connected(port))
                    if server == "TLS":
                        sock = stack.enter_context(ssl._create_unverified_context().wrap_socket(sock))
                    for part in parts:
                        sock.sendall(part)
                        if part is not parts[-1]:
                            sock.recv(1000)  # the answer to what was right
                    if reads:
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(1 << 16):
                            continue
                assert not caplog.messages, parts
        if server == "TLS":
            with connected(port, b"\x16\x03\x01\x00\xa5\x00\xff" * 40) as sock, contextlib.suppress(OSError):
                while sock.recv(1000):
                    continue
        with httpx.Client(
            base_url=f"http{'s' * bool(tls[0])}://localhost:{port}", verify=False, trust_env=False
        ) as friend:
            assert friend.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == (401 if page else 200)
    assert not caplog.messages


@pytest.mark.processes
def test_1500_half_open_connections_and_1024_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this test needs 2048 descriptors itself, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    program = [sys.executable, "-c", "from pliant.cli.main import main; main()", "config-server", "-port", "0"]
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        process = stack.enter_context(
            subprocess.Popen(
                ["prlimit", "--nofile=1024:1024", *program], stdout=subprocess.PIPE, stderr=log.open("wb"), text=True
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        url = process.stdout.readline().split()[3].rstrip(",")
        process.stdout.readline()  # where the token is
        token = find_token(url)
        port = int(re.findall(r":(\d+)/", url)[0])
        client = stack.enter_context(ConfigClient(url, token))
        client.put(TWO)
        before, seen = client.snapshot(), []
        held = threading.Thread(target=lambda: seen.append(client.wait_for_change(before, 60)), daemon=True)
        held.start()
        for number in range(1500):
            stack.enter_context(connected(port, b"GET /config HTTP/1.1\r\n" if number % 2 else b""))
        begun_s = time.monotonic()
        with ConfigClient(url, token) as newcomer:
            view = newcomer.resize(1)
        held.join(20)
        assert time.monotonic() - begun_s < 5
        assert [each.wanted.view for each in seen] == [view], "who waited for the change was not disturbed"
        until(lambda: b"connections were closed" in log.read_bytes(), "the line about them")
        process.terminate()
        assert process.wait(20) == 0
    assert len(log.read_bytes()) < 2000
    assert b"Traceback" not in log.read_bytes()
