"""`pliant bench train`: steps per second, ours beside plain PyTorch (one worker) and beside DDP on gloo (several).

All sides live at the same time and take turns of a few steps; whoever waits is blocked, not spinning.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench import contenders, report
from pliant_repro.bench.contenders import Ground
from pliant_repro.bench.contest import Entry, Job, Rules, Series, hold
from pliant_repro.profiles import check_trained

Progress = Callable[[str, float], None]

DDP_PEERS = ("ddp_gloo", "ddp_gloo_views")
TARGETS = {"resnet18": 1.0, "transformer": 1.05}
"""Least speedup over DDP on one host; there is no verdict on other models."""
ALONE = 0.98
"""Least speedup of one worker over plain PyTorch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What `pliant bench train` was asked for.

    Raises (when made):
        ConfigError: a value that cannot be, with those that can.
    """

    num_workers: tuple[int, ...] = (1, 2, 4)
    model: str = "resnet18"
    peers: tuple[str, ...] = ("ddp_gloo",)
    batch: int = 0
    """Of each replica; 0: the model's own choice."""
    size: int = 0
    """Pixels of an image's side, or words of a text; 0: the model's own choice."""
    rules: Rules = field(default_factory=lambda: Rules(rounds=15, iterations=5, warmup=3))
    device: str = "cpu"
    start_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        check_trained(self.model)
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: use cpu or cuda")
        for peer in self.peers:
            if peer not in DDP_PEERS:
                raise ConfigError(f"--peers {peer!r}: use one of {', '.join(DDP_PEERS)}")
        if not self.num_workers or not all(1 <= count <= 64 for count in self.num_workers):
            raise ConfigError(f"-np {','.join(map(str, self.num_workers))}: use numbers from 1 to 64, such as 1,2,4")
        for flag, value, least in (
            ("--batch", self.batch, 0),
            ("--size", self.size, 0),
            ("--repeat", self.rules.rounds, 1),
            ("--steps", self.rules.iterations, 1),
            ("--warmup", self.rules.warmup, 1),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: use {least} or more")


def run(options: TrainOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold a contest for each number of workers; the result in the one form of all benches."""
    cells = []
    for number, count in enumerate(options.num_workers):

        def tell(what: str, fraction: float, number: int = number, count: int = count) -> None:
            progress(f"{count} workers: {what}", (number + fraction) / len(options.num_workers))

        sides = ["pytorch"] if count == 1 else list(options.peers)
        results = contest(options, count, sides, tell)
        cells.append(cell_of(options, count, sides, results))
    remarks = [remark for cell in cells for remark in _strings(cell.pop("remarks"))]
    last = cells[-1]
    return {
        "bench": "train",
        "args": dict(args),
        "ours": last["ours"],
        "peers": last["peers"],
        "cells": cells,
        "ok": all(bool(cell["ok"]) for cell in cells),
        "machine": machine(),
        "remarks": remarks,
    }


def contest(
    options: TrainOptions, num_workers: int, sides: Sequence[str], progress: Progress, *, replicas: int = 0
) -> dict[str, Series]:
    """Ours and the sides, interleaved; `replicas`: of the job, one per worker by default.

    With more replicas than workers, a DDP side has one process per replica, as a user without pliant would.
    """
    replicas = replicas or num_workers
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        jobs = []
        for side in ("pliant", *sides):
            count = num_workers if side == "pliant" else 1 if side == "pytorch" else replicas
            jobs.append(cleanup.enter_context(_job(options, side, count, replicas, folder)).start())
        for number, job in enumerate(jobs):
            progress(f"starting {job.name}", number / len(jobs))
            with contextlib.suppress(LaunchError):  # the job keeps its failure, and gives it at its first turn
                job.ready(options.start_timeout_s)
        return hold([Entry(job.name, job) for job in jobs], options.rules, progress=progress)


def _job(options: TrainOptions, side: str, num_workers: int, replicas: int, folder: Path) -> Job:
    from pliant_repro.bench.training import TrainingTask
    from pliant_repro.zoo import network  # loads torch

    chosen = network(options.model)
    path = folder / f"{side}.json"
    TrainingTask(
        side=side,
        num_workers=num_workers,
        replicas=replicas,
        control=str(folder / f"{side}.sock"),
        store=str(folder / f"{side}.store"),
        model=options.model,
        optimizer=chosen.optimizer,
        batch=options.batch or chosen.batch,
        size=options.size or chosen.size,
        device=options.device,
    ).write(path)
    ground = Ground(num_workers=num_workers, sizes=(), folder=folder)
    environs: Sequence[Mapping[str, str]] = [{}] * num_workers
    if side == "pliant" and num_workers > 1:
        environs, sockets = contenders.identities(ground, "AUTO")
        return contenders.processes(ground, side, "pliant_repro.bench.training", path, environs, sockets)
    return contenders.processes(ground, side, "pliant_repro.bench.training", path, environs)


def cell_of(options: TrainOptions, num_workers: int, sides: Sequence[str], results: Mapping[str, Series]) -> Json:
    """The numbers for one number of workers; `median_s` is the time of a step."""
    ours = results["pliant"]
    peers = {side: per_step(report.beside(results[side], ours, 0)) for side in sides}
    target = TARGETS.get(options.model)
    if target is not None and num_workers == 1:
        target = ALONE
    remarks = report.failures(results)
    ok = report.is_ok(ours)
    for side in sides:
        speedup = peers[side]["speedup"]
        judged = target is not None and side in ("pytorch", "ddp_gloo")
        if judged and (not isinstance(speedup, float) or speedup < (target or 0.0)):
            ok = False
            said = f"{speedup:.3f}x" if isinstance(speedup, float) else "no number"
            remarks.append(f"{num_workers} workers, {options.model}: {said} of {side}, to reach {target:g}x")
    return {
        "np": num_workers,
        "model": options.model,
        "ours": per_step(report.measured(ours, 0)),
        "peers": peers,
        "target_speedup": target,
        "ok": ok,
        "remarks": remarks,
    }


def per_step(values: Json) -> Json:
    """With steps per second, and without what only a collective has."""
    kept = {key: value for key, value in values.items() if key != "tensor_bytes_per_s"}
    median_s = kept["median_s"]
    kept["steps_per_s"] = 1 / median_s if isinstance(median_s, float) else None
    return kept


def _strings(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """`1,2,4` as numbers.

    Raises:
        ConfigError: another form.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"{flag} {text!r}: use numbers such as 1,2,4")
    return tuple(dict.fromkeys(int(word) for word in words))
