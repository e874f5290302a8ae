"""The verdict on a result of `pliant bench priority`: its shape, its peak and its bounds, against what P3 published.

Pure: a result in, one line per check out. The thresholds are those of the reference's acceptance scenarios, and the
project's own where these are stricter.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.bench.priority.cells import DDP, PLAIN, exact, too_busy
from pliant_repro.bench.priority.paper import FIG7_MODES, published

LEAST_FRACTION, LEAST_WORST = 0.95, 0.93
"""Of P*: the median at every rate, and the worst repeat."""
NEAR_FIFO = 0.05
LEAST_GAIN = 0.25
"""Over the best DDP where r is 1."""
PEAK_GAIN = (0.20, 0.33)
"""Over the best that has a barrier; no more than F/(F+B) is possible."""
NO_LOSS = 0.03
EXTRA_BYTES = 0.05
IMBALANCE = 0.05
TUNED = 0.05
SETTLED = 20
"""Steps until a new rate is used as well as it ever is."""
BARRIERS = ("slicing", "fifo", DDP)


@dataclass(frozen=True, slots=True)
class Check:
    """One question, and its answer."""

    name: str
    ok: bool | None
    """None: not judged."""
    found: str

    def __str__(self) -> str:
        word = "  --" if self.ok is None else "  ok" if self.ok else "FAIL"
        return f"{word}  {self.name}: {self.found}"


def load(path: Path) -> Json:
    """A result that `pliant bench priority --json` wrote.

    Raises:
        ConfigError: it is none.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--validate {path}: {why}; give what `pliant bench priority --json FILE` wrote") from None
    if not isinstance(result, dict) or result.get("bench") != "priority" or not result.get("cells"):
        raise ConfigError(f"--validate {path}: no result of `pliant bench priority --json FILE`")
    return cast(Json, result)


def judge(result: Mapping[str, object]) -> list[Check]:
    """All checks that the result has the cells for."""
    cells = cast("list[Json]", result["cells"])
    checks: list[Check] = []
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        checks += _of_slices([one for one in cells if one["model"] == model])
        rates = _by_rate([one for one in cells if one["model"] == model])
        checks += [check for rate, modes in rates for check in _at_rate(model, rate, modes)]
        checks += _of_the_curve(model, rates)
    return checks


Modes = Mapping[str, Json]
Rates = Sequence[tuple[float | None, Modes]]


def _by_rate(cells: Sequence[Json]) -> list[tuple[float | None, Modes]]:
    """The cells by mode at each rate, slowest first; of several slice sizes, the tuned one or the fastest.

    A rate that was come back to is there twice.
    """
    found: dict[tuple[float, object], dict[str, Json]] = {}
    for one in cells:
        key = (_value(one, "rate_mbit") or math.inf, one.get("stage", 0))
        modes = found.setdefault(key, {})
        before = modes.get(str(one["mode"]))
        if before is None or (before["slice"] != "auto" and (one["slice"] == "auto" or _faster(one, before))):
            modes[str(one["mode"])] = one
    return [(rate if math.isfinite(rate) else None, found[rate, stage]) for rate, stage in sorted(found, key=_order_of)]


def _order_of(key: tuple[float, object]) -> tuple[float, str]:
    return key[0], str(key[1])


def _faster(one: Json, other: Json) -> bool:
    return (_value(one, "iter_median_s") or math.inf) < (_value(other, "iter_median_s") or math.inf)


def _step_s(modes: Modes, mode: str) -> float | None:
    value = modes[mode].get("iter_median_s") if mode in modes else None
    return value if isinstance(value, float) else None


def _best_s(modes: Modes, names: Sequence[str]) -> float | None:
    return min((step_s for name in names if (step_s := _step_s(modes, name)) is not None), default=None)


def _value(one: Json, key: str) -> float | None:
    value = one.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _where(model: str, rate: float | None) -> str:
    return f"{model} at {rate:g} Mbit/s" if rate else f"{model} without limit"


def _at_rate(model: str, rate: float | None, modes: Modes) -> Iterator[Check]:
    where = _where(model, rate)
    for mode, one in modes.items():
        if "failure" in one:
            yield Check(f"{where}, {mode} ran", False, str(one["failure"]))
        elif too_busy(one):
            found = f"processors {one['cpu_busy']:.0%} busy: no verdict"
            yield Check(f"{where}, {mode}: the links set the pace", None, found)
    quiet = {mode: one for mode, one in modes.items() if not too_busy(one)}
    yield from _order(where, quiet)
    yield from _bounds(where, model, quiet)
    yield from _bytes(where, modes)
    yield from _bits(where, modes)
    if rate:
        yield from _beside_paper(where, model, rate, quiet)


def _of_slices(cells: Sequence[Json]) -> Iterator[Check]:
    """Where sizes of slices were tried: the tuner finds one that is about as good as the best."""
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


def _order(where: str, modes: Modes) -> Iterator[Check]:
    first, second, third = (_step_s(modes, name) for name in ("priority", "slicing", "baseline"))
    if first and second:
        # Where there is nothing to gain both are equally good, and medians differ by chance: 2 %.
        yield Check(f"{where}: priority >= slicing", first <= 1.02 * second, f"{second / first:.3f}x")
    if second and third:
        yield Check(f"{where}: slicing >= 0.97 baseline", second <= third / 0.97, f"{third / second:.3f}x")


def _bounds(where: str, model: str, modes: Modes) -> Iterator[Check]:
    ours = modes.get("priority")
    if ours is not None and (fraction := _value(ours, "fraction_of_bound")) is not None:
        worst = _value(ours, "fraction_of_worst_repeat") or 0.0
        yield Check(f"{where}: P*/measured >= {LEAST_FRACTION}", fraction >= LEAST_FRACTION, f"{fraction:.3f}")
        yield Check(f"{where}: P*/worst repeat >= {LEAST_WORST}", worst >= LEAST_WORST, f"{worst:.3f}")
    warmup, settled = ours.get("warmup_s") if ours else None, _value(ours, "settled_after") if ours else None
    if warmup and (settled is not None or len(cast("list[float]", warmup)) >= SETTLED):
        ok = settled is not None and settled <= SETTLED
        said = (
            f"after {settled:.0f} steps" if settled is not None else f"not in {len(cast('list[float]', warmup))} steps"
        )
        yield Check(f"{where}: a new rate is used within {SETTLED} steps", ok, said)
    over = _value(modes["slicing"], "over_p_fifo") if "slicing" in modes else None
    if over is not None:
        yield Check(f"{where}: slicing within {NEAR_FIFO:.0%} of P_fifo", abs(over) <= NEAR_FIFO, f"{over:+.1%}")
    r = _value(ours, "r") if ours is not None else None
    step_s, ddp_s, best_s = _step_s(modes, "priority"), _step_s(modes, DDP), _best_s(modes, BARRIERS)
    if r is None or step_s is None:
        return
    if ddp_s and r <= 0.5:
        change = step_s / ddp_s - 1
        yield Check(f"{where} (r {r:.2f}): no slower than ddp by {NO_LOSS:.0%}", change <= NO_LOSS, f"{change:+.1%}")
    if ddp_s and 0.9 <= r <= 1.1:
        gain = ddp_s / step_s - 1
        yield Check(f"{where} (r {r:.2f}): >= {LEAST_GAIN:.0%} over the best ddp", gain >= LEAST_GAIN, f"{gain:+.1%}")
    if best_s and (cap := _value(cast(Json, ours), "gain_cap")) is not None:
        gain = best_s / step_s - 1
        # Beyond the cap means that the barrier modes lost time elsewhere, not that priorities gained it.
        yield Check(f"{where}: gain over the best barrier", None, f"{gain:+.1%} (cap {cap:.1%})")


def _bytes(where: str, modes: Modes) -> Iterator[Check]:
    for mode, one in modes.items():
        more, uneven = _value(one, "tx_over_least"), _value(one, "owner_imbalance")
        if mode == PLAIN or more is None:
            continue
        name = f"{where}, {mode}: bytes within {EXTRA_BYTES:.0%} of 2(N-1)/N*S, owners within {IMBALANCE:.0%}"
        ok = abs(more) <= EXTRA_BYTES and (uneven or 0.0) <= IMBALANCE
        yield Check(name, ok, f"{more:+.1%}, {uneven or 0.0:.1%}")


def _bits(where: str, modes: Modes) -> Iterator[Check]:
    same = {mode: one for mode, one in modes.items() if exact(one) and one.get("hash")}
    longest = max((cast(int, one["hash_steps"]) for one in same.values()), default=0)
    hashes = {mode: str(one["hash"]) for mode, one in same.items() if one["hash_steps"] == longest}
    if len(hashes) < 2:
        return
    agree = all(one.get("same_on_all_ranks") for one in same.values()) and len(set(hashes.values())) == 1
    found = f"{', '.join(hashes)} after {longest} steps"
    if not agree:
        found = ", ".join(f"{mode} {value[:8]}" for mode, value in hashes.items())
    yield Check(f"{where}: the same bits on all ranks and in all modes", agree, found)


def _beside_paper(where: str, model: str, rate: float, modes: Modes) -> Iterator[Check]:
    """Ours may be faster than P3 was, and is not to be much slower; the other two show how alike the setups are."""
    paper = published(model, rate)
    for mode in FIG7_MODES:
        ours = _value(modes[mode], "samples_per_s") if mode in modes else None
        if mode not in paper or ours is None:
            continue
        ratio = ours / paper[mode]
        said = f"{ours:.1f} samples/s, paper {paper[mode]:.1f} ({ratio:.2f}x)"
        if mode == "priority":
            yield Check(f"{where}: at least 0.95 of P3's curve", ratio >= 0.95, said)
        else:
            yield Check(f"{where}: {mode} beside the paper's", None, said)


def _of_the_curve(model: str, rates: Rates) -> Iterator[Check]:
    """What only a sweep can say: whether it rises, and where the gain is largest."""
    ours = [step_s for _, modes in rates if (step_s := _step_s(modes, "priority")) is not None]
    if len(ours) > 2:
        rises = all(after <= 1.03 * before for before, after in itertools.pairwise(ours))
        yield Check(f"{model}: throughput rises with the rate", rises, " ".join(f"{1 / each:.2f}/s" for each in ours))
    gains: dict[float, tuple[float, float]] = {}
    for rate, modes in rates:
        step_s, best_s = _step_s(modes, "priority"), _best_s(modes, BARRIERS)
        r = _value(modes["priority"], "r") if "priority" in modes else None
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
        yield from _of_vgg(rates)


def _of_vgg(rates: Rates) -> Iterator[Check]:
    """One layer holds most of VGG: whole layers cannot be overlapped, slices can."""
    for rate, modes in rates:
        one = modes.get("priority") or modes.get("slicing")
        r = _value(one, "r") if one else None
        ours, sliced, whole = (_step_s(modes, name) for name in ("priority", "slicing", "baseline"))
        if rate is None or r is None or not sliced:
            continue
        if whole and r <= 1:
            gain = whole / sliced - 1
            yield Check(
                f"vgg at {rate:g} Mbit/s (r {r:.2f}): slicing >= 25% over baseline", gain >= 0.25, f"{gain:+.1%}"
            )
        if ours and 1.05 <= r <= 1.35:
            gain = sliced / ours - 1
            yield Check(
                f"vgg at {rate:g} Mbit/s (r {r:.2f}): priority >= 10% over slicing", gain >= 0.10, f"{gain:+.1%}"
            )
