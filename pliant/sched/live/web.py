"""The routes of the live scheduler: HTTP in, requests to the `Scheduler` through, JSON out.

A Starlette application; it opens nothing, `sched.live.server` listens and serves. What may wait (a reservation, the disk)
is done in threads; requests for logs are held on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pliant.elastic.http_server import TokenGate, json_response
from pliant.errors import ConfigError, NameTaken, PliantError, ServerUnavailable, UnknownJob
from pliant.sched.live.jobfile import JobSpec
from pliant.sched.live.openapi import description
from pliant.sched.live.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 20
"""Of a log, in one answer."""
MAX_WAIT_S = 60.0
LOOK_S = 0.1
_STATUS: Mapping[type[PliantError], int] = {UnknownJob: 404, NameTaken: 409, ConfigError: 422, ServerUnavailable: 503}


class LiveWeb:
    """The application."""

    def __init__(self, scheduler: Scheduler, token: str) -> None:
        self._scheduler = scheduler
        self._closing = False
        self.app: ASGIApp = TokenGate(self._routed(), token, Counter())

    def close(self) -> None:
        """Answer what is held now: the server is about to stop."""
        self._closing = True

    def _routed(self) -> Starlette:
        routes = [
            Route("/healthz", self._health),
            Route("/openapi.json", self._openapi),
            Route("/jobs", self._list, methods=["GET"]),
            Route("/jobs", self._submit, methods=["POST"]),
            Route("/jobs/{name}", self._show, methods=["GET"]),
            Route("/jobs/{name}", self._stop, methods=["DELETE"]),
            Route("/jobs/{name}/logs", self._logs),
            Route("/cluster", self._cluster),
            Route("/reserve", self._reserve, methods=["PUT"]),
        ]
        handlers = {HTTPException: _http_error, PliantError: _refusal, sqlite3.Error: _not_saved}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _openapi(self, request: Request) -> Response:
        return json_response(description())

    async def _list(self, request: Request) -> Response:
        return json_response({"jobs": await run_in_threadpool(self._scheduler.statuses)})

    async def _submit(self, request: Request) -> Response:
        spec = JobSpec.from_json(await _body(request))
        return json_response(await run_in_threadpool(self._scheduler.submit, spec), 201)

    async def _show(self, request: Request) -> Response:
        return json_response(await run_in_threadpool(self._scheduler.detail, request.path_params["name"]))

    async def _stop(self, request: Request) -> Response:
        kill = request.query_params.get("kill", "false")
        if kill not in ("true", "false"):
            raise ConfigError(f"kill={kill}: use true or false")
        name = request.path_params["name"]
        return json_response(await run_in_threadpool(self._scheduler.stop, name, kill=kill == "true"), 202)

    async def _logs(self, request: Request) -> Response:
        name, begin = request.path_params["name"], int(_number(request, "begin"))
        left = int(min(MAX_WAIT_S, _number(request, "wait_s")) / LOOK_S)
        while True:
            # Whether it is over is asked first: what it says last may come between the two.
            path, over = await run_in_threadpool(self._scheduler.log_of, name)
            text = await run_in_threadpool(_part, path, begin)
            if text or over or left <= 0 or self._closing or await request.is_disconnected():
                break
            left -= 1
            await asyncio.sleep(LOOK_S)
        end = begin + len(text)
        over = over and len(text) < MAX_TEXT_BYTES
        return json_response({"text": text.decode(errors="backslashreplace"), "end": end, "over": over})

    async def _cluster(self, request: Request) -> Response:
        return json_response(await run_in_threadpool(self._scheduler.cluster))

    async def _reserve(self, request: Request) -> Response:
        wanted = await _body(request)
        for kind, count in wanted.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise ConfigError(f"reserve {kind}={count!r}: use a number of devices")
        return json_response(await run_in_threadpool(self._scheduler.reserve, wanted))


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"the body must be a JSON object, not {value!r:.60}")
    return value


def _number(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:
        raise ConfigError(f"{name}={text}: use a number from 0")
    return number


def _part(path: Path, begin: int) -> bytes:
    """What there is from `begin` on, up to the end of a character."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(MAX_TEXT_BYTES)
    except OSError:
        return b""  # it has not been started yet
    for cut in range(1, min(4, len(data)) + 1):
        if data[-cut] >= 0xC0:  # the first byte of a character of several
            length = 2 if data[-cut] < 0xE0 else 3 if data[-cut] < 0xF0 else 4
            return data[:-cut] if length > cut and len(data) > cut else data
        if data[-cut] < 0x80:
            break
    return data


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
    return json_response({"error": error.detail}, error.status_code, headers=error.headers)


async def _refusal(request: Request, error: Exception) -> Response:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    return json_response({"error": str(error)}, status)


async def _not_saved(request: Request, error: Exception) -> Response:
    log.error("the state could not be saved: %s", error)
    return json_response({"error": f"the state could not be saved yet: {error}"}, 503)
