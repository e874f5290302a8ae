"""The job server: the HTTP API of the scheduler, its OpenAPI page, and `serve`, which runs it from a state directory.

What may wait (a reservation, the disk) runs in threads; requests for logs are held on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pliant.cluster import check_host
from pliant.elastic import http_server
from pliant.elastic.http_server import TokenGate, json_response, listening
from pliant.errors import ConfigError, NameTaken, NotAllowed, PliantError, ServerUnavailable, UnknownJob
from pliant.fed.jobfile import FederatedJob
from pliant.files import hold_lock, is_locked, write_atomic
from pliant.jobs.client import SERVER_FILE
from pliant.jobs.scheduler import Backend, Scheduler
from pliant.jobs.schema import TrainJob, job_from_json
from pliant.jobs.status import (
    ClusterStatus,
    JobDetail,
    JobList,
    JobStatus,
    LogPart,
    ReservedDevices,
    read_log,
)
from pliant.jobs.store import JobStore
from pliant.json_text import parse_json
from pliant.sched.cluster import SchedulingPolicy
from pliant.sched.tenants import Tenant
from pliant.tokens import random_token, token_hash

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
LOOK_S = 0.1
IDLE_S = 60.0
"""An embedded server ends when no job has been waiting or running for this long."""
TAKE_OVER_S = 20.0
"""How long an embedded server may take to end for one that was started by hand."""
_STATUS: Mapping[type[PliantError], int] = {
    UnknownJob: 404, NotAllowed: 403, NameTaken: 409, ConfigError: 422, ServerUnavailable: 503,
}  # fmt: skip


# --- routes ---


class JobsApi:
    """The application; `serve` runs it. Tenants come in with tokens of their own, and `request.user` is their name."""

    def __init__(self, scheduler: Scheduler, token: str, tenants: Sequence[Tenant] = ()) -> None:
        self._scheduler = scheduler
        self._closing = False
        users = {each.token_sha256: each.name for each in tenants if each.token_sha256}
        self.app = TokenGate(self._routes(), token, Counter(), users)

    def close(self) -> None:
        """Answer held requests now: the server is about to stop."""
        self._closing = True

    def _routes(self) -> Starlette:
        routes = [
            Route("/healthz", self._health),
            Route("/openapi.json", self._openapi),
            Route("/jobs", self._list, methods=["GET"]),
            Route("/jobs", self._submit, methods=["POST"]),
            Route("/jobs/{name}", self._show, methods=["GET"]),
            Route("/jobs/{name}", self._stop, methods=["DELETE"]),
            Route("/jobs/{name}/logs", self._logs),
            Route("/jobs/{name}/resume", self._resume, methods=["POST"]),
            Route("/jobs/{name}/forget", self._forget, methods=["POST"]),
            Route("/cluster", self._cluster),
            Route("/reserve", self._reserve, methods=["PUT"]),
        ]
        handlers = {HTTPException: _http_error, PliantError: _refuse, sqlite3.Error: _not_saved}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi())

    async def _list(self, request: Request) -> Response:
        jobs = await run_in_threadpool(self._scheduler.statuses, request.user)
        return _answer(JobList(jobs=jobs))

    async def _submit(self, request: Request) -> Response:
        job = job_from_json(await _body(request))
        return _answer(await run_in_threadpool(self._scheduler.submit, job, request.user), 201)

    async def _show(self, request: Request) -> Response:
        return _answer(await run_in_threadpool(self._scheduler.detail, request.path_params["name"], request.user))

    async def _stop(self, request: Request) -> Response:
        kill = request.query_params.get("kill", "false")
        if kill not in ("true", "false"):
            raise ConfigError(f"kill={kill}: use true or false")
        name = request.path_params["name"]
        return _answer(await run_in_threadpool(self._scheduler.stop, name, request.user, kill=kill == "true"), 202)

    async def _resume(self, request: Request) -> Response:
        return _answer(await run_in_threadpool(self._scheduler.resume, request.path_params["name"], request.user), 202)

    async def _forget(self, request: Request) -> Response:
        return _answer(await run_in_threadpool(self._scheduler.forget, request.path_params["name"], request.user))

    async def _logs(self, request: Request) -> Response:
        name, begin = request.path_params["name"], int(_number(request, "begin"))
        left = int(min(MAX_WAIT_S, _number(request, "wait_s")) / LOOK_S)
        while True:
            # The state is read first: what the job prints last may come between the two.
            status = await run_in_threadpool(self._scheduler.status, name, request.user)
            part = await run_in_threadpool(read_log, status, begin)
            if part.text or part.over or left <= 0 or self._closing or await request.is_disconnected():
                return _answer(part)
            left -= 1
            await asyncio.sleep(LOOK_S)

    async def _cluster(self, request: Request) -> Response:
        return json_response(await run_in_threadpool(self._scheduler.cluster, request.user))

    async def _reserve(self, request: Request) -> Response:
        wanted = await _body(request)
        for kind, count in wanted.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise ConfigError(f"reserve {kind}={count!r}: use a number of devices")
        return json_response(await run_in_threadpool(self._scheduler.reserve, wanted, request.user))


def _answer(value: BaseModel, status: int = 200) -> Response:
    return json_response(value.model_dump(mode="json"), status)


async def _body(request: Request) -> dict[str, Any]:
    try:
        value = parse_json(await http_server.read_body(request))
    except ValueError as error:
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


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
    return json_response({"error": error.detail}, error.status_code, headers=error.headers)


async def _refuse(request: Request, error: Exception) -> Response:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    return json_response({"error": str(error)}, status)


async def _not_saved(request: Request, error: Exception) -> Response:
    log.error("the state could not be saved: %s", error)
    return json_response({"error": f"the state could not be saved yet: {error}"}, 503)


# --- OpenAPI ---

_MODELS = (TrainJob, FederatedJob, JobStatus, JobDetail, JobList, LogPart, ClusterStatus, ReservedDevices)
_PATHS: Mapping[str, Mapping[str, tuple[str, int, str]]] = {
    "/jobs": {"get": ("List all jobs.", 200, "JobList"), "post": ("Submit a job.", 201, "JobStatus")},
    "/jobs/{name}": {
        "get": ("Return a job and its history.", 200, "JobDetail"),
        "delete": ("End a job after its step or round; with kill=true at once.", 202, "JobStatus"),
    },
    "/jobs/{name}/logs": {
        "get": ("Return the output from byte `begin` on; waits up to `wait_s` <= 60 s for some.", 200, "LogPart")
    },
    "/jobs/{name}/resume": {"post": ("Let a stopped or failed job go on from its checkpoint.", 202, "JobStatus")},
    "/jobs/{name}/forget": {"post": ("Delete an ended job from the list; its files stay.", 200, "JobStatus")},
    "/cluster": {"get": ("Return the devices, and which job has which.", 200, "ClusterStatus")},
    "/reserve": {"put": ("Reserve devices, or give them back; answers when they are free.", 200, "ReservedDevices")},
    "/healthz": {"get": ("Return whether the server answers; needs no token.", 200, "")},
    "/openapi.json": {"get": ("Return this description.", 200, "")},
}
"""Summary, status and model of each operation's answer."""
_QUERIES = {
    ("/jobs/{name}", "delete"): {"kill": "boolean"},
    ("/jobs/{name}/logs", "get"): {"begin": "integer", "wait_s": "number"},
}
_BODIES = {
    "/jobs": {"anyOf": [{"$ref": "#/components/schemas/TrainJob"}, {"$ref": "#/components/schemas/FederatedJob"}]},
    "/reserve": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
}


@cache
def openapi() -> dict[str, Any]:
    """Return the description of the API in OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(model, "serialization") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    refused = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    paths = {
        path: {
            method: _operation(path, method, summary, status, model)
            for method, (summary, status, model) in methods.items()
        }
        for path, methods in _PATHS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pliant serve", "version": "2", "description": "Jobs on devices that come and go."},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Refusal": refused},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(path: str, method: str, summary: str, status: int, model: str) -> dict[str, Any]:
    answers = {"401": "The token is missing or wrong."}
    if "{name}" in path or path == "/reserve":
        answers["403"] = "The token is a tenant's, and this is another tenant's job, or for the server's owner."
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": {"type": kind}}
        for name, kind in _QUERIES.get((path, method), {}).items()
    ]
    if "{name}" in path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
        answers["404"] = "There is no such job."
    found: dict[str, Any] = {"summary": summary, "responses": {str(status): _response("Done.", model)}}
    if parameters:
        found["parameters"] = parameters
    if path in _BODIES and method != "get":
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _BODIES[path]}}}
        answers |= {"409": "There is, or was, a job of this name.", "422": "The job or the number of devices is wrong."}
    if path == "/healthz":
        return {**found, "security": []}
    found["responses"] |= {code: _response(text, "Refusal") for code, text in answers.items()}
    return found


def _response(text: str, model: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model}"} if model else {"type": "object"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


# --- the server ---


@dataclass(frozen=True, kw_only=True, slots=True)
class JobServerConfig:
    """State directory, address and token of the job server."""

    state: Path
    """State directory, created if it is missing. A server that was killed is started again with the same one."""
    host: str = "127.0.0.1"
    port: int = 9200
    """0 picks a free port."""
    token: str = ""
    """Token that requests must have; empty: the one in the state directory, made at random the first time."""
    interval_s: float = 5.0
    """Time between allocations while nothing happens."""
    names: tuple[str, ...] = ()
    """Further names by which requests may call the server, such as that of a proxy before it."""
    tls_cert: str = ""
    """PEM file with the certificate chain; empty serves plain HTTP."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    tenants: tuple[Tenant, ...] = ()
    """Who shares the devices, each with a token of its own; none: all jobs are the owner's."""
    embedded: bool = False
    """Whether the server ends by itself when no job is left, and for a server that is started by hand."""

    def __post_init__(self) -> None:
        check_host(self.host)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port}: use a number from 1 to 65535, or 0 for any free port")
        if not 0 < self.interval_s < 1e6:
            raise ConfigError(f"--interval {self.interval_s:g}: use seconds above 0, such as 5")
        if not re.fullmatch(r"[!-~]*", self.token):
            raise ConfigError("the token holds a character that a header cannot: use printable ASCII without spaces")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")


def serve(
    config: JobServerConfig,
    make_backend: Callable[[], Backend],
    policy: SchedulingPolicy,
    say: Callable[[str], None],
) -> None:
    """Schedule and answer until SIGTERM or SIGINT; jobs run on. Call it from the main thread.

    Raises:
        ConfigError: the address or the state directory cannot be used, or another server uses it.
    """
    with (
        _owned(config.state, embedded=config.embedded),
        JobStore(config.state) as store,
        listening(config.host, config.port) as listener,
    ):
        token = config.token or _kept_token(config.state)
        if same := [each.name for each in config.tenants if each.token_sha256 == token_hash(token)]:
            raise ConfigError(f"--tenants: the token of {same[0]} is the server's own: give the tenant another one")
        url = _url("https" if config.tls_cert else "http", config.host, listener.getsockname()[1])
        scheduler = Scheduler(make_backend(), policy, store, interval_s=config.interval_s, tenants=config.tenants)
        api = JobsApi(scheduler, token, config.tenants)
        names = (config.host, *config.names)
        settings = http_server.uvicorn_config(api.app, names=names, tls_cert=config.tls_cert, tls_key=config.tls_key)
        with scheduler.running(), _address_file(config.state, url, token):
            say(f"pliant serve at {url}, state in {config.state}")
            server = http_server.UvicornServer(settings, api.close)
            if config.embedded:
                scheduler.when_idle(IDLE_S, lambda: setattr(server, "should_exit", True))
            http_server.serve_until_signalled(server, listener)
    say("the server has ended; jobs run on, `pliant serve` with the same --state takes them up again")


@contextlib.contextmanager
def _owned(state: Path, *, embedded: bool) -> Iterator[None]:
    """Keep other servers out of the state directory; an embedded one is asked to end."""
    lock, owner = state / "lock", state / "owner"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.touch(0o600)
    except OSError as error:
        raise ConfigError(f"--state {state}: {error.strerror}; give a directory that can be written") from None
    wait_s = 0.0
    pid, _, kind = owner.read_text().partition(" ") if owner.exists() else ("unknown", "", "")
    if kind == "embedded" and not embedded and is_locked(lock):
        wait_s = TAKE_OVER_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    refusal = f"--state {state}: the server with pid {pid} uses it; talk to that one, or give another directory"
    with hold_lock(lock, ConfigError(refusal), wait_s=wait_s):
        write_atomic(owner, f"{os.getpid()}{' embedded' if embedded else ''}", private=True)
        yield


def _kept_token(state: Path) -> str:
    """Return the token of the state directory: the same after a restart, because clients may have been told it."""
    file = state / "token"
    with contextlib.suppress(OSError):
        if token := file.read_text().strip():
            return token
    token = random_token()
    write_atomic(file, token, private=True)
    return token


@contextlib.contextmanager
def _address_file(state: Path, url: str, token: str) -> Iterator[None]:
    file = state / SERVER_FILE
    write_atomic(file, json.dumps({"url": url, "token": token, "pid": os.getpid()}), private=True)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _url(scheme: str, host: str, port: int) -> str:
    bare = check_host(host)
    bare = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)
    return f"{scheme}://{f'[{bare}]' if ':' in bare else bare}:{port}"
