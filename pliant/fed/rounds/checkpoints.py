"""A federated job between two rounds, as one file: safetensors, written atomically, with a SHA-256 over everything.

Nothing in it can run code. It says which config it is of, and is refused to any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant.errors import CheckpointError
from pliant.fed.config import FedConfig
from pliant.fed.rounds.journal import refuse_other
from pliant.train.state import checkpoint_file

NAME = "checkpoint.safetensors"
FORMAT = 1
REMEDY = "remove it to begin the job anew"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a job goes on from."""

    round: int
    batching: int
    data: str
    """The fingerprint of whose samples are whose."""
    state: Mapping[str, Any]
    """Model, aggregator, selector, clock, ...: of `Federation` and of its way of doing rounds."""
    kind: str = ""
    """On what it was computed; empty: on nothing yet, or nobody knows."""


def save(folder: Path, config: FedConfig, saved: Saved) -> None:
    """Put it in the place of the last one.

    Raises:
        CheckpointError: it cannot be written; the last one is as it was.
    """
    meta: dict[str, object] = {
        "federated": FORMAT,
        "config": config.model_dump(mode="json"),
        "batching": saved.batching,
        "data": saved.data,
        "kind": saved.kind,
    }
    whole = checkpoint_file.Checkpoint(saved.round, 0, 0, meta=meta, state=dict(saved.state))
    path = folder / NAME
    try:
        checkpoint_file.Image(whole, None).write(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}; the last one is as it was") from None


def load(folder: Path, config: FedConfig) -> Saved | None:
    """What this job goes on from; None: there is no checkpoint.

    Raises:
        CheckpointError: it is damaged, no checkpoint of a federated job, or one of another config.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        found = checkpoint_file.read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {REMEDY}") from None
    theirs, batching, data = (found.meta.get(name) for name in ("config", "batching", "data"))
    kind = found.meta.get("kind", "")
    if found.meta.get("federated") != FORMAT:
        raise CheckpointError(
            f"{path} is no checkpoint of a federated job, or one of another version; use another folder"
        )
    if not (isinstance(theirs, dict) and isinstance(batching, int) and isinstance(data, str) and isinstance(kind, str)):
        raise CheckpointError(f"{path} does not say what job it is of; {REMEDY}")
    refuse_other(f"{path}", theirs, config)
    if not isinstance(found.state, dict):
        raise CheckpointError(f"{path} holds no state of a federated job; {REMEDY}")
    return Saved(found.step, batching, data, found.state, kind)
