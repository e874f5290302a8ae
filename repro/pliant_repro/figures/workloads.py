"""Workloads of the training program by name: models, data, loss and optimizer, the same in every process."""

from __future__ import annotations

import contextlib
import fcntl
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from pliant.errors import NotLaunched
from pliant.identity import WorkerSpec, worker_spec
from pliant_repro import zoo
from pliant_repro.figures.launch import Task
from pliant_repro.zoo import Sample, Workload

NUM_TRAIN, BATCH_SIZE = 1536, 32
"""Images that the demo trains on, and batch size of each of its replicas."""
NUM_SMALL, NUM_VARIANTS, SPLIT_SEED = 1024, 4, 5
"""Images that `digits_in_batches` trains on, how often it varies each image that is held out, and the seed of its split."""
ENDLESS = 1 << 20


def build(task: Task, stats: Callable[[], Any]) -> Workload:
    """Build the workload of a task, the same in every process. `stats` returns the job's synchronisation statistics."""
    seed_all(task.seed)
    kind, _, name = task.model.partition(":")
    builders = {"digits": _digits, "small-net": _small_net, "image": _images, "bert-squad": _bert}
    if kind == "paced-resnet50":
        return _paced_resnet(task, stats)
    if kind in builders:
        return builders[kind](task, name)
    return zoo.workload(task.model, task.scale, task.steps * (task.replicas or 1), task.device, task.batch)


def _digits(task: Task, _: str) -> Workload:
    """The demo's net. BatchNorm, dropout and three random generators are what usually breaks when replicas move."""
    dataset, held_out = augmented_digits(task.data)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(48 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model=model, optimizer=optimizer, dataset=dataset, batch_size=BATCH_SIZE, held_out=held_out)


def _small_net(task: Task, _: str) -> Workload:
    """A small net on digits or, with `data`, ResNet-56 on CIFAR-10: for batch sizes that a policy changes."""
    dataset: Any
    if task.data.endswith(".npz") or not task.data:
        dataset, held_out = digits_in_batches(task.data)
        model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip
        loading: dict[str, Any] = {"collate_fn": zoo.as_is, "seed": task.seed}
    else:
        dataset = zoo.cifar10(task.data, train=True)
        images, labels = zip(*zoo.cifar10(task.data, train=False), strict=True)
        model, held_out, loading = zoo.vision_model("ResNet56"), (torch.stack(images), torch.tensor(labels)), {}
    model.to(task.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9, weight_decay=2e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)
    return Workload(
        model=model, optimizer=optimizer, dataset=dataset, batch_size=task.batch, held_out=held_out, schedule=schedule,
        loading=loading,
    )  # fmt: skip


def _counting(task: Task, model: nn.Module, fixed: Callable[[int, int], Sample], **more: Any) -> Workload:
    """Return a workload that computes on fixed batches: its data set only counts samples."""
    samples = task.steps * task.batch * num_replicas(task) or 10_000
    return Workload(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), batch_size=task.batch, fixed=fixed,
        dataset=TensorDataset(torch.zeros(samples)), **more,
    )  # fmt: skip


def _images(task: Task, name: str) -> Workload:
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


def _paced_resnet(task: Task, stats: Callable[[], Any]) -> Workload:
    """ResNet-50 with `kappa` times fewer parameters, whose layers sleep for as long as a K80 computes."""
    from pliant_repro import profiles
    from pliant_repro.paced import PacedNet

    whole = replace(profiles.profile("resnet50", batch=task.batch), compute_s=task.batch / 50.0)  # a K80: 50 images/s
    net = PacedNet(profiles.scaled(whole, task.kappa), lambda: float(stats().waited_until_s))

    def fixed(step: int, replica: int) -> Sample:
        draw = torch.Generator().manual_seed(replica)
        return torch.randn(task.batch, net.num_inputs, generator=draw), torch.empty(0)

    return _counting(task, net, fixed, loss=lambda found, _: found, bucket_cap_mb=25.0 / task.kappa)


def _bert(task: Task, _: str) -> Workload:
    """BERT on questions, or with `paced_s` a model with its inputs and outputs that only sleeps."""
    from pliant_repro.figures import questions

    places = task.image_size
    model: nn.Module
    data: Any = questions.SyntheticQuestions(places)
    if task.paced_s:
        model = PacedBert(task.paced_s, [Path(task.journal) / f"device{number}" for number in range(task.devices)])
    elif task.data:
        model, data = questions.bert_in(Path(task.data)), questions.squad_in(Path(task.data), places)
    else:
        model = questions.small_bert(places)
    model.to(task.device)
    batch = task.batch or 8
    if task.steps:
        data = Subset(data, [index % len(data) for index in range(task.steps * batch * num_replicas(task))])
    return Workload(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-5), dataset=data, batch_size=batch
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


def launched_as() -> WorkerSpec | None:
    """Return who this process is under `pliant run`; None if it was started without."""
    try:
        return worker_spec()
    except NotLaunched:
        return None


def num_replicas(task: Task) -> int:
    spec = launched_as()
    return task.replicas or (spec.view.size if spec is not None else 1)


def monitor_modes(task: Task) -> list[str]:
    """Return the monitoring mode of each step; empty where nothing is monitored."""
    if not task.monitor_rounds:
        return []
    from pliant_repro.figures.kungfu_monitoring import schedule

    return schedule(task.monitor_rounds)


# --- scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, from a file that `launch.save_digits` has written ---


def load_digits(path: str) -> Sample:
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["images"]).unsqueeze(1), torch.from_numpy(file["labels"])


class AugmentedDigits:
    """Images that are moved, dimmed and made noisy whenever they are read, by three random generators."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        down, right = np.random.randint(0, 3, size=2)
        moved = F.pad(self._images[index], (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        dimmed = moved * random.uniform(0.8, 1.2)
        return dimmed + 0.1 * torch.randn(dimmed.shape), self._labels[index]


def augmented_digits(path: str) -> tuple[AugmentedDigits, Sample]:
    """Return the digits to train on, and the images and labels that are held out."""
    images, labels = load_digits(path)
    return AugmentedDigits(images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


class BatchedDigits:
    """Digits that are varied by whole batches: on a CPU, reading one by one would cost more than training."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        return vary(self._images[index : index + 1])[0], self._labels[index]

    def __getitems__(self, indices: list[int]) -> Sample:
        return vary(self._images[indices]), self._labels[indices]


def vary(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Move each image by up to a pixel each way, dim it and add noise."""
    count = len(images)
    rows, columns = (torch.arange(8) + each for each in torch.randint(0, 3, (2, count, 1), generator=generator))
    padded = F.pad(images, (1, 1, 1, 1))
    moved = padded[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
    bright = 0.9 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)
    return moved * bright + 0.05 * torch.randn(moved.shape, generator=generator)


def digits_in_batches(path: str) -> tuple[BatchedDigits, Sample]:
    """Return digits to train on and variants of those that are held out, the same in every run."""
    images, labels = load_digits(path)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:NUM_SMALL], order[NUM_SMALL:].repeat(NUM_VARIANTS)
    held_out = vary(images[test], torch.Generator().manual_seed(SPLIT_SEED)), labels[test]
    return BatchedDigits(images[train], labels[train]), held_out
