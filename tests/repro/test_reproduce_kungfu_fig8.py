"""KungFu's figure 8: what is counted where, what is judged, and the real thing at a small size."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gang
import pytest
from pliant_repro.figures.figures import FIGURES, Options
from pliant_repro.figures.kungfu import fig8, monitoring
from pliant_repro.figures.kungfu.monitoring import MODES, Task, schedule

USUAL = Options(device="cpu")
COSTS = {"full": 0.0, "none": 0.0, "noise_scale": 0.004, "variance": 0.02, "variance_every_8": 0.02}
"""Seconds of a due step; a full step takes 1 s, others a tenth."""
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "monitoring" / "benchmark.py"


def workers(rounds: int, costs: dict[str, float], slower: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """What workers would write that pay for half of a variance in the step after it, on a machine that becomes slower by this
    share until the end."""
    modes = schedule(rounds)
    step_s = [1.0 if mode == "full" else 0.1 for mode in (*modes, "none")]
    for step, mode in enumerate(modes):
        if mode != "variance_every_8" or step % 8 == 0:
            late = 0.5 if mode.startswith("variance") else 0.0
            step_s[step] += (1 - late) * costs[mode]
            step_s[step + 1] += late * costs[mode]
    step_s = [took * (1 + slower * step / len(modes)) for step, took in enumerate(step_s[:-1])]
    found = {"step_s": step_s, "cpu_s": step_s, "noise_ratio": 9.0, "variance": 1.0}
    found |= {"probe_s": step_s, "other_s": [0.1] * len(modes)}
    return [{**found, **more}, found]


def test_costs_are_counted_where_they_arise() -> None:
    result = fig8.result_of(workers(3, COSTS), 3, 8, USUAL)
    assert result["ok"], result["remarks"]
    assert result["overhead"] == {
        "noise_scale": pytest.approx(0.004),
        "variance": pytest.approx(0.02),
        "variance_every_8": pytest.approx(0.02 / 8),
    }
    assert result["overhead_by_clocks"] == {name: pytest.approx(share) for name, share in result["overhead"].items()}
    assert result["peers"]["paper"]["throughput_change"] == {  # type: ignore[index]
        "noise_scale": pytest.approx(-0.046, abs=1e-3),
        "variance": pytest.approx(-0.203, abs=1e-3),
        "variance_every_8": pytest.approx(-0.030, abs=1e-3),
    }
    assert len(fig8.table(result).rows) == 4


def test_a_machine_that_becomes_slower_does_not_count() -> None:
    result = fig8.result_of(workers(3, COSTS, slower=0.5), 3, 8, USUAL)
    assert result["overhead"] == {
        "noise_scale": pytest.approx(0.004, rel=0.1),
        "variance": pytest.approx(0.02, rel=0.1),
        "variance_every_8": pytest.approx(0.02 / 8, abs=2e-3),
    }


@pytest.mark.parametrize(("mode", "cost"), [("noise_scale", 0.012), ("variance", 0.031)])
def test_a_missed_goal_is_said(mode: str, cost: float) -> None:
    result = fig8.result_of(workers(2, {**COSTS, mode: cost}), 2, 8, USUAL)
    assert not result["ok"]
    assert f"{cost:.2%}" in str(result["remarks"])


def test_time_counts_whatever_the_clocks_say() -> None:
    """Twice the time for every monitored step, of which the monitors themselves know nothing."""
    found = workers(2, COSTS)
    modes = schedule(2)
    for worker in found:
        worker["step_s"] = [
            took if mode in ("none", "full") else 2 * took for took, mode in zip(worker["step_s"], modes, strict=True)
        ]
    result = fig8.result_of(found, 2, 8, USUAL)
    assert result["overhead"]["noise_scale"] > 0.09  # type: ignore[index]
    assert not result["ok"], result["remarks"]


@pytest.mark.parametrize("more", [{"noise_ratio": None}, {"variance": 2.0}])
def test_monitors_must_say_the_same_everywhere(more: dict[str, Any]) -> None:
    assert not fig8.result_of(workers(1, COSTS, **more), 1, 8, USUAL)["ok"]


def test_monitored_steps_have_plain_ones_around_them() -> None:
    modes = schedule(3)
    begins = [step for step, mode in enumerate(modes) if mode == "variance_every_8"][::8]
    assert begins == [32, 72, 112]
    assert all(modes[step : step + 8] == ["variance_every_8"] * 8 for step in begins)
    for step, mode in enumerate(modes[8:], 8):
        if mode in ("noise_scale", "variance"):
            assert modes[step - 1] == modes[step + 1] == "none", step
        if mode == "variance":
            assert modes[step + 2] == "none", "one for what comes late, and one to compare with"
    assert set(modes) == set(MODES)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `experiments`")
def test_the_picture(tmp_path: Path) -> None:
    fig8.plot(fig8.result_of(workers(1, COSTS), 1, 8, USUAL), tmp_path / "fig8.png")
    assert (tmp_path / "fig8.png").stat().st_size > 10_000


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs the extra `experiments`")
def test_the_job_itself(tmp_path: Path) -> None:
    """Alone, with its replicas in turn."""
    path = tmp_path / "task.json"
    Task("SqueezeNet", 1, 32, 1, replicas=2).write(path)
    gang.run(_train, 1, path)
    found = json.loads((tmp_path / "worker-0.json").read_text())
    assert len(found["step_s"]) == len(found["cpu_s"]) == 48
    result = fig8.result_of([found], 1, 1, Options(quick=True, device="cpu"))
    assert result["ok"], result["remarks"]
    assert FIGURES["kungfu-fig8"].module is fig8


def _train(rank: int, path: Path) -> None:
    monitoring.main(path)


@pytest.mark.skipif(not gang.FULL, reason="10 s, for less than tests/test_artifact_benchmarks.py shows: PLIANT_FULL=1")
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs the extra `experiments`")
def test_the_artifacts_command() -> None:
    """With the program's other flags set so small that it ends soon."""
    command = [
        sys.executable,
        "-c",
        "from pliant.cli.main import main; main()",
        "run",
        "-np",
        "2",
        sys.executable,
        str(BENCHMARK),
    ]
    command += ["--kf-optimizer=noise-scale", "--model=SqueezeNet", "--batch-size=2", "--interval=1"]
    done = subprocess.run([*command, "--image-size=32", "--num-iters=2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    for port in (10000, 10001):
        assert re.search(r"::stdout\] Iter #1: [\d.]+ img/sec per /cpu:0", said), port
        assert re.search(r"::stdout\] Img/sec per /cpu:0: [\d.]+ \+-[\d.]+", said), port
    values = re.findall(r"(\d+)::stderr\] Gradient Noise Scale: (-?[\d.e+-]+)", said)
    of_each = [[value for port, value in values if port == each] for each in dict.fromkeys(port for port, _ in values)]
    assert len(of_each) == 2
    assert of_each[0] == of_each[1], "all workers learn the same"
