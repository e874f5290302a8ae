"""The whole state of a job, as one tree: what a newcomer must know, and what a checkpoint holds.

Who sends or keeps it is not decided here.
"""

from __future__ import annotations

from typing import Any

from pliant.errors import TrainError
from pliant.train.context import Context
from pliant.train.gradients.layout import Layout
from pliant.train.trainer import Progress, Trainer

Stateful = dict[str, Any]
"""Tracked objects by name: anything with state_dict and load_state_dict."""


class JobState:
    """Reads the state off a trainer and what is tracked beside it, and puts it back."""

    def __init__(self, trainer: Trainer, tracked: Stateful) -> None:
        self._trainer, self._tracked = trainer, tracked

    def read(self) -> dict[str, Any]:
        """All that a newcomer must know. References, no copies."""
        trainer = self._trainer
        progress, replicas = trainer.progress, trainer.replicas
        return {
            "progress": [progress.epoch, progress.epoch_step, progress.step],
            "model": trainer.parts.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.parts.optimizers],
            "tracked": {name: each.state_dict() for name, each in self._tracked.items()},
            "buffers": list(trainer.first_buffers),
            "layout": self._layout(),
            "contexts": [context.to_bytes(replicas.num_loader_workers) for context in replicas.contexts],
            "adaptation": trainer.adaptation.state_dict(),
        }

    def _layout(self) -> list[list[int]] | None:
        """L2, once it is in use; under D0 nothing, for a restarted DDP begins with L1 again."""
        gradients = self._trainer.gradients
        if gradients.waits_for_order or not gradients.sums.wanted or not self._trainer.keeps_layout:
            return None
        return gradients.layout.to_json()

    def load(self, state: dict[str, Any]) -> None:
        """Raises TrainError where it is of a program that tracks other objects."""
        trainer = self._trainer
        missing = set(state["tracked"]) ^ set(self._tracked)
        if missing:
            raise TrainError(f"tracked objects differ between workers or from the checkpoint: {sorted(missing)}")
        trainer.parts.model.load_state_dict(state["model"])
        for optimizer, saved in zip(trainer.parts.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, saved in state["tracked"].items():
            self._tracked[name].load_state_dict(saved)
        trainer.first_buffers = [
            saved.to(own.device) for saved, own in zip(state["buffers"], trainer.first_buffers, strict=True)
        ]
        trainer.buffers.load(trainer.first_buffers)
        if trainer.averaging is not None:
            trainer.averaging.loading(state["progress"][2])
        layout = state["layout"]
        trainer.gradients.use_layout(Layout.from_json(layout) if layout is not None else None)
        replicas = trainer.replicas
        replicas.contexts = [Context.from_bytes(data, replicas.num_loader_workers) for data in state["contexts"]]
        replicas.count = trainer.gradients.sums.num_replicas = len(replicas.contexts)
        trainer.progress = Progress(*state["progress"])
        if "adaptation" in state:  # checkpoints of before there were decisions have none
            trainer.adaptation.load_state_dict(state["adaptation"])
