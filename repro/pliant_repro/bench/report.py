"""The one form in which every bench writes its numbers, and the machine they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pliant.machine import Json
from pliant_repro.bench.contest import Series
from pliant_repro.bench.stats import Summary, paired_ratios, quantile


def measured(series: Series, num_bytes: int) -> Json:
    """One contender's numbers; the times are null where it failed."""
    if not series.rounds or series.failure:
        return {"median_s": None, "iqr_s": None, "failure": series.failure or "no round was finished"}
    summary = Summary.of(series.seconds)
    cores = len(os.sched_getaffinity(0))
    cpu_s = quantile(series.cpu_s, 0.5)
    values: Json = {
        **summary.to_json(),
        "cpu_s": cpu_s,
        "cpu_busy": cpu_s / (summary.median * cores),
        "tensor_bytes_per_s": num_bytes / summary.median,
    }
    if series.link_bytes:
        values["link_bytes"] = quantile(series.link_bytes, 0.5)
    if series.egress_bytes:
        values["egress_bytes"] = quantile(series.egress_bytes, 0.5)
    if series.wrong is not None:
        values["wrong_elements"] = series.wrong
    return values


def beside(peer: Series, ours: Series, num_bytes: int) -> Json:
    """A peer's numbers with `speedup`: its time over ours."""
    values = measured(peer, num_bytes)
    ratios = paired_ratios(peer.rounds, ours.rounds)
    if values["median_s"] is None or not ours.rounds or ours.failure or not ratios:
        return {**values, "speedup": None}
    speedup = quantile(peer.seconds, 0.5) / quantile(ours.seconds, 0.5)
    return {**values, "speedup": speedup, "speedup_p10": quantile(ratios, 0.1), "speedup_p90": quantile(ratios, 0.9)}


def bound(name: str, median_s: float | None, ours: Series, details: Mapping[str, object]) -> Json:
    """The bound with `fraction`: its time over ours, 1 where ours reaches it."""
    fraction = None
    if median_s is not None and ours.rounds and not ours.failure:
        fraction = median_s / quantile(ours.seconds, 0.5)
    return {"name": name, "median_s": median_s, "fraction": fraction, **details}


def is_ok(ours: Series) -> bool:
    return bool(ours.rounds) and not ours.failure and not ours.wrong


def failures(results: Mapping[str, Series]) -> list[str]:
    """A remark for everyone who failed or summed wrongly."""
    remarks = [series.failure for series in results.values() if series.failure]
    wrong = [f"{label}: {series.wrong} wrong elements" for label, series in results.items() if series.wrong]
    return list(dict.fromkeys(remarks)) + wrong


def fastest(labels: Sequence[str], results: Mapping[str, Series]) -> str:
    """The label with the least median; the first one where all failed."""
    finished = [label for label in labels if is_ok(results[label])]
    return min(finished, key=lambda label: quantile(results[label].seconds, 0.5), default=labels[0])
