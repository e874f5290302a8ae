"""The config server: keeps the wanted view and the membership of a job, and tells all who wait of every change.

HTTP requests become requests and notices of `elastic.membership`, whose rules decide; the next state is saved in SQLite
(`elastic.store`), unless the disk is full, before anybody is told. Routes and JSON are those of KungFu's config server, except that bad input is
answered with 4xx and the reason. `elastic.client` is the other side.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pliant import errors
from pliant.cluster import BY_PROGRAM, ORIGIN_HEADER, ClusterSnapshot, Membership, View, Wanted, Worker, check_host
from pliant.elastic import membership as rules
from pliant.elastic.http_server import (
    HeldRequests,
    TokenGate,
    UvicornServer,
    decode_json,
    header_version,
    json_response,
    listening,
    read_body,
    uvicorn_config,
    wait_seconds,
)
from pliant.elastic.membership import NO_LIMITS, ElasticState, Limits, ViewRequest, WorkerNotice
from pliant.elastic.store import IN_MEMORY, StateStore
from pliant.errors import ConfigError, OtherJob, PliantError, ServerUnavailable

log = logging.getLogger(__name__)

DEFAULT_PORT = 9100
DEFAULT_ENDPOINT = "/config"
JOB_HEADER = "pliant-job"
"""Requests with this header, the id of a state, are refused by a server with another state."""
MAX_REASON_CHARS = 500
MAX_ORIGIN_CHARS = 100
_START_TIMEOUT_S = 30.0
_REFUSAL_STATUS: Mapping[type[Exception], int] = {
    errors.StaleView: 412,
    errors.ClusterCleared: 403,
    errors.NoView: 404,
    errors.CapacityError: 409,
    errors.NotWanted: 409,
    errors.OtherJob: 421,
}

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
    durable: bool = True
    """Whether the file survives a loss of power too, and the server refuses what it cannot write (`StateStore`)."""
    initial: View | None = None
    """The first view, used only where the state has never held one."""
    limits: Limits = NO_LIMITS
    """Slots and ports that a resize keeps to."""
    token: str = ""
    """Clients must send it, also to read."""
    open: bool = False
    """Whether everybody who reaches the port may change the job, without a token: for closed labs. Then a GET of /reset
    resets the view, as KungFu's commands do."""
    names: tuple[str, ...] = ()
    """Further names by which requests may call the server, such as that of a proxy before it."""
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
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.endpoint) or self.endpoint in _TAKEN:
            raise ConfigError(f"-endpoint {self.endpoint!r}: use a path of its own such as {DEFAULT_ENDPOINT}")
        if not re.fullmatch(r"[!-~]*", self.token):
            raise ConfigError("the token holds a character that a header cannot: use printable ASCII without spaces")
        if bool(self.token) == self.open:
            what = "has a token, and is open to all" if self.open else "has no token"
            raise ConfigError(f"the config server {what}: set PLIANT_TOKEN, or use --open in a closed lab")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")


class ConfigServer:
    """A config server in a thread of this process, for the time of `with server.running():`."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._port = self.config.port
        self._store = StateStore(self.config.state, durable=self.config.durable)
        self._routes: ConfigRoutes | None = None
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

    @property
    def state(self) -> ElasticState:
        """All that it keeps."""
        return self._store.state

    @property
    def asked_s(self) -> float:
        """When somebody last asked for the state, by `time.monotonic`: now, while somebody waits for its next change."""
        return self._routes.asked_s if self._routes is not None else 0.0

    @contextmanager
    def running(self, listener: socket.socket | None = None) -> Iterator[ConfigServer]:
        """Serve until the block ends, or `stop()` or a request to /stop comes; leaves no thread and no socket.

        A `listener` is used instead of the address and port of the config.

        Raises:
            ConfigError: the address, the state file or the certificate cannot be used.
            ServerUnavailable: it failed to start, or while running; the latter from the end of the block.
        """
        config = self.config
        bound = listening(config.host, config.port) if listener is None else nullcontext(listener)
        with self._store, bound as listener:
            self._port = listener.getsockname()[1]
            if config.initial is not None and self.wanted.version == 0:
                begun = self.state.after(rules.PutView(config.initial, expected=0), config.limits)
                self._store.save(replace(begun, first=begun.wanted.version))
            self._routes = routes = ConfigRoutes(self._store, config, self.stop)
            names = (config.host, *config.names)
            settings = uvicorn_config(routes.app, names=names, tls_cert=config.tls_cert, tls_key=config.tls_key)
            self._uvicorn = UvicornServer(settings, routes.close)
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


# --- what requests say ---


@dataclass(frozen=True, slots=True)
class _Notice:
    """The body of a notice about a worker."""

    worker: Worker
    reason: str
    by: Worker | None
    replicas: int
    membership: int


_CHANGES: Mapping[str, Callable[[bytes, int | None], ViewRequest]] = {
    "/put": lambda body, expected: rules.PutView(decode_json(body, View.from_json), expected),
    "/addworker": lambda body, expected: rules.AddWorker(decode_json(body, Worker.from_json), expected),
    "/removeworker": lambda body, expected: rules.RemoveWorker(decode_json(body, Worker.from_json), expected),
    "/resize": lambda body, expected: rules.ResizeView(decode_json(body, _size_in), expected),
    "/clear": lambda body, expected: rules.ClearView(_without_body(body, expected)),
    "/reset": lambda body, expected: rules.ResetView(_without_body(body, expected)),
}
"""Requests that change the wanted view, by path: made from the body and the version in `If-Match`."""
_NOTICES: Mapping[str, Callable[[_Notice], WorkerNotice]] = {
    "/ready": lambda notice: rules.ReadyNotice(notice.worker),
    "/settled": lambda notice: rules.SettledNotice(notice.worker, notice.replicas, notice.membership),
    "/lost": lambda notice: rules.LossNotice(notice.worker, notice.reason, notice.by),
    "/leave": lambda notice: rules.LeaveNotice(notice.worker),
}
"""Notices about workers, by path."""
_OTHERS = ("/get", "/state", "/restore", "/membership", "/finish", "/devices", "/drop", "/stop", "/health", "/metrics")
_TAKEN = {*_CHANGES, *_NOTICES, *_OTHERS}


def _without_body(body: bytes, expected: int | None = None) -> int | None:
    """Return `expected`; refuse a body, because whoever POSTs a view means PUT, and KungFu would forget the running one."""
    if body.strip():
        raise ConfigError("this request takes no body; to set a view, PUT it")
    return expected


def _size_in(value: object) -> int:
    """Return the number in `{"size": 4}`."""
    size = value.get("size") if isinstance(value, dict) else None
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f'{value!r:.60} names no size: give {{"size": 4}}')
    return size


def _devices_in(value: object) -> dict[str, int]:
    """Return the devices in `{"t4": 2, "cpu": 1}`."""
    if isinstance(value, dict) and value and all(type(count) is int and count >= 0 for count in value.values()):
        return {str(kind): count for kind, count in value.items()}
    raise ConfigError(f'{value!r:.60} names no devices: give {{"cpu": 2}}')


def _notice_in(value: object) -> _Notice:
    """Return the notice in `{"Worker": ..., "Reason": ..., "By": ..., "Replicas": ..., "Membership": ...}`; all but the
    worker may be absent."""
    example = '{"Worker": {"Host": "10.0.0.1", "Port": 10000}, "Reason": "why, if you like"}'
    known = {"Worker", "Reason", "By", "Replicas", "Membership"}
    if not isinstance(value, dict) or not {"Worker"} <= set(value) <= known:
        raise ConfigError(f"{value!r:.60} names no worker: give {example}")
    reason, by = value.get("Reason", ""), value.get("By")
    if not isinstance(reason, str):
        raise ConfigError(f'"Reason" {reason!r:.60} is not text: give {example}')
    worker = Worker.from_json(value["Worker"])
    return _Notice(
        worker,
        reason[:MAX_REASON_CHARS],
        None if by is None else Worker.from_json(by),
        _count_in(value, "Replicas"),
        _count_in(value, "Membership"),
    )


def _count_in(value: Mapping[str, object], key: str) -> int:
    """Return the number under this key; 0 if there is none."""
    count = value.get(key, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
        raise ConfigError(f'"{key}" {count!r:.60} is not a whole number from 0')
    return count


# --- the routes ---


class ConfigRoutes:
    """The Starlette application over a `StateStore`, and what it counts. Lives on one event loop.

    Changes need no lock: between reading the state and saving the next one there is no `await`. Saving blocks the loop
    for one fsync, which is rare and shorter than handing it to a thread would be worth.
    """

    def __init__(self, store: StateStore, config: ServerConfig, stop: Callable[[], None]) -> None:
        self._store, self._config, self._stop = store, config, stop
        self._answers: Counter[int] = Counter()
        self._held = HeldRequests()
        self._encoded: tuple[ClusterSnapshot | None, bytes] = (None, b"")
        self._asked_s = time.monotonic()
        self.app = TokenGate(self._make_app(), config.token, self._answers)

    @property
    def asked_s(self) -> float:
        """When somebody last asked for the state, by `time.monotonic`: now, while somebody waits for its next change."""
        return time.monotonic() if self._held.num_waiting else self._asked_s

    def close(self) -> None:
        """Answer every held request now, and hold no more: the server is about to stop."""
        self._held.close()

    def _make_app(self) -> Starlette:
        view = self._config.endpoint
        change = {path: self._change_endpoint(make) for path, make in _CHANGES.items()}
        notice = {path: self._notice_endpoint(make) for path, make in _NOTICES.items()}
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/state", self._get_state),
            Route("/restore", self._restore, methods=["POST"]),
            Route("/membership", self._get_membership),
            Route("/get", self._get),
            Route(view, self._get),
            Route(view, change["/put"], methods=["PUT"]),
            Route(view, change["/reset"], methods=["POST", "DELETE"]),
            *([Route("/reset", change["/reset"])] if self._config.open else []),
            *(Route(path, endpoint, methods=["PUT", "POST"]) for path, endpoint in {**change, **notice}.items()),
            Route("/finish", self._finish, methods=["PUT", "POST"]),
            Route("/stop", self._stop_server, methods=["PUT", "POST", "DELETE"]),
        ]
        if self._config.provider is not None:
            routes += [
                Route("/devices", self._devices_endpoint(self._config.provider), methods=["GET", "PUT", "POST"]),
                Route("/drop", self._drop_endpoint(self._config.provider), methods=["PUT", "POST"]),
            ]
        handlers = {
            HTTPException: self._on_http_error,
            PliantError: self._on_refusal,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect of /config/ would turn a PUT by a client that does not follow it into silence.
        app.router.redirect_slashes = False
        return app

    # Reading

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _get(self, request: Request) -> Response:
        known = header_version(request, "if-none-match")
        await self._hold(request, lambda: known == self._wanted.version)
        if known == self._wanted.version:
            return Response(status_code=304, headers=self._etag())
        if self._wanted.view is None:
            return self._answer({"error": "No Config Found.", "Version": self._wanted.version}, 404)
        return self._answer(self._wanted.view.to_json())

    async def _get_state(self, request: Request) -> Response:
        self._store.retry()  # all workers and runners ask once in a while
        known = request.headers.get("if-none-match", "").strip('"')
        self._asked_s = time.monotonic()
        await self._hold(request, lambda: known == self._store.state.snapshot.tag)
        snapshot = self._store.state.snapshot
        headers = {"ETag": f'"{snapshot.tag}"'}
        if known == snapshot.tag:
            return Response(status_code=304, headers=headers)
        if self._encoded[0] != snapshot:  # encoded once: a change is told to all workers in the same instant
            self._encoded = (snapshot, bytes(json_response(snapshot.to_json()).body))
        return Response(self._encoded[1], headers=headers, media_type="application/json")

    async def _get_membership(self, request: Request) -> Response:
        return json_response(self._store.state.membership.to_json())

    async def _hold(self, request: Request, is_unchanged: Callable[[], bool]) -> None:
        """Hold the request while `is_unchanged`, for as long as its `wait` says."""
        deadline_s = asyncio.get_running_loop().time() + wait_seconds(request)
        while is_unchanged():
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0 or not await self._held.wait(request, left_s):
                return

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

    # Changing

    def _change_endpoint(self, make: Callable[[bytes, int | None], ViewRequest]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            change = make(await read_body(request), header_version(request, "if-match"))
            self._check_job(request)
            provider = self._config.provider
            if provider is not None and isinstance(change, rules.ResizeView) and change.size > 0:
                self._store.state.after(change, self._config.limits)  # raises what would be refused
                provider.resize(change.size)
                after = self._wanted
            else:
                after = self._apply(change, request).wanted
            return self._answer({"Version": after.version} if after.view is None else after.view.to_json())

        return endpoint

    def _notice_endpoint(self, make: Callable[[_Notice], WorkerNotice]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            notice = make(decode_json(await read_body(request), _notice_in))
            self._check_job(request)
            return json_response(self._apply(notice, request).membership.to_json())

        return endpoint

    async def _restore(self, request: Request) -> Response:
        known = decode_json(await read_body(request), ClusterSnapshot.from_json)
        return json_response(self._apply(rules.RestoreNotice(known), request).snapshot.to_json())

    def _check_job(self, request: Request) -> None:
        """Refuse a request that is meant for another job, or that comes before this server was told of the job."""
        meant = request.headers.get(JOB_HEADER, "")
        if meant and meant != self._store.state.id:
            raise OtherJob("this config server does not keep the job that the request is for")

    async def _finish(self, request: Request) -> Response:
        self._check_job(request)
        body = await read_body(request)
        finished = rules.FinishNotice(decode_json(body, _notice_in).worker if body.strip() else None)
        return json_response(self._apply(finished, request).membership.to_json())

    @staticmethod
    def _devices_endpoint(provider: ResourceProvider) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            if request.method not in ("GET", "HEAD"):
                provider.set_devices(decode_json(await read_body(request), _devices_in))
            return json_response({"occupied": provider.occupied_devices()})

        return endpoint

    @staticmethod
    def _drop_endpoint(provider: ResourceProvider) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            _without_body(await read_body(request))
            provider.drop_unwanted()
            return json_response({"occupied": provider.occupied_devices()})

        return endpoint

    async def _stop_server(self, request: Request) -> Response:
        _without_body(await read_body(request))
        self._stop()  # uvicorn answers open requests first
        return json_response({"stopping": True})

    def _apply(self, change: ViewRequest | WorkerNotice, request: Request) -> ElasticState:
        before = self._store.state
        after = before.after(change, self._config.limits, by=_origin_of(request))
        if after is before:
            return after
        self._store.save(after)
        log.info("%s", _describe_change(change, before, after))
        if after.snapshot != before.snapshot:
            self._held.wake()
        return after

    # Answers

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
        status = _REFUSAL_STATUS.get(type(error), 400)
        return self._answer({"error": str(error)[:MAX_REASON_CHARS], "kind": type(error).__name__}, status)


def _origin_of(request: Request) -> str:
    """Return who asks, such as `pliant stop (POST /resize from 127.0.0.1)`."""
    where = f"{request.method} {request.url.path} from {request.client.host if request.client else 'nowhere'}"
    name = "".join(char for char in request.headers.get(ORIGIN_HEADER, "")[:MAX_ORIGIN_CHARS] if " " <= char <= "~")
    return name if name == BY_PROGRAM else f"{name} ({where})" if name else where


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
    why = f" ({request.reason!r})" if isinstance(request, rules.LossNotice) and request.reason else ""
    return f"{', '.join(parts)}: {type(request).__name__}{who}{why}"
