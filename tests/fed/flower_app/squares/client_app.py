"""Least squares in NumPy, so that a client's process starts fast."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pliant.fed.flower import introduction, metrics

app = ClientApp()
WIDTH = 6


def samples_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(client)
    inputs = draw.standard_normal((20 + client, WIDTH)).astype(np.float32)
    return inputs, (inputs @ np.arange(WIDTH, dtype=np.float32) + client).astype(np.float32)


def trained(client: int, number: int, arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The client's new arrays, and the losses of its samples before."""
    inputs, wanted = samples_of(client)
    weight = arrays["weight"].copy()
    losses = np.square(inputs @ weight - wanted)
    for _ in range(3):
        weight -= (0.1 * inputs.T @ (inputs @ weight - wanted) / len(wanted)).astype(np.float32)
    return {"weight": weight, "mean": (arrays["mean"] + inputs.mean(0)) / 2, "seen": arrays["seen"] + number}, losses


@app.query()
def who(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    return Message(introduction(context, samples=20 + client, duration_s=1.0 + client), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    client, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    if gates := str(context.run_config.get("gates", "")):
        wait_at(Path(gates), f"{client}-{number}")
    given = {name: array.numpy() for name, array in message.content["arrays"].items()}
    arrays, losses = trained(client, number, given)
    record = ArrayRecord({name: Array(np.asarray(each)) for name, each in arrays.items()})
    told = metrics(losses, samples=len(losses), duration_s=2.0 + client)
    return Message(RecordDict({"arrays": record, "metrics": told}), reply_to=message)


def wait_at(gates: Path, name: str) -> None:
    """Where a gate of this name is shut, say that we are there, and wait until it is gone."""
    deadline_s = time.monotonic() + 100
    while (gates / f"shut-{name}").exists() and time.monotonic() < deadline_s:
        (gates / f"here-{name}").write_text(str(os.getpid()))
        time.sleep(0.05)
