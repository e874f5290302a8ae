"""The peer of `pliant bench fed --what simulate`: Flower's own simulation, with Ray, its FedAvg and its defaults.

This is a module of its own, because Ray's actors find the app by its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from importlib.metadata import version

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from pliant.errors import TrainError
from pliant.fed.config import FedConfig
from pliant.machine import Json
from pliant_repro.bench.fed_sides import task_and_module, train_client

JOB = "job"
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    orders = message.content.config_records["config"]
    task, module = task_and_module(str(orders[JOB]))
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    client, number = int(context.node_config["partition-id"]), int(str(orders["server-round"]))
    loss = train_client(task, module, client, number)
    metrics = MetricRecord({"num-examples": int(task.sizes[client]), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that records when each round begins, and when the last one is over."""

    def __init__(self, participants: int, clients: int) -> None:
        super().__init__(
            fraction_train=participants / clients,
            fraction_evaluate=0.0,
            min_train_nodes=participants,
            min_available_nodes=clients,
        )
        self.participants = participants
        self.at_s: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._check(len(messages))
        self.at_s.append(time.perf_counter())
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        came = list(replies)
        self._check(sum(not message.has_error() for message in came))
        found = super().aggregate_train(server_round, came)
        self.ended_s = time.perf_counter()
        return found

    def _check(self, count: int) -> None:
        if count != self.participants:
            raise TrainError(f"{count} of {self.participants} clients took part in a round of Flower's simulation")

    @property
    def seconds(self) -> list[float]:
        """Seconds of each round, from its beginning to that of the next one."""
        ends_s = [*self.at_s[1:], self.ended_s]
        return [end_s - begin_s for begin_s, end_s in zip(self.at_s, ends_s, strict=True)]


def measure(config: FedConfig, rounds: int, folder: str) -> Json:
    """Return the seconds of each round, and the versions; the first round starts the actors."""
    strategy = TimedFedAvg(config.participants, config.data.clients)
    text = config.model_dump_json()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        _, module = task_and_module(text)
        arrays = ArrayRecord(module.state_dict())
        strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord({JOB: text}))

    run_simulation(
        server_app,
        client_app,
        num_supernodes=config.data.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            # a machine without a network has no other address, and Ray would wait for one
            "init_args": {
                "num_cpus": len(os.sched_getaffinity(0)),
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
            },
        },
    )
    if len(strategy.at_s) != rounds:
        raise TrainError(f"Flower's simulation did {len(strategy.at_s)} of {rounds} rounds")
    return {"seconds": strategy.seconds, "version": version("flwr"), "ray": version("ray")}
