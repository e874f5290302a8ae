"""The config server: keeps the wanted view and the membership of a job, and tells all who wait of every change.

HTTP requests become requests and notices of `elastic.membership`, whose rules decide; the next state is saved in SQLite
before anybody is told. Routes and JSON are those of KungFu's config server, except that bad input is answered with 4xx
and the reason. `elastic.client` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pliant.cluster import ClusterSnapshot, Membership, View, Wanted, Worker, check_host
from pliant.elastic.http_server import (
    HeldRequests,
    TokenGate,
    UvicornServer,
    decode_json,
    header_version,
    json_response,
    listening,
    query_value,
    read_body,
    refuse_body,
    uvicorn_config,
    wait_seconds,
)
from pliant.elastic.membership import (
    NO_LIMITS,
    REFUSAL_STATUS,
    AddWorker,
    ClearView,
    ElasticState,
    FinishNotice,
    LeaveNotice,
    Limits,
    LossNotice,
    PutView,
    ReadyNotice,
    RemoveWorker,
    ResetView,
    ResizeView,
    SettledNotice,
    ViewRequest,
    WorkerNotice,
)
from pliant.errors import ConfigError, PliantError, ServerUnavailable

log = logging.getLogger(__name__)

DEFAULT_PORT = 9100
DEFAULT_ENDPOINT = "/config"
IN_MEMORY = ":memory:"
MAX_REASON_CHARS = 500
PATHS = (
    "/", "/get", "/put", "/reset", "/clear", "/stop", "/addworker", "/removeworker", "/resize", "/state", "/membership",
    "/ready", "/settled", "/lost", "/leave", "/finish", "/health", "/metrics",
)  # fmt: skip
_START_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 1.0
# The tables keep the names that version 0.1 gave them, so that its state files can still be read.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS wanted (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL, view TEXT)",
    "CREATE TABLE IF NOT EXISTS roll (id INTEGER PRIMARY KEY CHECK (id = 1), roll TEXT NOT NULL, ready TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS settled (id INTEGER PRIMARY KEY CHECK (id = 1), workers TEXT NOT NULL, replicas INTEGER)",
)

Endpoint = Callable[[Request], Awaitable[Response]]


class ResourceProvider(Protocol):
    """Gets the devices of a job, where that takes more than a new view: the driver of a job on Ray.

    A config server that has one does not resize the view itself: it passes the request on and answers with the view as it
    is; the provider puts a view as soon as it has the devices. All methods are called from the server's thread and return
    at once.

    Raises:
        PliantError: refused, with the reason; nothing has changed.
    """

    def resize(self, size: int) -> None:
        """Get devices for `size` workers, at least one."""

    def set_devices(self, devices: Mapping[str, int]) -> None:
        """Get these devices, by type, at least one in all, with a worker on each."""

    def occupied_devices(self) -> dict[str, int]:
        """Return the devices on which processes of the job live, wanted or not."""

    def drop_unwanted(self) -> None:
        """Kill the workers on devices that are not wanted any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, what it keeps, and who may use it."""

    host: str = "127.0.0.1"
    """Address to listen on: a name, IPv4 or IPv6; 0.0.0.0 or :: for all."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0 picks a free one."""
    endpoint: str = DEFAULT_ENDPOINT
    """Path of the view, as in KungFu's -endpoint."""
    state: str = IN_MEMORY
    """SQLite file that survives a restart; `:memory:` keeps nothing."""
    initial: View | None = None
    """The first view, used only where the state has never held one."""
    limits: Limits = NO_LIMITS
    """Slots and ports that a resize keeps to."""
    token: str = ""
    """Clients must send it; empty lets all of them in."""
    tls_cert: str = ""
    """PEM file with the certificate chain; empty serves plain HTTP."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    provider: ResourceProvider | None = None
    """Gets the devices that a resize needs; None: runners start workers as soon as the view says so."""

    def __post_init__(self) -> None:
        check_host(self.host)
        if isinstance(self.port, bool) or not 0 <= self.port < 65536:
            raise ConfigError(f"-port {self.port}: use a number from 1 to 65535, or 0 for any free port")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.endpoint) or self.endpoint in PATHS:
            raise ConfigError(f"-endpoint {self.endpoint!r}: use a path of its own such as {DEFAULT_ENDPOINT}")
        if not re.fullmatch(r"[!-~]*", self.token):
            raise ConfigError("the token holds a character that a header cannot: use printable ASCII without spaces")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")


class ConfigServer:
    """A config server in a thread of this process, for the time of `with server.running():`."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self._port = self.config.port
        self._store = StateStore(self.config.state)
        self._uvicorn: UvicornServer | None = None
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; known once it runs."""
        return self._port

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        scheme = "https" if self.config.tls_cert else "http"
        host = check_host(self.config.host)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{self.config.endpoint}"

    @property
    def wanted(self) -> Wanted:
        """The wanted view that it holds now."""
        return self._store.state.wanted

    @property
    def membership(self) -> Membership:
        """The workers that train now, as far as it knows."""
        return self._store.state.membership

    @contextmanager
    def running(self) -> Iterator[ConfigServer]:
        """Serve until the block ends, or `stop()` or a request to /stop comes; leaves no thread and no socket.

        Raises:
            ConfigError: the address, the state file or the certificate cannot be used.
            ServerUnavailable: it failed to start, or while running; the latter from the end of the block.
        """
        config = self.config
        with self._store, listening(config.host, config.port) as listener:
            self._port = listener.getsockname()[1]
            if config.initial is not None and self.wanted.version == 0:
                self._store.save(self._store.state.after(PutView(config.initial, expected=0), config.limits))
            routes = ConfigRoutes(self._store, config, self.stop)
            settings = uvicorn_config(routes.app, tls_cert=config.tls_cert, tls_key=config.tls_key)
            self._uvicorn = UvicornServer(settings, routes.close)
            self._ended.clear()
            self._failure = None
            thread = threading.Thread(
                target=self._serve, args=(self._uvicorn, listener), name="pliant-config-server", daemon=True
            )
            thread.start()
            try:
                self._uvicorn.listening.wait(_START_TIMEOUT_S)
                self._raise_failure()
                yield self
            finally:
                self.stop()
                thread.join()
        self._raise_failure()

    def stop(self) -> None:
        """Ask it to stop; from any thread or signal handler, returns at once."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has stopped; False if it still runs after `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ServerUnavailable(f"the config server at {self.url} failed: {self._failure!r}") from self._failure

    def _serve(self, server: UvicornServer, listener: socket.socket) -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # the end of a thread: `running` raises it
            self._failure = error
        finally:
            server.listening.set()
            self._ended.set()


# --- what is kept ---


class StateStore:
    """Keeps one `ElasticState` in SQLite; made with a path, opened by `with`. Not for two threads at once.

    While open, the file is locked: a second server with the same file would answer with a state that the first has
    already changed.
    """

    def __init__(self, path: str = IN_MEMORY) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self.state = ElasticState()
        """What is kept now; change it with `save`."""

    def __enter__(self) -> StateStore:
        """Open the file, creating it if there is none, and read what it keeps.

        Raises:
            ConfigError: it cannot be opened, is not ours, or another server has it open.
        """
        try:
            # The thread that serves is not the one that opens; they never use it at the same time.
            self._database = sqlite3.connect(
                self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("BEGIN EXCLUSIVE")
            for statement in _SCHEMA:
                self._database.execute(statement)
            self._database.execute("COMMIT")
            self.state = self._load(self._database)
        except (sqlite3.Error, ValueError, ConfigError) as error:
            self.close()
            raise ConfigError(
                f"state file {self._path}: {error}; give a file of a config server, or a new one, in a directory that "
                "exists, and stop any other server that uses it"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def save(self, state: ElasticState) -> None:
        """Keep `state`; it is on disk when this returns.

        Raises:
            sqlite3.Error: it could not be written; what was kept before still is.
        """
        assert self._database is not None, "save() needs an open store: use `with`"
        wanted = state.wanted
        view = None if wanted.view is None else json.dumps(wanted.view.to_json())
        rows: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("wanted (id, version, view) VALUES (1, ?, ?)", (wanted.version, view)),
            (
                "roll (id, roll, ready) VALUES (1, ?, ?)",
                (json.dumps(state.membership.to_json()), _to_text(state.ready)),
            ),
            ("settled (id, workers, replicas) VALUES (1, ?, ?)", (_to_text(state.settled), state.replicas)),
        )
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in rows:
                self._database.execute(f"INSERT OR REPLACE INTO {statement}", values)
            self._database.execute("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self.state = state

    @staticmethod
    def _load(database: sqlite3.Connection) -> ElasticState:
        row = database.execute("SELECT version, view FROM wanted").fetchone()
        if row is None:
            return ElasticState()
        version, view = row
        wanted = Wanted(version, None if view is None else View.from_json(json.loads(view), version))
        row = database.execute("SELECT roll, ready FROM roll").fetchone()
        if row is None:  # written before there were memberships
            return ElasticState.of(wanted)
        members, ready = row
        settled, replicas = database.execute("SELECT workers, replicas FROM settled").fetchone() or ("[]", 0)
        membership = Membership.from_json(json.loads(members))
        return ElasticState(wanted, membership, _from_text(ready), _from_text(settled), replicas)


def _to_text(workers: Iterable[Worker]) -> str:
    return json.dumps([worker.to_json() for worker in sorted(workers)])


def _from_text(text: str) -> frozenset[Worker]:
    return frozenset(Worker.from_json(worker) for worker in json.loads(text))


# --- the routes ---


class ConfigRoutes:
    """The Starlette application over a `StateStore`, and what it counts. Lives on one event loop.

    Changes need no lock: between reading the state and saving the next one there is no `await`. Saving blocks the loop
    for one fsync, which is rare and shorter than handing it to a thread would be worth.
    """

    def __init__(self, store: StateStore, config: ServerConfig, stop: Callable[[], None]) -> None:
        self._store, self._config, self._stop = store, config, stop
        self._provider = config.provider
        self._answers: Counter[int] = Counter()
        self._held = HeldRequests()
        self._encoded: tuple[ClusterSnapshot | None, bytes] = (None, b"")
        self.app: ASGIApp = TokenGate(self._make_app(), config.token, self._answers)

    def close(self) -> None:
        """Answer every held request now, and hold no more: the server is about to stop."""
        self._held.close()

    def _make_app(self) -> Starlette:
        routes = [
            _route("/", GET=self._index),
            _route("/health", GET=self._health),
            _route("/metrics", GET=self._metrics),
            _route(self._config.endpoint, GET=self._get, PUT=self._put, POST=self._reset, DELETE=self._reset),
            _route("/get", GET=self._get),
            _changing("/put", self._put),
            _route("/reset", GET=self._reset, PUT=self._reset, POST=self._reset),  # KungFu's commands curl it
            _changing("/clear", self._clear),
            _changing("/addworker", self._add_worker),
            _changing("/removeworker", self._remove_worker),
            _changing("/resize", self._resize),
            _route("/state", GET=self._get_state),
            _route("/membership", GET=self._get_membership),
            _changing("/ready", self._ready),
            _changing("/settled", self._settled),
            _changing("/lost", self._lost),
            _changing("/leave", self._leave),
            _changing("/finish", self._finish),
            _route(
                "/stop", GET=self._stop_server, PUT=self._stop_server, POST=self._stop_server, DELETE=self._stop_server
            ),
        ]
        if self._provider is not None:
            routes += [
                _route("/devices", GET=self._get_devices, PUT=self._set_devices, POST=self._set_devices),
                _changing("/drop", self._drop_unwanted),
            ]
        handlers = {
            HTTPException: self._on_http_error,
            PliantError: self._on_refusal,
            sqlite3.Error: self._on_not_saved,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect of /config/ would turn a PUT by a client that does not follow it into silence.
        app.router.redirect_slashes = False
        return app

    # Reading

    async def _index(self, request: Request) -> Response:
        routes = [self._config.endpoint, *PATHS]
        return self._answer({"service": "pliant config server", "Version": self._wanted.version, "routes": routes})

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _get(self, request: Request) -> Response:
        known = header_version(request, "if-none-match")
        await self._hold(request, lambda: known == self._wanted.version)
        if known == self._wanted.version or (known == "*" and self._wanted.view is not None):
            return Response(status_code=304, headers=self._etag())
        if self._wanted.view is None:
            return self._answer({"error": "No Config Found.", "Version": self._wanted.version}, 404)
        return self._answer(self._wanted.view.to_json())

    async def _get_state(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "").strip('"')
        await self._hold(request, lambda: known == self._store.state.snapshot.tag)
        snapshot = self._store.state.snapshot
        headers = {"ETag": f'"{snapshot.tag}"'}
        if known == snapshot.tag:
            return Response(status_code=304, headers=headers)
        if self._encoded[0] != snapshot:  # encoded once: a change is told to all workers in the same instant
            self._encoded = (snapshot, bytes(json_response(snapshot.to_json()).body))
        return Response(self._encoded[1], headers=headers, media_type="application/json")

    async def _hold(self, request: Request, is_unchanged: Callable[[], bool]) -> None:
        """Hold the request while `is_unchanged`, for as long as its `wait` says."""
        deadline_s = asyncio.get_running_loop().time() + wait_seconds(request)
        while is_unchanged():
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0 or not await self._held.wait(request, left_s):
                return

    async def _get_membership(self, request: Request) -> Response:
        return json_response(self._store.state.membership.to_json())

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._metrics_text)  # the first time, it imports a library
        return Response(text, media_type="text/plain; version=0.0.4")

    def _metrics_text(self) -> bytes:
        from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

        registry, state = CollectorRegistry(), self._store.state
        for name, text, value in (
            ("version", "Version of the wanted view.", state.wanted.version),
            ("workers", "Workers in the wanted view.", len(state.wanted.workers)),
            ("membership", "Number of the membership.", state.membership.number),
            ("members", "Workers that train.", len(state.membership.members)),
            ("held_requests", "Requests waiting for a change.", self._held.num_waiting),
        ):
            Gauge(f"pliant_config_{name}", text, registry=registry).set(value)
        answers = Counter("pliant_config_requests", "Requests answered, by status.", ["status"], registry=registry)
        for status, count in sorted(self._answers.items()):
            answers.labels(status).inc(count)
        return generate_latest(registry)

    # Changing the wanted view

    async def _put(self, request: Request) -> Response:
        view = decode_json(await read_body(request), View.from_json)
        return self._change(PutView(view, self._expected(request)))

    async def _reset(self, request: Request) -> Response:
        await refuse_body(request)
        return self._change(ResetView(self._expected(request)))

    async def _clear(self, request: Request) -> Response:
        await refuse_body(request)
        return self._change(ClearView(self._expected(request)))

    async def _add_worker(self, request: Request) -> Response:
        worker = decode_json(await read_body(request), Worker.from_json)
        return self._change(AddWorker(worker, self._expected(request)))

    async def _remove_worker(self, request: Request) -> Response:
        worker = decode_json(await read_body(request), Worker.from_json)
        return self._change(RemoveWorker(worker, self._expected(request)))

    async def _resize(self, request: Request) -> Response:
        given = query_value(request, "size")
        body = await read_body(request)
        if given is None:
            size = decode_json(body, _size_in)
        elif body.strip() or not re.fullmatch(r"[0-9]{1,9}", given):
            raise ConfigError(f'size={given}: give a whole number from 0, once, as ?size=4 or as {{"size": 4}}')
        else:
            size = int(given)
        resize = ResizeView(size, self._expected(request))
        if self._provider is None or size == 0:
            return self._change(resize)
        self._store.state.after(resize, self._config.limits)  # raises what would be refused
        self._provider.resize(size)
        assert self._wanted.view is not None, "else it was refused"
        return self._answer(self._wanted.view.to_json())

    async def _get_devices(self, request: Request) -> Response:
        assert self._provider is not None, "routed only with a provider"
        return json_response({"occupied": self._provider.occupied_devices()})

    async def _set_devices(self, request: Request) -> Response:
        assert self._provider is not None, "routed only with a provider"
        self._provider.set_devices(decode_json(await read_body(request), _devices_in))
        return await self._get_devices(request)

    async def _drop_unwanted(self, request: Request) -> Response:
        assert self._provider is not None, "routed only with a provider"
        await refuse_body(request)
        self._provider.drop_unwanted()
        return await self._get_devices(request)

    async def _stop_server(self, request: Request) -> Response:
        await refuse_body(request)

        async def stop() -> None:
            self._stop()

        return json_response({"stopping": True}, background=BackgroundTask(stop))

    # Notices of workers and runners

    async def _ready(self, request: Request) -> Response:
        return self._note(ReadyNotice(decode_json(await read_body(request), _notice_in).worker))

    async def _settled(self, request: Request) -> Response:
        notice = decode_json(await read_body(request), _notice_in)
        return self._note(SettledNotice(notice.worker, notice.replicas))

    async def _lost(self, request: Request) -> Response:
        notice = decode_json(await read_body(request), _notice_in)
        return self._note(LossNotice(notice.worker, notice.reason, notice.by))

    async def _leave(self, request: Request) -> Response:
        return self._note(LeaveNotice(decode_json(await read_body(request), _notice_in).worker))

    async def _finish(self, request: Request) -> Response:
        if (body := await read_body(request)).strip():
            decode_json(body, _check_finish)
        return self._note(FinishNotice())

    # Answers

    def _note(self, notice: WorkerNotice) -> Response:
        return json_response(self._apply(notice).membership.to_json())

    def _change(self, request: ViewRequest) -> Response:
        after = self._apply(request).wanted
        return self._answer({"Version": after.version} if after.view is None else after.view.to_json())

    def _apply(self, request: ViewRequest | WorkerNotice) -> ElasticState:
        before = self._store.state
        after = before.after(request, self._config.limits)
        if after is before:
            return after
        self._store.save(after)
        log.info("%s", _describe_change(request, before, after))
        if after.snapshot != before.snapshot:
            self._held.wake()
        return after

    def _expected(self, request: Request) -> int | None:
        version = header_version(request, "if-match")
        if not isinstance(version, str):
            return version
        if self._wanted.view is None:
            raise HTTPException(412, "If-Match: * needs a view, and none is set: PUT one without it")
        return None

    @property
    def _wanted(self) -> Wanted:
        return self._store.state.wanted

    def _etag(self) -> dict[str, str]:
        return {"ETag": f'"{self._wanted.version}"'}

    def _answer(self, value: Mapping[str, object], status: int = 200) -> Response:
        return json_response(value, status, headers=self._etag())

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
        return json_response({"error": error.detail}, error.status_code, headers=error.headers)

    async def _on_refusal(self, request: Request, error: Exception) -> Response:
        status = next((code for kind, code in REFUSAL_STATUS.items() if isinstance(error, kind)), 400)
        return self._answer({"error": str(error)[:MAX_REASON_CHARS]}, status)

    async def _on_not_saved(self, request: Request, error: Exception) -> Response:
        log.error("the state could not be saved: %s", error)
        return self._answer({"error": f"the state could not be saved, nothing has changed: {error}"}, 503)


def _route(path: str, **endpoints: Endpoint) -> Route:
    """Return a path with an endpoint per method; any other method is 405."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(endpoints))


def _changing(path: str, endpoint: Endpoint) -> Route:
    return _route(path, PUT=endpoint, POST=endpoint)


def _describe_change(request: ViewRequest | WorkerNotice, before: ElasticState, after: ElasticState) -> str:
    """Return the change in one line, such as `v3, membership 2 of 4 workers: LossNotice 10.0.0.1:10001 (exit code 1)`."""
    wanted, membership = after.wanted, after.membership
    parts = [f"v{wanted.version}"]
    if wanted is not before.wanted:
        parts.append("nothing is wanted" if wanted.view is None else f"{wanted.view.size} workers wanted")
    if membership is not before.membership:
        over = ", over" if membership.over else ""
        parts.append(f"membership {membership.number} of {len(membership.members)} workers{over}")
    worker = getattr(request, "worker", None)
    who = f" {worker}" if worker is not None else ""
    why = f" ({request.reason!r})" if isinstance(request, LossNotice) and request.reason else ""
    return f"{', '.join(parts)}: {type(request).__name__}{who}{why}"


# --- what a request says ---


def _size_in(value: object) -> int:
    """Return the number in `{"size": 4}`."""
    size = value.get("size") if isinstance(value, dict) else None
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f'{value!r:.60} names no size: give {{"size": 4}} or ?size=4')
    return size


def _devices_in(value: object) -> dict[str, int]:
    """Return the devices in `{"t4": 2, "cpu": 1}`."""
    if isinstance(value, dict) and value and all(type(count) is int and count >= 0 for count in value.values()):
        return {str(kind): count for kind, count in value.items()}
    raise ConfigError(f'{value!r:.60} names no devices: give {{"cpu": 2}}')


def _check_finish(value: object) -> None:
    """Refuse a body of /finish that says more than a reason."""
    if not isinstance(value, dict) or not set(value) <= {"Reason"}:
        raise ConfigError(f'{value!r:.60} says more than that the job is done: give no body, or {{"Reason": "..."}}')


@dataclass(frozen=True, slots=True)
class _Notice:
    """The body of a notice about a worker."""

    worker: Worker
    reason: str
    by: Worker | None
    replicas: int


def _notice_in(value: object) -> _Notice:
    """Return the notice in `{"Worker": ..., "Reason": ..., "By": ..., "Replicas": ...}`; all but the worker may be absent."""
    example = '{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Reason": "why, if you like"}'
    if not isinstance(value, dict) or not {"Worker"} <= set(value) <= {"Worker", "Reason", "By", "Replicas"}:
        raise ConfigError(f"{value!r:.60} names no worker: give {example}")
    reason, by, replicas = value.get("Reason", ""), value.get("By"), value.get("Replicas", 0)
    if not isinstance(reason, str):
        raise ConfigError(f'"Reason" {reason!r:.60} is not text: give {example}')
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas < 2**31:
        raise ConfigError(f'"Replicas" {replicas!r:.60} is not a whole number from 0')
    worker = Worker.from_json(value["Worker"])
    return _Notice(worker, reason[:MAX_REASON_CHARS], None if by is None else Worker.from_json(by), replicas)
