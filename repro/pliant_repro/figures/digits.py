"""The training program of the demo: handwritten digits, a small convolutional net, four replicas.

    python digits.py                       # alone: one process takes the turns of all replicas
    pliant run -w -np 4 digits.py          # on workers that come and go; `pliant resize 2` while it runs
    python digits.py --ddp                 # the oracle: stock DistributedDataParallel, a process per replica

Model, data and loop body are the same lines in all three. BatchNorm, dropout and augmentation with three random
generators are there because they are what usually breaks when replicas move. With `--journal DIR` every process writes
down what it did, for `ledger` to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant_repro.figures.images import BATCH_SIZE, NUM_TRAIN, from_scikit_learn, load

SEED = 2027
KEPT: list[nn.Module] = []
"""DDP models, until the process ends: dropping one right after a step may hang, as its destructor waits for gloo's thread with
Python's lock held, which that thread may want (torch 2.13)."""


# --- data and model ---


class Digits:
    """Images of 8 x 8 pixels, moved, dimmed and made noisy whenever they are read."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = np.random.randint(0, 3, size=2)
        moved = F.pad(self._images[index], (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        dimmed = moved * random.uniform(0.8, 1.2)
        return dimmed + 0.1 * torch.randn(dimmed.shape), self._labels[index]


def load_split(path: Path | None) -> tuple[Digits, Tensor, Tensor]:
    """The digits to train on, and images and labels of those held out."""
    arrays = from_scikit_learn() if path is None else load(path)
    images, labels = torch.from_numpy(arrays[0]).unsqueeze(1), torch.from_numpy(arrays[1])
    return Digits(images[:NUM_TRAIN], labels[:NUM_TRAIN]), images[NUM_TRAIN:], labels[NUM_TRAIN:]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The net and its optimizer, the same in every process."""
    seed_all(SEED)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(48 * 16, 10),
    )
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- what is written down ---


class Journal:
    """What this process did, a line of JSON each; in the file before the next thing happens."""

    def __init__(self, folder: Path | None) -> None:
        # Closed by the process's end, whichever way: a kill must not lose what was written.
        self._file = open(folder / f"{os.getpid()}.jsonl", "ab", buffering=0) if folder is not None else None  # noqa: SIM115
        self._stated = 0
        self._num_changes = 0

    def write(self, kind: str, **facts: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **facts}).encode() + b"\n")

    def state(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The digest after `step` steps, once; call it where the model has the buffers of replica 0."""
        if step > self._stated and self._file is not None:
            self._stated = step
            self.write("state", step=step - 1, digest=digest(model, optimizer))

    def changes(self, seen: Iterable[object]) -> None:
        """The changes of view that are new in `seen`."""
        for change in list(seen)[self._num_changes :]:
            self._num_changes += 1
            names = ("step", "old_size", "new_size", "pause_s", "lost")
            self.write("change", **{name: getattr(change, name) for name in names})


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of the bytes of parameters, buffers and the optimizer's state."""
    digested = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digested.update(name.encode() + tensor.numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            digested.update(f"{number}.{name}".encode() + torch.as_tensor(value).numpy().tobytes())
    return digested.hexdigest()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


class Pace:
    """Keeps steps from being shorter than `step_s`, so that one can watch, and resize, a job of a few hundred."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step, self._due_s = -1, 0.0

    def keep(self, step: int) -> None:
        """Call it at the start of a turn: what is measured as a pause lies before that."""
        if step != self._step:
            time.sleep(max(0.0, self._due_s - time.monotonic()))
            self._step, self._due_s = step, time.monotonic() + self._step_s


# --- the two loops ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a process is to do."""

    epochs: int
    replicas: int
    data: Path | None
    journal: Path | None
    pace_s: float
    nudge: int | None
    """Only with --ddp: change a weight by one unit in the last place after this step. A negative control."""


def train(task: Task) -> None:
    """The program as its user writes it; alone, or as one of the workers of `pliant run`."""
    import pliant

    journal, pace = Journal(task.journal), Pace(task.pace_s)
    dataset, *held_out = load_split(task.data)
    model, optimizer = build()
    with pliant.join(replicas=task.replicas, seed=SEED) as job:
        model, optimizer, loader = job.wrap(model, optimizer, dataset, batch_size=BATCH_SIZE)
        for _epoch in job.epochs(task.epochs):
            for images, labels in loader:
                journal.changes(job.changes)
                journal.state(job.step, model, optimizer)
                pace.keep(job.step)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                journal.write(
                    "turn", step=job.step, replica=job.replica, loss=loss.item(), workers=job.size, rank=job.rank
                )
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        journal.state(job.step, model, optimizer)
        if job.rank == 0:
            journal.write("end", accuracy=accuracy(model, *held_out))


def train_ddp(rank: int, task: Task, store: str) -> None:
    """The same under stock DistributedDataParallel, in a process of its own."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=task.replicas)
    journal, pace = Journal(task.journal), Pace(task.pace_s)
    dataset, *held_out = load_split(task.data)
    plain, optimizer = build()
    model = DistributedDataParallel(plain)
    KEPT.append(model)
    sampler: DistributedSampler[int] = DistributedSampler(dataset)  # type: ignore[arg-type]
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(dataset, BATCH_SIZE, sampler=sampler)  # type: ignore[arg-type]
    seed_all(SEED + rank)
    step = 0
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            pace.keep(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            journal.write("turn", step=step, replica=rank, loss=loss.item(), workers=task.replicas, rank=rank)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step == task.nudge:
                _nudge(plain)
            step += 1
            if rank == 0:
                journal.state(step, plain, optimizer)
    if rank == 0:
        journal.write("end", accuracy=accuracy(plain, *held_out))
    del model  # one that outlives its process group hangs at times, in torch, as it goes
    dist.destroy_process_group()


def start_ddp(task: Task) -> None:
    """A process per replica, forked from this one; raises if one of them fails."""
    from torch.multiprocessing.spawn import start_processes

    # The first optimizer of every process would import this, for seconds.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (task, str(Path(folder) / "store"))
        start_processes(train_ddp, arguments, nprocs=task.replicas, start_method="fork")  # type: ignore[no-untyped-call]


def _nudge(model: nn.Module) -> None:
    weight = next(model.parameters()).data.view(-1)
    weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits.")
    parser.add_argument("--ddp", action="store_true", help="stock DDP, one process per replica, on this machine")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--data", type=Path, help="digits as .npz; default: scikit-learn's")
    parser.add_argument("--journal", type=Path, metavar="DIR", help="where each process writes down what it did")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="let no step be shorter")
    parser.add_argument("--nudge", type=int, metavar="STEP", help=argparse.SUPPRESS)
    given = parser.parse_args()
    task = Task(
        epochs=given.epochs,
        replicas=given.replicas,
        data=given.data,
        journal=given.journal,
        pace_s=given.pace,
        nudge=given.nudge,
    )
    torch.set_num_threads(1)
    if given.ddp:
        start_ddp(task)
    else:
        train(task)


if __name__ == "__main__":
    main()
