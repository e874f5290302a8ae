"""The coordinator of a federated job: workers connect to it, are given units of work, and may come and go at any time.

The result of a unit does not depend on which worker does it, and results are handed on in the order of the units. So
neither the number of workers nor the loss of some changes a bit. Connections are those of `pliant.channel`; `work_queue`
decides who does what, and this module sends it. Each connection has a receiving and a sending thread. All state is guarded
by one condition, which is notified on each change.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch import Tensor

from pliant.channel import Channel, ChannelServer
from pliant.errors import CommError, ConfigError, LaunchError, PliantError, TrainError
from pliant.fed import messages
from pliant.fed.config import FedConfig
from pliant.fed.history import WorkFigures
from pliant.fed.messages import Connection, FedMessage, Silent, TensorLayout
from pliant.fed.work import Evaluation, Unit, UnitResult, Weights
from pliant.fed.work_queue import MAX_LOSSES, Assign, Unassign, WorkQueue

if TYPE_CHECKING:
    from pliant.fed.data.task import Task

log = logging.getLogger(__name__)

SILENCE_S = 20.0
"""A worker that has sent nothing for this long is lost; a living one sends heartbeats."""
CLOSE_S = 2.0
"""How long workers may take to end the connection once they have been told that the job is over."""
MAX_AHEAD_BYTES = 1 << 30
"""Results that wait for earlier ones take no more than about this."""
FIRST_WARNING_S, MAX_WARNING_S = 5.0, 300.0
"""When the absence of workers is logged for the first time, and the longest pause before the next time."""
OTHER_DATA = "its data or model are not those of this job: give all hosts the same files and versions"
MIN_SECRET_BYTES = 16


class ServerTLS(NamedTuple):
    """What a coordinator needs to listen with TLS."""

    context: ssl.SSLContext
    certificate: bytes
    """The certificate in DER."""


def server_tls(certificate: str, key: str = "") -> ServerTLS:
    """Load a PEM certificate and its key; the key may be in the same file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
        text = Path(certificate).read_text()
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        return ServerTLS(context, ssl.PEM_cert_to_DER_cert(text[begin:end]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"certificate {certificate!r} with key {key!r}: {error}; give a PEM certificate and its key"
        ) from None


@dataclass(eq=False)
class ConnectedWorker:
    """The coordinator's state of one connection."""

    number: int
    name: str
    connection: Connection
    host: str = ""
    pid: int = 0
    ready: bool = False
    holding: Sequence[int] = ()
    """Numbers of its units; the first is the one that it works on."""
    task: Any = None
    """Fingerprint of the worker's task."""
    device_kind: str = ""
    model_version: int = 0
    """Version of the model that it was sent last."""
    gpu: tuple[float, float] = (0.0, 0.0)
    """Bytes that torch holds on its GPU, and the share of the time in which that computes."""
    leaving: bool = False
    """It announced its end, or was refused: its loss is not the fault of a unit."""


@dataclass(eq=False)
class UnitBatch:
    """Units that start from one model, and their results as they come."""

    units: Sequence[Unit]
    layout: TensorLayout
    payload: Tensor
    """The model."""
    version: int
    results: dict[int, UnitResult] = field(default_factory=dict)
    """Results that have come and were not yet handed on, by their place among the units."""
    error: PliantError | None = None
    first: int = 0
    """The number of the first unit."""
    taken: int = 0
    """How many results have been handed on."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each worker, by its number, brought its last result, by time.monotonic()."""


class Coordinator:
    """`Workers` that are processes elsewhere. A context manager: it listens within the block.

    If the block ends without an exception, the workers are told that the job is over. Otherwise they only lose the
    connection, and wait for a coordinator that goes on.
    """

    def __init__(
        self,
        config: FedConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes,
        tls: ServerTLS | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`port` 0 takes a free one. `secret` is what workers must know."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"the secret has {len(secret)} bytes: use {MIN_SECRET_BYTES} or more")
        self._host, self._port, self._secret, self._tls = host, port, secret, tls
        self._welcome = {"config": config.model_dump(mode="json"), "silence_s": silence_s}
        self._silence_s = silence_s
        self._changed = threading.Condition()
        self._server: ChannelServer | None = None
        self._workers: dict[int, ConnectedWorker] = {}
        self._queue = WorkQueue()
        self._batch: UnitBatch | None = None
        self._failure: PliantError | None = None
        self._next_unit = self._next_worker = 0
        self._max_payload_bytes = 0
        self._layout: TensorLayout | None = None
        self._payload: Tensor | None = None
        self._version = 0
        self._task: Any = None
        """The fingerprint that tasks of workers must have: as expected, or that of the first worker."""
        self._device_kind = ""
        self._closing = False
        self._wait_s = 0.0
        """Seconds that workers waited for others since `take_figures`, on average."""
        self._waited_for: Counter[str] = Counter()
        """Milliseconds that the others waited for each worker since then."""

    def __enter__(self) -> Self:
        listener = _listen(self._host, self._port)
        self._port = int(listener.getsockname()[1])
        context, certificate = self._tls or (None, b"")
        self._server = ChannelServer(
            listener, self._secret, self._serve, purpose=messages.PURPOSE, tls=context, certificate=certificate
        )
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(over=kind is None)

    def close(self, *, over: bool) -> None:
        """Stop listening and end all connections; with `over`, tell workers first that the job has ended. Idempotent."""
        with self._changed:
            server, self._server, self._closing = self._server, None, True
            workers = list(self._workers.values())
        if server is None:
            return
        if over:
            for worker in workers:
                worker.connection.send("over")
            with self._changed:
                self._changed.wait_for(lambda: not self._workers, CLOSE_S)
        server.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._workers, CLOSE_S)

    @property
    def port(self) -> int:
        return self._port

    @property
    def address(self) -> str:
        """The address for workers on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def workers(self) -> list[ConnectedWorker]:
        """Return the workers that are connected."""
        with self._changed:
            return list(self._workers.values())

    def take_figures(self) -> WorkFigures:
        """Return who is ready, for whom the others waited since the last call, and what the GPUs do."""
        with self._changed:
            ready = [worker for worker in self._workers.values() if worker.ready]
            slowest = max(self._waited_for, key=lambda name: self._waited_for[name], default="")
            wait_s, self._wait_s = self._wait_s, 0.0
            self._waited_for.clear()
        return WorkFigures(
            tuple(sorted(worker.name for worker in ready)),
            slowest,
            wait_s,
            max((worker.gpu[0] for worker in ready), default=0.0),
            fmean(worker.gpu[1] for worker in ready) if ready else 0.0,
        )

    def _note_waits(self, batch: UnitBatch) -> None:
        """Note how long the workers of a batch waited for the last one of them."""
        if len(batch.ended_s) > 1:
            last = max(batch.ended_s, key=lambda number: batch.ended_s[number])
            waits_s = [batch.ended_s[last] - ended_s for ended_s in batch.ended_s.values()]
            self._wait_s += fmean(waits_s)
            name = self._workers[last].name if last in self._workers else "that has left"
            self._waited_for[name] += round(1000 * sum(waits_s))

    def expect_task(self, task: Task) -> None:
        """Refuse workers whose data or model differ from this task; without this call the first worker decides."""
        wanted = messages.fingerprint(task)
        with self._changed:
            self._task = wanted
            self._refuse_others()

    @property
    def kind(self) -> str:
        """The kind of device that workers compute on; empty before the first one if none is expected."""
        return self._device_kind

    def expect_kind(self, kind: str) -> None:
        """Refuse workers that compute on another kind of device; without this call the first worker decides."""
        with self._changed:
            self._device_kind = kind
            self._refuse_others()

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Wait until `count` workers are ready. Raises LaunchError if they are not, in time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue.holding) >= count or self._failure is not None, timeout_s)
            if self._failure is not None:
                raise self._failure
            if (ready := len(self._queue.holding)) < count:
                raise LaunchError(f"{ready} of {count} workers are ready after {timeout_s:g} s: their log says why")

    def fail(self, why: str) -> None:
        """Have whoever waits for results, now or later, get a LaunchError with this reason; from any thread."""
        with self._changed:
            self._failure = LaunchError(why)
            self._changed.notify_all()

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """Yield the result of each unit, in their order. Waits for workers if there are none.

        Raises:
            TrainError: a unit cannot be done.
            LaunchError: a unit kills the workers that try it, or there will be no workers any more.
        """
        if not units:
            return
        batch = self._start(model, units)
        try:
            for place in range(len(units)):
                result = self._take(batch, place)
                yield result
        finally:
            with self._changed:
                if self._batch is batch:
                    self._send_orders(self._queue.drop_all())
                    self._note_waits(batch)
                    self._batch = None

    def _start(self, model: Weights, units: Sequence[Unit]) -> UnitBatch:
        layout, payload = messages.pack_model(model)
        with self._changed:
            if self._batch is not None and self._queue.num_open:
                raise TrainError("units of another model are still under way: take their results first")
            # Workers are sent a model only if its bytes differ from the last one's.
            if layout != self._layout or self._payload is None or not payload.equal(self._payload):
                self._layout, self._payload = layout, payload
                self._version += 1
            assert self._payload is not None, "set above"
            batch = self._batch = UnitBatch(list(units), layout, self._payload, self._version, first=self._next_unit)
            self._next_unit += len(units)
            largest = max(messages.result_bytes(unit, layout) for unit in units)
            self._max_payload_bytes = max(self._max_payload_bytes, largest)
            for worker in self._workers.values():
                worker.connection.allow(self._max_payload_bytes)
            self._queue.add(range(batch.first, self._next_unit))
            self._assign()
        return batch

    def _take(self, batch: UnitBatch, place: int) -> UnitResult:
        """Wait for the result at this place."""
        alone_s, pause_s = time.monotonic(), FIRST_WARNING_S
        with self._changed:
            while place not in batch.results:
                if (error := self._failure or batch.error) is not None:
                    raise error
                self._changed.wait(pause_s)
                if self._queue.holding:
                    alone_s, pause_s = time.monotonic(), FIRST_WARNING_S
                elif time.monotonic() - alone_s > pause_s:
                    coming = f", {len(self._workers)} are getting ready" if self._workers else ""
                    log.warning("no worker is ready%s: %d units wait", coming, self._queue.num_open)
                    pause_s = min(2 * pause_s, MAX_WARNING_S)
            batch.taken += 1
            self._assign()
            return batch.results.pop(place)

    # --- connections ---

    def _serve(self, name: str, channel: Channel) -> None:
        """Talk to one worker until its connection ends; runs in a thread of its own."""
        printable = "".join(each for each in name if each.isprintable())
        with self._changed:
            connection = Connection(channel, self._silence_s)
            self._next_worker += 1
            worker = ConnectedWorker(self._next_worker, printable, connection)
            if self._closing:
                connection.close()
                return
            self._workers[worker.number] = worker
            connection.allow(self._max_payload_bytes)
        connection.send("welcome", self._welcome)
        why, blame = "the connection was closed", True
        try:
            while (message := connection.receive()) is not None:
                with self._changed:
                    self._handle(worker, message)
                if worker.leaving:
                    why = str(message.body.get("why") or "it was refused")[:1000]
                    if message.type == "leave":
                        break
        except Silent as error:
            why, blame = str(error), False
        except CommError as error:
            why = str(error)
        finally:
            with self._changed:
                self._lose(worker, why, blame=blame and not worker.leaving)
            connection.close()

    def _handle(self, worker: ConnectedWorker, message: FedMessage) -> None:
        match message.type:
            case "ready":
                self._admit(worker, message.body)
            case "result":
                self._keep_result(worker, message)
            case "failed":
                self._note_failure(worker, message.body)
            case "leave":
                worker.leaving = True
            case _:
                raise CommError(f"a worker does not send {message.type!r:.40}")

    def _admit(self, worker: ConnectedWorker, told: dict[str, Any]) -> None:
        if worker.ready:
            raise CommError("it is ready for the second time")
        pid = told.get("pid")
        worker.host, worker.pid = str(told.get("host"))[:80], pid if isinstance(pid, int) else 0
        worker.task, worker.device_kind = told.get("task"), str(told.get("device_kind", self._device_kind))[:200]
        self._task = self._task or worker.task
        if worker.task == self._task:
            self._device_kind = self._device_kind or worker.device_kind
        if why := self._why_refused(worker):
            self._refuse(worker, why)
            return
        worker.ready = True
        log.info("worker %s is ready (%s)", worker.name, str(told.get("device"))[:20])
        worker.holding = self._queue.join(worker.number)
        self._assign()
        self._changed.notify_all()

    def _why_refused(self, worker: ConnectedWorker) -> str:
        """Return why a worker cannot take part; empty if it can."""
        if worker.task != self._task:
            return OTHER_DATA
        if worker.device_kind == self._device_kind:
            return ""
        where = f"it computes on {worker.device_kind:.80}, and this job on {self._device_kind:.80}"
        return f"{where}, so bits would differ: give hosts that are alike, or `device: cpu`"

    def _refuse_others(self) -> None:
        for worker in [each for each in self._workers.values() if each.ready]:
            if why := self._why_refused(worker):
                self._queue.leave(worker.number, blame=False)
                self._refuse(worker, why)
        self._assign()

    def _refuse(self, worker: ConnectedWorker, why: str) -> None:
        log.warning("refused worker %s: %s", worker.name, why)
        worker.leaving = True
        worker.connection.send("refused", {"why": why})  # it then ends the connection

    def _lose(self, worker: ConnectedWorker, why: str, *, blame: bool) -> None:
        self._workers.pop(worker.number, None)
        held = len(self._queue.holding.get(worker.number, ()))
        given_up = self._queue.leave(worker.number, blame=blame)
        if not self._closing:
            again = f"; {held} of its units go to others" if held else ""
            if worker.leaving:
                log.info("worker %s has left: %s%s", worker.name, why, again)
            else:
                log.warning("lost worker %s: %s%s", worker.name, why, again)
            if given_up is not None and self._batch is not None:
                unit = describe_unit(self._batch.units[given_up - self._batch.first])
                self._batch.error = LaunchError(
                    f"{unit}: {MAX_LOSSES} workers were lost while they did it, the last one {worker.name} ({why}); "
                    "see their log: is there enough memory?"
                )
            self._assign()
        self._changed.notify_all()

    # --- units ---

    def _keep_result(self, worker: ConnectedWorker, message: FedMessage) -> None:
        number, batch = message.body.get("id"), self._batch
        if batch is None or not isinstance(number, int) or not self._queue.is_open(number):
            return  # of a batch that nobody waits for any more, or done twice
        place = number - batch.first
        result = messages.result_from_json(message.body, message.payload, batch.units[place], batch.layout)
        self._send_orders(self._queue.finish(worker.number, number))
        batch.results[place] = result
        batch.ended_s[worker.number] = time.monotonic()
        worker.gpu = _gpu_from_json(message.body.get("gpu"))
        self._assign()
        self._changed.notify_all()

    def _note_failure(self, worker: ConnectedWorker, told: dict[str, Any]) -> None:
        number, why, batch = told.get("id"), str(told.get("why"))[:2000], self._batch
        if batch is None or not isinstance(number, int) or not self._queue.is_open(number):
            return
        unit = describe_unit(batch.units[number - batch.first])
        log.warning("worker %s could not do %s: %s", worker.name, unit, why)
        given_up = self._queue.fail(worker.number, number)
        if told.get("final"):
            batch.error = TrainError(f"{unit}: {why}")
        elif given_up is not None:
            batch.error = TrainError(f"{unit} failed {MAX_LOSSES} times, at last on {worker.name}: {why}")
        self._assign()
        self._changed.notify_all()

    def _assign(self) -> None:
        batch = self._batch
        if batch is None or self._closing:
            return
        ahead = max(4 * len(self._queue.holding), MAX_AHEAD_BYTES // max(1, self._max_payload_bytes))
        self._send_orders(self._queue.assign(batch.first + batch.taken + ahead))

    def _send_orders(self, orders: Sequence[Assign | Unassign] | None) -> None:
        for order in orders or ():
            worker = self._workers[order.worker]
            if isinstance(order, Unassign):
                worker.connection.send("cancel", {"id": order.unit})
                continue
            batch = self._batch
            assert batch is not None, "units are assigned out of a batch"
            if worker.model_version != batch.version:
                worker.connection.send("model", {"layout": batch.layout.to_json()}, batch.payload)
                worker.model_version = batch.version
            unit = messages.unit_to_json(batch.units[order.unit - batch.first])
            worker.connection.send("unit", {"id": order.unit, "unit": unit})


def _gpu_from_json(told: object) -> tuple[float, float]:
    match told:
        case [int() | float() as held, int() | float() as use] if 0 <= held < 2**60 and 0 <= use <= 1:
            return float(held), float(use)
        case _:
            return 0.0, 0.0


def describe_unit(unit: Unit) -> str:
    """Return a unit in words, for messages."""
    if isinstance(unit, Evaluation):
        return f"the test of samples {unit.begin} to {unit.end - 1}"
    clients = ", ".join(map(str, unit.clients[:20])) + (", ..." if len(unit.clients) > 20 else "")
    return f"round {unit.round_number}, client{'s' if len(unit.clients) > 1 else ''} {clients}"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another address or port") from None
