"""The config server: holds the wanted view and the roll, and tells everybody who waits for a change.

This file listens, serves and stops. The rules are in `elastic.membership` and `elastic.roll`, the disk in
`elastic.store`, the routes in `elastic.web`, the other side in `elastic.client`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from pliant.cluster import View, check_host
from pliant.elastic import serving
from pliant.elastic.caterer import Caterer
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import NO_LIMITS, Limits, Put, Wanted
from pliant.elastic.roll import Roll
from pliant.elastic.store import IN_MEMORY, Store
from pliant.elastic.web import PATHS, Web
from pliant.errors import ConfigError, ServerUnavailable

__all__ = ["DEFAULT_ENDPOINT", "DEFAULT_PORT", "ConfigClient", "ConfigServer", "ServerConfig"]

DEFAULT_PORT = 9100
DEFAULT_ENDPOINT = "/config"
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, what it keeps, and whom it lets in."""

    host: str = "127.0.0.1"
    """Address to listen on: a name, IPv4 or IPv6; 0.0.0.0 or :: for all."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0 picks a free one."""
    endpoint: str = DEFAULT_ENDPOINT
    """Path of the view, as in KungFu's -endpoint."""
    state: str = IN_MEMORY
    """SQLite file that survives a restart; `:memory:` forgets."""
    initial: View | None = None
    """The first view, used only where the state has never held one."""
    limits: Limits = NO_LIMITS
    """Slots and ports that a resize keeps to."""
    token: str = ""
    """Whoever asks must know it; empty lets everybody in."""
    tls_cert: str = ""
    """PEM file with the certificate chain; empty serves plain HTTP."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    caterer: Caterer | None = None
    """Who sees to it that a resize comes about; None: runners do, as soon as the view says so."""

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
        self._store = Store(self.config.state)
        self._uvicorn: _Uvicorn | None = None
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
    def roll(self) -> Roll:
        """Who trains now, as far as it knows."""
        return self._store.state.roll

    @contextmanager
    def running(self) -> Iterator[ConfigServer]:
        """Serve until the block ends, or `stop()` or a request to /stop comes; leaves no thread and no socket.

        Raises:
            ConfigError: the address, the state file or the certificate cannot be used.
            ServerUnavailable: it failed to start, or while running; the latter from the end of the block.
        """
        with self._store, listening(self.config.host, self.config.port) as listener:
            self._port = listener.getsockname()[1]
            self._put_initial()
            self._uvicorn = _prepared(self.config, self._store, self.stop)
            self._ended.clear()
            self._failure = None
            thread = threading.Thread(
                target=self._serve, args=(self._uvicorn, listener), name="pliant-config-server", daemon=True
            )
            thread.start()
            try:
                self._uvicorn.listening.wait(_START_TIMEOUT_S)
                self._check()
                yield self
            finally:
                self.stop()
                thread.join()
        self._check()

    def stop(self) -> None:
        """Ask it to stop; from any thread or signal handler, returns at once."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has stopped; False if it still runs after `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise ServerUnavailable(f"the config server at {self.url} failed: {self._failure!r}") from self._failure

    def _put_initial(self) -> None:
        if self.config.initial is not None and self.wanted.version == 0:
            self._store.save(self._store.state.after(Put(self.config.initial, expected=0), self.config.limits))

    def _serve(self, server: _Uvicorn, listener: socket.socket) -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # the end of a thread: `running` raises it
            self._failure = error
        finally:
            server.listening.set()
            self._ended.set()


class _Uvicorn(uvicorn.Server):
    """Uvicorn that says when it listens, and that does not wait for held requests to run out."""

    def __init__(self, config: uvicorn.Config, web: Web) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self._web = web

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._web.close()
        await super().shutdown(sockets)


def _prepared(config: ServerConfig, store: Store, stop: Callable[[], None]) -> _Uvicorn:
    web = Web(
        store,
        endpoint=config.endpoint,
        token=config.token,
        limits=config.limits,
        stop=stop,
        caterer=config.caterer,
    )
    settings = serving.settings(web.app, tls_cert=config.tls_cert, tls_key=config.tls_key)
    return _Uvicorn(serving.loaded(settings), web)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at `host`, in that host's address family."""
    bare = check_host(host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"-host {host}: {error}; give an address of this machine, or 0.0.0.0 for all") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `::` means every address, IPv4 too; a particular IPv6 address means itself.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if _is_any(bare) else 1)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            raise ConfigError(
                f"{host}, port {port}: {error.strerror}; give a free port (0 finds one) and an address of this machine"
            ) from None
        yield listener


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
