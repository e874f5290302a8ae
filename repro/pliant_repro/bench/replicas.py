"""`pliant bench replicas`: one worker hosts 1, 2, 4, ... replicas; what that costs in time and memory.

Each number of replicas is measured in a process of its own (`python -m pliant_repro.bench.replicas TASK`), so that peak memory
is that of this number. Switching between replicas swaps random states and buffers. Its cost is measured twice: `switch_share`
compares windows with it and windows without it, taken in turn; `switch_timer_share` uses clocks around its parts, which on
CUDA wait for the device at both ends and so show more than the switch costs. Without the switch, training goes on with the
wrong random numbers and buffers, which takes the same time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro.contest import Progress, Summary, check_least, floats, form, measure_apart, quantile
from pliant_repro.profiles import check_trained

if TYPE_CHECKING:
    from pliant.train.job import Job

SHARE = 0.01
"""Largest share of a step that switching may take."""
FLAT = 0.01
"""By how much the peak memory of the device may differ between numbers of replicas."""
EPOCH_STEPS, MAX_EPOCHS = 1000, 1_000_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasOptions:
    """Options of `pliant bench replicas`.

    Raises (when made):
        ConfigError: a value is not possible.
    """

    replicas: tuple[int, ...] = (1, 2, 4, 8, 16)
    model: str = "resnet18"
    batch: int = 0
    size: int = 0
    """0 means the model's own choice, as in `bench train`."""
    device: str = "cpu"
    windows: int = 10
    steps: int = 3
    """Steps in a window with 4 replicas; with another number, as many as have about as many turns."""
    warmup: int = 2
    with_pairs: bool = True
    """If false, measure only memory and throughput."""
    timeout_s: float = 600.0
    profile: str = ""
    """Where to write a profiler trace of a few steps; empty means none."""

    def __post_init__(self) -> None:
        if not self.replicas or not all(1 <= count <= 256 for count in self.replicas):
            raise ConfigError(
                f"--replicas {','.join(map(str, self.replicas))}: use numbers from 1 to 256, such as 1,2,4"
            )
        check_trained(self.model)
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: use cpu or cuda")
        check_least(("--repeat", self.windows, 1), ("--steps", self.steps, 1), ("--warmup", self.warmup, 1))


def run(options: ReplicasOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure every number of replicas in a process of its own, and return the result."""
    cells: list[Json] = []
    remarks: list[str] = []
    for number, count in enumerate(options.replicas):
        progress(f"{count} replicas", number / len(options.replicas))
        try:
            cells.append(make_cell(measure_process(options, count)))
        except LaunchError as error:
            remarks.append(str(error))
            cells.append({"replicas": count, "ours": {"median_s": None, "iqr_s": None}, "ok": False})
    progress("done", 1.0)
    return make_result(options, args, cells, remarks)


def measure_process(options: ReplicasOptions, replicas: int) -> Json:
    """Return the measurements of a process that hosts so many replicas.

    Raises:
        LaunchError: the process failed; with its last words.
    """
    from pliant_repro.zoo import network

    chosen = network(options.model)
    task = {
        "replicas": replicas, "model": options.model, "batch": options.batch or chosen.batch,
        "size": options.size or chosen.size, "device": options.device, "windows": options.windows,
        "steps": max(1, options.steps * 4 // replicas), "warmup": options.warmup, "with_pairs": options.with_pairs,
        "profile": options.profile,
    }  # fmt: skip
    found = measure_apart(__name__, json.dumps(task), who=f"{replicas} replicas", timeout_s=options.timeout_s)
    return {**found, "batch": task["batch"]}


def make_cell(found: Mapping[str, Any]) -> Json:
    """Return the numbers about one number of replicas."""
    steps, count = floats(found["step_s"]), int(found["replicas"])
    median_s = quantile(steps, 0.5)
    cell: Json = {
        "replicas": count,
        "ours": Summary.of(steps).to_json(),
        "samples_per_s": count * int(found["batch"]) / median_s,
        **{key: value for key, value in found.items() if key.endswith("_bytes")},
        "ok": True,
    }
    if "step_without_s" in found:
        without, switch_s = floats(found["step_without_s"]), float(found["switch_s"])
        shares = [(one - other) / one for one, other in zip(steps, without, strict=True)]
        share, timer_share = quantile(shares, 0.5), switch_s / median_s
        cell |= {"switch_share": share, "switch_share_iqr": Summary.of(shares).iqr}
        cell |= {"switch_timer_share": timer_share, "switch_s": switch_s / count}
        cell["ok"] = count == 1 or min(share, timer_share) <= SHARE
    return cell


def flatness(cells: Sequence[Json], key: str) -> float | None:
    """Return how much larger the largest value is than the least, as a share of it; None if one is missing."""
    values = [cell.get(key) for cell in cells]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return max(numbers) / min(numbers) - 1 if numbers and len(numbers) == len(values) else None


def make_result(options: ReplicasOptions, args: Mapping[str, object], cells: list[Json], remarks: list[str]) -> Json:
    on_device = options.device == "cuda"
    key = "device_peak_bytes" if on_device else "host_peak_bytes"
    spread = flatness(cells, key)
    ok = all(bool(cell["ok"]) for cell in cells)
    shared = [cell for cell in cells if "switch_share" in cell and cell["replicas"] != 1]
    for cell in shared:
        if not cell["ok"]:
            remarks.append(
                f"{cell['replicas']} replicas: switching takes {cell['switch_share']:.2%} of a step "
                f"({cell['switch_timer_share']:.2%} by the clocks), to reach {SHARE:.0%}"
            )
    if on_device and (spread is None or spread > FLAT):
        ok = False
        remarks.append(f"peak memory differs by {spread or 0:.1%} between numbers of replicas, to reach {FLAT:.0%}")
    if not on_device:
        remarks.append("host memory grows with the replicas by one set of gradients each; the device's must not")
    chosen = min(shared or cells, key=lambda cell: abs(int(str(cell["replicas"])) - 4))
    return form(
        "replicas",
        args,
        ok,
        remarks,
        ours=chosen["ours"],
        replicas=chosen["replicas"],
        switch_share=chosen.get("switch_share"),
        switch_timer_share=chosen.get("switch_timer_share"),
        memory_by_replicas={str(cell["replicas"]): cell.get(key) for cell in cells},
        memory_spread=spread,
        samples_per_s_by_replicas={str(cell["replicas"]): cell.get("samples_per_s") for cell in cells},
        cells=cells,
    )


# --- in the measuring process ---


class MeasuredSwitch:
    """Stands in for the job's ReplicaSwitch: passes calls on, leaves them out, or passes them on with a clock around them."""

    def __init__(self, job: Job, *, cuda: bool) -> None:
        self._real, self._cuda = job.replica_switch, cuda
        self._random, self._buffers = self._real.capture_random(), self._real.capture_buffers()
        self.mode = "on"
        """`on`, `off` or `timed`. While it is off, every turn goes on with what the turn before left."""
        self.spent_s = 0.0
        job.replica_switch = self  # type: ignore[assignment]

    def restore(self, context: Any, first_buffers: Any) -> None:
        if self.mode != "off":
            self._time(lambda: self._real.restore(context, first_buffers))

    def capture_random(self) -> Any:
        return self._random if self.mode == "off" else self._time(self._real.capture_random)

    def capture_buffers(self) -> Any:
        return self._buffers if self.mode == "off" else self._time(self._real.capture_buffers)

    def _time(self, act: Callable[[], T]) -> T:
        if self.mode != "timed":
            return act()
        self._synchronize()
        begun_s = time.perf_counter()
        result = act()
        self._synchronize()
        self.spent_s += time.perf_counter() - begun_s
        return result

    def _synchronize(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()


def measure(task: Mapping[str, Any]) -> Json:
    """Measure one number of replicas in this process."""
    import torch

    import pliant
    from pliant_repro.zoo import Samples, build, compute_loss, make_optimizer, network

    replicas, steps, cuda = task["replicas"], task["steps"], task["device"] == "cuda"
    torch.set_num_threads(1)
    with pliant.join(replicas=replicas) as job:
        chosen = network(task["model"])
        inner = build(task["model"], task["device"])
        dataset = Samples(chosen.kind, task["size"], EPOCH_STEPS * task["batch"] * replicas, task["device"])
        optimizer = make_optimizer(chosen.optimizer, inner)
        model, optimizer, loader = job.wrap(inner, optimizer, dataset, batch_size=task["batch"], shuffle=False)
        batches = (batch for _epoch in job.epochs(MAX_EPOCHS) for batch in loader)
        batch = next(batches)

        def run_window(steps: int) -> float:
            """Return the seconds of so many steps, each from one batch in hand to the next."""
            nonlocal batch
            if cuda:
                torch.cuda.synchronize()
            begun_s = time.perf_counter()
            for _ in range(steps * replicas):
                optimizer.zero_grad()
                compute_loss(model, *batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                batch = next(batches)
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - begun_s

        run_window(task["warmup"])
        windows: dict[str, list[float]] = {"on": [], "off": [], "timed": []}
        switch = MeasuredSwitch(job, cuda=cuda) if task["with_pairs"] else None
        for _ in range(task["windows"]):
            for mode in windows if switch is not None else ("on",):
                if switch is not None:
                    switch.mode = mode
                windows[mode].append(run_window(steps))
        if switch is not None:
            switch.mode = "on"
        found: Json = {"replicas": replicas, "step_s": [taken / steps for taken in windows["on"]]}
        if switch is not None:
            found["step_without_s"] = [taken / steps for taken in windows["off"]]
            found["switch_s"] = switch.spent_s / (task["windows"] * steps)
        found |= peak_memory(cuda=cuda)
        if task["profile"]:
            kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
            with torch.profiler.profile(activities=kinds) as profiler:
                run_window(2)
            profiler.export_chrome_trace(task["profile"])
    return found


def peak_memory(*, cuda: bool) -> Json:
    """Return the peaks of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    # Not getrusage: its peak survives exec, and would be that of the process that started this one.
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if not cuda:
        return {"host_peak_bytes": peak}
    import torch

    device = {"device_peak_bytes": torch.cuda.max_memory_allocated()}
    return {"host_peak_bytes": peak, **device, "device_reserved_bytes": torch.cuda.max_memory_reserved()}


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
