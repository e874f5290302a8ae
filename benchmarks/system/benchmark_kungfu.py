"""Training throughput on synthetic images, as KungFu's benchmark of the same name has it; under pliant.

    pliant run -np 2 python3 benchmarks/system/benchmark_kungfu.py --kf-optimizer=sync-sgd --model=ResNet50 --batch-size=32

Rank 0 prints. `init took` is until model and optimizer are there; `bcast_op took` until all workers have met and agree on
the state to begin with. Without `pliant run` it measures one worker alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import img_sec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pliant_repro import zoo

import pliant
from pliant.errors import ConfigError, NotLaunched
from pliant.identity import WorkerSpec, worker_spec

WHAT = {
    "sync-sgd": "synchronous SGD by pliant's engine",
    "sync-sgd-priority": "the same, with priority propagation",
    "sync-sgd-nccl": "by NCCL in one agreed order (without GPUs: by gloo, and the run says so)",
    "sma": "synchronous model averaging",
    "pair-avg": "averaging with one random peer (AD-PSGD)",
    "ada-sgd": "model averaging in the first half of the steps, synchronous SGD in the second",
    "ideal": "no communication",
}
ALSO = {"sync-sgd-hierarchical-nccl": "sync-sgd-nccl", "async-sgd": "pair-avg", "p2p": "pair-avg", "none": "ideal"}
ONE_BUCKET_MB = 1 << 20


def main() -> None:
    parser = img_sec.parser(__doc__.splitlines()[0])
    parser.add_argument("--kf-optimizer", default="sync-sgd", help="; ".join(f"{k}: {v}" for k, v in WHAT.items()))
    parser.add_argument("--fuse", action="store_true", help="all gradients as one tensor")
    args = parser.parse_args()
    args.kf_optimizer = ALSO.get(args.kf_optimizer, args.kf_optimizer)
    if args.kf_optimizer not in WHAT:
        raise ConfigError(f"--kf-optimizer {args.kf_optimizer!r} is not known: use one of {', '.join(WHAT)}")
    args.model = zoo.model_name(args.model)
    spec = spec_of()
    rank = spec.view.rank_of(spec.worker) if spec else 0
    say = img_sec.say_line if rank == 0 else lambda text: None
    # The fullest host decides for all: workers with unlike numbers of threads would not have the same bits.
    img_sec.share_cores(max(Counter(spec.view.hosts).values()) if spec else 1)
    amount, device = img_sec.amount_of(args), img_sec.device_of(args)
    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    img_sec.say_unused(args, say)
    facts = {
        "framework": "pliant",
        "np": spec.view.size if spec else 1,
        "strategy": spec.strategy if spec else "none",
        "bs": args.batch_size,
        "model": args.model,
        "kf-opt": args.kf_optimizer,
        "fuse": args.fuse,
    }
    if device.type == "cuda" and img_sec.sees_all_gpus():
        facts["nvlink"] = "true"
    if args.image_size:
        facts["image-size"] = args.image_size
    kind = "nccl" if args.kf_optimizer.endswith("nccl") else "ideal" if args.kf_optimizer == "ideal" else "job"
    steps = {"nccl": ordered_steps, "ideal": lone_steps, "job": job_steps}[kind]
    begin_s = time.perf_counter()
    with steps(args, spec, rank, device, amount, facts, say) as taken:
        next(taken)
        say(f"init took {time.perf_counter() - begin_s:.3f}s")
        begin_s = time.perf_counter()
        next(taken)
        say(f"bcast_op took {time.perf_counter() - begin_s:.3f}s")
        where = f"/{'gpu' if device.type == 'cuda' else 'cpu'}:0"
        found = img_sec.measure(lambda: next(taken), amount, where, say, img_sec.settle_of(device))
        say(img_sec.result_line(*found, facts))
        for _ in taken:
            raise AssertionError("there are more steps than were asked for")


def spec_of() -> WorkerSpec | None:
    """Return what `pliant run` tells this worker; None if it was not started by it."""
    try:
        return worker_spec()
    except NotLaunched:
        return None


def compute(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


# Each of these functions yields when the model is built, when all workers are ready, and then after each step.


@contextlib.contextmanager
def job_steps(
    args: argparse.Namespace, spec: Any, rank: int, device: torch.device, amount: img_sec.Amount, facts: Any, say: Any
) -> Iterator[Iterator[None]]:
    """Train through `pliant.join`, as any training program does."""
    sync = "priority" if args.kf_optimizer == "sync-sgd-priority" else "fifo"
    with pliant.join(sync=sync) as job:
        model = img_sec.build(args, device)
        optimizer = img_sec.optimizer_of(model)
        if args.kf_optimizer == "sma":
            optimizer = pliant.SynchronousAveraging(optimizer)
        elif args.kf_optimizer == "pair-avg":
            optimizer = pliant.PairAveraging(optimizer)
        elif args.kf_optimizer == "ada-sgd":
            optimizer = pliant.AdaptiveSGD(optimizer, change_step=amount.warmup + (amount.steps - amount.warmup) // 2)
        batch = img_sec.batch_of(args, device, rank)
        model, optimizer = job.wrap(model, optimizer, bucket_cap_mb=ONE_BUCKET_MB if args.fuse else None)

        def steps() -> Iterator[None]:
            yield
            for step in job.steps(amount.steps):
                if step.number == 0:
                    yield
                for _replica in step:
                    compute(model, batch)
                optimizer.step()
                optimizer.zero_grad()
                yield

        yield steps()


@contextlib.contextmanager
def ordered_steps(
    args: argparse.Namespace, spec: Any, rank: int, device: torch.device, amount: img_sec.Amount, facts: Any, say: Any
) -> Iterator[Iterator[None]]:
    """Sum each gradient by torch's process group as soon as backward has made it, in one launch order on all workers."""
    from benchmark_ddp import find_place, join
    from pliant_repro.bench.order import GradientSums, OrderedAllReduce

    if spec is None:
        raise ConfigError(f"--kf-optimizer={args.kf_optimizer} is about several workers: start it with `pliant run`")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "gloo":
        say("no GPU: gloo stands in for NCCL, in the order that the scheduler agrees on")
    facts["backend"] = backend
    if args.fuse:
        raise ConfigError(f"--fuse with --kf-optimizer={args.kf_optimizer}: the scheduler orders single gradients")
    model = img_sec.build(args, device)
    optimizer = img_sec.optimizer_of(model)
    batch = img_sec.batch_of(args, device, rank)

    def steps() -> Iterator[None]:
        yield
        join(find_place(os.environ), backend)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        order = OrderedAllReduce(dict(model.named_parameters()), device)
        sums = GradientSums(model, order.all_reduce, spec.view.size)
        yield
        for _ in range(amount.steps):
            optimizer.zero_grad()
            compute(model, batch)
            sums.wait()
            optimizer.step()
            yield
        dist.destroy_process_group()

    yield steps()


@contextlib.contextmanager
def lone_steps(
    args: argparse.Namespace, spec: Any, rank: int, device: torch.device, amount: img_sec.Amount, facts: Any, say: Any
) -> Iterator[Iterator[None]]:
    """Train in plain PyTorch: the throughput if communication took no time."""
    model = img_sec.build(args, device)
    optimizer = img_sec.optimizer_of(model)
    batch = img_sec.batch_of(args, device, rank)

    def steps() -> Iterator[None]:
        yield
        yield
        for _ in range(amount.steps):
            optimizer.zero_grad()
            compute(model, batch)
            optimizer.step()
            yield

    yield steps()


if __name__ == "__main__":
    img_sec.run_program(main)
