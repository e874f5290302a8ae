"""An interleaved contest: every contender is a job of worker processes that wait until it is their turn.

The controller goes A B C, A B C, ...: what disturbs the machine disturbs all of them alike. A
contender that dies or hangs is out, with the reason; the others go on. Nothing here knows what
the contenders do in their turn; `bench.told` is their end of the line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from pliant.errors import LaunchError

END_TIMEOUT_S = 3.0
_TAIL_LINES = 2

_LISTENER = "listener"

Answer = Mapping[str, object]


class Starter(Protocol):
    """Starts one process of a job, with its output going to `output`."""

    def __call__(self, output: IO[bytes]) -> subprocess.Popen[bytes]: ...


def last_words(log: str) -> str:
    """The last lines of a log that say something: no rulers, no source positions of a traceback."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if re.search("[A-Za-z]", line) and not line.startswith('File "')]
    return " | ".join(telling[-_TAIL_LINES:])


def measured_apart(module: str, task: str, *, who: str, timeout_s: float, remedy: str = "") -> dict[str, object]:
    """What `python -m MODULE TASK` says on its last line, a JSON object: for what must be measured in a process of its own.

    Raises:
        LaunchError: it failed, or was not done in time.
    """
    argv = [sys.executable, "-m", module, task]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{who}: not done within {timeout_s:g} s{remedy and f'; {remedy}'}") from None
    if done.returncode != 0:
        raise LaunchError(f"{who}: exit code {done.returncode}; it said: {last_words(done.stderr)}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


class Job:
    """A contender's processes, and the line to each of its workers.

    `starters` are the processes to start: one per worker, or one launcher of them all.
    """

    def __init__(self, name: str, num_workers: int, starters: Sequence[Starter], control: Path) -> None:
        self.name = name
        self.failure = ""
        self._num_workers = num_workers
        self._starters = starters
        self._control = control
        self._log = control.with_suffix(".log")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[socket.socket, int] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._pidfds: dict[int, subprocess.Popen[bytes]] = {}
        self._selector: selectors.BaseSelector | None = None

    def start(self) -> Self:
        """Start the processes; `ready` waits for them, so that several jobs can start at once."""
        self._selector = selector = selectors.DefaultSelector()
        listener = socket.socket(socket.AF_UNIX)
        selector.register(listener, selectors.EVENT_READ, data=_LISTENER)
        listener.bind(str(self._control))
        listener.listen(self._num_workers)
        with self._log.open("wb") as output:
            for starter in self._starters:
                process = starter(output)
                self._processes.append(process)
                pidfd = os.pidfd_open(process.pid)
                self._pidfds[pidfd] = process
                selector.register(pidfd, selectors.EVENT_READ)
        return self

    def ready(self, timeout_s: float) -> None:
        """Wait until every worker has joined the others.

        Raises:
            LaunchError: one died or said nothing; it and the reason are named.
        """
        for connection, answer in self._gather(timeout_s).items():
            rank = answer["rank"]
            assert isinstance(rank, int), f"{self.name}: a worker said {answer}"
            self._ranks[connection] = rank

    def ask(self, command: Mapping[str, object], timeout_s: float) -> list[Answer]:
        """Give all workers the same command; their answers, by rank.

        Raises:
            LaunchError: a worker died, failed or did not answer in time. The job is over then.
        """
        if self.failure:
            raise LaunchError(self.failure)
        try:
            for connection in self._ranks:
                connection.sendall(json.dumps(command).encode() + b"\n")
            answers = self._gather(timeout_s)
        except OSError as error:
            raise self._failed(f"a worker is gone ({error})") from error
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
                raise self._failed(f"{missing} of {self._num_workers} workers did not answer within {timeout_s:g} s")
            for key, _ in events:
                if isinstance(key.fileobj, int):
                    # A worker's last words may still be in its socket, and are the better explanation.
                    selector.unregister(key.fileobj)
                    if not self._ranks or len(self._processes) == 1:
                        raise self._failed(f"ended early with exit status {self._pidfds[key.fileobj].wait()}")
                    continue
                assert isinstance(key.fileobj, socket.socket), "only sockets and pidfds are registered"
                if key.data is _LISTENER:
                    selector.register(key.fileobj.accept()[0], selectors.EVENT_READ)
                elif (answer := self._read(key.fileobj)) is not None:
                    answers[key.fileobj] = answer
        return answers

    def _read(self, connection: socket.socket) -> Answer | None:
        """An answer where one is complete; None: more is to come."""
        who = f"rank {self._ranks[connection]}" if connection in self._ranks else "a worker"
        try:
            data = connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise self._failed(f"{who} ended early")
        received = self._received.get(connection, b"") + data
        if not received.endswith(b"\n"):
            self._received[connection] = received
            return None
        self._received[connection] = b""
        answer = json.loads(received)
        assert isinstance(answer, dict), f"{self.name}: {who} said {answer!r}"
        if "error" in answer:
            raise self._failed(f"{who}: {answer['error']}")
        return answer

    def _failed(self, why: str) -> LaunchError:
        # Read before the others are ended, whose complaints about that would hide the cause.
        said = last_words(self._log.read_text(errors="replace")) if self._log.exists() else ""
        self._end(grace_s=0.0)
        self.failure = f"{self.name}: {why}" + (f"; it said: {said}" if said else "")
        return LaunchError(self.failure)

    def close(self) -> None:
        """Ask the workers to leave, and kill those that do not; again is harmless."""
        for connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"do": "stop"}\n')
        self._end(grace_s=0.0 if self.failure else END_TIMEOUT_S)

    def _end(self, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        # The connections first: a launcher's workers, who are not our children, end when theirs closes.
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
                process.wait(END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ToldJob(Job):
    """A job whose ranks are told what they are when they have come up."""

    def __init__(
        self, name: str, num_workers: int, starters: Sequence[Starter], control: Path, setup: Mapping[str, object]
    ) -> None:
        super().__init__(name, num_workers, starters, control)
        self._setup = setup
        self.told: list[Answer] = []
        """What the ranks answered to that, by rank; empty before."""

    def ready(self, timeout_s: float) -> None:
        super().ready(timeout_s)
        self.told = self.ask({"do": "setup", **self._setup}, timeout_s)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the contest: a job, and how it is set up for this line."""

    label: str
    job: Job
    options: Mapping[str, str] = field(default_factory=dict)
    sums: bool = True
    """Whether it sums, so that its values can be checked."""


@dataclass(slots=True)
class Series:
    """What an entry did, round by round."""

    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each iteration: the slowest rank's."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each iteration, all ranks together."""
    link_bytes: list[float] = field(default_factory=list)
    """What an iteration put on the links, by the kernel's count, where there are links; one per round."""
    egress_bytes: list[float] = field(default_factory=list)
    """What an iteration sent, by the contender's own count, where it has one; one per round."""
    wrong: int | None = None
    """Elements that differed from the right sum; None: not checked."""
    failure: str = ""
    """Why it is out; empty: it is not."""

    @property
    def seconds(self) -> list[float]:
        return [second for each in self.rounds for second in each]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How a contest is held."""

    rounds: int = 10
    """How often everyone gets a turn."""
    iterations: int = 3
    """What everyone does in a turn."""
    warmup: int = 2
    """Iterations before the first round, not counted."""
    check: bool = False
    """Reduce a known pattern first, and compare."""
    timeout_s: float = 120.0
    """A turn that takes longer is a failure."""


def hold(
    entries: Sequence[Entry],
    rules: Rules,
    *,
    count_link_bytes: Callable[[], int] | None = None,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> dict[str, Series]:
    """Let the entries compete; what each did, by label. Never raises for what a contender does wrong."""
    results = {entry.label: Series() for entry in entries}
    turns = rules.rounds + 1
    for turn in range(turns):
        for position, entry in enumerate(entries):
            series = results[entry.label]
            if series.failure:
                continue
            progress(entry.label, (turn * len(entries) + position) / (turns * len(entries)))
            try:
                if turn == 0:
                    _prepare(entry, series, rules)
                else:
                    _take_turn(entry, series, rules, count_link_bytes)
            except LaunchError as error:
                series.failure = str(error)
    progress("done", 1.0)
    return results


def _prepare(entry: Entry, series: Series, rules: Rules) -> None:
    if rules.check and entry.sums:
        answers = entry.job.ask({"do": "check", "options": entry.options, "iterations": 1}, rules.timeout_s)
        series.wrong = sum(_number(answer, "wrong") for answer in answers)
    entry.job.ask({"do": "run", "options": entry.options, "iterations": rules.warmup}, rules.timeout_s)


def _take_turn(entry: Entry, series: Series, rules: Rules, count_link_bytes: Callable[[], int] | None) -> None:
    links_before = count_link_bytes() if count_link_bytes is not None else 0
    answers = entry.job.ask({"do": "run", "options": entry.options, "iterations": rules.iterations}, rules.timeout_s)
    if count_link_bytes is not None:
        series.link_bytes.append((count_link_bytes() - links_before) / rules.iterations)
    series.rounds.append([max(times) for times in zip(*(_times(answer, "wall_s") for answer in answers), strict=True)])
    series.cpu_s.extend(sum(times) for times in zip(*(_times(answer, "cpu_s") for answer in answers), strict=True))
    sent = [_sent(answer) for answer in answers]
    if None not in sent:
        series.egress_bytes.append(sum(each or 0 for each in sent) / rules.iterations)


def _times(answer: Answer, key: str) -> list[float]:
    times = answer.get(key)
    assert isinstance(times, list), f"{key} in {answer}"
    return [float(each) for each in times]


def _number(answer: Answer, key: str) -> int:
    number = answer.get(key)
    assert isinstance(number, int), f"{key} in {answer}"
    return number


def _sent(answer: Answer) -> int | None:
    before, after = answer.get("before"), answer.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict) or "egress_bytes" not in after:
        return None
    return int(after["egress_bytes"]) - int(before["egress_bytes"])
