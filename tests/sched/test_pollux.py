"""The published simulator of Pollux: its averages, and the rules behind them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import interval_loop
import pytest

from pliant.errors import ConfigError
from pliant.sched.compare import SimulationSetting
from pliant.sched.pollux import Application, ProfiledWork, load
from pliant.sched.simulate import summary
from pliant.sched.traces import Trace, read

PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,10,1.0,0.0\n1,20,2.0,0.0\n11,10,1.5,0.5\n11,20,2.5,0.5\n12,10,3.0,1.0\n12,20,5.0,1.0\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n6,6,10,4.0,2.0\n6,6,20,6.0,2.0\n"
ROWS = "progress,iteration,metric,grad_sqr,grad_var\n100,{0},1,1,0\n200,{1},2,1,0\n"


@pytest.fixture
def application(tmp_path: Path) -> Application:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "placements.csv").write_text(PLACEMENTS)
    (folder / "scalability.csv").write_text(SCALABILITY)
    (folder / "validation-10.csv").write_text(ROWS.format(100, 200))
    (folder / "validation-40.csv").write_text(ROWS.format(60, 120))
    return load(tmp_path)["toy"]


def test_measured_placements_are_rotated_and_interpolated(application: Application) -> None:
    assert application.step_times((2, 1), 15) == pytest.approx((4.0, 1.0))
    assert application.step_times((1,), 12) == pytest.approx((1.2, 0.0))


def test_a_batch_beyond_a_device_takes_turns(application: Application) -> None:
    assert application.split(10, 1) == (10, 1)
    assert application.split(20, 1) == (10, 2)  # one device alone shows no noise in one turn
    assert application.split(40, 2) == (20, 1)
    assert application.split(40, 1) == (20, 2)


def test_steps_between_measured_batch_sizes(application: Application) -> None:
    assert application.iterations(25, 0) == pytest.approx(80)
    with pytest.raises(ConfigError, match="use 10 to 40"):
        application.around(50)
    with pytest.raises(ConfigError, match="outside of what was measured"):
        application.step_times((1,), 30)


def test_epochs_end_at_whole_seconds_however_often_one_looks(application: Application) -> None:
    def work() -> ProfiledWork:
        job = application.make_job("a", 0, 3, 30, "gpu")
        job.give(0, {"gpu": 3}, ((0, 1), (1, 2)), 0)
        assert isinstance(job.work, ProfiledWork)
        return job.work

    at_once = work()
    noticed, total = at_once.left_s()
    assert abs(noticed - total) <= 0.5
    assert total == int(total)
    often = work()
    for _ in range(int(total) + 1):
        often.advance(1)
    assert often.epoch == application.num_epochs
    assert often.done == pytest.approx(1)
    almost = work()
    almost.advance(total - 1)
    assert almost.epoch == application.num_epochs - 1


def test_a_workload_needs_its_step_times() -> None:
    with pytest.raises(ConfigError, match="--profiles"):
        SimulationSetting(trace=Trace("pollux", ()), cluster="gpu=16x4")
    with pytest.raises(ConfigError, match="no such folder"):
        load(Path("nowhere"))


@pytest.mark.parametrize(("policy", "published_s"), [("tiresias", 3469.69375), ("optimus", 5301.875)])
def test_the_published_averages(cluster_data: Path, policy: str, published_s: float) -> None:
    folder = cluster_data / "pollux"
    setting = SimulationSetting(
        trace=read(str(folder / "workload-6.csv")),
        cluster="gpu=16x4",
        profiles=str(folder / "traces"),
        live_pause_s=None,
    )
    assert summary(setting.run(policy, live=False))["jct_mean_s"] == pytest.approx(published_s, rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "seed", "jobs", "hours"),
    # In the last one a job ends by rounding down at the second of a round, and keeps its devices for it.
    [("tiresias", 1, 60, 2), ("optimus", 1, 60, 2), ("optimus", 2, 60, 2), ("tiresias", 11, 240, 8)],
)
def test_events_and_a_plain_loop_over_intervals_agree(
    cluster_data: Path, policy: str, seed: int, jobs: int, hours: int
) -> None:
    """On workloads that nobody has published: the jobs of one, at other times and in other numbers."""
    folder, chance = cluster_data / "pollux", random.Random(seed)
    known = read(str(folder / "workload-6.csv")).entries
    if jobs == 240:
        chance.choice((160, 240))  # the draw with which this case was found
    times = sorted(chance.randrange(0, hours * 3600) for _ in range(jobs))
    entries = [
        replace(chance.choice(known), name=f"j{number}", submitted_s=float(time)) for number, time in enumerate(times)
    ]
    setting = SimulationSetting(
        trace=Trace("pollux", tuple(entries)), cluster="gpu=16x4", profiles=str(folder / "traces"), live_pause_s=None
    )
    expected = interval_loop.mean_jct(entries, load(folder / "traces"), policy)
    assert summary(setting.run(policy, live=False))["jct_mean_s"] == pytest.approx(expected, rel=1e-12)


def test_rows_are_checked_against_what_was_measured(cluster_data: Path, tmp_path: Path) -> None:
    folder = cluster_data / "pollux"
    profiles, workload = load(folder / "traces"), tmp_path / "workload.csv"
    good = (folder / "workload-6.csv").read_text()
    assert len(read(str(folder / "workload-6.csv"), profiles=profiles).entries) == 160
    workload.write_text(
        good + "a,1,cifar10,4,1000000\nb,2,cifar100,4,512\nc,3,cifar10,0,0\ncifar10-0,4,cifar10,4,512\n"
    )
    with pytest.raises(ConfigError) as refusal:
        read(str(workload), profiles=profiles)
    told = str(refusal.value).replace(f"{workload}:", "").splitlines()
    for line, begin in zip(
        told,
        (
            "162: cifar10: batch size 1000000: use 128 to", "163: application 'cifar100' is unknown: use one of",
            "164: num_replicas '0': use a whole number from 1", "164: batch_size '0': use a whole number from 1",
            "165: 'cifar10-0' is the name of the job in line 2, too", "4 of 164 rows are wrong: mend them, or add --skip-bad",
        ),
        strict=True,
    ):  # fmt: skip
        assert line.startswith(begin)
    assert read(str(workload), profiles=profiles, skip_bad=True).skipped_rows == 4
