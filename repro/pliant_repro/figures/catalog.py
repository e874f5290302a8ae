"""The list of all figures. `pliant reproduce` knows them by these names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pliant.errors import ConfigError
from pliant_repro.figures import (
    cluster,
    easyscale,
    kungfu_adaptive,
    kungfu_monitoring,
    kungfu_scaling,
    kungfu_star,
    oort,
    oort_presets,
    oort_testing,
    p3,
)  # fmt: skip
from pliant_repro.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    kind.name: kind()
    for kind in (
        easyscale.SameBits,
        easyscale.Memory,
        easyscale.SwitchCost,
        easyscale.DeterminismCost,
        easyscale.CopyCost,
        cluster.CompletionTimes,
        cluster.DevicesInUse,
        kungfu_adaptive.AdaptiveBatch,
        kungfu_star.Interference,
        kungfu_adaptive.Provisioning,
        kungfu_adaptive.ResizeLatency,
        kungfu_monitoring.MonitoringCost,
        kungfu_scaling.HostScaling,
        kungfu_scaling.LaunchOrder,
        oort.TimeToAccuracy,
        oort.Ablation,
        oort.LargeRounds,
        oort_presets.Presets,
        oort_testing.Testers,
        p3.Bandwidth,
        p3.NetworkUse,
        p3.Machines,
        p3.SliceSize,
    )
}


def find(names: Sequence[str]) -> list[Figure]:
    """Return the figures with these names; `all` means every one.

    Raises:
        ConfigError: a name is unknown.
    """
    unknown = [name for name in names if name not in FIGURES and name != "all"]
    if unknown:
        near = [match for name in unknown for match in difflib.get_close_matches(name, FIGURES, 1)]
        hint = f"did you mean {' '.join(near)}?" if near else f"there are {', '.join(FIGURES)}, and all"
        raise ConfigError(f"reproduce {' '.join(unknown)}: unknown; {hint}")
    return list(FIGURES.values()) if "all" in names else [FIGURES[name] for name in dict.fromkeys(names)]
