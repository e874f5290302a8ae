"""The training program of all figures and of the demo: one loop, under pliant, under stock DDP, or plain PyTorch.

    python program.py '{"model": "resnet50", "steps": 10, "replicas": 4, "journal": "/tmp/logs"}'

Its one argument is a `launch.Task` as JSON; `launch.train` starts it. Workloads are models and data by name. Observers record
what happens and steer the job: each figure asks for those that it needs. Everything else is the loop that a user writes.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant
from pliant.errors import ConfigError, NotLaunched
from pliant.identity import WorkerSpec, worker_spec
from pliant_repro import zoo
from pliant_repro.figures import digits
from pliant_repro.figures.launch import Task

UNLIKE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Stands for a machine of another kind: kernels for another set of vector instructions."""
HOLD_S = 120.0
"""How long a step may wait for new workers."""
ENDLESS = 1 << 20
Sample = tuple[Tensor, Tensor]
KEPT: list[nn.Module] = []
"""DDP models, until the process ends. Dropping one right after a step may hang, as its destructor waits for gloo's thread with
Python's lock held, which that thread may want (torch 2.13)."""


# --- workloads ---


@dataclass(kw_only=True, slots=True)
class Work:
    """Everything that a training script makes before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    bucket_cap_mb: float | None = None
    loading: dict[str, Any] = field(default_factory=dict)
    """More arguments of the DataLoader."""
    held_out: Sample | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    fixed: Callable[[int, int], Sample] | None = None
    """Returns the batch of (step, replica) where the data set only counts."""


def build(task: Task, stats: Callable[[], Any]) -> Work:
    """Build the workload of a task, the same in every process. `stats` returns the job's synchronisation statistics."""
    seed_all(task.seed)
    kind, _, name = task.model.partition(":")
    builders = {"digits": _digits, "small-net": _small_net, "image": _images, "bert-squad": _bert}
    if kind == "paced-resnet50":
        return _paced_resnet(task, stats)
    if kind in builders:
        return builders[kind](task, name)
    made = zoo.workload(task.model, task.scale, task.steps * (task.replicas or 1), task.device, task.batch)
    return Work(
        model=made.model, optimizer=made.optimizer, dataset=made.dataset, batch_size=made.batch_size, loss=made.loss,
        bucket_cap_mb=made.bucket_cap_mb,
    )  # fmt: skip


def _digits(task: Task, _: str) -> Work:
    """The demo's net. BatchNorm, dropout and three random generators are what usually breaks when replicas move."""
    dataset, held_out = digits.augmented(task.data)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(48 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Work(
        model=model, optimizer=optimizer, dataset=dataset, batch_size=digits.BATCH_SIZE, held_out=held_out
    )


def _small_net(task: Task, _: str) -> Work:
    """A small net on digits or, with `data`, ResNet-56 on CIFAR-10: for batch sizes that a policy changes."""
    dataset: Any
    if task.data.endswith(".npz") or not task.data:
        dataset, held_out = digits.read_in_batches(task.data)
        model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip
        loading: dict[str, Any] = {"collate_fn": zoo.as_is}
    else:
        dataset, test = zoo.cifar10(task.data, augment=True), zoo.cifar10(task.data, train=False)
        images, labels = zip(*(test[index] for index in range(len(test))), strict=True)
        model, held_out, loading = zoo.vision_model("ResNet56"), (torch.stack(images), torch.stack(labels)), {}
    model.to(task.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9, weight_decay=2e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)
    return Work(
        model=model, optimizer=optimizer, dataset=dataset, batch_size=task.batch, held_out=held_out, schedule=schedule,
        loading=loading,
    )  # fmt: skip


def _counting(task: Task, model: nn.Module, fixed: Callable[[int, int], Sample], **more: Any) -> Work:
    """Return a workload that computes on fixed batches: its data set only counts samples."""
    samples = task.steps * task.batch * num_replicas(task) or 10_000
    return Work(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), batch_size=task.batch, fixed=fixed,
        dataset=TensorDataset(torch.zeros(samples)), **more,
    )  # fmt: skip


def _images(task: Task, name: str) -> Work:
    """A torchvision model on random images: each replica has one batch of its own, the same in every step."""
    cache: dict[tuple[int, bool], Sample] = {}
    modes = monitor_modes(task)

    def fixed(step: int, replica: int) -> Sample:
        is_small = bool(modes) and modes[min(step, len(modes) - 1)] != "full"
        if (replica, is_small) not in cache:
            batch, side = (2, 64 if task.image_size > 64 else 32) if is_small else (task.batch, task.image_size)
            draw = torch.Generator().manual_seed(task.seed + 1 + replica)
            images = torch.rand(batch, 3, *[side or zoo.image_size(name)] * 2, generator=draw)
            labels = torch.randint(0, zoo.num_classes(name), (batch,), generator=draw)
            cache[replica, is_small] = images.to(task.device), labels.to(task.device)
        return cache[replica, is_small]

    return _counting(task, zoo.vision_model(name).to(task.device), fixed)


def _paced_resnet(task: Task, stats: Callable[[], Any]) -> Work:
    """ResNet-50 with `kappa` times fewer parameters, whose layers sleep for as long as a K80 computes."""
    from pliant_repro import profiles
    from pliant_repro.paced import PacedNet

    whole = replace(profiles.profile("resnet50", batch=task.batch), compute_s=task.batch / 50.0)  # a K80: 50 images/s
    net = PacedNet(profiles.scaled(whole, task.kappa), lambda: float(stats().waited_until_s))

    def fixed(step: int, replica: int) -> Sample:
        draw = torch.Generator().manual_seed(replica)
        return torch.randn(task.batch, net.num_inputs, generator=draw), torch.empty(0)

    return _counting(task, net, fixed, loss=lambda found, _: found, bucket_cap_mb=25.0 / task.kappa)


def _bert(task: Task, _: str) -> Work:
    """BERT on questions, or with `paced_s` a model with its inputs and outputs that only sleeps."""
    from pliant_repro.figures import questions

    places = task.image_size
    model: nn.Module
    data: Any = questions.SyntheticQuestions(1 << 16, places)
    if task.paced_s:
        model = PacedBert(task.paced_s, [Path(task.journal) / f"device{number}" for number in range(task.devices)])
    elif task.data:
        model, data = questions.from_folder(Path(task.data), places)
    else:
        model = questions.bert(places=places)
    model.to(task.device)
    return Work(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-5), dataset=data, batch_size=task.batch or 8
    )


class PacedBert(nn.Module):
    """Occupies one of several devices, which are locked files, for some seconds per step; computes hardly anything."""

    def __init__(self, step_s: float, devices: Sequence[Path]) -> None:
        super().__init__()
        self.words, self.ends = nn.Embedding(8192, 16), nn.Linear(16, 2)
        self._step_s, self._devices = step_s, devices

    def forward(self, inputs: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:  # the kernel frees the locks of processes that end
            files = [stack.enter_context(path.open("a")) for path in self._devices]
            while not any(_lock(file) for file in files):
                time.sleep(0.001)
            time.sleep(self._step_s)
        return cast(Tensor, self.ends(self.words(inputs[:, 0])))


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- stock PyTorch with the interface of a job ---


class StockJob:
    """Plain PyTorch, or one rank of stock DDP, behind the part of `pliant.Job` that the loop uses."""

    def __init__(self, task: Task, rank: int = 0, num_ranks: int = 0) -> None:
        self.rank = self.replica = rank
        self.size, self.hosted, self.step, self.changes = max(1, num_ranks), (rank,), 0, ()
        self.batch_size, self.observation = task.batch, None
        self._seed, self._is_ddp = task.seed, num_ranks > 0

    def __enter__(self) -> StockJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ddp:
            torch.distributed.destroy_process_group()

    def wrap(
        self, model: nn.Module, optimizer: Any, dataset: Any, *, batch_size: int, bucket_cap_mb: float | None, **more: Any
    ) -> tuple[nn.Module, Any, Iterator[Any]]:
        sampler: torch.utils.data.DistributedSampler[Any] | None = None
        if self._is_ddp:
            sampler = torch.utils.data.DistributedSampler(dataset, self.size, self.rank)
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
            KEPT.append(model)
        self._sampler = sampler
        self._loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler, **more)
        seed_all(self._seed + self.rank)  # as replica `rank` is seeded
        return model, optimizer, cast(Iterator[Any], self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            self.step += 1

    def epochs(self, count: int) -> Iterator[int]:
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


# --- observers ---


class Observer:
    """Called around each turn of a replica. The base class does nothing."""

    def before(self, job: Any, work: Work) -> None:
        """Called before a turn's forward pass."""

    def forwarded(self, job: Any, loss: Tensor) -> None:
        """Called between forward and backward."""

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        """Called after `optimizer.step()`. Returning True ends the training."""
        return False

    def epoch_done(self, job: Any, epoch: int, work: Work) -> None:
        """Called after each epoch."""

    def finish(self, job: Any, work: Work) -> None:
        """Called when training has ended, also in a worker that leaves early."""


class TurnLog(Observer):
    """Appends a line of JSON for each turn, state, change of view and epoch to this process's log.

    A line is in the file before the next thing happens, so that a killed process loses none.
    """

    def __init__(self, task: Task, switch: AlternatingSwitch | None) -> None:
        self._task, self._switch = task, switch
        self._file = open(Path(task.journal) / f"{os.getpid()}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._num_states = self._num_changes = 0
        self._trained_s, self._begin_s = 0.0, time.monotonic()

    def before(self, job: Any, work: Work) -> None:
        self._write_changes(job)
        self._write_state(job, work)

    def forwarded(self, job: Any, loss: Tensor) -> None:
        if self._task.digest:  # also of an attempt that is lost and repeated
            self._write("turn", **self._turn(job, job.step, job.replica), loss=loss.item())

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        task, is_last = self._task, replica == job.hosted[-1]
        if task.nudge == step and job.rank == 0:
            weight = next(KEPT[0].parameters()).data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        if task.digest:
            return False
        if task.device != "cpu" and (is_last or task.sync_turns):
            torch.cuda.synchronize()
        facts = self._turn(job, step, replica)
        if self._switch is not None:
            facts |= self._switch.take()
        if task.memory and is_last:
            facts["memory_bytes"] = memory_bytes(task.device)
        self._write("turn", **facts)
        return False

    def epoch_done(self, job: Any, epoch: int, work: Work) -> None:
        self._trained_s += time.monotonic() - self._begin_s
        is_last = epoch == self._task.epochs - 1
        if is_last:
            self._write_state(job, work)
        if work.held_out is not None and job.rank == 0 and (self._task.evaluate or is_last):
            found = accuracy(work.model, work.held_out, self._task.device)
            self._write("epoch", epoch=epoch, time_s=self._trained_s, accuracy=found)
            if job.observation is not None and job.observation.noise_scale is not None:
                print(f"Gradient Noise Scale: {job.observation.noise_scale:.6g}")
            if self._task.evaluate:
                size = f"{job.replicas} x {job.batch_size}"
                print(f"epoch {epoch}: accuracy {found:.4f}, batch {size}, {self._trained_s:.2f} s")
        self._begin_s = time.monotonic()

    def finish(self, job: Any, work: Work) -> None:
        self._write_changes(job)

    def _turn(self, job: Any, step: int, replica: int) -> dict[str, Any]:
        return {"step": step, "replica": replica, "size": job.size, "rank": job.rank, "batch": job.batch_size}

    def _write(self, kind: str, **facts: object) -> None:
        self._file.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **facts}).encode() + b"\n")

    def _write_state(self, job: Any, work: Work) -> None:
        """Write the digest of the last step, once. Before a turn the model has the buffers of replica 0, as DDP's rank 0."""
        is_own = isinstance(job, StockJob) and job.rank > 0
        if self._task.digest and job.step > self._num_states and not is_own:
            self._num_states = job.step
            self._write("state", step=job.step - 1, digest=digest(work.model, work.optimizer))

    def _write_changes(self, job: Any) -> None:
        for change in islice(job.changes, self._num_changes, None):
            self._num_changes += 1
            names = ("step", "old_size", "new_size", "pause_s", "lost")
            self._write("change", **{name: getattr(change, name) for name in names})


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of the bytes of parameters, buffers and the optimizer's state."""
    digested = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digested.update(name.encode() + tensor.cpu().numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            if value is not None:
                digested.update(f"{number}.{name}".encode() + torch.as_tensor(value).cpu().numpy().tobytes())
    return digested.hexdigest()


def accuracy(model: nn.Module, held_out: Sample, device: str) -> float:
    images, labels = held_out
    model.eval()
    with torch.no_grad():
        parts = [model(each.to(device)).argmax(1).cpu() for each in torch.split(images, 1024)]
    model.train()
    return float((torch.cat(parts) == labels).double().mean())


def memory_bytes(device: str) -> int:
    """Return the bytes that this process holds: of the host's memory now, or of the device's at its peak."""
    if device != "cpu":
        return torch.cuda.max_memory_reserved()
    # Libraries, which are files, are left out: the machine has them once, whoever uses them.
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


class Pace(Observer):
    """Keeps steps from being shorter than `pace_s`, and waits where the task says that workers shall join."""

    def __init__(self, task: Task) -> None:
        self._pace_s, self._holds = task.pace_s, dict(task.hold)
        self._step, self._due_s = -1, 0.0

    def before(self, job: Any, work: Work) -> None:
        if job.step == self._step:
            return
        # Before the turn's work, as what is measured as the pause of a resize lies before that.
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._step, self._due_s = job.step, time.monotonic() + self._pace_s
        if job.step in self._holds:
            _wait_for_workers(job, self._holds[job.step])


def _wait_for_workers(job: pliant.Job, num_workers: int) -> None:
    """Wait until a view with so many workers can be entered, so that the next step is its first."""
    from pliant.elastic.client import ConfigClient

    deadline_s = time.monotonic() + HOLD_S
    with ConfigClient(worker_spec().config_server) as client:
        roll = client.membership()
        while len(roll.members) != num_workers and not (roll.over or time.monotonic() > deadline_s):
            roll = client.wait_for_membership(roll.number, 5.0)
    while job.prepared_view < roll.number and not (roll.over or time.monotonic() > deadline_s):
        time.sleep(0.002)  # the job's threads are connecting to the new workers


class AlternatingSwitch:
    """Wraps the job's replica switch: measures it, and leaves it out in every second step, whose result means nothing."""

    def __init__(self, job: pliant.Job) -> None:
        self._inner, self._job = job.replica_switch, job
        self._spent_s = 0.0
        self._kept: dict[str, Any] = {}
        job.replica_switch = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the inner switch's method, timed and called only where this step switches."""
        method = getattr(self._inner, name)

        def gated(*arguments: Any) -> Any:
            begin_s = time.perf_counter()
            if self._job.step % 2 == 0 or name not in self._kept:
                self._kept[name] = method(*arguments)
            self._spent_s += time.perf_counter() - begin_s
            return self._kept[name]

        return gated

    def take(self) -> dict[str, Any]:
        """Return what a turn's log line says about the switch."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return {"switched": self._job.step % 2 == 0, "switch_s": spent_s}


class IterationLines(Observer):
    """Prints images per second of each step, and the policy's lines, as KungFu's artifact does. Rank 0 prints."""

    def __init__(self, job: pliant.Job, task: Task, policy: Any) -> None:
        self._job, self._task, self._warmup = job, task, task.warmup
        self._where = "/gpu:0" if task.device != "cpu" else "/cpu:0"
        self._voted = False
        self.rates: list[float] = []
        self._begin_s = 0.0
        policy.report = self._say

    def _say(self, text: str) -> None:
        """Print a line of the policy; lines of the vote have a mark of their own."""
        self._voted = True
        if self._job.rank == 0:
            print(f"[I] {text}" if "::" in text else f"Cluster response\n{text}", flush=True)

    def before(self, job: Any, work: Work) -> None:
        if not self._begin_s:
            self._begin_s = time.perf_counter()
            if job.rank == 0:
                name = "paced ResNet50" if self._task.kappa else self._task.model.partition(":")[2]
                print(f"Model: {name}\nBatch size: {self._task.batch}", flush=True)
            return
        self._measure()

    def _measure(self) -> None:
        now_s = time.perf_counter()
        took_s, self._begin_s = now_s - self._begin_s, now_s
        if self._warmup:
            self._warmup -= 1
            return
        self.rates.append(self._task.batch / took_s)
        if self._job.rank == 0:
            response = "Cluster response " if self._voted else ""
            print(f"{response}Iter #{len(self.rates) - 1}: {self.rates[-1]:.1f} img/sec per {self._where}", flush=True)
        self._voted = False

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        if self._task.device != "cpu":
            torch.cuda.synchronize()
        return False

    def finish(self, job: Any, work: Work) -> None:
        self._measure()
        if job.rank == 0:
            mean, spread = float(np.mean(self.rates)), 1.96 * float(np.std(self.rates))
            facts = {"framework": "pliant", "np": job.size, "bs": self._task.batch, "kf-opt": "sync-sgd-monitor"}
            text = json.dumps({**facts, "adapt": self._task.adapt}, separators=(",", ":"))
            print(f"RESULT: {mean:f} +-{spread:f} {text}", flush=True)


class ResizeRequests(Observer):
    """Asks for other numbers of workers by a schedule.

    Training continues while new workers start. So if the step of the next change comes before the last change has taken
    place, the next one is put off until then.
    """

    def __init__(self, resizes: Sequence[tuple[int, int]]) -> None:
        self._begin_s = time.monotonic()
        self._left = sorted(resizes, reverse=True)
        self._asked: int | None = None
        self._asked_s = 0.0
        self._is_reported = True

    def before(self, job: Any, work: Work) -> None:
        if job.step == 0 and job.rank == 0:
            print(f"init took {time.monotonic() - self._begin_s:.3f}s", flush=True)

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        size = self.due(step + 1, job.size, lambda text: print(text, flush=True) if job.rank == 0 else None)
        if size is not None:
            job.resize(size)  # 0 ends the job, and with it the loop
        return False

    def due(self, steps: int, size: int, say: Callable[[str], None]) -> int | None:
        """Return the number of workers to ask for when `size` workers have done `steps` steps; None means nothing."""
        if self._asked == size and not self._is_reported:
            self._is_reported = True
            say(f"request to first step with {size} workers: {time.monotonic() - self._asked_s:.3f}s")
        if not self._left or steps < self._left[-1][0] or self._asked not in (None, size):
            return None
        self._asked, self._asked_s, self._is_reported = self._left.pop()[1], time.monotonic(), False
        return self._asked


class ProvisionTable(Observer):
    """Writes out_RANK.csv as KungFu's artifact does, and ends the job soon after the policy has come to rest."""

    COLUMNS = ("global_step", "sub_step", "num_workers", "duration", "throughput", "after_run_duration")
    SAY_EVERY, LAST_STEPS = 10, 5

    def __init__(self, task: Task, policy: Any) -> None:
        self._folder, self._policy, self._steps = Path(task.journal), policy, task.steps or ENDLESS
        self._files: dict[int, Any] = {}
        self._view, self._sub_step = -1, 0
        self._came_back_s = self._begin_s = time.monotonic()
        self._done_at: int | None = None

    def before(self, job: Any, work: Work) -> None:
        self._begin_s = time.monotonic()
        self._sub_step = self._sub_step + 1 if job.view == self._view else 0
        self._view = job.view

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        now_s = time.monotonic()
        # Between two steps lies the time of the policy, of the loader and of changes.
        took_s, between_s, self._came_back_s = now_s - self._came_back_s, self._begin_s - self._came_back_s, now_s
        rate = job.size * job.batch_size / took_s
        row = (step, self._sub_step, job.size, f"{took_s:.6f}", f"{rate:.4f}", f"{between_s:.6f}")
        csv.writer(self._file(job.rank)).writerow(row)
        if step % self.SAY_EVERY == self.SAY_EVERY - 1:
            print(f"global_step/sec: {1 / took_s:.5f}\nexamples/sec: {job.batch_size / took_s:.4f}", flush=True)
        if self._done_at is None and self._policy is not None and self._policy.done:
            self._done_at = step
        return step + 1 >= self._steps or (self._done_at is not None and step >= self._done_at + self.LAST_STEPS)

    def _file(self, rank: int) -> Any:
        """Return the file of the rank that this worker has now."""
        if rank not in self._files:
            path = self._folder / f"out_{rank}.csv"
            is_new = not path.exists()
            self._files[rank] = path.open("a", buffering=1)
            if is_new:
                csv.writer(self._files[rank]).writerow(self.COLUMNS)
        return self._files[rank]

    def finish(self, job: Any, work: Work) -> None:
        for file in self._files.values():
            file.close()
        if self._policy is not None and job.rank == 0:
            found = {"workers": job.size, "done": self._policy.done, "history": self._policy.history}
            (self._folder / "provision.json").write_text(json.dumps(found))


class MonitorClocks(Observer):
    """Switches the gradient monitors on and off from step to step, and measures every step. Writes worker-RANK.json."""

    NAMES = ("step_s", "cpu_s", "other_s", "probe_s")
    """Wall time; processor time of all threads; of threads other than the program's; inside the monitors."""

    def __init__(self, job: pliant.Job, task: Task) -> None:
        from pliant_repro.figures.kungfu_monitoring import INTERVALS

        self._task, self._modes, self._intervals = task, monitor_modes(task), INTERVALS
        probe = job.gradient_probe
        assert probe is not None, "monitors were asked for"
        self._probe: Any = probe
        self._times: dict[str, list[float]] = {name: [] for name in self.NAMES}
        self._inside_s = 0.0
        self._last: tuple[float, ...] | None = None
        self._switch(0)
        for name in ("begin", "add_gradient", "gradients_complete", "add_sum", "sums_complete", "pack_row", "learn"):
            setattr(probe, name, self._timed(getattr(probe, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self._inside_s += time.thread_time() - begin_s

        return timed

    def _switch(self, step: int) -> None:
        mode = self._modes[min(step, len(self._modes) - 1)]
        self._probe.noise_interval, self._probe.variance_interval = self._intervals[mode]

    def _measure(self) -> None:
        whole = time.process_time()
        now = (time.monotonic(), whole, whole - time.thread_time(), self._inside_s)
        if self._last is not None:
            for name, after, before in zip(self.NAMES, now, self._last, strict=True):
                self._times[name].append(after - before)
        self._last = now

    def before(self, job: Any, work: Work) -> None:
        if self._last is None or job.step > len(self._times["step_s"]):
            self._measure()

    def after(self, job: Any, step: int, replica: int, loss: Tensor) -> bool:
        if replica == job.hosted[-1]:
            self._switch(step + 1)
        return False

    def finish(self, job: Any, work: Work) -> None:
        self._measure()
        found = {**self._times, **self._probe.figures(), "noise_ratio": self._probe.noise.ratio}
        (Path(self._task.journal) / f"worker-{job.rank}.json").write_text(json.dumps(found))


def monitor_modes(task: Task) -> list[str]:
    """Return the monitoring mode of each step; empty where nothing is monitored."""
    if not task.monitor_rounds:
        return []
    from pliant_repro.figures.kungfu_monitoring import schedule

    return schedule(task.monitor_rounds)


# --- the program ---


def train(task: Task, stock: StockJob | None = None) -> None:
    """Train as `task` says: under pliant, or with `stock` as stock PyTorch."""
    holder: list[Any] = []
    work = build(task, lambda: holder[0].sync_stats())
    policy, joining = _policies(task)
    job: Any = stock or pliant.join(task.replicas, determinism=task.determinism, seed=task.seed, **joining)
    holder.append(job)
    with job:
        model, optimizer, loader = job.wrap(
            work.model, work.optimizer, work.dataset, batch_size=work.batch_size, bucket_cap_mb=work.bucket_cap_mb,
            **work.loading,
        )  # fmt: skip
        if work.schedule is not None:
            job.track("schedule", work.schedule)
        observers = _observers(task, job, policy)
        try:
            _loop(task, job, work, (model, optimizer, loader), observers)
        finally:  # a worker that is told to leave does so from within the loop
            for observer in observers:
                observer.finish(job, work)


def _loop(task: Task, job: Any, work: Work, wrapped: tuple[Any, Any, Any], observers: Sequence[Observer]) -> None:
    model, optimizer, loader = wrapped
    for epoch in job.epochs(ENDLESS if (work.fixed and not task.steps) or task.provision else task.epochs):
        for batch in loader:
            for observer in observers:
                observer.before(job, work)
            step, replica = job.step, job.replica
            inputs, targets = work.fixed(step, replica) if work.fixed is not None else batch
            optimizer.zero_grad()
            loss = work.loss(model(inputs.to(task.device)), targets.to(task.device))
            for observer in observers:
                observer.forwarded(job, loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            stopping = [observer.after(job, step, replica, loss) for observer in observers]
            if any(stopping):
                return
        if work.schedule is not None:
            work.schedule.step()
        for observer in observers:
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


def _observers(task: Task, job: Any, policy: Any) -> list[Observer]:
    if task.monitor_rounds:
        return [MonitorClocks(job, task)]
    if task.lines:
        return [IterationLines(job, task, policy)]
    if task.model == "bert-squad":
        return [ProvisionTable(task, policy)]
    found: list[Observer] = []
    if task.journal:
        found.append(TurnLog(task, AlternatingSwitch(job) if task.alternate else None))
    if task.pace_s or task.hold:
        found.append(Pace(task))
    if task.resizes:
        found.append(ResizeRequests(task.resizes))
    return found


def launched_as() -> WorkerSpec | None:
    """Return who this process is under `pliant run`; None if it was started without."""
    try:
        return worker_spec()
    except NotLaunched:
        return None


def num_replicas(task: Task) -> int:
    spec = launched_as()
    return task.replicas or (spec.view.size if spec is not None else 1)


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
