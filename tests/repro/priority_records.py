"""Records of contests on a slow network that never took place, for `pliant bench priority` to compute with."""

from __future__ import annotations

from typing import Any

from pliant_repro.bench.priority import PriorityEntry, PriorityRecord
from pliant_repro.bench.priority_cells import LinkSetting
from pliant_repro.scaling_model import Layer

LAYERS = (Layer(0.1, 0.2, 1_000_000), Layer(0.1, 0.2, 3_000_000))


def setting(rate_mbit: float | None = 80, model: str = "resnet50") -> LinkSetting:
    bits = None if rate_mbit is None else int(rate_mbit * 1e6)
    return LinkSetting(
        model=model, compute="paced", nodes=4, rate_bits_per_s=bits, capacity_bits_per_s=bits, capacity_from="test",
        layers=LAYERS, layers_from="test", num_bytes=4_000_000, samples=32,
    )  # fmt: skip


def record(*seconds: float, digest: str = "aa", failure: str = "", busy: float = 0.3, **more: Any) -> PriorityRecord:
    rounds = [[each] * 3 for each in seconds]
    return PriorityRecord(
        rounds=rounds, cpu_s=[0.1] * len(rounds), tx_bytes=[[6e6, 6e6, 6.06e6, 6e6]] * len(rounds),
        busy=[busy] * len(rounds), hashes=[digest] * 4, hash_steps=20, failure=failure, **more,
    )  # fmt: skip


def entry(mode: str, **more: Any) -> PriorityEntry:
    return PriorityEntry(more.pop("label", mode), mode, None, **more)  # type: ignore[arg-type]
