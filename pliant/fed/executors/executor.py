"""A process that trains clients for a server: `python -m pliant.fed.executors.executor --server HOST:PORT --token-file FILE`.

It builds the job's task from the config that the server sends, does unit after unit, and keeps nothing: killed at any
moment, all that is lost is the unit in its hands, which another does again. A server that is gone is waited for.
With `--letter` it is told all through its standard input, as one line of JSON, and ends when that input ends: so a
secret is on no command line, and a launcher or an ssh connection that is lost leaves nothing running.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from pliant.errors import CommError, ConfigError, PliantError
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.executors import parcels
from pliant.fed.executors.mail import REFUSED, Address, End, Letter, Mail
from pliant.fed.executors.settings import PATIENCE_S, Settings, check_token
from pliant.fed.executors.wire import Frame, Kind
from pliant.fed.trainer import ClientTrainer, describe_device
from pliant.fed.work import Unit, Weights

log = logging.getLogger("pliant.fed.executors.executor")  # by its name, also where it is the program


class Executor:
    """The main thread's part: takes letters, trains, answers."""

    def __init__(self, mail: Mail, device: str, seat: int) -> None:
        self._mail = mail
        self._device, self._seat = device, seat
        self._config: FedConfig | None = None
        self._trainer: ClientTrainer | None = None
        self._about: dict[str, Any] = {}
        self._model: tuple[parcels.TensorLayout, Weights] | None = None

    def work(self) -> int:
        """Until the end; the exit code."""
        while True:
            letter = self._mail.inbox.get()
            if isinstance(letter, End):
                (log.error if letter.code else log.info)("%s", letter.why)
                return letter.code
            if letter.connection != self._mail.connection:
                continue
            try:
                self._answer(letter)
            except PliantError as error:
                log.error("cannot take part: %s", error)
                self._mail.leave(f"it cannot take part: {error}")
                return REFUSED

    def _answer(self, letter: Letter) -> None:
        match letter.frame.kind:
            case Kind.WELCOME:
                self._prepare(letter.frame)
                self._mail.send(letter.connection, Kind.READY, self._about)
                log.info("ready on %s", self._about["device"])
            case Kind.MODEL:
                layout = parcels.TensorLayout.from_json(letter.frame.body.get("layout"))
                self._model = layout, parcels.unpacked(layout, letter.frame.payload)
            case Kind.UNIT:
                number = int(letter.frame.body.get("id", -1))
                if (letter.connection, number) in self._mail.cancelled:
                    self._mail.cancelled.discard((letter.connection, number))
                else:
                    self._do(letter.connection, number, parcels.unit_from_json(letter.frame.body.get("unit", {})))
            case _:
                raise CommError(f"the server sent {letter.frame.kind.name}, which no executor expects")

    def _prepare(self, welcome: Frame) -> None:
        """The job's task, built anew only where this is another job than before."""
        try:
            config = FedConfig.model_validate(welcome.body.get("config"))
        except ValidationError as error:
            raise ConfigError(
                f"the server's job is not understood: {error.errors()[0]['msg']}; install one version"
            ) from None
        if config == self._config:
            return
        self._trainer = None  # two data sets may not fit
        task = build_task(config)
        self._trainer = ClientTrainer(task, device=own_device(self._device or config.device, self._seat))
        self._config = config
        device = self._trainer.device
        self._about = {"task": fingerprint(task), "device": str(device), "kind": describe_device(device)}
        gc.collect()
        gc.freeze()  # what stays need not be looked at again: it would take longer than a client

    def _do(self, connection: int, number: int, unit: Unit) -> None:
        if self._trainer is None or self._model is None:
            raise CommError("the server sent a unit before its model")
        layout, model = self._model
        try:
            body, payload = parcels.done_to_json(self._trainer.run(model, unit), layout)
        except Exception as error:
            is_final = isinstance(error, PliantError)  # it would be the same everywhere
            log.error("a unit failed", exc_info=not is_final)
            why = str(error) if is_final else f"{type(error).__name__}: {error}"
            self._mail.send(connection, Kind.FAILED, {"id": number, "why": why, "final": is_final})
        else:
            self._mail.send(connection, Kind.RESULT, {"id": number, **body}, payload)


def own_device(wanted: str, seat: int) -> str:
    """Executors of one host share its GPUs evenly, where none is named."""
    num_gpus = torch.cuda.device_count() if wanted in ("", "cuda") else 0
    return f"cuda:{seat % num_gpus}" if num_gpus else wanted


def fingerprint(task: Task) -> str:
    """What must be alike on all executors: whose samples are whose, their labels, and the initial model."""
    digest = hashlib.sha256()
    for array in (task.sizes, task.partition.order, task.train.labels.numpy(), task.test.labels.numpy()):
        digest.update(np.ascontiguousarray(array).tobytes())
    layout, payload = parcels.packed(Weights.of(task.model()))
    digest.update(json.dumps(layout.to_json()).encode())
    digest.update(payload.numpy().data)
    return digest.hexdigest()


def address_of(settings: Settings) -> Address:
    host, port = settings.place()
    return Address(
        host=host,
        port=port,
        token=check_token(settings.token, "--token-file"),
        ca=settings.ca,
        patience_s=settings.patience_s,
        name=settings.name or f"{socket.gethostname()}-{os.getpid()}",
    )


def read_file(path: str, flag: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path!r}: {error}; give a readable file") from None


def parse(argv: Sequence[str]) -> Settings:
    """The flags; with --letter, the standard input, which is watched from then on.

    Raises:
        ConfigError: a file cannot be read, or is not what it should be.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pliant.fed.executors.executor", description="Trains clients for a server."
    )
    parser.add_argument("--letter", action="store_true", help="read all from the standard input, and end with it")
    parser.add_argument("--server", metavar="HOST:PORT", default="")
    parser.add_argument("--token-file", metavar="FILE", default="")
    parser.add_argument("--ca", metavar="FILE", default="", help="certificates that the server's must be signed by")
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:N; as the job says where it is not given")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, metavar="SECONDS", help="to wait for a lost server"
    )
    parser.add_argument("--name", default="")
    given = parser.parse_args(argv)
    if given.letter:
        settings = Settings.from_line(_read_line(0))
        threading.Thread(target=_end_with_input, name="input", daemon=True).start()
        return settings
    if not given.server or not given.token_file:
        raise ConfigError("an executor needs --server HOST:PORT and --token-file FILE")
    return Settings(
        server=given.server,
        token=read_file(given.token_file, "--token-file").strip(),
        ca=read_file(given.ca, "--ca") if given.ca else "",
        device=given.device,
        patience_s=given.patience,
        name=given.name,
    )


def _read_line(descriptor: int) -> bytes:
    """Without a buffer of Python's, whose lock another thread must not hold at the program's end."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(descriptor, 65536)):
        line += data
    return line


def _end_with_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _go_to(directory: str) -> None:
    if os.path.isdir(directory):
        os.chdir(directory)
    else:
        log.warning("there is no folder %s here: staying in %s", directory, os.getcwd())


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s executor: %(message)s", stream=sys.stderr)
    logging.getLogger("pliant").setLevel(logging.INFO)
    torch.set_num_threads(1)
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        os.environ.update(settings.environ)
        if settings.directory:
            _go_to(os.path.expanduser(settings.directory))
        mail = Mail(address_of(settings))
    except (PliantError, OSError) as error:
        log.error("%s", error)
        return REFUSED
    mail.end_on_signals()
    mail.start()
    return Executor(mail, settings.device, settings.seat).work()


if __name__ == "__main__":
    sys.exit(main())
