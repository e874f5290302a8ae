"""The parts that all HTTP servers of pliant share: who is let in, bodies, answers, listening, and how uvicorn is run."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.cluster import check_host
from pliant.elastic.connections import (
    BODY_TIMEOUT_S,
    Acceptor,
    LimitedProtocol,
    most_connections,
    trust_connection,
)
from pliant.errors import ConfigError

MAX_BODY_BYTES = 1 << 20
MOST_OF_FEW = 64
"""Connections of a server beside other work, which needs its descriptors more."""
MAX_HOLD_S = 60.0
"""A request that waits for a change is answered after this long at the latest."""
SIGNAL_POLL_S = 0.2
"""How often the main thread looks for signals that another thread got."""
_SHUTDOWN_S = 3
# Longer than a client keeps an idle connection, so that the server is never the one who closes it
# just as the next request is on its way.
_KEEP_ALIVE_S = 75

T = TypeVar("T")


# --- answers, and who gets one ---


def json_response(
    value: Mapping[str, object],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return `value` as JSON, in one line."""
    # ASCII on purpose: a reason may quote half of a surrogate pair, which UTF-8 cannot carry.
    body = json.dumps(value, separators=(",", ":")) + "\n"
    return Response(body, status, headers, "application/json")


class HostGate:
    """An ASGI application that lets in requests which name this server, and refuses those of other sites' pages with 403.

    A page of another site whose name points to this machine sends that name as `Host`; a form or script of another page
    sends that page as `Origin`. `Host` must be the address of the connection, loopback, this machine's name, or one of
    `names`; `Origin`, where there is one, must be the same as `Host`.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        own = socket.gethostname()
        self._names = {name.strip("[]").lower() for name in ("localhost", own, own.partition(".")[0], *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else ""
        if not refusal:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[:120]})  # answers 403
        else:
            await json_response({"error": refusal}, 403)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        hosts, origins = _header(scope, b"host"), _header(scope, b"origin")
        if len(hosts) != 1 or not self._is_own(host_name(hosts[0]), scope["server"]):
            said = ", ".join(hosts)
            return f"{said!r:.80} is not a name of this server: use its address, or give it the name with --server-name"
        if origins and [_site_of(origin) for origin in origins] != [hosts[0].lower()]:
            return f"a page of {', '.join(origins)!r:.80} may not send requests to this server"
        return ""

    def _is_own(self, name: str, server: tuple[str, int] | None) -> bool:
        if name.lower() in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
            return address.is_loopback or (server is not None and address == _unmapped(server[0]))
        except ValueError:
            return False


def _site_of(origin: str) -> str:
    """Return the host and port of an Origin header; empty if it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def host_name(host: str) -> str:
    """Return a Host header without its port and brackets."""
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0]


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a connection; that of an IPv4 connection to an IPv6 socket as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (parsed.ipv4_mapped if parsed.version == 6 else None) or parsed


def _header(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


class Gate(ABC):
    """An ASGI application that asks for a token before it passes a request on. Nothing is served without one."""

    @abstractmethod
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class TokenGate(Gate):
    """Lets in requests with the token, and counts the answers by status.

    Without a token, which only an open server lacks, all requests are let in; `/health` and `/healthz` always are.
    `users` are those who have a token of their own, by its SHA-256. `request.user` is the name of the one who asks; empty
    for who has the server's token.
    """

    def __init__(
        self, app: ASGIApp, token: str, answers: Counter[int], users: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode() if token else None
        self._users = dict(users)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
            await send(message)

        app: ASGIApp = self._app if self._may_pass(scope) else _UNAUTHORIZED
        await app(scope, receive, counted)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in ("/health", "/healthz"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._authorization is None or (len(given) == 1 and hmac.compare_digest(given[0], self._authorization)):
            scope["user"] = ""
        elif len(given) == 1 and (user := self._users.get(_bearer_hash(given[0]))):
            scope["user"] = user
        else:
            return False
        trust_connection(scope)
        return True


def _bearer_hash(authorization: bytes) -> str:
    """Return the SHA-256 of the token in an Authorization header; empty if there is none."""
    scheme, _, token = authorization.partition(b" ")
    return hashlib.sha256(token).hexdigest() if scheme == b"Bearer" else ""


_UNAUTHORIZED = json_response(
    {"error": "this server needs its token: send `Authorization: Bearer TOKEN`"}, 401, {"WWW-Authenticate": "Bearer"}
)


def single_page(path: str, answer: Callable[[], Response], token: str) -> Gate:
    """Return an application that answers a GET of `path` with what `answer` returns, to requests with the token."""

    def endpoint(request: Request) -> Response:  # not a coroutine: Starlette calls it in a thread
        return answer()

    return TokenGate(Starlette(routes=[Route(path, endpoint)]), token, Counter())


# --- bodies ---


async def read_body(request: Request) -> bytes:
    """Return the whole body; 413 if it is too large, 408 if it does not come, 400 if it breaks off."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less")
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended before the body did") from None
    return bytes(body)


def decode_json(body: bytes, decode: Callable[[object], T]) -> T:
    """Return what `decode` makes of the JSON in `body`; raise ConfigError if it is not strict JSON."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_distinct_keys)
    except RecursionError:
        raise ConfigError("the JSON is nested too deeply: a view needs three levels") from None
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    try:
        return decode(value)
    except RecursionError:  # from the repr in the reason
        raise ConfigError("the JSON is nested too deeply: a view needs three levels") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key is given twice among {[key for key, _ in pairs]!r}")
    return value


# --- queries and headers ---


def wait_seconds(request: Request) -> float:
    """Return how long a GET may be held: 0 where it does not ask, MAX_HOLD_S where it asks for more."""
    if "wait" not in request.query_params:
        return 0.0
    text = ",".join(request.query_params.getlist("wait"))
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ConfigError(f"wait={text:.40}: give seconds, such as 30 or 0.5; at most {MAX_HOLD_S:g} count")
    return min(float(text), MAX_HOLD_S)


def header_version(request: Request, header: str) -> int | None:
    """Return the version in a conditional header; None if it is absent."""
    text = ",".join(request.headers.getlist(header)).strip()
    if not text:
        return None
    matched = re.fullmatch(r'(?:W/)?"([0-9]{1,18})"|([0-9]{1,18})', text)
    if matched is None:
        raise ConfigError(f'{header}: {text:.40} is not one version: give the ETag of an answer, such as "3"')
    return int(matched[1] or matched[2])


# --- requests that wait for a change ---


class HeldRequests:
    """Requests that are held until something changes, and never longer than their clients stay. For one event loop."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._changed = asyncio.Event()
        self._closed = False

    def wake(self) -> None:
        """Wake all requests that wait now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Wake all requests that wait, and let none wait again."""
        self._closed = True
        self.wake()

    async def wait(self, request: Request, hold_s: float) -> bool:
        """Wait until `wake`; False if `hold_s` was over, the client went away, or the server stops."""
        if self._closed:
            return False
        changed = self._changed
        waits = {asyncio.ensure_future(changed.wait()), asyncio.ensure_future(_disconnected(request))}
        self.num_waiting += 1
        try:
            await asyncio.wait(waits, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_waiting -= 1
            for wait in waits:
                wait.cancel()
        return changed.is_set() and not self._closed


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- uvicorn ---


class UvicornServer(uvicorn.Server):
    """Uvicorn that says when it listens, limits its connections, and calls `on_shutdown` before it waits for open requests.

    `most` is the number of connections that may be open; None: by the limit on descriptors.
    """

    def __init__(
        self, config: uvicorn.Config, on_shutdown: Callable[[], None] = lambda: None, *, most: int | None = None
    ) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self._on_shutdown = on_shutdown
        self._most = most

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return
        config, state = self.config, self.server_state
        most = most_connections() if self._most is None else self._most

        def make(acceptor: Acceptor) -> LimitedProtocol:
            return LimitedProtocol(acceptor, config, state, self.lifespan.state)

        acceptors = [Acceptor(each, make, state, tls=config.ssl, most=most) for each in sockets or ()]
        for acceptor in acceptors:
            acceptor.open()
        self.servers = acceptors  # type: ignore[assignment]  # it closes them, and waits until they are
        self.started = True
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)


def uvicorn_config(
    app: Gate, *, names: Iterable[str] = (), tls_cert: str = "", tls_key: str = "", is_page: bool = False
) -> uvicorn.Config:
    """Return settings for plain HTTP/1.1, or TLS where there is a certificate; silent, and slow to close.

    `names` are those that requests may call the server by, besides its addresses. `is_page`: a page in a browser, which
    needs websockets and is told when the server starts and ends.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    config = uvicorn.Config(
        HostGate(app, names),
        loop="asyncio",
        http="h11",
        ws="auto" if is_page else "none",
        lifespan="on" if is_page else "off",
        log_config=None,
        log_level="error",  # it warns at every malformed request, which is the client's mistake
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1 if is_page else _SHUTDOWN_S,  # a browser holds its websocket
        ssl_certfile=tls_cert or None,
        ssl_keyfile=tls_key or None,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(
            f"--tls-cert {tls_cert} --tls-key {tls_key}: {error}; give PEM files that belong together"
        ) from None
    return config


@contextmanager
def serving(config: uvicorn.Config, listener: socket.socket, name: str) -> Iterator[None]:
    """Serve a few clients in a thread of that name until the block ends."""
    server = UvicornServer(config, most=MOST_OF_FEW)
    thread = threading.Thread(target=server.run, args=([listener],), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def serve_until_signalled(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. In a thread, because uvicorn would send itself the signal once more at its end."""
    thread = threading.Thread(target=server.run, args=([listener],), name="pliant-serving", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    thread.start()
    while thread.is_alive():
        # Not for ever: of two signals at once another thread may get both, which does not wake this one, whose handlers they need.
        thread.join(SIGNAL_POLL_S)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens at `host`, in that host's address family.

    Raises:
        ConfigError: the address or the port cannot be used.
    """
    bare = check_host(host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host}: {error}; give an address of this machine, or 0.0.0.0 for all") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `::` means every address, IPv4 too; a particular IPv6 address means itself.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if _is_unspecified(bare) else 1)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            raise ConfigError(
                f"{host}, port {port}: {error.strerror}; give a free port (0 finds one) and an address of this machine"
            ) from None
        yield listener


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
