"""`pliant bench fed --what simulate`: clients per second, ours beside Flower's simulation and a bare loop.

The same network, samples, steps and cores on all sides. Each turn of a side is a process of its own with rounds that count and
one before them that does not; turns go ours, Flower, bare, ours, Flower, bare, ... `ours` are a server and one executor for
each core, as `pliant submit` starts them; `flower` its Ray backend with one CPU for each client, so that it, too, uses every
core; `bare` is one process that trains one client after the other and does nothing else: on all cores it could do no more than
`cores` times as many.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench.contest import last_words
from pliant_repro.bench.stats import Summary, paired_ratios, quantile

if TYPE_CHECKING:
    from pliant.fed.config import FedConfig

Progress = Callable[[str, float], None]
GOAL = 2.0
"""Times as many clients per second as Flower."""
OURS, FLOWER, BARE = "ours", "flower", "bare"
PEERS = (FLOWER, BARE)
START_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """What `pliant bench fed --what simulate` was asked for."""

    clients: int = 100
    participants: int = 20
    steps: int = 10
    batch_size: int = 20
    rounds: int = 15
    """Of a turn, that count."""
    turns: int = 4
    cores: int = 0
    """0: all that this process may use."""
    batching: int | None = None
    """Clients trained at once; None: as the product measures it."""
    peers: str = "flower,bare"
    seed: int = 7
    timeout_s: float = 600.0
    """Of a turn."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--clients", self.clients), ("--pick", self.participants), ("--steps", self.steps),
            ("--batch-size", self.batch_size), ("--rounds", self.rounds), ("--repeat", self.turns),
        ):  # fmt: skip
            if value < 1:
                raise ConfigError(f"{flag} {value}: use 1 or more")
        if self.participants > self.clients:
            raise ConfigError(f"--pick {self.participants}: there are {self.clients} clients; pick at most so many")
        there = len(os.sched_getaffinity(0))
        if not 0 <= self.cores <= there:
            raise ConfigError(f"--cores {self.cores}: this process may use {there}; use at most so many")
        if self.batching is not None and self.batching < 0:
            raise ConfigError(f"--batching {self.batching}: use 0 or more")
        for name in self.others:
            if name not in PEERS:
                raise ConfigError(f"--peers {name!r}: use {', '.join(PEERS)}, or none")

    @property
    def others(self) -> list[str]:
        return [] if self.peers == "none" else [name.strip() for name in self.peers.split(",")]

    @property
    def quick(self) -> SimulateOptions:
        """Too few rounds to believe; enough to see that all sides run."""
        return replace(self, rounds=2, turns=1)


def run(options: SimulateOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Let the sides take turns; the result in the one form of all benches."""
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
                found = _turn(options, side)
            except LaunchError as error:
                if side == OURS:
                    raise
                failed[side] = str(error)
                continue
            turns[side].append(cast("list[float]", found.pop("seconds")))
            facts[side] = found
    progress("done", 1.0)
    return _result(options, args, turns, facts, failed)


def _result(
    options: SimulateOptions,
    args: Mapping[str, object],
    turns: Mapping[str, list[list[float]]],
    facts: Mapping[str, Json],
    failed: Mapping[str, str],
) -> Json:
    ours = _numbers(options, turns[OURS], facts[OURS])
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
    return {
        "bench": "fed simulate",
        "args": dict(args),
        "ours": ours,
        "peers": peers,
        "ratio": ratios.get(FLOWER),
        "bound": None,
        "goal": {"ratio": GOAL},
        "machine": machine(),
        "ok": FLOWER not in options.others or ratios.get(FLOWER, 0.0) >= GOAL,
        "remarks": _remarks(options, facts, failed),
    }


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
    return {
        "clients_per_s": options.participants / quantile(seconds, 0.5),
        "turns_clients_per_s": rates,
        **Summary.of(seconds).to_json(),
        **facts,
    }


def _turn(options: SimulateOptions, side: str) -> Json:
    """One process that measures one side once. Everything that it has started is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pliant-") as folder:
        answer = Path(folder) / "answer.json"
        task = json.dumps({**asdict(options), "side": side, "folder": folder})
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "FLWR_HOME": folder,
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        argv = [sys.executable, "-m", "pliant_repro.bench.fed.simulate", task]
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(argv, stdout=file, stderr=file, env=environ, start_new_session=True)
        try:
            in_time = _ends_within(process, options.timeout_s)
        finally:
            # its session with it: what a failed side has started would else go on; not reaped yet, the number is ours
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not in_time:
            raise LaunchError(f"{side}: not done within {options.timeout_s:g} s; use fewer --rounds")
        if code != 0 or not answer.exists():
            raise LaunchError(f"{side}: exit code {code}; it said: {last_words(log.read_text(errors='replace'))}")
        found: Json = json.loads(answer.read_text())
        return found


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    pidfd = os.pidfd_open(process.pid)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


# --- in the process of a side ---


def measure(options: SimulateOptions, side: str, folder: str) -> Json:
    """Seconds of each round that counts."""
    from pliant_repro.bench.fed import work

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    config = work.job(
        clients=options.clients, participants=options.participants, steps=options.steps, batch_size=options.batch_size,
        rounds=options.rounds + 1, batching=options.batching, seed=options.seed,
    )  # fmt: skip
    measured = {OURS: _ours, FLOWER: _flower, BARE: _bare}[side](options, config, folder)
    return {**measured, "seconds": cast("list[float]", measured["seconds"])[1:], "data": config.data.kind}


def _ours(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
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


def _flower(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
    from importlib.metadata import version

    try:
        from pliant_repro.bench.fed import flower
    except ImportError as error:
        raise ConfigError(f"Flower's simulation is not installed ({error}): pip install 'pliant[flower]'") from None
    seconds = flower.measure(config, rounds=options.rounds + 1, cores=options.cores, folder=folder)
    return {"seconds": seconds, "version": version("flwr"), "ray": version("ray")}


def _bare(options: SimulateOptions, config: FedConfig, folder: str) -> Json:
    import torch

    from pliant_repro.bench.fed import work

    torch.set_num_threads(1)
    task, module = work.known(config.model_dump_json())
    start = {name: each.clone() for name, each in module.state_dict().items()}
    seconds = []
    for number in range(1, options.rounds + 2):
        begun_s = time.perf_counter()
        for client in range(options.participants):
            module.load_state_dict(start)
            work.train(task, module, client, number)
        seconds.append(time.perf_counter() - begun_s)
    return {"seconds": seconds}


def main() -> None:
    task = json.loads(sys.argv[1])
    side, folder = task.pop("side"), task.pop("folder")
    found = measure(SimulateOptions(**task), side, folder)
    Path(folder, "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
