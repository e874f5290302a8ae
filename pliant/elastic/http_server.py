"""The parts that all HTTP servers of pliant share: listening, tokens, bodies, answers, and how uvicorn is run."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.cluster import check_host
from pliant.errors import ConfigError

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
MAX_HOLD_S = 60.0
"""A request that waits for a change is answered after this long at the latest."""
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


class TokenGate:
    """An ASGI application that lets in requests with the token, and counts the answers by status.

    Without a token all requests are let in; `/health` and `/healthz` always are.
    """

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
        if self._authorization is None or scope["path"] in ("/health", "/healthz"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._authorization)


_UNAUTHORIZED = json_response(
    {"error": "this server needs its token: send `Authorization: Bearer TOKEN`"}, 401, {"WWW-Authenticate": "Bearer"}
)


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
    """Uvicorn that says when it listens, and calls `on_shutdown` before it waits for open requests to end."""

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self._on_shutdown = on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)


def uvicorn_config(app: ASGIApp, *, tls_cert: str = "", tls_key: str = "") -> uvicorn.Config:
    """Return settings for plain HTTP/1.1, or TLS where there is a certificate; silent, and slow to close.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns at every malformed request, which is the client's mistake
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ssl_certfile=tls_cert or None,
        ssl_keyfile=tls_key or None,
    )
    load_certificate(config)
    return config


def load_certificate(config: uvicorn.Config) -> uvicorn.Config:
    """Read the certificate of `config`, and return it; raise ConfigError if the certificate cannot be used."""
    try:
        config.load()
    except OSError as error:
        raise ConfigError(
            f"--tls-cert {config.ssl_certfile or ''} --tls-key {config.ssl_keyfile or ''}: {error}; give PEM files "
            "that belong together"
        ) from None
    return config


def serve_until_signalled(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. In a thread, because uvicorn would send itself the signal once more at its end."""
    thread = threading.Thread(target=server.run, args=([listener],), name="pliant-serving", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    thread.start()
    thread.join()


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
