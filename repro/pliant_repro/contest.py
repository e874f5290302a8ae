"""Interleaved contests between groups of worker processes, and the one form in which all benches write their results.

The controller lets the contenders take turns, A B C, A B C, ..., so that what disturbs the machine disturbs all of them alike.
A contender that waits for its turn is blocked, not spinning. One that dies or hangs is out, with the reason; the others go on.
`pliant_repro.worker` is the program that the worker processes run. This module does not load torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.errors import ConfigError, LaunchError
from pliant.identity import WorkerSpec
from pliant.machine import Json, machine
from pliant_repro import forking
from pliant_repro.lab.hosts import INTERFACE, Lab

WORKER = "pliant_repro.worker"
END_TIMEOUT_S = 3.0
NO_ANSWER = "did not answer within"
"""In the failure of a contender that had too little time, or hangs."""
Answer = Mapping[str, object]
Progress = Callable[[str, float], None]
"""Called with what is done now, and with the fraction that is done."""


# --- statistics ---


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the samples lie, interpolated between neighbours."""
    assert samples, "a quantile of no samples"
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and spread of some samples."""

    median: float
    iqr: float
    p10: float
    p90: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        p10, p25, median, p75, p90 = (quantile(samples, fraction) for fraction in (0.1, 0.25, 0.5, 0.75, 0.9))
        return cls(median, p75 - p25, p10, p90, len(samples))

    def to_json(self) -> dict[str, float]:
        times = {"median_s": self.median, "iqr_s": self.iqr, "p10_s": self.p10, "p90_s": self.p90}
        return {**times, "num_samples": self.num_samples}


def paired_ratios(others: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> list[float]:
    """Return the other's median over ours, round by round: noise of a round that hits both cancels."""
    pairs = zip(others, ours, strict=False)
    return [quantile(other, 0.5) / quantile(own, 0.5) for other, own in pairs if other and own]


# --- options ---


def check_choice(flag: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigError, listing the known values, unless `value` is one of them."""
    if value not in known:
        raise ConfigError(f"{flag} {value!r}: use one of {', '.join(known)}")


def check_least(*limits: tuple[str, float, float]) -> None:
    """Raise ConfigError for the first (flag, value, least) whose value is below its least."""
    for flag, value, least in limits:
        if value < least:
            raise ConfigError(f"{flag} {value}: use {least} or more")


def split_words(text: str) -> tuple[str, ...]:
    """Split a comma list into words, without empty and repeated ones."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Parse `1,2,4`.

    Raises:
        ConfigError: the text has another form.
    """
    words = split_words(text)
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"{flag} {text!r}: use numbers such as 1,2,4")
    return tuple(dict.fromkeys(map(int, words)))


# --- contenders ---


class Process(Protocol):
    """What a contender needs of its processes: some methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Starter = Callable[[IO[bytes]], Process]
"""Starts one process of a contender, whose output goes to the given file."""


def last_words(log: str) -> str:
    """Return the last lines of a log that carry information: no rulers, no source positions of a traceback."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if re.search("[A-Za-z]", line) and not line.startswith('File "')]
    return " | ".join(telling[-2:])


class Contender:
    """One side of a contest: its processes, and a control connection to each of its ranks.

    `starters` start the processes: one per rank, or one that starts all ranks. With `setup`, every rank gets that command
    once it has connected; `ready_answers` then holds the ranks' answers.
    """

    def __init__(
        self,
        name: str,
        num_workers: int,
        starters: Sequence[Starter],
        control: Path,
        setup: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self.failure = ""
        self.ready_answers: list[Answer] = []
        self._num_workers, self._starters, self._setup = num_workers, starters, setup
        self._control, self._log = control, control.with_suffix(".log")
        self._listener = socket.socket(socket.AF_UNIX)
        self._processes: list[Process] = []
        self._ranks: dict[socket.socket, int] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._pidfds: dict[int, Process] = {}
        self._selector: selectors.BaseSelector | None = None

    def start(self) -> Self:
        """Start the processes; `ready` waits for them, so that several contenders can start at once."""
        self._selector = selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        self._listener.bind(str(self._control))
        self._listener.listen(self._num_workers)
        with self._log.open("wb") as output:
            for starter in self._starters:
                process = starter(output)
                self._processes.append(process)
                pidfd = os.pidfd_open(process.pid)
                self._pidfds[pidfd] = process
                selector.register(pidfd, selectors.EVENT_READ)
        return self

    def ready(self, timeout_s: float) -> None:
        """Wait until every rank has connected and is set up.

        Raises:
            LaunchError: a rank died or did not answer; the message names it and the reason.
        """
        for connection, answer in self._gather(timeout_s).items():
            rank = answer["rank"]
            assert isinstance(rank, int), f"{self.name}: a worker said {answer}"
            self._ranks[connection] = rank
        if self._setup is not None:
            self.ready_answers = self.ask({"do": "setup", **self._setup}, timeout_s)

    def ask(self, command: Mapping[str, object], timeout_s: float) -> list[Answer]:
        """Send all ranks the same command and return their answers by rank.

        Raises:
            LaunchError: a rank died, failed or did not answer in time. The contender is out then.
        """
        if self.failure:
            raise LaunchError(self.failure)
        try:
            for connection in self._ranks:
                connection.sendall(json.dumps(command).encode() + b"\n")
            answers = self._gather(timeout_s)
        except OSError as error:
            raise self._fail(f"a worker is gone ({error})") from error
        return [answers[connection] for connection in sorted(self._ranks, key=lambda each: self._ranks[each])]

    def _gather(self, timeout_s: float) -> dict[socket.socket, Answer]:
        deadline_s = time.monotonic() + timeout_s
        answers: dict[socket.socket, Answer] = {}
        selector = self._selector
        assert selector is not None, f"{self.name} was not started"
        while len(answers) < self._num_workers:
            events = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not events:
                missing = self._num_workers - len(answers)
                raise self._fail(f"{missing} of {self._num_workers} workers {NO_ANSWER} {timeout_s:g} s")
            for key, _ in events:
                if isinstance(key.fileobj, int):
                    # A rank's error message may still be in its socket, and is the better explanation.
                    selector.unregister(key.fileobj)
                    if not self._ranks or len(self._processes) == 1:
                        raise self._fail(f"ended early with exit status {self._pidfds[key.fileobj].wait()}")
                    continue
                assert isinstance(key.fileobj, socket.socket), "only sockets and pidfds are registered"
                if key.fileobj is self._listener:
                    selector.register(key.fileobj.accept()[0], selectors.EVENT_READ)
                elif (answer := self._read(key.fileobj)) is not None:
                    answers[key.fileobj] = answer
        return answers

    def _read(self, connection: socket.socket) -> Answer | None:
        """Return an answer where one is complete; None means that more is to come."""
        who = f"rank {self._ranks[connection]}" if connection in self._ranks else "a worker"
        try:
            data = connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise self._fail(f"{who} ended early")
        received = self._received.get(connection, b"") + data
        self._received[connection] = b"" if received.endswith(b"\n") else received
        if not received.endswith(b"\n"):
            return None
        answer = json.loads(received)
        assert isinstance(answer, dict), f"{self.name}: {who} said {answer!r}"
        if "error" in answer:
            raise self._fail(f"{who}: {answer['error']}")
        return answer

    def _fail(self, why: str) -> LaunchError:
        # Read the log before the other ranks are ended: their complaints about that would hide the cause.
        said = last_words(self._log.read_text(errors="replace")) if self._log.exists() else ""
        self._end(grace_s=0.0)
        self.failure = f"{self.name}: {why}" + (f"; it said: {said}" if said else "")
        return LaunchError(self.failure)

    def close(self) -> None:
        """Ask the ranks to stop, and kill those that do not; a second call does nothing."""
        for connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"do": "stop"}\n')
        self._end(grace_s=0.0 if self.failure else END_TIMEOUT_S)

    def _end(self, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        # Close the connections first: ranks that are not our children end when theirs closes.
        self._listener.close()
        if self._selector is not None:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            self._selector = None
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        self._ranks.clear()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S if grace_s else 0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel ends it later; the cause matters more
                    process.wait(END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def start_all(contenders: Iterable[Contender], timeout_s: float, progress: Progress) -> None:
    """Start all contenders at once, then wait for each; one that fails reports that at its first turn."""
    found = list(contenders)
    for each in found:
        each.start()
    for number, each in enumerate(found):
        progress(f"starting {each.name}", number / len(found))
        with contextlib.suppress(LaunchError):
            each.ready(timeout_s)


def clean_environ() -> dict[str, str]:
    """Return the environment with one arithmetic thread, and without traces of a job that this bench may run in."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PLIANT_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def process_starter(argv: Sequence[str], sockets: Sequence[socket.socket] = ()) -> Starter:
    """Return a starter of one process, which inherits `sockets`; they are closed here after it has started.

    A worker is forked from the warm process, if there is one (see `forking`).
    """

    def start(output: IO[bytes]) -> Process:
        fds = [each.fileno() for each in sockets]
        nowhere, environ = subprocess.DEVNULL, clean_environ()
        child: Process | None = None
        if argv[:3] == [sys.executable, "-m", WORKER]:
            child = forking.fork_worker(argv[3:], environ, output.fileno(), fds)
        if child is None:
            child = subprocess.Popen(argv, stdin=nowhere, stdout=output, stderr=output, env=environ, pass_fds=fds)
        for each in sockets:
            each.close()
        return child

    return start


def why_no_openmpi() -> str:
    """Return why Open MPI cannot take part; empty if it can."""
    if shutil.which("mpirun") is None:
        return "openmpi skipped: `mpirun` not found; apt-get install openmpi-bin"
    if importlib.util.find_spec("mpi4py") is None:
        return "openmpi skipped: mpi4py not found; pip install mpi4py"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the ranks of all contenders of a contest run: on this host, or spread over the hosts of a lab, or over addresses
    of the loopback interface, which ours takes for hosts."""

    num_workers: int
    folder: Path
    """A private, short-lived folder for sockets and logs."""
    lab: Lab | None = None
    num_hosts: int = 1
    """The number of loopback addresses, without a lab."""

    def host_of(self, rank: int) -> int:
        """Return the host that `rank` runs on: ranks are placed in contiguous blocks."""
        return rank * (self.lab.num_hosts if self.lab is not None else self.num_hosts) // self.num_workers

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each rank's host."""
        listed = self.lab.addresses if self.lab else [f"127.0.0.{1 + host}" for host in range(self.num_hosts)]
        return tuple(listed[self.host_of(rank)] for rank in range(self.num_workers))

    def identities(self, strategy: str = "AUTO") -> tuple[list[dict[str, str]], list[socket.socket]]:
        """Return, for each rank of a job of ours, its environment and the socket that it listens on.

        The sockets are made here and inherited, so that no port can be taken in between.
        """
        sockets = [self._listen(rank) for rank in range(self.num_workers)]
        named = zip(self.addresses, sockets, strict=True)
        members = tuple(Worker(address, listener.getsockname()[1]) for address, listener in named)
        runners = tuple(Worker(address, DEFAULT_RUNNER_PORT) for address in dict.fromkeys(self.addresses))
        view, secret = View(0, members, runners), secrets.token_bytes(32)
        environs = [
            WorkerSpec(worker=member, view=view, secret=secret, strategy=strategy, listen_fd=each.fileno()).to_environ()
            for member, each in zip(members, sockets, strict=True)
        ]
        return environs, sockets

    def _listen(self, rank: int) -> socket.socket:
        address = self.addresses[rank]
        if self.lab is None:
            return socket.create_server((address, 0))
        return self.lab.call(self.host_of(rank), lambda: socket.create_server((address, 0)))

    def contender(
        self,
        name: str,
        program: str,
        task: Mapping[str, object],
        *,
        strategy: str = "",
        launcher: Callable[[list[str]], list[str]] | None = None,
        **setup: object,
    ) -> Contender:
        """Make a contender, not started yet, whose ranks run `program` ("module:function", see `worker`) with `task`.

        With a `strategy` the ranks form a job of ours. By default one process loads torch and forks all ranks, each into the
        namespace of its host; a `launcher` such as mpirun gets the command line of a single rank and returns its own.
        """
        environs: Sequence[Mapping[str, str]] = ()
        sockets: Sequence[socket.socket] = ()
        if strategy:
            environs, sockets = self.identities(strategy)
        control = self.folder / f"{name}.sock"
        argv = [sys.executable, "-m", WORKER, str(control)]
        if launcher is None:
            ranks = range(self.num_workers)
            argv += [program, *(self.lab.namespaces[self.host_of(rank)] if self.lab else "" for rank in ranks)]
        else:
            argv = launcher(argv)
        iface = INTERFACE if self.lab is not None else "lo"
        told = {"program": program, "task": task, "environs": environs, "ifaces": [iface] * self.num_workers, **setup}
        return Contender(name, self.num_workers, [process_starter(argv, sockets)], control, told)


# --- the contest ---


@dataclass(slots=True)
class Timings:
    """Measurements of one contender, round by round."""

    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each iteration, of the slowest rank."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of an iteration, all ranks together."""
    failure: str = ""
    """Why the contender is out; empty if it is not."""
    link_bytes: list[float] = field(default_factory=list)
    """Bytes that an iteration put on the links, by the kernel's count, where there are links; one per round."""
    egress_bytes: list[float] = field(default_factory=list)
    """Bytes that an iteration sent, by the contender's own count, where it has one; one per round."""
    wrong: int | None = None
    """Number of elements that differ from the right sum; None means not checked."""

    @property
    def seconds(self) -> list[float]:
        return [second for each in self.rounds for second in each]

    @property
    def median_s(self) -> float | None:
        return quantile(self.seconds, 0.5) if self.rounds and not self.failure else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How a contest is held."""

    rounds: int = 10
    """How often every contender gets a turn."""
    iterations: int = 3
    """Iterations in a turn."""
    warmup: int = 2
    """Iterations before the first round, not counted."""
    timeout_s: float = 120.0
    """A turn that takes longer is a failure."""
    limit_s: float = math.inf
    """No round begins when the rounds have taken this long together, except the first `least_rounds`."""
    least_rounds: int = 2
    """Rounds that are held even if time is over."""
    alternate: bool = False
    """Whether every second round has the reverse order, so that no contender always follows the same one."""


T = TypeVar("T", bound=Timings)


def interleave(
    results: Mapping[str, T],
    num_turns: int,
    take_turn: Callable[[str, T, int], None],
    progress: Progress = lambda what, fraction: None,
    limit_s: float = math.inf,
    *,
    least: int = 3,
    alternate: bool = False,
) -> None:
    """Let all labels of `results` take turns; one whose turn raises LaunchError is out, and the others go on.

    After `limit_s` no turn begins but the first `least`. With `alternate`, every second turn has the reverse order.
    """
    begun_s = time.monotonic()
    for turn in range(num_turns):
        if turn >= least and time.monotonic() - begun_s > limit_s:
            break
        if all(timings.failure for timings in results.values()):
            break
        order = list(results.items())
        for position, (label, timings) in enumerate(reversed(order) if alternate and turn % 2 else order):
            if timings.failure:
                continue
            progress(label, (turn * len(results) + position) / (num_turns * len(results)))
            try:
                take_turn(label, timings, turn)
            except LaunchError as error:
                timings.failure = str(error)
    progress("done", 1.0)


def hold(
    contenders: Iterable[Contender],
    rules: Rules,
    *,
    checked: Collection[str] = (),
    count_link_bytes: Callable[[], int] | None = None,
    iterations: Mapping[str, int] | None = None,
    command: Mapping[str, object] | None = None,
    progress: Progress = lambda what, fraction: None,
) -> dict[str, Timings]:
    """Let the contenders compete, and return their measurements by name. Never raises for a contender's failure.

    Contenders in `checked` first reduce a known pattern, and compare the sum. `iterations` are those of a contender's turn
    where they are not those of the rules. `command` has more fields for all commands.
    """
    jobs = {job.name: job for job in contenders}

    def take_turn(name: str, timings: Timings, turn: int) -> None:
        def ask(do: str, count: int) -> list[Answer]:
            return jobs[name].ask({"do": do, "iterations": count, **(command or {})}, rules.timeout_s)

        if turn == 0:
            if name in checked:
                timings.wrong = sum(_int(answer["wrong"]) for answer in ask("check", 1))
            ask("run", rules.warmup)
            return
        before = count_link_bytes() if count_link_bytes is not None else 0
        count = (iterations or {}).get(name, rules.iterations)
        answers = ask("run", count)
        if count_link_bytes is not None:
            timings.link_bytes.append((count_link_bytes() - before) / count)
        timings.rounds.append([max(times) for times in zip(*(floats(a["wall_s"]) for a in answers), strict=True)])
        timings.cpu_s.extend(sum(times) for times in zip(*(floats(a["cpu_s"]) for a in answers), strict=True))
        if all("egress_bytes" in answer for answer in answers):
            timings.egress_bytes.append(sum(_int(answer["egress_bytes"]) for answer in answers) / count)

    results = {name: Timings() for name in jobs}
    most, least = rules.rounds + 1, rules.least_rounds + 1  # the warm-up is a turn, too
    interleave(results, most, take_turn, progress, rules.limit_s, least=least, alternate=rules.alternate)
    return results


def floats(value: object) -> list[float]:
    """Return a JSON list of numbers as floats."""
    assert isinstance(value, list), f"a list of numbers, not {value!r}"
    return [float(each) for each in value]


def _int(value: object) -> int:
    assert isinstance(value, int), f"a whole number, not {value!r}"
    return value


# --- the report: one form for all benches ---


def form(
    bench: str,
    args: Mapping[str, object],
    ok: bool,
    remarks: Sequence[str],
    *,
    ours: object = None,
    peers: object = None,
    bound: object = None,
    **fields: object,
) -> Json:
    """Return a result in the one form: bench, args, ours, peers, bound, the bench's own fields, machine, ok, remarks.

    `ours` is None where no single number says it, as in a sweep; the bench's own fields do.
    """
    numbers = {
        "ours": {"median_s": None, "iqr_s": None} if ours is None else ours,
        "peers": peers or {},
        "bound": bound,
    }
    known = {"bench": bench, "args": dict(args), **numbers, **fields}
    return {**known, "machine": machine(), "ok": ok, "remarks": list(remarks)}


def measured(timings: Timings, num_bytes: int = 0) -> Json:
    """Return the numbers of one contender; the times are null if it failed."""
    if not timings.rounds or timings.failure:
        return {"median_s": None, "iqr_s": None, "failure": timings.failure or "no round was finished"}
    summary = Summary.of(timings.seconds)
    cpu_s = quantile(timings.cpu_s, 0.5)
    values: Json = {
        **summary.to_json(),
        "cpu_s": cpu_s,
        "cpu_busy": cpu_s / (summary.median * len(os.sched_getaffinity(0))),
        "tensor_bytes_per_s": num_bytes / summary.median,
    }
    if timings.link_bytes:
        values["link_bytes"] = quantile(timings.link_bytes, 0.5)
    if timings.egress_bytes:
        values["egress_bytes"] = quantile(timings.egress_bytes, 0.5)
    if timings.wrong is not None:
        values["wrong_elements"] = timings.wrong
    return values


def beside(peer: Timings, ours: Timings, num_bytes: int = 0) -> Json:
    """Return a peer's numbers with `speedup`: its time over ours."""
    values = measured(peer, num_bytes)
    ratios = paired_ratios(peer.rounds, ours.rounds)
    if peer.median_s is None or ours.median_s is None or not ratios:
        return {**values, "speedup": None}
    spread = {"speedup_p10": quantile(ratios, 0.1), "speedup_p90": quantile(ratios, 0.9)}
    return {**values, "speedup": peer.median_s / ours.median_s, **spread}


def bound(name: str, median_s: float | None, ours: Timings, details: Mapping[str, object]) -> Json:
    """Return the bound with `fraction`: its time over ours, 1 if ours reaches it."""
    fraction = median_s / ours.median_s if median_s is not None and ours.median_s is not None else None
    return {"name": name, "median_s": median_s, "fraction": fraction, **details}


def is_ok(timings: Timings) -> bool:
    return timings.median_s is not None and not timings.wrong


def failures(results: Mapping[str, Timings]) -> list[str]:
    """Return a remark for every contender that failed or summed wrongly."""
    remarks = [timings.failure for timings in results.values() if timings.failure]
    wrong = [f"{label}: {timings.wrong} wrong elements" for label, timings in results.items() if timings.wrong]
    return list(dict.fromkeys(remarks)) + wrong


def fastest(labels: Sequence[str], results: Mapping[str, Timings]) -> str:
    """Return the label with the least median; the first one if all failed."""
    finished = [label for label in labels if is_ok(results[label])]
    return min(finished, key=lambda label: results[label].median_s or 0.0, default=labels[0])


# --- other measurements ---


def measure_apart(module: str, task: Mapping[str, object], *, who: str, timeout_s: float) -> Json:
    """Run `python -m MODULE TASK` in a session of its own, and return the JSON object on its last line.

    This is for what must be measured in a process of its own, such as peak memory. Everything that the process has started
    is gone afterwards.

    Raises:
        LaunchError: the process failed, or was not done in time.
    """
    argv = [sys.executable, "-m", module, json.dumps(task)]
    # Files, not pipes: what the process has started may hold a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(argv, stdout=output, stderr=log, env=clean_environ(), start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{who}: not done within {timeout_s:g} s; measure less") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        log.seek(0)
        if code != 0:
            raise LaunchError(f"{who}: exit code {code}; it said: {last_words(log.read())}")
        found: Json = json.loads(output.read().splitlines()[-1])
        return found


def processor_times() -> list[int]:
    """Return how the time of all processors was spent so far, by kind, as /proc/stat has it."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share of the processors' time between two `processor_times` that was used, by any process."""
    spent = [now - then for then, now in zip(before, after, strict=True)]
    return 1 - (spent[3] + spent[4]) / sum(spent[:8]) if sum(spent[:8]) else 0.0
