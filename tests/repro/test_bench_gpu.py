"""`pliant bench gpu`: its networks, its arithmetic and verdicts, and one part for real at a tiny size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from pliant_repro.bench import gpu, gpu_elastic, trace_summary, training
from pliant_repro.bench.elastic import StepBegun
from pliant_repro.bench.gpu import Clock, GpuOptions, Group, Part
from pliant_repro.bench.training_probes import digest_state, digest_tensors
from pliant_repro.contest import Timings
from pliant_repro.zoo import NETWORKS, ReadyBatches, build, compute_loss, make_optimizer, network

from pliant.errors import ConfigError

# Networks


@pytest.mark.parametrize(("name", "num_parameters"), [("gpt2", 124_475_904), ("vit", 22_049_896), ("lstm", 28_401_100)])
def test_networks_have_their_published_sizes(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = NETWORKS[name].make()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", ["gpt2-tiny", "vit-tiny", "lstm-tiny", "resnet50-tiny"])
def test_tiny_networks_train(name: str) -> None:
    chosen = network(name)
    model = build(name).eval()  # without dropout
    optimizer = make_optimizer(chosen.optimizer, model)
    batch = ReadyBatches(chosen.kind, chosen.size, 100, classes=chosen.classes).__getitems__([0, 1])
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = compute_loss(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_gpt2_does_not_see_later_words() -> None:
    model = build("gpt2-tiny").eval()
    words = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(0))
    other = words.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 128
    with torch.no_grad():
        before, after = model(words), model(other)
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


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
    assert gpu.first_difference(["a", "b"], ["a", "b"]) is None
    assert gpu.first_difference(["a", "x"], ["a", "b"]) == 2
    assert gpu.first_difference(["a"], ["a", "b"]) == 2
    said = gpu.merge_ranks([{"states": ["a", "b"], "buffers": ["", ""]}, {"states": ["a", "x"], "buffers": ["", ""]}])
    assert said == ([("a", ""), ("b", "")], "rank 1 differs from rank 0 after step 2")


def judged(part: Part) -> list[bool]:
    return [ok for ok, _ in part.verdicts]


@pytest.mark.parametrize(
    ("wrong", "order", "expected"),
    [
        ("", "ddp", [True, True, True]),
        ("pliant_4_0", "ddp", [False, True, True]),
        ("pliant_2_1", "ddp", [True, False, True]),
        ("ddp_4_0", "", [True, True, False]),
        ("ddp_4_0", "tree", [True, True]),
        ("missing", "ddp", [False, False, False]),
    ],
)
def test_all_placements_runs_and_ddp_are_to_be_equal(wrong: str, order: str, expected: list[bool]) -> None:
    groups = [Group("gpt2", "eager", "ddp", 4)]
    groups += [Group("gpt2", "eager", "pliant", count, number) for number in (0, 1) for count in (1, 2, 4)]
    digests = {
        group: [("a", ""), ("x" if wrong and group.name.endswith(wrong) else "b", "")]
        for group in groups
        if wrong != "missing"
    }
    part = Part()
    gpu.judge_bits(part, groups, digests, order)
    assert judged(part) == expected


# Time and memory


def timings(*seconds: float) -> Timings:
    return Timings(rounds=[[second] for second in seconds], cpu_s=list(seconds))


def test_a_ratio_is_taken_round_by_round() -> None:
    plain, ours = timings(1.0, 2.0, 1.0), timings(1.1, 2.2, 1.1)  # the second round was disturbed for both
    found = gpu.time_over(ours, plain)
    assert (found["median"], found["p90"]) == (pytest.approx(1.1), pytest.approx(1.1))
    assert gpu.time_over(Timings(failure="died"), plain)["median"] is None


@pytest.mark.parametrize(("one", "several", "expected"), [(1.02, 4.12, [True, True]), (1.03, 4.13, [False, False])])
def test_a_step_has_its_limits(one: float, several: float, expected: list[bool]) -> None:
    results = {
        "plain": timings(1.0), "plain_free": timings(0.7), "pliant": timings(one),
        "plain_x4": timings(4.0), "pliant_x4": timings(several),
    }  # fmt: skip
    part = Part()
    gpu.judge_step(part, "gpt2", "eager", 4, results)
    assert judged(part) == expected
    json.dumps(part.cells)


def test_memory_may_grow_with_the_logarithm_of_the_replicas() -> None:
    assert [gpu.memory_limit(1000, 10, count) for count in (1, 2, 3, 4, 16)] == [1000, 1010, 1020, 1020, 1040]
    mega = 1 << 20
    bare = {("plain", count): {"peak_bytes": 1000 * mega, "gradient_bytes": 100 * mega} for count in gpu.REPLICA_COUNTS}
    ours = {("pliant", count): {"peak_bytes": (1000 + 100 * sets) * mega} for count, sets in ((1, 0), (2, 1), (4, 3))}
    part = Part()
    gpu.judge_memory(part, "gpt2", "eager", {**bare, **ours})
    assert judged(part) == [True, True, False, False, False]  # one set too many, and two that were not measured


def test_batches_fit_into_the_device() -> None:
    assert gpu.in_batches("abcd", [30e9] * 4, [2, 2, 1, 4], 120e9) == [["a", "b"], ["c"], ["d"]]
    assert gpu.in_batches("ab", [0.0, 0.0], [15, 10]) == [["a"], ["b"]]


def test_a_clock_shares_what_is_left() -> None:
    clock = Clock(100.0, 2)
    first, second = clock.next_cell(), clock.next_cell()
    assert second - first == pytest.approx(50.0, abs=1.0)


def test_wrong_options_are_named() -> None:
    for wrong in ({"part": "speed"}, {"part": "step", "models": ("vgg",)}, {"part": "step", "modes": ("jit",)}):
        with pytest.raises(ConfigError, match="use one of"):
            GpuOptions(**wrong)  # type: ignore[arg-type]


# Changes


def test_digests_of_a_changing_job_are_compared_by_step() -> None:
    def begin(step: int, digest: str, rank: int = 0, buffers: str = "") -> StepBegun:
        values = {"worker": "h:1", "size": 2, "own": 1, "at_s": 1.0, "ended_s": 0.9}
        return StepBegun(pid=1, rank=rank, step=step, digest=digest, buffers=buffers, **values)  # type: ignore[arg-type]

    expected = [("a", "p"), ("b", "q")]
    good = [begin(0, ""), begin(1, "a", buffers="p"), begin(2, "b", rank=1, buffers="other")]
    assert gpu_elastic.compare_digests(good, expected) == (2, [])
    bad = [begin(1, "b", buffers="p"), begin(2, "b", buffers="p")]
    assert gpu_elastic.compare_digests(bad, expected)[1] == [
        "state after step 1 on rank 0 of 2",
        "buffers after step 2 on rank 0 of 2",
    ]


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
            answers[count] = carry_out({"do": "digests", "iterations": 2})
            peak = carry_out({"do": "memory", "iterations": 1})
            profile = carry_out({"do": "profile", "iterations": 1})
    torch.set_num_threads(threads)
    states, others = (answers[count]["states"] for count in (1, 2))
    assert len(set(states) | set(others)) == 4  # type: ignore[arg-type]
    assert peak["peak_bytes"] > peak["gradient_bytes"] > 0  # type: ignore[operator]
    assert profile["light"]["top_host"]  # type: ignore[index]
    assert profile["python"]["pliant_own_s"] > 0  # type: ignore[index]


@pytest.mark.processes
def test_a_part_runs_from_a_folder_on_the_path() -> None:
    argv = [
        sys.executable,
        "-m",
        "pliant_repro",
        "bench",
        "gpu",
        "bits",
        "--device",
        "cpu",
        "--tiny",
        "--models",
        "lstm",
    ]
    argv += ["--modes", "eager", "--steps", "2", "--replicas", "1", "--json", "-"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [verdict["ok"] for verdict in result["verdicts"]] == [True] * 3
    assert result["command"].startswith("pliant bench gpu bits")
    assert result["device"]["name"] == "cpu"
