"""`pliant bench gpu`: its arithmetic and verdicts, and one part for real at a tiny size on the CPU."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from pliant_repro.bench import gpu, gpu_bits, gpu_elastic, gpu_memory, gpu_timing, trace_summary, training
from pliant_repro.bench.elastic import StepBegun, training_task
from pliant_repro.bench.gpu_bits import Group, Outcome
from pliant_repro.bench.gpu_parts import MODES, Clock, DevicePool, GpuOptions, Part, weights_of
from pliant_repro.bench.training_probes import digest_state, digest_tensors
from pliant_repro.contest import Timings
from pliant_repro.forking import ColdStarts

from pliant.cli.output import save_json
from pliant.errors import ConfigError

# Digests


def test_a_digest_is_of_parameters_and_optimizer() -> None:
    def digest(change: str) -> str:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if change == "weight":
            with torch.no_grad():
                model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
        if change == "moment":
            optimizer.state[model.bias]["exp_avg"][0] += 1
        return digest_state(model, optimizer)

    assert digest("") == digest("")
    assert len({digest(""), digest("weight"), digest("moment")}) == 3
    assert digest_tensors([torch.zeros(2), torch.ones(1)]) != digest_tensors([torch.ones(1), torch.zeros(2)])


def test_the_first_difference_is_named_and_a_missing_step_is_one() -> None:
    assert gpu_bits.first_difference(["a", "b"], ["a", "b"]) is None
    assert gpu_bits.first_difference(["a", "x"], ["a", "b"]) == 2
    assert gpu_bits.first_difference(["a"], ["a", "b"]) == 2
    one = {"states": ["a", "b"], "buffers": ["", ""], "losses": [1.5, 0.0]}
    assert gpu_bits.merge_ranks([one, one]) == ([("a", ""), ("b", "")], "")
    said = gpu_bits.merge_ranks([one, {**one, "states": ["a", "x"]}])
    assert said == ([("a", ""), ("b", "")], "rank 1 differs from rank 0 after step 2")
    assert "has diverged" in gpu_bits.merge_ranks([{**one, "losses": [1.5, math.nan]}])[1]


def judged(part: Part) -> list[bool | None]:
    return [ok for ok, _ in part.verdicts]


def outcomes_of(groups: list[Group], wrong: str = "") -> dict[Group, Outcome]:
    """Digests of two steps for each group: those of its order, but others after step 2 where the name has `wrong`."""
    found = {}
    for group in groups:
        last = "x" if group.tampered or (wrong and wrong in group.name) else "b"
        digests = [(f"{group.order} a", ""), (f"{group.order} {last}", "")] if wrong != "missing" else []
        found[group] = Outcome(digests, overlapped=6 if group.mode == "priority" else None)
    return found


CELL = {"part": "bits", "models": ("gpt2",), "modes": ("eager",)}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        # placements and second run in the order of the tree, placements and DDP in DDP's order, the orders, the flipped bit
        ("", [True] * 6),
        ("pliant_4_0_tree", [False, True, True, True, True, True]),
        ("pliant_2_1_tree", [True, False, True, True, True, True]),
        ("pliant_2_0_ddp", [True, True, False, True, True, True]),
        ("ddp_4_0_ddp", [True, True, True, False, True, True]),
        ("missing", [False, False, False, False, False]),
    ],
)
def test_all_placements_runs_and_ddp_are_to_be_equal(wrong: str, expected: list[bool]) -> None:
    groups = gpu_bits.groups_of(GpuOptions(**CELL), ("tree", "ddp"))  # type: ignore[arg-type]
    part = Part()
    gpu_bits.judge_bits(part, groups, outcomes_of(groups, wrong), 4)
    by_order = sorted(part.verdicts, key=lambda verdict: "control" in verdict[1])
    tree = [ok for ok, text in by_order if "order tree" in text]
    ddp = [ok for ok, text in by_order if "order ddp" in text]
    assert [*tree, *ddp, *[ok for ok, text in by_order if "control" in text]] == expected
    json.dumps(part.cells)


def test_no_time_is_not_a_difference() -> None:
    groups = gpu_bits.groups_of(GpuOptions(**CELL), ("tree", "ddp"))  # type: ignore[arg-type]
    outcomes = outcomes_of(groups)
    late = Outcome(failure="no time was left", is_late=True)
    for group in groups:
        if group.tampered or (group.num_workers, group.number, group.order) == (4, 1, "tree"):
            outcomes[group] = late
    part = Part()
    gpu_bits.judge_bits(part, groups, outcomes, 4)
    verdicts = {text: ok for ok, text in part.verdicts}
    assert sorted(judged(part), key=str) == [None, None, True, True, True, True]
    said = "no time was left for ours on 4, run 2; equal: ours on 1, run 2, ours on 2, run 2"
    assert verdicts[f"gpt2 eager, order tree, a second run: {said}"] is None
    part = Part()
    gpu_bits.judge_bits(part, groups, dict.fromkeys(groups, late), 4)
    assert set(judged(part)) == {None}
    part = Part()
    failed = {group: Outcome(failure="rank 0: died") if group.number == 1 else late for group in groups}
    gpu_bits.judge_bits(part, groups, {**outcomes, **{g: failed[g] for g in groups if g.number == 1}}, 4)
    assert [ok for ok, text in part.verdicts if "a second run" in text] == [False]  # a failure is one, late or not


@pytest.mark.parametrize(
    ("said", "is_late", "expected"),
    [
        ("refused: rank 0: NotDeterministic: adaptive_avg_pool2d_backward has no deterministic kernel", False, True),
        ("", False, False),
        ("refused: 1 of 1 workers did not answer within 5 s", True, None),
    ],
)
def test_a_refusal_names_the_operator(said: str, is_late: bool, expected: bool | None) -> None:
    part = Part()
    gpu_bits.judge_refusal(part, said, is_late)
    assert judged(part) == [expected]
    model, inputs = gpu_bits.nondeterministic()
    model(inputs).sum().backward()


def test_a_control_that_does_not_differ_is_a_failure() -> None:
    groups = gpu_bits.groups_of(GpuOptions(**CELL), ("tree", "ddp"))  # type: ignore[arg-type]
    same = {group: Outcome([("a", ""), ("b", "")]) for group in groups}
    part = Part()
    gpu_bits.judge_bits(part, groups, same, 4)
    assert [ok for ok, text in part.verdicts if "control" in text] == [False, False]


def test_bits_have_cells_for_a_scaler_and_for_priorities() -> None:
    options = GpuOptions(part="bits")
    groups = gpu_bits.groups_of(options, ("tree", "ddp"))
    assert [(g.side, g.num_workers, g.order) for g in groups if g.mode == "fp16"] == [
        ("ddp", 4, "ddp"), ("pliant", 1, "ddp"), ("pliant", 2, "ddp"), ("pliant", 4, "ddp"),
    ]  # fmt: skip
    priority = [group for group in groups if group.mode == "priority"]
    assert [group.num_workers for group in priority if group.side == "pliant"] == [2, 4]
    assert gpu_bits.group_task(priority[1], options).join["sync"] == "priority"
    assert gpu_bits.group_task(next(g for g in groups if g.mode == "fp16"), options).scaler
    part = Part()
    outcomes = outcomes_of(priority)
    outcomes[priority[-1]].overlapped = 1
    gpu_bits.judge_bits(part, priority, outcomes, 4)
    assert [ok for ok, text in part.verdicts if "under way" in text] == [True, False]


@pytest.mark.parametrize("side", ["plain", "pliant"])
def test_a_scaler_and_a_flipped_bit_are_in_the_digests(side: str) -> None:
    options = GpuOptions(part="bits", device="cpu", tiny=True)
    threads = torch.get_num_threads()
    found = {}
    for mode, tamper in (("eager", 0), ("eager", 2), ("fp16", 0)):
        task = options.task("lstm", mode, side, seed=5, tamper=tamper)
        with training.opened(task.to_json(), 0) as (_, carry_out):
            found[mode, tamper] = carry_out({"do": "digests", "iterations": 2})["states"]
    torch.set_num_threads(threads)
    assert gpu_bits.first_difference(found["eager", 2], found["eager", 0]) == 2  # type: ignore[arg-type]
    assert gpu_bits.first_difference(found["fp16", 0], found["eager", 0]) == 1  # type: ignore[arg-type]


# Time and memory


def timings(*seconds: float) -> Timings:
    return Timings(rounds=[[second] for second in seconds], cpu_s=list(seconds))


def test_a_ratio_is_taken_round_by_round() -> None:
    plain, ours = timings(1.0, 2.0, 1.0), timings(1.1, 2.2, 1.1)  # the second round was disturbed for both
    found = gpu_timing.time_over(ours, plain)
    assert (found["median"], found["p90"]) == (pytest.approx(1.1), pytest.approx(1.1))
    assert gpu_timing.time_over(Timings(failure="died"), plain)["median"] is None


@pytest.mark.parametrize(("one", "several", "expected"), [(1.02, 4.12, [True, True]), (1.03, 4.13, [False, False])])
def test_a_step_has_its_limits(one: float, several: float, expected: list[bool]) -> None:
    results = {
        "plain": timings(1.0), "plain_free": timings(0.7), "pliant": timings(one), "plain_again": timings(1.01),
        "plain_x4": timings(4.0), "pliant_x4": timings(several),
    }  # fmt: skip
    part = Part()
    gpu_timing.judge_step(part, "gpt2", "eager", 4, results)
    assert judged(part) == expected
    json.dumps(part.cells)


def test_a_side_without_a_figure_says_why() -> None:
    part = Part()
    died, late = (
        Timings(failure="version01: rank 0: died"),
        Timings(failure="ddp: 4 of 4 workers did not answer within 5 s"),
    )
    gpu_timing.judge_packed(
        part, "gpt2", "eager", 4, {"pliant": timings(1.0), "ddp": late, "version01": died}, is_late=True
    )
    assert part.verdicts == [
        (None, "gpt2 eager on 4 processes: ours over ddp: no time was left"),
        (False, "gpt2 eager on 4 processes: ours over version01: version01: rank 0: died"),
    ]
    assert part.remarks == [late.failure, died.failure]
    assert part.cells[0]["sides"]["version01"]["failure"] == died.failure  # type: ignore[index]


def test_the_worker_of_version_01_needs_only_modules_that_it_has() -> None:
    """These files are imported there beside the old `pliant`; what they import must have been in it."""
    source = Path(gpu.__file__).parents[1]
    files = ["worker.py", "zoo.py", "profiles.py", "scaling_model.py", "lab/namespaces.py", "bench/version01.py"]
    bodies = [node for name in files for node in ast.parse((source / name).read_text()).body]
    needed = {node.module for node in bodies if isinstance(node, ast.ImportFrom) and node.module is not None}
    ours = {name for name in needed if name.split(".")[0] == "pliant"}
    assert ours <= {"pliant.errors", "pliant.child", "pliant.torchvision_import"}
    theirs = {name for name in needed if name.startswith("pliant_repro")}
    assert theirs <= {f"pliant_repro.{name[:-3].replace('/', '.')}" for name in files}


def test_memory_may_grow_with_the_logarithm_of_the_replicas() -> None:
    assert [gpu_memory.memory_limit(1000, 10, count) for count in (1, 2, 3, 4, 16)] == [1000, 1010, 1020, 1020, 1040]
    mega = 1 << 20
    bare = {
        ("plain", count): {"peak_bytes": 1000 * mega, "gradient_bytes": 100 * mega}
        for count in gpu_memory.REPLICA_COUNTS
    }
    ours = {("pliant", count): {"peak_bytes": (1000 + 100 * sets) * mega} for count, sets in ((1, 0), (2, 1), (4, 3))}
    part = Part()
    gpu_memory.judge_memory(part, "gpt2", "eager", {**bare, **ours})
    assert judged(part) == [True, True, False, False, False]  # one set too many, and two that were not measured


def test_a_pool_lends_what_it_has_in_the_order_of_requests() -> None:
    pool = DevicePool(most_bytes=100.0, most_processes=4)
    with pool.lend(30.0, 3, 0.0) as first:
        assert first
        with pool.lend(20.0, 1, 0.01) as too_much, pool.lend(5.0, 2, 0.01) as too_many, pool.lend(5.0, 1, 0.01) as fits:
            assert (too_much, too_many, fits) == (False, False, True)
    served: list[str] = []
    with ThreadPoolExecutor(2) as threads, pool.lend(10.0, 4, 0.0):

        def ask(name: str, count: int) -> None:
            with pool.lend(1.0, count, 10.0) as got:
                assert got
                served.append(name)

        threads.submit(ask, "large", 4)
        while not pool._waiting:
            pass
        threads.submit(ask, "small", 1)
    assert served == ["large", "small"]
    with pool.lend(1000.0, 9, 0.0) as got:
        assert got, "what needs more than there is gets all of it, and may fail by itself"


def test_a_plan_shares_out_the_time_and_gives_on_what_is_left() -> None:
    phases = gpu.phases_of(("changes", "step", "bits"))
    assert [phase.parts for phase in phases] == [("step",), ("bits", "changes")]
    assert gpu.limit_of(phases, 880.0) == pytest.approx(340.0)
    assert gpu.limit_of(gpu.phases_of(("live", "memory")), 360.0) == pytest.approx(300.0)
    assert gpu.limit_of(phases[1:], 600.0) == 600.0
    with pytest.raises(ConfigError, match="use some of step,packed,live,memory,bits,changes"):
        gpu.phases_of(("steps",))


def test_a_part_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(part: str) -> list[object]:
        return [each["ok"] for each in json.loads((tmp_path / f"gpu_{part}.json").read_text())["verdicts"]]

    def step(options: GpuOptions, progress: object, found: Part) -> None:
        found.judge(True, "the first cell")
        found.keep()
        assert read("step") == [True], "it is written before the next cell begins"
        raise KeyError("the second cell")

    def live(options: GpuOptions, progress: object, found: Part) -> None:
        found.judge(True, "a part after the failed one")

    monkeypatch.setattr(gpu, "_forks", lambda parts: contextlib.nullcontext(ColdStarts()))
    monkeypatch.setattr(gpu_timing, "run_step", step)
    monkeypatch.setattr(gpu_elastic, "run_live", live)
    options = GpuOptions(part="step", device="cpu")
    summary = gpu.run_all(options, ["step", "live"], tmp_path, {}, lambda what, fraction: None, save_json)
    assert (read("step"), read("live")) == ([True, False], [True])
    assert not summary["ok"]
    assert [verdict["text"] for verdict in summary["verdicts"]] == [  # type: ignore[attr-defined]
        "step: the first cell", "step: it failed: KeyError: 'the second cell'", "live: a part after the failed one",
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["step", "packed"])
def test_no_cell_begins_when_time_is_over(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "Clock", lambda limit_s, weights: Clock(0.0, weights))
    monkeypatch.setattr(gpu_timing, "started", None)  # nothing may be started
    found = Part()
    run = {"step": gpu_timing.run_step, "packed": gpu_timing.run_packed}[part]
    run(GpuOptions(part=part, device="cpu", tiny=True), lambda what, fraction: None, found)
    assert len(found.rows) == {"step": 4 * 6, "packed": 4 * 2}[part]
    assert set(judged(found)) == {None}
    assert any("it needs --old DIR" in text for _, text in found.verdicts) == (part == "packed")
    json.dumps(found.cells)


def test_contenders_that_take_turns_share_cores_if_there_are_enough() -> None:
    assert gpu_timing.cores_of_contenders(range(16)) == [12, 13, 14, 15]
    assert gpu_timing.cores_of_contenders(range(4)) == []


def test_contenders_with_other_settings_are_named() -> None:
    part = Part()
    strict = {"deterministic": "strict", "fill_uninitialized_memory": "False"}
    gpu_timing.judge_settings(part, "gpt2 eager", {"plain": strict, "pliant": dict(strict), "plain_free": {}})
    gpu_timing.judge_settings(
        part, "gpt2 eager", {"plain": strict, "pliant": {**strict, "fill_uninitialized_memory": "True"}}
    )
    gpu_timing.judge_settings(part, "gpt2 eager", {})
    assert judged(part) == [True, False, False]
    assert "pliant has fill_uninitialized_memory=True where plain has False" in part.verdicts[1][1]


def test_a_clock_shares_what_is_left() -> None:
    clock = Clock(90.0, weights_of([("gpt2", "eager"), ("gpt2", "compiled")]))
    begun_s = time.monotonic()
    first, second = clock.next_cell(), clock.next_cell()
    assert (first - begun_s, second - begun_s) == (pytest.approx(36.0, abs=1.0), pytest.approx(90.0, abs=1.0))
    assert not clock.is_over
    assert Clock(0.0).is_over


def test_wrong_options_are_named() -> None:
    for wrong in ({"part": "speed"}, {"part": "step", "models": ("vgg",)}, {"part": "step", "modes": ("jit",)}):
        with pytest.raises(ConfigError, match="use one of"):
            GpuOptions(**wrong)  # type: ignore[arg-type]


# Changes


@pytest.mark.parametrize("mode", MODES)
def test_a_changing_job_trains_what_the_fixed_one_trains(mode: str) -> None:
    options = GpuOptions(part="changes", tiny=True, device="cpu", order="tree")
    fixed = options.task("lstm", mode, replicas=options.replicas, seed=7)
    changing = training_task(gpu_elastic.elastic_options(options, "lstm", mode, Clock(60.0), seed=7), fixed.optimizer)
    assert replace(changing, num_workers=fixed.num_workers, lead=fixed.lead) == fixed
    assert (fixed.scaler, fixed.join.get("sync")) == (mode == "fp16", "priority" if mode == "priority" else None)


def test_digests_of_a_changing_job_are_compared_by_step() -> None:
    def begin(step: int, digest: str, rank: int = 0, buffers: str = "") -> StepBegun:
        values = {"worker": "h:1", "size": 2, "own": 1, "at_s": 1.0, "ended_s": 0.9}
        return StepBegun(pid=1, rank=rank, step=step, digest=digest, buffers=buffers, **values)  # type: ignore[arg-type]

    expected = [("a", "p"), ("b", "q")]
    good = [begin(0, ""), begin(1, "a", buffers="p"), begin(2, "b", rank=1, buffers="other")]
    assert gpu_elastic.compare_digests(good, expected) == (2, [])
    bad = [begin(1, "b", buffers="p"), begin(2, "b", buffers="p")]
    assert [each.text for each in gpu_elastic.compare_digests(bad, expected)[1]] == [
        "state after step 1 on rank 0 of 2",
        "buffers after step 2 on rank 0 of 2",
    ]
    taken_back = [begin(1, "a", buffers="p"), begin(2, "a", buffers="p"), begin(1, ""), begin(2, "b", buffers="q")]
    assert gpu_elastic.compare_digests(taken_back, expected) == (2, [])
    assert gpu_elastic.compare_digests(taken_back[:2], expected)[1], "it was not taken back"


@pytest.mark.parametrize(
    ("control", "expected"), [([("a", ""), ("x", "")], [True, True]), ([("a", ""), ("b", "")], [True, False])]
)
def test_changes_have_a_control_that_must_differ(control: list[tuple[str, str]], expected: list[bool]) -> None:
    values = {"worker": "h:1", "rank": 0, "size": 2, "own": 1, "at_s": 1.0, "ended_s": 0.9, "pid": 1}
    reports = [StepBegun(step=step, digest=digest, **values) for step, digest in ((1, "a"), (2, "b"))]  # type: ignore[arg-type]
    part = Part()
    compared = gpu_elastic.Compared(reports, [("a", ""), ("b", "")], control)
    gpu_elastic.judge_changes(part, "lstm", "eager", compared)
    assert judged(part) == expected


# Profiles


def span(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_a_trace_says_what_the_device_waited_for() -> None:
    events = [
        span("gemm", "kernel", 0, 10, tid=7), span("copy", "gpu_memcpy", 5, 10, tid=8), span("gemm", "kernel", 45, 5, tid=7),
        span("step", "python_function", 0, 100), span("/x/pliant/train/gradients.py(3): hook", "python_function", 10, 40),
        span("aten::mul", "cpu_op", 20, 10), span("pliant/train/step.py(9): turn", "python_function", 60, 5),
        span("pliant/comm/reactor.py(538): _poll", "python_function", 0, 99, tid=2), span("/x/pliant_repro/zoo.py(1): loss", "python_function", 70, 5), {"ph": "i", "name": "mark", "ts": 1},
    ]  # fmt: skip
    found = trace_summary.summarise(events, 2)
    assert found["device_busy_s"] == pytest.approx(10e-6)  # 15 and 5 us of two steps; the overlap counts once
    assert found["device_idle_s"] == found["long_gaps_s"] == pytest.approx(15e-6)
    assert (found["kernels"], found["long_gaps"]) == (1.5, 0.5)
    assert found["top_kernels"][0] == {"name": "gemm", "s": pytest.approx(7.5e-6), "count": 1.0}  # type: ignore[index]
    assert found["pliant_own_s"] == pytest.approx((30 + 5) / 2 * 1e-6)
    assert found["pliant_s"] == pytest.approx((40 + 5) / 2 * 1e-6)
    assert [each["name"] for each in found["top_pliant"]] == [  # type: ignore[attr-defined]
        "pliant/train/gradients.py(3): hook",
        "pliant/train/step.py(9): turn",
    ]


# The worker's side, and a part for real


def test_a_worker_tells_its_digests_memory_and_profile() -> None:
    options = GpuOptions(part="bits", device="cpu", tiny=True)
    threads = torch.get_num_threads()
    answers = {}
    for count in (1, 2):
        task = options.task("resnet50", "eager", replicas=count, seed=5)
        with training.opened(task.to_json(), 0) as (first, carry_out):
            assert first["device"] == {"name": "cpu", "torch": torch.__version__}
            assert {"fill_uninitialized_memory", "deterministic", "threads"} <= set(first["settings"])  # type: ignore[call-overload]
            answers[count] = carry_out({"do": "digests", "iterations": 2})
            cores = sorted(os.sched_getaffinity(0))
            assert carry_out({"do": "cores", "cores": cores})["cores"] == cores
            peak = carry_out({"do": "memory", "iterations": 1})
            profile = carry_out({"do": "profile", "iterations": 1})
    torch.set_num_threads(threads)
    states, others = (answers[count]["states"] for count in (1, 2))
    assert len(set(states) | set(others)) == 4  # type: ignore[arg-type]
    assert peak["peak_bytes"] > peak["gradient_bytes"] > 0  # type: ignore[operator]
    assert profile["light"]["top_host"]  # type: ignore[index]
    assert profile["python"]["pliant_own_s"] > 0  # type: ignore[index]


@pytest.mark.processes
def test_a_plan_runs_its_parts_and_leaves_their_results(tmp_path: Path) -> None:
    argv = [
        sys.executable, "-m", "pliant_repro", "bench", "gpu", "all", "--parts", "bits", "--device", "cpu", "--tiny",
        "--models", "lstm", "--modes", "eager", "--steps", "2", "--replicas", "1", "--order", "ddp", "--limit", "60",
        "--out", str(tmp_path), "--json", "-",
    ]  # fmt: skip
    done = forked.run(argv, cwd=tmp_path, timeout=100)
    summary = json.loads(done.stdout)
    bits = json.loads((tmp_path / "gpu_bits.json").read_text())
    assert bits["ok"], bits["verdicts"]
    assert summary["ok"]
    assert [(row[0], *row[2:]) for row in summary["table"]["rows"]] == [("bits", str(len(bits["verdicts"])), "0", "0")]
    assert "a bit flipped after step 2 shows from step 2 on" in bits["verdicts"][-1]["text"]
    assert bits["command"].startswith("pliant bench gpu all")
    assert bits["device"]["name"] == "cpu"
