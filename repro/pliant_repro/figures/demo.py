"""The conductor of `pliant demo`: stock DDP as the oracle, pliant through resizes and a kill, and the comparison.

Both jobs are real processes of `digits`. DDP's are forked by the program itself; pliant's are a `pliant run -w` with
its own config server, which is asked for other numbers of workers as `pliant resize` does. All that is
known about either comes from the journals of their processes. Shows nothing: `cli.demo` does.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pliant import child
from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.jobs.store import running_jobs
from pliant_repro.figures import images
from pliant_repro.figures.ledger import Change, Ledger, Verdict, compare

PROGRAM = Path(__file__).with_name("digits.py")
REPLICAS = 4
KILL = "kill"
POLL_S = 0.05
END_S = 15.0
"""How long the runner may take to end its workers when told to."""
TAIL_CHARS = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the demo shall do."""

    epochs: int = 30
    """Of 12 steps each."""
    path: tuple[str, ...] = ("2", KILL, "3", "1")
    """What happens to pliant's job, spread over its steps: a number of workers, or a kill."""
    pace_s: float = 0.03
    """pliant's steps are no shorter, so that newcomers arrive while there is something to do."""
    timeout_s: float = 300.0
    nudge: int | None = None
    """Spoil the oracle by one unit in the last place of one weight, after this step: a negative control."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"--epochs {self.epochs}: use 1 or more")
        workers = REPLICAS
        for word in self.path:
            if word == KILL and workers == 1:
                raise ConfigError(f"--path {','.join(self.path)}: nobody survives the kill of the only worker")
            if word == KILL:
                continue  # it is replaced
            if not (word.isdecimal() and 1 <= int(word) <= REPLICAS) or int(word) == workers:
                raise ConfigError(
                    f"--path {','.join(self.path)}: {word!r} is not {KILL}, nor another number of workers from 1 to {REPLICAS}"
                )
            workers = int(word)

    @property
    def num_steps(self) -> int:
        return images.num_steps(self.epochs, REPLICAS)

    @property
    def moments(self) -> list[int]:
        """The steps at which something happens."""
        return [(index + 1) * self.num_steps // (len(self.path) + 1) for index in range(len(self.path))]


@dataclass(slots=True)
class Happening:
    """Something that was done to pliant's job."""

    what: str
    """As a user would have typed it."""
    workers: int
    """How many there must be for it to be over."""
    begun_s: float
    known_changes: int
    """How many changes of view came before it."""
    is_kill: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the final table."""

    step: int
    workers: str
    event: str
    pause_s: float | None
    """None where nothing paused."""


class Demo:
    """The two jobs and what is known of them so far. `run` does everything."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self.options = options
        self.happenings: list[Happening] = []
        self.stage = ""
        """What is going on now."""
        self._folder = folder
        for name in ("ddp", "pliant"):
            (folder / name).mkdir()
        self.oracle, self.elastic = Ledger(folder / "ddp"), Ledger(folder / "pliant")
        self._deadline_s = math.inf
        self._watch: Callable[[], None] = lambda: None

    def run(self, watch: Callable[[], None] = lambda: None) -> Verdict:
        """Run both jobs to their ends, calling `watch` several times a second; nothing is left running afterwards.

        Raises:
            LaunchError: a job failed or took too long; with its last words.
        """
        self._watch, self._deadline_s = watch, time.monotonic() + self.options.timeout_s
        self.stage = "reading the images"
        watch()
        images.save(images.from_scikit_learn(), self._folder / "digits.npz")
        with self._started("ddp", self._oracle_command()) as oracle:
            self.stage = "stock DDP on 4 processes starts"
            # Imports take one core, training takes both: pliant's import while DDP trains.
            self._until(lambda: self.oracle.last_step >= 0, oracle)
            self.stage = "stock DDP on 4 processes trains; pliant starts"
            with self._started("pliant", self._run_command(), END_S) as runner:
                self._until(lambda: self.elastic.last_step >= 0, oracle, runner)
                self.stage = "pliant trains"
                with ConfigClient(*_server_of(runner.pid)) as client:
                    self._conduct(client, oracle, runner)
                self._until(lambda: runner.poll() is not None, oracle, runner)
            self.stage = "waiting for DDP"
            self._until(lambda: oracle.poll() is not None, oracle)
        self.stage = "comparing"
        self._look()
        return compare(self.oracle, self.elastic, num_steps=self.options.num_steps, replicas=REPLICAS)

    def _conduct(self, client: ConfigClient, *jobs: subprocess.Popen[bytes]) -> None:
        """Let happen what shall happen, one thing after the other."""
        for moment, word in zip(self.options.moments, self.options.path, strict=True):
            if not self._comes(partial(self._has_reached, moment), *jobs):
                break
            begin = self._kill if word == KILL else partial(self._resize, client, int(word))
            try:
                self.happenings.append(begin())
            except ServerUnavailable:
                break
            if not self._comes(self._has_happened, *jobs):
                break
        else:
            return
        raise LaunchError(
            f"pliant's job ended after {self.elastic.last_step + 1} steps, before all of "
            f"{','.join(self.options.path)} had happened: give it more steps (--epochs) or longer ones (--pace)"
        )

    def _comes(self, reached: Callable[[], bool], *jobs: subprocess.Popen[bytes]) -> bool:
        """Wait for it; False if the last of the jobs has ended, and well, before."""
        self._until(lambda: reached() or jobs[-1].poll() is not None, *jobs)
        return reached()

    def _has_reached(self, step: int) -> bool:
        """Whether that step is next, and one was done since the last change of view."""
        changes = self.elastic.changes
        return self.elastic.last_step >= max(step - 1, changes[-1].step if changes else 0)

    def _has_happened(self) -> bool:
        """Whether the last happening has had its effect."""
        last = self.happenings[-1]
        changes = self.elastic.changes[last.known_changes :]
        return bool(changes) and changes[-1].new_size == last.workers

    def _resize(self, client: ConfigClient, size: int) -> Happening:
        happening = Happening(f"pliant resize {size}", size, time.monotonic(), len(self.elastic.changes))
        client.resize(size)
        return happening

    def _kill(self) -> Happening:
        newest = self.elastic.steps[self.elastic.last_step]
        pid = newest.pids[0]  # whose loss is the end of a job in most systems
        happening = Happening(
            f"kill -9 {pid} (rank 0)", newest.workers, time.monotonic(), len(self.elastic.changes), is_kill=True
        )
        os.kill(pid, signal.SIGKILL)
        return happening

    def _until(self, reached: Callable[[], bool], *jobs: subprocess.Popen[bytes]) -> None:
        while True:
            self._look()
            for job, name in zip(jobs, ("ddp", "pliant"), strict=False):
                if job.poll():
                    raise LaunchError(f"the {name} job ended with {job.poll()}: {self._last_words(name)}")
            if reached():
                return
            if time.monotonic() > self._deadline_s:
                raise LaunchError(
                    f"the demo was not over after {self.options.timeout_s:g} s, at `{self.stage}`: give it longer with --timeout; "
                    f"last words: {self._last_words('pliant' if len(jobs) > 1 else 'ddp')}"
                )
            time.sleep(POLL_S)

    def _look(self) -> None:
        self.oracle.read()
        self.elastic.read()
        self._watch()

    # --- the jobs ---

    def _program(self, name: str) -> list[str]:
        options = self.options
        return [
            *(str(PROGRAM), "--epochs", str(options.epochs), "--replicas", str(REPLICAS)),
            *("--data", str(self._folder / "digits.npz"), "--journal", str(self._folder / name)),
        ]

    def _oracle_command(self) -> list[str]:
        nudge = [] if self.options.nudge is None else ["--nudge", str(self.options.nudge)]
        return [sys.executable, *self._program("ddp"), "--ddp", *nudge]

    def _run_command(self) -> list[str]:
        pliant = [sys.executable, "-c", "from pliant.cli.main import main; main()"]
        arguments = ["run", "-w", "-q", "-np", str(REPLICAS), "--grace", "500ms"]
        return [*pliant, *arguments, *self._program("pliant"), "--pace", str(self.options.pace_s)]

    @contextlib.contextmanager
    def _started(self, name: str, command: Sequence[str], grace_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
        """A job for the time of the block, in a session of its own: Ctrl-C is for us, and we end it. If we are
        killed, the kernel does."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PLIANT_")}
        with (self._folder / f"{name}.log").open("wb") as log:
            job = subprocess.Popen(
                [sys.executable, child.__file__, str(os.getpid()), *command],
                env={**environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield job
        finally:
            _end(job, grace_s)

    def _last_words(self, name: str) -> str:
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return text[-TAIL_CHARS:].strip() or "(none)"

    # --- what it came to ---

    def rows(self) -> list[Row]:
        """What has happened to pliant's job so far."""
        begin = (
            [Row(0, str(self.elastic.steps[0].workers), "pliant run -w -np 4", None)] if 0 in self.elastic.steps else []
        )
        return begin + [self._row(number, change) for number, change in enumerate(self.elastic.changes)]

    def _row(self, number: int, change: Change) -> Row:
        cause = next((each for each in reversed(self.happenings) if each.known_changes <= number), None)
        event, pause_s = "", change.pause_s
        if cause is not None and change.lost:
            # As somebody sees it who waits for the next step: with the time until the loss was noticed.
            event, pause_s = cause.what, change.at_s - cause.begun_s
        elif cause is not None and cause.is_kill:
            event = f"replaced after {change.at_s - cause.begun_s:.1f} s"
        elif cause is not None:
            event = cause.what
            if change.new_size > change.old_size:
                event += f", in {change.at_s - cause.begun_s:.1f} s"
        return Row(change.step, f"{change.old_size} -> {change.new_size}", event, pause_s)


def _server_of(runner: int) -> tuple[str, str]:
    """Address and token of the config server of the job that this process runs."""
    for job in running_jobs():
        if job.pid == runner:
            return job.config_server, job.token
    raise LaunchError(f"the job of process {runner} is not among the running jobs of this machine")


def _end(job: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a job that still runs, and all of its processes; it may take `grace_s` to do so itself."""
    if job.poll() is not None:
        return
    if grace_s:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(grace_s)
            return
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
