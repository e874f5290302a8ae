"""The pages have the figures of the GPU's results, and made-up results make the right rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_figures", ROOT / "scripts" / "gpu_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "p10": median - 0.01, "p90": median + 0.01}


def results() -> dict[str, Any]:
    sides = {"plain_free": 0.03, "plain": 0.031, "pliant": 0.0312, "plain_x4": 0.12, "pliant_x4": 0.123}
    cell = {
        "model": "gpt2", "mode": "eager", "replicas": 4, "sides": {name: {"median_s": s} for name, s in sides.items()},
        "one": ratio(1.01), "several": ratio(1.025), "noise": ratio(1.0),
    }  # fmt: skip
    felt = {
        "gap": {"median_s": 0.25, "max_s": 0.3}, "next": {"median_s": None}, "median_step_before_s": [0.1],
        "median_step_after_s": [0.2], "slow_steps": [0, 1], "steps_after": [20, 20],
    }  # fmt: skip
    kill = {**felt, "next": {"median_s": 0.6}}
    same = {
        "command": "pliant bench gpu all", "device": {"name": "NVIDIA H200", "torch": "2.11"}, "file": "gpu_step_x.json",
        "verdicts": [{"ok": True, "text": "a"}, {"ok": False, "text": "b"}],
    }  # fmt: skip
    live = {"model": "gpt2", "mode": "eager", "changes": {"shrink": felt, "kill": kill}}
    memory = {"replicas": 2, "bare_bytes": 10e9, "ours_bytes": 10.5e9, "limit_bytes": 10.5e9, "host_bytes": None}
    packed = {"model": "gpt2", "processes": 2, "sides": {"pliant": {"median_s": 0.3}, "ddp": {"median_s": 0.5}}}
    cells = {"step": cell, "live": live, "memory": memory, "packed": packed}
    return {**{part: {**same, "cells": [one]} for part, one in cells.items()}, "bits": {**same, "cells": []}}


def test_the_pages_have_the_figures_of_the_results(figures: ModuleType) -> None:
    for path, text in figures.pages(figures.read_results()).items():
        assert path.read_text() == text, f"run scripts/gpu_figures.py: {path.name} differs from repro/results"


def test_made_up_results_make_tables_and_a_row(figures: ModuleType) -> None:
    found = results()
    text = figures.figures(found)
    assert (
        "| gpt2, eager | 30.0 | 31.0 | 31.2 | 1.010 (1.000 to 1.020) | 120 | 123 | 1.025 (1.015 to 1.035) | 1.000 "
        in text
    )
    assert "| 2 | 10000 | 10500 | 10500 | - |" in text
    assert "| gpt2, eager: kill | 100 | 200 | 250 | 300 | 1 of 40 | 600 |" in text
    assert "| gpt2 on 2 processes | 300 | 500 | - |" in text
    assert "1 of 2 checks hold; not: b." in text
    assert "a replacement**: not measured." in text
    row = figures.readme_row(found)
    assert "one H200, GPT-2 and ResNet-50: a step takes 1.01 times plain PyTorch's" in row
    assert "4 replicas take 1.02 times bare accumulation" in row
    assert "is 250 ms; 600 ms from `kill -9`" in row
    assert figures.readme_row({}) == ""


def test_a_row_is_put_in_replaced_and_taken_out(figures: ModuleType) -> None:
    page = "| claim |\n| no cost while nothing happens | x |\n| more |\n"
    once = figures.with_row(page, "| on a GPU | 1 |")
    assert once == "| claim |\n| no cost while nothing happens | x |\n| on a GPU | 1 |\n| more |\n"
    assert figures.with_row(once, "| on a GPU | 2 |") == once.replace("1", "2")
    assert figures.with_row(once, "") == page
    assert figures.with_figures(f"a {figures.BEGIN} old {figures.END} b", "NEW") == "a NEW b"
