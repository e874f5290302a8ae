"""Figure 5 of KungFu: what is read from the job's lines, what is claimed, and a small job between hosts of a lab."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from pliant_repro.bench import traffic
from pliant_repro.figures.figure import Options
from pliant_repro.figures.kungfu_star import Interference, StarRun, StarSetting, run_star
from pliant_repro.lab.hosts import Lab, missing_for_lab

from pliant.cluster import Worker
from pliant.errors import ConfigError

figure = Interference()
SETTING = StarSetting(workers=8, batch=8, kappa=160, bits_per_s=10**8, steps=50, begin_step=26)


def said(rates: list[float], consensus: int | None = None, setting: StarSetting = SETTING) -> StarRun:
    """Return the run of a job that printed this throughput, and voted in that step."""
    trial = StarRun(setting, traffic_begun=30 if setting.begin_step is not None else None)
    for step, rate in enumerate(rates):
        trial.take(f"[I] AP:: cluster response -> {8 if step == consensus else 0}")
        if step == consensus:
            trial.take("[I] AP:: cluster reached consensus on changing to alternative strategy")
        if consensus is not None and step == consensus + 1:
            trial.take("Interference detected. Changing to alternative comm strategy !")
        trial.take(f"Cluster response Iter #{step}: {rate:.1f} img/sec per /gpu:0")
    return trial


def test_the_lines_are_read() -> None:
    trial = said([29.0] * 31 + [19.2, 19.0, 20.0, 21.0, 28.0, 28.4, 29.0], consensus=33)
    assert len(trial.rates) == 38
    assert trial.consensus == [33]
    assert trial.changes == [34]


def test_a_recovery_is_what_is_claimed(tmp_path: Path) -> None:
    adapting = said([29.0] * 31 + [19.2, 19.0, 20.0, 21.0, 28.0, 28.4, 29.0], consensus=33)
    fixed = said([29.0] * 31 + [19.0] * 10)
    quiet = said([28.0] * 500, setting=StarSetting(workers=8, batch=2, kappa=640, bits_per_s=10**8, steps=500))
    result = figure.result_of({"adapting": adapting, "fixed": fixed, "quiet": quiet}, Options())
    assert result["ok"], result["remarks"]
    ours = result["ours"]
    assert isinstance(ours, dict)
    assert (ours["before"], ours["steps_to_vote"], ours["steps_to_recovery"]) == (29.0, 2, 2)
    assert ours["recovery"] == 1.0
    json.dumps(result)
    assert len(figure.table(result).rows) == 4
    figure.plot(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("adapting", "quiet_change", "complaint"),
    [
        (said([29.0] * 40), None, "has not slowed the star down"),
        (said([29.0] * 31 + [19.0] * 10), None, "the topology was not changed"),
        (said([29.0] * 31 + [19.0] * 10, consensus=33), None, "66% of the throughput within 5 steps"),
        (said([29.0] * 31 + [19.0] * 9 + [29.0], consensus=38), None, "a majority after 7 steps"),
        (said([29.0] * 31 + [19.0] * 4 + [29.0] * 5, consensus=33), 100, "1 changes in 500 quiet steps"),
    ],
)
def test_what_does_not_hold_is_said(adapting: StarRun, quiet_change: int | None, complaint: str) -> None:
    quiet = said([28.0] * 500, quiet_change, StarSetting(workers=8, batch=2, kappa=1, bits_per_s=1, steps=500))
    fixed = said([29.0] * 31 + [19.0] * 10)
    cells = [figure.cell(name, each) for name, each in (("adapting", adapting), ("fixed", fixed), ("quiet", quiet))]
    assert complaint in " ".join(figure.judge(cells))


def test_it_has_sizes() -> None:
    usual, quiet_steps = figure.sizes(Options())
    assert (usual.workers, quiet_steps) == (8, 500)
    quick, none = figure.sizes(Options(quick=True))
    assert quick.steps < usual.steps
    assert none == 0


def test_traffic_on_several_connections_keeps_the_rate_of_all() -> None:
    where: list[str] = []
    listening = threading.Event()

    def announce(address: str) -> None:
        where.append(address)
        listening.set()

    sink = threading.Thread(target=traffic.sink, args=(0, 1.5, announce))
    sink.start()
    assert listening.wait(10)
    done = traffic.send(Worker.parse(where[0]), 40_000_000, 0.5, connections=4)
    sink.join()
    assert 10e6 < done.bits_per_s < 80e6
    for wrong in (0, 1000):
        with pytest.raises(ConfigError, match="use 1 to 256"):
            traffic.check_amounts(1.0, wrong)


@pytest.mark.root
@pytest.mark.skipif(bool(missing_for_lab()), reason="; ".join(missing_for_lab()) or "a lab is possible")
def test_a_job_between_hosts_votes_and_ends(no_leaks: None) -> None:
    with Lab(num_hosts=3, rate="100mbit").up() as lab:
        setting = StarSetting(workers=2, batch=1, kappa=400, bits_per_s=10**8, steps=14, begin_step=8, timeout_s=60)
        trial = run_star(lab, setting)
        assert len(trial.rates) == 14
        assert not trial.changes
