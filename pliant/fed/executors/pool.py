"""Executors elsewhere as `Workers` of a federated job: they connect here, are given units, and may come and go at any time.

The result of a unit does not depend on who does it, and results are handed on in the units' order: so neither the number of
executors nor the loss of some changes a bit. All of the network is `desk`'s, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from torch import Tensor

from pliant.errors import ConfigError, LaunchError, PliantError
from pliant.fed.config import FedConfig
from pliant.fed.executors import parcels, wire
from pliant.fed.executors.desk import Batch, Desk, Seen
from pliant.fed.executors.settings import check_token
from pliant.fed.work import Unit, UnitResult, Weights

log = logging.getLogger(__name__)

SILENCE_S = 20.0
CLOSE_S = 10.0
AGAIN_S = 0.1
"""How often a port that is taken is tried."""
_T = TypeVar("_T")


class Pool:
    """`Workers` that are executors. A context manager: it listens within the block.

    Left without an exception, it tells the executors that the job is over; else they only lose the connection, and wait
    for a server that goes on.
    """

    def __init__(
        self,
        config: FedConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str,
        tls: ssl.SSLContext | None = None,
        silence_s: float = SILENCE_S,
        patience_s: float = 0.0,
    ) -> None:
        """`port` 0: a free one; one that is taken is waited for so long. An executor not heard of for `silence_s` is lost.

        Raises:
            ConfigError: the token is too short to keep a stranger out.
        """
        check_token(token, "the token")
        self._host, self._port, self._patience_s = host, port, patience_s
        self._desk = Desk(config.model_dump(mode="json"), token, tls, silence_s, self._changed)
        self._news = threading.Condition()
        self._num_ready = 0
        self._failure: PliantError | None = None
        self._waiting: set[Batch] = set()
        """Whose results somebody waits for."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until: asyncio.Event | None = None
        self._over = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._layout: parcels.TensorLayout | None = None
        self._payload: Tensor | None = None
        self._version = 0
        self._model: list[memoryview] = []

    def __enter__(self) -> Self:
        self._listener = _listen(self._host, self._port, self._patience_s)
        opened = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(opened,), name="pliant-fed-pool", daemon=True)
        self._thread.start()
        opened.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(over=kind is None)

    def close(self, *, over: bool) -> None:
        """Hang up; `over`: tell executors that the job has ended. Does nothing the second time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._over = over
        if self._until is not None:
            with contextlib.suppress(RuntimeError):  # its thread has failed, which was told
                self._call(self._until.set)
        thread.join(CLOSE_S)
        if thread.is_alive():  # it is a daemon: nobody has to wait for it
            log.warning("thread %s has not ended within %g s: the pool is left as it is", thread.name, CLOSE_S)

    @property
    def port(self) -> int:
        assert self._listener is not None, "it listens within its `with`"
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """For executors on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def executors(self) -> list[Seen]:
        """Who is there now, and what each holds."""
        return self._ask(self._desk.seen)

    def expect(self, task: str) -> None:
        """Refuse executors whose task is another than this one, by `executor.fingerprint`; else the first one decides."""
        self._call(self._desk.expect, task)

    @property
    def kind(self) -> str:
        """On what executors compute; empty before the first one, where nothing else is expected."""
        return self._desk.kind

    def expect_kind(self, kind: str) -> None:
        """Refuse executors that compute on anything else; else the first one decides."""
        self._call(self._desk.expect_kind, kind)

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Until so many executors are ready.

        Raises:
            LaunchError: they are not, in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while self._num_ready < count and self._failure is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LaunchError(
                        f"{self._num_ready} of {count} executors are ready after {timeout_s:g} s: their logs, beside the job's, say why"
                    )
                self._news.wait(left_s)
        if self._failure is not None:
            raise self._failure

    def fail(self, why: str) -> None:
        """Whoever waits for results, now or later, gets a LaunchError that says so; from any thread."""
        self._give_up(LaunchError(why))

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """The result of each unit, in their order; waits for executors where none is there.

        Raises:
            TrainError: a unit cannot be done.
            LaunchError: a unit takes the executors that try it, or there will be none any more.
        """
        if not units:
            return
        self._encode(model)
        assert self._layout is not None, "made above"
        batch = Batch(list(units), self._layout, self._version, self._model)
        with self._news:
            if self._failure is not None:
                raise self._failure
            self._waiting.add(batch)  # who gives up from now on tells it
        early: dict[int, UnitResult] = {}
        try:
            self._call(self._desk.start, batch)
            for place in range(len(units)):
                while place not in early:
                    found = batch.results.get()
                    if isinstance(found, PliantError):
                        raise found
                    early[found[0]] = found[1]
                self._call(self._desk.take, batch)
                yield early.pop(place)
        finally:
            with self._news:
                self._waiting.discard(batch)
            with contextlib.suppress(RuntimeError):  # the pool was closed meanwhile
                self._call(self._desk.stop, batch)

    def _encode(self, model: Weights) -> None:
        """A model with other bytes than the last is a new version, which executors are sent."""
        layout, payload = parcels.packed(model)
        if layout != self._layout or self._payload is None or not payload.equal(self._payload):
            self._layout, self._payload = layout, payload
            self._version += 1
            body = {"version": self._version, "layout": layout.to_json()}
            self._model = wire.encoded(wire.Kind.MODEL, body, payload)

    def _changed(self, num_ready: int) -> None:
        with self._news:
            self._num_ready = num_ready
            self._news.notify_all()

    def _give_up(self, error: PliantError) -> None:
        with self._news:
            self._failure = error
            for batch in self._waiting:
                batch.results.put(error)
            self._news.notify_all()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Raises RuntimeError where the pool is closed."""
        if self._loop is None:
            raise RuntimeError("a pool is used within its `with`")
        self._loop.call_soon_threadsafe(function, *arguments)

    def _ask(self, function: Callable[[], _T]) -> _T:
        answer: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._call(lambda: answer.put(function()))
        return answer.get(timeout=10)

    def _live(self, opened: threading.Event) -> None:
        try:
            asyncio.run(self._serve(opened))
        except Exception as error:
            self._give_up(LaunchError(f"the pool of executors has failed: {error!r}"))
            raise
        finally:
            opened.set()

    async def _serve(self, opened: threading.Event) -> None:
        assert self._listener is not None, "made before the thread"
        self._loop, self._until = asyncio.get_running_loop(), asyncio.Event()
        opened.set()
        with self._listener:
            await self._desk.serve(self._listener, self._until)
        await self._desk.close(over=self._over)


def server_tls(certificate: str, key: str = "") -> ssl.SSLContext:
    """For `Pool`.

    Raises:
        ConfigError: the files are no certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate {certificate!r} with key {key!r}: {error}; give a PEM certificate and its key"
        ) from None
    return context


def _listen(host: str, port: int, patience_s: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline_s, is_told = time.monotonic() + patience_s, False
    while True:
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                what = f"cannot listen at {host}:{port}: {error.strerror}"
                raise ConfigError(f"{what}; choose another address or port") from None
        else:
            listener.setblocking(False)
            return listener
        if not is_told:
            log.warning("%s:%d is taken: waiting up to %g s for it", host, port, patience_s)
            is_told = True
        time.sleep(AGAIN_S)
