"""Rounds by our strategy, as a run's config says."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from pliant.fed import FedConfig
from pliant.fed.flower import Guided

app = ServerApp()
BUFFERS = ("mean",)


def initial() -> ArrayRecord:
    return ArrayRecord(
        {
            "weight": Array(np.zeros(6, np.float32)),
            "mean": Array(np.zeros(6, np.float32)),
            "seen": Array(np.array(0, np.int64)),
        }
    )


def config_of(run: dict[str, object], **more: object) -> FedConfig:
    settings = {"name": "squares", "seed": 3, "selector": "oort", **more}
    return FedConfig(**settings, **{name: run[name] for name in ("rounds", "participants", "overcommit")})


@app.main()
def main(grid: Grid, context: Context) -> None:
    logging.basicConfig(level=logging.INFO)
    run = context.run_config
    strategy = Guided(config_of(run), folder=Path(str(run["folder"])), buffers=BUFFERS, least=int(run["least"]))
    strategy.start(grid, initial())
