"""The exact sum on a process group, between processes that share one device: the same bits as on the CPU.

    OUT=. python benchmarks/group_sum_device.py --device cuda     # one GPU, from the repository's root, under a minute
    OUT=. python benchmarks/group_sum_device.py --device cpu      # to test this program itself

NCCL wants a GPU for every process, so here gloo carries tensors of the GPU between 2 and 3 processes; streams, packing and
additions are those of several GPUs. What of NCCL can be tried on one GPU is tried: a group with a single rank, its abort, and
that workers which share a GPU decline. It writes $OUT/group_sum_device.json, prints a line for each check, and ends with exit
code 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from pliant.cluster import View, Worker  # noqa: E402
from pliant.comm import order  # noqa: E402
from pliant.comm.engine import Engine, EngineConfig  # noqa: E402
from pliant.comm.group_sum import GroupOrder, operands_of_block, plan_of  # noqa: E402
from pliant.comm.mesh import MeshConfig  # noqa: E402
from pliant.comm.process_group import GroupOffer, SumGroup  # noqa: E402
from pliant.comm.transport import connected, loopback_engines  # noqa: E402

REPLICAS = 6
LENGTHS = (1, 1003, 6_553_600)
DTYPES = (torch.float32, torch.bfloat16)
ORDERS: tuple[GroupOrder, ...] = ("tree", "ddp")
LIMIT_S = 50.0
Json = dict[str, Any]


def gradients(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradient of each replica, on the CPU: many magnitudes, so that the order shows in the bits."""
    made = torch.Generator().manual_seed(length)
    scales = torch.pow(2.0, torch.randint(-12, 4, (REPLICAS, length), generator=made).float())
    return list((torch.randn(REPLICAS, length, generator=made) * scales).to(dtype))


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    middle = order.tree_split(len(values))
    return tree_sum(values[:middle]) + tree_sum(values[middle:])


def chain_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of DDP, chunk by chunk."""
    total = torch.empty_like(values[0])
    length = order.chunk_length(total.numel(), total.element_size(), len(values))
    for begin, end, chunk in order.chunks_between(0, total.numel(), length):
        first, *others = order.chain(chunk, len(values))
        part = values[first][begin:end]
        for replica in others:
            part = values[replica][begin:end] + part
        total[begin:end] = part
    return total


def own_operands(
    order_name: GroupOrder, blocks: Sequence[int], rank: int, values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    begin, end = list(accumulate(blocks, initial=0))[rank : rank + 2]
    return [tree_sum(values[each.start : each.stop]) for each in operands_of_block(order_name, begin, end, REPLICAS)]


def until_ready(group: SumGroup) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not group.is_ready:
        if group.reason or time.monotonic() > deadline_s:
            raise RuntimeError(f"no group: {group.reason or 'it takes too long'}")
        time.sleep(0.001)


# --- in the processes ---


def be_rank(rank: int, view: View, device_name: str, answers: Any) -> None:
    """Sum on a group of gloo, and compare the bits with sums made on the CPU."""
    torch.set_num_threads(2)
    try:
        device = torch.device(device_name)
        mesh = MeshConfig(secret=b"group_sum_device", join_timeout_s=LIMIT_S)
        with connected(view, view.workers[rank], mesh, EngineConfig(collective_timeout_s=LIMIT_S)) as engine:
            group = SumGroup(engine, device, GroupOffer("gloo"))
            group.start()
            until_ready(group)
            answers.put((rank, compare(engine, group, device)))
            engine.barrier("compared")
            group.close()
            group.join(10)
    except Exception:
        answers.put((rank, {"failed": traceback.format_exc()[-2000:]}))


def compare(engine: Engine, group: SumGroup, device: torch.device) -> Json:
    blocks = (REPLICAS // engine.size,) * engine.size
    found: Json = {}
    for dtype in DTYPES:
        for length in LENGTHS:
            values = gradients(length, dtype)
            for order_name in ORDERS:
                wanted = tree_sum(values) if order_name == "tree" else chain_sum(values)
                there = [each.to(device) for each in values]
                own = own_operands(order_name, blocks, engine.rank, there)
                name = f"{order_name} {dtype} {length}"
                begun_s = time.perf_counter()
                handles = [group.sum(f"{name} {turn}", own, blocks, order_name) for turn in range(3)]
                sums = [handle.wait() for handle in handles]
                seconds = (time.perf_counter() - begun_s) / 3
                equal = all(total is not None and torch.equal(total.cpu(), wanted) for total in sums)
                sent = plan_of(order_name, blocks, length, values[0].element_size()).sent_bytes(engine.rank)
                found[name] = {"equal": equal, "ms": seconds * 1e3, "sent_bytes": sent}
    return found


def run_ranks(size: int, device: str) -> Json:
    """Return what `size` processes have found."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = tuple(Worker("127.0.0.1", port) for port in free_ports(size))
    view = View(0, workers, (Worker("127.0.0.1", 38080),))
    made = [context.Process(target=be_rank, args=(rank, view, device, answers)) for rank in range(size)]
    for process in made:
        process.start()
    found: Json = {}
    try:
        for _ in made:
            rank, result = answers.get(timeout=LIMIT_S)
            found[str(rank)] = result
    except queue.Empty:
        found["failed"] = f"not done within {LIMIT_S:g} s"
    for process in made:
        process.join(5)
        if process.is_alive():
            process.kill()
    return found


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


# --- NCCL on one GPU ---


def nccl_alone(device: torch.device) -> str:
    """Sum on a group of NCCL with a single rank, then abort it. Returns what went wrong; empty if nothing did."""
    with loopback_engines(["127.0.0.1"]) as [engine]:
        group = SumGroup(engine, device, GroupOffer.of(device))
        group.start()
        until_ready(group)
        values = gradients(1003, torch.float32)
        own = [each.to(device) for each in values]
        total = group.sum("alone", own, (REPLICAS,), "ddp").wait()
        assert total is not None, "a sum has a result"
        if group.backend != "nccl" or not torch.equal(total.cpu(), chain_sum(values)):
            return f"{group.backend}: other bits"
        begun_s = time.monotonic()
        group.close()
        if not group.join(10):
            return "the group's thread has not ended"
        torch.cuda.synchronize(device)
        return "" if time.monotonic() - begun_s < 5 else "the abort took long"


def nccl_shared(device: torch.device) -> str:
    """Let two workers offer the same GPU. Returns what went wrong; empty if both decline."""
    with loopback_engines(["127.0.0.1"] * 2) as engines:
        groups = [SumGroup(engine, device, GroupOffer.of(device)) for engine in engines]
        for group in groups:
            group.start()
        ended = all(group.join(10) for group in groups)
        reasons = {group.reason for group in groups}
        return "" if ended and reasons == {"some workers share a GPU"} else f"they said {reasons}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device_name = parser.parse_args().device
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    results: Json = {"torch": torch.__version__, "device": device_name}
    failed = False

    def check(name: str, act: Callable[[], str]) -> None:
        nonlocal failed
        begun_s = time.monotonic()
        try:
            wrong = act()
        except Exception:
            wrong = traceback.format_exc()[-2000:]
        results[name] = wrong or "ok"
        failed = failed or bool(wrong)
        print(f"{name}: {wrong or 'ok'} ({time.monotonic() - begun_s:.1f} s)", flush=True)

    def processes(size: int) -> str:
        found = results[f"sums of {size}"] = run_ranks(size, str(device))
        wrong = [
            f"rank {rank}: {each['failed']}"
            for rank, each in found.items()
            if isinstance(each, dict) and "failed" in each
        ]
        if "failed" in found or wrong or len(found) < size:
            return str(found.get("failed", "")) + " ".join(wrong)
        unequal = [f"rank {rank}: {name}" for rank, each in found.items() for name in each if not each[name]["equal"]]
        print(json.dumps({name: round(each["ms"], 2) for name, each in found["0"].items()}), flush=True)
        return "other bits: " + ", ".join(unequal) if unequal else ""

    for size in (2, 3):
        check(
            f"{size} processes, N = {REPLICAS}, gloo with tensors on {device_name}", lambda size=size: processes(size)
        )  # type: ignore[misc]
    if device_name == "cuda":
        check("NCCL with a single rank, and its abort", lambda: nccl_alone(device))
        check("workers that share a GPU decline NCCL", lambda: nccl_shared(device))
    Path(os.environ.get("OUT", "."), "group_sum_device.json").write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
