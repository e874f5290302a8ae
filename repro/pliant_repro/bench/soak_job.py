"""The job of a soak and what is done to it: runners on hosts of a lab, or on addresses of the loopback, and a config server.

Every host has a runner that waits to be added (`-init-version -1`), so no runner is special, and one that was killed is started
again in the same way. The config server is a `pliant config-server --state` that is started again as systemd would do it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pliant.child import start_ticks
from pliant.cluster import View, Worker
from pliant.elastic.client import ConfigClient
from pliant.errors import LaunchError, PliantError
from pliant_repro.bench.elastic import COMMAND, ElasticOptions, StepReports, write_task
from pliant_repro.bench.soak_judge import Finding, ProcessSample
from pliant_repro.bench.soak_plan import HEARTBEAT_S, Fault
from pliant_repro.contest import clean_environ, last_words
from pliant_repro.lab.hosts import Lab

T = TypeVar("T")
MARK = "PLIANT_SOAK"
"""A variable that all processes of a soak have."""
CLOCK = "PLIANT_SOAK_CLOCK"
SERVER_PORT = 9100
END_S = 30.0
ANSWER_S = 2.0
"""How long the config server may take for an answer."""
DISK_BYTES = 16 << 20
CLOCK_PROGRAM = '''"""A clock that is as far off as a file says."""
import os, time
_path, _real, _real_ns, _seen = os.environ.get("PLIANT_SOAK_CLOCK"), time.time, time.time_ns, [-9.0, 0.0]
def _shift():
    if time.monotonic() - _seen[0] > 0.5:
        try:
            with open(_path) as file:
                _seen[:] = time.monotonic(), float(file.read())
        except (OSError, ValueError):
            _seen[0] = time.monotonic()
    return _seen[1]
if _path:
    time.time = lambda: _real() + _shift()
    time.time_ns = lambda: _real_ns() + int(_shift() * 1e9)
'''
"""sitecustomize of every process of the job: setting the machine's clock would shift everybody's."""


class SoakHosts:
    """Hosts of a lab, or addresses of the loopback where there can be none; the last one has the config server. A context
    manager."""

    def __init__(self, num_hosts: int, *, in_lab: bool) -> None:
        self.lab = Lab(num_hosts=num_hosts + 1) if in_lab else None
        self.addresses = (
            self.lab.addresses if self.lab else tuple(f"127.0.0.{20 + host}" for host in range(num_hosts + 1))
        )

    def __enter__(self) -> Self:
        if self.lab is not None:
            self.lab.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.lab is not None:
            self.lab.down()

    def popen(self, host: int, argv: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program on a host; its output is appended to a file."""
        with log.open("ab") as output:
            settings: dict[str, object] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
                "env": dict(environ),
            }
            if self.lab is not None:
                return self.lab.popen(host, argv, **settings)
            return subprocess.Popen(argv, **settings)  # type: ignore[call-overload, no-any-return]

    def call(self, host: int, work: Callable[[], T]) -> T:
        """Call `work` with the network of a host."""
        return self.lab.call(host, work) if self.lab is not None else work()


class SoakJob:
    """One elastic job on several hosts, for the time of `with`."""

    def __init__(self, hosts: SoakHosts, slots: int, options: ElasticOptions, folder: Path) -> None:
        self.hosts, self.folder, self._slots, self._options = hosts, folder, slots, options
        self.num_hosts = len(hosts.addresses) - 1
        self.runners: dict[int, subprocess.Popen[bytes]] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.disk = folder / "disk"
        self.seen: StepReports
        self.failures: list[Finding] = []
        """What went wrong with a process of the job, or with a stranger."""
        self._members: set[str] = set()
        self._cleanup = contextlib.ExitStack()
        self._shm: set[Path] = set()
        self._task: Path
        token, self.mark = secrets.token_hex(16), secrets.token_hex(8)
        self._token = token
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK_PROGRAM)
        self._environ = {
            **clean_environ(),
            "PLIANT_TOKEN": token,
            "PLIANT_SECRET": secrets.token_hex(16),
            "PYTHONPATH": str(folder / "clock"),
            "XDG_STATE_HOME": str(folder / "state"),
            MARK: self.mark,
        }

    @property
    def _server_host(self) -> int:
        return self.num_hosts

    @property
    def url(self) -> str:
        return f"http://{self.hosts.addresses[self._server_host]}:{SERVER_PORT}/config"

    def __enter__(self) -> Self:
        self._shm = _shared_memory()
        self.seen = self._cleanup.enter_context(StepReports(self.folder))
        self._task = write_task(self.folder, self.seen.control, self._options)
        self.disk.mkdir()
        if self.hosts.lab is not None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk], check=True)
            self._cleanup.callback(lambda: subprocess.run(["umount", "-l", self.disk], check=True))
        self._cleanup.callback(self._end)
        self.start_server()
        for host in range(self.num_hosts):
            self.start_runner(host)
        self._put_first_view()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cleanup.close()

    # --- starting ---

    def start_server(self) -> None:
        listed = ",".join(f"{address}:{self._slots}" for address in self.hosts.addresses[: self.num_hosts])
        argv = [sys.executable, "-c", COMMAND, "config-server", "--host", self.hosts.addresses[self._server_host]]
        argv += ["--port", str(SERVER_PORT), "--state", str(self.disk / "server.sqlite"), "-H", listed]
        self.server = self.hosts.popen(
            self._server_host, argv, self._environ_of(self._server_host), self.disk / "server.log"
        )

    def start_runner(self, host: int) -> None:
        """Start a runner that waits until the config server lists its host, or finds that it does."""
        listed = ",".join(f"{address}:{self._slots}" for address in self.hosts.addresses[: self.num_hosts])
        argv = [sys.executable, "-c", COMMAND, "run", "-w", "-k", "-config-server", self.url, "-init-version", "-1"]
        argv += [
            "-H",
            listed,
            "-self",
            self.hosts.addresses[host],
            "--heartbeat-timeout",
            f"{HEARTBEAT_S:g}s",
            "-grace",
            "5s",
        ]
        argv += ["--record", str(self.disk / "record.jsonl"), "--checkpoint-dir", str(self.disk / "saved")]
        argv += ["--checkpoint-every", "200", "-logdir", str(self.disk / f"logs{host}"), "-v=false"]
        argv += ["-logfile", str(self.disk / f"runner{host}.log")]
        argv += [sys.executable, "-m", "pliant_repro.bench.elastic", str(self._task)]
        self.runners[host] = self.hosts.popen(host, argv, self._environ_of(host), self.folder / f"h{host}.log")

    def _environ_of(self, host: int) -> dict[str, str]:
        clock = self.folder / f"clock{host}"
        if not clock.exists():
            clock.write_text("0")
        return {**self._environ, CLOCK: str(clock)}

    def _put_first_view(self) -> None:
        addresses = self.hosts.addresses
        workers = tuple(Worker(addresses[rank % self.num_hosts], 10000) for rank in range(self.num_hosts))
        runners = tuple(Worker(address, 38080) for address in addresses[: self.num_hosts])
        deadline_s = time.monotonic() + END_S
        while True:
            try:
                self.ask(lambda client: client.put(View(0, workers, runners)))
                return
            except PliantError as error:
                if time.monotonic() > deadline_s:
                    raise LaunchError(
                        f"the config server does not answer: {error}; it said: {self.last_words()}"
                    ) from None
                time.sleep(0.1)

    def ask(self, request: Callable[[ConfigClient], T]) -> T:
        """Send a request to the config server, from its own host."""

        def send() -> T:
            with ConfigClient(self.url, self._token, timeout_s=ANSWER_S) as client:
                return request(client)

        return self.hosts.call(self._server_host, send)

    def members(self) -> set[str]:
        """Return the addresses of the members; those of the last answer, if there is none now."""
        with contextlib.suppress(PliantError):
            self._members = {str(worker) for worker in self.ask(lambda client: client.membership()).members}
        return self._members

    # --- what is done to it ---

    def do(self, fault: Fault) -> Callable[[], None] | None:
        """Do what the fault says, and return what puts it right later, if something must."""
        match fault.kind:
            case "kill":
                for each in fault.workers:
                    _signal(each.pid, signal.SIGKILL)
            case "stop":
                for each in fault.workers:
                    _signal(each.pid, signal.SIGSTOP)
                return lambda: self._go_on(fault)
            case "resize":
                threads = [threading.Thread(target=self._resize, args=(size,), daemon=True) for size in fault.sizes]
                for thread in threads:
                    thread.start()
                for thread in threads:  # the next fault is chosen by who is still a member
                    thread.join(ANSWER_S)
            case "runner":
                self._kill(self.runners.pop(fault.host))
                return lambda: self.start_runner(fault.host)
            case "warm":
                _signal(self.warm_process(fault.host), signal.SIGKILL)
            case "server":
                assert self.server is not None, "started"
                self._kill(self.server)
                self.server = None
                return self.start_server
            case "cut" if self.hosts.lab is not None:
                lab = self.hosts.lab
                lab.cut(fault.host)
                return lambda: lab.mend(fault.host)
            case "slow" if self.hosts.lab is not None:
                lab = self.hosts.lab
                lab.set_rate(fault.host, fault.rate)
                return lambda: lab.set_rate(fault.host, None)
            case "disk":
                _fill(self.disk / "filler")
                return (self.disk / "filler").unlink
            case "clock":
                draft = self.folder / "clock.draft"
                draft.write_text(str(fault.shift_s))
                draft.replace(self.folder / f"clock{fault.host}")
            case "stranger":
                threading.Thread(target=self._annoy, args=(fault.lasts_s,), daemon=True).start()
        return None

    @staticmethod
    def _go_on(fault: Fault) -> None:
        for each in fault.workers:
            _signal(each.pid, signal.SIGCONT)

    def _resize(self, size: int) -> None:
        with contextlib.suppress(PliantError):  # the server is away, or another request was first
            self.ask(lambda client: client.resize(size))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(END_S)

    def _annoy(self, lasts_s: float) -> None:
        """Send garbage to every worker and to the server, hold connections open, and ask without a token."""
        workers = {each.worker for each in self.seen.reports[-20:]}
        ends = [(host, int(port)) for host, _, port in (worker.rpartition(":") for worker in workers)]
        ends.append((self.hosts.addresses[self._server_host], SERVER_PORT))

        def visit() -> list[str]:
            held, let_in = [], []
            for end in ends:
                for said in (b"", os.urandom(4096), b"GET /state HTTP/1.1\r\nHost: x\r\n"):
                    with contextlib.suppress(OSError):
                        stranger = socket.create_connection(end, timeout=1.0)
                        held.append(stranger)
                        stranger.sendall(said)
            for path in ("clear", "reset", "finish", "stop", "resize"):
                with contextlib.suppress(OSError), socket.create_connection(ends[-1], timeout=1.0) as stranger:
                    stranger.sendall(
                        f"POST /{path} HTTP/1.1\r\nHost: {ends[-1][0]}:{SERVER_PORT}\r\nContent-Length: 0\r\n\r\n".encode()
                    )
                    stranger.settimeout(5.0)
                    answer = stranger.recv(200)
                    if answer and not answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 403")):
                        let_in.append(f"/{path}: {answer.splitlines()[0].decode(errors='replace')}")
            time.sleep(lasts_s)  # what is open stays open for as long as the fault lasts
            for stranger in held:
                stranger.close()
            return let_in

        for answer in self.hosts.call(self._server_host, visit):
            self.failures.append(Finding("other", f"a stranger without a token was let in: {answer}"))

    # --- what is seen ---

    def warm_process(self, host: int) -> int:
        """Return the process that a host's runner forks workers from; 0 if there is none."""
        runner = self.runners.get(host)
        if runner is None:
            return 0
        for pid in _children(runner.pid):
            if b"warm" in _read(f"/proc/{pid}/cmdline"):
                return pid
        return 0

    def check(self) -> None:
        """Note processes that have ended although nobody has killed them."""
        for host, runner in list(self.runners.items()):
            if (code := runner.poll()) is not None:
                said = last_words((self.folder / f"h{host}.log").read_text(errors="replace"))
                self.failures.append(Finding("other", f"the runner on h{host} has ended with {code}: {said}"))
                self.start_runner(host)
        if self.server is not None and (code := self.server.poll()) is not None:
            self.failures.append(Finding("other", f"the config server has ended with {code}"))
            self.start_server()

    def samples(self, at_s: float, oldest: int) -> Iterator[ProcessSample]:
        """Yield what the runners, the config server, and the oldest worker need now."""
        listed = [(f"runner on h{host}", runner.pid) for host, runner in self.runners.items()]
        listed += [("config server", self.server.pid)] if self.server is not None else []
        listed += [("worker", oldest)] if oldest else []
        for role, pid in listed:
            with contextlib.suppress(OSError, IndexError, ValueError):
                pages = int(_read(f"/proc/{pid}/statm").split()[1])
                yield ProcessSample(
                    role, pid, at_s, len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGESIZE")
                )

    def last_words(self) -> str:
        logs = [self.folder / f"h{host}.log" for host in range(self.num_hosts)] + [self.disk / "server.log"]
        return "; ".join(filter(None, (last_words(log.read_text(errors="replace")) for log in logs if log.exists())))

    # --- the end ---

    def _end(self) -> None:
        for process in filter(None, [*self.runners.values(), self.server]):
            process.send_signal(signal.SIGTERM)
        for process in filter(None, [*self.runners.values(), self.server]):
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.failures.append(Finding("hang", f"{process.args!s:.60} did not end within {END_S:g} s of SIGTERM"))
                process.kill()
                process.wait(END_S)
        self.failures += self._left_behind()
        shutil.copytree(self.disk, self.folder / "kept", dirs_exist_ok=True)

    def _left_behind(self) -> list[Finding]:
        """Return processes and shared memory that the job has left behind; processes are killed."""
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and (self._processes() or _shared_memory() - self._shm):
            time.sleep(0.1)  # pacing a poll with a deadline
        found = []
        for pid in self._processes():
            found.append(
                Finding(
                    "leak", f"process {pid} is left: {_read(f'/proc/{pid}/cmdline').replace(bytes(1), b' ')[:100]!r}"
                )
            )
            _signal(pid, signal.SIGKILL)
        found += [
            Finding("leak", f"{path} is left") for path in sorted(_shared_memory() - self._shm) if not _is_mapped(path)
        ]
        return found

    def _processes(self) -> list[int]:
        mark = f"{MARK}={self.mark}".encode()
        return [
            pid
            for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal())
            if mark in _read(f"/proc/{pid}/environ") and start_ticks(pid) is not None
        ]


def _signal(pid: int, number: int) -> None:
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(word) for word in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _shared_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("pliant", "torch_"))}


def _is_mapped(path: Path) -> bool:
    """Return whether some process uses the file: other jobs may run on this machine."""
    return any(str(path).encode() in _read(f"/proc/{name}/maps") for name in os.listdir("/proc") if name.isdecimal())


def _fill(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(1 << 16))
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(1))
    os.close(file)
