"""Guided selection as a strategy of Flower: selects clients, over-commits, aggregates, and resumes from a checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from pliant.errors import ConfigError, NoClient
from pliant.fed.aggregation import FedProx
from pliant.fed.config import FedConfig
from pliant.fed.flower.client import ARRAYS, CONFIG, LOSS, SAMPLES, UTILITY, number_in
from pliant.fed.flower.nodes import Nodes, duration_s
from pliant.fed.history import Point, Round
from pliant.fed.rounds.federation import (
    FederatedCheckpoint,
    build_aggregator,
    build_selector,
    checkpoint_errors,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    update_client_lr,
)
from pliant.fed.rounds.modes import client_losses, mean_loss
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.selection.base import finite
from pliant.fed.work import Update, Weights


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Names, shapes and types of a model's arrays, in their order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[torch.dtype, ...]
    buffers: frozenset[str]

    @classmethod
    def of(cls, arrays: ArrayRecord, buffers: Collection[str] = ()) -> ArrayLayout:
        """`buffers` are the names of arrays that are no parameters; arrays of integers never are."""
        if not arrays:
            raise ConfigError("initial_arrays holds no arrays: give ArrayRecord(model.state_dict())")
        for name in buffers:
            if name not in arrays:
                raise ConfigError(f"buffer {name!r} is not among the arrays: use names of model.named_buffers()")
        values = {name: torch.from_numpy(np.array(each.numpy())) for name, each in arrays.items()}
        whole = {name for name, each in values.items() if not each.is_floating_point()}
        return cls(
            tuple(values),
            tuple(tuple(each.shape) for each in values.values()),
            tuple(each.dtype for each in values.values()),
            frozenset(buffers) | whole,
        )

    def fault(self, arrays: ArrayRecord) -> str:
        """Return why arrays are not those of this model, by names and shapes; empty if they are."""
        if set(arrays) != set(self.names):
            odd = sorted(set(arrays) ^ set(self.names))[0]
            return f"array {odd!r} is {'missing' if odd in self.names else 'not of this model'}"
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(arrays[name].shape) != shape:
                return f"array {name!r} is {list(arrays[name].shape)} instead of {list(shape)}"
        return ""

    def weights(self, arrays: ArrayRecord) -> Weights:
        """Return the values in the model's types; the arrays must have no `fault`."""
        # copied: NumPy's view of a message is read-only, which torch warns about
        tensors = {
            name: torch.from_numpy(np.array(arrays[name].numpy())).to(kind)
            for name, kind in zip(self.names, self.types, strict=True)
        }
        return Weights(
            [each for name, each in tensors.items() if name not in self.buffers],
            [each for name, each in tensors.items() if name in self.buffers],
        )

    def arrays(self, weights: Weights) -> ArrayRecord:
        """Return weights as arrays, in the model's order."""
        parameters, buffers = iter(weights.parameters), iter(weights.buffers)
        found = {name: next(buffers if name in self.buffers else parameters) for name in self.names}
        return ArrayRecord({name: Array(each.cpu().numpy()) for name, each in found.items()})


log = logging.getLogger(__name__)
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Guided(Strategy):
    """Guided selection with over-commit, as a Flower strategy."""

    def __init__(
        self,
        config: FedConfig,
        *,
        folder: Path | None = None,
        buffers: Iterable[str] = (),
        identity: Literal["partition", "node"] = "partition",
        least: int | None = None,
        patience_s: float = 60.0,
        timeout_s: float = 3600.0,
        poll_s: float = 0.2,
    ) -> None:
        """`folder`: where state and record are kept. `buffers`: names of arrays that are no parameters; arrays of integers never are.
        `identity`: clients are identified by their introduction (`client.introduction`), or by their node. `least`: idle clients to
        wait for before a round, by default its participants; after `patience_s` fewer will do. `timeout_s`: when an answer is not
        waited for any more, and the client may be invited again.

        Raises:
            ConfigError: the config asks for what cannot be done here.
        """
        if config.privacy is not None:
            raise ConfigError("privacy: noise is not added here; use Flower's own, around this strategy")
        if config.aggregator.kind == "fed-buff":
            raise ConfigError("aggregator fed-buff: rounds on Flower are not asynchronous; use fed-avg, fed-yogi, ...")
        if config.local.longer:
            raise ConfigError(
                "local.longer: on Flower, all clients of a round make the same number of steps; leave it out"
            )
        if config.malicious:
            raise ConfigError(
                f"malicious {config.malicious:g}: on Flower, the labels are the clients' own; leave it out"
            )
        self.config, self.folder = config, folder
        self.aggregator = build_aggregator(config)
        self.selector = build_selector(config)
        self.nodes = Nodes(self.selector, introduced=identity == "partition", timeout_s=timeout_s)
        self.recorder = JobRecorder(folder, say=log.info)
        self.round: Round | None = None
        """The last round."""
        self._buffers = frozenset(buffers)
        self._least = config.participants if least is None else least
        self._patience_s, self._timeout_s, self._poll_s = patience_s, timeout_s, poll_s
        self._layout: ArrayLayout | None = None
        self._model = Weights([], [])
        self._zero_s = time.monotonic()
        self._round_begun_s, self._there = 0.0, 0
        self._invited: dict[int, int] = {}
        """Clients of this round, by their nodes."""
        self._took_s: dict[int, float] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run all rounds, by default as many as the config says; those in the folder's checkpoint are done.

        `evaluate_fn` tests the model every `config.evaluate_every` rounds. If its metrics have `accuracy`, the job ends at the
        config's target, and `pliant report` reads the record.

        Raises:
            ConfigError: `evaluate_config` asks for tests on clients, which are not supported.
            CheckpointError: the folder is damaged, or belongs to another job.
            NoClient: the selector picked none of the connected clients for `patience_s`.
        """
        if evaluate_config is not None:
            raise ConfigError(
                "evaluate_config: tests on clients are not supported; test on the server, with evaluate_fn"
            )
        rounds = self.config.rounds if num_rounds is None else num_rounds
        deadline_s = self.config.deadline_s or timeout or self._timeout_s
        self.summary()
        arrays, done = self._resume(initial_arrays)
        result = Result(arrays=arrays)
        why = "rounds"
        try:
            for number in range(done + 1, rounds + 1):
                messages = self.configure_train(number, arrays, train_config or ConfigRecord(), grid)
                moved, told = self.aggregate_train(number, self._collect_answers(grid, messages, number, deadline_s))
                result.arrays = arrays = arrays if moved is None else moved
                if told is not None:
                    result.train_metrics_clientapp[number] = told
                due = number % self.config.evaluate_every == 0 or number == rounds
                tested = evaluate_fn(number, arrays) if due and evaluate_fn is not None else None
                if tested is not None:
                    result.evaluate_metrics_serverapp[number] = tested
                reached = tested is not None and self._record_test(number, tested)
                self._save(number)
                if reached:
                    why = "target"
                    break
            self.recorder.end(why)
        finally:
            self.recorder.close()
        return result

    # --- what Flower asks of a strategy ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return invitations for the clients that the selector picks; waits until enough are connected."""
        self._layout = ArrayLayout.of(arrays, self._buffers)
        self._model = self._layout.weights(arrays)
        picked = self._pick(grid)
        self._round_begun_s, self._took_s = self._clock_s, {}
        self._invited = {self.nodes.node_of(client): client for client in picked}
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, **self._train_config(server_round)})})
        return [self.nodes.message(content, node_id, MessageType.TRAIN, server_round) for node_id in self._invited]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model from the first `participants` usable replies, in the order of clients."""
        assert self._layout is not None, "a round is configured before it is aggregated"
        came, failed = self._sort_replies(replies)
        updates = [self._update(client, message, server_round) for client, message in came.items()]
        update_client_lr(self.aggregator, self.config, server_round)
        self._model = self.aggregator.aggregate(self._model, updates)
        self._report_results(came)
        gone = {client for node_id, client in self._invited.items() if self.nodes.client_of(node_id) != client}
        lost = (failed | gone) - set(came)
        aggregated, losses = sorted(came), {update.client: update.loss for update in updates}
        is_timed = set(came) <= set(self._took_s)  # not by Flower's wrappers, which wait for all
        self.round = Round(
            round=server_round,
            begin_s=self._round_begun_s,
            clock_s=self._clock_s,
            invited=tuple(sorted(self._invited.values())),
            aggregated=tuple(aggregated),
            cut=tuple(sorted(set(self._invited.values()) - set(came) - lost)),
            lost=tuple(sorted(lost)),
            left_out=dict(self.aggregator.left_out),
            loss=mean_loss([update.loss for update in updates]),
            lr=self.config.lr_in(server_round),
            there=self._there,
            malicious=0,
            selector=finite(self.selector.figures),
            client_s=tuple(self._took_s[client] for client in aggregated) if is_timed else (),
            client_loss=client_losses(self.config, [losses[client] for client in aggregated]),
            known=len(self.selector.clients),
        )
        self.recorder.round(self.round)
        told = MetricRecord({"clients": len(came), "duration-s": self.round.duration_s})
        if self.round.loss is not None:
            told[LOSS] = self.round.loss
        return (self._layout.arrays(self._model) if came else None), told

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Evaluate on no client: the server tests."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        config = self.config
        log.info(
            "%s: %d rounds; %s invites %d clients, the first %d count; %s",
            config.name, config.rounds, config.selector.kind, config.invited, config.participants, config.aggregator.kind,
        )  # fmt: skip

    # --- a round ---

    @property
    def _clock_s(self) -> float:
        """Seconds since the job began, without the time that its server was away."""
        return time.monotonic() - self._zero_s

    def _pick(self, grid: Grid) -> list[int]:
        """Have the selector pick idle clients; if it picks nobody, wait for others."""
        until_s: float | None = None
        while True:
            idle = self.nodes.wait(grid, self._least, patience_s=self._patience_s, poll_s=self._poll_s)
            self._there = len(idle)
            try:
                return [int(client) for client in self.selector.select(self.config.invited, idle)]
            except NoClient:
                now_s = time.monotonic()
                until_s = now_s + self._patience_s if until_s is None else until_s
                if now_s >= until_s:
                    raise
            time.sleep(self._poll_s)

    def _train_config(self, number: int) -> dict[str, int | float]:
        """Return what clients are asked to do; the ClientApp decides whether they do it."""
        local = self.config.local
        orders = {"server-round": number, "local-steps": local.steps, "batch-size": local.batch_size}
        more = {"proximal-mu": self.aggregator.mu} if isinstance(self.aggregator, FedProx) else {}
        return {**orders, "lr": self.config.lr_in(number), **more}

    def _collect_answers(self, grid: Grid, messages: list[Message], number: int, deadline_s: float) -> list[Message]:
        """Return answers in the order of their arrival, until there are enough."""
        self.nodes.send(grid, messages, number)
        until_s = time.monotonic() + deadline_s
        found: list[Message] = []
        usable = 0
        while True:
            for answer in self.nodes.look(grid):
                if answer.order.round_number != number:
                    self.nodes.note_late_answers([answer])
                    continue
                found.append(answer.message)
                if not self._fault(answer.message):
                    self._took_s[answer.order.client] = duration_s(answer.message, answer.took_s)
                    usable += 1
            enough = usable >= self.config.participants or not self.nodes.waiting(number)
            if enough or time.monotonic() >= until_s:
                return found
            time.sleep(self._poll_s)

    def _fault(self, message: Message) -> str:
        """Return why a reply cannot be used; empty if it can."""
        if message.has_error():
            return message.error.reason or "it failed, and does not say why"
        records = list(message.content.array_records.values())
        if len(records) != 1:
            return f"{len(records)} array records in the reply, instead of the client's model alone"
        if not number_in(message.content, SAMPLES) > 0:
            return f"no {SAMPLES!r} above 0 among its metrics"
        assert self._layout is not None, "a round is configured before it is answered"
        return self._layout.fault(records[0])

    def _sort_replies(self, replies: Iterable[Message]) -> tuple[dict[int, Message], set[int]]:
        """Return the replies that count, by client, and the clients that failed."""
        came: dict[int, Message] = {}
        failed: set[int] = set()
        for message in replies:
            client = self._invited.get(message.metadata.src_node_id)
            if client is None or client in came:
                continue
            if why := self._fault(message):
                failed.add(client)
                log.warning("client %d: its reply is not used: %s", client, why)
            elif len(came) < self.config.participants:
                came[client] = message
        return came, failed

    def _update(self, client: int, message: Message, number: int) -> Update:
        assert self._layout is not None, "a round is configured before it is aggregated"
        given = next(iter(message.content.array_records.values()))
        change = self._model.change_to(self._layout.weights(given))
        return Update(client, change, number_in(message.content, SAMPLES), number_in(message.content, LOSS), number)

    def _report_results(self, came: dict[int, Message]) -> None:
        """Report the results of all invited clients to the selector."""
        clients = sorted(self._invited.values())
        so_far_s = self._clock_s - self._round_begun_s
        told = {client: message.content for client, message in came.items()}
        self.selector.feedback(
            clients,
            utility=[number_in(told[each], UTILITY) if each in told else 0.0 for each in clients],
            loss=[number_in(told[each], LOSS) if each in told else math.nan for each in clients],
            duration_s=[self._took_s.get(each, math.nan if each in told else so_far_s) for each in clients],
            finished=[each in told and each not in self.aggregator.left_out for each in clients],
        )

    def _record_test(self, number: int, told: MetricRecord) -> bool:
        """Record a test; return whether the job has reached its target."""
        accuracy, top_5, loss = (_number(told, name) for name in ("accuracy", "top-5", LOSS))
        if accuracy is None:
            return False
        self.recorder.test(Point(number, self._clock_s, accuracy, accuracy if top_5 is None else top_5, loss))
        return 0 < self.config.target <= accuracy

    # --- state ---

    def _resume(self, initial: ArrayRecord) -> tuple[ArrayRecord, int]:
        """Return the model and the number of rounds that the job continues from."""
        self._layout = ArrayLayout.of(initial, self._buffers)
        model = self._layout.weights(initial)
        saved = load_checkpoint(self.folder, self.config) if self.folder is not None else None
        self._zero_s = time.monotonic()
        if saved is None:
            self.recorder.begin(self.config, None, {"runtime": "flower", "model_bytes": model.num_bytes})
            return initial, 0
        with checkpoint_errors():
            model = load_weights(saved.state["model"], model)
            self.aggregator.load_state_dict(saved.state["aggregator"])
            self.selector.load_state_dict(saved.state["selector"])
            self.nodes.load_state_dict(saved.state["nodes"])
            self._zero_s -= float(saved.state["clock_s"])
        self.recorder.begin(self.config, saved.round, {})
        return self._layout.arrays(model), saved.round

    def _save(self, number: int) -> None:
        if self.folder is None:
            return
        state = {
            "model": {"parameters": self._model.parameters, "buffers": self._model.buffers},
            "aggregator": self.aggregator.state_dict(),
            "selector": self.selector.state_dict(),
            "nodes": self.nodes.state_dict(),
            "clock_s": self._clock_s,
        }
        self.recorder.sync()
        save_checkpoint(self.folder, self.config, FederatedCheckpoint(number, 0, "flower", state))


def _number(record: MetricRecord, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
