"""What the P3 paper published (arXiv 1905.03960), read from its vector figures to about 0.5 %. Only numbers.

Samples per second of one worker at batch 32; bandwidths in Gbit/s of 4 machines.
"""

from __future__ import annotations

from pliant_repro.profiles import SCALES

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
"""Baseline, slicing, P3."""
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
    """What each mode of the paper reached at the rate that this one stands for; empty where it has no such point."""
    gbps = rate_mbit * SCALES.get(model, 1.0) / 1000
    for point, values in FIG7.get(model, {}).items():
        if abs(point - gbps) < 0.01 * point:
            return dict(zip(FIG7_MODES, values, strict=True))
    return {}
