"""Executors on a Ray cluster: each the child of an actor that holds its CPU or GPU, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pliant import child
from pliant.fed.executors.carriers import last_line
from pliant.fed.executors.settings import MODULE
from pliant.launch import guardian
from pliant.launch.on_ray import cluster as ray_cluster
from pliant.launch.processes import script

CHUNK_BYTES = 64 << 10
AHEAD = 256
"""Pieces of output that may wait for whoever reads them."""


@contextlib.contextmanager
def connected(count: int, device: str) -> Iterator[None]:
    """Within the block, a Ray cluster that has room for so many executors; the one of RAY_ADDRESS, or this machine's.

    Raises:
        ConfigError, CapacityError: there is none, or it is too small.
    """
    with ray_cluster.connected(os.environ.get("RAY_ADDRESS") or "auto", asked="workers: ray", flag="RAY_ADDRESS"):
        kind = "gpu" if device.startswith("cuda") else "cpu"
        ray_cluster.check_devices({kind: count}, ray_cluster.living_nodes(), "workers: ray")
        yield


class Holder:
    """The actor. `run` lasts as long as the executor."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[bytes | int] = queue.Queue(maxsize=AHEAD)

    def run(self, letter: bytes, module: str) -> Iterator[bytes | int]:
        """What the executor prints, as it comes; at last its exit code."""
        # The kernel's tie is to the thread that forks: one of our own, which lives as long as the executor.
        threading.Thread(target=self._live, args=(letter, module), name="executor", daemon=True).start()
        while isinstance(output := self._output.get(), bytes):
            yield output
        yield output

    def end(self) -> None:
        if self._popen is not None:
            guardian.kill_group(self._popen.pid, signal.SIGTERM)

    def _live(self, letter: bytes, module: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        code = 1
        try:
            self._popen = popen = subprocess.Popen(
                [*script(child.__file__), str(os.getpid()), sys.executable, "-P", "-m", module, "--letter"],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
            assert popen.stdin is not None, "made with a pipe"
            assert popen.stdout is not None, "made with a pipe"
            with contextlib.suppress(OSError):
                popen.stdin.write(letter)
            while data := os.read(popen.stdout.fileno(), CHUNK_BYTES):
                self._output.put(data)
            code = popen.wait()
        except OSError as error:
            self._output.put(f"the executor cannot be started: {error}\n".encode())
        finally:
            self._output.put(code)


class RayCarrier:
    """An executor that Ray has found a place for, or looks for one."""

    def __init__(self, letter: bytes, log: Path, device: str) -> None:
        import ray

        share = {"num_cpus": 0, "num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 1}
        self._log = log
        self._actor: Any = ray.remote(Holder).options(max_concurrency=4, **share).remote()
        how = {"num_returns": "streaming", "_generator_backpressure_num_objects": AHEAD}
        self._output = self._actor.run.options(**how).remote(letter, MODULE)

    def wait(self) -> tuple[int, str]:
        import ray

        code = None
        try:
            with self._log.open("ab", buffering=0) as file:
                began = file.tell()
                for reference in self._output:
                    data = ray.get(reference)
                    if isinstance(data, bytes):
                        file.write(data)
                    else:
                        code = int(data)
        except Exception as error:  # the end of a thread: the launcher must hear of it, whatever it was
            return 1, f"its actor is gone: {ray_cluster.why_failed(error)}"
        finally:
            self.kill()
        said = last_line(self._log, began)
        how = f"exit code {code}"
        return 1 if code is None else code, f"{how} ({said})" if said else how

    def end(self) -> None:
        with contextlib.suppress(Exception):  # the actor is gone, or was never placed: then `kill` is enough
            self._actor.end.remote()

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)
