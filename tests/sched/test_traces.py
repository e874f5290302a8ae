"""Traces are read as they are published, and synthetic ones have Philly's statistics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.sched.cluster import Cluster
from pliant.sched.compare import SimulationSetting, compare, remarks
from pliant.sched.policies import make_policy
from pliant.sched.simulate import Simulation, quantile, summary
from pliant.sched.traces import PHILLY_DEVICES, PHILLY_JOBS, Trace, jobs_of, like_easyscale, read, synthetic

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 00:01:56,66.0,1,66.0,11cb48\n2017-10-09 00:00:56,10,8,80,ee\n"
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration\n"
    "7,u1,vcA,8,64,1,COMPLETED,2020-04-01 00:10:00,2020-04-01 00:10:02,2020-04-01 01:10:02,3600\n"
    "8,u1,vcA,0,4,1,COMPLETED,2020-04-01 00:11:00,2020-04-01 00:11:02,2020-04-01 00:12:02,60\n"
)
PAI = "job-a,worker,4,Terminated,100.0,700.0,600,29,50,T4\njob-b,worker,1,Terminated,50,60,600,29,100,P100\n"
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "openb-pod-0,12000,16384,1,1000,,LS,Running,0,12537496,0\nopenb-pod-1,6000,12288,2,1000,,BE,Succeeded,100,1100,200\n"
)
LOG = [
    {
        "status": "Pass", "vc": "ee9e8c", "jobid": "application_1", "submitted_time": "2017-10-09 07:00:00", "user": "u",
        "attempts": [
            {"start_time": "2017-10-09 07:01:00", "end_time": "2017-10-09 07:02:00", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]},
            {"start_time": "2017-10-09 07:03:00", "end_time": "2017-10-09 07:04:30",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu3", "gpu4"]}]},
        ],
    },
    {"status": "Killed", "vc": "x", "jobid": "application_2", "submitted_time": "2017-10-09 06:00:00", "user": "u", "attempts": []},
]  # fmt: skip


def written(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read(str(path))


@pytest.mark.parametrize(
    ("text", "form", "first", "count"),
    [
        (PHILLY, "philly", ("philly-1", 0.0, 8, 10.0, "ee"), 2),
        (json.dumps(LOG), "philly", ("application_1", 0.0, 4, 150.0, "ee9e8c"), 1),
        (HELIOS, "helios", ("7", 0.0, 8, 3600.0, "vcA"), 1),
        (PAI, "pai", ("job-b", 0.0, 1, 10.0, ""), 2),
        (OPENB, "openb", ("openb-pod-0", 0.0, 1, 12537496.0, "LS"), 2),
    ],
    ids=["philly", "philly-log", "helios", "pai", "openb"],
)
def test_published_forms_are_recognised(
    tmp_path: Path, text: str, form: str, first: tuple[str, float, int, float, str], count: int
) -> None:
    trace = written(tmp_path, text)
    entry = trace.entries[0]
    assert trace.form == form
    assert (entry.name, entry.submitted_s, entry.devices, entry.duration_s, entry.tenant) == first
    assert len(trace.entries) == count


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "[", "timestamp,duration,num_gpus\nx,y,z\n"])
def test_unreadable_traces_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trace:[12]: "):
        written(tmp_path, text)


def test_a_missing_file_and_a_wrong_word_are_refused(tmp_path: Path) -> None:
    for source in (str(tmp_path / "none.csv"), "synthetic:many", "synthetic:0"):
        with pytest.raises(ConfigError):
            read(source)


def test_synthetic_traces_have_the_statistics_of_philly() -> None:
    entries = synthetic(20_000, seed=3)
    assert synthetic(50, seed=3) == synthetic(50, seed=3)
    assert synthetic(50, seed=3) != synthetic(50, seed=4)
    durations = sorted(entry.duration_s for entry in entries)
    for part, seconds in ((0.1, 61), (0.5, 1_144), (0.9, 11_266), (0.99, 254_884)):
        assert quantile(durations, part) == pytest.approx(seconds, rel=0.15)
    sizes = Counter(entry.devices for entry in entries)
    assert sizes[1] / len(entries) == pytest.approx(PHILLY_DEVICES[1] / sum(PHILLY_DEVICES.values()), abs=0.01)
    assert max(entry.submitted_s for entry in entries) <= 15 * 7 * 86400
    # The published sizes miss 23 of all jobs.
    assert sum(PHILLY_DEVICES.values()) == PHILLY_JOBS - 23


def test_unknown_devices_need_a_speed() -> None:
    entries, cluster = synthetic(5), Cluster({"g2": 4})
    with pytest.raises(ConfigError, match="--speed g2="):
        jobs_of(entries, cluster)
    assert all(job.types[0].speed == 2.5 for job in jobs_of(entries, cluster, speeds={"g2": 2.5}))


def test_a_recorded_duration_is_that_on_the_preferred_type() -> None:
    cluster = Cluster({"v100": 8, "p100": 8, "t4": 8})
    jobs = jobs_of(synthetic(200, seed=1), cluster)
    for job, entry in zip(jobs, synthetic(200, seed=1), strict=True):
        job.give(0, {job.preferred: job.replicas}, (), 0)
        assert job.ends_s() == pytest.approx((entry.duration_s,) * 2)


def test_policies_can_be_compared_in_processes_of_their_own() -> None:
    setting = SimulationSetting(trace=read("synthetic:30:0.1", seed=2), cluster="v100=4,t4=4", seeds=2)
    alone = compare(["yarn-cs-gang", "easyscale-heter"], setting, processes=1)
    beside = compare(["yarn-cs-gang", "easyscale-heter"], setting, processes=2)
    assert list(alone) == list(beside)
    assert alone == beside
    restart, live = (alone[run] for run in alone if run.policy == "easyscale-heter")
    assert summary(live.first)["paused_hours"] < summary(restart.first)["paused_hours"]


def test_the_published_job_list_gives_the_published_order(cluster_data: Path) -> None:
    """8905 / 1071 / 677 s and 16560 / 6720 / 6000 s in the paper, with step times that were never published."""
    trace = read(str(cluster_data / "easyscale" / "test.csv"))
    assert len(trace.entries) == 62
    found = []
    for policy in ("yarn-cs", "easyscale-homo", "easyscale-heter"):
        cluster = Cluster({"v100": 32, "p100": 16, "t4": 16})
        found.append(summary(Simulation(jobs_of(trace.entries, cluster), cluster, make_policy(policy)).run()))
    for key in ("jct_mean_s", "makespan_s"):
        assert found[0][key] > found[1][key] > found[2][key], key
    assert found[2]["mean_allocated"] >= found[1]["mean_allocated"]


def test_a_real_cluster_is_read(cluster_data: Path) -> None:
    cluster = Cluster.parse(str(cluster_data / "openb_nodes.csv"))
    assert sum(cluster.counts.values()) == 6212
    assert len(cluster.counts) == 7


def test_the_philly_week_has_the_published_order(cluster_data: Path) -> None:
    """Its first 2,500 jobs here; the whole week is in repro/results."""
    trace = read(str(cluster_data / "philly_week.csv"), limit=2500)
    found = []
    for policy in ("yarn-cs", "easyscale-homo", "easyscale-heter"):
        cluster = Cluster({"v100": 32, "p100": 16, "t4": 16})
        found.append(summary(Simulation(jobs_of(trace.entries, cluster), cluster, make_policy(policy)).run()))
    for key in ("jct_mean_s", "makespan_s"):
        assert found[0][key] > found[1][key] > found[2][key], key
    assert found[2]["mean_allocated"] >= found[1]["mean_allocated"]


def test_a_file_of_nodes_is_refused_with_all_its_mistakes(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("sn,gpu,model\na,2,T4\nb,nan,T4\nc,-1,\nd,8,V100\n")
    with pytest.raises(ConfigError) as refusal:
        Cluster.parse(str(nodes))
    assert str(refusal.value).replace(f"{tmp_path}/", "").splitlines() == [
        "nodes.csv:3: gpu 'nan': use a whole number from 0 to 1,000,000",
        "nodes.csv:4: model is empty: give one",
        "nodes.csv:4: gpu '-1': use a whole number from 0 to 1,000,000",
    ]
    nodes.write_text("sn,cards\na,2\n")
    with pytest.raises(ConfigError, match=r"nodes.csv:1: no column 'gpu'"):
        Cluster.parse(str(nodes))
    for text in ("v100=9999999", f"v100={'9' * 5000}", "v100=4x9999999"):
        with pytest.raises(ConfigError, match="use 1,000,000 devices of a type, or less"):
            Cluster.parse(text)


def test_what_published_traces_leave_open_is_no_mistake(tmp_path: Path) -> None:
    """A task of PAI that never ran has no times, and one without a GPU has no share of it; pods of OpenB may have no end."""
    assert written(tmp_path, PAI + "job-c,ps,1,Waiting,,,600,29,,\n").unused_rows == 1
    assert written(tmp_path, OPENB + "openb-pod-2,1,1,1,1000,,LS,Pending,5,,\n").unused_rows == 1
    assert written(tmp_path, HELIOS).unused_rows == 1
    assert written(tmp_path, PHILLY + "\n\n2017-10-09 00:03:56,0,1,0,ee\n").unused_rows == 1


def test_a_synthetic_trace_is_bounded() -> None:
    for source in (
        "synthetic:99999999999",
        "synthetic:5:inf",
        "synthetic:5:nan",
        "synthetic:5:1e9",
        f"synthetic:{'9' * 5000}",
    ):
        with pytest.raises(ConfigError, match="use "):
            read(source)


def test_jobs_that_are_larger_than_the_cluster_are_told() -> None:
    setting = SimulationSetting(trace=Trace("easyscale", tuple(like_easyscale(5))), cluster="v100=4")
    assert any("more devices than there are of any type (4 at most)" in note for note in remarks(setting))
