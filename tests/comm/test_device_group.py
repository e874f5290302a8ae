"""Device groups on gloo: one launch order on all ranks, right sums, and no hang when somebody fails."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import FULL, gang, listen, say, specs

from pliant.comm.device.alarm import decode, encode
from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.group import DeviceGroup
from pliant.comm.device.torch_group import TorchGroup, check_gpus, problem_of
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.loopback import engines
from pliant.elastic.session import Session
from pliant.errors import CollectiveTimeout, CommError, ConfigError, EngineClosed, Mismatch, WorkerLost
from pliant.identity import WorkerSpec

A, B = "127.0.0.1", "127.0.0.2"
NUM_TENSORS = 160

Launch = tuple[str, str]


def gloo(**settings: Any) -> DeviceGroupConfig:
    return DeviceGroupConfig(backend="gloo", **{"timeout_s": 20.0, **settings})


# --- real processes ---


def note_launches(tensors: dict[str, torch.Tensor]) -> list[Launch]:
    """From now on, every launch in this process: what was launched, and of which tensor."""
    launches: list[Launch] = []
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    real = {kind: getattr(TorchGroup, kind) for kind in ("all_reduce", "reduce", "broadcast")}
    for kind in real:

        def launch(
            self: TorchGroup, tensor: torch.Tensor, kind: str = kind, real: Callable[..., Any] = real[kind]
        ) -> Any:
            launches.append((kind, names.get(tensor.data_ptr(), "?")))
            return real(self, tensor)

        setattr(TorchGroup, kind, launch)
    return launches


def reduce_in_random_order(
    rank: int, spec: WorkerSpec, num_iterations: int, hierarchical: bool
) -> tuple[list[str], list[str], list[Launch]]:
    """Many iterations, each in an order of its own: the first arrival, the order in the end, and all launches."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as the user's program might
    chance = random.Random(rank)
    tensors = {f"tensor/{i:03}": torch.empty(i * 37 % 500 + 1) for i in range(NUM_TENSORS)}
    launches = note_launches(tensors)
    names, first = list(tensors), []
    with Session.join(spec) as session:
        size = session.engine.size
        config = gloo(hierarchical=hierarchical)
        with DeviceGroup(session.engine, tensors, config).open() as group, ThreadPoolExecutor(4) as pool:
            for iteration in range(num_iterations):
                chance.shuffle(names)
                for index, tensor in enumerate(tensors.values()):
                    tensor.fill_(index + iteration + rank)
                submit: Callable[[str], Any] = lambda name: group.all_reduce(name, tensors[name])  # noqa: E731
                # The first order is what the test compares with, so there one thread submits.
                handles = [submit(name) for name in names] if iteration == 0 else list(pool.map(submit, names))
                first = first or names.copy()
                for handle in handles:
                    handle.wait()
                total = size * (size - 1) // 2
                for index, tensor in enumerate(tensors.values()):
                    assert torch.equal(tensor, torch.full_like(tensor, size * (index + iteration) + total))
            settled = list(group.launch_order)
        ours = launches.copy()
        with DeviceGroup(session.engine, {"again": torch.ones(3)}, config).open() as again:
            alone = torch.ones(3)
            again.all_reduce("again", alone).wait()
            assert torch.equal(alone, torch.full((3,), float(size)))
    assert dist.get_world_size() == 1
    dist.destroy_process_group()
    return first, settled, ours


def run_all(function: Callable[..., Any], hosts: list[str], *args: Any, heartbeat_s: float = 10.0) -> list[Any]:
    with gang(function, [(spec, *args) for spec in specs(hosts, timeout_s=heartbeat_s)]) as workers:
        return workers.results(60)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "num_iterations"), [([A, A, B], 30), ([A, A, B, B], 5)] if FULL else [([A, A, B], 6)], ids=str
)
def test_random_submissions_are_launched_in_one_order(hosts: list[str], num_iterations: int) -> None:
    """gloo itself takes 2 ms of CPU per tensor and rank with four ranks: hence fewer iterations there."""
    results = run_all(reduce_in_random_order, hosts, num_iterations, False)
    launches = [launches for *_, launches in results]
    assert all(mine == launches[0] for mine in launches)
    names = [name for _, name in launches[0]]
    assert names == sorted(names[:NUM_TENSORS]) + results[0][0] * (num_iterations - 1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "num_iterations"), [([A, A, B], 5), ([A, A, B, B], 8)] if FULL else [([A, A, B, B], 8)], ids=str
)
def test_hierarchical_sums_have_one_order_within_each_host(hosts: list[str], num_iterations: int) -> None:
    results = run_all(reduce_in_random_order, hosts, num_iterations, True)
    order = sorted(results[0][0])
    expected = []
    for _ in range(num_iterations):
        expected += [("reduce", name) for name in order] + [("broadcast", name) for name in order]
        order = results[0][0]
    for rank, (_, settled, launches) in enumerate(results):
        assert settled == results[0][0]
        assert launches == (expected if hosts.count(hosts[rank]) > 1 else []), f"rank {rank}"


def lose_a_peer(rank: int, spec: WorkerSpec, victim: int, hierarchical: bool) -> tuple[str, float, float]:
    """What the survivors get when the victim goes, and how long the error and the closing took."""
    tensors = {f"t{i}": torch.ones(100_000) for i in range(8)}
    with Session.join(spec) as session:
        group = DeviceGroup(session.engine, tensors, gloo(hierarchical=hierarchical)).open()
        for _ in range(2):
            for handle in [group.all_reduce(name, tensor) for name, tensor in tensors.items()]:
                handle.wait()
        say("ready")
        if rank == victim:
            listen()
            time.sleep(60)  # until it is killed
        handles = [group.all_reduce(name, tensor) for name, tensor in tensors.items()]
        began_s = time.monotonic()
        said = ""
        for handle in handles:
            try:
                handle.wait()
            except WorkerLost as lost:
                said = str(lost)
        failed_s = time.monotonic()
        with pytest.raises(WorkerLost):
            group.all_reduce("t0", tensors["t0"])
        group.close()
        return said, failed_s - began_s, time.monotonic() - failed_s


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sig", "victim", "hierarchical"),
    [(signal.SIGKILL, 2, False), (signal.SIGKILL, 0, False), (signal.SIGKILL, 2, True), (signal.SIGSTOP, 1, False)],
    ids=["killed", "rank 0 killed", "hierarchical", "stopped"],
)
def test_a_lost_peer_fails_the_waiting_and_does_not_hang_closing(sig: int, victim: int, hierarchical: bool) -> None:
    started = specs([A, A, B, B], timeout_s=1.0)
    with gang(lose_a_peer, [(spec, victim, hierarchical) for spec in started]) as workers:
        for rank in range(4):
            assert workers.hear(rank) == "ready"
        workers.kill(victim, sig)
        for rank in set(range(4)) - {victim}:
            said, failed_s, closed_s = workers.hear(rank, 20)
            assert f"{started[victim].worker} (rank {victim})" in said
            assert failed_s < 4
            assert closed_s < 4


# --- all ranks in one process ---


@pytest.fixture(scope="module", autouse=True)
def torch_store() -> None:
    """The first store of a process opens a pipe of libuv's for good: have it before descriptors are counted."""
    dist.TCPStore(A, 0, is_master=True, wait_for_workers=False)


def on_all(ranks: list[Engine], act: Callable[[Engine], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


QUICK = EngineConfig(collective_timeout_s=20)
PAIR = {"a": torch.ones(3), "b": torch.ones(4)}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("hosts", [[A], [A, A, B]], ids=len)
def test_all_operations_strides_and_types(hosts: list[str], hierarchical: bool) -> None:
    size = len(hosts)
    results = {"sum": size * (size + 1) // 2, "min": 1, "max": size, "prod": {1: 1, 3: 6}[size]}

    def work(engine: Engine) -> None:
        for op, expected in results.items():
            grads = {
                "strided": torch.full((4, 6), engine.rank + 1.0).t()[::2],
                "double": torch.full((5,), engine.rank + 1, dtype=torch.float64),
                "empty": torch.empty(0),
                "scalar": torch.tensor(engine.rank + 1.0, requires_grad=True),
            }
            with DeviceGroup(engine, grads, gloo(op=op, hierarchical=hierarchical)).open() as group:
                for handle in [group.all_reduce(name, grad) for name, grad in grads.items()]:
                    handle.wait()
            for grad in grads.values():
                assert torch.equal(grad, torch.full_like(grad, expected))

    with engines(hosts, QUICK) as ranks:
        on_all(ranks, work)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            lambda group: (group.all_reduce("a", torch.ones(3)), group.all_reduce("a", torch.ones(3))),
            "again before 'b'",
        ),
        (lambda group: group.all_reduce("c", torch.ones(3)), "'c' is not one of the 2 names"),
        (lambda group: group.all_reduce("b", torch.ones(3)), r"'b' is float32\[3\], but the ranks agreed on"),
    ],
    ids=["twice", "new", "shape"],
)
def test_a_wrong_submission_on_one_rank_is_an_error_on_all(wrong: Callable[[DeviceGroup], Any], reason: str) -> None:
    def work(engine: Engine) -> float:
        group = DeviceGroup(engine, PAIR, gloo()).open()
        if engine.rank == 1:
            with pytest.raises(Mismatch, match=reason):
                wrong(group)
        else:
            handles = [group.all_reduce(name, tensor.clone()) for name, tensor in PAIR.items()]
            with pytest.raises(Mismatch, match=f"on rank 1: .*{reason}"):
                handles[1].wait()
        began_s = time.monotonic()
        group.close()
        return time.monotonic() - began_s

    with engines([A, A, B], QUICK) as ranks:
        assert all(closed_s < 4 for closed_s in on_all(ranks, work))


@pytest.mark.usefixtures("no_leaks")
def test_ranks_that_disagree_or_cannot_are_refused_alike() -> None:
    def work(engine: Engine) -> None:
        with pytest.raises(Mismatch, match="rank 1 lacks 'b'"):
            DeviceGroup(engine, {"a": PAIR["a"]} if engine.rank else PAIR, gloo()).open()
        with pytest.raises(Mismatch, match="'sum'.* on rank 0, but .*'max'.* on rank 1"):
            DeviceGroup(engine, PAIR, gloo(op="max" if engine.rank else "sum")).open()
        with pytest.raises(
            ConfigError, match="backend='nccl' on .* .rank 0.: .*use backend='gloo', or the engine's own"
        ):
            DeviceGroup(engine, PAIR, DeviceGroupConfig()).open()

    with engines([A, B], QUICK) as ranks:
        on_all(ranks, work)


@pytest.mark.usefixtures("no_leaks")
def test_a_timeout_says_what_this_rank_has_not_submitted_and_closing_fails_the_rest() -> None:
    def work(engine: Engine) -> None:
        with DeviceGroup(engine, PAIR, gloo()).open() as group:
            waiting = group.all_reduce("b", torch.ones(4))
            with pytest.raises(CollectiveTimeout, match="waiting for this rank to submit 'a'"):
                waiting.wait(0.1)
        with pytest.raises(EngineClosed, match="closed while this was in progress"):
            waiting.wait()
        with pytest.raises(EngineClosed, match="not open"):
            group.all_reduce("a", torch.ones(3))

    with engines([A, B], QUICK) as ranks:
        on_all(ranks, work)


@pytest.mark.usefixtures("no_leaks")
def test_a_rank_that_closes_alone_does_not_wait_for_ever() -> None:
    with engines([A, B], QUICK) as ranks:
        early, late = on_all(ranks, lambda engine: DeviceGroup(engine, PAIR, gloo(linger_s=0.2)).open())
        waiting = late.all_reduce("a", torch.ones(3))
        early.close()
        with pytest.raises(CommError, match="on rank 0: the device group was closed without the others"):
            waiting.wait(5)
        late.close()


# --- values ---


def test_workers_that_share_a_gpu_are_told_which() -> None:
    check_gpus(["GPU-1", "GPU-2", "", ""])
    with pytest.raises(ConfigError, match="ranks 1 and 2 share GPU GPU-2.*-np.*backend='gloo'"):
        check_gpus(["GPU-1", "GPU-2", "GPU-2"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing on a machine without CUDA")
def test_a_machine_without_nccl_says_what_it_found() -> None:
    assert "without NCCL" in problem_of("nccl", [torch.device("cpu")]) or "no CUDA device" in problem_of("nccl", [])
    assert problem_of("gloo", [torch.device("cpu")]) == ""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"backend": "mpi"}, "use 'nccl' or 'gloo'"),
        ({"op": "xor"}, "use one of sum, min, max, prod"),
        ({"timeout_s": 0}, "positive"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DeviceGroupConfig(**settings)


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (WorkerLost("10.0.0.1:1", 3, "ü" * 5000), "lost worker 10.0.0.1:1 (rank 3): ü"),
        (Mismatch("names differ"), "on rank 7: names differ"),
        (RuntimeError("x"), "on rank 7: x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_alarm_carries_any_error(error: Exception, heard: str) -> None:
    decoded = decode(encode(7, error))
    assert str(decoded).startswith(heard)
    assert isinstance(decoded, CommError)
    assert isinstance(decoded, type(error)) or isinstance(error, RuntimeError)


def test_an_alarm_that_says_all_is_well() -> None:
    assert decode(encode(7, None)) is None
