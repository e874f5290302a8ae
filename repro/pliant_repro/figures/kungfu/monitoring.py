"""The worker of KungFu's figure 8: trains on random images while its monitors are switched on and off, and keeps time.

All kinds of monitoring take turns in the same processes, so whatever else differs between two runs does not count.
Started by `pliant run` with the path of a task; each worker leaves a file with its times beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import pliant
from pliant.errors import NotLaunched
from pliant.identity import worker_spec
from pliant.train.gradient_probe import GradientProbe
from pliant_repro.zoo import num_classes, vision_model

MODES = {"full": (0, 0), "none": (0, 0), "noise_scale": (1, 0), "variance": (0, 1), "variance_every_8": (0, 8)}
"""Every how many steps the noise scale is estimated, and the variance."""
FULL = "full"
"""A step of the size that is asked about, without a monitor. All others are of small images: what monitors cost depends
on the gradients alone, and of short steps so many can be compared that a hundredth of a long one is seen."""
WARMUP = (FULL, "none", "noise_scale", "variance", "variance", "none", "none", "none")
"""The first variance makes its memory."""
PAIRED = ("none", "noise_scale", "none", "variance", "none") * 4 + ("none", "noise_scale", "none", "none")
"""A monitored step has others without a monitor on either side: a machine that becomes slower or faster does so for all of
them. Of a variance the step after it pays a part, because its collective may take until then."""
ROUND = (*PAIRED, *["variance_every_8"] * 8, "none", FULL, FULL, "none", "none", "noise_scale", "none", "none")
"""All of it is a multiple of 8, so the window of 8 begins with the step that is due."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to train, and how long."""

    model: str
    batch: int
    size: int
    """The side of an image."""
    rounds: int
    replicas: int = 4
    small_batch: int = 2
    small_size: int = 64

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text()))


def schedule(rounds: int) -> list[str]:
    """The mode of each step; the first ones are for warming up."""
    return [*WARMUP, *ROUND * rounds]


@dataclass(slots=True)
class Clocks:
    """What each step took."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all threads."""
    other_s: list[float] = field(default_factory=list)
    """Of those that do not run the program: collectives are done there."""
    probe_s: list[float] = field(default_factory=list)
    """Processor time of the program's thread inside the monitors."""
    inside_s: float = 0.0
    before: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def _now(self) -> tuple[float, float, float, float]:
        whole = time.process_time()
        return time.monotonic(), whole, whole - time.thread_time(), self.inside_s

    def begin(self) -> None:
        self.before = self._now()

    def note(self) -> None:
        """A step is over, and the next one begins."""
        now = self._now()
        for sink, after, before in zip(
            (self.step_s, self.cpu_s, self.other_s, self.probe_s), now, self.before, strict=True
        ):
            sink.append(after - before)
        self.before = now

    def watch(self, thing: Any, *names: str) -> None:
        """Add up what these methods take."""
        for name in names:
            setattr(thing, name, self._timed(getattr(thing, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args)
            finally:
                self.inside_s += time.thread_time() - began_s

        return timed


def main(path: Path) -> None:
    task = Task.read(path)
    modes = schedule(task.rounds)
    _take_a_core()
    job = pliant.join(task.replicas, monitor={"noise_scale": 1, "variance": 1})
    torch.manual_seed(1)
    model = vision_model(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    numbers = TensorDataset(torch.arange(len(modes) * task.batch * job.replicas))
    model, optimizer, loader = job.wrap(model, optimizer, numbers, batch_size=task.batch)
    probe = job.gradient_probe
    assert probe is not None, "monitors were asked for"
    _switch(probe, modes[0])
    clocks = Clocks()
    clocks.watch(probe, "begin", "add_gradient", "gradients_complete", "add_sum", "sums_complete", "pack_row", "learn")
    for _ in job.epochs(1):
        data = {(replica, full): _data(task, replica, full) for replica in job.hosted for full in (False, True)}
        clocks.begin()
        for _ in loader:
            if job.step > len(clocks.step_s):
                clocks.note()
            images, labels = data[job.replica or 0, modes[job.step] == FULL]
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if job.committing:
                _switch(probe, modes[min(job.step + 1, len(modes) - 1)])
        clocks.note()
    times = {name: getattr(clocks, name) for name in ("step_s", "cpu_s", "other_s", "probe_s")}
    found = {**times, **probe.figures(), "noise_ratio": probe.noise.ratio}
    path.with_name(f"worker-{job.rank}.json").write_text(json.dumps(found))


def _take_a_core() -> None:
    """Where each worker has one core, it stays there: otherwise a step depends on who happened to be put beside whom."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        spec = worker_spec()
    except NotLaunched:
        return
    if len(cores) < 2 * spec.view.size:
        os.sched_setaffinity(0, {cores[spec.view.rank_of(spec.worker) % len(cores)]})


def _data(task: Task, replica: int, full: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each replica has images of its own, and the same ones in every step."""
    draw = torch.Generator().manual_seed(100 + replica)
    batch, size = (task.batch, task.size) if full else (task.small_batch, task.small_size)
    images = torch.randn(batch, 3, size, size, generator=draw)
    return images, torch.randint(num_classes(task.model), (batch,), generator=draw)


def _switch(probe: GradientProbe, mode: str) -> None:
    probe.noise_interval, probe.variance_interval = MODES[mode]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
