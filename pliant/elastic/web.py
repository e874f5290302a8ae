"""The routes of the config server: HTTP in, requests to the `Membership` through, JSON out.

A Starlette application over a `Store`. It opens nothing; `elastic.server` listens and serves.
KungFu's shapes and meanings, except that bad input is answered with 4xx and the reason.
"""

from __future__ import annotations

import asyncio
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
from starlette.types import ASGIApp

from pliant.cluster import View, Worker
from pliant.elastic import membership
from pliant.elastic.caterer import CateredRoutes, Caterer
from pliant.elastic.client import MAX_REASON_CHARS
from pliant.elastic.door import Door, json_answer, metric_lines
from pliant.elastic.inputs import (
    body_of,
    check_finish,
    check_no_body,
    decoded,
    loss_in,
    notice_in,
    number_in,
    query,
    settled_in,
    size_in,
    version_in,
    wait_s,
)
from pliant.elastic.membership import AddWorker, Clear, Limits, Put, RemoveWorker, Reset, Resize, Wanted
from pliant.elastic.roll import Event, Finished, Left, Lost, Membership, Ready, Roll, Settled
from pliant.elastic.store import Store
from pliant.elastic.waiting import Bell
from pliant.errors import CapacityError, ClusterCleared, ConfigError, NotWanted, NoView, PliantError, StaleView

log = logging.getLogger(__name__)

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
    "/roll",
    "/ready",
    "/settled",
    "/lost",
    "/leave",
    "/finish",
    "/health",
    "/metrics",
)
_STATUS: Mapping[type[PliantError], int] = {
    StaleView: 412,
    ClusterCleared: 403,
    NoView: 404,
    CapacityError: 409,
    NotWanted: 409,
}

Endpoint = Callable[[Request], Awaitable[Response]]


class Web:
    """The application and what it counts. Lives on one event loop.

    Changes need no lock: between reading the state and saving the next one there is no `await`.
    Saving blocks the loop for one fsync, which is rare and shorter than handing it to a thread
    would be worth.
    """

    def __init__(
        self,
        store: Store,
        *,
        endpoint: str,
        token: str,
        limits: Limits,
        stop: Callable[[], None],
        caterer: Caterer | None = None,
    ) -> None:
        self._store = store
        self._caterer = caterer
        self._limits = limits
        self._stop = stop
        self._answers: Counter[int] = Counter()
        self._wanted_bell, self._roll_bell = Bell(), Bell()
        self._told_roll: tuple[Roll | None, bytes] = (None, b"")
        self._endpoint = endpoint
        self.app: ASGIApp = Door(self._routed(), token, self._answers)

    def close(self) -> None:
        """Answer every held request now, and hold no more: the server is about to stop."""
        self._wanted_bell.close()
        self._roll_bell.close()

    def _routed(self) -> Starlette:
        routes = [
            _route("/", GET=self._index),
            _route("/health", GET=self._health),
            _route("/metrics", GET=self._metrics),
            _route(self._endpoint, GET=self._get, PUT=self._put, POST=self._reset, DELETE=self._reset),
            _route("/get", GET=self._get),
            _route("/put", PUT=self._put, POST=self._put),
            _route("/reset", GET=self._reset, PUT=self._reset, POST=self._reset),  # KungFu's commands curl it
            _route("/clear", PUT=self._clear, POST=self._clear),
            _route("/addworker", PUT=self._add_worker, POST=self._add_worker),
            _route("/removeworker", PUT=self._remove_worker, POST=self._remove_worker),
            _route("/resize", PUT=self._resize, POST=self._resize),
            _route("/roll", GET=self._get_roll),
            _route("/ready", PUT=self._ready, POST=self._ready),
            _route("/settled", PUT=self._settled, POST=self._settled),
            _route("/lost", PUT=self._lost, POST=self._lost),
            _route("/leave", PUT=self._leave, POST=self._leave),
            _route("/finish", PUT=self._finish, POST=self._finish),
            _route(
                "/stop", GET=self._stop_server, PUT=self._stop_server, POST=self._stop_server, DELETE=self._stop_server
            ),
        ]
        if self._caterer is not None:
            served = CateredRoutes(self._caterer)
            routes += [
                _route("/devices", GET=served.occupied, PUT=served.equip, POST=served.equip),
                _route("/drop", PUT=served.drop, POST=served.drop),
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
        return json_answer({"status": "ok"})

    async def _get(self, request: Request) -> Response:
        known, hold_s = version_in(request, "if-none-match"), wait_s(request)
        if known == self._wanted.version and hold_s > 0:
            await self._wanted_bell.heard(request, hold_s)
        if known == self._wanted.version or (known == "*" and self._wanted.view is not None):
            return Response(status_code=304, headers=self._etag())
        if self._wanted.view is None:
            return self._answer({"error": "No Config Found.", "Version": self._wanted.version}, 404)
        return self._answer(self._wanted.view.to_json())

    async def _get_roll(self, request: Request) -> Response:
        after, hold_s = number_in(request, "after"), wait_s(request, "timeout_s")
        deadline_s = asyncio.get_running_loop().time() + hold_s
        while after is not None and self._roll.number <= after and not self._roll.over:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0 or not await self._roll_bell.heard(request, left_s):
                break
        return Response(self._roll_body(), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        view, num_held = self._wanted.view, self._wanted_bell.num_waiting + self._roll_bell.num_waiting
        lines = [
            *metric_lines("pliant_config_version", "gauge", "Version of the wanted view.", {"": self._wanted.version}),
            *metric_lines(
                "pliant_config_workers", "gauge", "Workers in the wanted view.", {"": view.size if view else 0}
            ),
            *metric_lines("pliant_config_roll", "gauge", "Number of the roll.", {"": self._roll.number}),
            *metric_lines("pliant_config_members", "gauge", "Workers on the roll.", {"": len(self._roll.members)}),
            *metric_lines("pliant_config_held_requests", "gauge", "Requests waiting for a change.", {"": num_held}),
            *metric_lines(
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
            return self._size(Resize(decoded(body, size_in), self._expected(request)))
        if body.strip() or not re.fullmatch(r"[0-9]{1,9}", size):
            raise ConfigError(f'size={size}: give a whole number from 0, once, as ?size=4 or as {{"size": 4}}')
        return self._size(Resize(int(size), self._expected(request)))

    def _size(self, wish: Resize) -> Response:
        if self._caterer is None or wish.size == 0:
            return self._change(wish)
        self._store.state.after(wish, self._limits)  # for its refusals
        self._caterer.resize(wish.size)
        assert self._wanted.view is not None, "else it was refused"
        return self._answer(self._wanted.view.to_json())

    async def _stop_server(self, request: Request) -> Response:
        await check_no_body(request)

        async def stop() -> None:
            self._stop()

        return json_answer({"stopping": True}, background=BackgroundTask(stop))

    # What has happened

    async def _ready(self, request: Request) -> Response:
        worker, _ = decoded(await body_of(request), notice_in)
        return self._note(Ready(worker))

    async def _settled(self, request: Request) -> Response:
        worker, replicas = decoded(await body_of(request), settled_in)
        return self._note(Settled(worker, replicas))

    async def _lost(self, request: Request) -> Response:
        worker, reason, by = decoded(await body_of(request), loss_in)
        return self._note(Lost(worker, reason[:MAX_REASON_CHARS], by))

    async def _leave(self, request: Request) -> Response:
        worker, _ = decoded(await body_of(request), notice_in)
        return self._note(Left(worker))

    async def _finish(self, request: Request) -> Response:
        if (body := await body_of(request)).strip():
            decoded(body, check_finish)
        return self._note(Finished())

    def _note(self, event: Event) -> Response:
        return json_answer(self._move(event).roll.to_json())

    def _change(self, request: membership.Request) -> Response:
        after = self._move(request).wanted
        return self._answer({"Version": after.version} if after.view is None else after.view.to_json())

    def _move(self, request: membership.Request | Event) -> Membership:
        before = self._store.state
        after = before.after(request, self._limits)
        if after is before:
            return after
        self._store.save(after)
        log.info("%s", _told(request, before, after))
        if after.wanted is not before.wanted:
            self._wanted_bell.ring()
        if after.roll is not before.roll:
            self._roll_bell.ring()
        return after

    def _expected(self, request: Request) -> int | None:
        version = version_in(request, "if-match")
        if not isinstance(version, str):
            return version
        if self._wanted.view is None:
            raise HTTPException(412, "If-Match: * needs a view, and none is set: PUT one without it")
        return None

    # Answers

    def _roll_body(self) -> bytes:
        """The roll as JSON, made once: a change is told to all workers in the same instant."""
        if self._told_roll[0] is not self._roll:
            self._told_roll = (self._roll, bytes(json_answer(self._roll.to_json()).body))
        return self._told_roll[1]

    @property
    def _wanted(self) -> Wanted:
        return self._store.state.wanted

    @property
    def _roll(self) -> Roll:
        return self._store.state.roll

    def _etag(self) -> dict[str, str]:
        return {"ETag": f'"{self._wanted.version}"'}

    def _answer(self, value: Mapping[str, object], status: int = 200) -> Response:
        return json_answer(value, status, headers=self._etag())

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
        return json_answer({"error": error.detail}, error.status_code, headers=error.headers)

    async def _refusal(self, request: Request, error: Exception) -> Response:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
        return self._answer({"error": str(error)[:MAX_REASON_CHARS]}, status)

    async def _not_saved(self, request: Request, error: Exception) -> Response:
        log.error("the state could not be saved: %s", error)
        return self._answer({"error": f"the state could not be saved, nothing has changed: {error}"}, 503)


def _route(path: str, **endpoints: Endpoint) -> Route:
    """One path with an endpoint per method; any other method is 405."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(endpoints))


def _told(request: membership.Request | Event, before: Membership, after: Membership) -> str:
    """The change in one line, such as `v3, roll 2 of 4 members: Lost 10.0.0.1:10001 (exit code 1)`."""
    wanted, roll = after.wanted, after.roll
    parts = [f"v{wanted.version}"]
    if wanted is not before.wanted:
        parts.append("nothing is wanted" if wanted.view is None else f"{wanted.view.size} workers wanted")
    if roll is not before.roll:
        parts.append(f"roll {roll.number} of {len(roll.members)} members" + (", over" if roll.over else ""))
    who = f" {request.worker}" if isinstance(request, Ready | Settled | Lost | Left | AddWorker | RemoveWorker) else ""
    why = f" ({request.reason!r})" if isinstance(request, Lost) and request.reason else ""
    return f"{', '.join(parts)}: {type(request).__name__}{who}{why}"
