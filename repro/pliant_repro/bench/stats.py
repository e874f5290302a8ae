"""Medians and spreads of samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the samples lie, interpolated between neighbours."""
    assert samples, "a quantile of nothing"
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a series of samples says; seconds, or whatever the samples were."""

    median: float
    iqr: float
    p10: float
    p90: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        return cls(
            median=quantile(samples, 0.5),
            iqr=quantile(samples, 0.75) - quantile(samples, 0.25),
            p10=quantile(samples, 0.1),
            p90=quantile(samples, 0.9),
            num_samples=len(samples),
        )

    def to_json(self) -> dict[str, float]:
        """With the names of the one form that all benches write."""
        return {
            "median_s": self.median,
            "iqr_s": self.iqr,
            "p10_s": self.p10,
            "p90_s": self.p90,
            "num_samples": self.num_samples,
        }


def paired_ratios(others: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> list[float]:
    """The other's median over ours, round by round: what a round's noise does to both cancels."""
    pairs = zip(others, ours, strict=False)
    return [quantile(other, 0.5) / quantile(own, 0.5) for other, own in pairs if other and own]
