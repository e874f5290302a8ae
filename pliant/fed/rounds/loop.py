"""Runs a federated job from its first round to its last: rounds, tests, checkpoints.

    history = simulate(config)                                     # in this process
    history = simulate(config, workers=coordinator, folder=folder)

A job that is interrupted at any moment continues from its last checkpoint to the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from pliant.errors import CheckpointError
from pliant.fed.aggregation import FedBuff
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.history import History, Point, Round, WorkFigures
from pliant.fed.rounds.federation import (
    FederatedCheckpoint,
    FederationState,
    checkpoint_errors,
    load_checkpoint,
    save_checkpoint,
)
from pliant.fed.rounds.modes import AsynchronousRounds, SynchronousRounds
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.trainer import InProcess, choose_batching
from pliant.fed.work import DeviceAware, Measured, Workers

log = logging.getLogger(__name__)


class RoundMode(Protocol):
    """Synchronous or asynchronous rounds."""

    def round(self, number: int) -> Round: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def never() -> bool:
    return False


class FederatedLoop:
    """Runs all rounds of a job; or `start`, and one `step` for each round."""

    def __init__(
        self,
        config: FedConfig,
        task: Task,
        workers: Workers,
        recorder: JobRecorder,
        *,
        stop: Callable[[], bool] = never,
    ) -> None:
        """`stop` is called before each round; if it returns true, the rest is left for another time."""
        self.config, self.task, self.recorder = config, task, recorder
        self.round = 0
        """Number of rounds that are done."""
        self._workers, self._stop = workers, stop
        self._saved = -1
        self._begun: tuple[FederationState, RoundMode] | None = None
        self.batching = 0
        self._kind = ""

    def start(self) -> None:
        """Create the state, or load it from a checkpoint; idempotent.

        Raises CheckpointError if there is a checkpoint, and this job cannot continue from it.
        """
        if self._begun is not None:
            return
        folder = self.recorder.folder
        saved = load_checkpoint(folder, self.config) if folder is not None else None
        self.batching = self._batching() if saved is None else saved.batching
        federation = FederationState(self.config, self.task, self._workers, self.batching)
        buffered = isinstance(federation.aggregator, FedBuff)
        mode: RoundMode = AsynchronousRounds(federation) if buffered else SynchronousRounds(federation)
        if saved is not None:
            if saved.data != federation.data_fingerprint:
                raise CheckpointError(f"{folder}: the checkpoint is of other data than the job has now")
            self._kind = saved.kind
            if saved.kind and isinstance(self._workers, DeviceAware):
                self._workers.expect_kind(saved.kind)
            with checkpoint_errors():
                federation.load_state_dict(saved.state)
                mode.load_state_dict(saved.state["way"])
            self.round = self._saved = saved.round
            log.info("round %d: resumed from %s", saved.round, folder)
        self.recorder.begin(self.config, None if saved is None else saved.round, self._facts(federation))
        self._begun = federation, mode
        if saved is None:
            self.save()

    def run(self) -> History:
        """Run the remaining rounds. The history's `why` says what ended the job."""
        try:
            self.start()
            while not self.over and not self._stop():
                self.step()
            self.save()
            self.recorder.end(self.over or "stopped")
        finally:
            self.recorder.close()
        return self.recorder.history

    def step(self) -> Round:
        """Do one round, and a test and a checkpoint if they are due."""
        self.start()
        number = self.round + 1
        _, mode = self._parts
        began_s = time.monotonic()
        done = mode.round(number)
        ended_s = time.monotonic()
        self.round = number
        self.recorder.round(done)
        if number % self.config.evaluate_every == 0 or number >= self.config.rounds:
            self.recorder.test(self._test())
        found = self._workers.take_figures() if isinstance(self._workers, Measured) else WorkFigures()
        self.recorder.work(number, ended_s - began_s, time.monotonic() - ended_s, found)
        if number % self.config.checkpoint_every == 0:
            self.save()
        return done

    @property
    def over(self) -> str:
        """Why there are no more rounds to do; empty if there are."""
        final = self.recorder.history.final
        if self.config.target and final is not None and final.accuracy >= self.config.target:
            return "target"
        return "rounds" if self.round >= self.config.rounds else ""

    def save(self) -> None:
        """Write a checkpoint if there is a folder and something new."""
        if self.recorder.folder is None or self._saved == self.round:
            return
        federation, mode = self._parts
        self.recorder.sync()
        save_checkpoint(
            self.recorder.folder,
            self.config,
            FederatedCheckpoint(
                self.round,
                self.batching,
                federation.data_fingerprint,
                federation.state_dict() | {"way": mode.state_dict()},
                self.kind,
            ),
        )
        self._saved = self.round

    @property
    def kind(self) -> str:
        """Kind of device that the model was computed on; empty if unknown."""
        return self._workers.kind if isinstance(self._workers, DeviceAware) else self._kind

    @property
    def federation(self) -> FederationState:
        """Model, selector and clock, as they are between two rounds."""
        return self._parts[0]

    @property
    def _parts(self) -> tuple[FederationState, RoundMode]:
        assert self._begun is not None, "start() comes first"
        return self._begun

    def _test(self) -> Point:
        federation, _ = self._parts
        score = federation.evaluate()
        count = max(score.samples, 1)
        return Point(
            self.round,
            federation.clock_s,
            score.accuracy,
            score.correct_in_5 / count,
            score.loss / count,
            federation.privacy_budget.epsilon,
        )

    def _batching(self) -> int:
        if self.config.batching is not None:
            return max(1, self.config.batching)
        return choose_batching(self.task, default_device(self.config))

    def _facts(self, federation: FederationState) -> dict[str, Any]:
        """Return facts about the job for the record."""
        return {
            "clients": self.task.num_clients,
            "samples": int(self.task.sizes.sum()),
            "test_samples": self.task.num_test,
            "classes": self.task.num_classes,
            "malicious": int(self.task.malicious.sum()),
            "parameters": sum(each.numel() for each in federation.model.parameters),
            "model_bytes": federation.simulated.model_bytes,
            "batching": self.batching,
            "devices": federation.simulated.devices.note,
            "availability": federation.simulated.availability.note,
        }


def default_device(config: FedConfig) -> str:
    """Return the device that this process computes on."""
    return config.device or ("cuda" if torch.cuda.is_available() else "cpu")


def simulate(
    config: FedConfig,
    *,
    workers: Workers | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = never,
) -> History:
    """Run a federated job, or the rest of it if `folder` holds its checkpoint; without `workers`, in this process.

    Raises:
        ConfigError: the config is wrong, or something that it names is missing.
        CheckpointError: the folder belongs to another job, or is damaged.
        NoClient: from some moment on, no client can be picked any more.
    """
    made = build_task(config)
    if workers is None:
        workers = InProcess(made, default_device(config))
    return FederatedLoop(config, made, workers, JobRecorder(folder, say=say), stop=stop).run()
