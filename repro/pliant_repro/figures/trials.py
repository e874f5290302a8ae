"""Runs of the training program that the figures are made from: started, waited for, and read back from their journals.

`ddp` is stock DDP, `plain` PyTorch without it, `alone` pliant with all replicas in one process, and `elastic`
an elastic job under `pliant run`, whose workers come and go by a schedule. Each blocks until its processes have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pliant.errors import LaunchError
from pliant.identity import format_schedule

PROGRAM = Path(__file__).with_name("program.py")
GRACE_S = 10.0
_running: set[subprocess.Popen[str]] = set()
Schedule = Sequence[tuple[int, int]]
"""(step, workers): how many there shall be from that step on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to train, how long, and what to note."""

    model: str
    scale: str = "tiny"
    steps: int
    replicas: int = 1
    batch: int = 0
    """0: the model's usual one."""
    device: str = "cpu"
    threads: int = 1
    flags: tuple[str, ...] = ()
    """More arguments of the program, such as --digest."""

    def arguments(self, mode: str, journal: str) -> list[str]:
        named = {"--model": self.model, "--scale": self.scale, "--steps": self.steps, "--replicas": self.replicas,
                 "--batch": self.batch, "--device": self.device, "--journal": journal}  # fmt: skip
        return [mode, *(str(word) for pair in named.items() for word in pair), *self.flags]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a replica, or a step of a rank of DDP."""

    step: int
    replica: int
    loss: float | None
    size: int
    """Workers at that time."""
    switched: bool
    """Whether contexts were switched for it."""
    end_s: float
    memory_bytes: int = 0
    switch_s: float = 0.0
    """Spent on switching contexts, where that was measured."""
    took_s: float | None = None
    """Since the end of the turn before it in the same worker; None for a worker's first."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The state after a step."""

    size: int
    digest: str


@dataclass(slots=True)
class Trial:
    """What a run's journals say. A step that was done twice counts as it was done last."""

    output: str = ""
    workers: list[list[Turn]] = field(default_factory=list)
    """The turns of each worker, in their order."""
    commits: dict[int, Commit] = field(default_factory=dict)
    changes: list[dict[str, float]] = field(default_factory=list)
    """Changes of view as workers saw them: step, old, new, pause_s, lost."""

    @property
    def turns(self) -> list[Turn]:
        return [turn for worker in self.workers for turn in worker]

    def losses(self, replica: int) -> dict[int, float]:
        """By step."""
        return {turn.step: turn.loss for turn in self.turns if turn.replica == replica and turn.loss is not None}

    def step_times_s(self, skip: int = 2) -> list[float]:
        """Of the first worker, without its first `skip` steps."""
        ends: dict[int, float] = {}
        for turn in self.workers[0]:
            ends[turn.step] = turn.end_s
        times = [after - before for before, after in itertools.pairwise(ends.values())]
        return times[max(0, skip - 1) :]

    def peak_bytes(self) -> int:
        """Of all workers together."""
        return sum(max((turn.memory_bytes for turn in worker), default=0) for worker in self.workers)


def ddp(task: Task, *, pinned: bool = False, timeout_s: float = 600) -> Trial:
    """Stock DDP on gloo with a process per replica; `pinned`: with the settings of D2."""
    return _run(task, [sys.executable, str(PROGRAM)], "ddp", pinned=pinned, timeout_s=timeout_s)


def plain(task: Task, *, timeout_s: float = 600) -> Trial:
    """PyTorch as it is."""
    return _run(task, [sys.executable, str(PROGRAM)], "plain", timeout_s=timeout_s)


def alone(task: Task, *, level: str = "D1", timeout_s: float = 600) -> Trial:
    """All replicas in one process."""
    return _run(
        task,
        [sys.executable, str(PROGRAM)],
        "pliant",
        pinned=level == "D2",
        more=["--determinism", level],
        timeout_s=timeout_s,
    )


def elastic(
    task: Task, np: int, schedule: Schedule, *, level: str = "D1", at_once: bool = True, timeout_s: float = 600
) -> Trial:
    """A job under `pliant run` that begins with `np` workers.

    With `at_once`, the last step before each change waits for the newcomers, so that stages begin at their steps.
    Otherwise training goes on while they start, and a change is awaited only when the next one is due.
    """
    asked = [(step - 1, size) for step, size in schedule]
    held = [(step, size) for step, size in asked if size]
    if not at_once:
        held = [(later - 3, size) for (_, size), (later, _) in itertools.pairwise(asked)]
    command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q", "-w", "-np", str(np)]
    command += ["--determinism", level, "--resize-schedule", format_schedule(asked), sys.executable, str(PROGRAM)]
    return _run(task, command, "pliant", more=["--hold", format_schedule(held)], timeout_s=timeout_s)


def together(calls: Sequence[Callable[[], Trial]]) -> list[Trial]:
    """The results of these calls, two of them at a time: for trials whose bits count, and not their times."""
    with ThreadPoolExecutor(2, "trial") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise


def pins() -> dict[str, str]:
    """The environment that D2 pins."""
    from pliant.launch.options import RunOptions
    from pliant.launch.plan import Machine, make_plan

    return dict(make_plan(RunOptions(program=(sys.executable,), determinism="D2"), Machine.this()).pins)


def environment(task: Task, *, pinned: bool) -> dict[str, str]:
    """The caller's, without what another job, or another choice of kernels, has left in it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    for name in pins():
        ours.pop(name, None)
    path = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), ours.get("PYTHONPATH", "")]))
    return ours | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(task.threads)} | (pins() if pinned else {})


def _run(
    task: Task, command: list[str], mode: str, *, pinned: bool = False, more: Sequence[str] = (), timeout_s: float
) -> Trial:
    with tempfile.TemporaryDirectory(prefix="pliant-trial-") as folder:
        words = [*command, *task.arguments(mode, folder), *more]
        output, code = finish(words, environment(task, pinned=pinned), timeout_s)
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"{mode} run of {task.model} ended with exit code {code}; its last words:\n{last}")
        return read(sorted(Path(folder).glob("*.jsonl")), output)


def finish(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[str, int]:
    """The output and exit code of a command; nothing that it started outlives this call."""
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} took longer than {timeout_s:g} s: use fewer steps") from None
    finally:
        if process.poll() is None:
            process.terminate()  # a runner ends its workers first
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _running.discard(process)
    return output, process.returncode


def read(journals: Sequence[Path], output: str = "") -> Trial:
    """What these journals say."""
    trial = Trial(output)
    for path in journals:
        worker: list[Turn] = []
        for line in path.read_text().splitlines():
            facts = json.loads(line)
            kind = facts.pop("kind")
            if kind == "turn":
                took_s = facts["end_s"] - worker[-1].end_s if worker else None
                worker.append(Turn(**facts, took_s=took_s))
            elif kind == "commit":
                trial.commits[facts["step"]] = Commit(facts["size"], facts["digest"])
            else:
                trial.changes.append(facts)
        if worker:
            trial.workers.append(worker)
    trial.workers.sort(key=lambda turns: (turns[0].step, turns[0].replica))
    return trial
