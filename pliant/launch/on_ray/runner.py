"""A runner on a node of a Ray cluster: an actor, started by `side`, that has the runner's process as its child.

The process is the one that `pliant run --ssh` starts over ssh (`pliant.cli.over_ssh`), told what to do in the same way.
It is tied to this actor by the kernel (child.py): however the actor ends, killed by Ray, with its node's raylet or with the
driver, the runner dies at once, and its guardian ends the workers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pliant import child
from pliant.child import start_ticks
from pliant.launch import guardian, state_file
from pliant.launch.ports import listen_on
from pliant.launch.processes import script
from pliant.launch.ssh import FAR_END, Letter

CHUNK_BYTES = 64 << 10
PREFIX = "pliant-ray-"
"""Of an actor's folder; then come its process and some letters."""
Output = tuple[int, bytes]
"""1 (stdout), 2 (stderr) or 0 (its end: the exit code), and what came."""


class RayRunner:
    """One node's part of a job. Its methods run in threads: `run` as long as the runner does, others meanwhile."""

    def __init__(self, host: str) -> None:
        self._host = host
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")
        self._state = Path(self._folder.name) / "state.json"
        self._devices = Path(self._folder.name) / "devices.json"
        self._claims: list[socket.socket] = []
        self._popen: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[Output | None] = queue.Queue(maxsize=256)

    def free_ports(self, count: int, begin: int, end: int, avoid: Sequence[int]) -> list[int]:
        """Ports that nobody listens on, and that no other actor of this kind will be given as long as this one lives.

        A name among abstract sockets is the claim: it is one's own at once, and gone with the process.
        """
        found: list[int] = []
        for port in range(begin, end + 1):
            if len(found) == count:
                break
            claim = socket.socket(socket.AF_UNIX)
            try:
                if port not in avoid:
                    claim.bind(f"\0pliant-port-{self._host}-{port}")
                    listen_on(self._host, port).close()
                    self._claims.append(claim)
                    found.append(port)
                    continue
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            claim.close()
        return found

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], directory: str) -> Iterator[Output]:
        """Run a runner to its end; what it and its workers print, as it comes."""
        letter = Letter(
            directory=_directory(directory),
            arguments=("--state-file", str(self._state), "--slot-devices", str(self._devices), *arguments),
            environ=environ,
        )
        # The kernel's tie is to the thread that forks: one of our own, which lives as long as the runner.
        threading.Thread(target=self._live, args=(letter.to_line(),), name="runner", daemon=True).start()
        while (output := self._output.get()) is not None:
            yield output

    def living(self) -> tuple[int, dict[str, int]]:
        """The newest view that the runner has acted on (-1: none yet), and the slots of workers whose processes live."""
        told = state_file.read(self._state)
        return (-1, {}) if told is None else (told.version, {name: each.slot for name, each in _living(told).items()})

    def drop(self, workers: Sequence[str]) -> None:
        """Kill these workers at once."""
        told = state_file.read(self._state)
        living = {} if told is None else _living(told)
        for worker in workers:
            if worker in living:
                guardian.kill_group(living[worker].pid, signal.SIGKILL)

    def show(self, by_slot: Sequence[str | None]) -> bool:
        """From now on, workers that start in a slot see these CUDA devices; None: those of the node."""
        draft = self._devices.with_suffix(".draft")
        draft.write_text(json.dumps(list(by_slot)))
        draft.replace(self._devices)
        return True

    def end(self) -> None:
        """Ask the runner to end its workers and itself."""
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._popen.stdin.close()

    def _live(self, letter: bytes) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if not environ.get("CUDA_VISIBLE_DEVICES"):
            environ.pop(
                "CUDA_VISIBLE_DEVICES", None
            )  # Ray hides all from an actor that holds none, but workers are no actors
        try:
            self._popen = popen = subprocess.Popen(
                [*script(child.__file__), str(os.getpid()), sys.executable, "-m", FAR_END],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            assert popen.stdin is not None, "made above"
            with contextlib.suppress(OSError):
                popen.stdin.write(letter)
            readers = [
                threading.Thread(target=self._read, args=(number, pipe), daemon=True)
                for number, pipe in ((1, popen.stdout), (2, popen.stderr))
            ]
            for reader in readers:
                reader.start()
            code = popen.wait()
            for reader in readers:
                reader.join(5)
            self._output.put((0, str(code).encode()))
        except OSError as error:
            self._output.put((2, f"pliant: the runner cannot be started: {error}\n".encode()))
            self._output.put((0, b"1"))
        finally:
            self._folder.cleanup()
            self._output.put(None)

    def _read(self, number: int, pipe: object) -> None:
        descriptor = pipe.fileno()  # type: ignore[attr-defined]
        while data := os.read(descriptor, CHUNK_BYTES):
            self._output.put((number, data))


def _sweep() -> None:
    """Remove the folders of actors that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and start_ticks(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _living(told: state_file.RunnerState) -> dict[str, state_file.WorkerProcess]:
    return {name: process for name, process in told.workers.items() if process.lives}


def _directory(wanted: str) -> str:
    """Where to run: as asked; else where Ray has unpacked the job's working directory, which is where this actor is."""
    import ray

    if ray.get_runtime_context().runtime_env.get("working_dir"):
        return os.getcwd()
    return wanted
