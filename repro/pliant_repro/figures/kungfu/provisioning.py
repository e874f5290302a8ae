"""The training program of KungFu's figure 6: BERT on questions, with one replica per worker, and workers that are added.

    pliant run -w -np 1 -H 127.0.0.1:4 provisioning.py --max-workers 4

With `--paced` nothing is computed: a step occupies one of so many devices for a while, asleep, and workers that find all
of them occupied wait. With `--max-workers` the policy `Provision` adds workers as long as they are worth it, and the job ends some steps after
it has come to rest; without, the workers stay as they are. Each worker writes out_RANK.csv, as the artifact's does.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import pliant
from pliant.adapt.size import Provision
from pliant_repro.figures import squad
from pliant_repro.figures.squad import WORDS

COLUMNS = ("global_step", "sub_step", "num_workers", "duration", "throughput", "after_run_duration")
SAY_EVERY = 10
POLL_S = 0.001
LAST_STEPS = 5
"""After the policy has come to rest."""


class Paced(torch.nn.Module):
    """Has BERT's inputs and outputs, and hardly any compute."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 16)
        self.ends = torch.nn.Linear(16, 2)
        self._step_s, self._devices = args.paced, [Path(args.out) / f"device{number}" for number in range(args.devices)]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with self._device():
            time.sleep(self._step_s)
        found: torch.Tensor = self.ends(self.words(inputs[:, 0]))
        return found

    @contextmanager
    def _device(self) -> Iterator[None]:
        """One of them, as soon as it is free; the kernel frees those of processes that end."""
        files = [path.open("a") for path in self._devices]
        try:
            while not any(_locks(file) for file in files):
                time.sleep(POLL_S)
            yield
        finally:
            for file in files:
                file.close()


def _locks(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def build(args: argparse.Namespace) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    if args.paced:
        return Paced(args), squad.SyntheticQuestions(1 << 16, args.places)
    from pliant_repro.figures import text  # takes a second or two

    if not args.data:
        return text.bert(places=args.places), text.questions(length=1 << 16, max_seq_length=args.places)
    folder = Path(args.data)
    inner = [each.parent for name in ("config.json", "bert_config.json") for each in sorted(folder.rglob(name))]
    vocabulary = inner[0] if inner and (inner[0] / "vocab.txt").is_file() else ""
    questions = text.squad(folder, vocabulary=vocabulary, max_seq_length=args.places)
    return text.bert(inner[0]) if inner else text.bert(size="base"), questions


@contextmanager
def table(folder: str) -> Iterator[Any]:
    """What adds a row to the file of the rank that this worker has at that time."""
    files: dict[int, Any] = {}

    def add(rank: int, row: tuple[Any, ...]) -> None:
        if rank not in files:
            path = Path(folder) / f"out_{rank}.csv"
            is_new = not path.exists()
            files[rank] = path.open("a", buffering=1)
            if is_new:
                csv.writer(files[rank]).writerow(COLUMNS)
        csv.writer(files[rank]).writerow(row)

    try:
        yield add
    finally:
        for file in files.values():
            file.close()


def train(args: argparse.Namespace) -> None:
    model, data = build(args)
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    policies = []
    if args.max_workers:
        policies = [Provision(change_step=args.change_step, alpha=args.alpha, max_workers=args.max_workers)]
    with pliant.join(seed=1, policies=policies) as job, table(args.out) as add:
        model, optimizer, loader = job.wrap(model, optimizer, data, batch_size=args.batch)
        done_at: int | None = None
        view, sub_step, came_back_s = job.view, 0, time.monotonic()
        for _ in job.epochs(1000):
            for inputs, targets in loader:
                begin_s = time.monotonic()
                step = job.step
                view, sub_step = job.view, sub_step + 1 if job.view == view else 0
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(args.device)), targets.to(args.device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                now_s = time.monotonic()
                # What lies between two steps is the policy's time, the loader's, and that of changes.
                took_s, between_s, came_back_s = now_s - came_back_s, begin_s - came_back_s, now_s
                rate = job.size * args.batch / took_s
                add(job.rank, (step, sub_step, job.size, f"{took_s:.6f}", f"{rate:.4f}", f"{between_s:.6f}"))
                if step % SAY_EVERY == SAY_EVERY - 1:
                    print(f"global_step/sec: {1 / took_s:.5f}\nexamples/sec: {args.batch / took_s:.4f}", flush=True)
                if done_at is None and policies and policies[0].done:
                    done_at = step
                if step + 1 >= args.steps or (done_at is not None and step >= done_at + LAST_STEPS):
                    break
            else:
                continue
            break
        if policies and job.rank == 0:
            found = {"workers": job.size, "done": policies[0].done, "history": policies[0].history}
            Path(args.out, "provision.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train BERT on workers that are added while they are worth it.")
    parser.add_argument("--max-workers", type=int, default=0, help="add workers up to so many; 0: add none")
    parser.add_argument("--change-step", type=int, default=20, help="steps before each decision")
    parser.add_argument("--alpha", type=float, default=1 / 3, help="how much of its fair share a worker must add")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--places", type=int, default=128, help="words of a question with its text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--paced", type=float, default=0.0, metavar="SECONDS", help="compute nothing, for so long")
    parser.add_argument("--devices", type=int, default=2, help="with --paced: how many there are")
    parser.add_argument("--data", default="", metavar="DIR", help="with SQuAD's train-v2.0.json, and BERT")
    parser.add_argument("--out", default=".", metavar="DIR", help="where out_RANK.csv goes")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    train(args)


if __name__ == "__main__":
    main()
