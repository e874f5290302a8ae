"""The picture of `pliant report`: accuracy over hours of the virtual clock, and over rounds."""

from __future__ import annotations

from pathlib import Path

from pliant.cli import plotting
from pliant.fed.jobs.report import Comparison, value_of


def curves(found: Comparison, path: Path) -> None:
    scale = 1 if found.metric == "loss" else 100
    label = found.metric if found.metric == "loss" else f"{found.metric.replace('_', '-')}, %"
    by = "" if found.is_asked else ", which all of them reached"
    caption = f"Dashed: the target, {found.target * scale:.2f}{by}. Hours are those of the virtual clock."
    with plotting.picture(path, "Time to accuracy", caption, panels=2) as axes:
        for number, run in enumerate(found.runs):
            tests = [(point, value_of(point, found.metric)) for point in run.curve.points]
            told = [(point, value * scale) for point, value in tests if value is not None]
            for panel, xs in (
                (axes[0], [point.clock_s / 3600 for point, _ in told]),
                (axes[1], [point.round for point, _ in told]),
            ):
                panel.plot(xs, [value for _, value in told], label=run.curve.name, color=f"C{number}", linewidth=1.2)
        for panel, name in zip(axes, ("hours", "rounds"), strict=True):
            panel.axhline(found.target * scale, color=plotting.PAPER, linestyle="--", linewidth=1)
            panel.set(xlabel=name, ylabel=label, xlim=(0, None))
        axes[0].legend(fontsize=8)
