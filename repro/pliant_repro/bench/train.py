"""`pliant bench train`: steps per second, ours beside plain PyTorch (one worker) and beside DDP on gloo (several)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.contest import Contender, Placement, Progress, Rules, Timings, check_choice, check_least
from pliant_repro.profiles import check_trained

PROGRAM = "pliant_repro.bench.training:opened"
"""Program that the workers of all training contests run."""
TARGETS = {"resnet18": 1.0, "transformer": 1.05}
"""Least speedup over DDP on one host; other models have no verdict."""
ALONE = 0.98
"""Least speedup of one worker over plain PyTorch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTask:
    """Model, data and settings that the ranks of one contender train with."""

    side: str
    """`plain` (sends nothing), `ddp`, `openmpi` or `pliant`."""
    num_workers: int
    replicas: int = 0
    """Replicas of the job; 0 means one per worker."""
    model: str = "resnet50"
    compute: str = "real"
    """`real`, `paced` (a profile at its default scale), or `scaling` (a profile of `bench.scaling`)."""
    speed: float = 1.0
    """With `scaling`: how much faster than a K80 the net is."""
    batch: int = 0
    size: int = 0
    device: str = "cpu"
    autocast: bool = False
    """Whether the forward pass runs in bfloat16 where torch's autocast does so."""
    compiled: bool = False
    """Whether the model is compiled by `torch.compile`."""
    scaler: bool = False
    """Whether a GradScaler scales the losses; autocast is float16 on a GPU then."""
    tamper: int = 0
    """After this many steps one bit of one parameter is flipped: a control that comparisons of digests must notice."""
    strict: bool = False
    """Whether every side pins the deterministic kernels that a job of ours pins. Ours does so in any case."""
    seed: int | None = None
    """Seed of replica 0's random generators after the model was built; replica r has seed + r. None: all have the same."""
    optimizer: str = "p3"
    lead: int = 3
    """Steps of a window that are not timed. In the first step after a pause no forward pass waits for parameters."""
    rendezvous: str = ""
    """Where the ranks of DDP meet: file://PATH or tcp://HOST:PORT."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    join: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `pliant.join`."""
    wrap: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `job.wrap`."""
    bucket_cap_mb: float = 25.0
    """Bucket size of Open MPI's sums, in MiB."""

    @property
    def num_replicas(self) -> int:
        return self.replicas or self.num_workers

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Options of `pliant bench train`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    num_workers: tuple[int, ...] = (1, 2, 4)
    model: str = "resnet18"
    batch: int = 0
    """Samples of a replica's step; 0 means the model's own choice."""
    size: int = 0
    """Pixels of an image's side, or words of a text; 0 means the model's own choice."""
    rules: Rules = field(default_factory=lambda: Rules(rounds=15, iterations=5, warmup=3))
    device: str = "cpu"
    start_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        check_trained(self.model)
        check_choice("--device", self.device, ("cpu", "cuda"))
        if not self.num_workers or not all(1 <= count <= 64 for count in self.num_workers):
            raise ConfigError(f"-np {','.join(map(str, self.num_workers))}: use numbers from 1 to 64, such as 1,2,4")
        check_least(
            ("--batch", self.batch, 0), ("--size", self.size, 0), ("--repeat", self.rules.rounds, 1),
            ("--steps", self.rules.iterations, 1),
        )  # fmt: skip


def run(options: TrainOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold a contest for each number of workers, and return the result."""
    cells, remarks = [], []
    for number, count in enumerate(options.num_workers):

        def tell(what: str, fraction: float, number: int = number, count: int = count) -> None:
            progress(f"{count} workers: {what}", (number + fraction) / len(options.num_workers))

        side = "pytorch" if count == 1 else "ddp_gloo"
        cell, said = make_cell(options, count, side, hold(options, count, [side], tell))
        cells.append(cell)
        remarks += said
    ok = all(bool(cell["ok"]) for cell in cells)
    return contest.form("train", args, ok, remarks, ours=cells[-1]["ours"], peers=cells[-1]["peers"], cells=cells)


def hold(
    options: TrainOptions, num_workers: int, sides: Sequence[str], progress: Progress, *, replicas: int = 0
) -> dict[str, Timings]:
    """Measure ours and the sides, interleaved; `replicas` is that of the job, one per worker by default.

    With more replicas than workers, a DDP side has one process per replica, as a user without pliant would.
    """
    replicas = replicas or num_workers
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        jobs = []
        for side in ("pliant", *sides):
            count = num_workers if side == "pliant" else 1 if side == "pytorch" else replicas
            jobs.append(cleanup.enter_context(_contender(options, side, count, replicas, folder)))
        contest.start_all(jobs, options.start_timeout_s, progress)
        return contest.hold(jobs, options.rules, progress=progress)


def _contender(options: TrainOptions, side: str, num_workers: int, replicas: int, folder: Path) -> Contender:
    from pliant_repro.zoo import network

    chosen = network(options.model)
    task = TrainingTask(
        side={"pytorch": "plain", "pliant": "pliant"}.get(side, "ddp"),
        num_workers=num_workers,
        replicas=replicas,
        model=options.model,
        optimizer=chosen.optimizer,
        batch=options.batch or chosen.batch,
        size=options.size or chosen.size,
        device=options.device,
        lead=1,
        rendezvous=f"file://{folder / side}.store",
    )
    strategy = "AUTO" if side == "pliant" and num_workers > 1 else ""
    placement = Placement(num_workers=num_workers, folder=folder)
    return placement.contender(side, PROGRAM, task.to_json(), strategy=strategy)


def make_cell(
    options: TrainOptions, num_workers: int, side: str, results: Mapping[str, Timings]
) -> tuple[Json, list[str]]:
    """Return the numbers for one number of workers, and remarks; `median_s` is the time of a step."""
    ours = results["pliant"]
    peer = per_step(contest.beside(results[side], ours))
    target = TARGETS.get(options.model)
    if target is not None and num_workers == 1:
        target = ALONE
    remarks = contest.failures(results)
    ok = contest.is_ok(ours)
    speedup = peer["speedup"]
    if target is not None and (not isinstance(speedup, float) or speedup < target):
        ok = False
        said = f"{speedup:.3f}x" if isinstance(speedup, float) else "no number"
        remarks.append(f"{num_workers} workers, {options.model}: {said} of {side}, to reach {target:g}x")
    numbers = {"ours": per_step(contest.measured(ours)), "peers": {side: peer}}
    return {"np": num_workers, "model": options.model, **numbers, "target_speedup": target, "ok": ok}, remarks


def per_step(values: Json) -> Json:
    """Return the numbers with steps per second, and without what only a collective has."""
    kept = {key: value for key, value in values.items() if key != "tensor_bytes_per_s"}
    median_s = kept["median_s"]
    return {**kept, "steps_per_s": 1 / median_s if isinstance(median_s, float) else None}
