"""What it costs that several replicas take turns on one worker: `python -m pliant_repro.bench.switching TASK.json`.

Prints one JSON object about one number of replicas, in a process of its own so that its peak memory is that of this
number. The switch between replicas (random states, buffers) is measured twice: as the difference between windows with
it and windows without it, taken in turn, and by a clock around each of its parts. Without it training goes on with the
wrong random numbers and buffers, which costs the same time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

import pliant
from pliant.machine import Json
from pliant.train.job import Job
from pliant_repro.zoo import Samples, build, compute_loss, make_optimizer, network

EPOCH_STEPS = 1000
MAX_EPOCHS = 1_000_000

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchingTask:
    """What to measure."""

    replicas: int
    model: str = "resnet18"
    batch: int = 2
    size: int = 32
    device: str = "cpu"
    windows: int = 10
    """Pairs of windows, one with switching and one without."""
    steps: int = 4
    """Steps in a window."""
    warmup: int = 3
    num_threads: int = 1
    with_pairs: bool = True
    """False: only memory and throughput."""
    profile: str = ""
    """Where to write a trace of a few steps; empty: none is taken."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> SwitchingTask:
        return cls(**json.loads(path.read_text()))


class Switch:
    """The switch between replicas of a running job: on, off, or on with a clock around it."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._switch, self._device = job.replica_switch, device
        self._restore = self._switch.restore
        self._capture_random, self._capture_buffers = self._switch.capture_random, self._switch.capture_buffers
        self.spent_s = 0.0

    def on(self) -> None:
        self._put(self._restore, self._capture_random, self._capture_buffers)

    def off(self) -> None:
        """Nothing is restored or captured: every turn goes on with what the turn before left."""
        state, buffers = self._capture_random(), self._capture_buffers()
        self._put(lambda *_: None, lambda: state, lambda: buffers)

    def timed(self) -> None:
        timed = self._timed
        self._put(timed(self._restore), timed(self._capture_random), timed(self._capture_buffers))

    def _put(self, restore: Any, capture_random: Any, capture_buffers: Any) -> None:
        switch: Any = self._switch
        switch.restore, switch.capture_random, switch.capture_buffers = restore, capture_random, capture_buffers

    def _timed(self, act: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(act)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            self._wait()
            begun_s = time.perf_counter()
            result = act(*args, **kwargs)
            self._wait()
            self.spent_s += time.perf_counter() - begun_s
            return result

        return timed

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Loop:
    """A training loop that is run a number of steps at a time."""

    def __init__(self, task: SwitchingTask, job: Job) -> None:
        self._task, self._job = task, job
        chosen = network(task.model)
        inner = build(task.model, task.device)
        dataset = Samples(chosen.kind, task.size, EPOCH_STEPS * task.batch * task.replicas, task.device)
        self._model, self._optimizer, self._loader = job.wrap(
            inner, make_optimizer(chosen.optimizer, inner), dataset, batch_size=task.batch, shuffle=False
        )
        self._batches = self._endless()
        self._batch = None

    def _endless(self) -> Iterator[Any]:
        for _epoch in self._job.epochs(MAX_EPOCHS):
            yield from self._loader

    def run(self, steps: int) -> float:
        """Seconds of so many steps, each from one batch in hand to the next."""
        batch = self._batch if self._batch is not None else next(self._batches)
        begun_s = self._now_s()
        for _ in range(steps * self._task.replicas):
            self._optimizer.zero_grad()
            compute_loss(self._model, *batch).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            batch = next(self._batches)
        self._batch = batch
        return self._now_s() - begun_s

    def _now_s(self) -> float:
        if self._task.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(task: SwitchingTask) -> Json:
    """All numbers about this number of replicas."""
    torch.set_num_threads(task.num_threads)
    with pliant.join(replicas=task.replicas) as job:
        loop = Loop(task, job)
        loop.run(task.warmup)
        found: Json = {"replicas": task.replicas}
        windows: dict[str, list[float]] = {"with": [], "without": [], "timed": []}
        switch = Switch(job, torch.device(task.device)) if task.with_pairs else None
        spent_s = 0.0
        for _ in range(task.windows):
            windows["with"].append(loop.run(task.steps))
            if switch is None:
                continue
            switch.off()
            windows["without"].append(loop.run(task.steps))
            switch.timed()
            before_s = switch.spent_s
            windows["timed"].append(loop.run(task.steps))
            spent_s += switch.spent_s - before_s
            switch.on()
        found["step_s"] = [taken / task.steps for taken in windows["with"]]
        if switch is not None:
            found["step_without_s"] = [taken / task.steps for taken in windows["without"]]
            found["switch_s"] = spent_s / (task.windows * task.steps)
        found |= memory(task.device)
        if task.profile:
            _profile(task, loop)
    return found


def memory(device: str) -> Json:
    """Peaks of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    # Not getrusage: its peak survives exec, and would be that of the process that started this one.
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if device != "cuda":
        return {"host_peak_bytes": peak}
    return {
        "host_peak_bytes": peak,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _profile(task: SwitchingTask, loop: Loop) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if task.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        loop.run(2)
    profiler.export_chrome_trace(task.profile)


def main() -> None:
    task = SwitchingTask.read(Path(sys.argv[1]))
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(task)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
