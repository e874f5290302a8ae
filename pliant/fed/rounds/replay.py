"""Replays a selector on its own: rounds with known losses on a device table. Nothing is trained.

The losses of each client are in a file. The selection thus follows from file, table, seed and selector alone, and can be
compared with that of another selector or another version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pliant.errors import ConfigError
from pliant.fed.clients import PASSES, Devices
from pliant.fed.config import Count, FedConfig, NamedOptions, Positive
from pliant.fed.rounds.plan import plan_round
from pliant.fed.selection.base import Floats, finite
from pliant.fed.selection.selectors import make_selector
from pliant.json_text import parse_json
from pliant.yaml_source import validation_messages

Loss = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ReplayClient(BaseModel):
    """What one client would report."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Count
    """Number of samples."""
    losses: Annotated[tuple[Loss, ...], Field(min_length=1)]
    """Mean loss when the client takes part for the first time, the second, ...; then the last one."""

    def loss_after(self, rounds: int) -> float:
        """Return the loss of a client that has taken part this often."""
        return self.losses[min(rounds, len(self.losses) - 1)]


class Replay(BaseModel):
    """A replay. Clients are numbered from 0, in their order; client i has the device of row i of the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    participants: Count = 20
    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.3
    selector: NamedOptions = NamedOptions(kind="oort")
    steps: Count = 10
    batch_size: Count = 20
    model_bytes: Count = 200_000
    clock_factor: Positive = 1.0
    clients: Annotated[tuple[ReplayClient, ...], Field(min_length=1)]

    _by_name = field_validator("selector", mode="before")(FedConfig._by_name.__func__)  # type: ignore[attr-defined]

    @property
    def invited(self) -> int:
        return max(self.participants, int(self.participants * self.overcommit + 1e-9))


def read_replay(path: Path) -> Replay:
    """Read a replay; raises ConfigError."""
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ConfigError(f"{path}: {why}; give a replay: {{participants, clients: [{{size, losses}}, ...]}}") from None
    try:
        return Replay.model_validate(found)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(f"{path}: {what}" for what in list(validation_messages(error, Replay).values())[:3])
        ) from None


def draw_replay(num_clients: int) -> Replay:
    """Draw synthetic clients: sizes and losses as with image data, which fall a little with each participation."""
    chance = np.random.default_rng(0)
    sizes = np.clip(chance.lognormal(3.5, 1.0, num_clients), 5, 2000).astype(int)
    first = chance.uniform(1.0, 3.0, num_clients)
    clients = tuple(
        ReplayClient(size=int(size), losses=tuple(round(float(loss) * 0.85**k, 4) for k in range(10)))
        for size, loss in zip(sizes, first, strict=True)
    )
    return Replay(participants=max(1, min(20, num_clients // 4)), clients=clients)


def replay_selection(replay: Replay, devices: Devices, *, rounds: int, seed: int) -> dict[str, Any]:
    """Return the clients picked in each round, and the selector's figures, as plain values."""
    count = len(replay.clients)
    theirs = devices.for_clients(count)
    size = np.array([client.size for client in replay.clients], np.float64)
    duration_s: Floats = theirs.round_s(
        replay.steps * replay.batch_size, model_bytes=replay.model_bytes, passes=PASSES * replay.clock_factor
    )
    options = {"seed": seed, **replay.selector.options}
    selector = make_selector(replay.selector.kind, **options)  # type: ignore[arg-type]
    selector.register(np.arange(count), duration_s=duration_s, size=size)
    took_part = np.zeros(count, np.int64)
    clock_s = 0.0
    facts: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        picked = selector.select(replay.invited)
        plan = plan_round(
            picked, duration_s[picked], np.full(len(picked), np.inf), begin_s=clock_s, wanted=replay.participants
        )
        why = {name: value for name, value in finite(selector.figures).items() if name not in ("round", "picked")}
        facts.append(
            {
                "round": number,
                "rounds_before": number - 1,
                "picked": plan.invited.tolist(),
                "aggregated": plan.aggregated.tolist(),
                "duration_s": plan.duration_s,
                **why,
            }
        )
        clock_s = plan.end_s
        loss = np.array([replay.clients[i].loss_after(int(took_part[i])) for i in plan.invited])
        selector.feedback(
            plan.invited,
            utility=np.where(plan.counts, size[plan.invited] * loss, 0.0),
            loss=loss,
            duration_s=plan.seen_s,
            finished=plan.counts,
        )
        took_part[plan.aggregated] += 1
    return {
        "clients": count,
        "participants": replay.participants,
        "invited": replay.invited,
        "selector": {"kind": replay.selector.kind, **replay.selector.options},
        "seed": options["seed"],
        "devices": devices.note,
        "clock_s": clock_s,
        "coverage": int(np.count_nonzero(took_part)),
        "rounds": facts,
    }
