"""The process group of stock PyTorch that peers of a bench sum with. Loads torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

_KEPT: list[object] = []
"""Process groups, until the process ends. DDP's reducer, where it is the last to hold one, joins gloo's threads with
Python's lock in hand, and one of them may wait for that lock: a deadlock, once in some ten to a hundred runs."""


@contextlib.contextmanager
def joined(meeting: str, rank: int, num_ranks: int, timeout_s: float, backend: str = "gloo") -> Iterator[None]:
    """Be a rank of torch's default group. `meeting` is where its ranks find each other: file://PATH, or tcp://HOST:PORT."""
    dist.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )
    _KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
