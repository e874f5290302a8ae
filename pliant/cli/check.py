"""The `pliant check` command: does a program give the same bits on one worker as on several?

It runs the first steps of the program on different numbers of workers, and once with a worker that joins in the middle.
The workers write digests of parameters, buffers, optimizer and tracked state after each step; this module compares them.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_writable,
    exit_on_sigterm,
    is_stdout,
    option,
    parse_int,
    save_json,
    show_progress,
)
from pliant.cli.run import split_flags
from pliant.duration import parse_duration
from pliant.errors import ConfigError, LaunchError
from pliant.identity import CheckSettings
from pliant.launch.plan import LEVELS, check_order, find_command
from pliant.launch.supervisor import NEVER_JOINED, TIMEOUT_EXIT

PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
MOST_WORKERS = 8
"""Without --workers, no run has more."""
POLL_S = 0.1
TAIL_LINES = 15
GUARD_MESSAGE = re.compile(
    r"TrainError: (step \d+: the workers do not have .*|before the loop over step \d+ the workers .*)"
)
LOSS_MESSAGE = re.compile(r"^\[\w\] lost .*", re.MULTILINE)
DIGEST = "sha256:"
BEFORE = -1
"""Stands for the state before the first step."""
ADVICE = {
    "optimizer": "an option of the optimizer is set in the loop over the step, which runs once for each replica hosted by a "
    "worker. Set it after or before that loop, from step.number or job.state",
    "tracked": "a tracked object is changed in the loop over the step, which runs once for each replica hosted by a worker. "
    "Change it after that loop, which runs once per step",
    "random": "how many random numbers a turn draws depends on the worker (a branch on job.is_first, a counter of your own). "
    "Draw equally many in every turn, or draw from a generator of your own",
    "state": "the loop over the step depends on something that outlives a turn: a counter, a list, an iterator of your own, "
    "the time, job.rank. In that loop use only its batch, the model and step.replica; count after it, or in job.state",
    "seed": "two runs on 1 worker differ, too, so the program does not repeat itself: seed all generators that it uses before "
    "the model is built (torch, random, numpy), and do not let it depend on the time or on files of its last run",
    "allowed": "two runs on 1 worker differ, too, and the job allows operators without a deterministic kernel: replace them, or "
    "accept that bits are not promised",
    "newcomer": "a new worker lacks something that the others have: keep it in job.state, or give it to job.track",
}


# --- what is compared ---


@dataclass(frozen=True, slots=True)
class RunShape:
    """The workers of one run."""

    workers: int
    grow_to: int = 0
    """If above 0, so many workers from the middle on."""
    is_repeated: bool = False

    def __str__(self) -> str:
        if self.is_repeated:
            return f"{RunShape(self.workers)} again"
        if self.grow_to:
            return f"{self.workers} worker and a newcomer"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"


@dataclass(slots=True)
class CheckedRun:
    """What the workers of one run have written."""

    placement: RunShape
    facts: Mapping[str, Any] | None = None
    """Of the job; None if it never began to train."""
    steps: dict[int, dict[str, str]] = field(default_factory=dict)
    """The digests after each step, and before the first one, by the names of the parts."""
    most_workers: int = 0
    code: int = 0
    output: str = ""

    @property
    def num_steps(self) -> int:
        return len(self.steps.keys() - {BEFORE})

    def read(self, folder: Path) -> None:
        """Read what has been written so far. The last line of a file may not be complete yet."""
        for file in folder.glob("*.jsonl"):
            lines = file.read_text().splitlines(keepends=True)
            for line in (line for line in lines if line.endswith("\n")):
                entry = json.loads(line)
                if "step" in entry:
                    self.steps[entry["step"]] = entry["digests"]
                    self.most_workers = max(self.most_workers, entry["workers"])
                else:
                    self.facts = entry
                    self.steps[BEFORE] = entry["digests"]


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first step in which two runs differ."""

    step: int
    placements: tuple[str, str]
    parts: tuple[str, ...]
    """Names of the parts that differ."""
    num_parts: int
    values: tuple[tuple[str, str, str], ...]
    """Numbers that differ: their names, and both values."""
    advice: str


def first_difference(one: CheckedRun, other: CheckedRun) -> StepDifference | None:
    """Return the first step after which the states of two runs differ; None if they are equal."""
    for step in sorted(one.steps.keys() & other.steps.keys()):
        ours, theirs = one.steps[step], other.steps[step]
        names = list(dict.fromkeys([*ours, *theirs]))
        parts = [name for name in names if ours.get(name) != theirs.get(name)]
        if parts:
            pairs = [(name, ours.get(name, "missing"), theirs.get(name, "missing")) for name in parts]
            values = [each for each in pairs if DIGEST not in each[1] + each[2]]
            key = _kind_of(parts, [name for name, _, _ in values])
            advice = ADVICE["newcomer" if other.placement.grow_to else key]
            placements = (str(one.placement), str(other.placement))
            return StepDifference(step, placements, tuple(parts), len(names), tuple(values[:3]), advice)
    if one.num_steps != other.num_steps:
        step, placements = min(one.num_steps, other.num_steps), (str(one.placement), str(other.placement))
        return StepDifference(step, placements, ("the number of steps",), 1, (), ADVICE["state"])
    return None


def _kind_of(parts: Sequence[str], values: Sequence[str]) -> str:
    """Return the key of the advice for parts that differ."""
    if any(re.search(r"\(\w+( \d+)?\)$", name) for name in values):
        return "optimizer"
    if values:
        return "tracked"
    return "random" if all("random state" in name for name in parts) else "state"


# --- runs ---


@dataclass(frozen=True, slots=True)
class ProgramChecker:
    """Runs the program on several placements, one after the other."""

    program: Sequence[str]
    steps: int
    timeout: str
    flags: Sequence[str]
    folder: Path
    on_step: Callable[[RunShape, int], None]
    """Called with the number of steps that a run has done so far."""

    @property
    def name(self) -> str:
        """The program's name, or its module's."""
        return self.program[1] if self.program[0] == "-m" else self.program[0]

    def run(self, placement: RunShape) -> CheckedRun:
        """Return what one run has written.

        Raises:
            LaunchError: the program failed, or did no step.
        """
        place = Path(self.folder, str(placement).replace(" ", "-"))
        place.mkdir()
        middle = max(1, self.steps // 2 - 1) if placement.grow_to else 0
        settings = CheckSettings(str(place), self.steps, middle, placement.grow_to)
        words = ["run", "-q", "-np", str(placement.workers), "--verify", "1", "--timeout", self.timeout, *self.flags]
        words += ["-w", "--max-restarts", "0"] if placement.grow_to else []
        outcome = CheckedRun(placement)
        log = place / "output"
        with log.open("wb") as output:
            command = [*PLIANT, *words, "--check", settings.to_text(), *self.program]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            with _ended(process):
                while process.poll() is None:
                    time.sleep(POLL_S)
                    outcome.read(place)
                    self.on_step(placement, outcome.num_steps)
        outcome.read(place)
        outcome.code, outcome.output = process.returncode, log.read_text(errors="replace")
        self._check(outcome)
        return outcome

    def _check(self, outcome: CheckedRun) -> None:
        name, where = self.name, f"on {outcome.placement}"
        if outcome.code == TIMEOUT_EXIT:
            raise LaunchError(
                f"{name} did not do {self.steps} steps {where} within {self.timeout}, but {outcome.num_steps}: give it more "
                f"time with --timeout, or fewer --steps{_tail(outcome.output)}"
            )
        if found := GUARD_MESSAGE.search(outcome.output):
            raise LaunchError(f"not the same bits {where}: {found[1]}")
        never_joined = NEVER_JOINED in outcome.output
        if outcome.code and not never_joined:
            raise LaunchError(f"{name} failed {where} with exit code {outcome.code}{_tail(outcome.output)}")
        if found := LOSS_MESSAGE.search(outcome.output):
            raise LaunchError(f"{name} failed {where}, on one of them: {found[0][4:]}{_tail(outcome.output)}")
        if never_joined or outcome.facts is None:
            raise LaunchError(
                f"{name} ended {where} without training: it has to call pliant.join, and to loop over job.epochs or job.steps"
            )
        if not outcome.num_steps:
            raise LaunchError(f"{name} ended {where} without a single step: give it data for one")
        if outcome.placement.grow_to > outcome.most_workers:
            raise LaunchError(f"{name} ended {where} before that one took part: give it more --steps")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no run behind, whatever happens in the block."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _tail(output: str) -> str:
    """Return the last lines of a run's output, for the end of a message."""
    lines = [line for line in output.rstrip().splitlines() if not line.endswith("its last lines of stderr:")]
    shown = lines[-TAIL_LINES:]
    return "\n  ".join(["; the last lines of its output:", *shown]) if shown else "; it printed nothing"


def placements(replicas: int) -> list[RunShape]:
    """Return the placements beside that on one worker, for so many replicas."""
    sizes = sorted({2, min(replicas, MOST_WORKERS)} - {1}, reverse=True) if replicas > 1 else []
    return [*map(RunShape, sizes), *([RunShape(1, grow_to=2)] if replicas > 1 else [])]


# --- the command ---


class CheckCommand(JsonCommand):
    """A command whose program may be `-m MODULE`, and keeps its own options."""

    def prepare(self, args: list[str]) -> list[str]:
        names = {name: not getattr(param, "is_flag", False) for param in self.params for name in param.opts}
        place = args.index("--json") if "--json" in args else len(args)
        if not split_flags(args[:place], names, {})[1]:  # else it is an option of the program
            args = [*args[:place], *super().prepare(args[place : place + 2]), *args[place + 2 :]]
        flags, program = split_flags(args, names, {})
        return [*flags, *(["--"] if program[:1] == ["-m"] else []), *program]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("check", cls=CheckCommand, context_settings={"allow_interspersed_args": False})(check)


def check(
    program: Annotated[list[str], typer.Argument(metavar="PROGRAM|-m MODULE [ARGS]...", show_default=False)],
    steps: Annotated[str, option("--steps", "N", "Compare so many steps.")] = "10",
    workers: Annotated[
        str,
        option("--workers", "N,...", "Numbers of workers; default: 1, 2 and as many as replicas.", show_default=False),
    ] = "",
    determinism: Annotated[
        str, option("--determinism", "D0|D1|D2", "As for `pliant run`.", completion.one_of("D0", "D1", "D2"))
    ] = "",
    order: Annotated[str, option("--order", "ddp|tree", "As for `pliant run`.", completion.one_of("ddp", "tree"))] = "",
    allow: Annotated[
        list[str] | None,
        option("--allow", "OPERATOR", "As for `pliant run`; repeatable.", show_default=False),
    ] = None,
    timeout: Annotated[str, option("--timeout", "TIME", "Time for each run.")] = "10m",
    json_file: JsonFile = None,
) -> None:
    """Run the first steps of PROGRAM on one worker, on several, and with a newcomer; compare the bits after each step.

    The first thing to do after porting a program. It is run as it is, so give it a folder of its own to write to.
    Exit code 0: the same bits everywhere; 1: they differ, or the program failed.
    """
    count = parse_int(steps, "--steps", 10)
    if count < 4:
        raise ConfigError(f"--steps {count}: use 4 or more, so that a new worker can join in the middle")
    sizes = _parse_sizes(workers)
    if determinism.upper() not in ("", *LEVELS):
        raise ConfigError(f"--determinism {determinism!r} is not known: use one of {', '.join(LEVELS)}")
    check_order(order.lower())
    find_command(program)
    parse_duration(timeout, "--timeout")
    check_writable(json_file)
    given = {"--determinism": determinism, "--order": order}
    flags = [word for flag, value in given.items() if value for word in (flag, value)]
    flags += [f"--allow={each}" for each in allow or ()]
    with TemporaryDirectory(prefix="pliant-check-") as folder, exit_on_sigterm():
        report = _check(program, count, sizes, timeout, flags, Path(folder))
    save_json(report, json_file)
    if not is_stdout(json_file):
        print(report["text"])
    if not report["ok"]:
        raise typer.Exit(1)


def _parse_sizes(text: str) -> list[int]:
    sizes = [parse_int(word, "--workers") for word in text.split(",") if word.strip()]
    if wrong := [size for size in sizes if size < 1]:
        raise ConfigError(f"--workers {wrong[0]}: use numbers of 1 or more, such as 2,4")
    return sizes


def _check(
    program: Sequence[str], steps: int, sizes: Sequence[int], timeout: str, flags: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run the program on all placements, until two runs differ; return the report."""
    first = RunShape(1)
    planned = [first]

    with show_progress() as show:

        def on_step(placement: RunShape, done: int) -> None:
            place = planned.index(placement)
            show(f"on {placement}: {done} of {steps} steps", (place + done / steps) / len(planned))

        checker = ProgramChecker(program, steps, timeout, flags, folder, on_step)
        show(f"on {first}", 0.0)
        reference = checker.run(first)
        replicas = _replicas(reference, checker.name)
        if too_many := [size for size in sizes if size > replicas]:
            raise ConfigError(
                f"--workers {too_many[0]}: {checker.name} has {replicas} replicas, so at most as many workers"
            )
        planned += [RunShape(size) for size in sizes if size > 1] if sizes else placements(replicas)
        difference = None
        allowed = (reference.facts or {}).get("not_promised", [])
        for placement in planned[1:]:
            difference = first_difference(reference, checker.run(placement))
            if difference is None:
                continue
            if not difference.values or allowed:
                planned.append(RunShape(1, is_repeated=True))
                if first_difference(reference, checker.run(planned[-1])) is not None:
                    difference = replace(difference, advice=ADVICE["allowed" if allowed else "seed"])
            break
    report: dict[str, Any] = {
        "ok": difference is None,
        "replicas": replicas,
        "steps": reference.num_steps,
        "parts": len(reference.steps[0]),
        "placements": [str(each) for each in planned],
        "not_promised": allowed,
    }
    if difference is None:
        return {**report, "text": describe_success(report, planned)}
    return {**report, "difference": asdict(difference), "text": describe(difference)}


def _replicas(reference: CheckedRun, name: str) -> int:
    facts = reference.facts or {}
    if facts["averaging"]:
        raise LaunchError(f"{name} averages models: each worker has its own, so there is nothing to compare")
    if facts["replicas"] is None:
        raise LaunchError(
            f"{name} has one replica per worker, so its result depends on the workers by design: give "
            "pliant.join(replicas=N) a number"
        )
    return int(facts["replicas"])


def describe_success(report: Mapping[str, Any], planned: Sequence[RunShape]) -> str:
    """Return the message that all runs were equal."""
    counts = [str(each) for each in sorted(each.workers for each in planned if not each.grow_to)]
    if len(counts) == 1:
        head = f"nothing was compared: {report['steps']} steps on 1 worker of a job with {report['replicas']} replicas"
        is_single = report["replicas"] == 1
        return head + (
            ", which has at most 1 worker" if is_single else ". Give --workers several numbers, or leave it out"
        )
    listed = f"{', '.join(counts[:-1])} and {counts[-1]}"
    newcomer = ", and with a newcomer in the middle" if any(each.grow_to for each in planned) else ""
    text = f"the same bits on {listed} workers{newcomer}: {report['steps']} steps, {report['parts']} parts of the state"
    allowed = ", ".join(report["not_promised"])
    return (
        f"{text}\nbits not promised: {allowed} (allowed without a deterministic kernel); another run may differ"
        if allowed
        else text
    )


def describe(difference: StepDifference) -> str:
    """Return the message about runs that differ."""
    one, other = difference.placements
    more = len(difference.parts) - 1
    rest = f", and {more} more of {difference.num_parts} parts" if more else ""
    when = f"step {difference.step}" if difference.step != BEFORE else "the state before the first step"
    lines = [f"not the same bits: {when} differs between {one} and {other} in: {difference.parts[0]}{rest}"]
    lines += [f"  {name}: {ours} on {one}, {theirs} on {other}" for name, ours, theirs in difference.values]
    return "\n".join([*lines, f"look here: {difference.advice}"])
