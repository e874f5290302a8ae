"""Figures 14 and 15 of EasyScale, and the simulator's command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pliant_repro.figures.cluster import CompletionTimes, DevicesInUse
from pliant_repro.figures.figure import Figure, Options, save
from typer.testing import CliRunner

from pliant.cli.main import build

fig14, fig15 = CompletionTimes(), DevicesInUse()
DATA = Path(os.environ.get("PLIANT_DATA", Path(__file__).parents[3] / "shared" / "data")) / "cluster" / "easyscale"
FIGURES: list[Figure] = [fig14, fig15]


def test_a_list_like_the_published_one_shows_the_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIANT_DATA", raising=False)
    for figure in FIGURES:
        result = figure.run(Options())
        assert result["ok"], result["remarks"]
        save(result, tmp_path / "result.json")
        assert len(figure.table(result).rows) == len(result["cells"])
        figure.plot(result, tmp_path / f"{figure.name}.png")
        assert (tmp_path / f"{figure.name}.png").stat().st_size > 10_000


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}: set PLIANT_DATA to the folder of data sets")
def test_the_published_list_shows_the_claims() -> None:
    options = Options(data=str(DATA))
    result = fig14.run(options)
    assert result["ok"], result["remarks"]
    assert "the artifact's list of 62 jobs" in result["remarks"]
    drawn = fig15.run(options)
    assert drawn["ok"], drawn["remarks"]
    published = drawn["published"]
    assert {name: len(series) for name, series in published.items()} == {"easyscale-homo": 113, "easyscale-heter": 113}
    # The published means are those of the published curves.
    for name, paper in fig15.paper.items():
        used = [count for time, count in published[name] if time <= 6000]
        assert sum(used) / len(used) == pytest.approx(paper["mean_allocated"], abs=0.1)
        assert max(used) == paper["max_allocated"]


def test_another_order_is_not_ok() -> None:
    cells = [
        fig14.cell(
            name, {"jct_median_s": 1.0, "jct_mean_s": mean, "makespan_s": mean, "mean_allocated": 1.0, "changes": 1}
        )
        for name, mean in (("yarn-cs", 3.0), ("easyscale-homo", 1.0), ("easyscale-heter", 2.0))
    ]
    assert len(fig14.judge(cells)) == 2


def test_the_command_writes_one_object(tmp_path: Path) -> None:
    out, table = tmp_path / "r.json", tmp_path / "jobs.csv"
    words = f"sim --trace synthetic:40:0.2 --cluster v100=4,p100=2,t4=2 --policy all --seed 1 --processes 1 --table {table} --json {out}"
    answer = CliRunner().invoke(build(), words.split())
    assert answer.exit_code == 0, answer.output
    result = json.loads(out.read_text())
    assert set(result) >= {"bench", "args", "ours", "peers", "bound", "machine", "ok", "remarks", "policies", "factors"}
    assert len(result["policies"]) == 8
    for numbers in result["policies"].values():
        assert numbers.keys() >= {
            "jct_mean_s", "jct_median_s", "jct_p99_s", "makespan_s", "gpu_hours", "mean_allocated", "allocated", "per_job",
        }  # fmt: skip
        assert numbers["jobs"] == 40
    assert "live_resize" in result["policies"]["easyscale-heter"]
    assert len(table.read_text().splitlines()) == 1 + 40 * (8 + 4)
    again = CliRunner().invoke(build(), words.split())
    assert again.output == answer.output


def test_the_command_sets_devices_aside(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = f"sim --trace synthetic:40:0.2 --cluster v100=4,t4=2 --policy easyscale-heter,optimus --seed 1 --processes 1 --pause -1 --json {out}"
    answers = []
    for reserve in ("", " --reserve v100=4@0-90000 --reserve t4=1@3600-"):
        answer = CliRunner().invoke(build(), (words + reserve).split())
        assert answer.exit_code == 0, answer.output
        answers.append(json.loads(out.read_text()))
    assert answers[0]["args"]["reserve"] == []
    assert answers[1]["args"]["reserve"] == ["v100=4@0-90000", "t4=1@3600-"]
    assert any("reserved devices" in remark for remark in answers[1]["remarks"])
    for policy, numbers in answers[1]["policies"].items():
        assert numbers["jct_mean_s"] > answers[0]["policies"][policy]["jct_mean_s"]
        assert all(count <= 2 for at_s, count in numbers["allocated"] if at_s < 3600)
