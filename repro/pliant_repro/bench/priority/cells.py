"""From what was measured to the cells of the result of `pliant bench priority`. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.machine import Json
from pliant_repro.bench.priority.contest import Entry, Record
from pliant_repro.bench.stats import Summary, quantile
from pliant_repro.scaling_model import Bounds, Layer, bounds, tictac_efficiency

BUSY = 0.85
"""Beyond this the processors, not the links, set the pace: no verdict."""
IDLE = 0.05
"""Of the capacity: a sample with less is idle, as in the paper's figure 9."""
SMOOTH = 8
"""Steps that a loss is averaged over, before it counts as reached."""
SAME_LOSS = 1e-4
"""Two losses of one step that differ by less, relatively, are the same curve."""
GAIN_SHARE = 0.7
"""Of what priorities can gain at most: so much earlier the target is to be reached where compute is real."""
DDP, DDP_DEFAULT, PLAIN = "ddp", "ddp-default", "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """What all cells of one rate have in common."""

    model: str
    compute: str
    nodes: int
    rate_bits_per_s: int | None
    """What the links were set to; None: no limit."""
    capacity_bits_per_s: float | None
    """What they were measured to carry with all nodes sending at once; None: unknown."""
    capacity_from: str
    layers: tuple[Layer, ...]
    layers_from: str
    num_bytes: int
    """Of all gradients."""
    samples: int
    """Of a replica's step; 0: unknown."""

    @property
    def bound(self) -> Bounds | None:
        return self._bound(self.capacity_bits_per_s)

    @property
    def nominal_bound(self) -> Bounds | None:
        return self._bound(self.rate_bits_per_s)

    def _bound(self, bits_per_s: float | None) -> Bounds | None:
        return bounds(self.layers, self.nodes, bits_per_s / 8) if bits_per_s and self.layers else None

    @property
    def least_tx_bytes(self) -> float:
        """2(N-1)/N*S: what each node must send in a step."""
        return 2 * (self.nodes - 1) / self.nodes * self.num_bytes


def cell(ring: Ring, entry: Entry, record: Record, peers: Mapping[str, Record], mode: str = "") -> Json:
    """One line of the contest at one rate; `peers` are those that ours is set against, by name."""
    found = _parameters(ring, entry, mode or entry.mode)
    median_s = record.median_s
    if median_s is None:
        return {**found, **_nothing(), "failure": record.failure or "no repeat was finished", "ok": False}
    if found["mode"] == PLAIN:
        return {**found, **_nothing(), **_alone(record), "ok": True}
    summary = Summary.of(record.seconds)
    tx = [sum(each) / len(each) for each in record.tx_bytes]
    loads = [max(each) * len(each) / sum(each) - 1 for each in record.tx_bytes if sum(each)]
    tx_per_iter = quantile(tx, 0.5) if tx else None
    return {
        **found,
        "iter_median_s": median_s,
        "iter_iqr_s": summary.iqr,
        "iter_p10_s": summary.p10,
        "iter_p90_s": summary.p90,
        "num_iters": summary.num_samples,
        "repeats": len(record.rounds),
        "repeat_medians_s": [quantile(each, 0.5) for each in record.rounds],
        "warmup_s": record.warmup_s,
        "settled_after": settled_after(record.warmup_s, median_s),
        "samples_per_s": ring.samples / median_s if ring.samples else None,
        **_held_against(ring.bound, record, median_s),
        "nominal_p_star_s": ring.nominal_bound.p_star_s if ring.nominal_bound else None,
        "tx_bytes_per_iter": tx_per_iter,
        "tx_over_least": tx_per_iter / ring.least_tx_bytes - 1 if tx_per_iter and ring.least_tx_bytes else None,
        "owner_imbalance": quantile(loads, 0.5) if loads else None,
        "cpu_s_per_iter": quantile(record.cpu_s, 0.5),
        "cpu_busy": quantile(record.busy, 0.5),
        "program_s_per_iter": quantile(record.compute_s, 0.5) if record.compute_s else None,
        "waited_s_per_iter": quantile(record.waited_s, 0.5) if record.waited_s else None,
        "slice_bytes": record.stats.get("slice_bytes"),
        "in_flight_bytes": record.stats.get("in_flight_bytes"),
        "estimated_bits_per_s": _bits(record.stats.get("rate_bytes_per_s")),
        "estimated_r": record.stats.get("r"),
        "ran_as": record.stats.get("mode"),
        "hash": record.hashes[0] if record.hashes else None,
        "hash_steps": record.hash_steps,
        "same_on_all_ranks": len(set(record.hashes)) == 1,
        **_gains(record, peers),
        **(_learned(record, peers, ring.bound) if ring.compute == "real" else {}),
        **utilisation(record.series, ring.capacity_bits_per_s),
        "ours": {"median_s": median_s, "iqr_s": summary.iqr},
        "peers": {name: _peer(peer, median_s) for name, peer in peers.items()},
        "bound": _bound_form(ring.bound, median_s),
        "ok": len(set(record.hashes)) == 1,
    }


def _parameters(ring: Ring, entry: Entry, mode: str) -> Json:
    bound = ring.bound
    return {
        "model": ring.model,
        "compute": ring.compute,
        "nodes": ring.nodes,
        "rate_mbit": ring.rate_bits_per_s / 1e6 if ring.rate_bits_per_s else None,
        "measured_mbit": ring.capacity_bits_per_s / 1e6 if ring.capacity_bits_per_s else None,
        "mode": mode,
        "slice": entry.slice_params if entry.slice_params is not None else "auto",
        "bucket_cap_mb": entry.bucket_cap_mb,
        "r": bound.r if bound else None,
        "compute_s": sum(layer.forward_s + layer.backward_s for layer in ring.layers) if ring.layers else None,
        "p_star_s": bound.p_star_s if bound else None,
        "p_fifo_s": bound.p_fifo_s if bound else None,
        "gain_cap": bound.gain_cap if bound else None,
    }


def _nothing() -> Json:
    empty = ("iter_median_s", "fraction_of_bound", "tx_bytes_per_iter", "cpu_s_per_iter", "hash")
    return {**dict.fromkeys(empty), "ours": {"median_s": None, "iqr_s": None}, "peers": {}, "bound": None}


def settled_after(steps_s: Sequence[float], median_s: float, margin: float = 0.10) -> int | None:
    """How many of these steps it took until all later ones were as fast as those that followed; None: never."""
    slow = [number for number, step_s in enumerate(steps_s) if step_s > (1 + margin) * median_s]
    settled = slow[-1] + 1 if slow else 0
    return settled if settled < len(steps_s) else None


def _alone(record: Record) -> Json:
    """Of the side that sends nothing there is only its time to tell."""
    summary = Summary.of(record.seconds)
    times = {"iter_median_s": summary.median, "iter_p10_s": summary.p10, "iter_p90_s": summary.p90}
    return {
        **times,
        "cpu_s_per_iter": quantile(record.cpu_s, 0.5),
        "program_s_per_iter": quantile(record.compute_s, 0.5),
    }


def _held_against(bound: Bounds | None, record: Record, median_s: float) -> Json:
    if bound is None:
        return {"fraction_of_bound": None, "fraction_of_worst_repeat": None, "tictac": None, "over_p_fifo": None}
    slowest_s = max(quantile(each, 0.5) for each in record.rounds)
    return {
        "fraction_of_bound": bound.fraction_of_bound(median_s),
        "fraction_of_worst_repeat": bound.fraction_of_bound(slowest_s),
        "tictac": tictac_efficiency(bound.compute_s, bound.traffic_s, median_s),
        "over_p_fifo": median_s / bound.p_fifo_s - 1,
    }


def _gains(record: Record, peers: Mapping[str, Record]) -> Json:
    """How much faster than each peer, by the medians, and by those of each repeat: its spread."""
    found: Json = {}
    for name, peer in peers.items():
        if peer is record or peer.median_s is None or record.median_s is None:
            continue
        pairs = zip(peer.rounds, record.rounds, strict=False)
        ratios = [quantile(theirs, 0.5) / quantile(own, 0.5) - 1 for theirs, own in pairs]
        key = f"gain_over_{name.replace('-', '_')}"
        found |= {key: peer.median_s / record.median_s - 1, f"{key}_worst": min(ratios), f"{key}_best": max(ratios)}
    return found


def _learned(record: Record, peers: Mapping[str, Record], bound: Bounds | None) -> Json:
    """The curve of losses, whether it is that of each peer, and how much earlier than they it is where all of them end."""
    found: Json = {"losses": record.losses}
    others = {name: peer for name, peer in peers.items() if peer is not record and peer.losses and not peer.failure}
    curves = [record, *others.values()]
    if not others or any(len(each.timed_losses) < SMOOTH for each in curves):
        return found
    target = max(_smoothed(each.timed_losses)[-1] for each in curves)
    own_s = time_to(record, target)
    found |= {"target_loss": target, "s_to_target": own_s}
    for name, peer in others.items():
        key = name.replace("-", "_")
        gain = time_to(peer, target) / own_s - 1
        apart = (abs(a - b) / max(abs(a), abs(b)) for a, b in zip(record.losses, peer.losses, strict=False) if a != b)
        found |= {
            f"loss_apart_from_{key}": max(apart, default=0.0),
            f"s_to_target_{key}": time_to(peer, target),
            f"gain_to_target_over_{key}": gain,
            f"gain_of_cap_over_{key}": gain / bound.gain_cap if bound and bound.gain_cap > 0 else None,
        }
    return found


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each step's loss and of those before it."""
    return [sum(losses[end - SMOOTH : end]) / SMOOTH for end in range(SMOOTH, len(losses) + 1)]


def time_to(record: Record, target: float) -> float:
    """Seconds of timed steps until the smoothed loss is as low as `target`; all of them if it never is."""
    reached = next((at for at, loss in enumerate(_smoothed(record.timed_losses)) if loss <= target), None)
    return sum(record.seconds[: reached + SMOOTH] if reached is not None else record.seconds)


def _on_losses(one: Json) -> list[str]:
    """The verdict on real training, against each peer."""
    found = []
    for key in ("ddp", "ddp_default"):
        apart, share = one.get(f"loss_apart_from_{key}"), one.get(f"gain_of_cap_over_{key}")
        if not isinstance(apart, float) or not isinstance(share, float):
            continue
        losses = one["losses"]
        assert isinstance(losses, list)
        same = "the same bits" if apart == 0 else f"within {apart:.1g}"
        holds = apart <= SAME_LOSS and share >= GAIN_SHARE
        found.append(
            f"{one['mode']} beside {key.replace('_', '-')} at {_rate(one)}: losses of {len(losses)} steps {same}; loss "
            f"{one['target_loss']:.4g} after {one['s_to_target']:.2f} s of steps, not {one[f's_to_target_{key}']:.2f} s: "
            f"gain {one[f'gain_to_target_over_{key}']:.1%}, {share:.0%} of gain_cap {one['gain_cap']:.1%}: "
            + ("holds" if holds else f"does not hold (losses within {SAME_LOSS:g}, {GAIN_SHARE:.0%} of the cap)")
        )
    return found


def _peer(peer: Record, median_s: float) -> Json:
    if peer.median_s is None:
        return {"median_s": None, "iqr_s": None, "speedup": None, "failure": peer.failure}
    return {"median_s": peer.median_s, "iqr_s": Summary.of(peer.seconds).iqr, "speedup": peer.median_s / median_s}


def _bound_form(bound: Bounds | None, median_s: float) -> Json | None:
    if bound is None:
        return None
    return {"name": "P*, ideal priorities", "median_s": bound.p_star_s, "fraction": bound.p_star_s / median_s}


def _bits(bytes_per_s: object) -> float | None:
    return bytes_per_s * 8 if isinstance(bytes_per_s, float) and bytes_per_s > 0 else None


def utilisation(series: Sequence[tuple[float, int]], capacity_bits_per_s: float | None) -> Json:
    """What the samples say: the mean share of the capacity that was sent, and the share of time that sent nearly none."""
    if len(series) < 3 or not capacity_bits_per_s:
        return {}
    rates = [
        (now[1] - then[1]) * 8 / (now[0] - then[0]) / capacity_bits_per_s
        for then, now in itertools.pairwise(series)
        if now[0] > then[0]
    ]
    spent_s = series[-1][0] - series[0][0]
    return {
        "tx_mean_share": (series[-1][1] - series[0][1]) * 8 / spent_s / capacity_bits_per_s,
        "tx_idle_share": sum(rate < IDLE for rate in rates) / len(rates),
        "tx_series": {"step_s": spent_s / (len(series) - 1), "share": [round(rate, 3) for rate in rates]},
    }


def measured_layers(rows: Sequence[Sequence[float]]) -> tuple[Layer, ...]:
    """The layers as a rank has timed them: forward seconds, backward seconds, bytes."""
    return tuple(Layer(forward_s, backward_s, int(size)) for forward_s, backward_s, size in rows)


def remarks_on(cells: Sequence[Json]) -> list[str]:
    """What a reader must know before believing the cells."""
    found = []
    if any(one["compute"] == "paced" for one in cells):
        found.append("compute is paced: layers wait for as long as a GPU would compute; gradients and weights are real")
    for one in cells:
        name = f"{one['model']} at {_rate(one)}, {one['mode']}"
        if "failure" in one:
            found.append(f"{name}: {one['failure']}")
        if too_busy(one):
            busy = f"{one['cpu_busy']:.0%}"
            found.append(f"{name}: the processors are {busy} busy, so they set the pace: no verdict on this cell")
        if one.get("same_on_all_ranks") is False:
            found.append(f"{name}: the ranks ended with different parameters")
        found += _on_losses(one)
    return found + _on_hashes(cells)


def too_busy(one: Json) -> bool:
    """Whether the processors set the pace, which only real computing may let them."""
    busy = one.get("cpu_busy")
    return one["compute"] == "paced" and isinstance(busy, float) and busy > BUSY


def _rate(one: Json) -> str:
    return f"{one['rate_mbit']:g} Mbit/s" if isinstance(one["rate_mbit"], float) else "no limit"


def exact(one: Json) -> bool:
    """Whether this cell's maths is DDP's with its default buckets, so that the bits must be the same."""
    return one["mode"] != PLAIN and (one["mode"] != DDP or one.get("bucket_cap_mb") is None)


def _on_hashes(cells: Sequence[Json]) -> list[str]:
    found = []
    for rate in dict.fromkeys(one["rate_mbit"] for one in cells):
        same = [one for one in cells if one["rate_mbit"] == rate and exact(one) and one["hash"]]
        by_steps = {(one["hash_steps"], one["hash"]) for one in same}
        if len({steps for steps, _ in by_steps}) == len(by_steps):
            continue
        listed = ", ".join(f"{one['mode']}/{one['slice']} {str(one['hash'])[:8]}" for one in same)
        found.append(f"at {_rate(same[0])} the parameters differ between modes: {listed}")
    if any(one["mode"] == DDP and not exact(one) for one in cells):
        found.append("ddp with other buckets than its default sums in another order: its hash is another, rightly")
    return found
