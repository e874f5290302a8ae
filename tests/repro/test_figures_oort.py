"""The experiments with Oort: what is read off courses, what is judged, and that they run, are shown and drawn."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pliant_repro.figures import oort, oort_jobs, oort_presets, oort_testing, report
from pliant_repro.figures.figure import Options
from pliant_repro.figures.oort import Ablation, LargeRounds, LargeRun, TimeToAccuracy
from pliant_repro.figures.oort_jobs import FedCourse
from pliant_repro.figures.oort_presets import SETTINGS, Presets
from pliant_repro.figures.oort_testing import Testers, solve_whole

from pliant.fed.data.datasets import DEBIAN
from pliant.fed.history import History, Point, Round
from pliant.fed.selection.testing import Holdings

pytestmark = pytest.mark.timeout(120)
fashion = pytest.mark.skipif(not DEBIAN.is_dir(), reason="no Fashion-MNIST: apt install dataset-fashion-mnist")
full = pytest.mark.skipif(not os.environ.get("PLIANT_FULL"), reason="some 20 s each: PLIANT_FULL=1")


def went(
    world: str, way: str, seed: int, round_s: float, reached: int, final: float = 0.85, coverage: int = 300
) -> FedCourse:
    """20 tests, 5 rounds apart; 80 % is found by test number `reached`."""
    accuracies = [0.5] * (reached - 1) + [0.8] * (20 - reached) + [final]
    rounds = [5 * number for number in range(1, 21)]
    return FedCourse(
        world, way, seed, rounds, [round_s * each for each in rounds], accuracies, [round_s] * 100, coverage, 2000,
        0, 1.0,
    )  # fmt: skip


time_to_accuracy, ablation, large, presets, testers = TimeToAccuracy(), Ablation(), LargeRounds(), Presets(), Testers()


def test_a_course_says_when_an_accuracy_was_found() -> None:
    course = went("unequal", "oort", 0, 10.0, 4)
    assert course.time_to(0.8) == 200.0
    assert course.rounds_to(0.8) == 20
    assert course.time_to(0.9) is None
    assert course.final == pytest.approx((0.8 + 0.85) / 2)  # the last tenth of 20 tests
    assert course.mean_round_s == 10.0


def both(random_s: float, oort_s: float, reached: int = 10, final: float = 0.85) -> list[FedCourse]:
    return [
        went(world, way, seed, duration_s, reached, final if way == "oort" else 0.85)
        for world in ("unequal", "alike")
        for seed in (0, 1, 2)
        for way, duration_s in (("random", random_s if world == "unequal" else 10.0), ("oort", oort_s if world == "unequal" else 10.0))
    ]  # fmt: skip


def judged(found: list[FedCourse]) -> list[str]:
    worlds = {world: time_to_accuracy.compare(found, world) for world in ("unequal", "alike")}
    return time_to_accuracy.judge(worlds)


def test_time_to_accuracy_is_judged_by_the_median_the_worst_and_the_end() -> None:
    assert judged(both(80.0, 40.0)) == []
    assert any("1.25 times shorter in the median" in each for each in judged(both(50.0, 40.0)))
    assert any("oort ends" in each for each in judged(both(80.0, 40.0, final=0.83)))
    one_longer = both(80.0, 40.0)
    one_longer[1] = went("unequal", "oort", 0, 81.0, 10)
    assert judged(one_longer) == ["with one seed oort takes longer than random: 0.99"]
    unlike = [went("alike", each.way, each.seed, 12.0, 10) if (each.world, each.way) == ("alike", "oort") else each for each in both(80.0, 40.0)]  # fmt: skip
    assert any("IID data on equal devices" in each for each in judged(unlike))
    never = [*both(80.0, 40.0), went("unequal", "random", 9, 80.0, 10), went("unequal", "oort", 9, 40.0, 20, 0.7)]
    assert any("did not reach" in each for each in judged(never))


def test_a_random_job_that_never_gets_there_gives_a_bound() -> None:
    slow, fast = went("unequal", "random", 0, 80.0, 20, 0.79), went("unequal", "oort", 0, 40.0, 10)
    assert oort.time_ratio(slow, fast) == 80.0 * 100 / (40.0 * 50)
    assert oort.time_ratio(fast, slow) is None


def test_where_neither_gets_there_nothing_is_a_bound_and_quick_is_not_judged() -> None:
    def ran(options: Options, final: float = 0.79) -> dict[str, Any]:
        found = [went(world, way, 0, 80.0, 20, final) for world in ("unequal", "alike") for way in ("random", "oort")]
        return time_to_accuracy.result_of(found, options, [])

    quick = ran(Options(quick=True))
    assert (quick["ok"], report.outcome_of(quick)) == (True, report.UNJUDGED)
    told = " ".join(quick["remarks"])
    assert "unequal: neither way reached the accuracy with seeds [0]" in told
    assert "judged only whether accuracies rise" in told
    assert "lower bounds" not in told
    assert report.outcome_of(ran(Options())) == report.DOES_NOT_HOLD
    assert report.outcome_of(ran(Options(quick=True), final=0.5)) == report.DOES_NOT_HOLD


def test_a_quick_ablation_is_judged_by_whether_it_rises() -> None:
    def outcome(reached: int, final: float, options: Options) -> str:
        ways = [went("unequal", way, 0, 50.0, reached, final) for way in ablation.colours]
        return report.outcome_of(ablation.result_of(ways, options, []))

    assert outcome(10, 0.85, Options(quick=True)) == report.UNJUDGED
    assert outcome(10, 0.85, Options()) == report.DOES_NOT_HOLD
    assert outcome(20, 0.5, Options(quick=True)) == report.DOES_NOT_HOLD


def parts(**changed: Any) -> dict[str, dict[str, Any]]:
    usual = {"mean_round_s": 20.0, "coverage": 300, "final_accuracy": 0.84, "rounds": 60, "spread": 0.004}
    found = {way: dict(usual) for way in ablation.colours}
    found["random"]["mean_round_s"] = 80.0
    found["no penalty"]["mean_round_s"] = 70.0
    found["no exploration"]["coverage"] = 26
    for way, numbers in changed.items():
        found[way.replace("_", " ")] |= numbers
    return found


def test_each_ablation_is_judged() -> None:
    assert ablation.judge(parts()) == []
    assert len(ablation.judge(parts(no_penalty={"mean_round_s": 19.0}))) == 2
    assert len(ablation.judge(parts(no_penalty={"mean_round_s": 30.0}))) == 1
    assert len(ablation.judge(parts(no_exploration={"coverage": 300}))) == 1
    assert len(ablation.judge(parts(no_pacer={"final_accuracy": 0.85, "rounds": 50}))) == 1
    assert ablation.judge(parts(no_pacer={"final_accuracy": 0.85, "rounds": 60})) == []
    assert ablation.judge(parts(no_pacer={"final_accuracy": 0.85, "rounds": 50, "spread": 0.02})) == [], (
        "seeds differ more"
    )


def test_large_clients_get_the_slow_devices(tmp_path: Path) -> None:
    from pliant.fed.clients import read_devices
    from pliant.fed.config import DataConfig
    from pliant.fed.data.build import build_task

    config = oort.config_of("large is slow", "synthetic", 3, rounds=2)
    config = config.model_copy(update={"data": DataConfig(kind="digits", partition="dirichlet", alpha=1.0, clients=50)})
    dealt = read_devices(oort.large_is_slow(config, tmp_path / "devices.csv"))
    took_s = dealt.round_s(200, model_bytes=0)
    sizes = build_task(config).sizes
    assert (np.diff(took_s[np.argsort(sizes, kind="stable")]) >= 0).all()


def test_rounds_with_too_few_are_complained_about() -> None:
    def ran(counted: int, accuracies: tuple[float, float], mb: float) -> list[str]:
        rounds = [
            Round(number, 0.0, 10.0, tuple(range(1690)), tuple(range(counted)), (), (), {}, 1.0, 0.1, 6000, 0, {})
            for number in (1, 2)
        ]
        points = [Point(number, 10.0, accuracy, 1.0, 1.0) for number, accuracy in zip((1, 2), accuracies, strict=True)]
        it = LargeRun(History(points, rounds), 10.0, mb)
        result = large.result_of(it, large.config(Options(), "synthetic"), Options(), [])
        assert result["ours"]["clients_per_s"] == 2 * counted / 10
        return list(result["remarks"]) if not result["ok"] else []

    assert ran(1300, (0.3, 0.5), 900.0) == []
    assert "1299 of 1690" in ran(1299, (0.3, 0.5), 900.0)[0]
    assert "does not rise" in ran(1300, (0.5, 0.4), 900.0)[0]
    assert "MB of memory" in ran(1300, (0.3, 0.5), 9000.0)[0]


def test_tables_are_looked_for_where_the_user_says(tmp_path: Path) -> None:
    assert oort_jobs.tables(Options(), "devices.csv", environ={}) is None
    (tmp_path / "fl").mkdir()
    (tmp_path / "fl" / "devices.csv").touch()
    assert oort_jobs.tables(Options(), "devices.csv", environ={"PLIANT_DATA": str(tmp_path)}) == tmp_path / "fl"
    assert oort_jobs.tables(Options(data=str(tmp_path / "fl")), "devices.csv", environ={}) == tmp_path / "fl"
    assert oort_jobs.tables(Options(data=str(tmp_path / "fl")), "devices.csv", "speech_labels.csv", environ={}) is None


def test_the_whole_problem_is_solved_by_highs_and_impossible_ones_are_known() -> None:
    holdings = Holdings(np.array([[4, 0], [2, 5], [3, 3]]), np.array([1.0, 1.0, 10.0]), np.array([1.0, 1.0, 1.0]))
    assert solve_whole(holdings, np.array([4, 4]), 3, limit_s=20) == (5.0, "solved")
    assert solve_whole(holdings, np.array([9, 8]), 1, limit_s=20)[0] is None


def test_testing_is_judged_shown_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIANT_DATA", raising=False)
    monkeypatch.setattr(oort_testing, "QUICK", ((100, 20, 200), (100, 1, 2000)))
    result = testers.run(Options(quick=True, steps=1))
    cells = result["cells"]
    assert result["ok"], result["remarks"]
    assert "synthetic" in result["remarks"][0]
    assert [cell["clients"] for cell in cells[:3]] == [566, 148, 38]
    assert "needs at least" in cells[-1]["solve"]["refused"]
    assert len(testers.table(result).rows) == len(cells)
    testers.plot(result, tmp_path / "testing.png")
    assert (tmp_path / "testing.png").stat().st_size > 10_000
    cells[3]["solve"] |= {"duration_s": 2 * cells[3]["solve"]["bound_s"], "took_s": 1e3, "faults": ["too few"]}
    assert len(testers.judge(cells, largest=100)) == 3


def test_courses_are_shown_and_drawn(tmp_path: Path) -> None:
    whole = time_to_accuracy.result_of(both(80.0, 40.0), Options(), [])
    ways = [went("unequal", way, seed, 50.0, 10) for way in ablation.colours for seed in (0, 1)]
    apart = ablation.result_of(ways, Options(), [])
    assert (whole["ok"], apart["ok"]) == (True, False)
    assert time_to_accuracy.table(whole).rows[0][3] == "2.00x (2.00-2.00)"
    assert len(ablation.table(apart).rows) == 5
    for figure, result in ((time_to_accuracy, whole), (ablation, apart)):
        figure.plot(result, tmp_path / "it.png")
        assert (tmp_path / "it.png").stat().st_size > 10_000


def with_presets(round_s: float = 10.0, final: float = 0.9, world: str = "shards, mlp") -> list[FedCourse]:
    """Courses of all settings, with three seeds. In `world` the default preset has these rounds and this accuracy."""
    found = []
    for data, model in SETTINGS:
        for seed in (0, 1, 2):
            for way in oort_presets.WAYS:
                odd = f"{data}, {model}" == world
                its_s, accuracy = (40.0, 0.9) if way == "random" else (10.0, 0.9)
                if odd and way == "balanced":
                    its_s, accuracy = round_s, final
                rounds = [2 * number for number in range(1, 31)]
                found.append(FedCourse(
                    f"{data}, {model}", way, seed, rounds, [its_s * each for each in rounds], [0.1] * 10 + [accuracy] * 20,
                    [its_s] * 60, 600, 1200,
                ))  # fmt: skip
    return found


def test_an_accuracy_is_found_by_the_mean_of_five_tests() -> None:
    course = FedCourse("w", "random", 0, [2, 4, 6, 8], [20.0, 40.0, 60.0, 80.0], [0.0, 0.9, 0.9, 0.6])
    assert oort_presets.smooth(course.accuracies) == pytest.approx([0.0, 0.45, 0.6, 0.6])
    assert oort_presets.first_at(course, 0.6, course.times_s) == 60.0
    assert oort_presets.first_at(course, 0.9, course.times_s) is None, "one test of 90 % is not enough"
    assert oort_presets.end_of(course) == pytest.approx(0.75), "the last half of the tests"
    fast = replace(course, times_s=[5.0, 10.0, 15.0, 20.0])
    assert oort_presets.times_sooner(course, fast, 0.6) == 4.0
    never = replace(course, accuracies=[0.1] * 4)
    assert oort_presets.times_sooner(course, never, 0.6) == 0.0
    assert oort_presets.times_sooner(never, fast, 0.6) == 80.0 / 15.0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"final": 0.896}, None),
        ({"final": 0.894}, "shards, mlp: balanced is 0.6 points less accurate than random"),
        ({"round_s": 26.0}, None),
        ({"round_s": 28.0}, "balanced reaches 88.0% 1.43 times sooner: not 1.5"),
    ],
    ids=str,
)
def test_the_default_preset_is_judged_in_every_setting(changed: dict[str, Any], says: str | None) -> None:
    result = presets.result_of(with_presets(**changed), Options(), [])
    complaints = [each for each in result["remarks"] if "does not hold" in each]
    assert (len(complaints), result["ok"]) == ((0, True) if says is None else (1, False)), complaints
    assert says is None or says in complaints[0]


def test_other_presets_are_not_judged_and_all_are_shown_and_drawn(tmp_path: Path) -> None:
    found = [replace(one, accuracies=[0.1] * 30) if one.way == "paper" else one for one in with_presets()]
    result = presets.result_of(found, Options(), [])
    assert result["ok"]
    rows = presets.table(result).rows
    assert len(rows) == len(SETTINGS) * len(oort_presets.WAYS)
    assert next(row for row in rows if row[1] == "balanced")[4] == "4.0x (4.0-4.0)"
    assert next(row for row in rows if row[1] == "paper")[4] == "0.0x (0.0-0.0)"
    assert presets.headline(result)[2] == "4.00x to 4.00x in 6 settings"
    presets.plot(result, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_sizes_are_very_unequal_and_the_same_for_every_seed(tmp_path: Path) -> None:
    from pliant.fed.tables import read_sizes

    sizes = np.sort(read_sizes(oort_presets.write_sizes(tmp_path / "sizes.csv")))
    assert len(sizes) == oort_presets.CLIENTS
    assert sizes[-100:].sum() > sizes.sum() / 2, "a tenth of the clients has most of the data"
    again = oort_presets.write_sizes(tmp_path / "again.csv")
    assert again.read_bytes() == (tmp_path / "sizes.csv").read_bytes()


@fashion
@full
@pytest.mark.parametrize(
    "figure", [time_to_accuracy, ablation, large, presets], ids=["time-to-accuracy", "ablation", "1300", "presets"]
)
def test_they_run(figure: Any, tmp_path: Path) -> None:
    result = figure.run(Options(quick=True, steps=2))
    assert figure.table(result).rows
    figure.plot(result, tmp_path / "it.png")


def test_jobs_side_by_side_are_the_jobs_one_after_the_other() -> None:
    from pliant.fed.config import DataConfig, FedConfig

    jobs = [
        oort_jobs.FedRun("w", "random", FedConfig(seed=seed, data=DataConfig(kind="digits", clients=30), model="logistic",
                                             participants=5, rounds=2, selector="random", batching=5))  # type: ignore[arg-type]
        for seed in (0, 1)
    ]  # fmt: skip
    alone, beside = (oort_jobs.run_jobs(jobs, Options(), processes=count) for count in (1, 2))
    for one, other in zip(alone, beside, strict=True):
        assert replace(one, took_s=0.0) == replace(other, took_s=0.0)
    assert alone[0].accuracies != alone[1].accuracies or alone[0].times_s != alone[1].times_s
