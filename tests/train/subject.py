"""The same programs under pliant, in one worker: what it does is a `Task`, with a fault at a given moment of a given step.

A worker writes down every turn and every committed step in a journal that outlives its death; `compare` holds all
journals of a job against the oracle, for every step and every replica. Who starts workers is `stage`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tampering
import torch
from golden import Step, golden
from programs import Program, build, digest, loading_of, may_have_children, one_step

import pliant
from pliant.errors import MustBeReplaced
from pliant.train import checkpoint_file, trace
from pliant.train.deferred import DeferredUpdates
from pliant.train.events import StepCommitted, ViewChange
from pliant.train.passes import Passes
from pliant.train.pending import PendingSum
from pliant.train.rendezvous import ViewRendezvous
from pliant.train.trainer import Trainer

GATE_S = 60.0
REPLACED_EXIT = 1
"""Of a worker that cannot go on, in whose place a runner starts another."""


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
    """More arguments of `pliant.join`: policies, record, replay, verify."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen to a worker, and when."""

    moment: str
    """forward, backward, summed, outer, committed, settling, saving"""
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
    except MustBeReplaced as error:
        journal.write("replaced", why=str(error))
        return REPLACED_EXIT
    journal.write("finished")
    return 0


def _train(task: Task, journal: Journal) -> None:
    program = build(task.program)
    placed = task.blocks
    with (
        pliant.join(
            replicas=task.replicas,
            determinism=task.determinism,
            blocks=None if placed is None else lambda size: placed,
            sync=task.sync,
            slice_bytes=task.slice_bytes,
            in_flight_bytes=task.in_flight_bytes,
            seed=program.seed,
            **{"verify": 3, **task.adapting},
        ) as job,
        _observed(job, program, journal, task),
    ):
        model, _ = job.wrap(program.model, program.optimizers, sync_buffers=program.sync_buffers, **program.wrapping)
        loader = job.loader(program.dataset, **loading_of(program))
        if program.scheduler is not None:
            job.track("scheduler", program.scheduler)
        if program.scaler is not None:
            job.track("scaler", program.scaler)
        if task.load:
            job.load(task.load)
        changes: list[ViewChange] = []
        job.on_view_change(changes.append)

        def note(loss: float, samples: list[int]) -> None:
            if (
                job._run.trainer.deferred.lost is None and not job.in_shadow
            ):  # else what this forward computes does not count
                journal.write("turn", step=job.step, replica=job.replica, loss=loss, samples=samples)

        for _epoch in job.epochs(task.epochs):
            for step in loader:
                _pass_gate(task, job, journal)
                if task.save and step.number + 1 == task.save_at:
                    job.save(task.save)
                if one_step(program, model, step, job.no_sync, note):
                    break
        journal.write("looped", repeated=[change.repeated for change in changes])
        if task.trace:
            trace.write(job.rank)  # what a program of its own would do at its exit


def _pass_gate(task: Task, job: Any, journal: Journal) -> None:
    """Wait until the test lets this step begin. Says meanwhile which roll this worker is prepared for."""
    deadline_s, said = time.monotonic() + GATE_S, 0
    if task.gate and int(Path(task.gate).read_text()) <= job.step:
        job._run.trainer.driver.wait_for_sums()  # the test wants to see this step's end
    while task.gate and int(Path(task.gate).read_text()) <= job.step:
        if job.prepared_view > said:
            said = job.prepared_view
            journal.write("prepared", roll=said)
        assert time.monotonic() < deadline_s, f"the gate stayed closed at step {job.step}"
        time.sleep(0.002)


@contextlib.contextmanager
def _observed(job: Any, program: Program, journal: Journal, task: Task) -> Iterator[None]:
    """Write down commits, and be there when a fault is due."""
    unwritten: list[dict[str, Any]] = []

    def write_commits() -> None:
        for facts in unwritten:
            if facts["step"] == job.step - 1:  # else it was taken back
                journal.write("commit", digest=digest(program, job._run.trainer.state.first_buffers), **facts)
        unwritten.clear()

    def committed(event: StepCommitted) -> None:
        trainer, stats = job._run.trainer, job.sync_stats()
        facts = {"rank": event.rank, "size": event.num_workers, "view": job.view, "hosted": list(job.hosted)}
        facts |= {
            "brief": trainer._exchange._exchange.codec.is_brief,
            "crossed": job.has_pending_updates,
            "mode": stats.mode,
            "in_group": any(each.group is not None and each.group.in_use for each in trainer.reducers),
            "slice_bytes": stats.slice_bytes,
        }
        unwritten[:] = [{"step": event.step - 1, **facts}]
        if not job.has_pending_updates:  # looking at parameters would wait for them
            write_commits()
        _fail_at(task, "committed", event.step - 1)

    def finished(original: Callable[..., Any], deferred: DeferredUpdates) -> None:
        original(deferred)
        write_commits()

    def waited(original: Callable[..., Any], deferred: DeferredUpdates, awaited: PendingSum) -> Any:
        taken_in = len(deferred.parameters) - len(deferred._pending)
        if not awaited.handle.done:
            journal.write("blocked" if taken_in else "waiting", step=job.step)
        return original(deferred, awaited)

    def turn_begun(original: Callable[..., Any], trainer: Trainer, slot: int) -> Any:
        batch = original(trainer, slot)
        _fail_at(task, "forward", job.step)
        return batch

    def exchanged(original: Callable[..., Any], passes: Passes) -> Any:
        event = original(passes)
        _fail_at(task, "summed", job.step)
        return event

    def counted(original: Callable[..., Any], passes: Passes) -> None:
        original(passes)
        _fail_at(task, "outer", job.step)

    def entered(original: Callable[..., Any], settling: ViewRendezvous, *args: Any, **kwargs: Any) -> Any:
        if settling.has_state:
            _fail_at(task, "settling", job.step)
        return original(settling, *args, **kwargs)

    def compared(original: Callable[..., Any], settling: ViewRendezvous, *args: Any) -> Any:
        if not settling.has_state and (task.fault is None or task.fault.step < 0):
            _fail_at(task, "settling", job.step)
        return original(settling, *args)

    def write_half(original: Callable[..., Any], specs: Any, path: Path, metadata: Any) -> None:
        original(specs, path, metadata)
        if task.fault is not None and task.fault.moment == "saving":
            os.truncate(path, path.stat().st_size // 2)
            _fail_at(task, "saving", task.fault.step)
            original(specs, path, metadata)

    job.on_commit(committed)
    if task.fault is not None and task.fault.moment == "backward":
        first = next(parameter for parameter in program.model.parameters() if parameter.requires_grad)
        first.register_hook(lambda gradient: _fail_at(task, "backward", job.step))  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        for owner, name, around in (
            (DeferredUpdates, "_finish", finished),
            (DeferredUpdates, "_wait_for", waited),
            (Trainer, "_begin_turn", turn_begun),
            (Passes, "run", exchanged),
            (Passes, "count", counted),
            (ViewRendezvous, "_submit_report", entered),
            (ViewRendezvous, "_check", compared),
            (checkpoint_file, "serialize_file", write_half),
        ):
            stack.enter_context(mock.patch.object(owner, name, _around(getattr(owner, name), around)))
        yield


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: around(original, *args, **kwargs)


_noticed: set[Fault] = set()


def _fail_at(task: Task, moment: str, step: int) -> None:
    fault = task.fault
    if fault is not None and fault.moment == moment and step >= fault.step and fault not in _noticed:
        _noticed.add(fault)  # once: at a second notice it would go at once
        os.kill(os.getpid(), fault.sig)


# --- what all journals of a job say ---


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


def compare_all(tasks: Sequence[Task], found: Sequence[History], oracle: Mapping[str, str] | None = None) -> None:
    """Fail unless every task has the bits of its oracle: its own program, or another one that computes the same."""
    wrong = {}
    for task, each in zip(tasks, found, strict=True):
        name = (oracle or {}).get(task.program, task.program)
        try:
            compare(each, golden(name, task.replicas, task.epochs))
        except AssertionError as error:
            wrong[Path(task.journal).name] = str(error)
    assert not wrong, wrong


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
            if not losses:
                assert not batches, f"replica {replica} used its batch of step {step}, which was left"
                continue
            assert batches, f"step {step} of replica {replica} was never done"
            for attempt in range(0, len(batches), len(losses)):
                tried = batches[attempt : attempt + len(losses)]
                assert tuple(loss for loss, _ in tried) == losses, f"loss of replica {replica} in step {step}"
                consumed = tuple(sample for _, batch in tried for sample in batch)
                assert consumed == samples, f"samples of replica {replica} in step {step}"
    assert not ledger, f"turns beyond the oracle's: {sorted(ledger)[:5]}"
