"""The programs in benchmarks/system and benchmarks/scaling: the artifact's flags in, the artifact's lines out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import forked
import gang
import pytest
import torch
from pliant_repro.figures.observers import ResizeRequests

from pliant.cluster import View, Worker
from pliant.errors import ConfigError
from pliant.identity import WorkerSpec

ROOT = Path(__file__).resolve().parents[2]
SYSTEM, SCALING = ROOT / "benchmarks" / "system", ROOT / "benchmarks" / "scaling"
sys.path.insert(0, str(SYSTEM))

import img_sec  # noqa: E402 - beside the programs that use it

RUN = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", "-q"]
SMALL = ["--model=ResNet56", "--batch-size=2", "--image-size=8"]
FEW = ["--num-warmup-batches=1", "--num-batches-per-iter=1", "--num-iters=3"]
ONE = ["--num-warmup-batches=0", "--num-batches-per-iter=1", "--num-iters=2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lines_of(*words: object) -> list[str]:
    """What the workers of a run have printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    done = forked.run(words, cwd=Path.cwd(), env={**environ, "OMP_NUM_THREADS": "1"}, timeout=100)
    assert done.returncode == 0, done
    return [re.sub(r"^\[\S+::stdout\] ", "", line) for line in done.stdout.splitlines()]


def program(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def check(lines: Sequence[str], patterns: Sequence[str]) -> None:
    assert len(lines) >= len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def the_artifacts_lines(where: str) -> list[str]:
    return [
        r"Model: ResNet56", r"Batch size: 2", r"init took \d+\.\d{3}s", r"bcast_op took \d+\.\d{3}s", r"Running warmup\.\.\.",
        rf"Warmup Step #0: \d+\.\d img/sec per {where}, took \d+\.\d{{3}}s", r"Running benchmark\.\.\.",
        *(rf"Iter #{number}: \d+\.\d img/sec per {where}" for number in range(3)), rf"Img/sec per {where}: \d+\.\d \+-\d+\.\d",
    ]  # fmt: skip


def result_in(lines: Sequence[str]) -> tuple[float, float, str]:
    [line] = [line for line in lines if line.startswith("RESULT")]
    matched = re.fullmatch(r"RESULT: (\d+\.\d{6}) \+-(\d+\.\d{6}) (\{.*\})", line)
    assert matched is not None, line
    return float(matched[1]), float(matched[2]), matched[3]


# The lines


def test_lines_and_figures_are_the_artifacts() -> None:
    said: list[str] = []
    found = img_sec.measure(lambda: None, img_sec.Amount(2, 1, 2, 3), "/cpu:0", said.append)
    check(said, the_artifacts_lines("/cpu:0")[4:])
    assert found[0] > 0
    assert img_sec.summary([1.0, 3.0]) == (2.0, 1.96)
    line = img_sec.result_line(43.42902, 1.21232, {"framework": "pliant", "np": 32, "fuse": False})
    assert line == 'RESULT: 43.429020 +-1.212320 {"framework":"pliant","np":32,"fuse":false}'


def test_each_step_is_done_once() -> None:
    steps: list[int] = []
    amount = img_sec.Amount(4, 2, 3, 5)
    img_sec.measure(lambda: steps.append(1), amount, "", lambda text: None)
    assert len(steps) == amount.steps == 17


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_amounts_that_cannot_be_are_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="use"):
        img_sec.Amount(*values)


def test_flags_about_tensorflow_are_taken_and_named() -> None:
    said: list[str] = []
    args = img_sec.parser("x").parse_args(["--xla", "--batch-size", "3"])
    img_sec.say_unused(args, said.append)
    assert said == ["without effect here: --xla"]
    assert args.batch_size == 3
    images, labels = img_sec.batch_of(img_sec.parser("x").parse_args(SMALL), torch.device("cpu"), 1)
    assert images.shape == (2, 3, 8, 8)
    assert labels.shape == (2,)


# The programs


@pytest.mark.processes
def test_under_pliant_run_as_the_artifacts_command() -> None:
    lines = lines_of(
        *RUN, "--warm", "-np", 2, "-strategy", "MULTI_BINARY_TREE_STAR", sys.executable, SYSTEM / "benchmark_kungfu.py",
        "--kf-optimizer=sync-sgd", *SMALL, *FEW
    )  # fmt: skip
    check(lines, the_artifacts_lines("/cpu:0"))
    mean, interval, facts = result_in(lines)
    assert mean > 0 <= interval
    assert facts == (
        '{"framework":"pliant","np":2,"strategy":"MULTI_BINARY_TREE_STAR","bs":2,"model":"ResNet56",'
        '"kf-opt":"sync-sgd","fuse":false,"image-size":8}'
    )


def run_ddp(rank: int, port: int) -> list[str]:
    """A rank as torchrun starts it; what it prints."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    sys.argv = ["benchmark_ddp.py", *SMALL, *FEW]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        program(SYSTEM / "benchmark_ddp.py").main()
    return said.getvalue().splitlines()


@pytest.mark.processes
def test_the_baseline_says_the_same_of_stock_ddp() -> None:
    lines, silent = gang.run(run_ddp, 2, gang.free_port("127.0.0.1"))
    check(lines, [*the_artifacts_lines("CPU"), r"Total img/sec on 2 CPU\(s\): \d+\.\d \+-\d+\.\d"])
    facts = json.loads(result_in(lines)[2])
    assert (facts["framework"], facts["backend"], facts["np"], facts["model"]) == ("ddp", "gloo", 2, "ResNet56")
    assert silent == []


@pytest.mark.parametrize("optimizer", ["sync-sgd", "sma", "ada-sgd", "ideal", "async-sgd"])
def test_each_optimizer_trains_alone(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: with several workers the optimizers have tests of their own."""
    module = program(SYSTEM / "benchmark_kungfu.py")
    monkeypatch.setattr(sys, "argv", ["benchmark", f"--kf-optimizer={optimizer}", "--fuse", *SMALL, *ONE])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(result_in(lines)[2])["kf-opt"] == {"async-sgd": "pair-avg"}.get(optimizer, optimizer)


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["--kf-optimizer=adam"], "sync-sgd, sync-sgd-priority"), (["--model=ResNet51"], "ResNet50"), (["--num-iters=0"], "--num-iters"),
     (["--kf-optimizer=sync-sgd-nccl"], "pliant run")],
)  # fmt: skip
def test_wrong_flags_are_named_with_those_there_are(
    flags: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program(SYSTEM / "benchmark_kungfu.py")
    monkeypatch.setattr(sys, "argv", ["benchmark", *SMALL, *flags])
    with pytest.raises(ConfigError, match=why):
        module.main()


def test_without_horovod_the_way_to_it_and_the_other_baseline_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program(SYSTEM / "benchmark_horovod.py")
    monkeypatch.setattr(sys, "argv", ["benchmark", *SMALL])
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match=r"pip install horovod.*benchmark_ddp\.py"):
        module.main()


def test_who_is_who_under_each_launcher() -> None:
    place = program(SYSTEM / "benchmark_ddp.py").find_place
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }
    found = place(torchrun)
    assert (found.rank, found.size, found.num_local, found.local_rank, found.host, found.port) == (1, 4, 2, 1, "h", 5)
    mpi = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_SIZE", "2"), ("LOCAL_RANK", "1"))
    }
    found = place({**mpi, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"})
    assert (found.rank, found.size, found.host, found.port) == (1, 2, "10.0.0.1", 77)
    workers = tuple(Worker(host, 10000) for host in ("10.0.0.1", "10.0.0.2"))
    runners = tuple(Worker(worker.host, 38080) for worker in workers)
    spec = WorkerSpec(worker=workers[1], view=View(0, workers, runners), secret=b"x" * 16)
    found = place(spec.to_environ())
    assert (found.rank, found.size, found.num_local, found.host, found.own_host) == (1, 2, 1, "10.0.0.1", "10.0.0.2")
    assert place({}).size == 1


@pytest.mark.processes
def test_the_scaling_benchmark_says_how_long_each_resize_took() -> None:
    """Through a config server's artifact URL, as in the artifact's commands."""
    from pliant.elastic.server import ConfigServer, ServerConfig

    with ConfigServer(ServerConfig(host="127.0.0.1", port=0, open=True)).running() as server:
        url = server.url.replace("/config", "/get")
        lines = lines_of(
            *RUN, "-w", "-config-server", url, "-np", 1, "-H", "127.0.0.1:2", sys.executable,
            SCALING / "benchmark_kungfu_scaling.py", "--tf-method", "estimator", "--elastic", "--resize-schedule",
            "2:2,3:1,4:0", "--train-steps", 4, "--epoch-size", 10000, *SMALL
        )  # fmt: skip
    assert lines[0] == "without effect here: --tf-method estimator"
    for change in ("1 -> 2", "2 -> 1"):
        assert [line for line in lines if re.fullmatch(rf"resize {change} took [\d.]+ms", line)], lines


def test_the_next_change_waits_for_the_last_one() -> None:
    schedule, said = ResizeRequests([(10, 4), (20, 1), (30, 0)]), []
    seen = [(steps, schedule.due(steps, 4 if steps > 24 else 1, said.append)) for steps in range(1, 26)]
    assert [(steps, size) for steps, size in seen if size is not None] == [(10, 4), (25, 1)]
    [line] = said
    assert re.fullmatch(r"request to first step with 4 workers: \d+\.\d{3}s", line)
    assert schedule.due(26, 4, said.append) is None
    assert schedule.due(31, 1, said.append) == 0
    assert schedule.due(32, 1, said.append) is None
