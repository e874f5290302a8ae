"""The training program of all figures and of the demo: one loop, under pliant, under stock DDP, or plain PyTorch.

    python program.py '{"model": "resnet50", "steps": 10, "replicas": 4, "journal": "/tmp/logs"}'

Its one argument is a `launch.Task` as JSON; `launch.train` starts it. Workloads are models and data by name. Observers record
what happens and steer the job: each figure asks for those that it needs. Everything else is the loop that a user writes.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pliant
from pliant.errors import ConfigError
from pliant_repro.figures.launch import Task
from pliant_repro.figures.observers import (
    EndAtRest,
    IterationLines,
    MonitorTimes,
    Observer,
    Pace,
    ResizeRequests,
    TakeTurns,
    TurnLog,
)
from pliant_repro.figures.workloads import ENDLESS, build, launched_as, seed_all
from pliant_repro.zoo import Workload

UNLIKE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Stands for a machine of another kind: kernels for another set of vector instructions."""
KEPT: list[nn.Module] = []
"""DDP models, until the process ends. Dropping one right after a step may hang, as its destructor waits for gloo's thread with
Python's lock held, which that thread may want (torch 2.13)."""


class StockJob:
    """Plain PyTorch, or one rank of stock DDP, behind the part of `pliant.Job` that the loop uses."""

    in_shadow = False

    def __init__(self, task: Task, rank: int = 0, num_ranks: int = 0) -> None:
        self.rank = self.replica = rank
        self.size, self.hosted, self.step, self.changes = max(1, num_ranks), (rank,), 0, ()
        self.batch_size = task.batch
        self._seed, self._is_ddp = task.seed, num_ranks > 0
        self._sampler: torch.utils.data.DistributedSampler[Any] | None = None

    def __enter__(self) -> StockJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ddp:
            torch.distributed.destroy_process_group()

    def wrap(self, model: nn.Module, optimizer: Any, *, bucket_cap_mb: float | None) -> tuple[nn.Module, Any]:
        if self._is_ddp:
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
            KEPT.append(model)
        return model, optimizer

    def loader(self, dataset: Any, *, batch_size: int, **more: Any) -> Iterable[Any]:
        if self._is_ddp:
            self._sampler = torch.utils.data.DistributedSampler(dataset, self.size, self.rank)
        # Shuffled by itself or by DDP's sampler, as pliant's loader is.
        shuffled = {"sampler": self._sampler} if self._sampler is not None else {"shuffle": True}
        self._loader = torch.utils.data.DataLoader(dataset, batch_size, **{**shuffled, **more})
        return self

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the steps, which have one batch each."""
        for batch in self._loader:
            yield [batch]
            self.step += 1

    def epochs(self, count: int) -> Iterator[int]:
        seed_all(self._seed + self.rank)  # as replica `rank` is seeded
        for epoch in range(count):
            if self._sampler is not None:
                self._sampler.set_epoch(epoch)
            yield epoch


def train_ddp(rank: int, task: Task, store: str) -> None:
    """Train as one rank of stock DDP on gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if task.device == "cpu":
        torch.set_num_threads(task.threads)
    ranks = task.replicas or 1
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    train(task, StockJob(task, rank, ranks))


def _start_ddp(task: Task) -> None:
    """Start a process per replica: forked on a CPU, so that torch is imported once."""
    from torch.multiprocessing.spawn import start_processes

    importlib.import_module("torch._dynamo")  # every process's first optimizer would import it, for seconds
    with tempfile.TemporaryDirectory() as folder:
        arguments = (task, str(Path(folder) / "store"))
        method = "fork" if task.device == "cpu" else "spawn"
        start_processes(train_ddp, arguments, nprocs=task.replicas or 1, start_method=method)  # type: ignore[no-untyped-call]


def train(task: Task, stock: StockJob | None = None) -> None:
    """Train as `task` says: under pliant, or with `stock` as stock PyTorch."""
    holder: list[Any] = []
    work = build(task, lambda: holder[0].sync_stats())
    policy, joining = _policies(task)
    job: Any = stock or pliant.join(task.replicas, determinism=task.determinism, seed=task.seed, **joining)
    holder.append(job)
    with job:
        model, optimizer = job.wrap(work.model, work.optimizer, bucket_cap_mb=work.bucket_cap_mb)
        loader = job.loader(work.dataset, batch_size=work.batch_size, **work.loading)
        if work.schedule is not None:
            job.track("schedule", work.schedule)
        observers = _observers(task, policy)
        try:
            _loop(task, job, work, (model, optimizer, loader), observers)
        finally:  # a worker that is told to leave does so from within the loop
            for observer in observers:
                observer.finish(job, work)


def _loop(task: Task, job: Any, work: Workload, wrapped: tuple[Any, Any, Any], observers: Sequence[Observer]) -> None:
    model, optimizer, loader = wrapped
    has_begun = False
    for epoch in job.epochs(ENDLESS if (work.fixed and not task.steps) or task.provision else task.epochs):
        watching = () if job.in_shadow else observers  # a step in which a new worker warms up is none of the job's
        for observer in watching if not has_begun else ():
            observer.begin(job)
        has_begun = has_begun or not job.in_shadow
        for step in loader:
            for batch in step:
                for observer in watching:
                    observer.before_turn(job, work)
                inputs, targets = work.fixed(job.step, job.replica) if work.fixed is not None else batch
                loss = work.loss(model(inputs.to(task.device)), targets.to(task.device))
                for observer in watching:
                    observer.after_forward(job, loss)
                loss.backward()  # type: ignore[no-untyped-call]
                for observer in watching:
                    observer.after_turn(job)
            optimizer.step()
            optimizer.zero_grad()
            stopping = [observer.after_step(job, work) for observer in watching]
            if any(stopping):
                return
        if work.schedule is not None:
            work.schedule.step()
        for observer in watching:
            observer.epoch_done(job, epoch, work)


def _policies(task: Task) -> tuple[Any, dict[str, Any]]:
    """Return the policy that observers look at, or None, and the arguments of `pliant.join`."""
    if task.provision is not None:
        from pliant.adapt.size import Provision

        most, change_step, alpha = task.provision
        policy = Provision(change_step=change_step, alpha=alpha, max_workers=most)
        return policy, {"policies": [policy]}
    if task.lines:
        from pliant.adapt.interference import Interference

        watching = Interference()
        return watching, {"policies": [watching] if task.adapt else []}
    return None, {"monitor": {"noise_scale": 1, "variance": 1}} if task.monitor_rounds else {}


def _observers(task: Task, policy: Any) -> list[Observer]:
    if task.monitor_rounds:
        return [MonitorTimes(task)]
    if task.lines:
        return [IterationLines(task, policy)]
    found: list[Observer] = []
    if task.journal:
        found.append(TurnLog(task))
    if task.turns is not None:
        found.append(TakeTurns(task.steps, *task.turns))
    if task.pace_s or task.hold:
        found.append(Pace(task))
    if task.resizes:
        found.append(ResizeRequests(task.resizes))
    if task.provision:
        found.append(EndAtRest(policy))
    return found


def _become_unlike() -> None:
    """Start again as a machine of another kind would. What `pliant run` has pinned stays pinned there, too."""
    missing = {name: value for name, value in UNLIKE.items() if name not in os.environ}
    if missing:
        descriptor = os.environ.get("PLIANT_LISTEN_FD")
        if descriptor:
            os.set_inheritable(int(descriptor), True)
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


def _place(task: Task) -> None:
    """Take the cores and threads that this process shall have."""
    spec, cores = launched_as(), sorted(os.sched_getaffinity(0))
    if task.unlike and spec is not None and spec.view.number > 1:  # 0 or 1 is the view that the job began with
        _become_unlike()
    if task.one_core:
        os.sched_setaffinity(0, {cores[0]})
    elif task.monitor_rounds and spec is not None and len(cores) < 2 * spec.view.size:
        # A core for each worker: otherwise a step depends on which workers happened to share one.
        os.sched_setaffinity(0, {cores[spec.view.rank_of(spec.worker) % len(cores)]})
    if task.device == "cpu":
        torch.set_num_threads(task.threads)


def main(task: Task) -> None:
    _place(task)
    if task.mode == "ddp":
        _start_ddp(task)
    else:
        train(task, StockJob(task) if task.mode == "plain" else None)


if __name__ == "__main__":
    try:
        main(Task.from_json(sys.argv[1]))
    except ConfigError as error:
        sys.exit(f"pliant: {error}")
