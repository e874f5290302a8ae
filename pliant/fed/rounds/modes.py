"""The two kinds of rounds: synchronous ones, and asynchronous ones (FedBuff).

In a synchronous round some clients are invited together, and the first to finish are aggregated. In asynchronous rounds a
number of clients train at a time. Each starts from the model of the moment at which it is invited, and its place is free
again when it has finished, is late or unavailable. Events follow in the order of (time, client), and the model changes
whenever enough updates have come. An update is not needed before its buffer is full, so all clients of a buffer are trained
then, together if they started from the same model: units are large, and nobody trains whose update will not count. Models
that clients in flight have started from are kept until then.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pliant.errors import ConfigError, NoClient
from pliant.fed.aggregation import FedBuff
from pliant.fed.config import FedConfig
from pliant.fed.history import Round
from pliant.fed.rounds.federation import ClientResult, FederationState, Selection, load_weights, update_client_lr
from pliant.fed.rounds.plan import COUNTS, CUT, LOST, RoundPlan, plan_round
from pliant.fed.selection.base import Floats, Ids, finite
from pliant.fed.selection.selectors import local_steps
from pliant.fed.work import Trained, Weights

log = logging.getLogger(__name__)


class SynchronousRounds:
    def __init__(self, federation: FederationState) -> None:
        self._federation = federation

    def round(self, number: int) -> Round:
        """Do one round, counted from 1. All effects are in the federation's state and in what is returned."""
        federation, config = self._federation, self._federation.config
        picked = federation.pick_or_wait(config.invited)
        duration_s = federation.simulated.round_s(config.local.steps, picked.clients)
        plan = plan_round(
            picked.clients,
            duration_s,
            picked.until_s,
            begin_s=federation.clock_s,
            wanted=config.participants,
            deadline_s=config.deadline_s,
        )
        came = self._train_and_aggregate(plan, self._steps(plan, picked, duration_s), number)
        federation.clock_s = plan.end_s
        left_out = federation.aggregator.left_out
        federation.report_results(
            [
                ClientResult(client, client not in left_out, seen_s, *came[client])
                if client in came
                else ClientResult(client, False, seen_s)
                for client, seen_s in zip(plan.invited.tolist(), plan.seen_s.tolist(), strict=True)
            ]
        )
        federation.privacy_budget.account(plan.aggregated, rate=len(picked.clients) / picked.there)
        return Round(
            round=number,
            begin_s=plan.begin_s,
            clock_s=plan.end_s,
            invited=tuple(plan.invited.tolist()),
            aggregated=tuple(plan.aggregated.tolist()),
            cut=tuple(plan.cut.tolist()),
            lost=tuple(plan.lost.tolist()),
            left_out=dict(left_out),
            loss=mean_loss([loss for _, loss in came.values()]),
            lr=config.lr_in(number),
            there=picked.there,
            malicious=int(np.count_nonzero(federation.task.malicious[plan.aggregated])),
            selector=finite(federation.selector.figures),
            client_s=tuple(plan.seen_s[plan.counts].tolist()),
            client_loss=client_losses(config, [came[client][1] for client in plan.aggregated.tolist()]),
        )

    def _steps(self, plan: RoundPlan, picked: Selection, duration_s: Floats) -> Ids:
        """Return the number of local steps of each aggregated client."""
        local, simulated = self._federation.config.local, self._federation.simulated
        asked = np.full(len(plan.aggregated), local.steps, np.int64)
        if not local.longer or not len(asked):
            return asked
        # invited and picked clients are both in ascending order
        mine, until_s = duration_s[plan.counts], picked.until_s[plan.counts]
        longer = local_steps(
            local.steps, mine, simulated.compute_s(local.steps, plan.aggregated), round_s=plan.duration_s
        )
        fits = plan.begin_s + simulated.round_s(longer, plan.aggregated) < until_s
        return np.where(fits, longer, asked)

    def _train_and_aggregate(self, plan: RoundPlan, steps: Ids, number: int) -> dict[int, tuple[float, float]]:
        """Train the participants and change the model; return utility and loss of each."""
        federation = self._federation
        clients = plan.aggregated
        came: dict[int, tuple[float, float]] = {}
        update_client_lr(federation.aggregator, federation.config, number)
        federation.aggregator.begin(federation.model)
        for trained in federation.train(federation.model, clients, steps, round_number=number):
            update = federation.privacy_budget.privatise_update(
                trained.update, round_number=number, participants=len(clients)
            )
            federation.aggregator.add(update)
            came[update.client] = trained.utility, update.loss
        try:
            federation.model = federation.aggregator.finish()
        except ConfigError as error:  # fewer updates than the aggregator needs: the next round may have more
            log.warning("round %d: the model stays as it is: %s", number, error)
            federation.aggregator.left_out = {client: str(error) for client in came}
        return came

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def mean_loss(losses: list[float]) -> float | None:
    """Return the mean of the finite losses; None if there is none."""
    known = [each for each in losses if math.isfinite(each)]
    return math.fsum(known) / len(known) if known else None


def client_losses(config: FedConfig, losses: list[float]) -> tuple[float | None, ...]:
    """Return the loss of each client for the record, with six digits; nothing if the job promises privacy."""
    if config.privacy is not None:
        return ()
    return tuple(float(f"{each:.6g}") if math.isfinite(each) else None for each in losses)


@dataclass(frozen=True, slots=True, order=True)
class InFlight:
    """A client that trains, from its invitation to the end of its training."""

    end_s: float
    client: int
    version: int
    """Version of the model that it started from."""
    begin_s: float
    fate: int
    """Whether it finishes then, is late, or becomes unavailable (`rounds.plan`)."""


class AsynchronousRounds:
    def __init__(self, federation: FederationState) -> None:
        """Raises ConfigError if the config asks for what asynchronous rounds cannot do."""
        config, num_clients = federation.config, federation.task.num_clients
        assert isinstance(federation.aggregator, FedBuff), "only FedBuff's buffer is asynchronous"
        self._aggregator = federation.aggregator
        if self._aggregator.size > num_clients:
            raise ConfigError(
                f"size={self._aggregator.size} of fed-buff, and {num_clients} clients: no model is given to a client twice, "
                "so use a buffer of at most as many"
            )
        if config.local.longer:
            raise ConfigError("local.longer with fed-buff: nobody waits for anybody there; leave it out")
        self._federation = federation
        self._most = min(config.concurrency or config.invited, num_clients)
        self._flights: list[InFlight] = []
        self._models: dict[int, Weights] = {}
        """Models by version that clients in flight have started from, as long as they may count."""
        self._queue: list[int] = []
        """Clients that the selector picked for the present model, and that wait for a place."""
        self._asked: list[tuple[int, float]] = []
        """Clients that were given the present model, and when."""
        self._had: set[int] = set()
        """Clients that need not be given the present model again: the result would be the same."""
        self._choice: tuple[int, dict[str, float | int | None]] = (0, {})
        """Number of candidates and figures of the first selection for the present model."""

    def round(self, number: int) -> Round:
        """Advance the clock until the model changes. Versions are counted from 0, rounds from 1."""
        federation, buffer = self._federation, self._aggregator
        begin_s = federation.clock_s
        self._models[buffer.version] = federation.model
        self._queue, self._asked, self._had, self._choice = [], [], set(), (0, {})
        self._fill()
        log = _Log()
        pending: list[InFlight] = []
        moved: Weights | None = None
        heard_s = begin_s
        while moved is None:
            flight = self._next_to_end()
            if flight.fate == COUNTS and buffer.version - flight.version <= buffer.max_staleness:
                pending.append(flight)
                heard_s = flight.end_s
            else:
                log.end_of(flight)
            if flight.fate == LOST:
                self._had.discard(flight.client)
                federation.check_patience(heard_s, NoClient("clients go away before they are done"))
            if len(pending) == buffer.size - log.used:
                moved = self._train_and_aggregate(pending, log)
                pending = []
            if moved is None:
                self._fill()
        federation.model = moved
        self._forget_models()
        federation.report_results(log.brought)
        federation.privacy_budget.account(np.array([each.client for each in log.folded], np.int64), rate=1.0)
        came = sorted(zip(log.folded, log.losses, strict=True), key=lambda each: (each[0].client, each[0].version))
        folded = [flight for flight, _ in came]
        clients = [each.client for each in folded]
        asked = sorted(self._asked)
        there, figures = self._choice
        return Round(
            round=number,
            begin_s=begin_s,
            clock_s=federation.clock_s,
            invited=tuple(client for client, _ in asked),
            aggregated=tuple(clients),
            cut=tuple(sorted(log.cut)),
            lost=tuple(sorted(log.lost)),
            left_out=log.left_out,
            loss=mean_loss(log.losses),
            lr=federation.config.lr_in(number),
            there=there,
            malicious=int(np.count_nonzero(federation.task.malicious[clients])),
            selector=figures,
            client_s=tuple(each.end_s - each.begin_s for each in folded),
            staleness=tuple(number - 1 - each.version for each in folded),
            asked_s=tuple(at_s for _, at_s in asked),
            client_loss=client_losses(federation.config, [loss for _, loss in came]),
        )

    # --- clients ---

    def _fill(self) -> None:
        """Give every free place to a client, as far as there are clients."""
        federation = self._federation
        while len(self._flights) < self._most:
            self._start_waiting()
            free = self._most - len(self._flights)
            if not free:
                break
            try:
                # those who get a place now, and those who will until the buffer is full
                picked = federation.pick(free + int(self._aggregator.size) - 1, busy=self._busy())
            except NoClient:
                break
            self._queue = picked.clients.tolist()
            if not self._choice[0]:
                self._choice = picked.there, finite(federation.selector.figures)

    def _start_waiting(self) -> None:
        """Start queued clients that are still available."""
        federation, config = self._federation, self._federation.config
        seen = federation.simulated.availability.at(federation.clock_s)
        while self._queue and len(self._flights) < self._most:
            client = self._queue.pop(0)
            if not seen.there[client]:
                continue
            now_s, until_s = federation.clock_s, float(seen.until_s[client])
            done_s = now_s + float(federation.simulated.round_s(config.local.steps, np.array([client]))[0])
            late_s = math.inf if config.deadline_s is None else now_s + config.deadline_s
            end_s, fate = min((done_s, COUNTS), (late_s, CUT), (until_s, LOST), key=lambda each: each[0])
            if done_s >= until_s and fate == COUNTS:
                fate = LOST
            heapq.heappush(self._flights, InFlight(end_s, client, self._aggregator.version, now_s, fate))
            self._asked.append((client, now_s))
            self._had.add(client)

    def _busy(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the clients that train now, or have had the present model."""
        mask = np.zeros(self._federation.task.num_clients, np.bool_)
        mask[[each.client for each in self._flights]] = True
        mask[list(self._had)] = True
        return mask

    def _next_to_end(self) -> InFlight:
        """Return the next client that ends; the clock advances to that moment."""
        federation, since_s = self._federation, self._federation.clock_s
        while not self._flights:
            federation.wait(
                since_s, NoClient(f"a model needs {self._aggregator.size} updates, and no more can be had in time")
            )
            self._fill()
        flight = heapq.heappop(self._flights)
        federation.clock_s = flight.end_s
        return flight

    # --- the model ---

    def _train_and_aggregate(self, pending: list[InFlight], log: _Log) -> Weights | None:
        """Train the clients that have finished, and add them to the buffer in the order in which they came.

        Returns None if not all could be used, so that more are needed.
        """
        federation, buffer = self._federation, self._aggregator
        trained = self._train(pending)
        moved: Weights | None = None
        for flight in pending:
            result = trained[flight.client, flight.version]
            number = flight.version + 1
            update = federation.privacy_budget.privatise_update(
                replace(result.update, version=flight.version), round_number=number, participants=1
            )
            moved = buffer.offer(federation.model, update)
            why = buffer.left_out.get(flight.client, "")
            log.came(flight, result, why)
        return moved

    def _train(self, pending: list[InFlight]) -> dict[tuple[int, int], Trained]:
        """Train the clients of each model together."""
        federation = self._federation
        found: dict[tuple[int, int], Trained] = {}
        for version in sorted({each.version for each in pending}):
            clients = np.array(sorted(each.client for each in pending if each.version == version), np.int64)
            steps = np.full(len(clients), federation.config.local.steps, np.int64)
            for trained in federation.train(self._models[version], clients, steps, round_number=version + 1):
                found[trained.update.client, version] = trained
        return found

    def _forget_models(self) -> None:
        oldest = self._aggregator.version - self._aggregator.max_staleness
        needed = {each.version for each in self._flights if each.fate == COUNTS and each.version >= oldest}
        self._models = {version: model for version, model in self._models.items() if version in needed}

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds; the queue is not needed any more."""
        flights = [(e.end_s, e.client, e.version, e.begin_s, e.fate) for e in sorted(self._flights)]
        models = [
            {"version": version, "parameters": model.parameters, "buffers": model.buffers}
            for version, model in sorted(self._models.items())
        ]
        return {"flights": flights, "models": models}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._flights = [InFlight(*each) for each in state["flights"]]  # sorted, and so a heap
        like = self._federation.model
        self._models = {int(each["version"]): load_weights(each, like) for each in state["models"]}


class _Log:
    """Collects what has happened since the model last changed."""

    def __init__(self) -> None:
        self.brought: list[ClientResult] = []
        self.folded: list[InFlight] = []
        self.losses: list[float] = []
        self.cut: list[int] = []
        self.lost: list[int] = []
        self.left_out: dict[int, str] = {}
        self.used = 0
        """Number of updates in the buffer."""

    def end_of(self, flight: InFlight) -> None:
        """Add a client that does not count: unavailable, late, or with a model that is too old."""
        (self.lost if flight.fate == LOST else self.cut).append(flight.client)
        self.brought.append(ClientResult(flight.client, False, flight.end_s - flight.begin_s))

    def came(self, flight: InFlight, result: Trained, why: str) -> None:
        loss = result.update.loss
        self.folded.append(flight)
        self.losses.append(loss)
        self.brought.append(ClientResult(flight.client, not why, flight.end_s - flight.begin_s, result.utility, loss))
        if why:
            self.left_out[flight.client] = why
        else:
            self.used += 1
