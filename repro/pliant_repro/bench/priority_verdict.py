"""`pliant bench priority --validate`: judge the shape, the peak and the bounds of a result against what P3 published.

A result goes in, one line per check comes out. Each threshold is a constant below: a published number,
or a stricter goal of ours. The published numbers (arXiv 1905.03960) are read from vector figures to about 0.5 %.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, reason
from pliant.machine import Json
from pliant_repro.bench.priority_cells import DDP, PLAIN, has_ddp_bits, too_busy
from pliant_repro.profiles import SCALES

# --- what the paper published ---

FIG7: dict[str, dict[float, tuple[float, float, float]]] = {
    "resnet50": {
        1: (22.1, 23.6, 25.2), 2: (43.7, 44.1, 50.3), 3: (61.0, 62.0, 76.3), 4: (76.4, 77.7, 96.6),
        5: (90.6, 91.5, 99.1), 6: (98.0, 100.7, 101.9), 8: (99.3, 100.6, 100.7), 10: (99.3, 100.6, 100.7),
    },
    "inception-v3": {
        1: (25.0, 24.0, 26.4), 2: (45.2, 43.9, 52.7), 3: (61.2, 60.5, 69.0), 4: (67.4, 68.4, 69.8),
        5: (67.6, 67.9, 69.5), 6: (67.4, 67.3, 70.5), 8: (68.2, 70.3, 70.3), 10: (68.2, 70.3, 70.3),
    },
    "vgg": {
        3: (13.0, 13.0, 13.8), 4: (16.6, 16.9, 18.4), 5: (19.8, 20.6, 22.8), 6: (22.4, 24.2, 27.3),
        8: (26.8, 30.8, 35.5), 10: (30.1, 36.9, 43.4), 12: (32.1, 42.5, 50.4), 15: (32.9, 48.3, 54.3),
        20: (34.3, 49.7, 54.5), 30: (34.8, 52.2, 55.1),
    },
    "sockeye": {
        1: (15.8, 22.8, 23.5), 2: (33.6, 43.8, 46.3), 3: (51.0, 62.9, 67.8), 4: (67.0, 80.4, 88.2),
        5: (82.9, 96.0, 106.6), 6: (95.1, 109.6, 123.6), 8: (112.2, 130.3, 143.7), 10: (122.1, 143.1, 154.9),
        15: (134.2, 149.2, 166.9), 20: (136.8, 150.1, 166.2), 30: (139.3, 151.1, 168.0),
    },
}  # fmt: skip
"""Samples per second of one worker at batch 32 by Gbit/s, on 4 machines: baseline, slicing, P3."""
FIG7_MODES = ("baseline", "slicing", "priority")

FIG9: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "resnet50": (4, (0.73, 0.87), (0.12, 0.03)),
    "vgg": (15, (0.45, 0.74), (0.26, 0.02)),
    "sockeye": (4, (0.63, 0.86), (0.27, 0.03)),
}
"""Gbit/s; mean share of the capacity that is sent (baseline, P3); share of time with less than 5 % (baseline, P3)."""

FIG10: dict[str, dict[int, tuple[float, float]]] = {
    "resnet50": {1: (68.9, 68.9), 2: (135, 136), 4: (269, 270), 8: (523, 532), 16: (858, 895)},
    "vgg": {1: (41.7, 41.7), 2: (52.3, 64.5), 4: (99, 130), 8: (142, 229), 16: (204, 298)},
    "sockeye": {1: (166, 166), 2: (159, 175), 4: (381, 423), 8: (578, 683), 16: (876, 936)},
}
"""Samples per second of all machines (baseline, P3), by machines, at 10 Gbit/s; the GPUs are others than in figure 7."""

FIG12: dict[str, dict[int, float]] = {
    "resnet50": {5_000: 90.2, 10_000: 95.0, 50_000: 97.2, 100_000: 94.9, 500_000: 84.0, 1_000_000: 77.4},
    "vgg": {5_000: 15.2, 10_000: 27.8, 50_000: 56.4, 100_000: 56.2, 500_000: 55.7, 1_000_000: 54.9},
    "sockeye": {5_000: 77.5, 10_000: 118.0, 50_000: 157.7, 100_000: 156.3, 500_000: 139.5, 1_000_000: 123.2},
}
"""Samples per second by parameters per slice."""


def published(model: str, rate_mbit: float) -> dict[str, float]:
    """Return what each mode of the paper reached at the rate that this one stands for; empty if it has no such point."""
    gbps = rate_mbit * SCALES.get(model, 1.0) / 1000
    for point, values in FIG7.get(model, {}).items():
        if abs(point - gbps) < 0.01 * point:
            return dict(zip(FIG7_MODES, values, strict=True))
    return {}


# --- the verdict ---

LEAST_FRACTION, LEAST_WORST = 0.95, 0.93
"""Least share of P* at every rate: of the median step, and of the worst repeat."""
NEAR_FIFO = 0.05
LEAST_GAIN = 0.25
"""Least gain over the best DDP where r is 1."""
PEAK_GAIN = (0.20, 0.33)
"""Range of the largest gain over the best mode with a barrier; no more than F/(F+B) is possible."""
NO_LOSS = 0.03
EXTRA_BYTES = 0.05
IMBALANCE = 0.05
TUNED = 0.05
SETTLED = 20
"""Largest number of steps until a new rate is used as well as it ever is."""
BARRIERS = ("slicing", "fifo", DDP)


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer."""

    name: str
    ok: bool | None
    """None means not judged."""
    found: str

    def __str__(self) -> str:
        word = "  --" if self.ok is None else "  ok" if self.ok else "FAIL"
        return f"{word}  {self.name}: {self.found}"


def judge_file(path: Path) -> list[Check]:
    """Return all checks of a result that `pliant bench priority --json` wrote.

    Raises:
        ConfigError: the file holds no such result.
    """
    remedy = "give what `pliant bench priority --json FILE` wrote"
    try:
        result = json.loads(path.read_text())
        if result["bench"] != "priority" or not result["cells"]:
            raise ConfigError(f"--validate {path}: no result of this bench; {remedy}")
        return judge(result)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--validate {path}: {reason(error)}; {remedy}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--validate {path}: something of it is missing or damaged ({error!r}); {remedy}") from None


def judge(result: Mapping[str, object]) -> list[Check]:
    """Return all checks for which the result has cells."""
    cells = cast("list[Json]", result["cells"])
    checks: list[Check] = []
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        checks += _check_slices([one for one in cells if one["model"] == model])
        rates = _by_rate([one for one in cells if one["model"] == model])
        checks += [check for rate, modes in rates for check in _check_rate(model, rate, modes)]
        checks += _check_curve(model, rates)
    return checks


Modes = Mapping[str, Json]
Rates = Sequence[tuple[float | None, Modes]]


def _by_rate(cells: Sequence[Json]) -> list[tuple[float | None, Modes]]:
    """Return the cells by mode at each rate, slowest first; of several slice sizes, the tuned one or the fastest.

    A rate that was measured twice is there twice.
    """
    found: dict[tuple[float, int], dict[str, Json]] = {}
    for one in sorted(cells, key=_rank_of_slice):
        rate, stage = _value(one, "rate_mbit") or math.inf, cast(int, one.get("stage", 0))
        found.setdefault((rate, stage), {}).setdefault(str(one["mode"]), one)
    return [(rate if math.isfinite(rate) else None, found[rate, stage]) for rate, stage in sorted(found)]


def _rank_of_slice(one: Json) -> float:
    return 0.0 if one["slice"] == "auto" else _value(one, "iter_median_s") or math.inf


def _value(one: Json | None, key: str) -> float | None:
    value = (one or {}).get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _step_s(modes: Modes, mode: str) -> float | None:
    return _value(modes.get(mode), "iter_median_s")


def _best_s(modes: Modes, names: Sequence[str]) -> float | None:
    return min((step_s for name in names if (step_s := _step_s(modes, name)) is not None), default=None)


def _where(model: str, rate: float | None) -> str:
    return f"{model} at {rate:g} Mbit/s" if rate else f"{model} without limit"


def _check_rate(model: str, rate: float | None, modes: Modes) -> Iterator[Check]:
    where = _where(model, rate)
    for mode, one in modes.items():
        if "failure" in one:
            yield Check(f"{where}, {mode} ran", False, str(one["failure"]))
        elif too_busy(one):
            found = f"processors {one['cpu_busy']:.0%} busy: no verdict"
            yield Check(f"{where}, {mode}: the links set the pace", None, found)
    quiet = {mode: one for mode, one in modes.items() if not too_busy(one)}
    yield from _check_order(where, quiet)
    yield from _check_bounds(where, model, quiet)
    yield from _check_bytes(where, modes)
    yield from _check_bits(where, modes)
    if rate:
        yield from _check_paper(where, model, rate, quiet)


def _check_slices(cells: Sequence[Json]) -> Iterator[Check]:
    """Check that the tuner finds a slice size about as good as the best of those tried."""
    for rate, mode in dict.fromkeys((one["rate_mbit"], str(one["mode"])) for one in cells):
        speeds = {
            str(one["slice"]): step_s
            for one in cells
            if (one["rate_mbit"], one["mode"]) == (rate, mode) and (step_s := _value(one, "iter_median_s")) is not None
        }
        tuned_s = speeds.pop("auto", None)
        if tuned_s is None or not speeds:
            continue
        best = min(speeds, key=lambda size: speeds[size])
        found = f"{tuned_s * 1e3:.0f} ms, {speeds[best] * 1e3:.0f} ms with slices of {best}"
        where = _where(str(cells[0]["model"]), cast("float | None", rate))
        name = f"{where}, {mode}: tuned within {TUNED:.0%} of the best slice size"
        yield Check(name, tuned_s <= speeds[best] / (1 - TUNED), found)


def _check_order(where: str, modes: Modes) -> Iterator[Check]:
    first, second, third = (_step_s(modes, name) for name in ("priority", "slicing", "baseline"))
    if first and second:
        # If there is nothing to gain both are equally good, and medians differ by chance: 2 %.
        yield Check(f"{where}: priority >= slicing", first <= 1.02 * second, f"{second / first:.3f}x")
    if second and third:
        yield Check(f"{where}: slicing >= 0.97 baseline", second <= third / 0.97, f"{third / second:.3f}x")


def _check_bounds(where: str, model: str, modes: Modes) -> Iterator[Check]:
    ours = modes.get("priority")
    if (fraction := _value(ours, "fraction_of_bound")) is not None:
        worst = _value(ours, "fraction_of_worst_repeat") or 0.0
        yield Check(f"{where}: P*/measured >= {LEAST_FRACTION}", fraction >= LEAST_FRACTION, f"{fraction:.3f}")
        yield Check(f"{where}: P*/worst repeat >= {LEAST_WORST}", worst >= LEAST_WORST, f"{worst:.3f}")
    warmup = cast("list[float]", (ours or {}).get("warmup_s") or [])
    settled = _value(ours, "settled_after")
    if warmup and (settled is not None or len(warmup) >= SETTLED):
        ok = settled is not None and settled <= SETTLED
        said = f"after {settled:.0f} steps" if settled is not None else f"not in {len(warmup)} steps"
        yield Check(f"{where}: a new rate is used within {SETTLED} steps", ok, said)
    if (over := _value(modes.get("slicing"), "over_p_fifo")) is not None:
        yield Check(f"{where}: slicing within {NEAR_FIFO:.0%} of P_fifo", abs(over) <= NEAR_FIFO, f"{over:+.1%}")
    r = _value(ours, "r")
    step_s, ddp_s, best_s = _step_s(modes, "priority"), _step_s(modes, DDP), _best_s(modes, BARRIERS)
    if r is None or step_s is None:
        return
    if ddp_s and r <= 0.5:
        change = step_s / ddp_s - 1
        yield Check(f"{where} (r {r:.2f}): no slower than ddp by {NO_LOSS:.0%}", change <= NO_LOSS, f"{change:+.1%}")
    if ddp_s and 0.9 <= r <= 1.1:
        gain = ddp_s / step_s - 1
        yield Check(f"{where} (r {r:.2f}): >= {LEAST_GAIN:.0%} over the best ddp", gain >= LEAST_GAIN, f"{gain:+.1%}")
    if best_s and (cap := _value(ours, "gain_cap")) is not None:
        gain = best_s / step_s - 1
        # Beyond the cap means that the barrier modes lost time elsewhere, not that priorities gained it.
        yield Check(f"{where}: gain over the best barrier", None, f"{gain:+.1%} (cap {cap:.1%})")


def _check_bytes(where: str, modes: Modes) -> Iterator[Check]:
    for mode, one in modes.items():
        more, uneven = _value(one, "tx_over_least"), _value(one, "owner_imbalance")
        if mode == PLAIN or more is None:
            continue
        name = f"{where}, {mode}: bytes within {EXTRA_BYTES:.0%} of 2(N-1)/N*S, owners within {IMBALANCE:.0%}"
        ok = abs(more) <= EXTRA_BYTES and (uneven or 0.0) <= IMBALANCE
        yield Check(name, ok, f"{more:+.1%}, {uneven or 0.0:.1%}")


def _check_bits(where: str, modes: Modes) -> Iterator[Check]:
    same = {mode: one for mode, one in modes.items() if has_ddp_bits(one) and one.get("hash")}
    longest = max((cast(int, one["hash_steps"]) for one in same.values()), default=0)
    hashes = {mode: str(one["hash"]) for mode, one in same.items() if one["hash_steps"] == longest}
    if len(hashes) < 2:
        return
    agree = all(one.get("same_on_all_ranks") for one in same.values()) and len(set(hashes.values())) == 1
    found = f"{', '.join(hashes)} after {longest} steps"
    if not agree:
        found = ", ".join(f"{mode} {value[:8]}" for mode, value in hashes.items())
    yield Check(f"{where}: the same bits on all ranks and in all modes", agree, found)


def _check_paper(where: str, model: str, rate: float, modes: Modes) -> Iterator[Check]:
    """Check that ours is not much slower than P3 was; the other two modes show how alike the setups are."""
    paper = published(model, rate)
    for mode in FIG7_MODES:
        ours = _value(modes.get(mode), "samples_per_s")
        if mode not in paper or ours is None:
            continue
        ratio = ours / paper[mode]
        said = f"{ours:.1f} samples/s, paper {paper[mode]:.1f} ({ratio:.2f}x)"
        if mode == "priority":
            yield Check(f"{where}: at least 0.95 of P3's curve", ratio >= 0.95, said)
        else:
            yield Check(f"{where}: {mode} beside the paper's", None, said)


def _check_curve(model: str, rates: Rates) -> Iterator[Check]:
    """Check what only a sweep shows: whether throughput rises with the rate, and where the gain is largest."""
    ours = [step_s for _, modes in rates if (step_s := _step_s(modes, "priority")) is not None]
    if len(ours) > 2:
        rises = all(after <= 1.03 * before for before, after in itertools.pairwise(ours))
        yield Check(f"{model}: throughput rises with the rate", rises, " ".join(f"{1 / each:.2f}/s" for each in ours))
    gains: dict[float, tuple[float, float]] = {}
    for rate, modes in rates:
        step_s, best_s = _step_s(modes, "priority"), _best_s(modes, BARRIERS)
        r = _value(modes.get("priority"), "r")
        if rate and step_s and best_s and r is not None:
            gains[rate] = (best_s / step_s - 1, r)
    if len(gains) > 2 and min(r for _, r in gains.values()) < 0.9 < 1.1 < max(r for _, r in gains.values()):
        peak = max(gains, key=lambda rate: gains[rate][0])
        gain, r = gains[peak]
        nearest = min(abs(each - 1) for _, each in gains.values())
        yield Check(
            f"{model}: the gain is largest near r = 1", abs(r - 1) <= max(0.3, nearest), f"{peak:g} Mbit/s, r {r:.2f}"
        )
        low, high = PEAK_GAIN
        name = f"{model}: the largest gain over the best barrier is {low:.0%} to {high:.0%}"
        yield Check(name, low <= gain <= high + 0.02, f"{gain:+.1%} at {peak:g} Mbit/s")
    if model == "vgg":
        yield from _check_vgg(rates)


def _check_vgg(rates: Rates) -> Iterator[Check]:
    """Check VGG, most of which is one layer: whole layers cannot be overlapped, slices can."""
    for rate, modes in rates:
        r = _value(modes.get("priority") or modes.get("slicing"), "r")
        ours, sliced, whole = (_step_s(modes, name) for name in ("priority", "slicing", "baseline"))
        if rate is None or r is None or not sliced:
            continue
        if whole and r <= 1:
            gain = whole / sliced - 1
            name = f"vgg at {rate:g} Mbit/s (r {r:.2f}): slicing >= 25% over baseline"
            yield Check(name, gain >= 0.25, f"{gain:+.1%}")
        if ours and 1.05 <= r <= 1.35:
            gain = sliced / ours - 1
            name = f"vgg at {rate:g} Mbit/s (r {r:.2f}): priority >= 10% over slicing"
            yield Check(name, gain >= 0.10, f"{gain:+.1%}")
