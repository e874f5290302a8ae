"""`pliant bench replicas`: one worker hosts 1, 2, 4, ... replicas; what that costs in time and memory.

`switch_share` is the part of a step that goes into switching between replicas: a step with it beside one without,
in turn, over `switch_timer_share`, which is what clocks around the switch say. On CUDA these wait for the device at both
ends, so they show more than the switch costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench.contest import measured_apart
from pliant_repro.bench.stats import Summary, quantile
from pliant_repro.profiles import check_trained

Progress = Callable[[str, float], None]

SHARE = 0.01
"""Most of a step that switching may take."""
FLAT = 0.01
"""By how much the peak on the device may differ between numbers of replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasOptions:
    """What `pliant bench replicas` was asked for.

    Raises (when made):
        ConfigError: a value that cannot be.
    """

    replicas: tuple[int, ...] = (1, 2, 4, 8, 16)
    model: str = "resnet18"
    batch: int = 0
    size: int = 0
    """As in `bench train`: 0 is the model's own choice."""
    device: str = "cpu"
    windows: int = 10
    steps: int = 3
    """In a window, with 4 replicas; with others, as many as have about the same number of turns."""
    warmup: int = 2
    with_pairs: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the task of each process."""

    def __post_init__(self) -> None:
        if not self.replicas or not all(1 <= count <= 256 for count in self.replicas):
            raise ConfigError(
                f"--replicas {','.join(map(str, self.replicas))}: use numbers from 1 to 256, such as 1,2,4"
            )
        check_trained(self.model)
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: use cpu or cuda")
        for flag, value, least in (
            ("--repeat", self.windows, 1),
            ("--steps", self.steps, 1),
            ("--warmup", self.warmup, 1),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: use {least} or more")


def run(options: ReplicasOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure every number of replicas in a process of its own; the result in the one form of all benches."""
    cells: list[Json] = []
    remarks: list[str] = []
    for number, count in enumerate(options.replicas):
        progress(f"{count} replicas", number / len(options.replicas))
        try:
            cells.append(cell_of(options, measured(options, count)))
        except LaunchError as error:
            remarks.append(str(error))
            cells.append({"replicas": count, "ours": {"median_s": None, "iqr_s": None}, "ok": False})
    progress("done", 1.0)
    return _result(options, args, cells, remarks)


def measured(options: ReplicasOptions, replicas: int) -> Json:
    """What a process says that hosts so many replicas.

    Raises:
        LaunchError: it failed, with its last words.
    """
    from pliant_repro.bench.switching import SwitchingTask
    from pliant_repro.zoo import network

    chosen = network(options.model)
    settings: dict[str, object] = {
        "replicas": replicas,
        "model": options.model,
        "batch": options.batch or chosen.batch,
        "size": options.size or chosen.size,
        "device": options.device,
        "windows": options.windows,
        "steps": max(1, options.steps * 4 // replicas),
        "warmup": options.warmup,
        "with_pairs": options.with_pairs,
        **options.extra,
    }
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as folder:
        path = Path(folder) / "task.json"
        SwitchingTask(**settings).write(path)  # type: ignore[arg-type]
        who = f"{replicas} replicas"
        found = measured_apart("pliant_repro.bench.switching", str(path), who=who, timeout_s=options.timeout_s)
    return {**found, "batch": settings["batch"]}


def cell_of(options: ReplicasOptions, found: Json) -> Json:
    """The numbers about one number of replicas."""
    steps, batch, count = _floats(found["step_s"]), found["batch"], found["replicas"]
    assert isinstance(batch, int), f"batch in {found}"
    assert isinstance(count, int), f"replicas in {found}"
    cell: Json = {
        "replicas": count,
        "ours": Summary.of(steps).to_json(),
        "samples_per_s": count * batch / quantile(steps, 0.5),
        **{key: value for key, value in found.items() if key.endswith("_bytes")},
        "ok": True,
    }
    if "step_without_s" in found:
        without, switch_s = _floats(found["step_without_s"]), found["switch_s"]
        assert isinstance(switch_s, float), f"switch_s in {found}"
        shares = [(one - other) / one for one, other in zip(steps, without, strict=True)]
        cell["switch_share"] = quantile(shares, 0.5)
        cell["switch_share_iqr"] = Summary.of(shares).iqr
        cell["switch_timer_share"] = switch_s / quantile(steps, 0.5)
        cell["switch_s"] = switch_s / count
        cell["ok"] = count == 1 or min(quantile(shares, 0.5), switch_s / quantile(steps, 0.5)) <= SHARE
    return cell


def _floats(value: object) -> list[float]:
    assert isinstance(value, list), f"a list of seconds, not {value!r}"
    return [float(each) for each in value]


def flatness(cells: Sequence[Json], key: str) -> float | None:
    """How much larger the greatest is than the least, as a share of the least; None where one is missing."""
    values = [cell.get(key) for cell in cells]
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return max(numbers) / min(numbers) - 1 if numbers and len(numbers) == len(values) else None


def _result(options: ReplicasOptions, args: Mapping[str, object], cells: list[Json], remarks: list[str]) -> Json:
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
    return {
        "bench": "replicas",
        "args": dict(args),
        "ours": chosen["ours"],
        "replicas": chosen["replicas"],
        "switch_share": chosen.get("switch_share"),
        "switch_timer_share": chosen.get("switch_timer_share"),
        "memory_by_replicas": {str(cell["replicas"]): cell.get(key) for cell in cells},
        "memory_spread": spread,
        "samples_per_s_by_replicas": {str(cell["replicas"]): cell.get("samples_per_s") for cell in cells},
        "cells": cells,
        "machine": machine(),
        "ok": ok,
        "remarks": remarks,
    }
