"""A real elastic job for benches: `pliant run -w` on this host, whose workers report when each of their steps begins.

`ElasticJob` starts the job, listens to its workers, and ends it; `bench.resize` changes it and measures. The workers run this
module as a program (`python -m pliant_repro.bench.elastic TASK.json`): an ordinary training loop that sends a `StepBegun`
before each step, and nothing while a step is under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro.bench.train import TrainingTask
from pliant_repro.contest import Summary, check_least, clean_environ, last_words
from pliant_repro.profiles import check_trained

if TYPE_CHECKING:
    from pliant.train.job import Job

COMMAND = "from pliant.cli.main import main; main()"
START_S, CHANGE_S, END_S = 180.0, 60.0, 20.0
"""How long the job may take to its first steps, for a change, and to end."""
EPOCH_STEPS, MAX_EPOCHS = 1000, 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """Options of `pliant bench resize` and `pliant bench recover`.

    Raises (when made):
        ConfigError: a value is not possible.
    """

    num_workers: int = 4
    small: int = 2
    """Number of workers to shrink to, if the bench resizes."""
    repeat: int = 20
    after: int = 20
    """Steps after a change that are judged."""
    model: str = "resnet18"
    batch: int = 2
    size: int = 32
    replicas: int = 0
    """Replicas of the job; 0 means as many as there are workers when there are many."""
    device: str = "cpu"
    autocast: bool = False
    """Whether the forward pass runs in bfloat16 where torch's autocast does so."""
    compiled: bool = False
    """Whether the model is compiled by `torch.compile`."""
    scaler: bool = False
    """Whether a GradScaler scales the losses; autocast is float16 on a GPU then."""
    seed: int | None = None
    """Seed of replica 0's random generators; replica r has seed + r. None means that all have the same."""
    join: Mapping[str, object] = field(default_factory=dict)
    """More arguments of `pliant.join`."""
    digests: bool = False
    """Whether the workers report a digest of the state after each step."""
    least_step_s: float = 0.0
    """Least time from one step to the next: the workers wait where a step is shorter."""
    max_restarts: int = 0
    """How many lost workers the runner replaces by itself."""
    start_timeout_s: float = START_S
    """How long the job may take to its first steps."""
    change_timeout_s: float = CHANGE_S
    """How long a change may take."""

    def __post_init__(self) -> None:
        check_trained(self.model)
        if not 2 <= self.num_workers <= 64:
            raise ConfigError(f"-np {self.num_workers}: use 2 to 64")
        if not 1 <= self.small < self.num_workers:
            raise ConfigError(f"--to {self.small}: use 1 to {self.num_workers - 1}, fewer than -np")
        check_least(("--repeat", self.repeat, 1), ("--batch", self.batch, 1), ("--size", self.size, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBegun:
    """A worker has the first batch of a step. Times are of the monotonic clock, which all processes of a host share."""

    pid: int
    worker: str
    """The worker's address, HOST:PORT."""
    rank: int
    size: int
    """Number of workers."""
    step: int
    """Steps committed before this one."""
    own: int
    """Steps that this process has seen committed."""
    at_s: float
    ended_s: float
    """When this process had done the step before, its device included; 0 if there was none."""
    change: tuple[int, int, float, bool] | None = None
    """(old size, new size, pause in seconds as the job measured it, whether a worker was lost), if this is the first step in a
    new view of a worker that was there before."""
    config_server: str = ""
    digest: str = ""
    """Digest of parameters and optimizer when this process had done the step before, if digests are wanted."""
    buffers: str = ""
    """Digest of the model's buffers, likewise."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> StepBegun:
        values = json.loads(line)
        return cls(**{**values, "change": values["change"] and tuple(values["change"])})


class StepReports:
    """What the workers of a job report, at a Unix socket in a folder: it reaches them in other network namespaces, too. A
    context manager."""

    def __init__(self, folder: Path) -> None:
        self.control = folder / "control"
        """The socket that workers connect to."""
        self.reports: list[StepBegun] = []
        """Every step that any worker has begun, in the order of arrival; the times in it are exact, the order is not."""
        self.ended: set[int] = set()
        """The processes whose connection has ended."""
        self.changed = threading.Condition()
        """Notified with each report; held while they change."""
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.control))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits for it
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the bench is over
            while True:
                connection = self._listener.accept()[0]
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        pid = 0
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the worker was killed while it wrote
                begun = StepBegun.from_line(line)
                pid = begun.pid
                with self.changed:
                    self.reports.append(begun)
                    self.changed.notify_all()
        with self.changed:
            self.ended.add(pid)
            self.changed.notify_all()


class ElasticJob:
    """A job under `pliant run -w`, and all that its workers have reported. A context manager."""

    def __init__(self, options: ElasticOptions) -> None:
        self.options = options
        self._cleanup = contextlib.ExitStack()
        self._runner: subprocess.Popen[bytes] | None = None
        self._seen: StepReports
        self._log = Path()

    @property
    def reports(self) -> list[StepBegun]:
        """Every step that any worker has begun, in the order of arrival; the times in it are exact, the order is not."""
        return self._seen.reports

    def __enter__(self) -> Self:
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        self._seen = self._cleanup.enter_context(StepReports(folder))
        options = self.options
        task = write_task(folder, self._seen.control, options)
        self._log = folder / "log"
        # A range of ports in which no other job on this host is likely to look for some.
        first_port = random.SystemRandom().randrange(12_000, 31_000, 500)
        flags = ["-w", "-q", "-np", str(options.num_workers), "--max-restarts", str(options.max_restarts)]
        flags += ["-port-range", f"{first_port}-{first_port + 500}"]
        argv = [sys.executable, "-c", COMMAND, "run", *flags, sys.executable, "-m", __name__, str(task)]
        with self._log.open("wb") as output:
            nowhere = subprocess.DEVNULL
            self._runner = subprocess.Popen(argv, stdin=nowhere, stdout=output, stderr=output, env=clean_environ())
        self._cleanup.callback(self._end)
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

    def wait_until(
        self, what: str, condition: Callable[[Sequence[StepBegun]], bool], since: int = 0
    ) -> list[StepBegun]:
        """Return the reports from number `since` on, as soon as they meet the condition.

        Raises:
            LaunchError: the job ended, or the condition was not met in time.
        """
        timeout_s = self.options.change_timeout_s if since else self.options.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        assert self._runner is not None, "entered"
        with self._seen.changed:
            while True:
                found = self.reports[since:]
                if condition(found):
                    return found
                code, left_s = self._runner.poll(), deadline_s - time.monotonic()
                why = f"the job ended with exit code {code}" if code is not None else f"not within {timeout_s:g} s"
                if code is not None or left_s <= 0:
                    said = last_words(self._log.read_text(errors="replace"))
                    raise LaunchError(f"{what}: {why}; " + (f"it said: {said}" if said else "it said nothing"))
                self._seen.changed.wait(min(left_s, 1.0))

    def wait_until_steady(self, num_workers: int, steps: int, since: int = 0) -> list[StepBegun]:
        """Wait until `num_workers` workers have each committed `steps` steps in a view of this size; return all since."""

        def is_steady(reports: Sequence[StepBegun]) -> bool:
            counts = steps_in_view(reports, num_workers)
            present = [counts.get(each.worker, 0) for each in members(reports).values()]
            return len(present) == num_workers and min(present) > steps

        return self.wait_until(f"{steps} steps on {num_workers} workers", is_steady, since)

    def wait_for_exits(self, reports: Sequence[StepBegun], num_workers: int) -> None:
        """Wait until all who reported, except the members of the view of `num_workers`, have ended."""
        present = {each.worker for each in reports if each.size == num_workers and each.change is not None}
        leavers = {each.pid for each in reports if each.worker not in present}
        self.wait_until("the end of those who left", lambda _: leavers <= self._seen.ended, len(self.reports))

    @contextlib.contextmanager
    def client(self) -> Iterator[Callable[[int], float]]:
        """Give a function that asks for a number of workers, and returns the monotonic time just before."""
        from pliant.elastic.client import ConfigClient
        from pliant.tokens import find_token

        first = self.wait_until("the first step", bool)[0]
        with ConfigClient(first.config_server, find_token(first.config_server)) as client:
            client.wanted()  # connects, so that later requests do not begin with that

            def resize(size: int) -> float:
                asked_s = time.monotonic()
                client.resize(size)
                return asked_s

            yield resize


# --- reading the reports ---


def members(reports: Sequence[StepBegun]) -> dict[int, StepBegun]:
    """Return the workers of the newest reported view, by rank, each with its newest step."""
    newest: dict[str, StepBegun] = {each.worker: each for each in reports}
    top = max((each.step for each in newest.values()), default=0)
    size = next((each.size for each in reversed(reports)), 0)
    return {each.rank: each for each in newest.values() if each.size == size and top - each.step <= 1}


def steps_in_view(reports: Sequence[StepBegun], size: int) -> dict[str, int]:
    """Return, for each worker of a view of this size, the steps it has begun since it was last in another."""
    counts: dict[str, int] = {}
    for each in reports:
        if each.size != size:
            counts.pop(each.worker, None)
        else:
            counts[each.worker] = 1 if each.change is not None else counts.get(each.worker, 0) + 1
    return counts


def step_times(reports: Sequence[StepBegun], size: int) -> list[float]:
    """Return the seconds of undisturbed steps in views of this size, from the beginning of one to that of the next."""
    before: dict[str, StepBegun] = {}
    found = []
    for each in reports:
        last = before.get(each.worker)
        if last is not None and last.pid == each.pid and last.size == each.size == size:
            undisturbed = each.change is None and last.change is None and last.own > 0
            if undisturbed and each.step == last.step + 1:
                found.append(each.at_s - last.at_s)
        before[each.worker] = each
    return found


def summarise(samples: Sequence[float], *, with_samples: bool = True) -> Json:
    """Return the numbers of the one form; null if there is no sample."""
    if not samples:
        return {"median_s": None, "iqr_s": None, "num_samples": 0}
    listed = {"samples_s": list(samples)} if with_samples else {}
    return {**Summary.of(samples).to_json(), "max_s": max(samples), **listed}


def judge_median(name: str, samples: Sequence[float], target_s: float, form: str = ".1f") -> str:
    """Return a remark if the median of the samples misses the target; else nothing."""
    median_s = Summary.of(samples).median if samples else None
    if median_s is not None and median_s <= target_s:
        return ""
    said = f"{median_s * 1e3:{form}} ms" if median_s is not None else "not measured"
    return f"{name}: {said}, to reach {target_s * 1e3:g} ms"


# --- in the worker processes ---


class StepReporter:
    """Sends a StepBegun to the controller when the first turn of a step begins."""

    def __init__(self, control: str, job: Job) -> None:
        from pliant.identity import worker_spec

        self._job = job
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(control)
        spec = worker_spec()
        self._identity = {"pid": os.getpid(), "worker": str(spec.worker), "config_server": spec.config_server}
        self._key, self._num_changes, self._own = (-1, -1), 0, 0
        self.ended_s = 0.0
        self.digest = self.buffers = ""

    def report(self) -> None:
        """Report that a step begins, unless this is a later turn of a step that was reported, or a new worker warms up."""
        if self._job.in_shadow:
            return
        job, changes = self._job, self._job.changes
        key = (job.step, len(changes))
        if key == self._key:
            return
        at_s = time.monotonic()
        if self._key[0] >= 0 and job.step > self._key[0]:
            self._own += 1
        change = None
        if new := changes[self._num_changes :]:
            # Several changes without a step between them are one pause; its length is the longest wait.
            change = (new[0].old_size, new[-1].new_size, max(each.pause_s for each in new), new[-1].lost)
        if job.step <= self._key[0]:  # the step before was taken back, or this one is repeated
            self.digest = self.buffers = ""
        self._key, self._num_changes = key, len(changes)
        begun = StepBegun(
            rank=job.rank, size=job.size, step=job.step, own=self._own, at_s=at_s, ended_s=self.ended_s, change=change,
            digest=self.digest, buffers=self.buffers, **self._identity,  # type: ignore[arg-type]
        )  # fmt: skip
        self._socket.sendall(begun.to_line())


def main() -> None:
    """Train the task's network under `pliant run`, and report each step."""
    import torch

    import pliant
    from pliant_repro import zoo
    from pliant_repro.bench import training, training_probes

    control, options = read_task(Path(sys.argv[1]))
    torch.set_num_threads(1)
    task = training_task(options, zoo.network(options.model).optimizer)
    job = pliant.join(replicas=task.num_replicas, seed=task.seed, **task.join)
    reporter = StepReporter(control, job)
    subject = training.make_subject(task)
    model, optimizer = job.wrap(subject.model, training.make_optimizer(task, subject.model))
    loader = job.loader(subject.dataset, batch_size=subject.batch, shuffle=False, collate_fn=zoo.as_is)
    scaler = training.make_scaler(task)
    if scaler is not None:
        job.track("scaler", scaler)
    for _epoch in job.epochs(MAX_EPOCHS):
        for step in loader:
            for batch in step:
                reporter.report()
                loss = subject.loss(model, batch)
                (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if job.in_shadow:
                continue  # a new worker warms up: this is no step of the job
            if task.device == "cuda":
                torch.cuda.synchronize()
            if options.digests:
                model.state_dict()  # waits for updates that are still under way
                reporter.digest = training_probes.digest_state(model, optimizer, scaler)
                reporter.buffers = training_probes.digest_buffers(model)
            if options.least_step_s:
                time.sleep(max(0.0, reporter.ended_s + options.least_step_s - time.monotonic()))
            reporter.ended_s = time.monotonic()


def write_task(folder: Path, control: Path, options: ElasticOptions) -> Path:
    """Write the task file of the workers of a job, and return its path."""
    path = folder / "task.json"
    path.write_text(json.dumps({"control": str(control), **asdict(options)}))
    return path


def read_task(path: Path) -> tuple[str, ElasticOptions]:
    """Return the controller's address and the options of the bench out of a task file."""
    values = json.loads(path.read_text())
    return values.pop("control"), ElasticOptions(**values)


def training_task(options: ElasticOptions, optimizer: str) -> TrainingTask:
    """Return what the job of these options trains; a contender with this task trains the same on fixed workers."""
    same = {"model": options.model, "batch": options.batch, "size": options.size, "device": options.device}
    how = {"autocast": options.autocast, "compiled": options.compiled, "scaler": options.scaler, "seed": options.seed}
    replicas = options.replicas or options.num_workers
    return TrainingTask(
        side="pliant", num_workers=options.num_workers, replicas=replicas, optimizer=optimizer, strict=True,
        join=options.join, **same, **how,  # type: ignore[arg-type]
    )  # fmt: skip


if __name__ == "__main__":
    main()
