"""A worker of a federated job: `pliant run -w --independent -np N python -m pliant.fed.worker --server HOST:PORT`.

`pliant run` starts it, tells it who it is and gives it the secret, as it does for every worker. It connects to the
coordinator, builds the job's task from the config that it is sent, and does unit after unit. It keeps nothing: if it is
killed, only the unit that it works on is lost, and another worker does it again. If the coordinator is lost, it waits for it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError

from pliant.channel import connect_channel
from pliant.errors import REFUSED_EXIT, CommError, ConfigError, HandshakeRefused, PliantError
from pliant.fed import messages
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.messages import Connection, FedMessage, TensorLayout
from pliant.fed.trainer import ClientTrainer, describe_device
from pliant.fed.work import Unit, Weights
from pliant.identity import worker_spec
from pliant.train.gpu_meter import GpuMeter

log = logging.getLogger("pliant.fed.worker")  # the module's name also if it runs as a program

PATIENCE_S = 60.0
"""How long a worker tries to reach the coordinator, at first and after it has lost it."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Pauses between two attempts to reach the coordinator."""
HANDSHAKE_S = 10.0
MAX_MODEL_BYTES = 64 << 30
LEAVE_S = 0.5
"""How long a worker that is told to end takes to say goodbye."""
CA_VARIABLE = "PLIANT_FED_CA"
"""Environment variable with the certificates (PEM) that the coordinator's must be signed by; unset: no TLS."""
LOCAL_RANK = "PLIANT_LOCAL_RANK"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorAddress:
    """Where the coordinator is, and what proves each to the other."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    name: str
    """The worker's name in the coordinator's log."""
    tls: ssl.SSLContext | None = None
    patience_s: float = PATIENCE_S

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class FederatedWorker:
    """Connects, trains and answers. The main thread trains; each connection has a receiving and a sending thread."""

    def __init__(self, address: CoordinatorAddress, device: str, local_rank: int) -> None:
        self._address = address
        self._device, self._local_rank = device, local_rank
        self._config: FedConfig | None = None
        self._trainer: ClientTrainer | None = None
        self._gpu = GpuMeter()
        self._about: dict[str, object] = {}
        self._connection: Connection | None = None
        self._model: tuple[TensorLayout, Weights] | None = None

    def run(self) -> int:
        """Work until the job is over; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave_now)
        while True:
            try:
                connection = self._connect()
            except (HandshakeRefused, ssl.SSLCertVerificationError) as error:
                log.error("%s", self._describe_refusal(error))
                return REFUSED_EXIT
            except OSError as error:
                why = f"no coordinator at {self._address} for {self._address.patience_s:g} s: {error}"
                log.error("%s%s", why, self._tls_hint(error))
                return 1
            self._connection, self._model = connection, None
            try:
                code = self._work(connection)
            except PliantError as error:
                log.error("cannot take part: %s", error)
                connection.send("leave", {"why": f"it cannot take part: {error}"})
                connection.finish(LEAVE_S)
                return REFUSED_EXIT
            finally:
                self._connection = None
                connection.close()
            if code is not None:
                return code

    def _connect(self) -> Connection:
        """Connect to the coordinator and prove the secret; try again for `patience_s`."""
        address = self._address
        deadline_s, pause_s = time.monotonic() + address.patience_s, FIRST_PAUSE_S
        while True:
            try:
                channel = connect_channel(
                    (address.host, address.port),
                    address.secret,
                    purpose=messages.PURPOSE,
                    name=address.name,
                    tls=address.tls,
                    remedy="start this worker with the job's secret",
                )
            except ssl.SSLCertVerificationError:
                raise
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            else:
                connection = Connection(channel, HANDSHAKE_S)
                connection.allow(MAX_MODEL_BYTES)  # the coordinator has proved that it knows the secret
                return connection

    def _work(self, connection: Connection) -> int | None:
        """Do what the coordinator asks; return the exit code, or None if the connection was lost.

        Raises PliantError if this worker cannot take part, and could not the next time.
        """
        inbox = MessageInbox(connection)
        while True:
            message = inbox.next()
            if message is None:
                log.warning("lost the coordinator: %s; waiting for it for %g s", inbox.why, self._address.patience_s)
                return None
            match message.type:
                case "welcome":
                    connection.set_silence(float(message.body.get("silence_s", HANDSHAKE_S)))
                    self._prepare(message.body.get("config"))
                    connection.send("ready", self._about)
                    log.info("ready on %s", self._about["device"])
                case "model":
                    layout = TensorLayout.from_json(message.body.get("layout"))
                    self._model = layout, messages.unpack_model(layout, message.payload)
                case "unit":
                    self._do(connection, int(message.body["id"]), messages.unit_from_json(message.body.get("unit", {})))
                case "over":
                    log.info("the job is over")
                    return 0
                case "refused":
                    log.error("the coordinator at %s: %s", self._address, message.body.get("why"))
                    return REFUSED_EXIT
                case _:
                    raise CommError(f"the coordinator sent {message.type!r:.40}, which no worker expects")

    def _prepare(self, given: object) -> None:
        """Build the job's task, unless this is the same job as before."""
        try:
            config = FedConfig.model_validate(given)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise ConfigError(f"the coordinator's job is not understood: {why}; install one version") from None
        if config == self._config:
            return
        self._trainer = None  # two data sets may not fit into memory
        task = build_task(config)
        self._trainer = ClientTrainer(task, device=choose_device(self._device or config.device, self._local_rank))
        self._config = config
        device = self._trainer.device
        self._gpu = GpuMeter(device)
        self._about = {
            "task": messages.fingerprint(task),
            "device": str(device),
            "device_kind": describe_device(device),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        gc.collect()
        gc.freeze()  # the garbage collector need not look at the task again: that would take longer than a client

    def _do(self, connection: Connection, number: int, unit: Unit) -> None:
        if self._trainer is None or self._model is None:
            raise CommError("the coordinator sent a unit before its model")
        layout, model = self._model
        try:
            body, payload = messages.result_to_json(self._trainer.run(model, unit), layout)
        except Exception as error:
            is_final = isinstance(error, PliantError)  # it would fail on every worker
            log.error("a unit failed", exc_info=not is_final)
            why = str(error) if is_final else f"{type(error).__name__}: {error}"
            connection.send("failed", {"id": number, "why": why, "final": is_final})
        else:
            connection.send("result", {"id": number, "gpu": self._gpu.read(time.monotonic()), **body}, payload)

    def _leave_now(self, number: int, frame: object) -> None:
        """Say goodbye, so that no unit is blamed, and end the process; a signal handler."""
        if (connection := self._connection) is not None:
            connection.send("leave", {"why": "it was told to end"})
            connection.finish(LEAVE_S)
        os._exit(128 + number)

    def _describe_refusal(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the coordinator at {self._address} has another certificate than the job's: {error.verify_message}"
        return f"refused by the coordinator at {self._address}: {error}"

    def _tls_hint(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            return f" (if it speaks no TLS, unset {CA_VARIABLE})"
        return f" (if it wants TLS, set {CA_VARIABLE})" if self._address.tls is None else ""


class MessageInbox:
    """Receives messages of one connection in a thread, so that the next unit is there when one is done."""

    def __init__(self, connection: Connection) -> None:
        self.why = ""
        """Why the connection ended."""
        self._messages: queue.SimpleQueue[FedMessage | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        threading.Thread(target=self._receive, args=(connection,), name="pliant-fed-receive", daemon=True).start()

    def next(self) -> FedMessage | None:
        """Return the next message that is not a cancelled unit; None once the connection has ended."""
        while True:
            message = self._messages.get()
            if message is None or message.type != "unit" or message.body["id"] not in self._cancelled:
                return message
            self._cancelled.discard(message.body["id"])

    def _receive(self, connection: Connection) -> None:
        try:
            while (message := connection.receive()) is not None:
                self.put(message)
            self.why = "the connection was closed"
        except CommError as error:
            self.why = str(error)
        finally:
            self._messages.put(None)

    def put(self, message: FedMessage) -> None:
        """Queue a message. A cancelled unit need not be begun, unless it is given again."""
        if message.type in ("unit", "cancel"):
            number = message.body.get("id")
            if not isinstance(number, int):
                raise CommError(f"a {message.type} without a number")
            if message.type == "cancel":
                self._cancelled.add(number)
                return
            # It may have been begun before it was cancelled, and the mark is then still there.
            self._cancelled.discard(number)
        self._messages.put(message)


def choose_device(wanted: str, local_rank: int) -> str:
    """Share the GPUs of a host evenly among its workers, unless one is named."""
    num_gpus = torch.cuda.device_count() if wanted in ("", "cuda") else 0
    return f"cuda:{local_rank % num_gpus}" if num_gpus else wanted


def parse_address(server: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises ConfigError."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--server {server!r} is not HOST:PORT, such as 10.0.0.1:7400")
    return host.strip("[]"), int(port)


def client_tls(certificates: str) -> ssl.SSLContext | None:
    """Return a context that trusts these certificates (PEM) and no others; None if there are none."""
    if not certificates:
        return None
    try:
        return ssl.create_default_context(cadata=certificates)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{CA_VARIABLE} holds no certificate: {error}; give it in PEM") from None


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s worker: %(message)s", stream=sys.stderr)
    logging.getLogger("pliant").setLevel(logging.INFO)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        prog="python -m pliant.fed.worker", description="Trains clients for a coordinator."
    )
    parser.add_argument("--server", metavar="HOST:PORT", required=True)
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:N; by default as the job says")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a lost coordinator")
    given = parser.parse_args(argv)
    try:
        spec = worker_spec(environ)
        host, port = parse_address(given.server)
        address = CoordinatorAddress(
            host=host,
            port=port,
            secret=spec.secret,
            name=str(spec.worker),
            tls=client_tls(environ.get(CA_VARIABLE, "")),
            patience_s=given.patience,
        )
    except PliantError as error:
        log.error("%s", error)
        return REFUSED_EXIT
    return FederatedWorker(address, given.device, int(environ.get(LOCAL_RANK, "0"))).run()


if __name__ == "__main__":
    sys.exit(main())
