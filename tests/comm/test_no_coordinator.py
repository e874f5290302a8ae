"""Ranks need no coordinator: any order, any thread, odd names, large tensors, and a config server that dies meanwhile."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gang import FULL, addresses, job, joined, say, specs

from pliant.identity import WorkerSpec

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server", "no_leaks")]

ROUNDS = 100 if FULL else 10
NAMES = [f"слой {i}/重み/ñ {'🙂' * (i % 3)}" for i in range(200)]


def in_any_order(rank: int, spec: WorkerSpec, rounds: int) -> int:
    """Reduce all names from four threads, in each round in an order that no other rank has."""
    lengths = [index * 37 % 5000 for index in range(len(NAMES))]
    with joined(spec) as engine, ThreadPoolExecutor(4) as threads:
        for round_number in range(rounds):
            mine = list(range(len(NAMES)))
            random.Random(1000 * round_number + rank).shuffle(mine)
            tensors = [torch.full((length,), float(i + rank + round_number)) for i, length in enumerate(lengths)]

            def submit(quarter: int, mine: list[int] = mine, tensors: list[torch.Tensor] = tensors) -> None:
                for handle in [engine.all_reduce(NAMES[index], tensors[index]) for index in mine[quarter::4]]:
                    handle.wait(30)

            list(threads.map(submit, range(4)))
            for index, tensor in enumerate(tensors):
                assert bool((tensor == 4 * (index + round_number) + 6).all()), f"round {round_number}, {NAMES[index]}"
            say(round_number)
    return rounds


@pytest.mark.timeout(600)
def test_any_order_from_any_thread_while_the_config_server_dies(tmp_path: Path) -> None:
    with config_server(tmp_path) as (server, url):
        members = specs(addresses("AABB"), config_server=url)
        with job(in_any_order, members, ROUNDS) as started:
            for round_number in range(ROUNDS):
                assert started.results(60) == [round_number] * 4
                if round_number == ROUNDS // 2:
                    server.kill()
                    assert server.wait(10) == -signal.SIGKILL
            assert started.results() == [ROUNDS] * 4


@contextmanager
def config_server(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `pliant config-server` with a view as a process."""
    view = directory / "view.json"
    view.write_text(json.dumps(specs(addresses("AABB"))[0].view.to_json()))
    program = [sys.executable, "-c", "from pliant.cli.main import main; main()", "config-server"]
    flags = ["-host", "127.0.0.1", "-port", "0", "-init", str(view), "--open"]
    with subprocess.Popen(
        [*program, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=directory
    ) as server:
        try:
            assert server.stdout is not None, "made with a pipe"
            line = server.stdout.readline()
            assert line.startswith("config server at http://"), line
            yield server, line.split()[3].rstrip(",")
        finally:
            server.kill()


# --- big and odd ---


def big(rank: int, spec: WorkerSpec) -> tuple[bool, bool]:
    """Reduce 300 MiB and an empty tensor; return whether both results are right."""
    length = (300 << 20) // 4
    with joined(spec) as engine:
        pattern = torch.arange(length, dtype=torch.int32)
        tensor = pattern * (rank + 1)
        empty = torch.empty(0, 7)
        handles = [engine.all_reduce("big", tensor), engine.all_reduce("empty", empty)]
        results = [handle.wait(60) for handle in handles]
        assert results[1] is not None, "an all_reduce has a result"
        right = torch.equal(tensor, pattern.mul_(3))
        del tensor, pattern, handles
        return right, results[1].shape == (0, 7)


@pytest.mark.parametrize("hosts", ["AA", "AB"], ids=["shared-memory", "tcp"])
def test_300_mib_and_an_empty_tensor_are_reduced(hosts: str) -> None:
    with job(big, specs(addresses(hosts))) as started:
        assert started.results(100) == [(True, True)] * 2


def odd(rank: int, spec: WorkerSpec) -> None:
    """Reduce many names of all lengths and scripts, then empty tensors with every collective."""
    names = ["", " ", "\0", "a\nb", "ß" * 10_000, "🙂" * 3_000, "pliant", "../../etc", '"quoted"', "\ud800 alone"]
    names += [f"name {index}" for index in range(2000)]
    with joined(spec) as engine:
        random.Random(rank).shuffle(names)
        tensors = {name: torch.full((1 + len(name) % 7,), float(len(name))) for name in names}
        handles = [engine.all_reduce(name, tensor) for name, tensor in tensors.items()]
        for handle in handles:
            handle.wait(30)
        for name, tensor in tensors.items():
            assert bool((tensor == 3 * len(name)).all()), f"{name[:20]!r}"
        nothing = torch.empty(0)
        engine.all_reduce("nothing", np.empty(0, dtype=np.int32)).wait(10)
        engine.broadcast("nothing", nothing).wait(10)
        engine.reduce("nothing", nothing, root=1).wait(10)
        gathered = engine.all_gather("nothing", nothing).wait(10)
        assert gathered is not None, "an all_gather has a result on every rank"
        assert gathered.shape == (3, 0)
        engine.barrier("after")


@pytest.mark.parametrize("hosts", ["AAA", "AAB", "ABC"] if FULL else ["AAB"])
def test_two_thousand_odd_names_are_reduced(hosts: str) -> None:
    with job(odd, specs(addresses(hosts))) as started:
        assert started.results(60) == [None] * 3


def total(rank: int, spec: WorkerSpec) -> float:
    with joined(spec) as engine:
        tensor = torch.full((100_000,), float(rank))
        engine.all_reduce("g", tensor).wait(20)
        assert bool((tensor == tensor[0]).all()), "one sum for all elements"
        return tensor[0].item()


@pytest.mark.parametrize("hosts", [["::1", "127.0.0.1", "::1"], ["::1", "::1"], ["localhost", "127.0.0.2"]], ids=str)
def test_hosts_may_be_ipv6_addresses_or_names(hosts: Sequence[str]) -> None:
    if "::1" in hosts and not has_ipv6():
        pytest.skip("needs ::1: ip -6 address add ::1/128 dev lo")
    with job(total, specs(hosts)) as started:
        assert started.results(30) == [sum(range(len(hosts)))] * len(hosts)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
