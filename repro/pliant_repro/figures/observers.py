"""Observers of the training program: what is recorded of each turn of a replica, and what steers the job."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pliant
from pliant.identity import worker_spec
from pliant.train.gradient_probe import GradientProbe
from pliant_repro.figures.launch import Task
from pliant_repro.figures.workloads import monitor_modes
from pliant_repro.zoo import Sample, Workload

HOLD_S = 120.0
"""Longest time that a step waits for new workers."""


class Observer:
    """Called around each turn of a replica, and after each step. The base class does nothing."""

    def begin(self, job: Any) -> None:
        """Called when the job has begun, before its first step on this worker."""

    def before_turn(self, job: Any, work: Workload) -> None:
        """Called before a turn's forward pass."""

    def after_forward(self, job: Any, loss: Tensor) -> None:
        """Called between forward and backward."""

    def after_turn(self, job: Any) -> None:
        """Called after a turn's backward pass."""

    def after_step(self, job: Any, work: Workload) -> bool:
        """Called after `optimizer.step()`. Returning True ends the training."""
        return False

    def epoch_done(self, job: Any, epoch: int, work: Workload) -> None:
        """Called after each epoch."""

    def finish(self, job: Any, work: Workload) -> None:
        """Called when training has ended, also in a worker that leaves early."""


class TurnLog(Observer):
    """Appends a line of JSON for each turn, state, change of view and epoch to this process's log.

    A line is in the file before the next thing happens, so that a killed process loses none.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._switch: AlternatingSwitch | None = None
        self._file = open(Path(task.journal) / f"{os.getpid()}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._num_states = self._num_changes = self._epoch = 0
        self._trained_s, self._begin_s = 0.0, time.monotonic()

    def begin(self, job: Any) -> None:
        if self._task.alternate:
            self._switch = AlternatingSwitch(job)

    def before_turn(self, job: Any, work: Workload) -> None:
        self._write_changes(job)
        self._write_state(job, work)

    def after_forward(self, job: Any, loss: Tensor) -> None:
        if self._task.digest:  # also of an attempt that is lost and repeated
            self._write("turn", **self._turn(job, job.replica), loss=loss.item())

    def after_turn(self, job: Any) -> None:
        if job.replica != job.hosted[-1]:  # the line of the last turn follows the update
            self._write_turn(job, job.replica)

    def after_step(self, job: Any, work: Workload) -> bool:
        if self._task.nudge == job.step and job.rank == 0:
            weight = next(work.model.parameters()).data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        self._write_turn(job, job.hosted[-1])
        return False

    def _write_turn(self, job: Any, replica: int) -> None:
        task, is_last = self._task, replica == job.hosted[-1]
        if task.digest:
            return
        if task.device != "cpu" and (is_last or task.sync_turns):
            torch.cuda.synchronize()
        facts = self._turn(job, replica)
        if self._switch is not None:
            facts |= self._switch.take()
        if task.memory and is_last:
            facts["memory_bytes"] = memory_bytes(task.device)
        self._write("turn", **facts)

    def epoch_done(self, job: Any, epoch: int, work: Workload) -> None:
        self._trained_s += time.monotonic() - self._begin_s
        is_last = epoch == self._task.epochs - 1
        if is_last:
            self._write_state(job, work)
        if work.held_out is not None and job.rank == 0 and (self._task.evaluate or is_last):
            found = accuracy(work.model, work.held_out, self._task.device)
            self._write("epoch", epoch=epoch, time_s=self._trained_s, accuracy=found)
        self._epoch, self._begin_s = epoch + 1, time.monotonic()

    def finish(self, job: Any, work: Workload) -> None:
        self._write_changes(job)

    def _turn(self, job: Any, replica: int) -> dict[str, Any]:
        place = {"step": job.step, "replica": replica, "size": job.size, "rank": job.rank}
        return {**place, "epoch": self._epoch, "batch": job.batch_size}

    def _write(self, kind: str, **facts: object) -> None:
        self._file.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **facts}).encode() + b"\n")

    def _write_state(self, job: Any, work: Workload) -> None:
        """Write the digest of the last step, once. Before a turn the model has the buffers of replica 0, as DDP's rank 0."""
        has_own_buffers = self._task.mode == "ddp" and job.rank > 0
        if self._task.digest and job.step > self._num_states and not has_own_buffers:
            self._num_states = job.step
            self._write("state", step=job.step - 1, digest=digest(work.model, work.optimizer))

    def _write_changes(self, job: Any) -> None:
        for change in islice(job.changes, self._num_changes, None):
            self._num_changes += 1
            names = ("step", "old_size", "new_size", "pause_s", "lost")
            self._write("change", **{name: getattr(change, name) for name in names})


class TakeTurns(Observer):
    """Lets processes train in turn, some steps at a time: a byte goes round through named pipes."""

    def __init__(self, steps: int, own: str, following: str, block: int) -> None:
        self._steps_left, self._block = steps, block
        # Opened for reading and writing: neither waits for the other side, nor ends with it.
        self._own, self._following = (os.open(pipe, os.O_RDWR) for pipe in (own, following))

    def begin(self, job: Any) -> None:
        os.read(self._own, 1)

    def after_step(self, job: Any, work: Workload) -> bool:
        self._steps_left -= 1
        if self._steps_left % self._block == 0:
            os.write(self._following, b".")
            if self._steps_left:
                os.read(self._own, 1)
        return False


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of the bytes of parameters, buffers and the optimizer's state."""
    digested = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digested.update(name.encode() + tensor.cpu().numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            if value is not None:
                digested.update(f"{number}.{name}".encode() + torch.as_tensor(value).cpu().numpy().tobytes())
    return digested.hexdigest()


def accuracy(model: nn.Module, held_out: Sample, device: str) -> float:
    images, labels = held_out
    model.eval()
    with torch.no_grad():
        parts = [model(each.to(device)).argmax(1).cpu() for each in torch.split(images, 1024)]
    model.train()
    return float((torch.cat(parts) == labels).double().mean())


def memory_bytes(device: str) -> int:
    """Return the bytes that this process holds: of the host's memory now, or of the device's at its peak."""
    if device != "cpu":
        return torch.cuda.max_memory_reserved()
    # Libraries, which are files, are left out: the machine has them once, whoever uses them.
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


class Pace(Observer):
    """Keeps steps from being shorter than `pace_s`, and waits where the task says that workers shall join."""

    def __init__(self, task: Task) -> None:
        self._pace_s, self._holds = task.pace_s, dict(task.hold)
        self._step, self._due_s = -1, 0.0

    def before_turn(self, job: Any, work: Workload) -> None:
        if job.step == self._step:
            return
        # Before the turn's work, as what is measured as the pause of a resize lies before that.
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._step, self._due_s = job.step, time.monotonic() + self._pace_s
        if job.step in self._holds:
            _wait_for_workers(job, self._holds[job.step])


def _wait_for_workers(job: pliant.Job, num_workers: int) -> None:
    """Wait until a view with so many workers can be entered, so that the next step is its first."""
    from pliant.elastic.client import ConfigClient

    deadline_s = time.monotonic() + HOLD_S
    spec = worker_spec()
    with ConfigClient(spec.config_server, spec.token) as client:
        roll = client.membership()
        while len(roll.members) != num_workers and not (roll.over or time.monotonic() > deadline_s):
            roll = client.wait_for_membership(roll.number, 5.0)
    while job.prepared_view < roll.number and not (roll.over or time.monotonic() > deadline_s):
        time.sleep(0.002)  # the job's threads are connecting to the new workers


class AlternatingSwitch:
    """Wraps the job's replica switch: measures it, and leaves it out in every second step, whose result means nothing."""

    def __init__(self, job: pliant.Job) -> None:
        self._inner, self._job = job.replica_switch, job
        self._spent_s = 0.0
        self._kept: dict[str, Any] = {}
        job.replica_switch = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the inner switch's method, timed and called only where this step switches."""
        method = getattr(self._inner, name)

        def gated(*arguments: Any) -> Any:
            begin_s = time.perf_counter()
            if self._job.step % 2 == 0 or name not in self._kept:
                self._kept[name] = method(*arguments)
            self._spent_s += time.perf_counter() - begin_s
            return self._kept[name]

        return gated

    def take(self) -> dict[str, Any]:
        """Return what a turn's log line says about the switch."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return {"switched": self._job.step % 2 == 0, "switch_s": spent_s}


class IterationLines(Observer):
    """Prints images per second of each step, and the policy's lines, as KungFu's artifact does. Rank 0 prints."""

    def __init__(self, task: Task, policy: Any) -> None:
        self._task, self._warmup, self._is_first = task, task.warmup, False
        self._where = "/gpu:0" if task.device != "cpu" else "/cpu:0"
        self._voted = False
        self.rates: list[float] = []
        self._begin_s = 0.0
        policy.report = self._say

    def begin(self, job: Any) -> None:
        self._is_first = job.rank == 0

    def _say(self, text: str) -> None:
        """Print a line of the policy; lines of the vote have a mark of their own."""
        self._voted = True
        if self._is_first:
            print(f"[I] {text}" if "::" in text else f"Cluster response\n{text}", flush=True)

    def before_turn(self, job: Any, work: Workload) -> None:
        if not self._begin_s:
            self._begin_s = time.perf_counter()
            if self._is_first:
                name = "paced ResNet50" if self._task.kappa else self._task.model.partition(":")[2]
                print(f"Model: {name}\nBatch size: {self._task.batch}", flush=True)
            return
        self._measure()

    def _measure(self) -> None:
        now_s = time.perf_counter()
        took_s, self._begin_s = now_s - self._begin_s, now_s
        if self._warmup:
            self._warmup -= 1
            return
        self.rates.append(self._task.batch / took_s)
        if self._is_first:
            response = "Cluster response " if self._voted else ""
            print(f"{response}Iter #{len(self.rates) - 1}: {self.rates[-1]:.1f} img/sec per {self._where}", flush=True)
        self._voted = False

    def after_step(self, job: Any, work: Workload) -> bool:
        if self._task.device != "cpu":
            torch.cuda.synchronize()
        return False

    def finish(self, job: Any, work: Workload) -> None:
        self._measure()
        if job.rank == 0:
            mean, spread = float(np.mean(self.rates)), 1.96 * float(np.std(self.rates))
            facts = {"framework": "pliant", "np": job.size, "bs": self._task.batch, "kf-opt": "sync-sgd-monitor"}
            text = json.dumps({**facts, "adapt": self._task.adapt}, separators=(",", ":"))
            print(f"RESULT: {mean:f} +-{spread:f} {text}", flush=True)


class ResizeRequests(Observer):
    """Asks for other numbers of workers by a schedule.

    Training continues while new workers start. So if the step of the next change comes before the last change has taken
    place, the next one is put off until then.
    """

    def __init__(self, resizes: Sequence[tuple[int, int]]) -> None:
        self._begin_s = time.monotonic()
        self._left = sorted(resizes, reverse=True)
        self._asked: int | None = None
        self._asked_s = 0.0
        self._is_reported = True

    def before_turn(self, job: Any, work: Workload) -> None:
        if job.step == 0 and job.rank == 0:
            print(f"init took {time.monotonic() - self._begin_s:.3f}s", flush=True)

    def after_step(self, job: Any, work: Workload) -> bool:
        size = self.due(job.step + 1, job.size, lambda text: print(text, flush=True) if job.rank == 0 else None)
        if size is not None:
            job.resize(size)  # 0 ends the job, and with it the loop
        return False

    def due(self, steps: int, size: int, say: Callable[[str], None]) -> int | None:
        """Return the number of workers to ask for when `size` workers have done `steps` steps; None means nothing."""
        if self._asked == size and not self._is_reported:
            self._is_reported = True
            say(f"request to first step with {size} workers: {time.monotonic() - self._asked_s:.3f}s")
        if not self._left or steps < self._left[-1][0] or self._asked not in (None, size):
            return None
        self._asked, self._asked_s, self._is_reported = self._left.pop()[1], time.monotonic(), False
        return self._asked


class EndAtRest(Observer):
    """Ends the job some steps after its policy has come to rest."""

    LAST_STEPS = 5

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._done_at: int | None = None

    def after_step(self, job: Any, work: Workload) -> bool:
        if self._done_at is None and self._policy.done:
            self._done_at = job.step
        return self._done_at is not None and job.step >= self._done_at + self.LAST_STEPS


class MonitorTimes(Observer):
    """Switches the gradient monitors on and off from step to step, and measures every step. Writes worker-RANK.json."""

    def __init__(self, task: Task) -> None:
        from pliant_repro.figures.kungfu_monitoring import INTERVALS

        self._task, self._modes, self._intervals = task, monitor_modes(task), INTERVALS
        self._begins_s: list[float] = []

    def begin(self, job: Any) -> None:
        assert job.gradient_probe is not None, "monitors were asked for"
        self._probe: GradientProbe = job.gradient_probe
        self._switch(0)

    def _switch(self, step: int) -> None:
        mode = self._modes[min(step, len(self._modes) - 1)]
        self._probe.noise_interval, self._probe.variance_interval = self._intervals[mode]

    def before_turn(self, job: Any, work: Workload) -> None:
        if job.step == len(self._begins_s):
            self._begins_s.append(time.monotonic())

    def after_step(self, job: Any, work: Workload) -> bool:
        self._switch(job.step + 1)
        return False

    def finish(self, job: Any, work: Workload) -> None:
        times_s = [end - begin for begin, end in pairwise([*self._begins_s, time.monotonic()])]
        found = {"step_s": times_s, "variance": self._probe.variance.value, "noise_ratio": self._probe.noise.ratio}
        (Path(self._task.journal) / f"worker-{job.rank}.json").write_text(json.dumps(found))
