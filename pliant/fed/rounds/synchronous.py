"""Rounds that all participants begin together: invite some, take the first to finish, fold, and begin anew."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pliant.errors import ConfigError
from pliant.fed.choice.population import Floats, Ids
from pliant.fed.choice.selectors import local_steps
from pliant.fed.history import Round
from pliant.fed.rounds.federation import Brought, Federation, Picked, follow_rate
from pliant.fed.rounds.plan import RoundPlan, plan_round

log = logging.getLogger(__name__)


class Synchronous:
    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def round(self, number: int) -> Round:
        """Do one round, counted from 1. Nothing of it is left but in the federation and in what is returned."""
        shared, config = self._federation, self._federation.config
        picked = shared.pick_or_wait(config.invited)
        duration_s = shared.world.round_s(config.local.steps, picked.clients)
        plan = plan_round(
            picked.clients,
            duration_s,
            picked.until_s,
            begin_s=shared.clock_s,
            wanted=config.participants,
            deadline_s=config.deadline_s,
        )
        came = self._fold(plan, self._steps(plan, picked, duration_s), number)
        shared.clock_s = plan.end_s
        left_out = shared.aggregator.left_out
        shared.tell(
            [
                Brought(client, client not in left_out, seen_s, *came[client])
                if client in came
                else Brought(client, False, seen_s)
                for client, seen_s in zip(plan.invited.tolist(), plan.seen_s.tolist(), strict=True)
            ]
        )
        shared.ledger.account(plan.aggregated, rate=len(picked.clients) / picked.there)
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
            malicious=int(np.count_nonzero(shared.task.malicious[plan.aggregated])),
            selector=finite(shared.selector.figures),
            client_s=tuple(plan.seen_s[plan.counts].tolist()),
        )

    def _steps(self, plan: RoundPlan, picked: Picked, duration_s: Floats) -> Ids:
        """How many local steps each of the aggregated makes."""
        local, world = self._federation.config.local, self._federation.world
        asked = np.full(len(plan.aggregated), local.steps, np.int64)
        if not local.longer or not len(asked):
            return asked
        # invited and picked clients are both in ascending order
        mine, until_s = duration_s[plan.counts], picked.until_s[plan.counts]
        longer = local_steps(local.steps, mine, world.compute_s(local.steps, plan.aggregated), round_s=plan.duration_s)
        fits = plan.begin_s + world.round_s(longer, plan.aggregated) < until_s
        return np.where(fits, longer, asked)

    def _fold(self, plan: RoundPlan, steps: Ids, number: int) -> dict[int, tuple[float, float]]:
        """Have the participants train, and move the model; the utility and the loss of each."""
        shared = self._federation
        clients = plan.aggregated
        came: dict[int, tuple[float, float]] = {}
        follow_rate(shared.aggregator, shared.config, number)
        shared.aggregator.begin(shared.model)
        for trained in shared.train(shared.model, clients, steps, round_number=number):
            update = shared.ledger.private(trained.update, round_number=number, participants=len(clients))
            shared.aggregator.add(update)
            came[update.client] = trained.utility, update.loss
        try:
            shared.model = shared.aggregator.finish()
        except ConfigError as error:  # fewer have come than it needs: the next round may have more
            log.warning("round %d: the model stays as it is: %s", number, error)
            shared.aggregator.left_out = {client: str(error) for client in came}
        return came

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def mean_loss(losses: list[float]) -> float | None:
    """Of those that are numbers; None if none is."""
    known = [each for each in losses if math.isfinite(each)]
    return math.fsum(known) / len(known) if known else None


def finite(figures: Mapping[str, float | int]) -> dict[str, float | int | None]:
    """None for what has no limit: it goes to the record."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
