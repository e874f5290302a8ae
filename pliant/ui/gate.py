"""The door of the page. On loopback it lets in who asks for loopback; elsewhere, who has shown the token once.

Reading on loopback is free, as it is for every program of this machine's users; a page of another site that has its name
point to loopback is kept out by the name. Elsewhere the token is asked for, and remembered by a cookie that no script reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "pliant_dash"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
MAX_BODY_BYTES = 4096
WRONG_S = 0.5
"""After a wrong token: guessing shall be slow."""
_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>pliant</title><style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;display:grid;
place-items:center;min-height:90vh;margin:0 16px}form{max-width:22rem}input,button{font:inherit;padding:.3rem .6rem;
box-sizing:border-box}input{width:100%;margin:.3rem 0 .7rem}</style>
<form method="post" action="/enter"><h1>pliant</h1><p role="alert">SAID</p><label for="token">Token of this page</label>
<input id="token" name="token" type="password" autocomplete="current-password" autofocus required><button>Enter</button></form></html>"""
_WHERE = "It is PLIANT_TOKEN, or what is in --token-file, or was printed where the page was started."


class Gate:
    """In front of the whole application, its sockets included."""

    def __init__(self, app: ASGIApp, token: str, *, open_to: frozenset[str] | None) -> None:
        self.app = app
        self._token = token
        self._open_to = open_to
        """Host names under which all may read; None: nobody without the token."""
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
        """What to answer instead of the page; None: let it pass."""
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
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
