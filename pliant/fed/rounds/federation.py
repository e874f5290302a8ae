"""The state of a federated job between two rounds: model, selector, aggregator, virtual clock; and its checkpoint file."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import CheckpointError, ConfigError, NoClient, TrainError
from pliant.fed.aggregation import Aggregator, Krum, QFedAvg, make_aggregator
from pliant.fed.clients import SELECTION, SimulatedClients, derive_seed
from pliant.fed.config import FedConfig
from pliant.fed.data.task import Task
from pliant.fed.privacy import PrivacyBudget
from pliant.fed.rounds.storage import check_same_config
from pliant.fed.selection.base import Floats, Ids, Mask, PopulationSelector
from pliant.fed.selection.selectors import make_selector
from pliant.fed.work import Score, Trained, Weights, Workers, check_alike, evaluation_units, training_units
from pliant.train import checkpoint_file

CHECKPOINT_FILE = "checkpoint.safetensors"
FORMAT = 1
REMEDY = "remove it to begin the job anew"


@dataclass(frozen=True, slots=True)
class FederatedCheckpoint:
    """The state that a job continues from."""

    round: int
    batching: int
    data: str
    """Fingerprint of the clients' sizes and the test set."""
    state: Mapping[str, Any]
    """State of `FederationState` and of the round mode."""
    kind: str = ""
    """Kind of device that the model was computed on; empty if unknown."""


def save_checkpoint(folder: Path, config: FedConfig, saved: FederatedCheckpoint) -> None:
    """Replace the checkpoint in `folder`. Raises CheckpointError if it cannot be written; the last one is intact."""
    meta: dict[str, object] = {
        "federated": FORMAT,
        "config": config.model_dump(mode="json"),
        "batching": saved.batching,
        "data": saved.data,
        "kind": saved.kind,
    }
    whole = checkpoint_file.Checkpoint(saved.round, 0, 0, meta=meta, state=dict(saved.state))
    path = folder / CHECKPOINT_FILE
    try:
        checkpoint_file.CheckpointImage(whole, None).write(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}; the last one is as it was") from None


def load_checkpoint(folder: Path, config: FedConfig) -> FederatedCheckpoint | None:
    """Read the checkpoint in `folder`; None if there is none.

    Raises CheckpointError if it is damaged, no checkpoint of a federated job, or one of another config.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        found = checkpoint_file.read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {REMEDY}") from None
    theirs, batching, data = (found.meta.get(name) for name in ("config", "batching", "data"))
    kind = found.meta.get("kind", "")
    if found.meta.get("federated") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of a federated job of this version; use another folder")
    if not (isinstance(theirs, dict) and isinstance(batching, int) and isinstance(data, str) and isinstance(kind, str)):
        raise CheckpointError(f"{path} does not say what job it is of; {REMEDY}")
    check_same_config(f"{path}", theirs, config)
    if not isinstance(found.state, dict):
        raise CheckpointError(f"{path} holds no state of a federated job; {REMEDY}")
    return FederatedCheckpoint(found.step, batching, data, found.state, kind)


@contextlib.contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Raise whatever goes wrong while a state is loaded as a CheckpointError."""
    try:
        yield
    except (ConfigError, TrainError) as error:
        raise CheckpointError(f"the checkpoint does not go on here: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint lacks a part of the state ({error!r}): it is damaged") from None


PATIENCE_PERIODS = 2
"""If nobody can be picked for this many periods of the trace, nobody ever will be."""
LEAST_RATE = 1e-30
"""A learning rate may decay to 0, and aggregators divide by it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer of the selector."""

    clients: Ids
    """Clients in ascending order."""
    until_s: Floats
    """When each becomes unavailable."""
    there: int
    """Number of clients that could be chosen from."""


@dataclass(frozen=True, slots=True)
class ClientResult:
    """The result of one invitation, as the selector is told."""

    client: int
    finished: bool
    duration_s: float
    utility: float = 0.0
    loss: float = math.nan


class FederationState:
    def __init__(self, config: FedConfig, task: Task, workers: Workers, batching: int) -> None:
        """Raises ConfigError if parts of the config do not fit together, or a table is missing."""
        if wrong := config.check_sizes(task.num_clients):
            raise ConfigError("; ".join(wrong.values()))
        self.config, self.task = config, task
        self.model = Weights.of(task.model())
        self.clock_s = 0.0
        self.simulated = SimulatedClients.of(config, task.num_clients, self.model.num_bytes)
        self.selector = build_selector(config)
        self.aggregator = build_aggregator(config)
        self.privacy_budget = PrivacyBudget(config, task.num_clients, self.aggregator)
        self._workers, self._batching = workers, batching
        self.selector.register(
            np.arange(task.num_clients),
            duration_s=self.simulated.round_s(config.local.steps),
            size=np.maximum(task.sizes, 1),
        )

    # --- clients ---

    def pick(self, num: int, *, busy: Mask | None = None) -> Selection:
        """Have the selector pick `num` clients that are available now and not `busy`.

        Raises NoClient if nobody can be picked now.
        """
        seen = self.simulated.availability.at(self.clock_s)
        feasible = seen.there if busy is None else seen.there & ~busy
        chosen = self.selector.select(num, feasible, remaining_s=seen.until_s - self.clock_s)
        return Selection(chosen, seen.until_s[chosen], int(np.count_nonzero(feasible)))

    def pick_or_wait(self, num: int) -> Selection:
        """Pick clients; if nobody can be picked, advance the clock until somebody can."""
        since_s = self.clock_s
        while True:
            try:
                return self.pick(num)
            except NoClient as error:
                self.wait(since_s, error)

    def wait(self, since_s: float, why: NoClient) -> None:
        """Advance the clock to the next arrival of a client.

        Raises NoClient if there will be none, or nobody could be picked for too long since `since_s`.
        """
        seen = self.simulated.availability.at(self.clock_s)
        next_s = float(np.where(seen.there, math.inf, seen.back_s).min())
        self.check_patience(since_s, why, until_s=next_s)
        # a sum of floats may lie just before the moment that it means
        self.clock_s = max(next_s, math.nextafter(self.clock_s, math.inf))

    def check_patience(self, since_s: float, why: NoClient, *, until_s: float | None = None) -> None:
        """Raise NoClient if nothing happened since `since_s` for two periods of the trace: then nothing ever will."""
        end_s = self.clock_s if until_s is None else until_s
        if end_s > since_s + PATIENCE_PERIODS * float(self.simulated.availability.period_s.max()):
            raise NoClient(f"since {since_s:.0f} s of the virtual clock, and for ever: {why}")

    def report_results(self, brought: Sequence[ClientResult]) -> None:
        """Report results to the selector. A client with two results is reported twice, in order."""
        rest = list(brought)
        while rest:
            told: dict[int, ClientResult] = {}
            later: list[ClientResult] = []
            for each in rest:
                if told.setdefault(each.client, each) is not each:
                    later.append(each)
            self.selector.feedback(
                list(told),
                utility=[each.utility for each in told.values()],
                loss=[each.loss for each in told.values()],
                duration_s=[each.duration_s for each in told.values()],
                finished=[each.finished for each in told.values()],
            )
            rest = later

    # --- work ---

    def train(self, model: Weights, clients: Ids, steps: Ids, *, round_number: int) -> Iterator[Trained]:
        """Yield the results of training these clients from `model`, in ascending order."""
        units = training_units(
            clients.tolist(),
            steps.tolist(),
            round_number=round_number,
            lr=self.config.lr_in(round_number),
            batching=self._batching,
        )
        for unit, done in zip(units, self._workers.run(model, units), strict=True):
            if not isinstance(done, tuple) or tuple(each.update.client for each in done) != unit.clients:
                raise TrainError(f"clients {list(unit.clients)} were to be trained, and something else came back")
            yield from done

    def evaluate(self) -> Score:
        """Evaluate the model on the test set."""
        total = Score(0, 0, 0, 0.0)
        for done in self._workers.run(self.model, evaluation_units(self.task.num_test)):
            if not isinstance(done, Score):
                raise TrainError("a test was asked for, and something else came back")
            total += done
        return total

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": {"parameters": self.model.parameters, "buffers": self.model.buffers},
            "aggregator": self.aggregator.state_dict(),
            "selector": self.selector.state_dict(),
            "ledger": self.privacy_budget.state_dict(),
            "clock_s": self.clock_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, within `checkpoint_errors`."""
        self.model = load_weights(state["model"], self.model)
        self.selector.load_state_dict(state["selector"])
        self.aggregator.load_state_dict(state["aggregator"])
        self.privacy_budget.load_state_dict(state["ledger"])
        self.clock_s = float(state["clock_s"])

    @property
    def data_fingerprint(self) -> str:
        """Digest of the number of samples of each client, and of the test set."""
        sizes = np.ascontiguousarray(self.task.sizes, np.int64)
        return hashlib.sha256(sizes.tobytes() + self.task.num_test.to_bytes(8, "little")).hexdigest()


def build_selector(config: FedConfig) -> PopulationSelector:
    """Create the config's selector, with the job's seed if it has none."""
    options = {"seed": derive_seed(config.seed, SELECTION), **config.selector.options}
    try:
        return make_selector(config.selector.kind, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"selector {config.selector.kind}: {error}; check the types of its options") from None


def build_aggregator(config: FedConfig) -> Aggregator:
    """Create the config's aggregator; options that it leaves open follow from the job."""
    kind, options = config.aggregator.kind, dict(config.aggregator.options)
    if kind == "fed-buff":
        options.setdefault("size", config.participants)
    made = make_aggregator(kind, options)  # type: ignore[arg-type]
    if isinstance(made, Krum):
        made.check(config.participants)
    return made


def update_client_lr(aggregator: Aggregator, config: FedConfig, round_number: int) -> None:
    """Set the clients' learning rate of this round in an aggregator that uses it, unless the user has set it."""
    if isinstance(aggregator, QFedAvg) and "client_lr" not in config.aggregator.options:
        aggregator.client_lr = max(config.lr_in(round_number), LEAST_RATE)


def load_weights(saved: Mapping[str, Any], like: Weights) -> Weights:
    """Raises TrainError if the saved tensors are of another model."""
    found = Weights(list(saved["parameters"]), list(saved["buffers"]))
    check_alike(like, found, "the checkpoint's model")
    return found
