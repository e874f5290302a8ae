"""`pliant bench orders`: what the order in which gradients are added costs in traffic between hosts and in memory.

Several replicas share a worker, and every worker has a host of its own (an address of the loopback interface, so the bytes
really go through TCP). In DDP's order a worker must send the gradients of its replicas one by one, because only the beginning
of gloo's chain may be added on the way. In the tree it sends the sum of its block. Bytes are counted, not timed.

Memory is the peak of a worker's process during the steps, beside that of a process that only accumulates the gradients of as
many batches: what is above that are further sets of gradients, in memory of its own or shared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pliant.comm.order import EXACT_ORDERS, even_partition
from pliant.comm.plan import Spec, make_plan
from pliant.comm.topology import Strategy
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench.train import PROGRAM, TrainingTask
from pliant_repro.contest import Answer, Placement, Progress, check_least
from pliant_repro.profiles import check_trained

MOST_OVER_BOUND = 1.05
"""The bytes of the tree over the bound; headers and the small messages of a step are in them."""
FLOAT_BYTES = 4
LEAD = 3
"""Steps that are not counted: the first one has another bucket layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrdersOptions:
    """Options of `pliant bench orders`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    num_workers: int = 4
    replicas: int = 16
    model: str = "resnet18"
    batch: int = 2
    size: int = 32
    steps: int = 4

    def __post_init__(self) -> None:
        check_trained(self.model)
        check_least(
            ("-np", self.num_workers, 2),
            ("--batch", self.batch, 1),
            ("--size", self.size, 1),
            ("--steps", self.steps, 1),
        )
        if not self.num_workers <= self.replicas <= 256 or self.num_workers > 64:
            raise ConfigError(
                f"--replicas {self.replicas} on -np {self.num_workers}: use as many replicas as workers or more, up to 256 on 64"
            )


def run(options: OrdersOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Train with each order, count, and return the result."""
    progress("bare accumulation", 0.0)
    bare_bytes = measure_bare(options)
    cells = []
    for number, order in enumerate(EXACT_ORDERS, 1):
        progress(f"order {order}", number / (1 + len(EXACT_ORDERS)))
        cells.append(count(options, order, bare_bytes))
    return result(options, args, cells)


def measure_bare(options: OrdersOptions) -> int:
    """Return the peak memory of plain PyTorch that accumulates as many batches as the largest block has replicas."""
    task = _task(options, side="plain", num_workers=1, replicas=-(-options.replicas // options.num_workers))
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as folder:
        placement = Placement(num_workers=1, folder=Path(folder))
        with placement.contender("bare", PROGRAM, task.to_json()) as job:
            job.start().ready(180.0)
            job.ask({"do": "run", "iterations": 1, "lead": LEAD}, 600.0)
            return peak_of(job.ask({"do": "memory", "iterations": options.steps}, 600.0))


def count(options: OrdersOptions, order: str, bare_bytes: int) -> Json:
    """Train some steps with this order on workers with a host each, and return what was sent and kept."""
    workers, replicas = options.num_workers, options.replicas
    task = _task(options, side="pliant", num_workers=workers, replicas=replicas, join={"order": order})
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as folder:
        placement = Placement(num_workers=options.num_workers, folder=Path(folder), num_hosts=options.num_workers)
        with placement.contender(order, PROGRAM, task.to_json(), strategy="AUTO") as job:
            job.start().ready(180.0)
            first = job.ready_answers
            job.ask({"do": "run", "iterations": 1, "lead": LEAD}, 600.0)
            answers = job.ask({"do": "run", "iterations": options.steps, "lead": 0}, 600.0)
            peak_bytes = peak_of(job.ask({"do": "memory", "iterations": options.steps}, 600.0))
            digests = [answer["hash"] for answer in job.ask({"do": "hash"}, 60.0)]
    cell = make_cell(options, order, cast(int, first[0]["num_bytes"]), answers, len(set(digests)) == 1)
    return cell | memory_of(cast(int, cell["gradient_bytes"]), peak_bytes, bare_bytes)


def _task(options: OrdersOptions, **more: Any) -> TrainingTask:
    return TrainingTask(model=options.model, batch=options.batch, size=options.size, **more)


def peak_of(answers: Sequence[Answer]) -> int:
    """Return the highest peak of all ranks."""
    return max(cast(int, answer["peak_bytes"]) for answer in answers)


def memory_of(num_bytes: int, peak_bytes: int, bare_bytes: int) -> Json:
    """Return the peak memory of a worker, and how many sets of gradients it has then, if bare accumulation has one."""
    sets = 1 + (peak_bytes - bare_bytes) / num_bytes
    return {"peak_bytes": peak_bytes, "bare_bytes": bare_bytes, "sets_of_gradients": sets}


def make_cell(options: OrdersOptions, order: str, num_bytes: int, answers: Sequence[Answer], same_on_all: bool) -> Json:
    """Return the traffic and the shared memory of one order from what the ranks counted."""
    stats = [[cast("Mapping[str, Any]", answer[key]) for key in ("before", "after")] for answer in answers]
    wire_bytes = sum(after["wire_bytes"] - before["wire_bytes"] for before, after in stats) / options.steps
    return {
        "order": order,
        "gradient_bytes": num_bytes,
        "planned_bytes": planned_bytes(order, options.replicas, options.num_workers, num_bytes // FLOAT_BYTES),
        "wire_bytes": wire_bytes,
        "shared_bytes": max(after["shared_bytes"] for _, after in stats),
        "same_on_all_workers": same_on_all,
    }


def planned_bytes(order: str, replicas: int, num_hosts: int, length: int) -> int:
    """Return the bytes between hosts for one tensor of this many floats, if every worker has a host of its own."""
    hosts = [f"host {number}" for number in range(num_hosts)]
    parts = tuple(end - begin for begin, end in even_partition(replicas, num_hosts))
    spec = Spec("all_reduce", "g", tuple(range(num_hosts)), "float32", length, "sum", order, -1, parts)
    plans = (make_plan(spec, rank, hosts, Strategy(), FLOAT_BYTES, 1 << 20) for rank in range(num_hosts))
    return sum(plan.egress(FLOAT_BYTES).total() for plan in plans)


def least_bytes(num_hosts: int, num_bytes: int) -> int:
    """Return what every all-reduce of one tensor per host sends at least: each host's share in, and the result out."""
    return 2 * (num_hosts - 1) * num_bytes


def result(options: OrdersOptions, args: Mapping[str, object], cells: Sequence[Json]) -> Json:
    """Return the result in the one form: the tree is ours, DDP's order the peer."""
    ddp, tree = (next(cell for cell in cells if cell["order"] == order) for order in EXACT_ORDERS)
    bound = least_bytes(options.num_workers, cast(int, tree["gradient_bytes"]))
    over = cast(float, tree["wire_bytes"]) / bound
    remarks = [
        f"order {cell['order']}: the workers' parameters differ" for cell in cells if not cell["same_on_all_workers"]
    ]
    is_power = (
        options.replicas % options.num_workers == 0
        and (per := options.replicas // options.num_workers) & (per - 1) == 0
    )
    if is_power and over > MOST_OVER_BOUND:
        remarks.append(f"the tree sends {over:.3f} times the least, to be at most {MOST_OVER_BOUND:g}")
    traffic = cast(float, ddp["wire_bytes"]) / cast(float, tree["wire_bytes"])
    memory = cast(float, ddp["sets_of_gradients"]) / cast(float, tree["sets_of_gradients"])
    peers = {"ddp": {**ddp, "traffic_ratio": traffic, "memory_ratio": memory}}
    return contest.form(
        "orders", args, not remarks, remarks,
        ours=tree, peers=peers, bound={"name": "least traffic", "bytes": bound, "ratio": 1 / over}, cells=list(cells),
    )  # fmt: skip
