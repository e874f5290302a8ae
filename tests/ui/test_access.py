"""Who may look, who may act, and what is answered to mistakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import httpx
import pytest
from certificates import make_certificate
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from pliant.elastic.http_server import Gate, HostGate, TokenGate, serving, uvicorn_config
from pliant.errors import ConfigError, PliantError
from pliant.ui import server
from pliant.ui.server import DashConfig, PageGate

sys.path.insert(0, str(Path(__file__).parents[1]))

from command import command

TOKEN = "s3cret"


async def _greet(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("the page")), WebSocketRoute("/ws", _greet)])


def client(address: str = "http://127.0.0.1:9300") -> TestClient:
    return TestClient(HostGate(PageGate(APP, TOKEN), ["node7"]), base_url=address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9300", "http://node7:9300"])
def test_the_token_is_asked_for_once_on_loopback_too(address: str) -> None:
    browser = client(address)
    websocket = f"{address.replace('http', 'ws')}/ws"
    assert browser.get("/").status_code == 401
    with pytest.raises(WebSocketDisconnect), browser.websocket_connect(websocket):
        pass
    wrong = browser.post("/enter", data={"token": "guess"})
    assert wrong.status_code == 401
    assert "not the token" in wrong.text
    assert browser.get("/").status_code == 401
    assert browser.post("/enter", data={"token": TOKEN}).text == "the page"
    cookie = browser.cookies.jar
    assert all(TOKEN not in str(each.value) for each in cookie), "the token itself is not kept in the browser"
    assert browser.get("/").text == "the page"
    with browser.websocket_connect(websocket) as socket:
        assert socket.receive_text() == "hello"
    assert client().get("/", cookies={"pliant_dash_9300": "0" * 64}).status_code == 401


def test_the_printed_address_enters_and_the_browser_keeps_another() -> None:
    browser = client()
    assert browser.get("/?token=guess").status_code == 401
    entered = browser.get(f"/job/x?token={TOKEN}", follow_redirects=False)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/").text == "the page"


@pytest.mark.parametrize(
    "headers",
    [
        *({"Host": host} for host in ("evil.example", "127.0.0.1.evil.example:9300", "", "10.1.2.3", "0.0.0.0:9300")),
        *({"Origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:8000", "http://localhost:9300")),
    ],
    ids=str,
)  # fmt: skip
def test_a_page_of_another_site_is_refused_with_the_cookie_too(headers: dict[str, str]) -> None:
    browser = client()
    browser.get(f"/?token={TOKEN}")
    for answer in (browser.get("/", headers=headers), browser.post("/enter", data={"token": TOKEN}, headers=headers)):
        assert answer.status_code == 403, answer.text
    with pytest.raises(WebSocketDisconnect), browser.websocket_connect("ws://127.0.0.1:9300/ws", headers=headers):
        pass


PATHS = st.one_of(
    st.sampled_from(
        ["/", "/health", "/healthz", "/health/", "/HEALTH", "//health", "/health/../state", "/enter", "/ws"]
    ),
    st.text(max_size=30).map("/{}".format),
)


@pytest.mark.parametrize("kind", [TokenGate, PageGate])
@settings(max_examples=60, deadline=None)
@given(path=PATHS, method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "x"]),
       is_websocket=st.booleans(), guess=st.binary(max_size=20))  # fmt: skip
def test_no_path_and_no_method_is_let_in_without_the_token(
    kind: type[Gate], path: str, method: str, is_websocket: bool, guess: bytes
) -> None:
    reached: list[str] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])
        await PlainTextResponse("ok")(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"token=guess", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    gate = PageGate(app, TOKEN) if kind is PageGate else TokenGate(app, TOKEN, Counter())
    headers = [(b"host", b"x"), (b"authorization", b"Bearer " + guess), (b"cookie", b"pliant_dash_1=" + guess)]
    scope = {"type": "websocket" if is_websocket else "http", "path": path, "raw_path": path.encode(errors="replace"), "headers": headers,
             "query_string": b"", "server": ("127.0.0.1", 1), "scheme": "http", "root_path": ""} | ({} if is_websocket else {"method": method})  # fmt: skip
    with mock.patch.object(server, "WRONG_S", 0.0):
        asyncio.run(gate(scope, receive, send))
    if kind is TokenGate and path in ("/health", "/healthz"):
        assert reached == [path], "they say nothing but that the server answers"
    else:
        assert not reached
        assert sent[0].get("status", 401) == 401
        assert sent[0]["type"] in ("http.response.start", "websocket.http.response.start", "websocket.close")


def test_its_own_page_may_send_requests_by_each_of_its_names() -> None:
    for host in ("127.0.0.1:9300", "localhost:9300", "[::1]:9300", "NODE7:9300", socket.gethostname()):
        browser = client()
        answer = browser.post("/enter", data={"token": TOKEN}, headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code == 200, host


def test_who_is_asked_for_the_token_is_told_where_it_is() -> None:
    browser = client()
    asked, wrong = browser.get("/").text, browser.post("/enter", data={"token": "guess"}).text
    for form in (asked, wrong):
        assert "PLIANT_TOKEN" in form
        assert '<label for="token">' in form, "for who hears the page"
        assert "http" not in form, "nothing is loaded from elsewhere"


def test_with_a_certificate_all_is_encrypted_and_the_cookie_stays_so(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "page")
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn_config(PageGate(APP, TOKEN), tls_cert=cert, tls_key=key, is_page=True)
    with listener, serving(settings, listener, "page"):
        port = listener.getsockname()[1]
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, trust_env=False) as browser:
            entered = browser.post("/enter", data={"token": TOKEN})
            assert "; secure" in entered.headers["set-cookie"].lower()
            assert browser.get("/").text == "the page"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
        assert server._url("https", "::1", port) == f"https://[::1]:{port}/"
    with pytest.raises(ConfigError, match="belong together"):
        uvicorn_config(PageGate(APP, TOKEN), tls_cert=cert, tls_key=cert)


@pytest.mark.parametrize("guess", ["", "s3cre", "s3crett", "S3CRET", "s3cre\u0165"])
def test_a_token_is_compared_whole(guess: str) -> None:
    assert client().post("/enter", data={"token": guess}).status_code == 401


def test_a_page_has_a_token() -> None:
    with pytest.raises(ConfigError, match="empty"):
        DashConfig(token="")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no/such/record.jsonl"], "no such file"),
        (["http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--port", "x"], "--port 'x' is not a whole number"),
        (["--port", "70000"], "--port 70000"),
        (["--token-file", "no/such/file"], "cannot be read"),
        (["--tls-cert", "cert.pem"], "give --tls-cert and --tls-key"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_is_said_in_one_line(words: list[str], told: str) -> None:
    result = command("dash", *words)
    assert isinstance(result.exception, PliantError)
    assert told in str(result.exception)
