"""A Flower federation in one process: a grid whose nodes run a ClientApp when their answer is due. And what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from squares.client_app import trained
from squares.server_app import BUFFERS, initial

from pliant.fed.aggregation import make_aggregator
from pliant.fed.flower.strategy import ArrayLayout
from pliant.fed.work import Update

NEVER = 1 << 30


@dataclass
class Sent:
    message: Message
    looks: int
    """So often it is asked for in vain."""


@dataclass
class Loopback(Grid):
    app: ClientApp
    run_config: dict[str, Any] = field(default_factory=dict)
    looks: Callable[[int, int], int] = lambda client, number: 0
    """How often an answer of a client in a round is asked for in vain."""
    raises: Callable[[int, int], bool] = lambda client, number: False
    nodes: dict[int, tuple[int, str]] = field(default_factory=dict)
    """The client behind each node, and since when."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(round, client) of every message to train."""
    sent: dict[str, Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # what the process of a ServerApp is told when it starts; messages carry it
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def join(self, client: int, node_id: int | None = None, since: str = "1") -> None:
        self.nodes[1000 - client if node_id is None else node_id] = client, since

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=since) for node, (_, since) in self.nodes.items()]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            client, number = self.nodes[message.metadata.dst_node_id][0], int(message.metadata.group_id)
            training = message.metadata.message_type == MessageType.TRAIN
            if training:
                self.asked.append((number, client))
            self.sent[ids[-1]] = Sent(message, self.looks(client, number) if training else 0)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for each in list(message_ids):
            sent = self.sent[each]
            sent.looks -= 1
            if sent.looks < 0:
                found.append(self._answer(self.sent.pop(each).message))
        return found[::-1]

    def _answer(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        client = self.nodes[node_id][0]
        if message.metadata.message_type == MessageType.TRAIN and self.raises(client, int(message.metadata.group_id)):
            return Message(Error(code=0, reason="out of memory"), reply_to=message)
        context = Context(0, node_id, {"partition-id": client}, RecordDict(), self.run_config)
        try:
            return self.app(message, context)
        except Exception as error:  # as a SuperNode does: whatever goes wrong becomes an answer
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    # Flower's own runtime uses these three; a strategy never does, and a test must see it if ours did.

    def set_run(self, run: object) -> None:
        raise AssertionError("a strategy sets no run")

    @property
    def run(self) -> Any:
        raise AssertionError("a strategy asks for no run")

    def create_message(self, *given: Any, **more: Any) -> Message:
        raise AssertionError("a strategy makes messages itself: this way is deprecated")


def rounds_in(folder: Path) -> list[dict[str, Any]]:
    """Those that are done; none while there is no record yet."""
    record = folder / "record.jsonl"
    facts = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return [fact for fact in facts if fact["kind"] == "round"]


def same(ours: ArrayRecord, theirs: ArrayRecord) -> bool:
    return list(ours) == list(theirs) and all(
        torch.equal(torch.from_numpy(np.array(ours[name].numpy())), torch.from_numpy(np.array(theirs[name].numpy())))
        for name in ours
    )


def by_hand(rounds: list[dict[str, Any]], kind: str = "fed-avg") -> ArrayRecord:
    """The model that these rounds make, by a client's arithmetic and an aggregator alone."""
    arrays, folds = initial(), make_aggregator(kind, {})
    layout = ArrayLayout.of(arrays, BUFFERS)
    for each in rounds:
        model = layout.weights(arrays)
        updates = []
        for client in each["aggregated"]:
            new, _ = trained(client, each["round"], {name: array.numpy() for name, array in arrays.items()})
            record = ArrayRecord({name: Array(np.asarray(value)) for name, value in new.items()})
            updates.append(Update(client, model.change_to(layout.weights(record)), 20.0 + client))
        arrays = layout.arrays(folds.aggregate(model, updates))
    return arrays
