"""What all charts of the page share: their frame, lines, colours and tooltips, as options of Apache ECharts. Pure.

Colours are of the middle of the scale, so one set of options serves on a dark and on a light page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pliant.ui.series import Point

Options = dict[str, Any]

COLOURS = ("#4c8dff", "#f59e0b", "#22b07d", "#e5484d", "#8e6cf0", "#12a5b8", "#d6409f", "#8d8d86")
TEXT, LINE = "#79818d", "rgba(128,136,150,.22)"
MOST_POINTS = 800
MOST_MEANS = 240
"""A curve: the points of its outline, and those of its means."""
ROUND = "v => v == null ? '' : (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString('en') : String(Number(v.toPrecision(4))))"


def frame(legend: bool, x_name: str, y_name: str) -> Options:
    return {
        "grid": {"left": 8, "right": 20, "top": 34 if legend else 26, "bottom": 22, "containLabel": True},
        "legend": {"show": legend, "top": 0, "right": 8, "textStyle": {"color": TEXT}, "icon": "roundRect", "itemHeight": 4,
                   "type": "scroll"},
        "tooltip": {**tooltip("axis"), ":valueFormatter": ROUND},
        "xAxis": {
            "type": "value",
            "name": x_name,
            "nameLocation": "middle",
            "nameGap": 24,
            "nameTextStyle": {"color": TEXT, "fontSize": 11},
            "axisLabel": {"color": TEXT, "hideOverlap": True, "fontSize": 11, "alignMaxLabel": "right"},
            "axisLine": {"lineStyle": {"color": LINE}},
            "splitLine": {"show": False},
        },
        "yAxis": axis(y_name),
        "series": [],
    }  # fmt: skip


def axis(name: str) -> Options:
    return {
        "type": "value",
        "name": name,
        "scale": True,
        "nameTextStyle": {"color": TEXT, "fontSize": 11, "align": "left"},
        "axisLabel": {"color": TEXT, "fontSize": 11},
        "splitLine": {"lineStyle": {"color": LINE}},
    }


def tooltip(trigger: str) -> Options:
    return {"trigger": trigger, "confine": True, "className": "chart-tip", "transitionDuration": 0,
            "axisPointer": {"type": "line", "lineStyle": {"color": TEXT}}}  # fmt: skip


def line(name: str, points: Sequence[Point], colour: str, *, pale: bool = False) -> Options:
    return {
        "type": "line",
        "name": name,
        "data": [[x, float(f"{y:.6g}")] for x, y in points],
        "showSymbol": False,
        "lineStyle": {"width": 1 if pale else 2, "opacity": 0.3 if pale else 1},
        "itemStyle": {"color": colour},
        "z": 2 if pale else 3,
        "animation": False,
        "silent": pale,
    }
