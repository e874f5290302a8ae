"""A runner on a node of a Ray cluster: the actor that has the runner's process as its child, and the driver's side of it.

The process is the one that `pliant run --ssh` starts over ssh (`pliant.cli.over_ssh`), and it gets its order in the same way.
The kernel ties it to the actor (child.py): however the actor ends, killed by Ray, with its node's raylet or with the driver,
the runner dies at once, and its guardian ends the workers.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant import child
from pliant.child import start_ticks
from pliant.cluster import PortRange, Worker
from pliant.files import write_atomic
from pliant.launch.addresses import listen_on
from pliant.launch.on_ray.cluster import why_failed
from pliant.launch.output import Console, LineSplitter, show_runner_lines
from pliant.launch.processes import (
    REMOTE_MODULE,
    LivingWorker,
    RunnerOrder,
    RunnerState,
    read_runner_state,
    script,
)

CHUNK_BYTES = 64 << 10
PREFIX = "pliant-ray-"
"""How the name of an actor's directory begins; its process id and random letters follow."""
Output = tuple[int, bytes]
"""1 (stdout), 2 (stderr) or 0 (the end), and the output or the exit code."""


class RunnerActor:
    """The Ray actor of one node. Its methods run in threads: `run` for as long as the runner lives, the others meanwhile."""

    def __init__(self, host: str) -> None:
        self._host = host
        _remove_leftovers()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")
        self._state = Path(self._folder.name) / "state.json"
        self._devices = Path(self._folder.name) / "devices.json"
        self._claims: list[socket.socket] = []
        self._popen: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[Output | None] = queue.Queue(maxsize=256)

    def free_ports(self, count: int, begin: int, end: int, avoid: Sequence[int]) -> list[int]:
        """Return free ports that no other actor of this kind will return while this one lives.

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
        """Run a runner to its end; yield what it and its workers print, as it comes."""
        order = RunnerOrder(
            directory=_directory(directory),
            arguments=("--state-file", str(self._state), "--slot-devices", str(self._devices), *arguments),
            environ=dict(environ),
        )
        # The kernel's tie is to the thread that forks: one of our own, which lives as long as the runner.
        threading.Thread(target=self._live, args=(order.to_line(),), name="runner", daemon=True).start()
        while (output := self._output.get()) is not None:
            yield output

    def living(self) -> tuple[int, dict[str, int]]:
        """Return the newest view that the runner has acted on (-1: none yet), and the local ranks of the living workers."""
        told = read_runner_state(self._state)
        return (-1, {}) if told is None else (told.version, {name: each.slot for name, each in _living(told).items()})

    def drop(self, workers: Sequence[str]) -> None:
        """Kill these workers at once."""
        told = read_runner_state(self._state)
        living = {} if told is None else _living(told)
        for worker in workers:
            if worker in living:
                child.kill_group(living[worker].pid, signal.SIGKILL)

    def show(self, by_local_rank: Sequence[str | None]) -> bool:
        """Let workers that start from now on see these CUDA devices, by local rank; None: those of the node."""
        write_atomic(self._devices, json.dumps(list(by_local_rank)))
        return True

    def end(self) -> None:
        """Ask the runner to end its workers and itself."""
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._popen.stdin.close()

    def _live(self, order: bytes) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if not environ.get("CUDA_VISIBLE_DEVICES"):
            # Ray hides all from an actor that holds none, but workers are no actors.
            environ.pop("CUDA_VISIBLE_DEVICES", None)
        try:
            self._popen = popen = subprocess.Popen(
                [*script(child.__file__), str(os.getpid()), sys.executable, "-m", REMOTE_MODULE],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            assert popen.stdin is not None, "made above"
            with contextlib.suppress(OSError):
                popen.stdin.write(order)
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


def _remove_leftovers() -> None:
    """Remove the folders of actors that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and start_ticks(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _living(told: RunnerState) -> dict[str, LivingWorker]:
    return {name: process for name, process in told.workers.items() if process.lives}


def _directory(wanted: str) -> str:
    """Return where to run: where Ray has unpacked the job's working directory if there is one, else `wanted`."""
    import ray

    if ray.get_runtime_context().runtime_env.get("working_dir"):
        return os.getcwd()
    return wanted


# --- the driver's side ---


ASK_S = 5.0
"""How long an actor may take to answer; one that takes longer is about to be lost."""
AHEAD = 64
"""How many pieces of output may be under way."""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The runner's actor runs."""

    node: str


@dataclass(frozen=True, slots=True)
class RunnerEnded:
    """The runner has ended; a negative code is the signal that killed it."""

    node: str
    code: int


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """The actor is gone, most likely with its node."""

    node: str
    why: str


NodeEvent = RunnerUp | RunnerEnded | RunnerLost


class NodeRunner:
    """The driver's handle of the runner on one node."""

    def __init__(self, node: str, host: str, used: set[int], post: Callable[[NodeEvent], None]) -> None:
        """Prepare a runner; `used` are ports of this host that late messages may still be about."""
        self.host = host
        self.is_up = False
        self.by_local_rank: list[int | None] = []
        """The number of the device slot for each local rank of the runner; None: no worker is to be there."""
        self._node, self._post = node, post
        self._actor: Any = None
        self._used = used

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], directory: str) -> None:
        """Start the actor and, in it, the runner; what follows is reported through `post`, from a thread."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        made = ray.remote(RunnerActor).options(num_cpus=0, max_concurrency=8, scheduling_strategy=placed)
        self._actor = made.remote(self.host)
        asked = (list(arguments), dict(environ), directory)
        threading.Thread(target=self._attend, args=asked, name=f"ray-{self.host}", daemon=True).start()

    def _attend(self, arguments: list[str], environ: dict[str, str], directory: str) -> None:
        import ray

        shown = {number: (LineSplitter(), Console(number, coloured=False)) for number in (1, 2)}
        how = {"num_returns": "streaming", "_generator_backpressure_num_objects": AHEAD}
        code = None
        try:
            output = self._actor.run.options(**how).remote(arguments, environ, directory)
            ray.get(self._actor.free_ports.remote(0, 1024, 65535, []))
            self.is_up = True
            self._post(RunnerUp(self._node))
            for reference in output:
                number, data = ray.get(reference)
                if number:
                    splitter, console = shown[number]
                    show_runner_lines(console, self.host, splitter.feed(data))
                else:
                    code = int(data)
        except Exception as error:  # the end of a thread: the driver must hear of it, whatever it was
            self._post(RunnerLost(self._node, why_failed(error)))
            return
        finally:
            for splitter, console in shown.values():
                show_runner_lines(console, self.host, splitter.flush())
        self._post(RunnerLost(self._node, "it said no exit code") if code is None else RunnerEnded(self._node, code))

    def free_ports(self, count: int, ports: PortRange) -> list[int]:
        """Return ports that were never used; none if the actor does not answer."""
        found = self._ask("free_ports", count, ports.begin, ports.end, sorted(self._used)) or []
        self._used.update(found)
        return list(found)

    def living(self, version: int = -1) -> dict[Worker, int] | None:
        """Return the local ranks of the living workers; None if the actor does not answer, or has not acted on this view."""
        found = self._ask("living")
        if found is None or found[0] < version:
            return None
        return {Worker.parse(name): local_rank for name, local_rank in found[1].items()}

    def set_devices(self, visible: Mapping[int, str | None]) -> bool:
        """Give the runner a local rank for each of these device slots, with the devices that it may see; return whether it knows."""
        self.by_local_rank = [slot if slot in visible else None for slot in self.by_local_rank]
        for slot in visible:
            if slot in self.by_local_rank:
                continue
            # The runner starts a worker on the lowest local rank that is free.
            if None in self.by_local_rank:
                self.by_local_rank[self.by_local_rank.index(None)] = slot
            else:
                self.by_local_rank.append(slot)
        shown = [None if slot is None else visible[slot] for slot in self.by_local_rank]
        return self._ask("show", shown) is not None

    def drop(self, workers: Sequence[str]) -> None:
        """Kill these workers; return at once."""
        if workers:
            self._actor.drop.remote(list(workers))

    def end(self) -> None:
        """Ask the runner to end; return at once."""
        self._actor.end.remote()

    def kill(self) -> None:
        """End the actor, and with it the runner, at once."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def _ask(self, method: str, *arguments: object) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ASK_S)
        except ray.exceptions.RayError:
            return None  # its own thread sees that it is gone
