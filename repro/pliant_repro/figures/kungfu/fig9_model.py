"""What figure 9's runs say beyond themselves: the bounds on each number of nodes, and the model that predicts 1,024. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pliant.machine import Json
from pliant_repro import profiles
from pliant_repro import scaling_model as scaling
from pliant_repro.bench.scaling import published
from pliant_repro.bench.scaling.contest import Run, Sweep
from pliant_repro.bench.stats import quantile
from pliant_repro.scaling_model import Bounds, Layer, Measurement, ScalingFit, StepLoad, bounds

PREDICTED = (64, 128, 256, 512, 1024)
PATTERNS = {"tree": "carrying-multi-tree", "auto": "multi-star", "priority": "multi-star", "ddp": "ring"}
"""How each side sums. Ours keeps DDP's order of summation, so its trees carry what they may not fold."""
ROW_BYTES = 10_200
"""What each of our workers tells all others in each step: the random states of its replica, mostly."""
MIB = 1 << 20


def layers_of(model: str) -> tuple[Layer, ...]:
    """The layers as the lab trains them, in the published machine's time."""
    return tuple(profiles.layers_of(published.lab_profile(model)))


def bound_at(sweep: Sweep, nodes: int) -> Bounds:
    """What the layers allow on so many nodes, in the published machine's time, with links that lose not a byte."""
    return bounds(layers_of(sweep.options.model), nodes, sweep.capacity[nodes] / 8 / sweep.options.speed_at(nodes))


def load_of(model: str, side: str, cap_mb: float) -> StepLoad:
    """What a side's step does, as the model counts it."""
    cut = scaling.bucketed(layers_of(model), cap_mb * MIB)
    num_buckets = sum(layer.num_bytes > 0 for layer in cut)
    # What is updated by priorities travels layer by layer, and is waited for layer by layer.
    layers = layers_of(model) if side == "priority" else tuple(cut)
    order: scaling.Order = "priority" if side == "priority" else "fifo"
    row_bytes = 0 if side == "ddp" else ROW_BYTES
    return StepLoad(layers=layers, pattern=PATTERNS[side], buckets=num_buckets, order=order, row_bytes=row_bytes)


def fit_of(sweep: Sweep, side: str, cores: int) -> ScalingFit | None:
    """The model of one side; None where it ran on fewer than three numbers of nodes."""
    model = sweep.options.model
    seen = [_measured(run, cores) for run in sweep.runs if run.side == side and run.median_s is not None]
    if len(seen) < 3:
        return None
    alone = [_measured(run, cores) for run in sweep.runs if run.side == "plain" and run.median_s is not None]
    rates = [sweep.capacity[nodes] / sweep.options.speed_at(nodes) for nodes in sweep.options.nodes]
    load = load_of(model, side, sweep.options.cap_mb)
    return scaling.fit(load, [*alone, *seen], bytes_per_s=quantile(rates, 0.5) / 8)


def _measured(run: Run, cores: int) -> Measurement:
    """In the published machine's time, in which the cores do as much more as time went slower."""
    assert run.median_s is not None, "only runs that were finished"
    cpu_s = quantile(run.cpu_s, 0.5) if run.cpu_s else math.nan
    return Measurement(run.nodes, run.median_s * run.speed, cpu_s, cores / run.speed)


def predictions(sweep: Sweep, cores: int) -> dict[str, Json]:
    """For each side: the prices, how well they fit, and the throughput on up to 1,024 machines at full size."""
    found: dict[str, Json] = {}
    for side in PATTERNS:
        fit = fit_of(sweep, side, cores)
        if fit is not None:
            found[side] = predicted(fit, published.KAPPA[sweep.options.model])
    return found


def predicted(fit: ScalingFit, kappa: float) -> Json:
    """A fit in the names of the result: at full size, with a machine for every node."""
    full = fit.model.enlarged(kappa)
    per_s = {str(nodes): published.BATCH / full.predict(nodes) for nodes in PREDICTED}
    prices = asdict(full.prices)
    return {
        "pattern": fit.model.load.pattern,
        "buckets": fit.model.load.buckets,
        "prices": prices,
        "residuals": list(fit.residuals),
        "cpu_residuals": list(fit.cpu_residuals),
        "worst_residual": fit.worst,
        "samples_per_s": per_s,
    }


def claim_at(cells: Sequence[Json], limits: Mapping[str, float], cores: int) -> Json:
    """Is ours twice as fast as DDP here, and if not: does the bound allow it?

    Args:
        cells: those of one model on one number of nodes.
        limits: P* and P_fifo there, in seconds.
        cores: what all nodes together computed on.
    """
    steps = {str(one["side"]): one["step_s"] for one in cells if isinstance(one["step_s"], float)}
    ours = {side: steps[side] for side in ("tree", "auto", "priority") if side in steps}
    if not ours or "ddp" not in steps:
        return {}
    best = min(ours, key=lambda side: float(str(ours[side])))
    ours_s, ddp_s = float(str(ours[best])), float(str(steps["ddp"]))
    tuned_s = float(str(steps.get("ddp-best", ddp_s)))
    cpu = {str(one["side"]): one["cpu_s"] for one in cells if isinstance(one["cpu_s"], float)}
    nodes, speed = int(str(cells[0]["np"])), float(str(cells[0]["speed"]))
    return {
        "np": nodes,
        "best": best,
        "over_ddp": ddp_s / ours_s,
        "over_ddp_best": tuned_s / ours_s,
        "limit_over_ddp": ddp_s / limits["p_star_s"],
        "limit_over_ddp_best": tuned_s / limits["p_star_s"],
        "fifo_limit_over_ddp": ddp_s / limits["p_fifo_s"],
        "fraction_of_bound": limits["p_star_s"] / ours_s,
        "cpu_floor_s": nodes * float(str(cpu[best])) / cores * speed if best in cpu else None,
        "step_s": ours_s,
        "ddp_step_s": ddp_s,
        "ddp_best_step_s": tuned_s,
        **limits,
    }
