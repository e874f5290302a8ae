"""`pliant bench allreduce`: its arithmetic, its contest, and one real one at small size."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from command import command
from gang import FULL
from pliant_repro import contest
from pliant_repro.bench import allreduce, orders
from pliant_repro.bench.allreduce import (
    AllreduceOptions,
    check_gpus,
    choose_contenders,
    contribution,
    make_contender,
    parse_lab,
    parse_peers,
    pattern,
)
from pliant_repro.contest import (
    Contender,
    Placement,
    Rules,
    Starter,
    Summary,
    Timings,
    hold,
    last_words,
    paired_ratios,
    quantile,
)
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import missing_for_lab
from pliant_repro.profiles import MODELS, LayerShape, tensor_sizes
from pliant_repro.scaling_model import transfer_s

from pliant.errors import ConfigError, LaunchError

# Models


@pytest.mark.parametrize(
    ("model", "num_tensors", "num_parameters"),
    [("resnet50", 161, 25_557_032), ("vgg16", 32, 138_357_544), ("bert", 199, 109_482_240), ("slp", 2, 7850)],
)
def test_models_have_their_published_sizes(model: str, num_tensors: int, num_parameters: int) -> None:
    sizes = tensor_sizes(model)
    assert (len(sizes), sum(sizes)) == (num_tensors, num_parameters)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(MODELS)):
        tensor_sizes("resnet51")


# Statistics and the one form


def test_quantiles_interpolate() -> None:
    samples = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [quantile(samples, q) for q in (0.0, 0.5, 0.875, 1.0)] == [1.0, 3.0, 4.5, 5.0]
    assert quantile([7.0], 0.9) == 7.0
    summary = Summary.of(samples)
    assert (summary.median, summary.iqr, summary.num_samples) == (3.0, 2.0, 5)
    assert summary.p10 < summary.median < summary.p90


def test_ratios_are_taken_round_by_round() -> None:
    assert paired_ratios([[2.0], [40.0]], [[1.0], [20.0]]) == [2.0, 2.0]
    assert paired_ratios([[2.0], []], [[1.0], [20.0]]) == [2.0]


def timings(*rounds: list[float], failure: str = "", wrong: int | None = None) -> Timings:
    return Timings(rounds=list(rounds), cpu_s=[0.1 for _ in rounds], failure=failure, wrong=wrong)


def test_speedup_is_the_peers_time_over_ours() -> None:
    peer = contest.beside(timings([0.4], [0.4]), timings([0.1], [0.1]), 1000)
    assert peer["speedup"] == pytest.approx(4.0)
    assert peer["median_s"] == 0.4
    assert contest.bound("b", 0.05, timings([0.1]), {})["fraction"] == pytest.approx(0.5)


def test_a_failed_contender_has_no_numbers_and_a_remark() -> None:
    dead = timings([0.4], failure="gloo: died")
    ours = timings([0.1])
    assert contest.measured(dead, 10)["median_s"] is None
    assert contest.beside(dead, ours, 10)["speedup"] is None
    assert contest.beside(ours, dead, 10)["speedup"] is None
    assert contest.bound("b", 0.1, dead, {})["fraction"] is None
    assert contest.failures({"gloo": dead, "a": ours, "b": timings([1.0], wrong=3)}) == [
        "gloo: died",
        "b: 3 wrong elements",
    ]
    assert not contest.is_ok(dead)
    assert not contest.is_ok(timings([1.0], wrong=3))
    assert contest.is_ok(timings([1.0], wrong=0))
    assert contest.fastest(["x", "y", "z"], {"x": timings([3.0]), "y": timings([2.0]), "z": dead}) == "y"


def test_the_machine_is_described_without_loading_torch() -> None:
    code = (
        "import sys, pliant_repro.bench.allreduce, pliant_repro.cli.bench; from pliant.machine import machine;"
        "m = machine(); assert m['cores'] and m['torch'] and m['cpu'], m; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_the_check_pattern_sums_exactly() -> None:
    ranks = range(16)
    total = sum((pattern(1, 100, contribution(rank)) for rank in ranks), np.zeros(100, np.float32))
    assert np.array_equal(total, pattern(1, 100, sum(contribution(rank) for rank in ranks)))
    assert not np.array_equal(pattern(0, 100, 1), pattern(1, 100, 1))


# Arguments


def test_lab_and_peers_are_read() -> None:
    lab = parse_lab("hosts=3,rate=100mbit")
    assert (lab.num_hosts, lab.nominal_rate) == (3, 100_000_000)
    assert parse_lab("rate=none").nominal_rate is None
    assert parse_peers("gloo, openmpi,gloo") == ("gloo", "openmpi")
    assert parse_peers("none") == parse_peers("") == ()
    assert (parse_peers(None), parse_peers(None, "cuda")) == (("gloo", "openmpi"), ("nccl", "host"))


def test_every_worker_needs_a_gpu_of_its_own() -> None:
    check_gpus(4, 4)
    with pytest.raises(ConfigError, match="-np 4 --device cuda: .* 2 are here; use -np 2"):
        check_gpus(4, 2)
    with pytest.raises(ConfigError, match="1 is here; run it on a machine with several GPUs"):
        check_gpus(2, 1)
    options = AllreduceOptions(model="slp", device="cuda", peers=("nccl", "host"))
    assert choose_contenders(options, []) == ["pliant", "pliant-fused", "copy", "nccl", "host"]


WRONG = """
allreduce --strategy SPIRAL
allreduce --peers gloo,horovod
allreduce -np 0
allreduce --repeat 0
allreduce --lab 4
allreduce --lab hosts=4,rate=fast
allreduce --lab hosts=4 -np 3
allreduce --device cuda --lab hosts=4
allreduce --device cuda --peers gloo
allreduce --device cuda -np 200
allreduce --json /nosuchfolder/result.json
train --model resnet19
train -np 0
train --steps 0
train --json /nosuchfolder/result.json
resize --to 4
resize --repeat 0
resize --model resnet19
recover -np 1
priority --model resnet51
priority --model vgg --compute real
priority --model my.module:build --compute paced
priority --model my-module:build
priority --compute both
priority --modes p3
priority --modes ,
priority --nodes 1
priority --rate 100
priority --slice 0
priority --slice big
priority --repeat 0
priority --iters 1
priority --hosts /nosuchfile
priority --json /nosuchfolder/result.json
priority --validate /nosuchfile
preemption --nodes 1
preemption --iters 0
preemption --rate fast
fed --pick 0
fed --what simulate --pick 101
fed --what simulate --rounds 0
"""
"""Words that are refused before anything is measured; tests/cli/test_mistakes.py has others, with their messages."""


@pytest.mark.parametrize("words", WRONG.strip().splitlines())
def test_wrong_arguments_are_config_errors(words: str) -> None:
    result = command("bench", *words.split())
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)


def test_a_wrong_argument_is_one_line_and_exit_2() -> None:
    code = "from pliant.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "bench", "allreduce", "-np", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "pliant: -np 0: use 1 to 256\n"


def test_a_model_beyond_the_memory_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "huge", lambda: iter([LayerShape("huge", (10**15,), 0)]))
    with pytest.raises(ConfigError, match="GB are free"):
        allreduce.check_memory(AllreduceOptions(model="huge"), ["pliant"])


def test_fusing_makes_one_tensor_and_leaves_nothing_to_compare_with_it() -> None:
    fused, split = (AllreduceOptions(model="slp", fuse=fuse, peers=("gloo",)) for fuse in (True, False))
    assert (fused.sizes, split.sizes) == ([7850], [7840, 10])
    assert choose_contenders(fused, []) == ["pliant", "copy", "gloo"]
    assert choose_contenders(split, []) == ["pliant", "pliant-fused", "copy", "gloo"]


def test_last_words_skip_rulers_and_source_lines() -> None:
    log = 'Traceback:\n  File "x.py", line 1\n    import y\n    ^^^^\nImportError: no y\n-----\n'
    assert last_words(log) == "import y | ImportError: no y"


# The contest, with small stand-ins for workers

STAND_IN = """
import json, socket, sys, time
control, rank, kind, notes = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
line = socket.socket(socket.AF_UNIX); line.connect(control)
def answer(**values): line.sendall(json.dumps(values).encode() + b"\\n")
if kind == "stillborn": sys.exit("no such device")
answer(rank=rank)
turn = 0
for text in line.makefile():
    command = json.loads(text)
    if command["do"] == "stop": break
    turn += 1
    if rank == 0: open(notes, "a").write(kind[0])
    if kind == "dies" and turn == 3 and rank == 1: sys.exit(1)
    if kind == "hangs" and turn == 3 and rank == 1: time.sleep(60)
    if kind == "errs" and turn == 3 and rank == 1: answer(error="ValueError: no"); continue
    n = command["iterations"]
    answer(wall_s=[0.1 * (rank + 1)] * n, cpu_s=[0.01] * n, wrong=rank, egress_bytes=turn * 300)
"""


def stand_in(kind: str, folder: Path, num_workers: int = 2) -> Contender:
    control = folder / f"{kind}.sock"

    def starter(rank: int) -> Starter:
        def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-c", STAND_IN, str(control), str(rank), kind, str(folder / "notes")]
            return subprocess.Popen(argv, stdout=output, stderr=output)

        return start

    return Contender(kind, num_workers, [starter(rank) for rank in range(num_workers)], control)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: those of Unix sockets may not be long."""
    with tempfile.TemporaryDirectory(prefix="pliant-test-") as name:
        yield Path(name)


def compete(*jobs: Contender, rules: Rules) -> dict[str, Timings]:
    for job in jobs:
        job.start()
    for job in jobs:
        with contextlib.suppress(LaunchError):  # kept, and given at its first turn
            job.ready(20.0)
    try:
        return hold(jobs, rules, checked=["a"])
    finally:
        for job in jobs:
            job.close()


def test_contenders_take_turns_and_the_slowest_rank_counts(folder: Path) -> None:
    rules = Rules(rounds=3, iterations=2, warmup=1)
    results = compete(stand_in("a", folder), stand_in("b", folder), rules=rules)
    assert (folder / "notes").read_text() == "aab" + "ab" * 3  # a's check and both warm-ups first
    assert results["a"].rounds == [[0.2, 0.2]] * 3
    assert results["a"].cpu_s == [0.02] * 6
    assert (results["a"].wrong, results["b"].wrong) == (1, None)
    assert results["a"].egress_bytes[0] == 2 * 3 * 300 / 2
    assert not results["a"].failure


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dies", "rank 1 ended early"),
        ("hangs", "1 of 2 workers did not answer within 1 s"),
        ("errs", "rank 1: ValueError: no"),
    ],
)
def test_a_contender_that_fails_is_out_and_the_others_go_on(kind: str, reason: str, folder: Path) -> None:
    bad, good = stand_in(kind, folder), stand_in("good", folder)
    results = compete(
        bad, good, rules=Rules(rounds=4, iterations=1, warmup=1, timeout_s=1.0 if kind == "hangs" else 20.0)
    )
    assert results[kind].failure == f"{kind}: {reason}"
    assert len(results["good"].rounds) == 4
    assert not results["good"].failure


def test_a_contender_that_cannot_start_says_why(folder: Path) -> None:
    results = compete(stand_in("stillborn", folder), stand_in("good", folder), rules=Rules(rounds=1))
    assert "it said: no such device" in results["stillborn"].failure
    assert len(results["good"].rounds) == 1


def test_a_failure_of_ours_is_not_ok_but_still_a_result() -> None:
    options = AllreduceOptions(model="slp", peers=("gloo", "openmpi"))
    results = {"pliant": timings(failure="pliant: died"), "gloo": timings([0.2]), "copy": timings([0.1])}
    results |= {"openmpi": timings([0.4]), "openmpi-yield": timings([0.3])}
    result = allreduce.make_result(options, {"np": 4}, results, [], ["why"])
    assert result["ok"] is False
    assert {name: peer["median_s"] for name, peer in result["peers"].items()} == {"gloo": 0.2, "openmpi": 0.3}  # type: ignore[attr-defined]
    json.dumps(result)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_worker_ends_with_its_controller_whatever_it_is_doing(accepted: bool, folder: Path) -> None:
    code = (
        "import socket, sys, time; from pliant_repro.worker import ControlLine; line = socket.socket(socket.AF_UNIX);"
        "line.connect(sys.argv[1]); told = ControlLine(line.makefile('rb'), line.makefile('wb'));"
        "print('ready', flush=True); time.sleep(60)"
    )
    with socket.socket(socket.AF_UNIX) as controller:
        controller.bind(str(folder / "control"))
        controller.listen()
        argv = [sys.executable, "-c", code, str(folder / "control")]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
            if accepted:
                controller.accept()[0].close()
            controller.close()
            assert worker.wait(20) == 3


# The real ones

MISSING = [*missing_for_lab(), *filter(None, [iperf.why_no_iperf()])]


@pytest.mark.processes
def test_a_real_contest_at_small_size(folder: Path) -> None:
    options, placement = AllreduceOptions(num_workers=2, model="slp"), Placement(num_workers=2, folder=folder)
    sides = ["pliant", "pliant-fused", "copy", "group"]
    if MISSING:  # else gloo has its contest below, between hosts
        sides.append("gloo")
    if not contest.why_no_openmpi():
        sides.append("openmpi-yield")
    with contextlib.ExitStack() as cleanup:
        jobs = [cleanup.enter_context(make_contender(options, placement, side)) for side in sides]
        contest.start_all(jobs, 60.0, lambda what, fraction: None)
        checked = [side for side in sides if side != "copy"]
        results = hold(jobs, Rules(rounds=3, iterations=2, warmup=1, timeout_s=30.0), checked=checked)
    for label, measured in results.items():
        assert measured.failure == ""
        assert [len(each) for each in measured.rounds] == [2, 2, 2]
        assert min(measured.seconds) > 0
        assert measured.wrong == (None if label == "copy" else 0)
    assert results["group"].egress_bytes[0] == 4 * (2 * 7840 + 10 + 16)  # a ring's bytes; small sums are padded


def test_openmpi_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    remarks: list[str] = []
    for lab in (None, parse_lab("hosts=2,rate=none")):
        assert choose_contenders(AllreduceOptions(lab=lab), remarks)[-1] == "gloo"
    assert "openmpi-bin" in remarks[0]
    assert "launcher" in remarks[1]


@pytest.mark.skipif(not FULL, reason="tens of seconds beside what smaller tests show: PLIANT_FULL=1")
@pytest.mark.root
@pytest.mark.processes
@pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "a lab is possible")
def test_gloo_between_hosts_and_iperf_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "1 MB", lambda: iter([LayerShape("all", (250_000,), 0)]))
    with parse_lab("hosts=2,rate=200mbit").up() as lab:
        options = AllreduceOptions(num_workers=2, model="1 MB", lab=lab)
        with make_contender(options, Placement(num_workers=2, folder=folder, lab=lab), "gloo").start() as job:
            job.ready(60.0)  # before the links are measured: its imports take all of a small machine
            bits_per_s = iperf.measure(lab, [(0, 1), (1, 0)], seconds=1)
            tx = lambda: sum(lab.tx_bytes(host) for host in range(2))  # noqa: E731
            rules = Rules(rounds=2, iterations=2, timeout_s=30.0)
            results = hold([job], rules, checked=["gloo"], count_link_bytes=tx)
    assert all(0.8 < rate / 200e6 < 1.05 for rate in bits_per_s)
    assert results["gloo"].failure == ""
    assert results["gloo"].wrong == 0
    # 2(N-1)/N*S = 1 MB per host, and two hosts; headers and barriers come on top.
    assert all(2e6 < sent < 2.6e6 for sent in results["gloo"].link_bytes)
    assert quantile(results["gloo"].seconds, 0.5) > 0.5 * transfer_s(1_000_000, 2, min(bits_per_s) / 8)


# Orders


def test_the_tree_sends_the_least_where_blocks_are_subtrees() -> None:
    length = 3_000_000
    least = orders.least_bytes(4, 4 * length)
    assert orders.planned_bytes("tree", 16, 4, length) == least == orders.planned_bytes("ddp", 4, 4, length)
    assert 2.3 < orders.planned_bytes("ddp", 16, 4, length) / least < 2.5
    assert 1.5 < orders.planned_bytes("tree", 16, 3, length) / orders.least_bytes(3, 4 * length) < 2


def test_orders_are_compared_by_what_the_ranks_counted() -> None:
    options = orders.OrdersOptions(num_workers=2, replicas=4, steps=2, model="small")
    cells = []
    for order, sent, peak in (("ddp", 500, 1800), ("tree", 200, 1300)):
        before, after = {"wire_bytes": 7, "shared_bytes": 0}, {"wire_bytes": 7 + sent, "shared_bytes": 400}
        answers = [{"before": before, "after": after}] * 2
        traffic = orders.make_cell(options, order, 100, answers, same_on_all=True)
        cells.append(traffic | orders.memory_of(100, orders.peak_of([{"peak_bytes": 900}, {"peak_bytes": peak}]), 1000))
    found = orders.result(options, {}, cells)
    assert (found["ok"], found["bound"]) == (True, {"name": "least traffic", "bytes": 200, "ratio": 1.0})
    assert found["ours"]["sets_of_gradients"] == 4
    assert (found["peers"]["ddp"]["traffic_ratio"], found["peers"]["ddp"]["memory_ratio"]) == (2.5, 2.25)
    cells[1] = {**cells[1], "wire_bytes": 220.0, "same_on_all_workers": False}
    refused = orders.result(options, {}, cells)
    assert not refused["ok"]
    assert len(refused["remarks"]) == 2
