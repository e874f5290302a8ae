"""The picture of the demo: both curves, one on the other, and below them how many workers there were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant_repro.figures.demo import Demo
    from pliant_repro.figures.ledger import Ledger, Verdict


def draw(demo: Demo, verdict: Verdict, path: Path) -> None:
    """Write the picture; its format is that of the file's ending.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    above.plot(*_curve(demo.oracle), color="tab:orange", linewidth=5, alpha=0.5, label="stock DDP, 4 processes")
    above.plot(*_curve(demo.elastic), color="tab:blue", linewidth=1, label="pliant, 4 to 1 workers")
    above.set_yscale("log")
    above.set_ylabel("loss, mean of 4 replicas")
    above.legend()
    answer = "yes" if verdict.identical else f"NO, from step {verdict.first_difference} on"
    above.set_title(f"{verdict.num_steps} steps on scikit-learn's digits, bit-identical: {answer}")
    steps = sorted(step for step, done in demo.elastic.steps.items() if done.workers)
    below.step(steps, [demo.elastic.steps[step].workers for step in steps], where="mid", color="tab:blue")
    below.set(ylabel="workers", xlabel="step", ylim=(0, 4.6), yticks=range(5))
    for number, row in enumerate(demo.rows()):
        for axes in (above, below):
            axes.axvline(row.step, color="tab:red" if "kill" in row.event else "gray", linewidth=0.8, linestyle="--")
        # One below the other: a kill and the replacement are only a few steps apart.
        place = (row.step, 0.32 - 0.06 * (number % 6))
        above.annotate(
            row.event, place, xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points", fontsize=8
        )
    figure.savefig(path, dpi=120)


def _curve(ledger: Ledger) -> tuple[list[int], list[float]]:
    steps = sorted(step for step, done in ledger.steps.items() if done.losses)
    return steps, [ledger.steps[step].loss for step in steps]
