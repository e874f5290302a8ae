"""Who may look, who may act, and what is answered to mistakes."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from certificates import make_certificate
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from pliant.errors import ConfigError
from pliant.ui import server
from pliant.ui.controls import JobActions
from pliant.ui.server import LOOPBACK, DashConfig, PageGate

sys.path.insert(0, str(Path(__file__).parents[1]))

from command import command

TOKEN = "s3cret"


async def _greet(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("the page")), WebSocketRoute("/ws", _greet)])


def client(*, loopback: bool) -> TestClient:
    return TestClient(PageGate(APP, TOKEN, open_to=LOOPBACK if loopback else None), base_url="http://127.0.0.1:9300")


def test_loopback_is_open_under_its_own_names_only() -> None:
    browser = client(loopback=True)
    for name in ("127.0.0.1:9300", "localhost:9300", "[::1]:9300"):
        assert browser.get("/", headers={"Host": name}).text == "the page"
    for name in ("evil.example:9300", "127.0.0.1.evil.example", ""):
        assert browser.get("/", headers={"Host": name}).status_code == 403


def test_elsewhere_the_token_is_asked_for_once() -> None:
    browser = client(loopback=False)
    assert browser.get("/").status_code == 401
    with pytest.raises(WebSocketDisconnect), browser.websocket_connect("ws://127.0.0.1:9300/ws"):
        pass
    wrong = browser.post("/enter", data={"token": "guess"})
    assert wrong.status_code == 401
    assert "not the token" in wrong.text
    assert browser.get("/").status_code == 401
    assert browser.post("/enter", data={"token": TOKEN}).text == "the page"
    cookie = browser.cookies.jar
    assert all(TOKEN not in str(each.value) for each in cookie), "the token itself is not kept in the browser"
    assert browser.get("/").text == "the page"
    with browser.websocket_connect("ws://127.0.0.1:9300/ws") as socket:
        assert socket.receive_text() == "hello"
    assert client(loopback=False).get("/", cookies={"pliant_dash": "0" * 64}).status_code == 401


def test_who_is_asked_for_the_token_is_told_where_it_is() -> None:
    browser = client(loopback=False)
    asked, wrong = browser.get("/").text, browser.post("/enter", data={"token": "guess"}).text
    for form in (asked, wrong):
        assert "PLIANT_TOKEN" in form
        assert '<label for="token">' in form, "for who hears the page"
        assert "http" not in form, "nothing is loaded from elsewhere"


def test_with_a_certificate_all_is_encrypted_and_the_cookie_stays_so(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "page")
    config = DashConfig(token=TOKEN, tls_cert=cert, tls_key=key)
    listener = socket.create_server(("127.0.0.1", 0))
    served = uvicorn.Server(server._settings(config, PageGate(APP, TOKEN, open_to=None)))
    thread = threading.Thread(target=served.run, args=([listener],), daemon=True)
    thread.start()
    try:
        port = listener.getsockname()[1]
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, trust_env=False) as browser:
            entered = browser.post("/enter", data={"token": TOKEN})
            assert "; secure" in entered.headers["set-cookie"].lower()
            assert browser.get("/").text == "the page"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
        assert server._url("https", "::1", port) == f"https://[::1]:{port}/"
    finally:
        served.should_exit = True
        thread.join(timeout=20)
        listener.close()
    with pytest.raises(ConfigError, match="belong together"):
        server._settings(DashConfig(token=TOKEN, tls_cert=cert, tls_key=cert), PageGate(APP, TOKEN, open_to=None))


def test_a_token_is_compared_whole() -> None:
    actions = JobActions(TOKEN)
    assert actions.accepts_token(TOKEN)
    assert not any(actions.accepts_token(guess) for guess in ("", "s3cre", "s3crett", "S3CRET", "s3cre\u0165"))
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
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)
