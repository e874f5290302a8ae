"""A real elastic job for benches: `pliant run -w` on this host, whose workers tell when each of their steps begins.

`ElasticJob` starts it, listens, and ends it; `bench.resize` and `bench.recover` change it and measure.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro.bench.contest import last_words
from pliant_repro.bench.elastic_worker import Beginning, ElasticTask
from pliant_repro.bench.stats import Summary
from pliant_repro.profiles import check_trained

MAIN = "from pliant.cli.main import main; main()"
END_S = 20.0
Condition = Callable[[Sequence[Beginning]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """What a bench of an elastic job was asked for.

    Raises (when made):
        ConfigError: a value that cannot be.
    """

    num_workers: int = 4
    small: int = 2
    """The number of workers to shrink to, where the bench resizes."""
    replicas: int = 0
    """Of the job; 0: one for each of `num_workers`."""
    repeat: int = 20
    model: str = "resnet18"
    batch: int = 2
    size: int = 32
    seed: int = 0
    """Of the choice of whom to kill, and when."""
    timeout_s: float = 60.0
    """How long a change may take."""
    start_timeout_s: float = 180.0
    """How long the job may take to its first steps."""

    def __post_init__(self) -> None:
        check_trained(self.model)
        if not 2 <= self.num_workers <= 64:
            raise ConfigError(f"-np {self.num_workers}: use 2 to 64")
        if not 1 <= self.small < self.num_workers:
            raise ConfigError(f"--to {self.small}: use 1 to {self.num_workers - 1}, fewer than -np")
        if self.replicas and self.replicas < self.num_workers:
            raise ConfigError(f"--replicas {self.replicas}: use -np {self.num_workers} or more")
        for flag, value in (("--repeat", self.repeat), ("--batch", self.batch), ("--size", self.size)):
            if value < 1:
                raise ConfigError(f"{flag} {value}: use 1 or more")

    @property
    def num_replicas(self) -> int:
        return self.replicas or self.num_workers


class ElasticJob:
    """A job under `pliant run -w`, and all that its workers have said. A context manager."""

    def __init__(self, options: ElasticOptions, *, max_restarts: int = 0) -> None:
        self.options = options
        self.told: list[Beginning] = []
        """Every step that any worker has begun, in the order of arrival; times in it are exact, the order is not."""
        self._max_restarts = max_restarts
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._cleanup = contextlib.ExitStack()
        self._runner: subprocess.Popen[bytes] | None = None
        self._log = Path()

    def __enter__(self) -> Self:
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        listener = self._cleanup.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "control"))
        listener.listen(64)
        options = self.options
        task = ElasticTask(
            control=str(folder / "control"),
            replicas=options.num_replicas,
            model=options.model,
            batch=options.batch,
            size=options.size,
        )
        task.write(folder / "task.json")
        self._log = folder / "log"
        program = [sys.executable, "-m", "pliant_repro.bench.elastic_worker", str(folder / "task.json")]
        flags = ["-w", "-q", "-np", str(options.num_workers), "--max-restarts", str(self._max_restarts)]
        flags += ["-port-range", _some_ports()]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PLIANT_")}
        with self._log.open("wb") as output:
            self._runner = subprocess.Popen(
                [sys.executable, "-c", MAIN, "run", *flags, *program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**kept, "OMP_NUM_THREADS": "1"},
            )
        self._cleanup.callback(self._end)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cleanup.close()

    def _end(self) -> None:
        assert self._runner is not None, "entered"
        self._runner.send_signal(signal.SIGTERM)
        try:
            self._runner.wait(END_S)
        except subprocess.TimeoutExpired:
            self._runner.kill()  # its workers have asked the kernel to end with it
            self._runner.wait(END_S)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed: the bench is over
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        pid = 0
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # killed in the middle of a word
                beginning = Beginning.from_line(line)
                pid = beginning.pid
                with self._changed:
                    self.told.append(beginning)
                    self._changed.notify_all()
        with self._changed:
            self._gone.add(pid)
            self._changed.notify_all()

    # --- what benches ask ---

    def await_that(self, what: str, condition: Condition, since: int = 0) -> list[Beginning]:
        """What was told from number `since` on, as soon as it meets the condition.

        Raises:
            LaunchError: the job ended, or the time of the options passed.
        """
        timeout_s = self.options.timeout_s if since else self.options.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                told = self.told[since:]
                if condition(told):
                    return told
                self._check_alive(what)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LaunchError(f"{what}: not within {timeout_s:g} s; {self._last_words()}")
                self._changed.wait(min(left_s, 1.0))

    def _check_alive(self, what: str) -> None:
        assert self._runner is not None, "entered"
        code = self._runner.poll()
        if code is not None:
            raise LaunchError(f"{what}: the job ended with exit code {code}; {self._last_words()}")

    def _last_words(self) -> str:
        said = last_words(self._log.read_text(errors="replace"))
        return f"it said: {said}" if said else "it said nothing"

    def await_steady(self, num_workers: int, steps: int, since: int = 0) -> list[Beginning]:
        """Until `num_workers` workers have each committed `steps` steps in a view of this size; everything since."""

        def steady(told: Sequence[Beginning]) -> bool:
            counts = steps_in_view(told, num_workers)
            present = [counts.get(each.worker, 0) for each in members(told).values()]
            return len(present) == num_workers and min(present) > steps

        return self.await_that(f"{steps} steps on {num_workers} workers", steady, since)

    def await_exits(self, told: Sequence[Beginning], num_workers: int) -> None:
        """Until all who told something, but for the members of the view of `num_workers`, have ended."""
        present = {each.worker for each in told if each.size == num_workers and each.change is not None}
        leavers = {each.pid for each in told if each.worker not in present}
        self.await_that("the end of those who left", lambda _: leavers <= self._gone, self.mark)

    @property
    def mark(self) -> int:
        """How much has been told."""
        return len(self.told)

    @contextlib.contextmanager
    def client(self) -> Iterator[Callable[[int], float]]:
        """A function that asks for a number of workers, and returns the monotonic time just before."""
        from pliant.elastic.client import ConfigClient

        first = self.await_that("the first step", bool)[0]
        with ConfigClient(first.config_server) as client:
            client.wanted()  # connected: later requests do not begin with that

            def resize(size: int) -> float:
                asked_s = time.monotonic()
                client.resize(size)
                return asked_s

            yield resize


def _some_ports() -> str:
    """A range in which no other job on this host is likely to look for ports."""
    begin = random.SystemRandom().randrange(12_000, 31_000, 500)
    return f"{begin}-{begin + 500}"


def members(told: Sequence[Beginning]) -> dict[int, Beginning]:
    """The workers of the newest view that anybody told of, by rank, each with its newest step."""
    newest: dict[str, Beginning] = {each.worker: each for each in told}
    top = max((each.step for each in newest.values()), default=0)
    size = next((each.size for each in reversed(told)), 0)
    return {each.rank: each for each in newest.values() if each.size == size and top - each.step <= 1}


def steps_in_view(told: Sequence[Beginning], size: int) -> dict[str, int]:
    """For each worker of a view of this size: the steps it has begun since it was last in another."""
    counts: dict[str, int] = {}
    for each in told:
        if each.size != size:
            counts.pop(each.worker, None)
        elif each.change is not None:
            counts[each.worker] = 1
        else:
            counts[each.worker] = counts.get(each.worker, 0) + 1
    return counts


def step_times(told: Sequence[Beginning], size: int) -> list[float]:
    """Seconds of the undisturbed steps in views of this size: from the beginning of one to that of the next."""
    before: dict[str, Beginning] = {}
    found = []
    for each in told:
        last = before.get(each.worker)
        if last is not None and last.pid == each.pid and last.size == each.size == size:
            undisturbed = each.change is None and last.change is None and last.own > 0
            if undisturbed and each.step == last.step + 1:
                found.append(each.at_s - last.at_s)
        before[each.worker] = each
    return found


def summary(samples: Sequence[float]) -> Json:
    """The one form's numbers; null where there is no sample."""
    if not samples:
        return {"median_s": None, "iqr_s": None, "num_samples": 0}
    return {**Summary.of(samples).to_json(), "max_s": max(samples), "samples_s": list(samples)}


def brief(samples: Sequence[float]) -> Json:
    """The same without the samples."""
    return {key: value for key, value in summary(samples).items() if key != "samples_s"}


def within(samples: Sequence[float], target_s: float) -> bool:
    return bool(samples) and Summary.of(samples).median <= target_s
