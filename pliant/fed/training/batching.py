"""How many clients are trained at once: measured once, when a job begins, and then kept with it.

The grouping of clients changes the last bits of their results, so it must not change while a job runs. Which grouping is fast
depends on the model and the machine: a GPU wants hundreds of small clients, a processor as many as its caches hold,
and a model that keeps its device busy by itself wants one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch

from pliant.fed.data.task import Task
from pliant.fed.training.local import Trainer
from pliant.fed.updates import Weights
from pliant.fed.work import Training

ON_CPU = (2, 4, 8, 16)
ON_GPU = (4, 16, 32, 64, 128, 256)
SHARES = (2, 8)
"""A round makes units for so many executors, at least and at most; between them, for as many as this machine has cores."""
STEPS = 5
"""Of a trial: enough that what comes once for a unit does not count too much."""
BUSY_S = 0.5
"""A first step that takes longer keeps the machine busy by itself: there is nothing to gain, and a trial would be long."""
WORTH = 1.1
"""Training at once must be so many times as fast as in turn, or it is not worth its other bits."""
ALIKE = 0.95
"""Of rates: a smaller batch that is nearly as fast is taken, since smaller units are shared better among executors."""


def choose(task: Task, device: str = "cpu", *, limit_s: float = 4.0) -> int:
    """Clients to be trained at once; 1 where that is not possible, or no faster than in turn.

    Takes about `limit_s`, or a few steps of one client where those take longer.
    """
    trainer = Trainer(task, device=device)
    # On the CPU, the time that this thread was given: others may be busy, too.
    clock = time.perf_counter if trainer.device.type == "cuda" else time.thread_time
    start = Weights.of(task.model())
    shares = min(max(len(os.sched_getaffinity(0)), SHARES[0]), SHARES[1])
    sizes = candidates(task.num_clients, task.config.participants, trainer.device.type, shares)
    began = clock()
    trainer.run(start, _unit(task, 1, 1))
    if not sizes or clock() - began > BUSY_S or trainer.together is None:
        return 1
    rates: dict[int, float] = {}
    for size in (1, *sizes, 1, *sizes):
        # In two passes, the better one of each: what else the machine does then hits all alike.
        if len(rates) > 1 and clock() - began > limit_s:
            break
        try:
            rates[size] = max(rates.get(size, 0.0), _rate(trainer, start, size, clock))
        except torch.OutOfMemoryError:
            break
    return best(rates)


def best(rates: Mapping[int, float]) -> int:
    """Given clients per second by batch: the smallest that is nearly as fast as the fastest, where it is worth it."""
    fastest = max(rates.values())
    if fastest < WORTH * rates[1]:
        return 1
    return min(size for size, rate in rates.items() if size > 1 and rate >= ALIKE * fastest)


def candidates(num_clients: int, participants: int, device_type: str, shares: int) -> tuple[int, ...]:
    """On CPUs, a round is cut into a multiple of `shares` units, so that as many executors are done at the same time."""
    if device_type == "cuda":
        return tuple(size for size in ON_GPU if size <= min(num_clients, participants))
    sizes = set()
    for size in ON_CPU:
        units = max(1, round(participants / size / shares)) * shares
        sizes.add(-(-participants // units))
    return tuple(sorted(size for size in sizes if 1 < size <= num_clients))


def _rate(trainer: Trainer, start: Weights, size: int, clock: Callable[[], float]) -> float:
    """Clients per second, if all did as many steps as the trial."""
    trainer.run(start, _unit(trainer.task, size, 1))  # what is done for the first time takes longer
    began = clock()
    trainer.run(start, _unit(trainer.task, size, STEPS))
    return size / max(clock() - began, 1e-9)


def _unit(task: Task, size: int, steps: int) -> Training:
    return Training(0, tuple(range(size)), (steps,) * size, task.config.local.lr)
