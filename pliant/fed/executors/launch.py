"""Executors, started and kept running: on this machine, on others over ssh, on a Ray cluster.

Whatever carries it, an executor is one process, `python -m pliant.fed.executors.executor --letter`: what it must know, the token
among it, comes through its standard input, whose end is its end. Those that die are started again, with pauses that grow. It makes no
difference to the server whether, where and when: so a launcher may be the server's process or another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pliant.cluster import Host
from pliant.errors import ConfigError, PliantError
from pliant.fed.executors.carriers import Carrier, ProcessCarrier
from pliant.fed.executors.places import Place, Places, parse_workers
from pliant.fed.executors.settings import MODULE, PATIENCE_S, Settings
from pliant.launch import ssh
from pliant.launch.ssh import handed_over, shell_path, ssh_command

if TYPE_CHECKING:
    from pliant.fed.config import FedConfig
    from pliant.fed.executors.pool import Pool

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0
"""Who lived this long is started again at once."""
MAX_QUICK = 5
QUICK_S = 10.0
"""So many ends in a row, each so soon after the start, and it is not started again."""
GRACE_S = 5.0
"""For who is asked to end; then it is killed, and has as long again."""
END_S = 2 * GRACE_S + 2
WRONG = 2
"""The exit code of an executor that cannot take part, and could not the next time."""


class Restarts:
    """When an executor that has ended is started again. Pure."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._num_quick = 0

    def after(self, code: int, lived_s: float) -> float | None:
        """The pause before the next start; None: there is none."""
        self._num_quick = self._num_quick + 1 if lived_s < QUICK_S else 0
        if code in (0, WRONG) or self._num_quick >= MAX_QUICK:
            return None
        pause_s = 0.0 if lived_s >= STEADY_S else self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        return pause_s


@dataclass(eq=False)
class Seat:
    """A place for one executor."""

    rank: int
    place: Place
    settings: Settings
    log: Path
    restarts: Restarts
    carrier: Carrier | None = None
    started_s: float = 0.0
    due_s: float | None = 0.0
    """When it is to be started; None: it runs, or never again."""


class Executors:
    """Some executors of one server. A context manager: they run within the block, and are gone after it.

    However this process ends, its executors end with it.
    """

    def __init__(
        self,
        places: Places,
        *,
        port: int,
        token: str,
        server_host: str = "",
        ca: str = "",
        device: str = "",
        patience_s: float = PATIENCE_S,
        logs: Callable[[int], Path] | None = None,
        python: str = "",
        directory: str = "",
        user: str = "",
        given_up: Callable[[str], None] | None = None,
    ) -> None:
        """`server_host` is the server's name for executors (empty: an address that they can reach); `ca` a file.

        `python` is that of ssh's hosts, and `directory` where executors run; both as here where they are empty. `given_up` is
        called with the reason once none runs and none will be started.
        """
        self._places = places
        self._port, self._server_host = port, server_host
        self._python, self._user = python or sys.executable, user
        self._directory = directory or os.getcwd()
        self._base = Settings(
            server="", token=token, ca=_read(ca) if ca else "", device=device, patience_s=patience_s,
            environ=handed_over(os.environ),
        )  # fmt: skip
        self._logs = logs
        self._tell = given_up
        self._seats: list[Seat] = []
        self._events: queue.SimpleQueue[tuple[Seat, int, str] | None] = queue.SimpleQueue()
        self._stack = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._why = ""
        self._all_ended = threading.Event()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if any(place.kind == "ray" for place in self._places.parts):
                from pliant.fed.executors import on_ray

                wanted = sum(place.count for place in self._places.parts if place.kind == "ray")
                stack.enter_context(on_ray.connected(wanted, self._base.device))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pliant-executors-")))
            self._seats = self._make_seats(self._logs or (lambda rank: folder / f"log_{rank}"))
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._mind, name="pliant-executors", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                log.warning("thread %s has not ended within %g s: it is left", self._thread.name, END_S)
        self._stack.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended by themselves, and will not be started again, within that time."""
        return self._all_ended.wait(timeout_s)

    def given_up(self) -> str:
        """Why none runs, and none will be started; empty as long as one does or will."""
        return self._why

    def _make_seats(self, logs: Callable[[int], Path]) -> list[Seat]:
        seats: list[Seat] = []
        for place in self._places.parts:
            server = self._server_for(place)
            for number in range(place.count):
                rank = len(seats)
                told = replace(
                    self._base,
                    server=f"[{server}]:{self._port}" if ":" in server else f"{server}:{self._port}",
                    name=f"{rank} on {place.host}" if place.kind == "ssh" else f"{rank}",
                    seat=number,
                    directory=self._directory,
                )
                seats.append(Seat(rank, place, told, logs(rank), Restarts()))
        return seats

    def _server_for(self, place: Place) -> str:
        if self._server_host or place.kind == "local":
            return self._server_host or "127.0.0.1"
        if place.kind == "ray":
            from pliant.launch.on_ray import cluster as ray_cluster

            return ray_cluster.own_address()
        return _own_address_towards(place.host)

    # In the thread

    def _mind(self) -> None:
        """Start what is due, until told to stop. The kernel's tie of processes is to this thread."""
        try:
            while True:
                now_s = time.monotonic()
                for seat in self._seats:
                    if seat.due_s is not None and seat.due_s <= now_s:
                        self._start(seat)
                due = [seat.due_s for seat in self._seats if seat.due_s is not None]
                try:
                    event = self._events.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
                except queue.Empty:
                    continue
                if event is None:
                    break
                self._ended(*event)
        except Exception as error:
            log.exception("the launcher of executors has failed")
            self._give_up(repr(error))
        finally:
            self._end_all()

    def _start(self, seat: Seat) -> None:
        seat.due_s, seat.started_s = None, time.monotonic()
        try:
            seat.log.parent.mkdir(parents=True, exist_ok=True)
            seat.carrier = carrier = self._carry(seat)
        except (OSError, PliantError) as error:
            self._events.put((seat, WRONG, f"cannot be started: {error}"))
            return
        name = f"executor-{seat.rank}"
        threading.Thread(target=lambda: self._events.put((seat, *carrier.wait())), name=name, daemon=True).start()

    def _carry(self, seat: Seat) -> Carrier:
        letter = seat.settings.to_line()
        if seat.place.kind == "ray":
            from pliant.fed.executors.on_ray import RayCarrier

            return RayCarrier(letter, seat.log, seat.settings.device)
        # -P: a file of the user's that is called as one of ours is not taken for it.
        command = [sys.executable, "-P", "-m", MODULE, "--letter"]
        if seat.place.kind == "ssh":
            remote = f"exec {shell_path(self._python)} -P -m {MODULE} --letter"
            command = ssh_command(Host(seat.place.host), self._user, remote, os.environ)
        return ProcessCarrier(command, letter, seat.log)

    def _ended(self, seat: Seat, code: int, why: str) -> None:
        seat.carrier = None
        pause_s = seat.restarts.after(code, time.monotonic() - seat.started_s)
        if pause_s is not None:
            seat.due_s = time.monotonic() + pause_s
        if not any(each.carrier or each.due_s is not None for each in self._seats):
            self._all_ended.set()
        if code != 0:
            then = "it is not started again" if pause_s is None else f"starting it again in {pause_s:g} s"
            hint = _hint(seat.place, code, why)
            log.warning("executor %s ended: %s%s; %s", seat.settings.name, why, hint, then)
            if self._all_ended.is_set():
                self._give_up(f"no executor runs any more, the last one ended: {why}{hint} (see {seat.log})")

    def _give_up(self, why: str) -> None:
        self._why = why
        if self._tell is not None:
            self._tell(why)

    def _end_all(self) -> None:
        running = [seat for seat in self._seats if seat.carrier is not None]
        for seat in running:
            assert seat.carrier is not None, "filtered above"
            seat.carrier.end()
        running = self._ended_within(GRACE_S, running)
        for seat in running:
            assert seat.carrier is not None, "it has not ended"
            seat.carrier.kill()
        for seat in self._ended_within(GRACE_S, running):
            pid = getattr(seat.carrier, "pid", None)
            which = f"executor {seat.settings.name}" + ("" if pid is None else f" (process {pid})")
            log.warning("%s was killed, and has not ended within %g s: it is left", which, GRACE_S)

    def _ended_within(self, limit_s: float, running: list[Seat]) -> list[Seat]:
        """Wait for their ends; those that have not ended by then."""
        deadline_s = time.monotonic() + limit_s
        while running:
            try:
                event = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            if event is not None:
                event[0].carrier = None
                running = [seat for seat in running if seat is not event[0]]
        return running


def _hint(place: Place, code: int, why: str) -> str:
    if "No module named 'pliant" in why or (place.kind == "ssh" and code in ssh.NOT_STARTED):
        return "; install pliant there with `pliant remote-install`, or name the Python that has it"
    if place.kind == "ssh" and code == ssh.SSH_FAILED:
        return f"; `ssh {place.host} true` must work without a question"
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"certificates {path!r}: {error}; give a readable PEM file") from None


def _own_address_towards(host: str) -> str:
    """The address from which this machine reaches `host`; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"workers: {host!r} cannot be reached: {why}; `ssh {host} true` must work") from None


@contextlib.contextmanager
def opened(
    config: FedConfig,
    workers: int | str | Sequence[str | int],
    *,
    logs: Callable[[int], Path] | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    ca: str = "",
    server_host: str = "",
    port: int = 0,
    user: str = "",
) -> Iterator[Pool]:
    """A pool and its executors, for a job in this process; the pool listens at `port`, and ssh logs in as `user`."""
    from pliant.fed.executors.pool import Pool, server_tls

    places = parse_workers(workers)
    token = secrets.token_hex(16)
    tls = server_tls(tls_cert, tls_key) if tls_cert else None
    with Pool(config, host=places.listen, port=port, token=token, tls=tls) as pool:
        launched = Executors(
            places,
            port=pool.port,
            token=token,
            server_host=server_host,
            ca=ca or tls_cert,
            device=config.device,
            logs=logs,
            user=user,
            given_up=pool.fail,
        )
        with launched:
            yield pool
            pool.close(over=True)
            launched.wait(GRACE_S)  # they end by themselves
