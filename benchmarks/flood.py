"""Thousands of connections that never send a request, against each server of pliant while a job trains.

    python benchmarks/flood.py                                   # 10,000 against run, a worker of it, config-server, serve and dash
    python benchmarks/flood.py --connections 10000 --descriptors 1024 --json FILE

Half of the connections send nothing, and half the first line of a request; all are held open from here. Meanwhile the job
must do steps, the whole command `pliant resize` (with `serve`: `pliant submit` of a second job, which takes a device from the
first) must be done within 5 s, and the logs must stay below 1 MB. All traffic is on the loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "repro")]

from pliant_repro.contest import form  # noqa: E402

SERVERS = ("run", "worker", "config-server", "serve", "dash")
WITHIN_S = 5.0
MOST_LOG_BYTES = 1_000_000
WAIT_S = 60.0
PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
PROGRAM = """
import os, sys, time, torch, pliant
job = pliant.join(replicas=2)
if job.is_first:
    with open(sys.argv[1] + ".worker", "w") as file:
        file.write(os.environ["PLIANT_WORKER"])
model = torch.nn.Linear(8, 2)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randint(2, (4096,))), batch_size=8)
for epoch in job.epochs(1000):
    for step in loader:
        for x, y in step:
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if job.rank == 0:
            with open(sys.argv[1], "a") as file:
                file.write(".")
"""


def until(happened: Callable[[], Any], what: str) -> Any:
    """Return what `happened` returns, once that is something."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := happened()):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.05)  # pacing a poll with a deadline
    return found


class Place:
    """A folder with a program, and the commands that are run in it; everything ends with the block."""

    def __init__(self, folder: Path, descriptors: int) -> None:
        self.folder, self._descriptors = folder, descriptors
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
        paths = os.pathsep.join([str(ROOT), str(ROOT / "repro"), clean.get("PYTHONPATH", "")])
        self.environ = {**clean, "PYTHONPATH": paths, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        self.steps = folder / "first"
        (folder / "train.py").write_text(PROGRAM)
        for job in ("first", "second"):
            (folder / f"{job}.yml").write_text(f"program: train.py\nargs: [{job}]\nreplicas: 2\n")
        self.cleanup = contextlib.ExitStack()

    def start(self, name: str, *words: object) -> Path:
        """Start a command with so many descriptors; return its log."""
        log = self.folder / f"{name}.log"
        limit = ("prlimit", f"--nofile={self._descriptors}:{self._descriptors}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*limit, *PLIANT, *map(str, words)], cwd=self.folder, env=self.environ, stdout=output, stderr=output
            )
        self.cleanup.callback(self._end, process)
        return log

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def call(self, *words: object) -> tuple[float, str]:
        """Run a command to its end; return the seconds that it took, and what it printed."""
        begun_s = time.monotonic()
        done = subprocess.run(
            [*PLIANT, *map(str, words)],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        if done.returncode:
            raise SystemExit(f"pliant {' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return time.monotonic() - begun_s, done.stdout

    def stop_jobs(self) -> None:
        """End the jobs of a server, which would outlive it."""
        for name in ("first", "second"):
            with contextlib.suppress(SystemExit):
                self.call("stop", "--kill", name, "--state", "jobs")

    def num_steps(self) -> int:
        return self.steps.stat().st_size if self.steps.exists() else 0


def port_in(log: Path, pattern: str) -> int:
    """Return the port that a server has printed."""
    return int(until(lambda: re.search(pattern, log.read_text(errors="replace")), f"the address in {log.name}")[1])


@contextlib.contextmanager
def flood(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections open that never send a request."""
    held: list[socket.socket] = []
    try:
        for number in range(count):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
                if number % 2:
                    held[-1].sendall(b"GET /state HTTP/1.1\r\n")
        yield held
    finally:
        for each in held:
            each.close()


def measure(server: str, connections: int, place: Place) -> dict[str, Any]:
    """Flood one server while a job trains."""
    logs: list[Path] = []
    if server == "serve":
        logs.append(place.start("serve", "serve", "--devices", "cpu=2", "--port", 0, "--state", "jobs"))
        port = port_in(logs[0], r"http://127\.0\.0\.1:(\d+)")
        place.cleanup.callback(place.stop_jobs)
        place.call("submit", "first.yml", "--name", "first", "--state", "jobs")
    else:
        words: tuple[object, ...] = ()
        if server == "config-server":
            logs.append(place.start("config-server", "config-server", "-port", 0))
            port = port_in(logs[0], r"http://127\.0\.0\.1:(\d+)/config")
            words = ("-config-server", f"http://127.0.0.1:{port}/config")
        logs.append(place.start("run", "run", "-w", *words, "-np", 2, "-H", "127.0.0.1:2", "train.py", "first"))
        if server == "run":
            port = port_in(logs[0], r"http://127\.0\.0\.1:(\d+)/config")
        if server == "worker":
            named = place.folder / "first.worker"
            port = int(until(lambda: named.exists() and named.read_text(), "a worker").rpartition(":")[2])
        if server == "dash":
            logs.append(place.start("dash", "dash", "--port", 0))
            port = port_in(logs[1], r"http://127\.0\.0\.1:(\d+)")
    until(lambda: place.num_steps() > 50, "the first steps")
    with flood(port, connections) as held:
        before, begun_s = place.num_steps(), time.monotonic()
        if server == "serve":
            took_s = place.call("submit", "second.yml", "--name", "second", "--state", "jobs")[0]

            def is_running() -> bool:
                return "running" in place.call("show", "second", "--state", "jobs")[1]

            until(is_running, "the second job")
            resized_s = time.monotonic() - begun_s
        else:
            took_s = resized_s = place.call("resize", 1)[0]
            place.call("resize", 2)
        until(lambda: place.num_steps() > before + 50, "50 steps more")
        rate = (place.num_steps() - before) / (time.monotonic() - begun_s)
        num_held = len(held)
    log_bytes = sum(log.stat().st_size for log in logs)
    ok = max(took_s, resized_s if server != "serve" else 0.0) <= WITHIN_S and log_bytes < MOST_LOG_BYTES
    return {
        "server": server, "connections": num_held, "command_s": round(took_s, 2), "resized_s": round(resized_s, 2),
        "steps_per_s": round(rate, 1), "log_bytes": log_bytes,
        "tracebacks": sum(log.read_text(errors="replace").count("Traceback") for log in logs), "ok": ok,
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    cells = []
    for server in options.servers.split(","):
        with tempfile.TemporaryDirectory(prefix="pliant-flood-") as folder:
            place = Place(Path(folder), options.descriptors)
            with place.cleanup:
                cells.append(measure(server, options.connections, place))
        print(" ".join(f"{key} {value}" for key, value in cells[-1].items()), flush=True)
    remarks = [f"{cell['server']} missed its limit" for cell in cells if not cell["ok"]]
    args: Mapping[str, object] = {"connections": options.connections, "descriptors": options.descriptors}
    return form("flood", args, not remarks, remarks, cells=cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--descriptors", type=int, default=1024, help="what the servers may have (ulimit -n)")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--json", default="", help="file for the result")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if options.connections + 200 > hard:
        parser.error(f"--connections {options.connections}: this process may have {hard} descriptors (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    result = run(options)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
