"""Many figures in a row, each in a process of its own with a time limit. One that fails does not stop the others.

Every figure leaves its result, NAME.run.json and logs/NAME.log in the folder. What is finished there, with the same options
and version, is not run again: that is how an interrupted batch goes on.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant import child
from pliant_repro.figures import kept
from pliant_repro.figures.facts import FACTS, clock
from pliant_repro.figures.figures import Figure, Options
from pliant_repro.figures.kept import Run, Standing
from pliant_repro.lab import machine

GRACE_S = 30.0
"""After SIGTERM: what a figure needs to end its processes and namespaces."""
LOOK_S = 0.5
QUICK_LIMIT_S, FULL_LIMIT_S = 600.0, 12 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run, and how."""

    figures: Sequence[Figure]
    options: Options
    out: Path
    again: bool = False
    """Also what is finished."""
    plot: bool = True
    limit_s: float = 0.0
    """For each figure; 0: by its size."""

    def limit_of(self, figure: Figure) -> float:
        """Three times the usual, for a slower machine, and some to start with."""
        usual = FULL_LIMIT_S if self.options.full else 3 * FACTS[figure.name].usual_s + 120
        return self.limit_s or (QUICK_LIMIT_S if self.options.quick else usual)


@dataclass(frozen=True, slots=True)
class Now:
    """Where the batch is."""

    name: str
    number: int
    """From 0."""
    elapsed_s: float
    expected_s: float
    said: str
    """The last line of the figure that runs."""


Watch = Callable[[Now], None]
Ended = Callable[[Standing, bool], None]
"""Told of each figure, and whether it was kept from an earlier run."""


def run(plan: Plan, watch: Watch = lambda now: None, ended: Ended = lambda found, already: None) -> list[Standing]:
    """Run what is not finished; every figure's standing in the end. Ends what it has started, however it is left."""
    (plan.out / "logs").mkdir(parents=True, exist_ok=True)
    problems = machine.check() if any(FACTS[figure.name].lab for figure in plan.figures) else []
    found = []
    for number, figure in enumerate(plan.figures):
        done = not plan.again and kept.is_done(plan.out, figure.name, plan.options)
        if not done and FACTS[figure.name].lab and problems:
            why = f"needs network namespaces: {'; '.join(problems)}"
            kept.write(plan.out, figure.name, Run.of(plan.options, kept.SKIPPED, why=why))
        elif not done:
            run_one(plan, figure, number, watch)
        found.append(kept.standing(plan.out, figure.name))
        ended(found[-1], done)
    return found


def run_one(plan: Plan, figure: Figure, number: int = 0, watch: Watch = lambda now: None) -> None:
    """One figure to its end, whatever that is; a failure is written down."""
    log, limit_s = plan.out / "logs" / f"{figure.name}.log", plan.limit_of(figure)
    expected_s, _ = kept.standing(plan.out, figure.name).usual
    command = command_of(figure.name, plan.options, plan.out, plot=plan.plot)
    kept.begin(plan.out, figure.name)
    begun_s = time.monotonic()
    with log.open("wb") as file, _started(command, file.fileno()) as process:
        while process.poll() is None and time.monotonic() - begun_s < limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            watch(Now(figure.name, number, time.monotonic() - begun_s, expected_s, last_line(log)))
        code = process.poll()
    took_s = time.monotonic() - begun_s
    if kept.read(plan.out, figure.name) is not None:
        return  # it has said itself how it went
    if code is None:
        why = f"ended after its limit of {clock(limit_s)}; give it more with --limit MINUTES"
    else:
        why = f"exit code {code}: {last_line(log) or 'it said nothing'} ({log})"
    written = Run.of(
        plan.options, kept.FAILED, why=why, took_s=took_s, command=shown_command(figure.name, plan.options)
    )
    kept.write(plan.out, figure.name, written)


@contextlib.contextmanager
def _started(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that dies with this one, and has ended when the block is left."""
    words = [sys.executable, child.__file__, str(os.getpid()), *command]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what outlived it
        process.wait()


def words_of(name: str, options: Options) -> list[str]:
    """`reproduce NAME` with these options, as words."""
    words = ["reproduce", name]
    words += ["--quick"] * options.quick + ["--full"] * options.full
    words += ["--steps", str(options.steps)] if options.steps else []
    words += ["--models", ",".join(options.models)] if options.models else []
    for flag, value in (("--scale", options.scale), ("--device", options.device), ("--data", options.data)):
        words += [flag, value] if value else []
    return words


def command_of(name: str, options: Options, out: Path, *, plot: bool) -> list[str]:
    """What is started for one figure."""
    start = [sys.executable, "-c", "from pliant.cli.main import main; main()"]
    return [*start, *words_of(name, options), "--out", str(out), "--verbose", *["--no-plot"] * (not plot)]


def shown_command(name: str, options: Options) -> str:
    """What a person would type."""
    return shlex.join(["pliant", *words_of(name, options)])


def last_line(log: Path, most: int = 4096) -> str:
    """The last line with something in it; only the file's end is read."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
