"""Minds a detached federated job: `python -m pliant.fed.jobs.keeper FOLDER [LOCK]`.

Starts the server and the executors, starts a server that was killed again from its checkpoint, and writes down how the job
ended. LOCK is an open, locked descriptor, inherited from whoever submitted the job: as long as it is held, the job is
minded. Without it the keeper takes the lock itself; who does not get it writes nothing, and exits with 2. However this
process ends, server and executors end with it; `pliant submit --resume NAME` starts another.

SIGTERM: the job ends after the round that it is in, or after GRACE_S. SIGINT: at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pliant import child
from pliant.errors import ConfigError, PliantError
from pliant.fed.jobs.folders import JobFolder, State, one_line
from pliant.fed.jobs.job import FedJob
from pliant.fed.workers import WorkerProcesses, last_line
from pliant.launch import guardian, signals
from pliant.launch.processes import Guardian, script

GRACE_S = 30.0
MAX_VAIN = 5
"""So many times a server may be killed without a new checkpoint."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 3.0
PORT_S = 0.02
"""How often it is looked for where the server listens, until it does."""
STOPPED = 75
"""As `server` has it, which imports torch."""

Event = tuple[str, int | str]
"""("server", its exit code), ("signal", its number) or ("executors", why there will be none)."""


def say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True)


@dataclass(slots=True)
class Restarts:
    """Whether a server that was killed is started again. Pure."""

    checkpoint_s: float = 0.0
    """Of the last one that was there when a server was killed."""
    vain: int = 0
    """How often in a row servers were killed without a new one."""

    def after(self, checkpoint_s: float) -> float | None:
        """The pause before the next start; None: there is none, it would be killed again."""
        self.vain = 1 if checkpoint_s > self.checkpoint_s else self.vain + 1
        self.checkpoint_s = checkpoint_s
        if self.vain >= MAX_VAIN:
            return None
        return 0.0 if self.vain == 1 else min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**self.vain)


class Keeper:
    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._job: FedJob = folder.job()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._server: subprocess.Popen[bytes] | None = None
        self._stop_by_s: float | None = None
        """When a job that was told to stop is ended."""
        self._is_staffed = self._job.ground.places is None
        """Whether the executors, if some are wanted, are being started."""
        self._restarts = Restarts()

    def keep(self) -> tuple[State, int, str]:
        """Until the job has ended: how."""
        with signals.handed_to(lambda number: self._events.put(("signal", number))), contextlib.ExitStack() as stack:
            self._folder.note_keeper()  # from now on it can be told to stop
            mark = secrets.token_hex(8)
            stack.enter_context(Guardian(mark, os.environ))
            os.environ[guardian.MARK] = mark  # whoever is started from here can be found, and ended
            self._write_token()
            (self._folder.path / "port").unlink(missing_ok=True)
            stack.callback(self._kill_server)
            self._start_server()
            return self._mind(stack)

    def _mind(self, stack: contextlib.ExitStack) -> tuple[State, int, str]:
        while True:
            if not self._is_staffed and self._stop_by_s is None and (port := self._port()) is not None:
                stack.enter_context(self._executors(port))
                self._is_staffed = True
            left_s = None if self._stop_by_s is None else max(0.0, self._stop_by_s - time.monotonic())
            if not self._is_staffed:
                left_s = PORT_S if left_s is None else min(left_s, PORT_S)
            try:
                kind, what = self._events.get(timeout=left_s)
            except queue.Empty:
                if self._stop_by_s is None or time.monotonic() < self._stop_by_s:
                    continue
                self._kill_server()
                return "stopped", 128 + signal.SIGTERM, "ended in the midst of a round"
            if kind == "signal" and what == signal.SIGINT:
                self._kill_server()
                return "stopped", 128 + signal.SIGKILL, "ended at once"
            if kind == "signal" and self._stop_by_s is None:
                # Without executors there is no round to wait for.
                self._stop_by_s = time.monotonic() + (GRACE_S if self._is_staffed else 0.0)
                self._signal(signal.SIGTERM)
            elif kind == "executors":
                self._kill_server()
                return "failed", 1, str(what)
            elif kind == "server" and (end := self._server_ended(int(what))) is not None:
                return end

    def _server_ended(self, code: int) -> tuple[State, int, str] | None:
        """How the job ended with it; None: it was killed, and another goes on."""
        if code == 0:
            return "finished", 0, ""
        if code == STOPPED:
            return "stopped", 0, "after its round"
        if self._stop_by_s is not None:
            return "stopped", 0, "ended in the midst of a round"
        why = last_line(self._folder.log)
        if code > 0:
            return "failed", code, why.removeprefix("pliant: ")
        pause_s = self._restarts.after(self._checkpoint_time())
        if pause_s is None:
            return "failed", 1, f"its server was killed (signal {-code}) {MAX_VAIN} times without getting any further"
        say(f"the server was killed (signal {-code}); it goes on {self._folder.begin} in {pause_s:g} s")
        time.sleep(pause_s)
        self._start_server()
        return None

    def _checkpoint_time(self) -> float:
        try:
            return self._folder.checkpoint.stat().st_mtime
        except OSError:
            return 0.0

    # --- processes ---

    def _start_server(self) -> None:
        command = [sys.executable, "-P", "-m", "pliant.fed.jobs.server", str(self._folder.path)]
        # The kernel ends it with this thread, which is the main one.
        server = subprocess.Popen(
            [*script(child.__file__), str(os.getpid()), *command], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._server = server
        self._folder.write("server.json", {"pid": server.pid})
        threading.Thread(
            target=lambda: self._events.put(("server", server.wait())), name="pliant-server", daemon=True
        ).start()

    def _signal(self, number: int) -> None:
        if self._server is not None and self._server.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._server.send_signal(number)

    def _kill_server(self) -> None:
        if self._server is not None:
            guardian.kill_group(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _port(self) -> int | None:
        """Where the server listens; None: it does not yet."""
        try:
            return int((self._folder.path / "port").read_text())
        except FileNotFoundError:
            return None

    def _executors(self, port: int) -> WorkerProcesses:
        ground = self._job.ground
        assert ground.places is not None, "asked before"
        return WorkerProcesses(
            ground.places,
            port=port,
            secret=bytes.fromhex((self._folder.path / "token").read_text()),
            server_host=ground.host,
            ca=ground.tls_certificate,
            device=self._job.config.device,
            log=self._folder.path / "worker" / "log",
            directory=self._job.directory,
            user=ground.ssh_user,
            given_up=lambda why: self._events.put(("executors", why)),
        )

    def _write_token(self) -> None:
        path = self._folder.path / "token"
        if not path.exists():
            draft = path.with_name(f".token.{os.getpid()}")  # killed in between, none is there, and not half of one
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            draft.replace(path)


@contextlib.contextmanager
def _minded(folder: JobFolder, given: str) -> Iterator[None]:
    """Hold the job's lock: by the descriptor that was inherited, if there is one.

    Raises:
        ConfigError: somebody else holds it, the descriptor is not of this lock, or the folder holds no job.
    """
    folder.job()
    if not given:
        with folder.minded():
            yield
        return
    try:
        lock = int(given)
        is_of_job = os.path.samestat(os.fstat(lock), os.stat(folder.path / "lock"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held already, unless it is another's
    except (OSError, ValueError, OverflowError):
        is_of_job = False
    if not is_of_job:
        raise ConfigError(f"{folder.path}: descriptor {given} does not hold this job's lock; leave it out")
    yield


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("pliant: give the folder of a federated job", file=sys.stderr)
        return 2
    folder = JobFolder(Path(sys.argv[1]))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_minded(folder, sys.argv[2] if len(sys.argv) == 3 else ""))
        except ConfigError as error:
            print(f"pliant: {error}", file=sys.stderr)
            return 2
        try:
            state, code, why = Keeper(folder).keep()
        except PliantError as error:
            say(str(error))
            state, code, why = "failed", 1, str(error)
        except Exception as error:
            folder.end("failed", 1, f"its keeper failed: {one_line(error)}")
            raise
        if state != "finished":
            say(f"{state}: {why}")
        folder.end(state, code, why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
