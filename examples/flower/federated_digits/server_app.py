"""The server app: runs the rounds and tests the model."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from federated_digits.task import accuracy, make_model
from pliant.fed import FedConfig
from pliant.fed.flower import Guided

app = ServerApp()
log = logging.getLogger("pliant")


@app.main()
def main(grid: Grid, context: Context) -> None:
    log.addHandler(logging.StreamHandler())  # a line for each round
    log.setLevel(logging.INFO)
    run = context.run_config
    config = FedConfig(
        name="federated-digits",
        seed=run["seed"],
        rounds=run["rounds"],
        participants=run["participants"],
        overcommit=run["overcommit"],
        selector=run["selector"],
        aggregator=run["aggregator"],
        local={"lr": run["lr"], "steps": run["steps"], "batch_size": run["batch-size"]},
        evaluate_every=1,
    )
    model = make_model(config.seed)

    def test(number: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        right, loss = accuracy(model)
        return MetricRecord({"accuracy": right, "loss": loss})

    strategy = Guided(config, folder=Path(run["folder"]) if run["folder"] else None, least=run["least"])
    strategy.start(grid, ArrayRecord(model.state_dict()), evaluate_fn=test)
