"""Launch orders of real processes, with and without the scheduler, and training with device groups. No torch here."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pliant_repro.bench import contenders
from pliant_repro.bench.contenders import Ground
from pliant_repro.bench.contest import Answer, Job, ToldJob

WORKER = "pliant_repro.bench.scaling.order_worker"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """What came out of launching named tensors in an agreed order, and in none."""

    ranks: int
    tensors: int
    iterations: int
    seconds: tuple[float, ...]
    """Of each iteration, the slowest rank's."""
    same_on_all_ranks: bool
    """Every launch of every iteration."""
    first_sorted: bool
    """The first iteration was launched by name."""
    taken_over: bool
    """The second one had rank 0's order of arrival in the first."""
    changed: int
    """Iterations after the second with another order than it; all ranks together."""
    wrong: int
    """Tensors with a wrong sum."""
    arrivals_differed: bool
    """The ranks submitted in different orders: else there was nothing to agree on."""
    control_orders_differed: bool
    """Without the scheduler the ranks launched in different orders."""
    control_wrong: int
    """Without the scheduler: tensors with a wrong sum."""

    @property
    def holds(self) -> bool:
        """One order, right sums, and the control shows that this is not for free."""
        agreed = self.same_on_all_ranks and self.first_sorted and self.taken_over and not self.changed
        return agreed and not self.wrong and self.arrivals_differed and self.control_orders_differed


@contextlib.contextmanager
def ranks(count: int) -> Iterator[tuple[Job, Path]]:
    """So many processes on this machine that form a job of ours, and a folder for what they share; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as text:
        folder = Path(text)
        environs, sockets = contenders.identities(Ground(num_workers=count, sizes=(), folder=folder), "AUTO")
        control = folder / "order.sock"

        start = contenders.launcher([sys.executable, "-m", WORKER, str(control), str(count)], sockets)
        with ToldJob("order", count, [start], control, {"environs": environs}) as job:
            job.start().ready(PATIENCE_S)
            yield job, folder


def check(job: Job, *, tensors: int, iterations: int, control: int, backend: str = "gloo") -> OrderCheck:
    """Submit in random orders for many iterations, then a few without the scheduler.

    Raises:
        LaunchError: a rank failed, or did not come back: a deadlock.
    """
    patience_s = PATIENCE_S + 2.0 * iterations
    asked = {"do": "scheduled", "backend": backend, "count": tensors, "iterations": iterations}
    with_order = job.ask(asked, patience_s)
    without = job.ask({**asked, "do": "unscheduled", "iterations": control}, patience_s)
    return compared(with_order, without, tensors)


def compared(with_order: Sequence[Answer], without: Sequence[Answer], tensors: int) -> OrderCheck:
    """What the ranks' answers say together."""
    first, second, arrived = (with_order[0][key] for key in ("first", "second", "arrived"))
    times = zip(*(cast("list[float]", answer["seconds"]) for answer in with_order), strict=True)
    same = all(answer["first"] == first and answer["second"] == second for answer in with_order)
    return OrderCheck(
        ranks=len(with_order),
        tensors=tensors,
        iterations=cast(int, with_order[0]["iterations"]),
        seconds=tuple(max(each) for each in times),
        same_on_all_ranks=same and all(answer["changed"] == 0 for answer in with_order),
        first_sorted=first == sorted(cast("list[str]", first)),
        taken_over=second == arrived,
        changed=sum(cast(int, answer["changed"]) for answer in with_order),
        wrong=sum(cast(int, answer["wrong"]) for answer in with_order),
        arrivals_differed=any(answer["arrived"] != arrived for answer in with_order),
        control_orders_differed=any(answer["orders"] != without[0]["orders"] for answer in without),
        control_wrong=sum(cast(int, answer["wrong"]) for answer in without),
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """One side's steps."""

    side: str
    seconds: tuple[float, ...]
    """The slowest rank's."""
    same_on_all_ranks: bool


def train(
    job: Job,
    folder: Path,
    side: str,
    *,
    model: str,
    batch: int,
    iterations: int,
    warmup: int,
    backend: str,
    turn: int = 0,
) -> Trained:
    """Train with one way of launching: `scheduled`, `unscheduled` or `ddp`.

    Raises:
        LaunchError: a rank failed, or did not come back.
    """
    meeting = str(folder / f"{side}-{turn}.store")
    asked = {
        "do": "train", "side": side, "backend": backend, "model": model, "batch": batch, "iterations": iterations,
        "warmup": warmup, "meeting": meeting,
    }  # fmt: skip
    answers = job.ask(asked, PATIENCE_S + 5.0 * (iterations + warmup))
    times = zip(*(cast("list[float]", answer["seconds"]) for answer in answers), strict=True)
    return Trained(side, tuple(max(each) for each in times), len({answer["parameters"] for answer in answers}) == 1)
