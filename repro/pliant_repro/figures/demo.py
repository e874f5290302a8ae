"""The two jobs of `pliant demo`: stock DDP as the reference, pliant through resizes and a kill, and their comparison.

Both jobs are real processes of `program`, and all that is known about them comes from their logs. `cli.demo` prints it.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pliant import child
from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.jobs.store import running_jobs
from pliant_repro.figures import launch
from pliant_repro.figures.launch import Change, RunLog, Step, Task

REPLICAS, STEPS_PER_EPOCH = 4, 12
"""1536 images in batches of 32 for each of 4 replicas."""
SEED = 2027
KILL = "kill"
POLL_S, END_S, TAIL_CHARS = 0.05, 15.0, 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Options of the demo."""

    epochs: int = 30
    path: tuple[str, ...] = ("2", KILL, "3", "1")
    """Events of pliant's job, spread over its steps: a number of workers, or a kill."""
    pace_s: float = 0.03
    """Least duration of pliant's steps, so that new workers arrive while there is something to do."""
    timeout_s: float = 300.0
    nudge: int | None = None
    """Spoil the reference by one unit in the last place of one weight, after this step: a negative control."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"--epochs {self.epochs}: use 1 or more")
        workers, path = REPLICAS, ",".join(self.path)
        for word in self.path:
            if word == KILL and workers == 1:
                raise ConfigError(f"--path {path}: nobody survives the kill of the only worker")
            if word == KILL:
                continue  # it is replaced
            if not (word.isdecimal() and 1 <= int(word) <= REPLICAS) or int(word) == workers:
                other = f"nor another number of workers from 1 to {REPLICAS}"
                raise ConfigError(f"--path {path}: {word!r} is not {KILL}, {other}")
            workers = int(word)

    @property
    def num_steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    @property
    def moments(self) -> list[int]:
        """The steps at which something happens."""
        return [(index + 1) * self.num_steps // (len(self.path) + 1) for index in range(len(self.path))]


@dataclass(slots=True)
class Event:
    """Something that was done to pliant's job."""

    what: str
    """As a user would have typed it."""
    workers: int
    """Number of workers when it is over."""
    begun_s: float
    known_changes: int
    """Number of changes of view before it."""
    is_kill: bool = False


@dataclass(frozen=True, slots=True)
class EventRow:
    """A line of the final table."""

    step: int
    workers: str
    event: str
    pause_s: float | None
    """None where nothing paused."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two jobs did the same."""

    num_steps: int
    num_digests: int
    """Digests of the second job that were compared."""
    num_losses: int
    first_difference: int | None
    """First step that differs; None if none does."""
    what: str = ""
    """The difference, in words."""

    @property
    def identical(self) -> bool:
        return self.first_difference is None


def compare(reference: RunLog, other: RunLog, *, num_steps: int, replicas: int) -> Verdict:
    """Compare every digest and every loss of all `num_steps` steps. What is missing differs, too."""
    first, what = None, ""
    for number in range(num_steps):
        what = _difference(reference.steps.get(number, Step()), other.steps.get(number, Step()), replicas)
        if what:
            first = number
            break
    beyond = sorted(number for number in {*reference.steps, *other.steps} if number >= num_steps)
    if first is None and beyond:
        first, what = beyond[0], f"there should be {num_steps} steps only"
    losses = [values for step in other.steps.values() for values in step.losses.values()]
    digests = sum(len(step.digests) for step in other.steps.values())
    return Verdict(num_steps, digests, sum(map(len, losses)), first, what)


def _difference(expected: Step, found: Step, replicas: int) -> str:
    """Return how a step differs; empty if it does not."""
    for whose, step in (("DDP", expected), ("pliant", found)):
        if not step.digests or len(step.losses) != replicas:
            there = f"{len(set(step.digests))} digests and losses of {len(step.losses)} of {replicas} replicas"
            return f"{whose} has {there}"
    compared = {
        f"loss of replica {number}": (expected.losses[number], found.losses[number]) for number in range(replicas)
    }
    compared["SHA-256 of the state"] = (expected.digests, found.digests)  # type: ignore[assignment]
    for what, values in compared.items():
        theirs, ours = (" and ".join(sorted({str(value) for value in side})) for side in values)
        if theirs != ours or (what.startswith("SHA") and " and " in theirs):
            return f"{what}: DDP {theirs}, pliant {ours}"
    return ""


class Demo:
    """The two jobs and what is known of them so far. `run` does everything."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self.options = options
        self.events: list[Event] = []
        self.stage = ""
        """The current activity, in words."""
        self._folder = folder
        for name in ("ddp", "pliant"):
            (folder / name).mkdir()
        self.reference, self.elastic = RunLog(folder / "ddp"), RunLog(folder / "pliant")
        self._deadline_s = math.inf
        self._watch: Callable[[], None] = lambda: None

    def run(self, watch: Callable[[], None] = lambda: None) -> Verdict:
        """Run both jobs to their ends, calling `watch` several times a second. Nothing is left running afterwards.

        Raises:
            LaunchError: a job failed or took too long; with the end of its output.
        """
        self._watch, self._deadline_s = watch, time.monotonic() + self.options.timeout_s
        self.stage = "reading the images"
        watch()
        data = launch.save_digits(self._folder / "digits.npz")
        task = Task(model="digits", epochs=self.options.epochs, replicas=REPLICAS, seed=SEED, data=data, digest=True)
        launcher = [*launch.PLIANT, "run", "-w", "-q", "-np", str(REPLICAS), "--grace", "500ms"]
        with self._started("ddp", [], replace(task, mode="ddp", nudge=self.options.nudge)) as ddp:
            self.stage = "stock DDP on 4 processes starts"
            # Imports take one core, training takes both: pliant's processes import while DDP trains.
            self._until(lambda: self.reference.last_step >= 0, ddp)
            self.stage = "stock DDP on 4 processes trains; pliant starts"
            with self._started("pliant", launcher, replace(task, pace_s=self.options.pace_s), END_S) as runner:
                self._until(lambda: self.elastic.last_step >= 0, ddp, runner)
                self.stage = "pliant trains"
                with ConfigClient(*_server_of(runner.pid)) as client:
                    self._follow_path(client, ddp, runner)
                self._until(lambda: runner.poll() is not None, ddp, runner)
            self.stage = "waiting for DDP"
            self._until(lambda: ddp.poll() is not None, ddp)
        self.stage = "comparing"
        self._look()
        return compare(self.reference, self.elastic, num_steps=self.options.num_steps, replicas=REPLICAS)

    def _follow_path(self, client: ConfigClient, *jobs: subprocess.Popen[bytes]) -> None:
        """Let the events of the path happen, one after the other."""
        for moment, word in zip(self.options.moments, self.options.path, strict=True):
            if not self._wait_for(partial(self._has_reached, moment), *jobs):
                break
            begin = self._kill if word == KILL else partial(self._resize, client, int(word))
            try:
                self.events.append(begin())
            except ServerUnavailable:
                break
            if not self._wait_for(self._has_happened, *jobs):
                break
        else:
            return
        raise LaunchError(
            f"pliant's job ended after {self.elastic.last_step + 1} steps, before all of {','.join(self.options.path)} had "
            "happened: give it more steps (--epochs) or longer ones (--pace)"
        )

    def _wait_for(self, reached: Callable[[], bool], *jobs: subprocess.Popen[bytes]) -> bool:
        """Wait for it; return False if the last of the jobs has ended, and well, before."""
        self._until(lambda: reached() or jobs[-1].poll() is not None, *jobs)
        return reached()

    def _has_reached(self, step: int) -> bool:
        """Return whether that step is next, and one was done since the last change of view."""
        changes = self.elastic.changes
        return self.elastic.last_step >= max(step - 1, changes[-1].step if changes else 0)

    def _has_happened(self) -> bool:
        last = self.events[-1]
        changes = self.elastic.changes[last.known_changes :]
        return bool(changes) and changes[-1].new_size == last.workers

    def _resize(self, client: ConfigClient, size: int) -> Event:
        event = Event(f"pliant resize {size}", size, time.monotonic(), len(self.elastic.changes))
        client.resize(size)
        return event

    def _kill(self) -> Event:
        newest = self.elastic.steps[self.elastic.last_step]
        pid = newest.pids[0]  # whose loss is the end of a job in most systems
        what, known = f"kill -9 {pid} (rank 0)", len(self.elastic.changes)
        event = Event(what, newest.size, time.monotonic(), known, is_kill=True)
        os.kill(pid, signal.SIGKILL)
        return event

    def _until(self, reached: Callable[[], bool], *jobs: subprocess.Popen[bytes]) -> None:
        while True:
            self._look()
            for job, name in zip(jobs, ("ddp", "pliant"), strict=False):
                if job.poll():
                    raise LaunchError(f"the {name} job ended with {job.poll()}: {self._tail(name)}")
            if reached():
                return
            if time.monotonic() > self._deadline_s:
                raise LaunchError(
                    f"the demo was not over after {self.options.timeout_s:g} s, at `{self.stage}`: give it longer with --timeout; "
                    f"the end of the output: {self._tail('pliant' if len(jobs) > 1 else 'ddp')}"
                )
            time.sleep(POLL_S)

    def _look(self) -> None:
        self.reference.read()
        self.elastic.read()
        self._watch()

    @contextlib.contextmanager
    def _started(
        self, name: str, launcher: Sequence[str], task: Task, grace_s: float = 0.0
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a job for the time of the block, in a session of its own: Ctrl-C is for this process, which ends the job. If
        this process is killed, the kernel ends the job."""
        program = launch.program(task, self._folder / name)
        with (self._folder / f"{name}.log").open("wb") as log:
            job = subprocess.Popen(
                [sys.executable, child.__file__, str(os.getpid()), *launcher, *program],
                env=launch.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield job
        finally:
            launch.end_process_group(job, grace_s)

    def _tail(self, name: str) -> str:
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return text[-TAIL_CHARS:].strip() or "(none)"

    def rows(self) -> list[EventRow]:
        """Return what has happened to pliant's job so far."""
        first = self.elastic.steps.get(0)
        begin = [EventRow(0, str(first.size), "pliant run -w -np 4", None)] if first is not None else []
        return begin + [self._row(number, change) for number, change in enumerate(self.elastic.changes)]

    def _row(self, number: int, change: Change) -> EventRow:
        cause = next((each for each in reversed(self.events) if each.known_changes <= number), None)
        event, pause_s = "", change.pause_s
        if cause is not None:
            since_s = change.at_s - cause.begun_s
            event = cause.what
            if change.lost:
                pause_s = since_s  # as somebody sees it who waits for the next step: until the loss was noticed, too
            elif cause.is_kill:
                event = f"replaced after {since_s:.1f} s"
            elif change.new_size > change.old_size:
                event += f", in {since_s:.1f} s"
        return EventRow(change.step, f"{change.old_size} -> {change.new_size}", event, pause_s)

    def draw(self, verdict: Verdict, path: Path) -> None:
        """Draw both curves, one on the other, and below them the number of workers."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        styles = ((self.reference, "tab:orange", 5, 0.5, "stock DDP, 4 processes"),
                  (self.elastic, "tab:blue", 1, 1.0, "pliant, 4 to 1 workers"))  # fmt: skip
        for log, colour, width, alpha, label in styles:
            steps = sorted(step for step, done in log.steps.items() if done.losses)
            losses = [log.steps[step].loss for step in steps]
            above.plot(steps, losses, color=colour, linewidth=width, alpha=alpha, label=label)
        answer = "yes" if verdict.identical else f"NO, from step {verdict.first_difference} on"
        title = f"{verdict.num_steps} steps on scikit-learn's digits, bit-identical: {answer}"
        above.set(yscale="log", ylabel="loss, mean of 4 replicas", title=title)
        above.legend()
        sizes = sorted((step, done.size) for step, done in self.elastic.steps.items() if done.size)
        below.step([step for step, _ in sizes], [size for _, size in sizes], where="mid", color="tab:blue")
        below.set(ylabel="workers", xlabel="step", ylim=(0, 4.6), yticks=range(5))
        for number, row in enumerate(self.rows()):
            for axes in (above, below):
                colour = "tab:red" if "kill" in row.event else "gray"
                axes.axvline(row.step, color=colour, linewidth=0.8, linestyle="--")
            # One below the other: a kill and the replacement are only a few steps apart.
            place = (row.step, 0.32 - 0.06 * (number % 6))
            above.annotate(row.event, place, xycoords=("data", "axes fraction"), xytext=(4, 0),
                           textcoords="offset points", fontsize=8)  # fmt: skip
        figure.savefig(path, dpi=120)


def _server_of(runner: int) -> tuple[str, str]:
    """Return address and token of the config server of the job that this process runs."""
    for job in running_jobs():
        if job.pid == runner:
            return job.config_server, job.token
    raise LaunchError(f"the job of process {runner} is not among the running jobs of this machine")
