"""`pliant serve`, from its state directory: keeps others out of it, listens, and says where it can be found."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pliant.cluster import check_host
from pliant.elastic import http_server
from pliant.elastic.http_server import listening
from pliant.errors import ConfigError
from pliant.sched.cluster import SchedulingPolicy
from pliant.sched.live.book import Book
from pliant.sched.live.client import SERVER_FILE
from pliant.sched.live.ground import Ground
from pliant.sched.live.scheduler import Scheduler
from pliant.sched.live.web import LiveWeb


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveConfig:
    """Where the server keeps its state and listens, and whom it lets in."""

    state: Path
    """Made where it is missing; a server that was killed is begun anew with the same."""
    host: str = "127.0.0.1"
    port: int = 9200
    """0 picks a free one."""
    token: str = ""
    """Whoever asks must know it; empty: the one in the state directory, made at random the first time."""
    interval_s: float = 5.0
    """Between allocations, where nothing happens."""

    def __post_init__(self) -> None:
        check_host(self.host)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port}: use a number from 1 to 65535, or 0 for any free port")
        if not 0 < self.interval_s < 1e6:
            raise ConfigError(f"--interval {self.interval_s:g}: use seconds above 0, such as 5")
        if not re.fullmatch(r"[!-~]*", self.token):
            raise ConfigError("the token holds a character that a header cannot: use printable ASCII without spaces")


def serve(config: LiveConfig, make_ground: Callable[[], Ground], policy: SchedulingPolicy, say: Callable[[str], None]) -> None:
    """Schedule and answer until SIGTERM or SIGINT; jobs run on. Call it from the main thread.

    Raises:
        ConfigError: the address or the state directory cannot be used, or another server uses it.
    """
    with _own(config.state), Book(config.state) as book, listening(config.host, config.port) as listener:
        token = config.token or _kept_token(config.state)
        url = _url(config.host, listener.getsockname()[1])
        scheduler = Scheduler(make_ground(), policy, book, config.state, interval_s=config.interval_s)
        with scheduler.running(), _written_down(config.state, url, token):
            say(f"pliant serve at {url}, state in {config.state}")
            web = LiveWeb(scheduler, token)
            http_server.serve_until_signalled(_Uvicorn(http_server.uvicorn_config(web.app), web), listener)
    say("the server has ended; jobs run on, `pliant serve` with the same --state takes them up again")


class _Uvicorn(uvicorn.Server):
    """Uvicorn that does not wait for held requests to run out."""

    def __init__(self, config: uvicorn.Config, web: LiveWeb) -> None:
        super().__init__(config)
        self._web = web

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._web.close()
        await super().shutdown(sockets)


@contextlib.contextmanager
def _own(state: Path) -> Iterator[None]:
    """The state directory, for this server alone."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"--state {state}: {error.strerror}; give a directory that can be written") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(lock, 20, 0).decode() or "unknown"
            raise ConfigError(
                f"--state {state}: the server with pid {pid} uses it; talk to that one, or give another directory"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def _kept_token(state: Path) -> str:
    """The same after a restart: clients may have been told it."""
    file = state / "token"
    with contextlib.suppress(OSError):
        if token := file.read_text().strip():
            return token
    token = secrets.token_urlsafe(24)
    _write_private(file, token)
    return token


@contextlib.contextmanager
def _written_down(state: Path, url: str, token: str) -> Iterator[None]:
    file = state / SERVER_FILE
    _write_private(file, json.dumps({"url": url, "token": token, "pid": os.getpid()}))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _write_private(file: Path, text: str) -> None:
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    draft.replace(file)


def _url(host: str, port: int) -> str:
    bare = check_host(host)
    bare = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}"
