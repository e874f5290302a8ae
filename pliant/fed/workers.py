"""Starts the workers of a federated job with `pliant run`: on this machine, on other hosts over ssh, on a Ray cluster.

`pliant run -w --independent` starts the processes, gives each its identity and the secret, replaces those that crash, and
ends all of them however this process ends. There is one such run for this machine, one for each ssh host, and one for Ray.
Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pliant import child
from pliant.cluster import Host
from pliant.errors import ENDED_EXIT, REFUSED_EXIT, ConfigError

if TYPE_CHECKING:
    from pliant.fed.config import FedConfig
    from pliant.fed.coordinator import Coordinator

log = logging.getLogger(__name__)

PLIANT = (sys.executable, "-P", "-c", "from pliant.cli.main import main; main()")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_WORKERS = 4096
"""Workers in one place: a greater number is a typing error."""
MAX_QUICK_ENDS, QUICK_S = 3, 30.0
"""A run that ends this often in a row, each time this soon after its start, is not started again."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
NOT_AGAIN = (0, 2, REFUSED_EXIT, ENDED_EXIT)
"""Exit codes of a run that has finished, that somebody has ended, or that would fail again: wrong options, or workers that cannot
take part."""
GRACE_S = 5.0
"""From SIGTERM to SIGKILL for workers."""
END_S = GRACE_S + 5.0
"""From SIGTERM to SIGKILL for a run, which ends its workers first."""
TAIL_BYTES = 4096


# --- places ---


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where some workers run."""

    kind: str
    """local, ssh or ray."""
    host: str
    count: int


@dataclass(frozen=True, slots=True)
class WorkerPlaces:
    """Where all workers of a job run."""

    parts: tuple[WorkerPlace, ...]

    @property
    def count(self) -> int:
        return sum(place.count for place in self.parts)

    @property
    def listen(self) -> str:
        """The address at which the coordinator must listen."""
        return "127.0.0.1" if all(place.kind == "local" for place in self.parts) else "0.0.0.0"


def parse_workers(given: int | str | Sequence[str | int]) -> WorkerPlaces:
    """Parse `2`, `ray:4`, `10.0.0.1:2`, or a list of such."""
    listed: list[str | int] = [given] if isinstance(given, int | str) else list(given)
    parts = [_parse_place(each) for each in listed]
    if not parts:
        raise ConfigError("workers: the list is empty; give a number, host:n, or ray:n")
    return WorkerPlaces(tuple(parts))


def _parse_place(given: str | int) -> WorkerPlace:
    text = str(given).strip()
    if text.removeprefix("-").isdecimal():
        if int(text) < 0:
            raise ConfigError(f"workers: {text!r} is no number of workers: give 0 or more, host:n, or ray:n")
        place = WorkerPlace("local", "localhost", int(text))
    elif text.partition(":")[0] == "ray":
        count = text.partition(":")[2] or "1"
        place = WorkerPlace("ray", "ray", int(count) if count.isdecimal() else 0)
    else:
        try:
            host = Host.parse(text)
        except ConfigError as error:
            why = str(error).removeprefix("-H: ")
            raise ConfigError(f"workers: {why}; give a number, host:n, or ray:n") from None
        place = WorkerPlace("local" if host.address in LOCAL_NAMES else "ssh", host.address, host.slots)
    if not 1 <= place.count <= MAX_WORKERS:
        raise ConfigError(f"workers: {text!r} is no number of workers: give 1 to {MAX_WORKERS}, host:n, or ray:n")
    return place


def run_commands(
    places: WorkerPlaces,
    *,
    port: int,
    secret_file: Path,
    server_host: str = "",
    device: str = "",
    directory: str = "",
    user: str = "",
) -> list[list[str]]:
    """Return the `pliant run` commands that start the workers of all places.

    `server_host` is the coordinator's address for workers; if it is empty, an address that they can reach is found.
    """
    totals: dict[tuple[str, str], int] = {}
    for place in places.parts:
        key = (place.kind, "" if place.kind == "local" else place.host)
        totals[key] = totals.get(key, 0) + place.count
    return [
        [
            *(*PLIANT, "run", "-w", "--independent", "-q", "-np", str(count)),
            *("--secret-file", str(secret_file), "-grace", f"{GRACE_S:g}s"),
            *_place_options(kind, host, count, device, directory, user),
            *(sys.executable, "-P", "-m", "pliant.fed.worker"),
            *("--server", _server_address(kind, host, server_host, port)),
            *(("--device", device) if device else ()),
        ]
        for (kind, host), count in totals.items()
    ]


def _place_options(kind: str, host: str, count: int, device: str, directory: str, user: str) -> tuple[str, ...]:
    if kind == "ssh":
        bracketed = f"[{host}]" if ":" in host else host
        login = ("-u", user) if user else ()
        return ("--ssh", "-H", f"{bracketed}:{count}", "--remote-dir", directory or os.getcwd(), *login)
    if kind == "ray":
        gpus = ("--devices", f"gpu={count}") if device.startswith("cuda") else ()
        return ("--on", "ray", "--ray-address", os.environ.get("RAY_ADDRESS") or "auto", *gpus)
    return ()


def _server_address(kind: str, host: str, server_host: str, port: int) -> str:
    if not server_host:
        server_host = "127.0.0.1" if kind == "local" else own_address_towards(host if kind == "ssh" else _ray_host())
    return f"[{server_host}]:{port}" if ":" in server_host else f"{server_host}:{port}"


def _ray_host() -> str:
    return os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")[0] or socket.gethostname()


def own_address_towards(host: str) -> str:
    """Return the address from which this machine reaches `host`; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"workers: {host!r} cannot be reached: {why}; check its name, and that `ssh {host} true` or RAY_ADDRESS works"
        ) from None


# --- processes ---


class RunRestarts:
    """Decides when a run that has ended is started again, such as after a lost ssh connection. Pure."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._num_quick = 0

    def after(self, code: int, lived_s: float) -> float | None:
        """Return the pause before the next start; None: it is not started again."""
        self._num_quick = self._num_quick + 1 if lived_s < QUICK_S else 0
        if code in NOT_AGAIN or self._num_quick >= MAX_QUICK_ENDS:
            return None
        pause_s = 0.0 if lived_s >= QUICK_S else self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        return pause_s


class WorkerProcesses:
    """The workers of one coordinator. A context manager: they run within the block, and are gone after it."""

    def __init__(
        self,
        places: WorkerPlaces,
        *,
        port: int,
        secret: bytes,
        server_host: str = "",
        ca: str = "",
        device: str = "",
        log: Path | None = None,
        directory: str = "",
        user: str = "",
        given_up: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`ca` is a PEM file that the coordinator's certificate must be signed by, `log` the file for all output.

        `given_up` is called with the reason once no worker runs and none will be started.
        """
        self._places, self._port, self._secret = places, port, secret
        self._options = {"server_host": server_host, "device": device, "directory": directory, "user": user}
        self._directory = directory or os.getcwd()
        self._environ = {**os.environ, **({"PLIANT_FED_CA": _read_pem(ca)} if ca else {})}
        self._log, self._given_up = log, given_up
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._num_kept = 0
        """Runs that go on, or will be started again."""
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._folder = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pliant-fed-")))
            secret_file = folder / "secret"
            with open(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self._secret.hex())
            self._log = self._log or folder / "log"
            self._log.parent.mkdir(parents=True, exist_ok=True)
            commands = run_commands(self._places, port=self._port, secret_file=secret_file, **self._options)
            self._folder = stack.pop_all()
        self._num_kept = len(commands)
        self._threads = [
            threading.Thread(target=self._keep_running, args=(number, command), name="pliant-fed-workers", daemon=True)
            for number, command in enumerate(commands)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if not self.wait(END_S):
            self._signal(signal.SIGKILL)
            self.wait(END_S)
        self._folder.close()

    def wait(self, timeout_s: float) -> bool:
        """Return whether all runs have ended, and will not be started again, within that time."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _signal(self, number: int) -> None:
        with self._lock:
            for process in self._running.values():
                if process.poll() is None:
                    process.send_signal(number)

    def _keep_running(self, number: int, command: list[str]) -> None:
        """Start one run, again if need be. The kernel ends it with this thread, however this process ends."""
        restarts, why = RunRestarts(), ""
        pause_s: float | None = 0.0
        while pause_s is not None and not self._stopping.wait(pause_s):
            began_s = time.monotonic()
            code, why = self._run(number, command)
            pause_s = restarts.after(code, time.monotonic() - began_s)
            if code and not self._stopping.is_set():
                then = "they are not started again" if pause_s is None else f"starting them again in {pause_s:g} s"
                log.warning("workers ended with exit code %d: %s; %s", code, why, then)
        with self._lock:
            self._num_kept -= 1
            is_last = not self._num_kept and not self._stopping.is_set()
        if is_last and why:
            self._given_up(f"no worker runs any more: {why} (see {self._log})")

    def _run(self, number: int, command: list[str]) -> tuple[int, str]:
        """Run a command to its end; return its exit code and the last line that it wrote."""
        assert self._log is not None, "set on entry"
        with self._log.open("ab") as output:
            begin = output.tell()
            with self._lock:
                process = self._running[number] = subprocess.Popen(
                    [sys.executable, "-I", child.__file__, str(os.getpid()), *command],
                    cwd=self._directory,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the workers in order
                )
                if self._stopping.is_set():
                    process.terminate()
            code = process.wait()
        return code, last_line(self._log, begin) if code else ""


def last_line(path: Path, begin: int = 0) -> str:
    """Return the last line after the first `begin` bytes of a file that is neither empty nor mere information ([I])."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip() and not line.startswith("[I]")), "")


def _read_pem(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"certificates {path!r}: {error}; give a readable PEM file") from None


@contextlib.contextmanager
def coordinator_with_workers(
    config: FedConfig,
    workers: int | str | Sequence[str | int],
    *,
    log: Path | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    server_host: str = "",
    port: int = 0,
    user: str = "",
) -> Iterator[Coordinator]:
    """Run a coordinator in this process, and its workers, within the block.

    It listens at `port` (0: a free one); `server_host` is its address for workers elsewhere (empty: found). Workers trust
    `tls_cert` and no other certificate. ssh logs in as `user`. All output of the workers goes to the file `log`.
    """
    from pliant.fed.coordinator import Coordinator, server_tls

    places, secret = parse_workers(workers), secrets.token_bytes(32)
    tls = server_tls(tls_cert, tls_key) if tls_cert else None
    with Coordinator(config, host=places.listen, port=port, secret=secret, tls=tls) as coordinator:
        processes = WorkerProcesses(
            places,
            port=coordinator.port,
            secret=secret,
            server_host=server_host,
            ca=tls_cert,
            device=config.device,
            log=log,
            user=user,
            given_up=coordinator.fail,
        )
        with processes:
            yield coordinator
            coordinator.close(over=True)
            processes.wait(GRACE_S)  # workers end by themselves, and so do their runs
