"""The oracle: a program under stock `DistributedDataParallel` on gloo, in N separate processes.

`golden` says, for every step, what rank 0's state hashes to, and each rank's loss and samples. It runs once per
test session and choice of arguments; what most tests ask for runs in one go, because processes cost more than steps.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gang import run
from programs import OWN_DATA, PROGRAMS, Program, build, digest, may_have_children, one_batch, seed_all
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the oracle, of all its ranks."""

    digest: str
    """Of rank 0's parameters, optimizer state and buffers after it."""
    losses: tuple[tuple[float, ...], ...]
    """By rank; several where gradients were accumulated, and none in a step that was left."""
    samples: tuple[tuple[int, ...], ...]
    """By rank: which ones it was computed from."""


TREE = "tree:"
"""Before the name of a program: DDP adds in the order of the tree."""
Run = tuple[str, int, tuple[int, ...]]
"""A program, its epochs, and before which steps DDP is wrapped anew, as after a restart."""
RankSteps = list[tuple[str, tuple[float, ...], tuple[int, ...]]]

OTHERS = ("conv-loaders", "conv-long", "dawdling", "dawdling-long", *OWN_DATA)
"""Programs of tests with other numbers of replicas or epochs."""
IN_TREE = (
    "conv", "accumulating", "unused", "unused-kept", "shifted", "channels-last", "bfloat16", "kept-gradients",
    "two-passes", "skipping",
)  # fmt: skip
"""Programs that are run in the order of the tree as well."""
TOGETHER: dict[int, list[Run]] = {
    2: [("conv", 2, ())],
    3: [*((name, 2, ()) for name in PROGRAMS if name not in OTHERS), *((TREE + name, 2, ()) for name in IN_TREE)],
    4: [
        ("conv", 4, ()),
        (TREE + "conv", 4, ()),
        ("adamw", 3, ()),
        ("nesterov", 3, ()),
        ("conv-loaders", 2, ()),
        ("lstm", 3, ()),
        ("transformer", 3, ()),
        ("conv", 2, (7,)),
    ],
    6: [("conv", 3, ()), (TREE + "conv", 3, ())],
}
"""By N: what is run in one go as soon as some of it is asked for."""
KEPT: list[DistributedDataParallel] = []
"""Until the process ends: dropping one right after a step may hang (see `pliant_repro.figures.program.KEPT`)."""
_known: dict[tuple[int, Run], tuple[Step, ...]] = {}


def golden(name: str, num_replicas: int, epochs: int, restarts: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """What stock DDP on `num_replicas` processes does; wrapped anew, as after a restart, before each of `restarts`."""
    asked: Run = (name, epochs, restarts)
    if (num_replicas, asked) not in _known:
        together = TOGETHER.get(num_replicas, [])
        _find(num_replicas, together if asked in together else [asked])
    return _known[num_replicas, asked]


def _find(num_replicas: int, runs: Sequence[Run]) -> None:
    """Run these, unless another process of this test session has; whoever comes meanwhile waits."""
    if (shared := os.environ.get("PYTEST_SHARED_FOLDER")) is None:
        _run(num_replicas, runs)
        return
    name = hashlib.sha256(repr((num_replicas, runs)).encode()).hexdigest()
    with (Path(shared) / f"golden-{name}").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if data := file.read():
            _known.update(pickle.loads(data))
        else:
            _run(num_replicas, runs)
            file.write(pickle.dumps({(num_replicas, one): _known[num_replicas, one] for one in runs}))


def _run(num_replicas: int, runs: Sequence[Run]) -> None:
    found = run_ddp(num_replicas, _loop, runs, timeout_s=110 + runs[0][1])
    _known.update({(num_replicas, one): steps for one, steps in zip(runs, found, strict=True)})


def run_ddp(
    num_replicas: int, loop: Callable[..., RankSteps], runs: Sequence[tuple[Any, ...]], timeout_s: float = 60
) -> list[tuple[Step, ...]]:
    """The steps of each run, by `loop(rank, *run)` in every one of `num_replicas` processes."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = run(_train, num_replicas, num_replicas, loop, runs, store, timeout_s=timeout_s)
    return [
        tuple(
            Step(each[0][0], tuple(loss for _, loss, _ in each), tuple(samples for _, _, samples in each))
            for each in zip(*of_ranks, strict=True)
        )
        for of_ranks in zip(*ranks, strict=True)
    ]


def _train(
    rank: int, size: int, loop: Callable[..., RankSteps], runs: Sequence[tuple[Any, ...]], store: str
) -> list[RankSteps]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    may_have_children()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return [loop(rank, *one) for one in runs]
    finally:
        dist.destroy_process_group()


def _loop(rank: int, name: str, epochs: int, restarts: tuple[int, ...]) -> RankSteps:
    steps: RankSteps = []
    program = build(name.removeprefix(TREE))
    if callable(program.dataset):  # a stream for each rank
        loader = DataLoader(program.dataset(rank), **program.loading)
    else:
        order = {} if "sampler" in program.loading else {"sampler": DistributedSampler(program.dataset)}
        loader = DataLoader(program.dataset, **order, **program.loading)
    model = _wrapped(program, in_tree=name.startswith(TREE))
    if program.seed is not None:
        seed_all(program.seed + rank)
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        losses: list[float] = []
        samples: list[int] = []

        def note(loss: float, consumed: list[int]) -> None:
            losses.append(loss)  # noqa: B023 - called at once
            samples.extend(consumed)  # noqa: B023

        for index, batch in enumerate(loader):
            if not losses and len(steps) in restarts:
                del model  # its hooks go with it
                model = _wrapped(program, in_tree=name.startswith(TREE))
            is_over = index == program.stops_at or one_batch(program, model, batch, model.no_sync, note, index)
            if is_over:
                state = digest(program, program.model.buffers()) if rank == 0 else ""
                steps.append((state, tuple(losses), tuple(samples)))
                losses.clear()
                samples.clear()
            if index == program.stops_at:
                break
    KEPT.append(model)
    return steps


def _wrapped(program: Program, *, in_tree: bool) -> DistributedDataParallel:
    model = DistributedDataParallel(program.model, forward_sync_buffers=program.sync_buffers, **program.wrapping)
    if in_tree:
        model.register_comm_hook(None, _sum_in_tree)
    return model


def _sum_in_tree(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket in the order of the balanced binary tree, by its definition."""
    own = torch.mul(bucket.buffer(), 1 / dist.get_world_size())
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(values, own)

    def add(values: Sequence[torch.Tensor]) -> torch.Tensor:
        left = 1
        while left * 2 < len(values):
            left *= 2
        return add(values[:left]) + add(values[left:]) if len(values) > 1 else values[0]

    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(add(values))
    return found


_sum_in_tree.__annotations__ = {"bucket": dist.GradBucket}  # DDP checks the types, not their names
