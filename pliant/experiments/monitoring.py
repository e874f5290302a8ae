"""The worker of KungFu's figure 8: trains on random images while its monitors are switched on and off, and keeps time.

All kinds of monitoring take turns in the same processes, so whatever else differs between two runs does not count.
Started by `pliant run` with the path of a task; each worker leaves a file with its times beside it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import pliant
from pliant.experiments.vision import num_classes, vision_model
from pliant.train.probing import GradientProbe

MODES = {"none": (0, 0), "noise_scale": (1, 0), "variance": (0, 1), "variance_every_8": (0, 8)}
"""Every how many steps the noise scale is estimated, and the variance."""
ROUND = (("none", 4), ("noise_scale", 4), ("variance_every_8", 8), ("variance", 4), ("none", 4))
"""Windows of steps. The whole is a multiple of 8, so each window of 8 begins with the step that is due."""
WARMUP = (("none", 1), ("noise_scale", 1), ("variance", 2), ("none", 4))
"""The first variance makes its memory."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to train, and how long."""

    model: str
    batch: int
    size: int
    """The side of an image."""
    rounds: int
    replicas: int = 4

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text()))


def schedule(rounds: int) -> list[str]:
    """The mode of each step; the first 8 are for warming up."""
    return [mode for window in (WARMUP, *[ROUND] * rounds) for mode, steps in window for _ in range(steps)]


def windows(rounds: int) -> Iterator[tuple[str, range]]:
    """The mode and the steps of each window, without those for warming up."""
    begin = sum(steps for _, steps in WARMUP)
    for mode, steps in ROUND * rounds:
        yield mode, range(begin, begin + steps)
        begin += steps


def main(path: Path) -> None:
    task = Task.read(path)
    modes = schedule(task.rounds)
    job = pliant.join(task.replicas, monitor={"noise_scale": 1, "variance": 1})
    torch.manual_seed(1)
    model = vision_model(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    numbers = TensorDataset(torch.arange(len(modes) * task.batch * job.replicas))
    model, optimizer, loader = job.wrap(model, optimizer, numbers, batch_size=task.batch)
    probe = job._need_trainer().gradients.probe
    assert probe is not None, "monitors were asked for"
    _switch(probe, modes[0])
    took_s: list[float] = []
    cpu_s: list[float] = []
    for _ in job.epochs(1):
        data = {replica: _data(task, replica) for replica in job.hosted}
        before = (time.monotonic(), _cpu_s())
        for _ in loader:
            if job.step > len(took_s):
                before = _note(before, took_s, cpu_s)
            images, labels = data[job.replica or 0]
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if job.committing:
                _switch(probe, modes[min(job.step + 1, len(modes) - 1)])
        _note(before, took_s, cpu_s)
    found = {"step_s": took_s, "cpu_s": cpu_s, **probe.figures(), "noise_ratio": probe.noise.ratio}
    path.with_name(f"worker-{job.rank}.json").write_text(json.dumps(found))


def _data(task: Task, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each replica has images of its own, and the same ones in every step."""
    draw = torch.Generator().manual_seed(100 + replica)
    images = torch.randn(task.batch, 3, task.size, task.size, generator=draw)
    return images, torch.randint(num_classes(task.model), (task.batch,), generator=draw)


def _switch(probe: GradientProbe, mode: str) -> None:
    probe.noise_interval, probe.variance_interval = MODES[mode]


def _note(before: tuple[float, float], took_s: list[float], cpu_s: list[float]) -> tuple[float, float]:
    now = (time.monotonic(), _cpu_s())
    took_s.append(now[0] - before[0])
    cpu_s.append(now[1] - before[1])
    return now


def _cpu_s() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(Path(sys.argv[1]))
