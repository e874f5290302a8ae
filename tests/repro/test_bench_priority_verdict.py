"""`pliant bench priority --validate`: what holds and what does not, in results with the paper's own curves and in broken ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command import command
from pliant_repro.bench import priority_verdict as verdict
from pliant_repro.bench.priority import PriorityOptions, PriorityRecord
from pliant_repro.bench.priority_cells import make_cells
from priority_records import entry, record, setting

from pliant.errors import ConfigError


def bench(*words: str) -> Any:
    return command("bench", "priority", *words)


def as_published(model: str, nodes: int = 4) -> dict[str, Any]:
    """A result with the paper's own curves, and DDP as good as the theory of barriers."""
    options = PriorityOptions(model=model)
    layers = tuple(options.layers() or ())
    cells: list[Any] = []
    for gbps, curves in verdict.FIG7[model].items():
        bits = int(gbps * 1e9 / options.profile().scale)
        here = dataclasses.replace(
            setting(model=model), rate_bits_per_s=bits, capacity_bits_per_s=bits, layers=layers, nodes=nodes,
            num_bytes=options.profile().num_bytes,
        )  # fmt: skip
        assert here.bound is not None
        tx = [[here.least_tx_bytes * 1.01] * 4]
        steps = dict(zip(verdict.FIG7_MODES, (32 / value for value in curves), strict=True))
        steps["priority"] = max(here.bound.p_star_s / 0.99, min(steps["priority"], here.bound.p_star_s / 0.96))
        steps["ddp"] = here.bound.p_fifo_s * 1.02
        records = {
            mode: PriorityRecord(**{**dataclasses.asdict(record(step_s)), "tx_bytes": tx})
            for mode, step_s in steps.items()
        }
        cells += make_cells(here, [entry(mode) for mode in steps], records, {})
    return {"bench": "priority", "cells": cells}


@pytest.mark.parametrize("model", ["resnet50", "vgg"])
def test_the_papers_own_curves_have_the_papers_shape(model: str) -> None:
    checks = verdict.judge(as_published(model))
    wrong = [str(check) for check in checks if check.ok is False]
    # Slicing of the paper is far from P_fifo for VGG from 20 Gbit/s on, which the reference explains by its server.
    assert all("slicing within" in line for line in wrong), "\n".join(wrong)
    names = "\n".join(check.name for check in checks)
    for said in ("priority >= slicing", "P*/measured", "P3's curve", "near r = 1", "rises with the rate", "same bits"):
        assert said in names, said
    assert ("over the best ddp" in names) == any(0.9 <= one["r"] <= 1.1 for one in as_published(model)["cells"])


def failing(result: dict[str, Any]) -> list[str]:
    return [check.name for check in verdict.judge(result) if check.ok is False]


@pytest.mark.parametrize(
    ("mode", "changes", "expected"),
    [
        ("priority", {"fraction_of_bound": 0.94}, "P*/measured"),
        ("priority", {"fraction_of_worst_repeat": 0.92}, "P*/worst repeat"),
        ("priority", {"hash": "other"}, "same bits"),
        ("slicing", {"same_on_all_ranks": False}, "same bits"),
        ("baseline", {"tx_over_least": 0.2}, "bytes within"),
        ("slicing", {"owner_imbalance": 0.2}, "owners within"),
        ("slicing", {"over_p_fifo": 0.2}, "slicing within"),
        ("priority", {"samples_per_s": 1.0}, "P3's curve"),
        ("priority", {"iter_median_s": 9.0}, "priority >= slicing"),
        ("baseline", {"iter_median_s": 0.01}, "slicing >= 0.97 baseline"),
        ("ddp", {"iter_median_s": 0.33}, "over the best ddp"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_wrong_is_named(mode: str, changes: dict[str, Any], expected: str) -> None:
    result = as_published("resnet50")
    for one in result["cells"]:
        if one["mode"] == mode and one["rate_mbit"] == 400:
            one.update(changes)
    assert any(expected in name and "400" in name for name in failing(result)), failing(result)


def test_a_gain_at_the_wrong_place_fails() -> None:
    result = as_published("resnet50")
    for one in result["cells"]:
        if one["mode"] in ("slicing", "ddp") and one["rate_mbit"] == 100:
            one["iter_median_s"] *= 2
    assert any("near r = 1" in name for name in failing(result))


def test_the_tuner_is_held_against_the_best_size() -> None:
    def result(tuned_s: float) -> dict[str, Any]:
        sizes = {None: tuned_s, 1000: 0.5, 5000: 0.4, 50_000: 0.6}
        shown = [entry("priority", label=str(size), slice_params=size) for size in sizes]
        records = {str(size): record(step_s) for size, step_s in sizes.items()}
        return {"cells": make_cells(setting(), shown, records, {})}

    assert not any("slice size" in name for name in failing(result(0.42)))
    unlimited = result(0.43)
    for one in unlimited["cells"]:
        one["rate_mbit"] = None
    assert any("without limit" in name for name in failing(unlimited))
    assert any("slice size" in name for name in failing(result(0.43)))


def test_a_tuner_that_does_not_follow_fails() -> None:
    result = as_published("resnet50")
    for one in result["cells"]:
        one.update(warmup_s=[9.0] * 25, settled_after=None)
    assert any("new rate" in name for name in failing(result))


def test_validate_prints_a_line_per_check_and_exits_1_where_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(as_published("resnet50")))
    good = bench("--validate", str(path))
    assert good.exit_code == 0, good.output
    assert "  ok  resnet50 at 400 Mbit/s: P*/measured >= 0.95" in good.output
    assert "0 do not" in good.output
    broken = as_published("resnet50")
    broken["cells"][2]["fraction_of_bound"] = 0.5
    path.write_text(json.dumps(broken))
    bad = bench("--validate", str(path))
    assert bad.exit_code == 1
    assert "FAIL" in bad.output


def test_validate_takes_only_results_of_this_bench(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"bench": "allreduce", "cells": [1]}')
    with pytest.raises(ConfigError, match="bench priority"):
        verdict.judge_file(path)
