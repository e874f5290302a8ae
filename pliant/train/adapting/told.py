"""What adaptation adds to a worker's row of a step, and decisions, as bytes. Pure.

A row has the length of the sender's decisions, its clock, how its last step went, and then whatever its gradient probe has
to say. The decisions themselves follow where the first worker has some.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.adapt import Decision, WorkerFigures
from pliant.adapt.policy import decision_from_json

_HEAD = struct.Struct("<Idddddd")
"""The length, the clock, then what `WorkerFigures` has."""
HEAD_BYTES = _HEAD.size

Named = tuple[str, Decision]
"""Who has decided, and what."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one worker's row says."""

    num_bytes: int
    """Of its decisions; 0 without any."""
    clock_s: float
    figures: WorkerFigures
    probed: bytes
    """What its gradient probe says."""


def pack(figures: WorkerFigures, clock_s: float, decided: Sequence[Named], probed: bytes) -> bytes:
    """A worker's row."""
    length, own = len(to_bytes(decided)) if decided else 0, figures
    head = _HEAD.pack(length, clock_s, own.step_s, own.compute_s, own.comm_bytes, own.comm_s, own.egress_bytes)
    return head + probed


def unpack(name: str, row: bytes) -> Told:
    """The row of the worker with this name."""
    length, clock_s, step_s, compute_s, comm_bytes, comm_s, egress_bytes = _HEAD.unpack_from(row)
    figures = WorkerFigures(
        name=name,
        step_s=step_s,
        compute_s=compute_s,
        comm_bytes=comm_bytes,
        comm_s=comm_s,
        egress_bytes=egress_bytes,
    )
    return Told(length, clock_s, figures, row[_HEAD.size :])


def to_bytes(decided: Sequence[Named]) -> bytes:
    return json.dumps([[name, decision.to_json()] for name, decision in decided]).encode()


def from_bytes(data: bytes) -> list[Named]:
    return [(name, decision_from_json(decision)) for name, decision in json.loads(data)]
