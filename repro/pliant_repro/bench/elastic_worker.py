"""The program that `bench resize` and `bench recover` train elastically: `python -m pliant_repro.bench.elastic_worker TASK.json`.

An ordinary training loop under `pliant run -w`, which tells the controller when each of its steps began. What it says is
in `Beginning`; nothing is said while a step is under way.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

EPOCH_STEPS = 1000
MAX_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticTask:
    """What to train, and whom to tell."""

    control: str
    """The controller's Unix socket."""
    replicas: int
    model: str = "resnet18"
    batch: int = 2
    size: int = 32

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> ElasticTask:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """A worker has the first batch of a step in hand. Times are of the monotonic clock, which a host's processes share."""

    pid: int
    worker: str
    """Its address, HOST:PORT."""
    rank: int
    size: int
    step: int
    """Steps committed before this one."""
    own: int
    """Steps that this process has seen committed."""
    at_s: float
    ended_s: float
    """When this process's optimizer had done the step before; 0: it had none."""
    change: tuple[int, int, float, bool] | None = None
    """(old size, new size, pause in seconds as the job noted it, whether somebody was lost), if this is the first
    step in a new view of one who was there before."""
    config_server: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Beginning:
        values = json.loads(line)
        change = values["change"]
        return cls(**{**values, "change": None if change is None else tuple(change)})


@dataclass(slots=True)
class _Seen:
    """What the loop has told so far."""

    key: tuple[int, int] = (-1, -1)
    num_changes: int = 0
    own: int = 0
    ended_s: float = 0.0
    identity: dict[str, object] = field(default_factory=dict)


def main() -> None:
    import torch

    import pliant
    from pliant.identity import worker_spec
    from pliant_repro.zoo import Samples, build, compute_loss, make_optimizer, network

    task = ElasticTask.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    control = socket.socket(socket.AF_UNIX)
    control.connect(task.control)
    spec, chosen = worker_spec(), network(task.model)
    seen = _Seen(identity={"pid": os.getpid(), "worker": str(spec.worker), "config_server": spec.config_server})
    job = pliant.join(replicas=task.replicas)
    inner = build(task.model)
    dataset = Samples(chosen.kind, task.size, EPOCH_STEPS * task.batch * task.replicas)
    model, optimizer, loader = job.wrap(
        inner, make_optimizer(chosen.optimizer, inner), dataset, batch_size=task.batch, shuffle=False
    )
    for _epoch in job.epochs(MAX_EPOCHS):
        for inputs, targets in loader:
            _tell(control, job, seen)
            optimizer.zero_grad()
            compute_loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if job.committing:
                seen.ended_s = time.monotonic()


def _tell(control: socket.socket, job: object, seen: _Seen) -> None:
    """Say that a step begins, unless this is a later turn of one that has begun."""
    from pliant.train.job import Job

    assert isinstance(job, Job), "made by pliant.join"
    changes = job.changes
    key = (job.step, len(changes))
    if key == seen.key:
        return
    at_s = time.monotonic()
    if seen.key[0] >= 0 and job.step > seen.key[0]:
        seen.own += 1
    change = None
    if len(changes) > seen.num_changes:
        last = changes[-1]
        # Several changes in a row without a step between them are one pause, with the longest wait the last's.
        first = changes[seen.num_changes]
        change = (first.old_size, last.new_size, max(each.pause_s for each in changes[seen.num_changes :]), last.lost)
    seen.key, seen.num_changes = key, len(changes)
    beginning = Beginning(
        rank=job.rank,
        size=job.size,
        step=job.step,
        own=seen.own,
        at_s=at_s,
        ended_s=seen.ended_s,
        change=change,
        **seen.identity,  # type: ignore[arg-type]
    )
    control.sendall(beginning.to_line())


if __name__ == "__main__":
    main()
