"""Server of the page: runs until it is signalled, and lets in only those who may look.

On loopback, reading is free for requests that name loopback as their host; a page of another site whose name points to
loopback is kept out by that name. On other addresses the token is asked for, and kept in a cookie that scripts cannot
read. NiceGUI is imported only when the server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import uvicorn
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pliant.elastic.http_server import listening, load_certificate, serve_until_signalled
from pliant.errors import ConfigError
from pliant.ui.jobs import Watcher

# --- access ---


COOKIE = "pliant_dash"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
MAX_BODY_BYTES = 4096
WRONG_S = 0.5
"""Pause after a wrong token, to make guessing slow."""
_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>pliant</title><style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;display:grid;
place-items:center;min-height:90vh;margin:0 16px}form{max-width:22rem}input,button{font:inherit;padding:.3rem .6rem;
box-sizing:border-box}input{width:100%;margin:.3rem 0 .7rem}</style>
<form method="post" action="/enter"><h1>pliant</h1><p role="alert">SAID</p><label for="token">Token of this page</label>
<input id="token" name="token" type="password" autocomplete="current-password" autofocus required><button>Enter</button></form></html>"""
_WHERE = "It is PLIANT_TOKEN, or what is in --token-file, or was printed where the page was started."


class PageGate:
    """Middleware that checks every request and websocket."""

    def __init__(self, app: ASGIApp, token: str, *, open_to: frozenset[str] | None) -> None:
        self.app = app
        self._token = token
        self._open_to = open_to
        """Host names under which reading needs no token; None if it always does."""
        self._mark = hmac.new(token.encode(), b"pliant dash", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = await self._refusal(scope, receive)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the token is needed"})
        else:
            await refusal(scope, receive, send)

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        """Return the response to a request that is refused; None to let it pass."""
        connection = HTTPConnection(scope)
        if self._open_to is not None:
            host = connection.headers.get("host", "")
            if _name(host) in self._open_to:
                return None
            return PlainTextResponse(
                f"this page is not at {host!r:.80}: open it by the address it was started with\n", 403
            )
        if hmac.compare_digest(connection.cookies.get(COOKIE, "").encode(), self._mark.encode()):
            return None
        if scope["type"] == "http" and scope["path"] == "/enter" and scope["method"] == "POST":
            return await self._enter(Request(scope, receive))
        return HTMLResponse(_FORM.replace("SAID", f"This page needs its token. {_WHERE}"), 401)

    async def _enter(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("too long\n", 413)
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            await asyncio.sleep(WRONG_S)
            return HTMLResponse(_FORM.replace("SAID", f"That is not the token. {_WHERE}"), 401)
        answer = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, self._mark, httponly=True, samesite="strict", max_age=30 * 86400, secure=secure)
        return answer


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


# --- server ---


MISSING = "the page needs NiceGUI: pip install 'pliant[dash]'; `pliant top` shows the same in a terminal"


@dataclass(frozen=True, kw_only=True, slots=True)
class DashConfig:
    """Address and token of the page."""

    host: str = "127.0.0.1"
    port: int = 9300
    """Port; 0 picks a free one."""
    token: str = field(repr=False)
    """Token for resizing and stopping jobs; beyond loopback, also for looking."""
    tls_cert: str = ""
    """Certificate chain as PEM; empty for plain HTTP."""
    tls_key: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port}: use a number from 1 to 65535, or 0 for any free port")
        if not self.token:
            raise ConfigError("the token is empty: set PLIANT_TOKEN to something, or leave it out")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve(config: DashConfig, watcher: Watcher, say: Callable[[str], None]) -> None:
    """Serve the jobs of `watcher` until SIGTERM or SIGINT. Call it from the main thread.

    Raises:
        ConfigError: the address cannot be used, or NiceGUI is not installed.
    """
    # NiceGUI makes a folder for data of users when it is imported; none is stored.
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pliant-dash-"))
        os.environ.setdefault("NICEGUI_STORAGE_PATH", folder)
        listener = stack.enter_context(listening(config.host, config.port))
        server = uvicorn.Server(_settings(config, application(config, watcher)))
        stack.enter_context(watcher.running())
        say(_url("https" if config.tls_cert else "http", config.host, listener.getsockname()[1]))
        serve_until_signalled(server, listener)


def _settings(config: DashConfig, app: PageGate) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        loop="asyncio",
        timeout_graceful_shutdown=1,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )
    return load_certificate(settings)


def application(config: DashConfig, watcher: Watcher) -> PageGate:
    """Return the page behind its gate. A process can have one."""
    try:
        from fastapi import FastAPI
        from nicegui import ui
    except ImportError:
        raise ConfigError(MISSING) from None
    from pliant.ui.controls import JobActions
    from pliant.ui.page import register_pages
    from pliant.ui.widgets import ICON

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    register_pages(watcher, JobActions(config.token))
    ui.run_with(
        app,
        title="pliant",
        favicon=ICON,
        dark=None,
        language="en-US",
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=10,
    )
    open_to = LOOPBACK | {config.host} if config.is_loopback else None
    return PageGate(app, config.token, open_to=open_to)


def _url(scheme: str, host: str, port: int) -> str:
    bare = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"{scheme}://{f'[{bare}]' if ':' in bare else bare}:{port}/"
