"""Server of the page: runs until it is signalled, and lets in only browsers that have shown its token.

NiceGUI is imported only when the server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pliant.elastic.connections import trust_connection
from pliant.elastic.http_server import Gate, UvicornServer, listening, serve_until_signalled, uvicorn_config
from pliant.errors import ConfigError
from pliant.ui.jobs import Watcher

# --- access ---


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


class PageGate(Gate):
    """Lets in requests and websockets of browsers that have shown the token once.

    They show it as `?token=` in the address that is printed at the start, or in a form, and get a cookie.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token
        self._mark = hmac.new(token.encode(), b"pliant dash", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else await self._refusal(scope, receive)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the token is needed"})
        else:
            await refusal(scope, receive, send)

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        """Return the response to a request that is not let through; None to let it pass."""
        connection = HTTPConnection(scope)
        if scope["type"] == "http" and scope["method"] == "GET" and "token" in connection.query_params:
            return await self._enter(Request(scope), connection.query_params["token"])
        if hmac.compare_digest(connection.cookies.get(_cookie(scope), "").encode(), self._mark.encode()):
            trust_connection(scope)
            return None
        if scope["type"] == "http" and scope["path"] == "/enter" and scope["method"] == "POST":
            return await self._enter_by_form(Request(scope, receive))
        return HTMLResponse(_FORM.replace("SAID", f"This page needs its token. {_WHERE}"), 401)

    async def _enter_by_form(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("too long\n", 413)
        return await self._enter(request, parse_qs(body.decode(errors="replace")).get("token", [""])[0])

    async def _enter(self, request: Request, given: str) -> Response:
        if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            await asyncio.sleep(WRONG_S)
            return HTMLResponse(_FORM.replace("SAID", f"That is not the token. {_WHERE}"), 401)
        answer = RedirectResponse("/", 303)  # an address without the token, which may be kept and shown to others
        answer.set_cookie(
            _cookie(request.scope),
            self._mark,
            httponly=True,
            samesite="strict",
            max_age=30 * 86400,
            secure=request.url.scheme == "https",
        )
        answer.headers["Referrer-Policy"] = "no-referrer"
        return answer


def _cookie(scope: Scope) -> str:
    """Return the name of the cookie: browsers send those of all ports of a machine, which may have several pages."""
    return f"pliant_dash_{scope['server'][1]}"


# --- server ---


MISSING = "the page needs NiceGUI: pip install 'pliant[dash]'; `pliant top` shows the same in a terminal"


@dataclass(frozen=True, kw_only=True, slots=True)
class DashConfig:
    """Address and token of the page."""

    host: str = "127.0.0.1"
    port: int = 9300
    """Port; 0 picks a free one."""
    token: str = field(repr=False)
    """Token for looking at jobs, resizing and stopping them."""
    names: tuple[str, ...] = ()
    """Further names by which requests may call the page, such as that of a proxy before it."""
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
        gate = PageGate(application(watcher), config.token)
        names = (config.host, *config.names)
        server = UvicornServer(
            uvicorn_config(gate, names=names, tls_cert=config.tls_cert, tls_key=config.tls_key, is_page=True)
        )
        stack.enter_context(watcher.running())
        say(_url("https" if config.tls_cert else "http", config.host, listener.getsockname()[1]))
        serve_until_signalled(server, listener)


def application(watcher: Watcher) -> ASGIApp:
    """Return the page. A process can have one."""
    try:
        from fastapi import FastAPI
        from nicegui import ui
    except ImportError:
        raise ConfigError(MISSING) from None
    from pliant.ui.controls import JobActions
    from pliant.ui.page import register_pages
    from pliant.ui.widgets import ICON

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    register_pages(watcher, JobActions())
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
    return app


def _url(scheme: str, host: str, port: int) -> str:
    bare = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"{scheme}://{f'[{bare}]' if ':' in bare else bare}:{port}/"
