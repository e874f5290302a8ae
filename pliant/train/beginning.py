"""The state that a job begins with: a checkpoint's, or what the program has built. Made by the first worker, for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pliant.errors import CheckpointError
from pliant.train import determinism, rng
from pliant.train.context import Context
from pliant.train.data.stream import Stream
from pliant.train.job_state import JobState
from pliant.train.state import checkpoint
from pliant.train.trainer import Trainer

Say = Callable[[str], None]


def begin(
    trainer: Trainer, state: JobState, had_state: bool, *, asked: str, directory: str, seed: int | None, say: Say
) -> None:
    """Have a state.

    Args:
        had_state: whether the job had one before and lost it.
        asked: the checkpoint to begin with; `auto` is the newest of `directory`, the job's own.
        seed: replica r's random generators begin with seed + r; None: with those of the program.

    Raises:
        CheckpointError: the checkpoint is no good, or of a job with another number of replicas.
    """
    if trainer.replicas.count > 1:
        _check_fold(trainer.replicas.count, say)
    if not asked and had_state and directory:
        asked = "auto"
    found = checkpoint.newest(directory) if asked == "auto" else Path(asked) if asked else None
    if found is not None:
        _resume(trainer, state, found, say)
        return
    if had_state:
        say("all workers with the job's state were lost, and there is no checkpoint: beginning again at step 0")
    trainer.first_buffers = trainer.buffers.save()
    own = b"" if trainer.parts.sync_buffers else bytes(trainer.buffers.pack(trainer.first_buffers).numpy())
    random = _first_random(trainer, seed)
    trainer.replicas.contexts = [Context(each, Stream(), own) for each in random]


def _resume(trainer: Trainer, state: JobState, path: Path, say: Say) -> None:
    loaded, count = checkpoint.load(path), trainer.replicas.count
    if loaded.num_replicas != count:
        raise CheckpointError(
            f"{path} is of a job with {loaded.num_replicas} replicas, this one has {count}: "
            f"that is another experiment; use replicas={loaded.num_replicas}"
        )
    state.load({**loaded.state, "contexts": loaded.contexts})  # type: ignore[dict-item]
    say(f"resumed from {path} at step {loaded.step}")
    trainer.adaptation.resumed_at = loaded.step


def _check_fold(num_replicas: int, say: Say) -> None:
    found = determinism.self_check(num_replicas)
    if not found.ok:
        say(f"torch {torch.__version__} does not sum as expected, so only D0 holds: {found.detail}")


def _first_random(trainer: Trainer, seed: int | None) -> list[rng.RngState]:
    device, count = trainer.parts.device, trainer.replicas.count
    if seed is None:
        return [rng.capture(device)] * count
    return [rng.seeded(seed + replica, device) for replica in range(count)]
