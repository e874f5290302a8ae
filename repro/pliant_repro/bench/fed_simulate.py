"""`pliant bench fed --what simulate`: clients per second, ours beside Flower's simulation and a bare loop.

All sides have the same network, samples, steps and cores. Each turn of a side is a process of its own with rounds that count and
one before them that does not; turns go ours, Flower, bare, ours, Flower, bare, ... `ours` is a server and one executor for each
core, as `pliant submit` starts them; `flower` is its Ray backend with one CPU for each client, so that it, too, uses every
core; `bare` is one process that trains one client after the other and does nothing else: on all cores it could do no more
than `cores` times as many. A client of the peers is the plainest loop that there is: no optimizer object, no loader.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro.contest import Progress, Summary, check_least, form, last_words, paired_ratios, quantile

if TYPE_CHECKING:
    from torch import nn

    from pliant.fed.config import FedConfig
    from pliant.fed.data.task import InMemory, Task

GOAL = 2.0
"""Goal for the ratio of clients per second to Flower."""
OURS, FLOWER, BARE = "ours", "flower", "bare"
PEERS = (FLOWER, BARE)
START_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Options of `pliant bench fed --what simulate`."""

    clients: int = 100
    participants: int = 20
    steps: int = 10
    batch_size: int = 20
    rounds: int = 15
    """Rounds of a turn that count."""
    turns: int = 4
    cores: int = 0
    """0 means all that this process may use."""
    batching: int | None = None
    """Clients trained at once; None means as the product measures it."""
    peers: str = "flower,bare"
    seed: int = 7
    timeout_s: float = 600.0
    """How long a turn may take."""

    def __post_init__(self) -> None:
        check_least(
            ("--clients", self.clients, 1), ("--pick", self.participants, 1), ("--steps", self.steps, 1),
            ("--batch-size", self.batch_size, 1), ("--rounds", self.rounds, 1), ("--repeat", self.turns, 1),
            ("--batching", self.batching or 0, 0),
        )  # fmt: skip
        if self.participants > self.clients:
            raise ConfigError(f"--pick {self.participants}: there are {self.clients} clients; pick at most so many")
        there = len(os.sched_getaffinity(0))
        if not 0 <= self.cores <= there:
            raise ConfigError(f"--cores {self.cores}: this process may use {there}; use at most so many")
        for name in self.others:
            if name not in PEERS:
                raise ConfigError(f"--peers {name!r}: use {', '.join(PEERS)}, or none")

    @property
    def others(self) -> list[str]:
        return [] if self.peers == "none" else [name.strip() for name in self.peers.split(",")]

    @property
    def quick(self) -> SimulateOptions:
        """Too few rounds to believe, but enough to see that all sides run."""
        return replace(self, rounds=2, turns=1)


def run(options: SimulateOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Let the sides take turns, and return the result."""
    options = replace(options, cores=options.cores or len(os.sched_getaffinity(0)))
    turns: dict[str, list[list[float]]] = {side: [] for side in (OURS, *options.others)}
    facts: dict[str, Json] = {}
    failed: dict[str, str] = {}
    for turn in range(options.turns):
        for place, side in enumerate(turns):
            progress(f"{side}, turn {turn + 1} of {options.turns}", (turn + place / len(turns)) / options.turns)
            if side in failed:
                continue
            try:
                found = _measure_turn(options, side)
            except LaunchError as error:
                if side == OURS:
                    raise
                failed[side] = str(error)
                continue
            turns[side].append(cast("list[float]", found.pop("seconds")))
            facts[side] = found
    progress("done", 1.0)
    return make_result(options, args, turns, facts, failed)


def make_result(
    options: SimulateOptions,
    args: Mapping[str, object],
    turns: Mapping[str, list[list[float]]],
    facts: Mapping[str, Json],
    failed: Mapping[str, str],
) -> Json:
    peers: Json = {}
    ratios: dict[str, float] = {}
    for side in options.others:
        if side in failed:
            peers[side] = {"clients_per_s": None, "failure": failed[side]}
            continue
        paired = paired_ratios(turns[side], turns[OURS])
        ratios[side] = quantile(paired, 0.5)
        spread = {"speedup": ratios[side], "speedup_least": min(paired), "speedup_most": max(paired)}
        peers[side] = {**_numbers(options, turns[side], facts[side]), **spread}
    return form(
        "fed simulate",
        args,
        FLOWER not in options.others or ratios.get(FLOWER, 0.0) >= GOAL,
        _remarks(options, facts, failed),
        ours=_numbers(options, turns[OURS], facts[OURS]),
        peers=peers,
        ratio=ratios.get(FLOWER),
        bound=None,
        goal={"ratio": GOAL},
    )


def _remarks(options: SimulateOptions, facts: Mapping[str, Json], failed: Mapping[str, str]) -> list[str]:
    found = [f"{side} is out: {why}" for side, why in failed.items()]
    if facts[OURS].get("data") != "fashion-mnist":
        found.append("Fashion-MNIST is not installed (apt install dataset-fashion-mnist): noise of its shape instead")
    if BARE in facts:
        found.append(f"bare is one process on one core; the others have {options.cores}")
    if options.turns < 3:
        found.append("too few turns to believe the spread; use --repeat 4 or more")
    return found


def _numbers(options: SimulateOptions, turns: list[list[float]], facts: Json) -> Json:
    seconds = [each for turn in turns for each in turn]
    rates = [options.participants / quantile(turn, 0.5) for turn in turns]
    overall = {"clients_per_s": options.participants / quantile(seconds, 0.5), "turns_clients_per_s": rates}
    return {**overall, **Summary.of(seconds).to_json(), **facts}


def _measure_turn(options: SimulateOptions, side: str) -> Json:
    """Measure one side once, in a process of its own. Everything that it has started is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pliant-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        task = json.dumps({"options": asdict(options), "side": side, "folder": folder})
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "FLWR_HOME": folder,
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        argv = [sys.executable, "-m", __name__, task]
        with log.open("wb") as file:
            process = subprocess.Popen(argv, stdout=file, stderr=file, env=environ, start_new_session=True)
        pidfd = os.pidfd_open(process.pid)
        try:
            in_time = bool(select.select([pidfd], [], [], options.timeout_s)[0])
        finally:
            os.close(pidfd)
            # Kill its whole session: what a failed side has started would otherwise go on.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not in_time:
            raise LaunchError(f"{side}: not done within {options.timeout_s:g} s; use fewer --rounds")
        if code != 0 or not answer.exists():
            raise LaunchError(f"{side}: exit code {code}; it said: {last_words(log.read_text(errors='replace'))}")
        found: Json = json.loads(answer.read_text())
        return found


# --- in the measuring process ---


def make_job(options: SimulateOptions) -> FedConfig:
    """Make a job of random clients, all alike, on Fashion-MNIST if Debian's package is installed, else on noise."""
    from pliant.fed.config import DataConfig, FedConfig, LocalConfig
    from pliant.fed.data.datasets import DEBIAN

    kind = "fashion-mnist" if DEBIAN.is_dir() else f"{__spec__.name if __spec__ else __name__}:lookalike"
    after_all = options.rounds + 2  # no round is tested or saved, and no more rounds are done than are measured
    return FedConfig(
        name="simulate",
        seed=options.seed,
        data=DataConfig(kind=kind, partition="iid", clients=options.clients, test_samples=1000),
        model="cnn",
        local=LocalConfig(steps=options.steps, batch_size=options.batch_size, lr=0.05),
        participants=options.participants,
        overcommit=1.0,
        selector="random",  # type: ignore[arg-type]
        devices="equal",
        rounds=after_all,
        evaluate_every=after_all,
        checkpoint_every=after_all,
        batching=options.batching,
        device="cpu",
    )


def lookalike() -> tuple[InMemory, InMemory]:
    """Make ten kinds of noise, 1 x 28 x 28."""
    import torch

    from pliant.fed.data.task import InMemory

    draw = torch.Generator().manual_seed(5)
    kinds = torch.randn(10, 1, 28, 28, generator=draw)
    parts = []
    for count in (60_000, 1_000):
        labels = torch.arange(count) % 10
        images = kinds[labels] + torch.randn(count, 1, 28, 28, generator=draw)
        parts.append(InMemory(images, labels, tuple("0123456789")))
    return parts[0], parts[1]


@cache
def task_and_module(job_json: str) -> tuple[Task, nn.Module]:
    """Return the task of a job and a module to train with; made once in each process."""
    from pliant.fed.config import FedConfig
    from pliant.fed.data.build import build_task

    task = build_task(FedConfig.model_validate_json(job_json))
    return task, task.model()


def train_client(task: Task, module: nn.Module, client: int, number: int) -> float:
    """Do one client's part of a round in `module`, and return its mean loss."""
    import numpy as np
    import torch

    from pliant.fed.local_steps import stream

    local = task.config.local
    samples = torch.from_numpy(np.asarray(stream(task, client, number, local.steps * local.batch_size)))
    parameters = list(module.parameters())
    total = 0.0
    for batch in torch.split(samples, local.batch_size):
        outputs = module(task.train.inputs(batch.numpy()))
        loss = torch.nn.functional.cross_entropy(outputs, task.train.labels[batch])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=local.lr)
        total += float(loss.detach())
    return total / local.steps


def measure(options: SimulateOptions, side: str, folder: str) -> Json:
    """Return the seconds of each round that counts, and facts about the side."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    config = make_job(options)
    measured = {OURS: _measure_ours, FLOWER: _measure_flower, BARE: _measure_bare}[side](options, config, folder)
    return {**measured, "seconds": cast("list[float]", measured["seconds"])[1:], "data": config.data.kind}


def _measure_ours(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
    from pliant.fed.data.build import build_task
    from pliant.fed.rounds.loop import FederatedLoop
    from pliant.fed.rounds.storage import JobRecorder
    from pliant.fed.workers import coordinator_with_workers

    task = build_task(config)
    with coordinator_with_workers(config, options.cores, log=Path(folder) / "workers.log") as pool:
        pool.wait_for(options.cores, START_S)
        loop = FederatedLoop(config, task, pool, JobRecorder())
        loop.start()
        seconds = []
        for _ in range(options.rounds + 1):
            begun_s = time.perf_counter()
            done = loop.step()
            seconds.append(time.perf_counter() - begun_s)
            if len(done.aggregated) != options.participants:
                raise LaunchError(f"{len(done.aggregated)} of {options.participants} clients took part in a round")
        return {"seconds": seconds, "batching": loop.batching, "executors": options.cores}


def _measure_flower(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
    from importlib.metadata import version

    try:
        from pliant_repro.bench import fed_flower
    except ImportError as error:
        raise ConfigError(f"Flower's simulation is not installed ({error}): pip install 'pliant[flower]'") from None
    seconds = fed_flower.measure(config, rounds=options.rounds + 1, cores=options.cores, folder=folder)
    return {"seconds": seconds, "version": version("flwr"), "ray": version("ray")}


def _measure_bare(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
    import torch

    torch.set_num_threads(1)
    task, module = task_and_module(config.model_dump_json())
    start = {name: each.clone() for name, each in module.state_dict().items()}
    seconds = []
    for number in range(1, options.rounds + 2):
        begun_s = time.perf_counter()
        for client in range(options.participants):
            module.load_state_dict(start)
            train_client(task, module, client, number)
        seconds.append(time.perf_counter() - begun_s)
    return {"seconds": seconds}


def main() -> None:
    task = json.loads(sys.argv[1])
    found = measure(SimulateOptions(**task["options"]), task["side"], task["folder"])
    Path(task["folder"], "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
