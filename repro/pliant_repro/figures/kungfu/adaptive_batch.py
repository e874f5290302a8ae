"""The training program of KungFu's figure 4: four replicas whose batch size is fixed, or follows the gradient's noise.

    pliant run -np 2 --policy grow-batch-size adaptive_batch.py --batch 4 --epochs 80

Which of both is not its business: policies come from `pliant run`. By default it trains a small convolutional net on
scikit-learn's digits, moved and made noisy whenever they are read; given the paths, ResNet-56 on CIFAR-10. Each worker
writes a journal: how many samples each turn had, and, the first one, the accuracy after each epoch. Time that
is spent on evaluation does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant_repro.figures.images import from_scikit_learn, load

REPLICAS = 4
NUM_DIGITS = 1024
"""Of the 1797 to train on: enough are left to tell half a per cent."""
VARIANTS = 4
"""In which each digit held out is looked at, so that chance has less of a say."""
SPLIT_SEED = 5


class Digits:
    """Images of 8 x 8 pixels. A batch is read at once: on a CPU, reading one by one would cost more than training."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return varied(self._images[index : index + 1])[0], self._labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return varied(self._images[indices]), self._labels[indices]


def varied(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Each moved by up to a pixel each way, dimmed, and made noisy."""
    count = len(images)
    padded = F.pad(images, (1, 1, 1, 1))
    moves = torch.randint(0, 3, (2, count, 1), generator=generator)
    rows, columns = (torch.arange(8) + each for each in moves)
    moved = padded[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
    bright = 0.9 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator)
    return moved * bright + 0.05 * torch.randn(moved.shape, generator=generator)


def digits(path: str) -> tuple[Digits, Tensor, Tensor]:
    """What to train on, and the images and labels held out, the same in every run."""
    arrays = load(Path(path)) if path else from_scikit_learn()
    images, labels = torch.from_numpy(arrays[0]).unsqueeze(1), torch.from_numpy(arrays[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:NUM_DIGITS], order[NUM_DIGITS:].repeat(VARIANTS)
    held_out = varied(images[test], torch.Generator().manual_seed(SPLIT_SEED))
    return Digits(images[train], labels[train]), held_out, labels[test]


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


def as_it_is(batch: Any) -> Any:
    """What is read at once needs no collating."""
    return batch


def build(args: argparse.Namespace) -> tuple[nn.Module, Any, Tensor, Tensor, dict[str, Any]]:
    """Model, data, what is held out, and how to load."""
    torch.manual_seed(args.seed)
    if not args.cifar:
        data, *held_out = digits(args.digits)
        return small_net(), data, held_out[0], held_out[1], {"collate_fn": as_it_is}
    from pliant_repro import zoo

    train, test = zoo.cifar10(args.cifar, augment=True), zoo.cifar10(args.cifar, train=False)
    images, labels = (torch.stack(each) for each in zip(*(test[index] for index in range(len(test))), strict=True))
    return zoo.vision_model("ResNet56"), train, images, labels, {"num_workers": args.loaders}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    model.eval()
    with torch.no_grad():
        parts = [model(each.to(device)).argmax(1).cpu() for each in torch.split(images, 1024)]
    model.train()
    return float((torch.cat(parts) == labels).double().mean())


def train(args: argparse.Namespace) -> None:
    model, data, images, labels, loading = build(args)
    model = model.to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    place = Path(args.journal) / f"{os.getpid()}.jsonl" if args.journal else Path(os.devnull)
    with pliant.join(replicas=REPLICAS, seed=args.seed) as job, place.open("w") as journal:
        model, optimizer, loader = job.wrap(model, optimizer, data, batch_size=args.batch, seed=args.seed, **loading)
        job.track("schedule", schedule)
        trained_s = 0.0
        for epoch in job.epochs(args.epochs):
            begin_s = time.monotonic()
            turns = []
            for inputs, targets in loader:
                turns.append([job.step, job.replica, len(targets), job.batch_size])
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(args.device)), targets.to(args.device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained_s += time.monotonic() - begin_s
            schedule.step()
            facts: dict[str, Any] = {"epoch": epoch, "rank": job.rank, "turns": turns}
            if job.rank == 0:
                facts |= {"time_s": trained_s, "accuracy": accuracy(model, images, labels, args.device)}
                noise = job.observation.noise_scale if job.observation is not None else None
                if noise is not None:
                    print(f"Gradient Noise Scale: {noise:.6g}")
                print(
                    f"epoch {epoch}: accuracy {facts['accuracy']:.4f}, batch {REPLICAS} x {job.batch_size}, {trained_s:.2f} s"
                )
            journal.write(json.dumps(facts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with a batch size that policies may change.")
    parser.add_argument("--batch", type=int, default=4, help="of each of the 4 replicas, at the start")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cifar", default="", metavar="DIR", help="train ResNet-56 on CIFAR-10 from here")
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each worker, for CIFAR-10")
    parser.add_argument("--digits", default="", help="scikit-learn's digits as .npz, so that it need not be imported")
    parser.add_argument("--journal", default="", metavar="DIR")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    train(args)


if __name__ == "__main__":
    main()
