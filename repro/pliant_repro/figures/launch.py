"""Starts the training program, waits for it, and reads the log lines that its processes have written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pliant.errors import LaunchError

PROGRAM = Path(__file__).with_name("program.py")
PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
GRACE_S = 10.0
TAIL_LINES = 12
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task of the training program. It is passed as JSON on the command line."""

    model: str
    """A model of the zoo, `image:NAME` for a torchvision model on random images, or another workload of `program`."""
    mode: str = "pliant"
    """pliant, ddp (stock DistributedDataParallel on gloo, a process per replica) or plain (PyTorch as it is)."""
    scale: str = "tiny"
    device: str = "cpu"
    threads: int = 1
    determinism: str | None = None
    """Determinism level where no runner sets one."""

    steps: int = 0
    """Steps of each replica. 0 means that `epochs` decides."""
    epochs: int = 1
    replicas: int | None = None
    """Number of replicas. None means one per worker."""
    batch: int = 0
    """Batch size of a replica. 0 means the model's usual one."""
    seed: int = 1234
    lr: float = 0.02
    data: str = ""
    """File or folder of the data set. Empty means what needs no download."""
    image_size: int = 0
    """Side of random images, or length of a text. 0 means the model's own."""

    journal: str = ""
    """Folder for the log of each process. Empty means no log."""
    digest: bool = False
    """Record the loss of every turn and the SHA-256 of the state after every step."""
    memory: bool = False
    """Record the memory in use after every step."""
    evaluate: bool = False
    """Record the accuracy on held-out samples after every epoch."""
    sync_turns: bool = False
    """Wait for the device after each turn instead of each step."""

    pace_s: float = 0.0
    """Least duration of a step."""
    hold: tuple[tuple[int, int], ...] = ()
    """Pairs of (step, workers): wait in this step until a view with so many workers can be entered."""
    one_core: bool = False
    """Stay on one core, which then is the device."""
    unlike: bool = False
    """Let workers that join later behave like machines of another kind."""
    alternate: bool = False
    """Switch no replica contexts in every second step. Only its duration means anything then."""
    nudge: int | None = None
    """Change one weight by one unit in the last place after this step: a negative control."""

    turns: tuple[str, str, int] | None = None
    """Two named pipes and a number of steps: wait for a byte in the first, train so many steps, write it to the second."""

    resizes: tuple[tuple[int, int], ...] = ()
    """Pairs of (step, workers) that the first worker asks for; 0 workers end the job."""
    lines: bool = False
    """Print the lines of KungFu's artifact."""
    warmup: int = 0
    """Steps before the first printed line."""
    adapt: bool = False
    """Let workers vote on interference and change the topology."""
    kappa: float = 0.0
    """Divides the parameters of a paced model, whose layers sleep instead of computing. 0 means that it computes."""
    paced_s: float = 0.0
    """Seconds that a step of the paced BERT occupies one of `devices`."""
    devices: int = 2
    provision: tuple[int, int, float] | None = None
    """Limit, steps per decision and threshold of the policy that adds workers. None means that none are added."""
    monitor_rounds: int = 0
    """Rounds of steps in which gradient monitors are switched on and off."""

    @classmethod
    def from_json(cls, text: str) -> Task:
        return cls(**json.loads(text))


# --- what processes write down ---


@dataclass(slots=True)
class Turn:
    """One turn of a replica, or one step of a DDP rank."""

    step: int
    replica: int
    size: int
    """Workers at that time."""
    at_s: float
    """Time at which the line was written, on the machine's monotonic clock."""
    rank: int = 0
    epoch: int = 0
    loss: float | None = None
    batch: int = 0
    memory_bytes: int = 0
    switched: bool = True
    """Whether the replica's context was switched in."""
    switch_s: float = 0.0
    """Seconds spent on switching contexts, where that was measured."""
    took_s: float | None = None
    """Seconds since the turn before it in the same worker; None for a worker's first turn."""


@dataclass(slots=True)
class Step:
    """One step of all replicas. A step that was lost and repeated has the lines of all attempts."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    """Losses by replica, in the order of time."""
    digests: list[str] = field(default_factory=list)
    """SHA-256 of parameters, buffers and optimizer after the step, from all processes that recorded it."""
    size: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    """Processes by rank."""

    @property
    def loss(self) -> float:
        """Mean over the replicas."""
        return fmean(min(values) for values in self.losses.values())


@dataclass(slots=True)
class Change:
    """A change of view, as seen by the workers that stayed."""

    step: int
    """First step of the new view."""
    old_size: int
    new_size: int
    pause_s: float
    """Longest pause that one of them saw."""
    lost: bool
    at_s: float
    """Time at which the last of them continued."""


class RunLog:
    """The log lines of a job in `folder`. `read` takes in what is new; a killed process may have left half a line."""

    def __init__(self, folder: Path, output: str = "") -> None:
        self.output = output
        """Output of the job."""
        self.steps: dict[int, Step] = {}
        self.turns: dict[int, list[Turn]] = {}
        """Turns by process."""
        self.changes: list[Change] = []
        self.epochs: list[dict[str, Any]] = []
        """For each epoch of each worker: epoch, rank and, of the first worker, time_s and accuracy."""
        self.last_step = -1
        """Last step whose digest is known."""
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> None:
        new = [line for path in sorted(self._folder.glob("*.jsonl")) for line in self._new_lines(path)]
        for line in sorted(new, key=lambda each: float(each["at_s"])):
            getattr(self, f"_add_{line.pop('kind')}")(line, line.pop("pid"))

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        for line in data[:whole].splitlines():
            yield {**json.loads(line), "pid": int(path.stem)}

    def _add_turn(self, line: dict[str, Any], pid: int) -> None:
        turn = Turn(**line)
        earlier = self.turns.setdefault(pid, [])
        turn.took_s = turn.at_s - earlier[-1].at_s if earlier else None
        earlier.append(turn)
        step = self.steps.setdefault(turn.step, Step())
        if step.size != turn.size:
            step.size, step.pids = turn.size, {}
        step.pids[turn.rank] = pid
        if turn.loss is not None:
            step.losses.setdefault(turn.replica, []).append(turn.loss)

    def _add_state(self, line: dict[str, Any], pid: int) -> None:
        self.steps.setdefault(line["step"], Step()).digests.append(line["digest"])
        self.last_step = max(self.last_step, line["step"])

    def _add_change(self, line: dict[str, Any], pid: int) -> None:
        change = Change(**line)
        for known in self.changes:
            if (known.step, known.new_size) == (change.step, change.new_size):
                known.pause_s, known.at_s = max(known.pause_s, change.pause_s), max(known.at_s, change.at_s)
                known.lost = known.lost or change.lost
                return
        self.changes.append(change)

    def _add_epoch(self, line: dict[str, Any], pid: int) -> None:
        self.epochs.append(line)

    @property
    def workers(self) -> list[list[Turn]]:
        """The turns of each process, in their order; the process that began first is first."""
        return sorted(filter(None, self.turns.values()), key=lambda turns: (turns[0].step, turns[0].replica))

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the held-out samples after the last epoch, once it is known."""
        return next((line["accuracy"] for line in reversed(self.epochs) if "accuracy" in line), None)

    def step_times_s(self, skip: int = 2) -> list[float]:
        """Return the durations of the first worker's steps, without its first `skip` steps."""
        ends = {turn.step: turn.at_s for turn in self.workers[0]}
        return [after - before for before, after in pairwise(ends.values())][max(0, skip - 1) :]

    def block_times_s(self, block: int) -> list[list[float]]:
        """Return the durations of the first worker's steps, by blocks of so many steps; the first of a block has none."""
        ends = [at_s for _, at_s in sorted({turn.step: turn.at_s for turn in self.workers[0]}.items())]
        blocks = [ends[begin : begin + block] for begin in range(0, len(ends) - block + 1, block)]
        return [[after - before for before, after in pairwise(each)] for each in blocks]

    def peak_bytes(self) -> int:
        """Return the peaks of all workers' memory, added."""
        return sum(max((turn.memory_bytes for turn in worker), default=0) for worker in self.workers)


# --- running the program ---


def train(
    task: Task,
    *,
    np: int = 0,
    run: Sequence[str] = (),
    pinned: bool = False,
    timeout_s: float = 600,
    folder: Path | None = None,
) -> RunLog:
    """Run the training program to its end and return its log.

    Args:
        np: number of workers under `pliant run`; 0 means one process without it.
        run: more options of `pliant run`.
        pinned: whether to set the environment that determinism level D2 pins.
        folder: where the processes write; default: a folder that is removed at the end.

    Raises:
        LaunchError: the program failed or took too long; with the end of its output.
    """
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pliant-run-")))
        place.mkdir(exist_ok=True)
        launcher = [*PLIANT, "run", "-q", "-np", str(np), *["--warm"] * (np > 1), *run] if np else []
        words = [*launcher, *program(task, place)]
        output = finish(words, environment(task.threads, pinned=pinned), f"{task.mode} run of {task.model}", timeout_s)
        log = RunLog(place, output)
        log.read()
        return log


def program(task: Task, folder: Path) -> list[str]:
    """Return the command of the training program for `task`, with its log in `folder`."""
    return [sys.executable, str(PROGRAM), json.dumps(asdict(task) | {"journal": str(folder)})]


def save_digits(path: Path) -> str:
    """Write scikit-learn's handwritten digits, pixels from 0 to 1 and labels, to an .npz file; return its path."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes a second or two

    found = load_digits()
    np.savez(path, images=(found.images / 16).astype(np.float32), labels=found.target.astype(np.int64))
    return str(path)


def take_turns(
    sides: Mapping[str, tuple[Task, bool]], block: int, timeout_s: float = 600
) -> dict[str, list[list[float]]]:
    """Let several runs of one process each train in turn, `block` steps at a time; return the step times of every block.

    What disturbs the machine then disturbs all of them alike. Whoever waits is blocked. The first block of each run is not
    returned: others may still be starting then. The time from one block to the next counts for nobody.

    Args:
        sides: for each run its task, whose steps are a multiple of `block`, and whether the environment of D2 is pinned.
    """
    with tempfile.TemporaryDirectory(prefix="pliant-turns-") as folder, ThreadPoolExecutor(len(sides)) as pool:
        pipes = [str(Path(folder) / f"turn{number}") for number in range(len(sides))]
        for pipe in pipes:
            os.mkfifo(pipe)
        first = os.open(pipes[0], os.O_RDWR)
        runs: dict[str, Future[RunLog]] = {}
        try:
            os.write(first, b".")
            for number, (name, (task, pinned)) in enumerate(sides.items()):
                ring = (pipes[number], pipes[(number + 1) % len(pipes)], block)
                runs[name] = pool.submit(train, replace(task, turns=ring), pinned=pinned, timeout_s=timeout_s)
            logs = {name: run.result() for name, run in runs.items()}
        except BaseException:
            while wait(runs.values(), timeout=0.1).not_done:  # some may start only now
                for process in list(_running):
                    process.kill()  # whoever waits for its turn would not hear of anything else
            raise
        finally:
            os.close(first)
    return {name: log.block_times_s(block)[1:] for name, log in logs.items()}


def run_two_at_a_time(calls: Sequence[Callable[[], RunLog]]) -> list[RunLog]:
    """Return the results of `calls`, two of them at a time: for runs whose bits count, not their times."""
    with ThreadPoolExecutor(2, "run") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise


def pins() -> dict[str, str]:
    """Return the environment that determinism level D2 pins."""
    from pliant.launch.plan import Machine, RunOptions, make_plan

    return dict(make_plan(RunOptions(program=(sys.executable,), determinism="D2"), Machine.this()).pins)


def environment(threads: int = 1, *, pinned: bool = False) -> dict[str, str]:
    """Return the caller's environment without what another job, or another choice of kernels, has left in it."""
    pinning = pins()
    ours = {
        key: value
        for key, value in os.environ.items()
        if (key == "PLIANT_HOME" or not key.startswith("PLIANT_")) and key not in pinning
    }
    path = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), ours.get("PYTHONPATH", "")]))
    return ours | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)} | (pinning if pinned else {})


def finish(command: Sequence[str], environ: Mapping[str, str], what: str, timeout_s: float) -> str:
    """Run a command to its end and return its output; nothing that it has started outlives this call.

    Raises:
        LaunchError: it failed or took too long.
    """
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{what} took longer than {timeout_s:g} s: use fewer steps") from None
    finally:
        end_process_group(process, GRACE_S)
        process.communicate()
        _running.discard(process)
    if process.returncode != 0:
        last = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        raise LaunchError(f"{what} ended with exit code {process.returncode}; the end of its output:\n{last}")
    return output


def end_process_group(process: subprocess.Popen[Any], grace_s: float) -> None:
    """End a process that leads its own session: SIGTERM, `grace_s` to end its children, then SIGKILL to all of them."""
    if process.poll() is None and grace_s:
        process.terminate()  # a runner ends its workers first
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
