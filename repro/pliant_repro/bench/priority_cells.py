"""From measurements to the cells of the result of `pliant bench priority`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.contest import Summary, quantile
from pliant_repro.scaling_model import Bounds, Layer, bounds

if TYPE_CHECKING:
    from pliant_repro.bench.priority import PriorityEntry, PriorityRecord

DDP, DDP_DEFAULT, PLAIN = "ddp", "ddp-default", "plain"
BUSY = 0.85
"""Above this share of busy processors, they and not the links set the pace: no verdict."""
IDLE = 0.05
"""A sample of a link below this share of its capacity counts as idle, as in the paper's figure 9."""
SMOOTH = 8
"""Number of steps over which a loss is averaged before it counts as reached."""
SAME_LOSS = 1e-4
"""Two losses of one step that differ by less, relatively, belong to the same curve."""
GAIN_SHARE = 0.7
"""Share of the largest possible gain by which the target loss is to be reached earlier, if compute is real."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSetting:
    """Conditions that all cells of one rate share."""

    model: str
    compute: str
    nodes: int
    rate_bits_per_s: int | None
    """Configured rate of the links; None means no limit."""
    capacity_bits_per_s: float | None
    """Measured rate of a link with all nodes sending at once; None means unknown."""
    capacity_from: str
    layers: tuple[Layer, ...]
    layers_from: str
    num_bytes: int
    """Bytes of all gradients."""
    samples: int
    """Samples of a replica's step; 0 means unknown."""

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


def make_cell(
    setting: LinkSetting,
    entry: PriorityEntry,
    record: PriorityRecord,
    peers: Mapping[str, PriorityRecord],
    mode: str = "",
) -> Json:
    """Return one entry's cell at one rate, compared with `peers`, by name."""
    bound, median_s = setting.bound, record.median_s
    layers, nominal = setting.layers, setting.nominal_bound
    found: Json = {
        "model": setting.model,
        "compute": setting.compute,
        "nodes": setting.nodes,
        "rate_mbit": setting.rate_bits_per_s / 1e6 if setting.rate_bits_per_s else None,
        "measured_mbit": setting.capacity_bits_per_s / 1e6 if setting.capacity_bits_per_s else None,
        "mode": mode or entry.mode,
        "slice": entry.slice_params if entry.slice_params is not None else "auto",
        "bucket_cap_mb": entry.bucket_cap_mb,
        "r": bound.r if bound else None,
        "compute_s": sum(layer.forward_s + layer.backward_s for layer in layers) if layers else None,
        "p_star_s": bound.p_star_s if bound else None,
        "p_fifo_s": bound.p_fifo_s if bound else None,
        "gain_cap": bound.gain_cap if bound else None,
    }
    if median_s is None or found["mode"] == PLAIN:
        empty = ("iter_median_s", "fraction_of_bound", "tx_bytes_per_iter", "cpu_s_per_iter", "hash")
        found |= {**dict.fromkeys(empty), "ours": {"median_s": None, "iqr_s": None}, "peers": {}, "bound": None}
    if median_s is None:
        return {**found, "failure": record.failure or "no repeat was finished", "ok": False}
    summary = Summary.of(record.seconds)
    times: Json = {"iter_median_s": median_s, "iter_p10_s": summary.p10, "iter_p90_s": summary.p90}
    costs: Json = {
        "cpu_s_per_iter": quantile(record.cpu_s, 0.5),
        "program_s_per_iter": quantile(record.compute_s, 0.5) if record.compute_s else None,
    }
    if found["mode"] == PLAIN:  # it sends nothing, so there is only its time
        return {**found, **times, **costs, "ok": True}
    tx = [sum(each) / len(each) for each in record.tx_bytes]
    loads = [max(each) * len(each) / sum(each) - 1 for each in record.tx_bytes if sum(each)]
    tx_per_iter = quantile(tx, 0.5) if tx else None
    rate_bytes_per_s = record.stats.get("rate_bytes_per_s")
    known_rate = isinstance(rate_bytes_per_s, float) and rate_bytes_per_s > 0
    bound_form = {"name": "P*, ideal priorities", "median_s": bound.p_star_s, "fraction": bound.p_star_s / median_s} if bound else None  # fmt: skip
    return {
        **found,
        **times,
        "iter_iqr_s": summary.iqr,
        "num_iters": summary.num_samples,
        "repeats": len(record.rounds),
        "repeat_medians_s": [quantile(each, 0.5) for each in record.rounds],
        "warmup_s": record.warmup_s,
        "settled_after": settled_after(record.warmup_s, median_s),
        "samples_per_s": setting.samples / median_s if setting.samples else None,
        **_compare_with_bound(bound, record, median_s),
        "nominal_p_star_s": nominal.p_star_s if nominal else None,
        "tx_bytes_per_iter": tx_per_iter,
        "tx_over_least": tx_per_iter / setting.least_tx_bytes - 1 if tx_per_iter and setting.least_tx_bytes else None,
        "owner_imbalance": quantile(loads, 0.5) if loads else None,
        **costs,
        "cpu_busy": quantile(record.busy, 0.5),
        "waited_s_per_iter": quantile(record.waited_s, 0.5) if record.waited_s else None,
        "slice_bytes": record.stats.get("slice_bytes"),
        "in_flight_bytes": record.stats.get("in_flight_bytes"),
        "estimated_bits_per_s": cast(float, rate_bytes_per_s) * 8 if known_rate else None,
        "estimated_r": record.stats.get("r"),
        "ran_as": record.stats.get("mode"),
        "hash": record.hashes[0] if record.hashes else None,
        "hash_steps": record.hash_steps,
        "same_on_all_ranks": len(set(record.hashes)) == 1,
        **_compare_with_peers(record, peers),
        **(_compare_losses(record, peers, bound) if setting.compute == "real" else {}),
        **utilisation(record.samples, setting.capacity_bits_per_s),
        "ours": {"median_s": median_s, "iqr_s": summary.iqr},
        "peers": {name: _peer(peer, median_s) for name, peer in peers.items()},
        "bound": bound_form,
        "ok": len(set(record.hashes)) == 1,
    }


def settled_after(steps_s: Sequence[float], median_s: float, margin: float = 0.10) -> int | None:
    """Return how many steps it took until all later ones were as fast as the median; None if they never were."""
    slow = [number for number, step_s in enumerate(steps_s) if step_s > (1 + margin) * median_s]
    settled = slow[-1] + 1 if slow else 0
    return settled if settled < len(steps_s) else None


def _compare_with_bound(bound: Bounds | None, record: PriorityRecord, median_s: float) -> Json:
    if bound is None:
        return {"fraction_of_bound": None, "fraction_of_worst_repeat": None, "over_p_fifo": None}
    slowest_s = max(quantile(each, 0.5) for each in record.rounds)
    return {
        "fraction_of_bound": bound.p_star_s / median_s,
        "fraction_of_worst_repeat": bound.p_star_s / slowest_s,
        "over_p_fifo": median_s / bound.p_fifo_s - 1,
    }


def _compare_with_peers(record: PriorityRecord, peers: Mapping[str, PriorityRecord]) -> Json:
    """Return how much faster than each peer the entry is, by the medians of all steps and of each repeat."""
    found: Json = {}
    for name, peer in peers.items():
        if peer is record or peer.median_s is None or record.median_s is None:
            continue
        ratios = [ratio - 1 for ratio in contest.paired_ratios(peer.rounds, record.rounds)]
        key = f"gain_over_{name.replace('-', '_')}"
        found |= {key: peer.median_s / record.median_s - 1, f"{key}_worst": min(ratios), f"{key}_best": max(ratios)}
    return found


def _peer(peer: PriorityRecord, median_s: float) -> Json:
    if peer.median_s is None:
        return {"median_s": None, "iqr_s": None, "speedup": None, "failure": peer.failure}
    return {"median_s": peer.median_s, "iqr_s": Summary.of(peer.seconds).iqr, "speedup": peer.median_s / median_s}


def _compare_losses(record: PriorityRecord, peers: Mapping[str, PriorityRecord], bound: Bounds | None) -> Json:
    """Return the curve of losses, how far it is from each peer's, and how much earlier it reaches the common target."""
    found: Json = {"losses": record.losses}
    others = {name: peer for name, peer in peers.items() if peer is not record and peer.losses and not peer.failure}
    curves = [record, *others.values()]
    if not others or any(len(each.timed_losses) < SMOOTH for each in curves):
        return found
    target = max(_smooth(each.timed_losses)[-1] for each in curves)
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


def _smooth(losses: Sequence[float]) -> list[float]:
    return [sum(losses[end - SMOOTH : end]) / SMOOTH for end in range(SMOOTH, len(losses) + 1)]


def time_to(record: PriorityRecord, target: float) -> float:
    """Return the seconds of timed steps until the smoothed loss is as low as `target`; all of them if it never is."""
    reached = next((at for at, loss in enumerate(_smooth(record.timed_losses)) if loss <= target), None)
    return sum(record.seconds[: reached + SMOOTH] if reached is not None else record.seconds)


def utilisation(samples: Sequence[tuple[float, int]], capacity_bits_per_s: float | None) -> Json:
    """Return the mean share of the capacity that was sent, and the share of time in which nearly nothing was."""
    if len(samples) < 3 or not capacity_bits_per_s:
        return {}
    rates = [
        (now[1] - then[1]) * 8 / (now[0] - then[0]) / capacity_bits_per_s
        for then, now in itertools.pairwise(samples)
        if now[0] > then[0]
    ]
    spent_s = samples[-1][0] - samples[0][0]
    return {
        "tx_mean_share": (samples[-1][1] - samples[0][1]) * 8 / spent_s / capacity_bits_per_s,
        "tx_idle_share": sum(rate < IDLE for rate in rates) / len(rates),
        "tx_series": {"step_s": spent_s / (len(samples) - 1), "share": [round(rate, 3) for rate in rates]},
    }


def make_cells(
    setting: LinkSetting,
    entries: Sequence[PriorityEntry],
    records: Mapping[str, PriorityRecord],
    probed: Mapping[str, float],
) -> list[Json]:
    """Return the cells of one rate. DDP has two: with its best buckets, and with its default ones."""
    peers = {name: records[name] for name in (DDP, DDP_DEFAULT) if name in records}
    if DDP_DEFAULT in peers and DDP not in peers:
        peers = {DDP: peers[DDP_DEFAULT], **peers}
    found = []
    for entry in entries:
        is_ddp = entry.mode == DDP
        against = peers if not is_ddp and entry.mode != PLAIN else {}
        cell = make_cell(setting, entry, records[entry.label], against, entry.label if is_ddp else "")
        cell |= {"capacity_from": setting.capacity_from, "layers_from": setting.layers_from}
        found.append({**cell, "probe_s_by_bucket": dict(probed)} if is_ddp else cell)
        if entry.label == DDP_DEFAULT and DDP not in records:
            found.append({**found[-1], "mode": DDP})
    return found


def make_result(args: Mapping[str, object], cells: Sequence[Json], remarks: Sequence[str]) -> Json:
    """Return all cells in the one form; at the top, ours at the rate where it is furthest from the bound."""
    ours = [one for one in cells if one["mode"] == "priority"] or [one for one in cells if one["mode"] != DDP]
    said = [*remarks, *remarks_on(cells)]
    head = min(ours or cells, key=lambda one: cast(float, one.get("fraction_of_bound") or 0.0))
    differ = any("parameters differ" in remark for remark in said)
    ok = all(bool(one["ok"]) for one in cells) and not differ
    top = {key: head[key] for key in ("ours", "peers", "bound")}
    return contest.form("priority", args, ok, said, **top, cells=list(cells))


# --- remarks ---


def remarks_on(cells: Sequence[Json]) -> list[str]:
    """Return what a reader must know before believing the cells."""
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
        found += _remarks_on_losses(one)
    return found + _remarks_on_hashes(cells)


def too_busy(one: Json) -> bool:
    """Return whether the processors set the pace, which they may do only if compute is real."""
    busy = one.get("cpu_busy")
    return one["compute"] == "paced" and isinstance(busy, float) and busy > BUSY


def _rate(one: Json) -> str:
    return f"{one['rate_mbit']:g} Mbit/s" if isinstance(one["rate_mbit"], float) else "no limit"


def _remarks_on_losses(one: Json) -> list[str]:
    """Return the verdict on real training, against each peer."""
    found = []
    for key in ("ddp", "ddp_default"):
        apart, share = one.get(f"loss_apart_from_{key}"), one.get(f"gain_of_cap_over_{key}")
        if not isinstance(apart, float) or not isinstance(share, float):
            continue
        same = "the same bits" if apart == 0 else f"within {apart:.1g}"
        holds = apart <= SAME_LOSS and share >= GAIN_SHARE
        steps = len(cast("list[float]", one["losses"]))
        found.append(
            f"{one['mode']} beside {key.replace('_', '-')} at {_rate(one)}: losses of {steps} steps {same}; loss "
            f"{one['target_loss']:.4g} after {one['s_to_target']:.2f} s of steps, not {one[f's_to_target_{key}']:.2f} s: "
            f"gain {one[f'gain_to_target_over_{key}']:.1%}, {share:.0%} of gain_cap {one['gain_cap']:.1%}: "
            + ("holds" if holds else f"does not hold (losses within {SAME_LOSS:g}, {GAIN_SHARE:.0%} of the cap)")
        )
    return found


def has_ddp_bits(one: Json) -> bool:
    """Return whether this cell's maths is DDP's with its default buckets, so that the bits must be the same."""
    return one["mode"] != PLAIN and (one["mode"] != DDP or one.get("bucket_cap_mb") is None)


def _remarks_on_hashes(cells: Sequence[Json]) -> list[str]:
    found = []
    for rate in dict.fromkeys(one["rate_mbit"] for one in cells):
        same = [one for one in cells if one["rate_mbit"] == rate and has_ddp_bits(one) and one["hash"]]
        by_steps = {(one["hash_steps"], one["hash"]) for one in same}
        if len({steps for steps, _ in by_steps}) == len(by_steps):
            continue
        listed = ", ".join(f"{one['mode']}/{one['slice']} {str(one['hash'])[:8]}" for one in same)
        found.append(f"at {_rate(same[0])} the parameters differ between modes: {listed}")
    if any(one["mode"] == DDP and not has_ddp_bits(one) for one in cells):
        found.append("ddp with other buckets than its default sums in another order: its hash is another, rightly")
    return found
