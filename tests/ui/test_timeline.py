"""A record's facts as a timeline: values in, values out."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pliant.jobs.status import JobEvent
from pliant.record import Fact, Recorder
from pliant.ui import charts, cluster_chart, widgets
from pliant.ui.charts import StepWindow
from pliant.ui.cluster_chart import (
    DeviceUse,
    allocation_chart,
    allocation_description,
    device_uses,
    devices_by_job,
    devices_in_use,
)
from pliant.ui.jobs import DashboardState, LogTail, RecordFile, ShownJob, strip_controls
from pliant.ui.page import grouped, job_list
from pliant.ui.timeline import JobTimeline, Series, ViewWorkers, thin
from pliant.ui.topology_chart import GraphLink, GraphNode, lanes_of, topology_chart, topology_graph

A, B, C = "10.0.0.1:9000", "10.0.0.1:9001", "10.0.0.2:9000"


def fact(kind: str, step: int, **data: Any) -> Fact:
    return Fact(kind, step, 1000.0 + step, data)


def step(number: int, workers: int = 2, loss: float = 1.0, **more: Any) -> Fact:
    figures = {"workers": workers, "batch_size": 8, "step_s": 0.1, "samples_per_s": 320.0, "values": {"loss": loss}}
    return fact("step", number, **figures, **more)


def view(number: int, *names: str, strategy: str = "AUTO") -> Fact:
    return fact("workers", number, view=number, workers=list(names), replicas=4, strategy=strategy)


def told(*facts: Fact) -> JobTimeline:
    timeline = JobTimeline()
    timeline.add([fact("start", 0, replicas=4, batch_size=8, workers=2), *facts])
    return timeline


# --- thinning ---


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 5000)
    y[31_337], y[77_777] = 50.0, -50.0
    points = thin(x, y, 800)
    assert len(points) <= 800
    assert points[0] == (0.0, y[0])
    assert points[-1] == (99_999.0, y[-1])
    assert (31_337.0, 50.0) in points
    assert (77_777.0, -50.0) in points
    assert points == sorted(points)
    every_nth = list(zip(x[::125], y[::125], strict=True))
    assert max(value for _, value in every_nth) < 2, "what is usually done would have lost it"


def series_of(*points: tuple[float, float]) -> Series:
    series = Series()
    for x, y in points:
        series.add(x, y)
    return series


def test_few_points_are_left_alone_gaps_are_left_out_and_means_are_of_neighbours() -> None:
    series = series_of((1, 5.0), (2, float("nan")), (3, float("inf")), (4, 7.0))
    assert series.thinned(10) == series.mean(10) == [(1.0, 5.0), (4.0, 7.0)]
    assert series_of(*((x, x) for x in range(10))).mean(2) == [(0.0, 2.0), (5.0, 7.0)]


def test_a_series_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.ui.timeline.MOST_KEPT", 1000)
    points = list(series_of(*((x, 99.0 if x == 1234 else x % 7) for x in range(10_000))))
    assert len(points) <= 1000
    assert (points[0][0], points[-1]) == (0, (9999, 9999 % 7))
    assert (1234, 99.0) in points


def test_a_step_that_is_done_again_replaces_itself_and_what_followed() -> None:
    assert list(series_of((1, 10.0), (2, 21.0), (3, 32.0), (2, 23.0))) == [(1.0, 10.0), (2.0, 23.0)]


# --- training ---


def test_steps_become_series() -> None:
    timeline = told(step(1, loss=2.0), step(2, loss=1.5, noise_scale=64.0))
    assert list(timeline.values["loss"]) == [(1, 2.0), (2, 1.5)]
    assert list(timeline.figures["samples_per_s"]) == [(1, 320.0), (2, 320.0)]
    assert list(timeline.figures["batch_size"]) == [(1, 32.0), (2, 32.0)], "of all replicas"
    assert list(timeline.figures["noise_scale"]) == [(2, 64.0)]
    assert (timeline.step, timeline.num_workers, timeline.over) == (2, 2, False)


def test_what_was_undone_is_not_shown() -> None:
    changed = fact("decision", 5, policy="p", decision={"kind": "set_batch_size", "size": 16, "reason": "r"})
    timeline = told(*(step(n) for n in range(1, 6)), changed, fact("resumed", 3), step(4, loss=0.5))
    assert [x for x, _ in timeline.values["loss"]] == [1, 2, 3, 4]
    assert [event.kind for event in timeline.events] == ["start", "resumed"]
    timeline.add([fact("start", 0, replicas=4)])  # the next run in the same file
    assert len(timeline.values["loss"]) == 0
    assert [event.kind for event in timeline.events] == ["start"]


def test_events_say_what_and_why() -> None:
    timeline = told(
        view(1, A, B),
        step(1),
        fact("view", 1, old=2, new=3, pause_s=0.0123, lost=False, repeated=0),
        fact("view", 2, old=3, new=2, pause_s=0.5, lost=True, repeated=2),
        fact("decision", 3, policy="gns", decision={"kind": "set_batch_size", "size": 64, "reason": "noise 512"}),
        fact("decision", 3, policy="slow", decision={"kind": "set_topology", "strategy": [0, 0], "reason": "link 0-1"}),
        fact("refused", 4, policy="gns", decision={"kind": "set_batch_size", "size": 9999}, why="too large"),
        fact("gap", 5, lost=12, from_s=1.0, to_s=2.0, why="No space left on device"),
        fact(
            "stall",
            6,
            worker="10.0.0.1:7",
            rank=2,
            what="in step 6",
            for_s=65.2,
            stack=[
                'File "/a/train.py", line 7 in f',
                'File "/a/b.py", line 9 in <module>',
                "its process 7 (python, state S):",
            ],
        ),
        fact("end", 9),
    )
    assert [(event.kind, event.what, event.why) for event in timeline.events] == [
        ("start", "starts on 2 workers", ""),
        ("resize", "2 → 3 workers", "pause of 12 ms"),
        ("lost", "a worker was lost: 3 → 2", "pause of 500 ms, 2 steps done again"),
        ("decision", "batch size 64 per replica", "gns: noise 512"),
        ("decision", "topology 0,0", "slow: link 0-1"),
        ("refused", "batch size 9999 per replica cannot be done", "gns: too large"),
        ("gap", "12 facts missing", "No space left on device"),
        (
            "stalled",
            "rank 2 (10.0.0.1:7) is stalled: in step 6 for 1m5s",
            "train.py:7 f ← b.py:9 <module> ← its process 7 (python, state S):",
        ),
        ("end", "finished after step 9", ""),
    ]
    assert timeline.views[-1].strategy == "0,0"
    assert timeline.over
    assert not timeline.is_running(now_s=1010.0)


def timed(number: int, compute_s: float, wait_s: float, slowest: int, **more: Any) -> Fact:
    return step(number, compute_s=compute_s, wait_s=wait_s, slowest=slowest, slowest_s=0.09, **more)


def test_phases_and_who_is_waited_for_are_those_of_the_newest_steps() -> None:
    long_ago = [timed(number, 0.1, 0.0, 0) for number in range(2, 200)]
    newest = [timed(number, 0.06, 0.03, 1 if number % 4 else 0) for number in range(200, 300)]
    timeline = told(view(1, A, B), step(1), *long_ago, *newest)
    facts = dict(timeline.facts)
    assert (
        facts["a step takes"] == "100 ms: 60% in turns, 30% waiting for other workers, 10% in the rest of the program"
    )
    assert facts["others wait for"].startswith(f"rank 1 ({B}) in 75 of the last 100 steps; ")
    assert "GPU memory" not in facts
    drawn = charts.phases({name: timeline.figures[name] for name in charts.PHASE_NAMES}, StepWindow.of(timeline))
    assert [each["data"][-1][1] for each in drawn["series"]] == pytest.approx([0.06, 0.03, 0.01])
    # Ranks of a view that has ended are others now.
    timeline.add([view(300, C, A), step(300), timed(301, 0.06, 0.03, 0)])
    assert dict(timeline.facts)["others wait for"].startswith(f"rank 0 ({C}) in 1 of the last 1 step; ")
    timeline.add([timed(302, 0.06, 0.03, 0, gpu_bytes=3 << 30, gpu_use=0.5)])
    assert dict(timeline.facts)["GPU memory"].startswith("3.0 GiB ")
    assert dict(timeline.facts)["GPU use"].startswith("50% of the time")
    assert told(step(1), step(2)).facts == [], "the control: a record of version 0.1 does not tell"


@pytest.mark.parametrize(
    "broken",
    [
        fact("step", 1, values=[1], workers="x", batch_size=None),
        fact("workers", 1, workers=3),
        fact("links", 1, hosts=["a", "b"], bytes_per_s=[[0]]),
        fact("decision", 1),
        fact("view", 1),
        fact("round", 1, invited="all"),
        fact("round", 1, round=1, invited=[1, None, 2**80], aggregated=[1], client_s=["soon"], client_loss=[1e400]),
        fact("work", 1, round_s="long", slowest=["a"]),
        fact("something new", 1),
    ],
    ids=lambda each: each.kind,
)
def test_damaged_and_unknown_facts_are_passed_over(broken: Fact) -> None:
    timeline = told(broken, step(2))
    assert timeline.values["loss"].last == 1.0
    assert all(isinstance(text, str) for _, text in timeline.facts)
    timeline = told(
        view(1, A, B), step(2, slowest=1e400, compute_s="x", wait_s=-1), step(3, slowest=9, gpu_bytes=1e400)
    )
    assert dict(timeline.facts)["others wait for"] == "rank 9 (unknown) in 1 of the last 1 step"


@pytest.mark.parametrize("left", ["compute_s", "wait_s"])
def test_a_part_of_the_phases_is_no_description_of_the_step(left: str) -> None:
    assert "a step takes" in dict(told(view(1, A, B), step(1, compute_s=0.02, wait_s=0.03)).facts)
    assert "a step takes" not in dict(told(view(1, A, B), step(1, **{left: 0.03})).facts)


def test_the_map_of_workers_follows_the_views() -> None:
    timeline = told(view(1, A, B), step(1), step(4), view(5, A, B, C), step(5), step(9))
    options, rows = charts.worker_map(timeline, StepWindow.of(timeline))
    assert rows == 3
    found = [each["value"] for each in options["series"][0]["data"]]
    assert options["yAxis"]["data"] == [A, B, C]
    by_name = sorted([options["yAxis"]["data"][row], *rest] for row, *rest in found)
    assert by_name == [[A, 0, 9, 2], [B, 0, 4, 2], [B, 4, 9, 1], [C, 4, 9, 1]]
    options, rows = charts.worker_map(timeline, StepWindow.of(timeline, chosen=(6, 8)))
    assert sorted(each["value"][1:] for each in options["series"][0]["data"]) == [[6, 8, 1], [6, 8, 1], [6, 8, 2]]
    assert (options["xAxis"]["min"], options["xAxis"]["max"], rows) == (6, 8, 3)


def test_each_worker_is_a_square_with_its_replicas() -> None:
    shown = widgets.worker_squares(ViewWorkers(1, (A, B, C), 4))
    assert re.findall(r'title="([^"]*)">([^<]*)<', shown) == [
        (f"{A}: rank 0, replicas 0-1", "0-1"),
        (f"{B}: rank 1, replicas 2", "2"),
        (f"{C}: rank 2, replicas 3", "3"),
    ]
    assert re.findall(r">([^<]*)</span><span class=.squares", shown) == ["10.0.0.1", "10.0.0.2"]
    assert re.findall(r'title="([^"]*)">([^<]*)<', widgets.worker_squares(ViewWorkers(1, (A,), 0))) == [
        (f"{A}: rank 0", "0")
    ]


# --- what is drawn of a curve ---


def test_a_part_of_many_steps_is_drawn_with_each_of_them() -> None:
    timeline = told(*(step(number, loss=float(number % 7)) for number in range(1, 10_001)))
    decided = fact("decision", 5050, policy="p", decision={"kind": "set_batch_size", "size": 16, "reason": "r"})
    timeline.add([decided, fact("view", 9000, old=2, new=3, pause_s=0, lost=False)])
    window = StepWindow.of(timeline, chosen=(5000, 5100))
    (line,) = charts.curves(timeline.values, window)["series"]
    assert [x for x, _ in line["data"]] == list(range(4999, 5102)), "one more on each side, so that it leaves the graph"
    assert [each["xAxis"] for each in line["markLine"]["data"]] == [5050], "what happened elsewhere is not there"
    assert "5000 to 5100: loss" in charts.description(timeline.values, window)
    assert StepWindow.of(timeline).end == 10_000
    assert (StepWindow.of(timeline, chosen=(50_000, None)).begin, StepWindow.of(timeline, chosen=(0, 0)).end) == (
        9_999,
        1,
    )


def test_learning_rates_that_follow_the_batch_hide_nothing() -> None:
    def decided(number: int, kind: str, **more: Any) -> Fact:
        return fact("decision", number, policy="p", decision={"kind": kind, "reason": "r", **more})

    rates = [decided(number, "set_learning_rate", factor=number / 100) for number in range(100, 200)]
    lost = fact("view", 150, old=3, new=2, pause_s=0.1, lost=True)
    facts = [*rates[:50], decided(149, "set_batch_size", size=64), lost, *(rates[50:])]
    timeline = told(*facts, step(1000))
    window = StepWindow.of(timeline)
    drawn = charts.apart(window)
    assert len(drawn) < 10 < len(window.events)
    assert {(event.kind, event.step) for event in drawn} >= {("lost", 150), ("decision", 149)}
    listed = re.findall("<span>(.*?)</span><small>(.*?)</small>", widgets.event_list(timeline.events, "step"))
    assert [what for what, _ in listed[:2]] == ["learning rate × 1.99", "a worker was lost: 3 → 2"]
    assert listed[0][1].endswith("p: r (again and again since step 150)")
    assert len(listed) == 5


def test_a_noise_that_scatters_does_not_hide_the_batch() -> None:
    noises = [40.0, -3.0, 90_000.0, 60.0]
    timeline = told(*(step(number, noise_scale=noise) for number, noise in enumerate(noises, 1)))
    given = {name: timeline.figures[figure] for name, figure in charts.NOISE.items() if figure in timeline.figures}
    options = charts.noise(given, StepWindow.of(timeline))
    assert options["yAxis"]["type"] == "log"
    assert [y for _, y in options["series"][0]["data"]] == [40.0, 90_000.0, 60.0], "a logarithm has nothing below 0"


def test_values_of_other_kinds_do_not_share_a_scale() -> None:
    def names(*given: str) -> list[list[str]]:
        return [list(group) for group in grouped({name: Series() for name in given})]

    assert names() == []
    assert names("accuracy", "train_loss", "test_loss") == [["train_loss", "test_loss"], ["accuracy"]]
    assert names("reward", "lr") == [["reward"], ["lr"]]
    assert names("loss", "a", "b", "c", "d", "e") == [["loss"], ["a"], ["b"], ["c"], ["d", "e"]]


def test_what_a_cluster_decides_is_on_the_curves_where_it_was_decided() -> None:
    job = ShownJob("k", "one", "here", timeline=told(*(step(number) for number in range(1, 11))))
    job.cluster_events = [event(900.0, "submitted"), event(1004.5, "decision", 1, "shrinks"), event(1011.0, "finished")]
    events = [each for each in job.events if each.what in ("submitted", "decision", "finished")]
    assert [(each.what, each.step, each.kind) for each in events] == [
        ("submitted", None, "start"),
        ("decision", 4, "decision"),
        ("finished", 10, "end"),
    ]
    assert [(each.step, each.why) for each in StepWindow.of(job.timeline, job.events).events] == [(4, "shrinks")]


# --- topology ---


def test_a_topology_has_its_links_rates() -> None:
    rates = [[0, 12_500_000], [25_000_000, 0]]
    timeline = told(
        view(1, A, B, C, strategy="0,0,0"), fact("links", 1, hosts=["10.0.0.1", "10.0.0.2"], bytes_per_s=rates)
    )
    found = topology_graph(timeline.views[-1], timeline.links)
    assert found.nodes == (GraphNode(A, 1, True), GraphNode(B, 1, False), GraphNode(C, 1, False))
    assert found.links == (GraphLink(1, 0, 1, None), GraphLink(2, 0, 1, 25_000_000.0))
    drawn = topology_chart(found)["series"][0]["links"]
    assert [each["label"]["formatter"] for each in drawn] == ["", "200 Mbit/s"]


def test_a_thousand_workers_are_drawn_as_hosts() -> None:
    names = [f"10.0.{number // 8}.1:{9000 + number % 8}" for number in range(1000)]
    timeline = told(view(1, *names), step(1))
    begun_s = time.perf_counter()
    found = topology_graph(timeline.views[-1], None)
    rows = charts.worker_map(timeline, StepWindow.of(timeline))[1]
    assert time.perf_counter() - begun_s < 2
    assert len(found.nodes) == 64
    assert found.nodes[0].workers == 8
    assert "125 hosts" in found.note
    assert rows == 125


def test_a_topology_that_fits_no_crew_is_said() -> None:
    timeline = told(view(1, A, B, strategy="0,0,0"))
    assert "3 parents for 2 workers" in topology_graph(timeline.views[-1], None).note
    assert len(lanes_of("RING", ["a", "b", "c"])) == 3


# --- federated ---


def test_time_to_accuracy_and_who_was_picked() -> None:
    timeline = JobTimeline()
    timeline.add([fact("start", 0)])
    for number in (1, 2, 3):
        picks = [number, number + 1]
        timeline.add(
            [
                fact("round", number, round=number, clock_s=3600.0 * number, duration_s=60.0, loss=1 / number,
                     invited=picks, aggregated=picks[:1], cut=picks[1:], lost=[], picked=2),
                fact("test", number, round=number, clock_s=3600.0 * number, accuracy=0.2 * number, loss=2.0),
            ]
        )  # fmt: skip
    federation = timeline.federated
    assert federation is not None
    assert federation.accuracy.thinned(9) == [(1, 20), (2, 40), (3, pytest.approx(60))]
    assert (federation.time_to(40), federation.time_to(61)) == (2.0, None)
    assert federation.clients.picked == {1: 1, 2: 2, 3: 2, 4: 1}
    assert [each["data"][-1] for each in charts.fed_loss(federation)["series"]] == [[3, 0.333333], [3, 2.0]]
    assert charts.fed_description(federation)["picked"].endswith("round 3: 3, 4")
    assert charts.fed_fairness(federation)["series"][0]["data"] == [2, 2]
    assert charts.fed_durations(federation) is None, "rounds of an older pliant on Flower do not tell"
    assert [each["data"] for each in charts.fed_picked(federation)["series"]] == [
        [[1, 1], [2, 2], [3, 3]],
        [[1, 2], [2, 3], [3, 4]],
        [],
    ]
    timeline.add([fact("round", 2, round=2, clock_s=7200.0, invited=[9])])  # begun anew from a checkpoint
    assert federation.clients.picked == {1: 1, 2: 1, 9: 1}
    assert timeline.step == 2


def test_a_hundred_thousand_clients_are_drawn_at_once() -> None:
    """50 rounds of 1,000: every client would be a dot, and every number be read out."""
    timeline = JobTimeline()
    timeline.add([fact("start", 0, config={"participants": 1000}, clients=100_000)])
    for number in range(1, 51):
        ids = [(7919 * (1000 * number + place)) % 100_000 for place in range(1000)]
        took = {"client_s": [1.0 + client % 50 for client in ids]}
        timeline.add([fact("round", number, round=number, clock_s=60.0 * number, invited=ids, aggregated=ids, **took)])
    fed = timeline.federated
    assert fed is not None
    begun_s = time.process_time()
    drawn = [charts.fed_picked(fed), charts.fed_fairness(fed), charts.fed_durations(fed), charts.fed_description(fed)]
    assert time.process_time() - begun_s < 2
    assert len(json.dumps(drawn)) < 150_000
    dots = drawn[0]["series"][0]["data"]
    assert len(dots) == 4000
    assert {number for number, _ in dots} == {47, 48, 49, 50}, "the newest rounds, whole"
    assert drawn[1]["series"][0]["data"] == [50_000, 50_000], "never, and once"
    assert drawn[1]["xAxis"]["data"] == ["0", "1"]
    ids = list(range(20_000))
    timeline.add([fact("round", 51, round=51, clock_s=1.0, invited=ids, aggregated=ids)])
    dots = charts.fed_picked(fed)["series"][0]["data"]
    assert {number for number, _ in dots} == {51}
    assert [client for _, client in dots] == ids[::5], "of one larger than the chart, every so many"
    assert charts.fed_description(fed)["picked"].endswith("and 19960 more")


def test_a_round_that_fills_the_chart_leaves_no_room_for_one_without_clients() -> None:
    timeline = JobTimeline()
    timeline.add([fact("start", 0)])
    ids = list(range(charts.MOST_DOTS))
    for number, picked in ((1, []), (2, ids)):
        timeline.add([fact("round", number, round=number, clock_s=60.0 * number, invited=picked, aggregated=picked)])
    assert timeline.federated is not None
    dots = charts.fed_picked(timeline.federated)["series"][0]["data"]
    assert dots == [[2, client] for client in ids]


# --- the cluster ---


def event(at: float, what: str, cpu: int = 0, why: str = "") -> JobEvent:
    return JobEvent(at=at, what=what, why=why, devices={"cpu": cpu} if cpu else {})


def test_devices_over_time() -> None:
    first = [event(1, "submitted"), event(1, "decision", 2), event(2, "starting", 2), event(3, "running", 2)]
    last = [event(5, "decision", 1), event(8, "finished")]
    found = device_uses(
        [*(("a", each) for each in first), ("b", event(4, "starting", 1)), *(("a", each) for each in last)]
    )
    assert found == [
        DeviceUse("a", 2, 5, 2, "cpu=2"),
        DeviceUse("b", 4, None, 1, "cpu=1"),
        DeviceUse("a", 5, 8, 1, "cpu=1"),
    ]
    assert devices_by_job(found, 10) == {
        "a": [(2, 2), (4, 2), (5, 1), (8, 0), (10, 0)],
        "b": [(2, 0), (4, 1), (5, 1), (8, 1), (10, 1)],
    }
    options = allocation_chart(found, 4, 10)
    assert options["yAxis"]["max"] == 4
    assert options["series"][0]["data"][0] == [2000, 2]
    assert devices_in_use(found, 10, 4) == [(4, 3), (6, 2), (8, 1), (10, 1)]
    assert allocation_description(found, 4) == "4 devices; b has cpu=1"


def test_a_cluster_with_many_jobs_is_drawn_with_those_that_had_most() -> None:
    found = [DeviceUse(f"job {number}", number, number + 5.0, 1 + number % 7, "") for number in range(1000)]
    begun_s = time.perf_counter()
    options = allocation_chart(found, 40, 2000)
    assert time.perf_counter() - begun_s < 2
    assert len(options["series"]) == cluster_chart.MOST_JOBS + 1
    assert cluster_chart.OTHERS in [each["name"] for each in options["series"]]
    assert all(len(each["data"]) <= cluster_chart.MOST_MOMENTS + 1 for each in options["series"])


def test_a_long_list_is_cut_and_the_rest_is_a_click_away() -> None:
    known = DashboardState()
    for number in range(5):
        known.job(f"/runs/{number}", f"job {number}").begun_s = float(number)
    known.job("/runs/5", "busy").reported_state = "running"
    shown = job_list(known, 10.0, most=3)
    assert re.findall("<b>(.*?)</b>", shown) == ["busy", "job 4", "job 3"]
    assert 'href="/?all">All 6 jobs' in shown
    assert "/?all" not in job_list(known, 10.0)
    assert "No jobs yet" in job_list(DashboardState(), 10.0)


# --- files ---


def test_a_record_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path)
    assert file.facts() == ([], False)
    with Recorder(path) as recorder:
        recorder.write("start", 0, replicas=2)
        assert [each.kind for each in file.facts()[0]] == ["start"]
        assert file.facts() == ([], False)
        recorder.write("step", 1, workers=2)
    with path.open("a") as out:
        out.write('{"kind": "step", "st')
        out.flush()
        assert [each.step for each in file.facts()[0]] == [1]
        out.write('ep": 2, "time_s": 5}\nnot a fact\n')
    assert [each.step for each in file.facts()[0]] == [2]
    path.unlink()
    path.write_text('{"kind": "start", "step": 0, "time_s": 9}\n')
    facts, is_new = file.facts()
    assert [each.time_s for each in facts] == [9.0]
    assert is_new


def test_a_log_keeps_its_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(3000)) + b"\xff torn")
    log = LogTail(path)
    log.poll()
    assert log.text[-1] == "line 2999"
    assert len(log.text) == 2000
    with path.open("ab") as out:
        out.write(b" no more\n")
    log.poll()
    assert log.text[-1] == "\ufffd torn no more"


def test_a_hundred_thousand_steps_are_drawn_at_once() -> None:
    random.seed(1)
    timeline = told(*(step(number, loss=3 / number**0.2 + random.random() / 9) for number in range(1, 100_001)))
    begun_s = time.perf_counter()
    options = charts.curves(timeline.values, StepWindow.of(timeline))
    drawn_s = time.perf_counter() - begun_s
    assert timeline.step == 100_000
    assert len(json.dumps(options)) < 60_000
    assert drawn_s < 2, "about 30 ms on a quiet machine"


# --- what others have written ---


def test_a_terminal_obeys_nothing_of_it() -> None:
    assert strip_controls("\x1b[31mred\x1b[0m\ttab\x1b]0;title\x07 \x9b2J\x08bell\x07") == "red\ttab 2Jbell"


def test_text_of_others_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    decided = fact("decision", 1, policy=evil, decision={"kind": "resize", "workers": 3, "reason": evil})
    timeline = told(view(1, evil, B), step(1), decided)
    shown = charts.curves(timeline.values, StepWindow.of(timeline))["tooltip"][":formatter"]
    drawn = topology_chart(topology_graph(timeline.views[-1], None))["series"][0]
    assert "&lt;img" in shown
    assert "<img" not in shown + drawn["data"][0]["told"] + drawn["links"][0]["told"]
