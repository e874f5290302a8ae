"""Oort at its largest: rounds of 1,300 participants, over-committed to 1,690, from several thousand synthetic clients.

The paper ran as many on 68 GPUs. The claim here is that such rounds run, on whatever this machine is: every round has its
1,300 updates, accuracy rises, and memory does not grow with the round's size, because updates are folded as they come.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pliant.child import die_with
from pliant.cli import plotting
from pliant.fed.config import DataConfig, FedConfig, LocalConfig, NamedOptions
from pliant.fed.history import History
from pliant.machine import Json
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.oort import federated

NAME = "oort-1300"
PARTICIPANTS, OVERCOMMIT = 1300, 1.3
BATCHING = 26
"""Clients at once; 1,300 are 50 such units."""
MOST_MB = 2000
"""Of the process that simulates it; its data take 0.2 GB, and 1,300 updates kept would take 0.24."""
PAPER = {
    "participants": "up to 1,300 in a round, on 68 P100",
    "hardware": "68 GPUs, at most 20 clients on each at a time",
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The job, and what it cost this machine."""

    history: History
    took_s: float
    """Of the rounds and their tests; reading the data is not in it."""
    peak_mb: float
    """Of the process that held the job."""


def config_of(options: Options, devices: str) -> FedConfig:
    return FedConfig(
        name=NAME,
        # 60,000 images for 6,000 clients: about 10 each, so that batches are small, too
        data=DataConfig(clients=6000, partition="dirichlet", alpha=1.0),
        model="mlp" if options.quick else "cnn",
        local=LocalConfig(steps=2 if options.quick else 10, batch_size=10, lr=0.1),
        participants=PARTICIPANTS,
        overcommit=OVERCOMMIT,
        rounds=options.choose_steps(2, 6, 100),
        selector=NamedOptions(kind="oort"),
        devices=devices,
        evaluate_every=1,
        batching=BATCHING,
        device="cuda" if options.where == "cuda" else "cpu",
    )


def run(options: Options) -> Json:
    devices, said = federated.devices(options)
    config = config_of(options, devices)
    options.say(f"{config.rounds} rounds of {config.participants} of {config.invited} invited clients; {said}")
    # A process of its own: what this one has needed for other figures is not the job's.
    with multiprocessing.get_context("spawn").Pool(1, die_with, (os.getpid(),)) as pool:
        ran = pool.apply(measured, (config,))
    return result_of(ran, config, options, [said])


def measured(config: FedConfig) -> Ran:
    from pliant.fed.data.build import build_task
    from pliant.fed.rounds.loop import FederatedLoop
    from pliant.fed.rounds.storage import JobRecorder
    from pliant.fed.trainer import InProcess

    task = build_task(config)
    loop = FederatedLoop(config, task, InProcess(task, config.device), JobRecorder())
    loop.start()
    begun_s = time.perf_counter()
    history = loop.run()
    took_s = time.perf_counter() - begun_s
    return Ran(history, took_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def result_of(ran: Ran, config: FedConfig, options: Options, remarks: Sequence[str]) -> Json:
    updates = sum(len(each.aggregated) for each in ran.history.rounds)
    cells: list[Json] = [
        {
            "round": each.round, "invited": len(each.invited), "aggregated": len(each.aggregated), "cut": len(each.cut),
            "duration_s": each.duration_s, "clock_s": each.clock_s, "loss": each.loss, "accuracy": point.accuracy,
        }
        for each, point in zip(ran.history.rounds, ran.history.points, strict=True)
    ]  # fmt: skip
    ours = {
        "median_s": ran.took_s / len(cells), "clients_per_s": updates / ran.took_s, "peak_mb": ran.peak_mb,
        "accuracy": cells[-1]["accuracy"], "clock_s": cells[-1]["clock_s"], "took_s": ran.took_s,
    }  # fmt: skip
    said = [
        *remarks,
        f"{config.model}, {config.data.clients} clients of Fashion-MNIST, Dirichlet(1), {config.local.steps} steps of "
        f"{config.local.batch_size} samples, {config.batching} clients at once, in one process; tests are in the time",
        f"{ours['clients_per_s']:.1f} clients/s, at most {ran.peak_mb:.0f} MB",
    ]
    return form(NAME, options, ours=ours, paper=PAPER, cells=cells, complaints=judge(cells, ran), remarks=said)


def judge(cells: Sequence[Json], ran: Ran) -> list[str]:
    wrong = []
    for cell in cast("Sequence[dict[str, Any]]", cells):
        if (cell["invited"], cell["aggregated"]) != (int(PARTICIPANTS * OVERCOMMIT), PARTICIPANTS):
            wrong.append(f"round {cell['round']}: {cell['aggregated']} of {cell['invited']} clients count")
    first, last = cast(float, cells[0]["accuracy"]), cast(float, cells[-1]["accuracy"])
    if not last > max(first, 0.15):
        wrong.append(f"accuracy {first:.1%} after the first round, {last:.1%} after the last: it does not rise")
    if ran.peak_mb > MOST_MB:
        wrong.append(f"{ran.peak_mb:.0f} MB of memory, more than {MOST_MB}")
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    for cell in cast("list[dict[str, Any]]", result["cells"]):
        rows.append(
            (
                str(cell["round"]), str(cell["invited"]), str(cell["aggregated"]), str(cell["cut"]),
                f"{cell['duration_s']:.0f} s", f"{cell['loss']:.3f}", f"{cell['accuracy']:.2%}",
            )
        )  # fmt: skip
    columns = ("round", "invited", "counted", "cut", "virtual time", "loss", "accuracy")
    ours = cast("dict[str, float]", result["ours"])
    title = f"{ours['clients_per_s']:.1f} clients/s, {ours['median_s']:.1f} s for a round, {ours['peak_mb']:.0f} MB"
    return TableRows(title, columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cast("list[dict[str, Any]]", result["cells"])
    caption = "1,300 participants of 1,690 invited in each round. Paper: as many, on 68 P100."
    with plotting.picture(path, "Rounds of 1,300 participants", caption, 2) as [left, right]:
        rounds = [cell["round"] for cell in cells]
        left.plot(rounds, [cell["accuracy"] for cell in cells], "o-", color="tab:blue")
        left.set(xlabel="round", ylabel="accuracy")
        right.bar(rounds, [cell["duration_s"] for cell in cells], color="tab:blue")
        right.set(xlabel="round", ylabel="s on the virtual clock")
