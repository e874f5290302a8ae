"""The process group of stock PyTorch that peers of a bench sum with. Loads torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist


@contextlib.contextmanager
def joined(meeting: str, rank: int, num_ranks: int, timeout_s: float) -> Iterator[None]:
    """Be a rank of gloo's default group. `meeting` is where its ranks find each other: file://PATH, or tcp://HOST:PORT."""
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
