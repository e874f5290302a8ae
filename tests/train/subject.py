"""The same programs under pliant: alone, on a fixed set of workers, and on workers that come and go.

A worker writes down every turn and every committed step in a journal that outlives its death; `compare` holds all
journals of a job against the oracle, for every step and every replica. `Stage` plays the part of the runner: it starts
whomever the config server wants, and reports who has died.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import tampering
import torch
from gang import SECRET, Gang, free_port, gang
from golden import Step
from programs import build, digest, may_have_children, one_batch

import pliant
from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.elastic.server import ConfigClient, ConfigServer, ServerConfig
from pliant.errors import REFUSED_EXIT
from pliant.identity import WorkerSpec
from pliant.train import trace
from pliant.train.priority.crossing import Awaited, Crossing

HOST = "127.0.0.1"
GATE_S = 60.0
ALL = 1 << 60
"""A gate that is open for good."""
_WAIT_FOR = Crossing._wait_for
_closer = ThreadPoolExecutor(1, "ending")
_ending: list[Future[None]] = []
"""The servers of the last jobs, on their way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one worker is to do. Travels to its process."""

    program: str
    replicas: int
    epochs: int
    journal: str
    environ: dict[str, str] = field(default_factory=dict)
    """What a runner would have set."""
    blocks: tuple[int, ...] | None = None
    """Replicas of each worker, while there are as many workers."""
    determinism: str | None = None
    save: str = ""
    """Where to write a checkpoint, after the step `save_at`."""
    save_at: int = 0
    load: str = ""
    gate: str = ""
    """A file with the number of steps that may be begun; without one, all."""
    fault: Fault | None = None
    threads: int = 1
    """torch's, which bits may depend on."""
    sync: str = "fifo"
    slice_bytes: int | None = None
    in_flight_bytes: int | None = None
    trace: str = ""
    """What the names of Chrome traces begin with."""
    tampering: str = "nothing"
    """A function of `tampering` that spoils something, for negative controls."""
    adapting: dict[str, Any] = field(default_factory=dict)
    """More arguments of `pliant.join`: policies, record, replay."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen to a worker, and when."""

    moment: str
    """forward, backward, summed, committed, settling, saving"""
    step: int
    sig: int = signal.SIGKILL


# --- in a worker ---


class Journal:
    """What a worker did, line by line; in the file before the next thing happens."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by the process's end, whichever way

    def write(self, kind: str, **facts: Any) -> None:
        self._file.write(json.dumps([kind, {**facts, "at_s": time.monotonic()}]).encode() + b"\n")


def train(rank: int, task: Task) -> int:
    """The program as its user would have written it, with a journal."""
    may_have_children()
    journal = Journal(task.journal)
    foreign = [name for name in os.environ if name.startswith("PLIANT_")]
    for name in foreign:
        del os.environ[name]
    os.environ.update(task.environ)
    if task.trace:
        os.environ[trace.VARIABLE] = task.trace
    torch.set_num_threads(task.threads)
    try:
        with getattr(tampering, task.tampering)():
            _train(task, journal)
    except SystemExit as leaving:
        journal.write("left", code=leaving.code or 0)
        return int(leaving.code or 0)
    journal.write("finished")
    return 0


def _train(task: Task, journal: Journal) -> None:
    program = build(task.program)
    placed = task.blocks
    with pliant.join(
        replicas=task.replicas,
        determinism=task.determinism,
        blocks=None if placed is None else lambda size: placed,
        sync=task.sync,
        slice_bytes=task.slice_bytes,
        in_flight_bytes=task.in_flight_bytes,
        seed=program.seed,
        **task.adapting,
    ) as job:
        model, _, loader = job.wrap(
            program.model,
            program.optimizers,
            program.dataset,
            sync_buffers=program.sync_buffers,
            **program.wrapping,
            **program.loading,
        )
        if program.scheduler is not None:
            job.track("scheduler", program.scheduler)
        if program.scaler is not None:
            job.track("scaler", program.scaler)
        if task.load:
            job.load(task.load)
        _observe(job, program, journal, task)
        for _epoch in job.epochs(task.epochs):
            for batch in loader:
                _pass_gate(task, job, journal)
                _fail_at(task, "forward", job.step)
                if task.save and job.step + 1 == task.save_at:
                    job.save(task.save)
                note = functools.partial(_note, journal, job)
                one_batch(program, model, batch, job.no_sync, note)
        journal.write("looped", repeated=[change.repeated for change in job.changes])
        if task.trace:
            trace.write(job.rank)  # what a program of its own would do at its exit


def _pass_gate(task: Task, job: Any, journal: Journal) -> None:
    """Wait until the test lets this step begin. Says meanwhile which roll this worker is prepared for."""
    deadline_s, said = time.monotonic() + GATE_S, 0
    if task.gate and int(Path(task.gate).read_text()) <= job.step:
        job._trainer.finish_sums()  # the test wants to see this step's end
    while task.gate and int(Path(task.gate).read_text()) <= job.step:
        if job._member.prepared > said:
            said = job._member.prepared
            journal.write("prepared", roll=said)
        assert time.monotonic() < deadline_s, f"the gate stayed closed at step {job.step}"
        time.sleep(0.002)


def _note(journal: Journal, job: Any, loss: float, samples: list[int]) -> None:
    if job._trainer.torn is not None:
        return  # a sum was lost during this very forward: what it computed does not count
    journal.write("turn", step=job.step, replica=job.replica, loss=loss, samples=samples)


def _observe(job: Any, program: Any, journal: Journal, task: Task) -> None:
    """Write down commits, and be there when a fault is due."""
    trainer, settling = job._trainer, job._settling
    on_commit, exchange = trainer.on_commit, trainer._exchange
    enter, check = settling._submit_report, settling._check

    crossing = trainer.crossing
    whole = crossing.on_whole
    unwritten: list[dict[str, Any]] = []

    def write_commits() -> None:
        for facts in unwritten:
            if facts["step"] == job.step - 1:  # else it was taken back
                journal.write("commit", digest=digest(program, trainer.first_buffers), **facts)
        unwritten.clear()

    def became_whole() -> None:
        whole()
        write_commits()

    def committed() -> None:
        facts = {"rank": job.rank, "size": job.size, "view": job.view, "hosted": list(job.hosted)}
        stats = job.sync_stats()
        facts |= {
            "brief": trainer.exchange.rows.brief,
            "crossed": crossing.is_open,
            "mode": stats.mode,
            "slice_bytes": stats.slice_bytes,
        }
        unwritten[:] = [{"step": job.step - 1, **facts}]
        if not crossing.is_open:  # looking at parameters would wait for them
            write_commits()
        on_commit()
        _fail_at(task, "committed", job.step - 1)

    crossing.on_whole = became_whole

    def waited(_: Crossing, awaited: Awaited) -> bool:
        taken_in = len(crossing.parameters) - len(crossing._awaited)
        if not awaited.handle.done:
            journal.write("blocked" if taken_in else "waiting", step=job.step)
        return _WAIT_FOR(crossing, awaited)

    Crossing._wait_for = waited  # type: ignore[assignment, method-assign]

    def exchanged() -> None:
        exchange()
        _fail_at(task, "summed", job.step)

    def entered(*args: Any, **kwargs: Any) -> Any:
        if settling.has_state:
            _fail_at(task, "settling", job.step)
        return enter(*args, **kwargs)

    def compared(*args: Any) -> Any:
        if not settling.has_state and (task.fault is None or task.fault.step < 0):
            _fail_at(task, "settling", job.step)
        return check(*args)

    trainer.on_commit, trainer._exchange = committed, exchanged
    settling._submit_report, settling._check = entered, compared
    if task.fault is not None and task.fault.moment == "backward":
        first = next(parameter for parameter in program.model.parameters() if parameter.requires_grad)
        first.register_hook(lambda gradient: _fail_at(task, "backward", job.step))
    if task.fault is not None and task.fault.moment == "saving":
        from pliant.train.state import checkpoint_file

        write_all = checkpoint_file._write_all

        def write_half(file: Any, block: memoryview) -> None:
            write_all(file, block[: len(block) // 2])
            _fail_at(task, "saving", task.fault.step if task.fault else 0)
            write_all(file, block[len(block) // 2 :])

        checkpoint_file._write_all = write_half


_noticed: set[Fault] = set()


def _fail_at(task: Task, moment: str, step: int) -> None:
    fault = task.fault
    if fault is not None and fault.moment == moment and step >= fault.step and fault not in _noticed:
        _noticed.add(fault)  # once: at a second notice it would go at once
        os.kill(os.getpid(), fault.sig)


# --- in the test ---


@dataclass(slots=True)
class History:
    """All journals of a job, put together."""

    commits: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return max((commit["step"] + 1 for commit in self.commits), default=0)


def history(paths: Sequence[Path]) -> History:
    found = History()
    for path in paths:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # a torn last line of somebody who was killed
                kind, facts = json.loads(line)
                if kind in ("commit", "turn"):
                    (found.commits if kind == "commit" else found.turns).append(facts)
    return found


def compare(found: History, oracle: Sequence[Step], begin: int = 0, repeats: int = 0) -> None:
    """Fail unless every worker had the oracle's bits after every step, and every replica its losses and samples.

    `begin`: the first step, where the job resumed from a checkpoint. `repeats`: how many steps may have been committed
    in two views; somebody who is killed may have committed a step that the others do again.
    """
    wrong = differing(found, oracle)
    assert not wrong, f"other bits than DDP's after steps {wrong} of {len(oracle)}"
    assert {each["step"] for each in found.commits} == set(range(begin, len(oracle))), "not every step was committed"
    _compare_turns(found, oracle, begin)
    views = {(each["step"], each["view"]) for each in found.commits}
    assert len(views) <= len(oracle) - begin + repeats, "steps were committed, lost, and done again"


def differing(found: History, oracle: Sequence[Step]) -> list[int]:
    """The steps after which some worker had other bits than the oracle."""
    expected = {step: each.digest for step, each in enumerate(oracle)}
    return sorted({each["step"] for each in found.commits if each["digest"] != expected.get(each["step"])})


def _compare_turns(found: History, oracle: Sequence[Step], begin: int) -> None:
    """Fail unless all losses and samples are the oracle's: also those of steps that were torn and done again."""
    ledger: dict[tuple[int, int], list[tuple[float, list[int]]]] = {}
    for turn in found.turns:
        ledger.setdefault((turn["step"], turn["replica"]), []).append((turn["loss"], turn["samples"]))
    for step, expected in enumerate(oracle[begin:], begin):
        for replica, (losses, samples) in enumerate(zip(expected.losses, expected.samples, strict=True)):
            batches = ledger.pop((step, replica), [])
            assert batches, f"step {step} of replica {replica} was never done"
            for attempt in range(0, len(batches), len(losses)):
                tried = batches[attempt : attempt + len(losses)]
                assert tuple(loss for loss, _ in tried) == losses, f"loss of replica {replica} in step {step}"
                consumed = tuple(sample for _, batch in tried for sample in batch)
                assert consumed == samples, f"samples of replica {replica} in step {step}"
    assert not ledger, f"turns beyond the oracle's: {sorted(ledger)[:5]}"


def spec_of(worker: Worker, view: View, **settings: Any) -> WorkerSpec:
    return WorkerSpec(worker=worker, view=view, secret=SECRET, **settings)


def view_of(workers: Sequence[Worker]) -> View:
    hosts = dict.fromkeys(worker.host for worker in workers)
    return View(0, tuple(workers), tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in hosts))


def new_workers(count: int, hosts: Sequence[str] = (HOST,)) -> list[Worker]:
    workers: list[Worker] = []
    for number in range(count):
        host = hosts[number % len(hosts)]
        workers.append(Worker(host, free_port(host, [worker.port for worker in workers])))
    return workers


def run_fixed(
    tasks: Sequence[Task], size: int, *, timeout_s: float = 60, hosts: Sequence[str] = (HOST,), **settings: Any
) -> list[History]:
    """Each task in turn, on `size` workers that stay; `size` 0: alone, without anything that a runner sets."""
    plans: list[list[Task]] = [[] for _ in range(max(1, size))]
    for task in tasks:
        view = view_of(new_workers(size, hosts)) if size else None
        for rank, plan in enumerate(plans):
            environ = spec_of(view.workers[rank], view, **settings).to_environ() if view else {}
            plan.append(replace(task, journal=f"{task.journal}.{rank}", environ=environ))
    with gang(_train_all, [(plan,) for plan in plans]) as started:
        started.results(timeout_s)
    return [history([Path(f"{task.journal}.{rank}") for rank in range(len(plans))]) for task in tasks]


def _train_all(rank: int, tasks: Sequence[Task]) -> None:
    for task in tasks:
        train(rank, task)


@dataclass(slots=True)
class Actor:
    """A worker process of a stage. Its exit code is what the program's would be."""

    worker: Worker
    gang: Gang
    journal: Path
    pid: int
    exit_code: int | None = None
    looped_s: float = 0.0
    """When its loop was over."""
    ended_s: float = 0.0
    """When its process was seen to have ended."""
    repeated: Sequence[int] = ()
    """Of each change of view it has seen: how many steps it did again."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None


class Stage:
    """A config server and the processes of one elastic job. The test drives it through `client`."""

    def __init__(self, task: Task, folder: Path, client: ConfigClient, url: str, **settings: Any) -> None:
        self.client = client
        self.actors: list[Actor] = []
        self.replaces = False
        """Whether a worker that dies is replaced by a new one, as a runner with a free slot would."""
        self.faults: dict[Worker, Fault] = {}
        self.changes: dict[Worker, dict[str, Any]] = {}
        """What is different about the tasks of some workers."""
        self._task, self._folder = task, folder
        self._settings = {"elastic": True, "config_server": url, **settings}
        self._gate = folder / "gate"
        self.open_gate(ALL)
        self._read: dict[Path, int] = {}
        self.step = 0
        """Steps that some worker has committed."""
        self.view = -1
        """The newest view in which some worker has committed a step."""
        self.last_step: dict[Worker, int] = {}
        """The last step that each worker has committed."""
        self.prepared: dict[Worker, int] = {}
        """The newest roll that each worker at the gate says it is prepared for."""
        self.blocked: dict[Worker, int] = {}
        """The step in which each worker last waited for a sum of the step before, some of which it had already used."""
        self.waiting: dict[Worker, int] = {}
        """The same where it had used none of them."""

    def open_gate(self, steps: int) -> None:
        """Let the job do so many steps, counted from its beginning."""
        self.allowed = steps
        new = self._gate.with_suffix(".new")
        new.write_text(str(steps))
        new.replace(self._gate)

    def advance(self, step: int, timeout_s: float = 60) -> None:
        """Do `step` steps, and stand there."""
        self.open_gate(step)
        self.until(lambda: self.step >= step or not self.running, timeout_s)
        assert self.step == step, f"{self.step} instead of {step} steps, exits {[a.exit_code for a in self.actors]}"

    def change(self, workers: Sequence[Worker], timeout_s: float = 60) -> None:
        """Want these workers; come back when their first step together is done, which is the next or the one after."""
        before = set(self.client.roll().members)
        self.open_gate(self.step)
        self.want(workers)
        self.until(lambda: set(workers) <= set(self.client.roll().members), timeout_s)
        # Some of the old may have to stay until the new have the state, which takes a step or two.
        for _ in range(6):
            roll = self.client.roll()
            standing = [worker for worker in roll.members if worker in before] if self.step else []
            self.until(lambda r=roll, s=standing: self._are_prepared(s, r.number), timeout_s)  # type: ignore[misc]
            self.advance(self.step + 1, timeout_s)
            roll = self.client.roll()
            if roll.members == tuple(workers) and self.view == roll.number:
                return
        raise AssertionError(f"step {self.step} was done in view {self.view}, but there is {self.client.roll()}")

    def _are_prepared(self, workers: Sequence[Worker], number: int) -> bool:
        return all(self.prepared.get(worker, 0) >= number for worker in workers)

    def want(self, workers: Sequence[Worker]) -> None:
        """Ask for exactly these workers, in this order."""
        self.client.put(view_of(workers))
        self.tend(0)

    def tend(self, timeout_s: float = 0.05) -> None:
        """Do the runner's work: reap, report, start; waits for at most so long for somebody to end."""
        running = {actor.gang.processes[0].sentinel: actor for actor in self.actors if actor.is_running}
        for sentinel in wait_for_any(list(running), timeout_s) if running else ():
            self._reap(running[sentinel])
        view = self.client.get()
        busy = {actor.worker for actor in self.actors if actor.is_running}
        for worker in view.workers if view is not None else ():
            if view is not None and worker not in busy and worker not in {actor.worker for actor in self.actors}:
                self._start(worker, view)
        self._follow()

    def until(self, reached: Callable[[], bool], timeout_s: float = 60) -> None:
        """Tend until that holds."""
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < deadline_s, (
                f"waited for {timeout_s:g} s at step {self.step}: {self.client.roll()}"
            )
            self.tend()

    def until_step(self, step: int, timeout_s: float = 60) -> None:
        self.until(lambda: self.step >= step or not self.running, timeout_s)
        assert self.step >= step, f"all workers ended at step {self.step}: {[a.exit_code for a in self.actors]}"

    def until_over(self, timeout_s: float = 60) -> None:
        """Until all processes have ended."""
        self.until(lambda: not self.running, timeout_s)

    @property
    def running(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.is_running]

    def actor(self, worker: Worker) -> Actor:
        return next(actor for actor in self.actors if actor.worker == worker)

    @property
    def holders(self) -> list[Worker]:
        """Members that have the job's state, as far as the test can know."""
        members = self.client.roll().members
        running = [actor.worker for actor in self.running]
        return [each for each in running if each in members and self.last_step.get(each, -9) >= self.step - 2]

    def kill(self, worker: Worker, sig: int = signal.SIGKILL) -> None:
        os.kill(self.actor(worker).pid, sig)

    @property
    def history(self) -> History:
        return history([actor.journal for actor in self.actors])

    def close(self) -> None:
        for actor in self.actors:
            actor.gang.close()

    def _start(self, worker: Worker, view: View) -> None:
        journal = self._folder / f"{len(self.actors)}-{worker.port}.jsonl"
        environ = spec_of(worker, view, **self._settings).to_environ()
        task = replace(self._task, journal=str(journal), environ=environ, gate=str(self._gate))
        task = replace(task, fault=self.faults.get(worker), **self.changes.get(worker, {}))
        started = Gang(train, [(task,)])
        self.actors.append(Actor(worker, started, journal, started.pid(0)))

    def _reap(self, actor: Actor) -> None:
        process = actor.gang.processes[0]
        actor.ended_s = time.monotonic()
        process.join(10)
        actor.exit_code = process.exitcode
        if actor.exit_code == 0:
            actor.exit_code = actor.gang.hear(0, 1)  # raises what the worker raised
        if actor.exit_code == 0:
            return
        self.client.lost(actor.worker, f"exit code {actor.exit_code}")
        if self.replaces and actor.exit_code != REFUSED_EXIT and not self.client.roll().over:
            self.client.add_worker(new_workers(1)[0])

    def _follow(self) -> None:
        """Read what the journals have more than before, for the step that the job is in."""
        for actor in self.actors:
            begin = self._read.get(actor.journal, 0)
            if not actor.journal.exists() or actor.journal.stat().st_size == begin:
                continue
            with actor.journal.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[actor.journal] = begin + len(whole)
            for line in whole.splitlines():
                kind, facts = json.loads(line)
                if kind == "commit":
                    self.step = max(self.step, facts["step"] + 1)
                    self.view = max(self.view, facts["view"])
                    self.last_step[actor.worker] = facts["step"]
                elif kind == "prepared":
                    self.prepared[actor.worker] = facts["roll"]
                elif kind == "blocked":
                    self.blocked[actor.worker] = facts["step"]
                elif kind == "waiting":
                    self.waiting[actor.worker] = facts["step"]
                elif kind == "looped":
                    actor.looped_s, actor.repeated = facts["at_s"], facts["repeated"]


@contextlib.contextmanager
def staged(task: Task, folder: Path, **settings: Any) -> Iterator[Stage]:
    """An elastic job that nobody works on yet."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ConfigServer(ServerConfig(port=0)).running())
        with ConfigClient(server.url) as client:
            stage = Stage(task, folder, client, server.url, **settings)
            try:
                yield stage
            finally:
                stage.close()
        # A server takes 0.2 s to end, all of it waiting: meanwhile the next test begins.
        _ending.append(_closer.submit(stack.pop_all().close))
        if len(_ending) > 1:
            _ending.pop(0).result(10)  # raises what has ended the one before
