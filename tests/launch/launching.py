"""Runners as real processes, for the tests beside this file."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pliant.elastic.client import ConfigClient
from pliant.tokens import find_token

MAIN = "from pliant.cli.main import main; main()"
"""For tests that start the program themselves."""
DEADLINE_S = 20.0
FOLLOW = """
    import os, pathlib, threading
    from pliant.cluster import ClusterSnapshot
    from pliant.elastic.client import ConfigFollower, ConfigSender
    from pliant.identity import worker_spec

    spec = worker_spec()
    me = spec.worker
    up, ended = pathlib.Path(f"up-{me.port}-{os.getpid()}"), threading.Event()

    def follow(snapshot):
        if me in snapshot.membership.members:
            up.touch()
        elif snapshot.membership.over or up.exists():
            ended.set()

    ConfigFollower(spec.config_server, spec.token, follow).start(ClusterSnapshot())
    ConfigSender(spec.config_server, spec.token).ask(lambda client: client.ready(me), 20)
    ended.wait()
"""
"""Like a worker of a training, it goes on while the server is away."""


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stdout.splitlines()[-1]


class Runner:
    """A runner that the nursery forked, with the methods of a Popen that tests use."""

    def __init__(self, nursery: Nursery, request: dict[str, object]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        nursery.ask(request, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr, self._status = (os.fdopen(read, "rb") for read, _ in pipes)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutError(f"runner {self.pid} still runs after {timeout} s")
            self.returncode = int(self._status.readline())
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """All that is left of its output, and its end."""
        deadline_s = time.monotonic() + timeout
        left = dict.fromkeys((self.stdout, self.stderr), b"")
        unread = {pipe for pipe in left if not pipe.closed}
        while unread:
            ready = select.select(list(unread), [], [], max(0.0, deadline_s - time.monotonic()))[0]
            if not ready:
                raise TimeoutError(f"runner {self.pid} holds its output open after {timeout} s")
            for pipe in ready:
                data = pipe.read1()
                left[pipe] += data
                if not data:
                    unread.remove(pipe)
        self.wait(max(0.0, deadline_s - time.monotonic()))
        return left[self.stdout], left[self.stderr]

    def close(self) -> None:
        for pipe in (self.stdout, self.stderr, self._status):
            pipe.close()


class Nursery:
    """The process that forks runners; see nursery.py. A context manager."""

    def __enter__(self) -> Nursery:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).with_name("nursery.py")), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return self

    def ask(self, request: dict[str, object], descriptors: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(DEADLINE_S)


@dataclass
class Launcher:
    """Starts `pliant run` in a directory of its own, with nobody's variables but the test's."""

    directory: Path
    environ: dict[str, str]
    nursery: Nursery
    nohup: bool = False
    plain: bool = True
    """Most programs of these tests do not train."""
    started: list[Runner] = field(default_factory=list)

    def script(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return path

    def without_torch(self) -> dict[str, str]:
        """An environ in which torch is a name only, so that the warm process is up at once."""
        folder = self.directory / "light"
        folder.mkdir()
        self.script("light/torch.py", "def __getattr__(name): raise ImportError(name)\n")
        return {"PYTHONPATH": str(folder)}

    def start(self, *arguments: object, **environ: str) -> Runner:
        request: dict[str, object] = {
            "arguments": [*(["--plain"] if self.plain else []), *map(str, arguments)],
            "directory": str(self.directory),
            "environ": {**self.environ, **environ},
            "nohup": self.nohup,
        }
        runner = Runner(self.nursery, request)
        self.started.append(runner)
        return runner

    def end(self, process: Runner) -> Ended:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        return Ended(process.wait(0), stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def run(self, *arguments: object, **environ: str) -> Ended:
        return self.end(self.start(*arguments, **environ))

    def run_all(self, *commands: tuple[object, ...], **environ: str) -> list[Ended]:
        """Several at the same time."""
        started = [self.start(*command, **environ) for command in commands]
        return [self.end(process) for process in started]

    def until(self, happened: Callable[[], object], what: str = "it") -> None:
        """Wait for something in another process, which has no other way to tell us."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"{what} did not happen in {DEADLINE_S} s"
            time.sleep(0.005)

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))


def url_of(runner: Runner) -> str:
    """The address that a runner prints for its own config server."""
    for line in runner.stderr:
        if found := re.search(rb"config server at (\S+)", line):
            return found[1].decode()
    raise AssertionError("the runner ended without a word about its config server")


def client_of(launcher: Launcher, runner: Runner) -> ConfigClient:
    """A client of a runner's own config server, with the token that the runner has kept for its user."""
    url = url_of(runner)
    return ConfigClient(url, find_token(url, launcher.environ))


def members(launcher: Launcher, count: int) -> dict[int, int]:
    """The process of each port that trains or has."""
    launcher.until(lambda: len(launcher.files("up-*")) == count, f"start of {count} members")
    found = (path.name.split("-")[1:] for path in launcher.files("up-*"))
    return {int(port): int(pid) for port, pid in found}


@contextmanager
def launcher_in(directory: Path, nursery: Nursery, *foreign: str) -> Iterator[Launcher]:
    """A launcher without the variables whose names begin so; whatever it starts is ended with the block."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PLIANT_", *foreign))}
    made = Launcher(directory, {**environ, "HOME": str(directory)}, nursery)
    yield made
    for runner in made.started:
        runner.kill()
        runner.wait(DEADLINE_S)
        runner.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
