"""The routes of the config server: HTTP in, `membership` requests through, JSON out.

A Starlette application over a `Store`. It opens nothing; `elastic.server` listens and serves.
KungFu's shapes and meanings, except that bad input is answered with 4xx and the reason.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.cluster import View, Worker
from pliant.elastic import membership
from pliant.elastic.inputs import body_of, check_no_body, decoded, gone, query, size_in, version_in, wait_s
from pliant.elastic.membership import AddWorker, Clear, Limits, Put, RemoveWorker, Reset, Resize, Wanted
from pliant.elastic.store import Store
from pliant.errors import CapacityError, ClusterCleared, ConfigError, NoView, PliantError, StaleView

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
PATHS = (
    "/",
    "/get",
    "/put",
    "/reset",
    "/clear",
    "/stop",
    "/addworker",
    "/removeworker",
    "/resize",
    "/health",
    "/metrics",
)
_STATUS: Mapping[type[PliantError], int] = {StaleView: 412, ClusterCleared: 403, NoView: 404, CapacityError: 409}

Endpoint = Callable[[Request], Awaitable[Response]]


class Web:
    """The application and what it counts. Lives on one event loop.

    Changes need no lock: between reading the state and saving the next one there is no `await`.
    Saving blocks the loop for one fsync, which is rare and shorter than handing it to a thread
    would be worth.
    """

    def __init__(self, store: Store, *, endpoint: str, token: str, limits: Limits, stop: Callable[[], None]) -> None:
        self._store = store
        self._limits = limits
        self._stop = stop
        self._answers: Counter[int] = Counter()
        self._num_held = 0
        self._closing = False
        self._changed = asyncio.Event()
        self._endpoint = endpoint
        self.app: ASGIApp = _Door(self._routed(), token, self._answers)

    def close(self) -> None:
        """Answer every held request now, and hold no more: the server is about to stop."""
        self._closing = True
        self._wake()

    def _routed(self) -> Starlette:
        routes = [
            _route("/", GET=self._index),
            _route("/health", GET=self._health),
            _route("/metrics", GET=self._metrics),
            _route(self._endpoint, GET=self._get, PUT=self._put, POST=self._reset, DELETE=self._reset),
            _route("/get", GET=self._get),
            _route("/put", PUT=self._put, POST=self._put),
            _route("/reset", PUT=self._reset, POST=self._reset),
            _route("/clear", PUT=self._clear, POST=self._clear),
            _route("/addworker", PUT=self._add_worker, POST=self._add_worker),
            _route("/removeworker", PUT=self._remove_worker, POST=self._remove_worker),
            _route("/resize", PUT=self._resize, POST=self._resize),
            _route(
                "/stop", GET=self._stop_server, PUT=self._stop_server, POST=self._stop_server, DELETE=self._stop_server
            ),
        ]
        handlers = {HTTPException: self._http_error, PliantError: self._refusal, sqlite3.Error: self._not_saved}
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect of /config/ would turn a PUT by a client that does not follow it into silence.
        app.router.redirect_slashes = False
        return app

    # What is

    async def _index(self, request: Request) -> Response:
        routes = [self._endpoint, *PATHS]
        return self._answer({"service": "pliant config server", "Version": self._wanted.version, "routes": routes})

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _get(self, request: Request) -> Response:
        known, hold_s = version_in(request, "if-none-match"), wait_s(request)
        if known == self._wanted.version and hold_s > 0:
            await self._hold(request, hold_s)
        if known == self._wanted.version or (known == "*" and self._wanted.view is not None):
            return Response(status_code=304, headers=self._etag())
        if self._wanted.view is None:
            return self._answer({"error": "No Config Found.", "Version": self._wanted.version}, 404)
        return self._answer(self._wanted.view.to_json())

    async def _metrics(self, request: Request) -> Response:
        view = self._wanted.view
        lines = [
            *_metric("pliant_config_version", "gauge", "Version of the wanted view.", {"": self._wanted.version}),
            *_metric("pliant_config_workers", "gauge", "Workers in the wanted view.", {"": view.size if view else 0}),
            *_metric("pliant_config_held_requests", "gauge", "Requests waiting for a change.", {"": self._num_held}),
            *_metric(
                "pliant_config_requests_total",
                "counter",
                "Requests answered, by status.",
                {f'{{status="{status}"}}': count for status, count in sorted(self._answers.items())},
            ),
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # What shall be

    async def _put(self, request: Request) -> Response:
        view = decoded(await body_of(request), View.from_json)
        return self._change(Put(view, self._expected(request)))

    async def _reset(self, request: Request) -> Response:
        await check_no_body(request)
        return self._change(Reset(self._expected(request)))

    async def _clear(self, request: Request) -> Response:
        await check_no_body(request)
        return self._change(Clear(self._expected(request)))

    async def _add_worker(self, request: Request) -> Response:
        worker = decoded(await body_of(request), Worker.from_json)
        return self._change(AddWorker(worker, self._expected(request)))

    async def _remove_worker(self, request: Request) -> Response:
        worker = decoded(await body_of(request), Worker.from_json)
        return self._change(RemoveWorker(worker, self._expected(request)))

    async def _resize(self, request: Request) -> Response:
        size = query(request, "size")
        body = await body_of(request)
        if size is None:
            return self._change(Resize(decoded(body, size_in), self._expected(request)))
        if body.strip() or not re.fullmatch(r"[0-9]{1,9}", size):
            raise ConfigError(f'size={size}: give a whole number from 0, once, as ?size=4 or as {{"size": 4}}')
        return self._change(Resize(int(size), self._expected(request)))

    async def _stop_server(self, request: Request) -> Response:
        await check_no_body(request)

        async def stop() -> None:
            self._stop()

        return _json({"stopping": True}, background=BackgroundTask(stop))

    def _change(self, request: membership.Request) -> Response:
        before = self._wanted
        after = before.after(request, self._limits)
        if after is not before:
            self._store.save(after)
            log.info("v%d: %s", after.version, _told(request, after))
            self._wake()
        return self._answer({"Version": after.version} if after.view is None else after.view.to_json())

    def _expected(self, request: Request) -> int | None:
        version = version_in(request, "if-match")
        if not isinstance(version, str):
            return version
        if self._wanted.view is None:
            raise HTTPException(412, "If-Match: * needs a view, and none is set: PUT one without it")
        return None

    # Waiting

    async def _hold(self, request: Request, hold_s: float) -> None:
        """Until the version changes, `hold_s` is over, the client has gone, or the server stops."""
        if self._closing:
            return
        waits = {asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(gone(request))}
        self._num_held += 1
        try:
            await asyncio.wait(waits, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_held -= 1
            for wait in waits:
                wait.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Answers

    @property
    def _wanted(self) -> Wanted:
        return self._store.wanted

    def _etag(self) -> dict[str, str]:
        return {"ETag": f'"{self._wanted.version}"'}

    def _answer(self, value: Mapping[str, object], status: int = 200) -> Response:
        return _json(value, status, headers=self._etag())

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
        return _json({"error": error.detail}, error.status_code, headers=error.headers)

    async def _refusal(self, request: Request, error: Exception) -> Response:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
        return self._answer({"error": str(error)[:MAX_REASON_CHARS]}, status)

    async def _not_saved(self, request: Request, error: Exception) -> Response:
        log.error("the state could not be saved: %s", error)
        return self._answer({"error": f"the state could not be saved, nothing has changed: {error}"}, 503)


class _Door:
    """Lets in who knows the token (anybody, where there is none; `/health` always), and counts what is answered."""

    def __init__(self, app: ASGIApp, token: str, answers: Counter[int]) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else None
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
            await send(message)

        app: ASGIApp = self._app if self._may_pass(scope) else _UNAUTHORIZED
        await app(scope, receive, counted)

    def _may_pass(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._authorization)


def _json(
    value: Mapping[str, object],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    background: BackgroundTask | None = None,
) -> Response:
    # ASCII on purpose: a reason may quote half of a surrogate pair, which UTF-8 cannot carry.
    body = json.dumps(value, separators=(",", ":")) + "\n"
    return Response(body, status, headers, "application/json", background)


_UNAUTHORIZED = _json(
    {"error": "this server needs its token: send `Authorization: Bearer TOKEN`"}, 401, {"WWW-Authenticate": "Bearer"}
)


def _route(path: str, **endpoints: Endpoint) -> Route:
    """One path with an endpoint per method; any other method is 405."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(endpoints))


def _told(request: membership.Request, after: Wanted) -> str:
    kind = type(request).__name__
    return f"{kind}, nothing is wanted" if after.view is None else f"{kind}, {after.view.size} workers wanted"


def _metric(name: str, kind: str, text: str, values: Mapping[str, int]) -> list[str]:
    samples = [f"{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
