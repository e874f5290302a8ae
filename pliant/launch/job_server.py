"""The config server of a job as a process of its own, which the first host's runner starts, watches and starts again.

The runner binds the socket and keeps it: whoever connects while the server is away waits in its backlog, and the address
stays the same. The state is in a private folder on the disk, so that a server that was killed has forgotten nothing.

The server outlives a runner that was killed, because runners and workers on other hosts still need it. It then ends by
itself: soon, if all workers of the job were on this host or the job is over, else when nobody has asked for long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pliant.cluster import Host, PortRange, Worker
from pliant.elastic.membership import ElasticState, Limits
from pliant.elastic.store import IN_MEMORY
from pliant.errors import ConfigError
from pliant.launch.addresses import listen_on
from pliant.launch.worker_ends import describe_exit

log = logging.getLogger(__name__)

MODULE = "pliant.launch.job_server"
FILE = "server.sqlite"
STEADY_S = 2.0
"""A server that lived this long is started again at once, another after `RESTART_S`."""
RESTART_S = 1.0
END_S = 5.0
LONELY_S = 3.0
"""A server whose runner was killed ends after this long, if no worker of the job was on another host."""
UNASKED_S = 60.0
"""A server whose runner was killed ends if nobody has followed it for this long; after the job, `LONELY_S` is enough."""
CHECK_S = 0.2
BEAT_S = 1.0
"""How often the server tells its runner that it lives, by an empty line in its log."""
SILENT_S = 4.0
"""A server that has not done so for this long is frozen, and is killed."""
START_S = 60.0
"""How long its start may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobServerOrder:
    """What the process of the server is told, as one line of JSON in its stdin: no command line shows the token."""

    listener: int
    """The descriptor of the socket that it inherits."""
    host: str
    """The address of this host in the job."""
    port: int
    slots: Mapping[str, int]
    """The slots of each host."""
    ports: str
    """The ports that new workers may have, as `PortRange` reads them."""
    token: str
    folder: str
    """Where the state is kept; empty: in memory. Whoever ends the server removes it."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> JobServerOrder:
        return cls(**json.loads(line))

    @property
    def limits(self) -> Limits:
        return Limits(hosts=tuple(Host(*each) for each in self.slots.items()), ports=PortRange.parse(self.ports))


# --- the runner's end ---


class JobServer:
    """The config server of the job that this runner is the head of. A context manager; it can be reached at once.

    Raises (from `with`):
        ConfigError: the address or the port cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: Limits,
        token: str,
        environ: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """`folder` is where a folder for the state is made; None keeps the state in memory."""
        self._host, self._port, self._limits, self._token = host, port, limits, token
        self._environ, self._parent = environ, folder
        self._folder = ""
        self._listener: socket.socket
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="pliant-config-server", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on; known in the block."""
        return self._port

    @property
    def url(self) -> str:
        """Where runners and workers reach it, on all hosts."""
        return f"http://{Worker(self._host, self._port)}/config"

    def __enter__(self) -> JobServer:
        try:
            self._listener = listen_on(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"{self._host}, port {self._port}: {error.strerror}; give a free port (0 finds one) and an address of this "
                "machine"
            ) from None
        self._port = self._listener.getsockname()[1]
        self._folder = self._make_folder()
        try:
            self._start()
        except OSError as error:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(f"the config server cannot be started: {error.strerror}; free resources") from None
        self._watching.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the server, and remove its state: the job is over."""
        with self._lock:
            self._closing.set()
            if self._popen is not None:
                self._popen.terminate()
        self._watching.join(END_S)
        if self._watching.is_alive() and self._popen is not None:
            self._popen.kill()
            self._watching.join(END_S)
        self._listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> str:
        """Return a new folder that only its owner can read; empty if there can be none."""
        if self._parent is None:
            return ""
        try:
            self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._parent)
        except OSError as error:
            log.warning(
                "%s: %s; should the config server be killed, the workers will tell it who trains",
                self._parent,
                error.strerror,
            )
            return ""

    def _start(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            order = JobServerOrder(
                listener=self._listener.fileno(),
                host=self._host,
                port=self._port,
                slots={host.address: host.slots for host in self._limits.hosts},
                ports=str(self._limits.ports),
                token=self._token,
                folder=self._folder,
            )
            # -P: the program's own folder may hold modules with the names of those that the server needs.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                env=dict(self._environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(self._listener.fileno(),),
                start_new_session=True,  # a Ctrl-C in the terminal is for the runner, which ends it in order
            )
            assert self._popen.stdin is not None
            # The pipe stays open: by its end the server notices that this runner was killed.
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.write(order.to_line())
                self._popen.stdin.flush()

    def _watch(self) -> None:
        """Show what the server logs, and start it again when it ends. Runs in a thread."""
        while not self._closing.is_set():
            popen, begun_s = self._popen, time.monotonic()
            assert popen is not None, "the watch begins with a process"
            assert popen.stdin is not None
            assert popen.stderr is not None
            with popen.stderr, popen.stdin:
                if not _relay(popen.stderr.fileno()):
                    log.warning("the config server is frozen: it has shown no sign of life for %g s", SILENT_S)
                    popen.kill()
                code = popen.wait()
            if self._closing.wait(0.0 if time.monotonic() - begun_s >= STEADY_S else RESTART_S):
                return
            log.warning("the config server has ended (%s): starting it again; the job goes on", describe_exit(code))
            while not self._closing.is_set():
                try:
                    self._start()
                    break
                except OSError as error:
                    log.warning("the config server cannot be started: %s; trying again", error.strerror)
                    self._closing.wait(RESTART_S)


def _relay(pipe: int) -> bool:
    """Show what the server logs in the runner's own log; return true once it has ended, and false if it is silent."""
    ready, pending, wait_s = select.poll(), b"", START_S
    ready.register(pipe, select.POLLIN)
    while ready.poll(1000 * wait_s):
        data = os.read(pipe, 1 << 16)
        if not data:
            return True
        wait_s = SILENT_S
        *lines, pending = (pending + data).split(b"\n")
        for line in filter(None, lines):
            text = line.decode(errors="backslashreplace")
            name, _, rest = text.partition(" ")
            level = logging.getLevelNamesMapping().get(name)
            log.log(level or logging.WARNING, "%s", rest if level else text)
    return False


# --- the server's end ---


def patience_s(state: ElasticState, host: str) -> tuple[float, bool]:
    """Return how long a server stays whose runner, on `host`, was killed, and whether that begins anew with each request.

    The workers on `host` have ended with the runner. Only workers on other hosts can still need the server.
    """
    workers = {*state.wanted.workers, *state.membership.members}
    if all(worker.host == host for worker in workers) and not state.membership.over:
        return LONELY_S, False
    return (LONELY_S if state.membership.over else UNASKED_S), True


def serve(order: JobServerOrder, runner: BinaryIO) -> None:
    """Serve until SIGTERM, or until the runner, who holds the other end of the pipe `runner`, is gone and nobody is left."""
    from pliant.elastic.server import ConfigServer, ServerConfig

    state = str(Path(order.folder) / FILE) if order.folder else IN_MEMORY
    config = ServerConfig(
        host=order.host, port=order.port, limits=order.limits, token=order.token, state=state, durable=False
    )
    server = ConfigServer(config)
    orphaned = threading.Event()
    with socket.socket(fileno=order.listener) as listener, server.running(listener):
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        threading.Thread(target=_await_end, args=(runner, orphaned), name="runner", daemon=True).start()
        orphaned_s: float | None = None
        beat_s = 0.0
        while not server.wait(CHECK_S):
            now_s = time.monotonic()
            if not orphaned.is_set():
                if now_s >= beat_s + BEAT_S:
                    beat_s = now_s
                    with contextlib.suppress(OSError):  # it does not read, or is gone
                        os.write(2, b"\n")
                continue
            orphaned_s = now_s if orphaned_s is None else orphaned_s
            wait_s, is_renewed = patience_s(server.state, order.host)
            if now_s - (max(orphaned_s, server.asked_s) if is_renewed else orphaned_s) >= wait_s:
                break
    if orphaned.is_set() and order.folder:
        shutil.rmtree(order.folder, ignore_errors=True)


def _await_end(pipe: BinaryIO, ended: threading.Event) -> None:
    while pipe.read(1):
        continue
    ended.set()


def main() -> None:
    # The runner ends the server. What the terminal sends it, as when a connection is lost, is not for the server.
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    # Who reads the log may be frozen, or gone: nobody who asks the server shall wait for that.
    os.set_blocking(2, False)
    logging.raiseExceptions = False
    with open(0, "rb", buffering=0) as runner:
        serve(JobServerOrder.from_line(runner.readline()), runner)
        os._exit(0)  # at once: a thread still waits for the runner's end


if __name__ == "__main__":
    main()
