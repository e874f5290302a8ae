"""The baseline beside benchmark_kungfu.py: stock DistributedDataParallel, on gloo (or NCCL where there are GPUs).

    pliant run -np 2 -H 10.0.0.19:1,10.0.0.20:1 -nic=eth0 python3 benchmarks/system/benchmark_ddp.py --model=ResNet50 --batch-size=32
    torchrun --nproc-per-node 2 benchmarks/system/benchmark_ddp.py --model=ResNet50 --batch-size=32
    mpirun -np 2 python3 benchmarks/system/benchmark_ddp.py --model=ResNet50 --batch-size=32     # with mpi4py, or MASTER_ADDR and MASTER_PORT

Whatever starts it only says who is who: the communication is torch's own. Rank 0 prints.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import img_sec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pliant_repro import zoo
from torch.nn.parallel import DistributedDataParallel

from pliant.errors import ConfigError
from pliant.identity import worker_spec

LIMIT = timedelta(minutes=10)
KEPT: list[object] = []
"""Until the program ends. When the last reference to DDP goes, torch waits for gloo's thread with Python's lock in its hand;
right after a step that thread may be waiting for this lock, and neither would ever end."""


@dataclass(frozen=True)
class Place:
    """Who this process is, and where rank 0 listens for the others."""

    rank: int
    size: int
    num_local: int
    local_rank: int
    host: str
    port: int
    own_host: str = ""
    """Our address, where the launcher knows it."""
    listen_fd: int | None = None
    """Rank 0's socket, where the launcher has bound it."""


def find_place(environ: Mapping[str, str]) -> Place:
    """What the launcher says.

    Raises:
        ConfigError: nobody has started this in a way that is known.
    """
    if "PLIANT_SECRET" in environ:
        spec = worker_spec(environ)
        workers = spec.view.workers
        rank = spec.view.rank_of(spec.worker)
        local = [worker for worker in workers if worker.host == spec.worker.host]
        return Place(
            rank, len(workers), len(local), local.index(spec.worker), workers[0].host, workers[0].port,
            own_host=spec.worker.host, listen_fd=spec.listen_fd if rank == 0 else None,
        )  # fmt: skip
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        rank, size, num_local, local_rank = (int(environ.get(name, "1")) for name in names)
        return Place(rank, size, num_local, local_rank, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    if "OMPI_COMM_WORLD_RANK" in environ:
        names = ("RANK", "SIZE", "LOCAL_SIZE", "LOCAL_RANK")
        rank, size, num_local, local_rank = (int(environ[f"OMPI_COMM_WORLD_{name}"]) for name in names)
        host, port = meet_by_mpi(rank, environ)
        return Place(rank, size, num_local, local_rank, host, port)
    return Place(0, 1, 1, 0, "127.0.0.1", 0)


def meet_by_mpi(rank: int, environ: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 listens: as MASTER_ADDR says, or as it tells the others through MPI."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], int(environ.get("MASTER_PORT", "29500"))
    try:
        from mpi4py import MPI
    except ImportError:
        raise ConfigError(
            "under mpirun, ranks need mpi4py to find each other (`pip install mpi4py`), or MASTER_ADDR and MASTER_PORT: "
            "mpirun -x MASTER_ADDR=10.0.0.19 -x MASTER_PORT=29500 ..."
        ) from None
    found = None
    if rank == 0:
        with socket.socket() as sock:
            sock.bind(("", 0))
            port = sock.getsockname()[1]
        alone = int(environ["OMPI_COMM_WORLD_SIZE"]) == int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
        found = ("127.0.0.1" if alone else socket.gethostbyname(socket.gethostname()), port)
    return MPI.COMM_WORLD.bcast(found, root=0)


def use_own_network(place: Place) -> None:
    """gloo takes the interface that the host's name belongs to; where our address is known, it shall be that one's."""
    if not place.own_host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    from pliant.launch.addresses import interfaces

    if ipaddress.ip_address(place.own_host).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return
    for nic, addresses in interfaces().items():
        if place.own_host in addresses:
            os.environ["GLOO_SOCKET_IFNAME"] = nic


def join(place: Place, backend: str) -> None:
    use_own_network(place)
    store = dist.TCPStore(
        place.host, place.port, place.size, is_master=place.rank == 0, timeout=LIMIT, master_listen_fd=place.listen_fd
    )
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=LIMIT)


def main() -> None:
    parser = img_sec.parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", default="", help="gloo or nccl; default: by the device. Workers that share a GPU need gloo"
    )
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="DDP's")
    args = parser.parse_args()
    args.model = zoo.model_name(args.model)
    if args.backend not in ("", "gloo", "nccl"):
        raise ConfigError(f"--backend {args.backend!r} is not known: use gloo or nccl")
    place, device = find_place(os.environ), img_sec.device_of(args)
    say = img_sec.say_line if place.rank == 0 else lambda text: None
    img_sec.share_cores(place.num_local)
    amount = img_sec.amount_of(args)
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        # `pliant run` shows each worker its own device only.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    img_sec.say_unused(args, say)
    begin_s = time.perf_counter()
    model = img_sec.build(args, device)
    optimizer = img_sec.optimizer_of(model)
    images, labels = img_sec.batch_of(args, device, place.rank)
    say(f"init took {time.perf_counter() - begin_s:.3f}s")
    begin_s = time.perf_counter()
    join(place, backend)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    KEPT.append(wrapped)
    say(f"bcast_op took {time.perf_counter() - begin_s:.3f}s")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()

    where = "GPU" if device.type == "cuda" else "CPU"
    mean, interval = img_sec.measure(step, amount, where, say, img_sec.settle_of(device))
    say(f"Total img/sec on {place.size} {where}(s): {place.size * mean:.1f} +-{place.size * interval:.1f}")
    facts: dict[str, object] = {"framework": "ddp", "version": torch.__version__, "backend": backend, "np": place.size}
    facts |= {"bs": args.batch_size, "model": args.model}
    if args.image_size:
        facts["image-size"] = args.image_size
    say(img_sec.result_line(mean, interval, facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    img_sec.run_program(main)
