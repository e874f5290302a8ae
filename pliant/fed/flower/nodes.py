"""Which clients of a Flower federation can be reached, through which node, and which of them are busy.

Nodes come and go, and a SuperNode that is restarted may have another id. A client is identified by its introduction
(`client.introduction`), or by its node. If two nodes claim to be the same client, the last one counts.

A client that was cut from a round still trains. It is not invited again until it has answered, its node is gone or was
restarted, or the time for its answer is over.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from pliant.fed.flower.client import CLIENT, DURATION, SAMPLES, number_in
from pliant.fed.selection.base import PLAUSIBLE, PopulationSelector

log = logging.getLogger(__name__)
SAID_EVERY_S = 10.0
STRANGERS = 1 << 40
"""Clients that are identified by their nodes have numbers from here on."""


@dataclass(frozen=True, slots=True)
class Order:
    """A message that waits for its answer."""

    client: int
    node_id: int
    round_number: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    order: Order
    message: Message
    took_s: float
    """Seconds from sending to arrival, as the server measures."""


class Nodes:
    def __init__(self, selector: PopulationSelector, *, introduced: bool, timeout_s: float) -> None:
        """Without introductions, each node is a client of its own."""
        self._selector, self._introduced, self._timeout_s = selector, introduced, timeout_s
        self._since: dict[int, str] = {}
        """Connected nodes, and since when; a restarted node counts as another."""
        self._client: dict[int, int] = {}
        self._node: dict[int, int] = {}
        self._asked: dict[str, int] = {}
        """Introductions that are under way, with their nodes."""
        self._orders: dict[str, Order] = {}
        self._by_node: dict[int, int] = {}

    @property
    def idle(self) -> list[int]:
        """Return the clients that could be invited now, in ascending order."""
        busy = {order.client for order in self._orders.values()}
        return sorted(client for client in self._node if client not in busy)

    def node_of(self, client: int) -> int:
        return self._node[client]

    def client_of(self, node_id: int) -> int | None:
        return self._client.get(node_id)

    def look(self, grid: Grid) -> list[Answer]:
        """Look which nodes are connected, and ask new ones for introductions; return answers that have come."""
        there = {info.node_id: info.last_activated_at for info in grid.get_nodes()}
        for node_id in [each for each, since in self._since.items() if there.get(each) != since]:
            self._forget(node_id)
        new = sorted(set(there) - set(self._since))
        self._since.update((node_id, there[node_id]) for node_id in new)
        if self._introduced and new:
            questions = [self.message(RecordDict(), node_id, MessageType.QUERY, 0) for node_id in new]
            for node_id, message_id in zip(new, grid.push_messages(questions), strict=True):
                self._asked[message_id] = node_id
        elif new:
            for node_id in new:
                self._assign_client(node_id, self._number_by_node(node_id))
        return self.collect(grid)

    def wait(self, grid: Grid, least: int, *, patience_s: float, poll_s: float) -> list[int]:
        """Return idle clients as soon as there are `least`; after `patience_s` since there was one, fewer will do."""
        since_s = said_s = -math.inf
        while True:
            self.note_late_answers(self.look(grid))
            idle, now_s = self.idle, time.monotonic()
            if len(idle) >= least:
                return idle
            if not idle:
                since_s = -math.inf
            elif since_s < 0:
                since_s = now_s
            elif now_s - since_s >= patience_s:
                log.warning("%d of %d clients are there: the round begins without the others", len(idle), least)
                return idle
            if now_s - said_s >= SAID_EVERY_S:
                log.info("waiting for clients: %d of %d are there and idle", len(idle), least)
                said_s = now_s
            time.sleep(poll_s)

    def send(self, grid: Grid, messages: Sequence[Message], round_number: int) -> None:
        """Send messages to the nodes of clients."""
        now_s = time.monotonic()
        nodes = [message.metadata.dst_node_id for message in messages]
        for node_id, message_id in zip(nodes, grid.push_messages(messages), strict=True):
            if message_id:
                self._orders[message_id] = Order(self._client[node_id], node_id, round_number, now_s)
            else:  # the SuperLink does not know the node any more
                self._forget(node_id)

    def collect(self, grid: Grid) -> list[Answer]:
        """Return answers that have come, in the order of clients."""
        waiting = [*self._asked, *self._orders]
        if not waiting:
            return []
        now_s = time.monotonic()
        found: list[Answer] = []
        for message in grid.pull_messages(waiting):
            answered = message.metadata.reply_to_message_id
            if (node_id := self._asked.pop(answered, None)) is not None:
                self._introduce(node_id, message)
            elif (order := self._orders.pop(answered, None)) is not None:
                found.append(Answer(order, message, now_s - order.sent_s))
        for message_id, order in list(self._orders.items()):
            if now_s - order.sent_s > self._timeout_s:
                del self._orders[message_id]
        return sorted(found, key=lambda answer: answer.order.client)

    def note_late_answers(self, answers: Iterable[Answer]) -> None:
        """Take note of answers to rounds that are over: their durations are still useful."""
        for answer in answers:
            if not answer.message.has_error():
                took_s = duration_s(answer.message, answer.took_s)
                if PLAUSIBLE[0] <= took_s <= PLAUSIBLE[1]:
                    self._selector.register([answer.order.client], duration_s=[took_s])

    def waiting(self, round_number: int) -> set[int]:
        """Return the clients whose answers to this round have not come."""
        return {order.client for order in self._orders.values() if order.round_number == round_number}

    def message(self, content: RecordDict, node_id: int, kind: str, round_number: int) -> Message:
        return Message(content, node_id, kind, ttl=self._timeout_s, group_id=str(round_number))

    def _introduce(self, node_id: int, message: Message) -> None:
        if node_id not in self._since:
            return
        if message.has_error():
            log.warning("node %d does not introduce itself (%s): known by its node", node_id, message.error.reason)
            self._assign_client(node_id, self._number_by_node(node_id))
            return
        number = number_in(message.content, CLIENT)
        if not (0 <= number < STRANGERS and number.is_integer()):
            log.warning("node %d says that it is client %s: not let in; use whole numbers from 0", node_id, number)
            return
        self._assign_client(node_id, int(number), message.content)

    def _assign_client(self, node_id: int, client: int, told: RecordDict | None = None) -> None:
        before = self._node.get(client)
        if before is not None and before != node_id:
            log.warning("client %d is now node %d, and was node %d", client, node_id, before)
            self._dismiss(before)
        self._client[node_id], self._node[client] = client, node_id
        size = number_in(told, SAMPLES) if told is not None else math.nan
        guess_s = number_in(told, DURATION) if told is not None else math.nan
        size, guess_s = (each if PLAUSIBLE[0] <= each <= PLAUSIBLE[1] else math.nan for each in (size, guess_s))
        self._selector.register([client])
        if not math.isnan(size):
            self._selector.register([client], size=[size])
        known = self._selector.clients
        measured = not math.isnan(known.duration_s[known.places(np.array([client]))[0]])
        if not measured and not math.isnan(guess_s):
            self._selector.register([client], duration_s=[guess_s])

    def _number_by_node(self, node_id: int) -> int:
        return self._by_node.setdefault(node_id, STRANGERS + len(self._by_node))

    def _dismiss(self, node_id: int) -> None:
        """Expect nothing from this node any more."""
        client = self._client.pop(node_id, None)
        if client is not None and self._node.get(client) == node_id:
            del self._node[client]
        for message_id in [each for each, order in self._orders.items() if order.node_id == node_id]:
            del self._orders[message_id]

    def _forget(self, node_id: int) -> None:
        self._dismiss(node_id)
        self._since.pop(node_id, None)
        for message_id in [each for each, asked in self._asked.items() if asked == node_id]:
            del self._asked[message_id]

    def state_dict(self) -> dict[str, list[str]]:
        """Return the nodes that are clients by themselves, in the order of their numbers."""
        return {"strangers": [str(node_id) for node_id in self._by_node]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._by_node = {int(node_id): STRANGERS + place for place, node_id in enumerate(state["strangers"])}


def duration_s(message: Message, took_s: float) -> float:
    """Return the duration that the client reported, if it can be one, or else the server's measurement."""
    told_s = number_in(message.content, DURATION)
    return told_s if PLAUSIBLE[0] <= told_s <= PLAUSIBLE[1] else took_s
