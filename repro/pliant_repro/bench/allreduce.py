"""`pliant bench allreduce`: ours beside gloo and Open MPI, and beside what the hardware allows, in one run.

With `--device cuda` every worker has a GPU of its own: our sums on a process group of NCCL, beside NCCL's own all-reduce and
our sums through the host's memory. All sides get the same tensors and one process with one arithmetic thread per rank, and are measured the same way: the side's
barrier, clock, all tensors submitted and awaited, clock. Before that, all reduce a known pattern, and compare the sums. The
second half of this module runs in the worker processes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pliant.comm.topology import STRATEGIES
from pliant.errors import CommError, ConfigError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.contest import Contender, Placement, Progress, Rules, Summary, Timings, check_choice
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import Lab
from pliant_repro.profiles import tensor_sizes
from pliant_repro.scaling_model import transfer_s
from pliant_repro.worker import Command, Opened, join_group

ITEM_BYTES = 4
PEERS = {"cpu": ("gloo", "openmpi", "group"), "cuda": ("nccl", "host")}
"""Who can take part beside us, by device: torch's gloo and NCCL, Open MPI, our own sums on a process group of gloo, and those
through the host's memory."""
DEFAULT_PEERS = {"cpu": ("gloo", "openmpi"), "cuda": ("nccl", "host")}
BUSY = 0.85
"""Above this share of busy processors, they and not the links limit a run between hosts."""
OURS, FUSED, COPY = "pliant", "pliant-fused", "copy"
OPENMPI, YIELDING = "openmpi", "openmpi-yield"
"""Open MPI with its defaults, and giving the processor away while it waits, which helps where ranks share cores."""
START_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AllreduceOptions:
    """Options of `pliant bench allreduce`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    num_workers: int = 4
    model: str = "resnet50"
    """A name of `profiles.MODELS`."""
    fuse: bool = False
    """Reduce all tensors as one."""
    strategy: str = "AUTO"
    device: str = "cpu"
    """Where the tensors are: `cpu`, or `cuda` with one GPU for each worker."""
    peers: tuple[str, ...] = DEFAULT_PEERS["cpu"]
    lab: Lab | None = None
    """The lab to run in; None means all on this host."""
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        check_choice("--strategy", self.strategy, STRATEGIES)
        check_choice("--device", self.device, tuple(PEERS))
        for peer in self.peers:
            check_choice("--peers", peer, PEERS[self.device])
        if self.device == "cuda" and self.lab is not None:
            raise ConfigError("--device cuda --lab: the hosts of a lab share the GPUs of this one; leave --lab out")
        if not 1 <= self.num_workers <= 256:
            raise ConfigError(f"-np {self.num_workers}: use 1 to 256")
        if self.lab is not None and self.num_workers % self.lab.num_hosts:
            raise ConfigError(
                f"-np {self.num_workers} does not spread evenly over hosts={self.lab.num_hosts}: use a multiple, or leave -np out"
            )
        contest.check_least(("--repeat", self.rules.rounds, 1), ("--iterations", self.rules.iterations, 1))

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each tensor that is reduced."""
        sizes = tensor_sizes(self.model)
        return [sum(sizes)] if self.fuse else list(sizes)


def parse_peers(text: str | None, device: str = "cpu") -> tuple[str, ...]:
    """Parse the comma list of `--peers`; `none` or nothing means no peer, and None the usual ones of the device."""
    if text is None:
        return DEFAULT_PEERS.get(device, ())
    names = contest.split_words(text)
    return () if names == ("none",) else names


def check_gpus(num_workers: int, num_gpus: int) -> None:
    """Raise ConfigError if there is no GPU for each worker."""
    if num_gpus < num_workers:
        remedy = f"use -np {num_gpus}" if num_gpus > 1 else "run it on a machine with several GPUs, or use --device cpu"
        raise ConfigError(
            f"-np {num_workers} --device cuda: every worker needs a GPU of its own, and {num_gpus} "
            f"{'is' if num_gpus == 1 else 'are'} here; {remedy}"
        )


def parse_lab(text: str) -> Lab:
    """Parse `hosts=4,rate=1gbit` as a lab that is not up yet.

    Raises:
        ConfigError: the text has another form.
    """
    values = {"hosts": "4", "rate": "1gbit"}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in values or not equals:
            raise ConfigError(f"--lab: {part!r} not understood; use hosts=4,rate=1gbit")
        values[key] = value
    if not values["hosts"].isdecimal():
        raise ConfigError(f"--lab: hosts={values['hosts']} is not a number; use hosts=4,rate=1gbit")
    return Lab(num_hosts=int(values["hosts"]), rate=values["rate"])


def run(options: AllreduceOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold the contest and return its result. Everything started is gone afterwards.

    Raises:
        ConfigError: the model is unknown, or the machine's memory is too small for the model.
        LabError: no lab can be made here.
    """
    remarks: list[str] = []
    names = choose_contenders(options, remarks)
    if options.device == "cuda":
        import torch

        check_gpus(options.num_workers, torch.cuda.device_count())
    else:
        check_memory(options, names)
    lab = options.lab
    line_rates: list[float] = []

    def measure_line() -> None:
        if lab is not None and lab.num_hosts > 1:
            progress("iperf3", 0.0)
            rate = iperf.mean_ring_rate(lab, remarks)
            line_rates.extend([rate] if rate is not None else [])

    with contextlib.ExitStack() as cleanup:
        if lab is not None:
            cleanup.enter_context(lab.up())
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        placement = Placement(num_workers=options.num_workers, folder=folder, lab=lab)
        jobs = [cleanup.enter_context(make_contender(options, placement, name)) for name in names]
        contest.start_all(jobs, START_S, progress)
        measure_line()
        count = None if lab is None else lambda: sum(lab.tx_bytes(host) for host in range(lab.num_hosts))
        checked = [name for name in names if name != COPY]
        results = contest.hold(jobs, options.rules, checked=checked, count_link_bytes=count, progress=progress)
        measure_line()
    remarks += contest.failures(results)
    return make_result(options, args, results, line_rates, remarks)


def choose_contenders(options: AllreduceOptions, remarks: list[str]) -> list[str]:
    """Return the names of all who take part; a remark says why Open MPI does not."""
    names = [OURS]
    if options.lab is None:
        names += [COPY] if options.fuse else [FUSED, COPY]
    names += [peer for peer in options.peers if peer != OPENMPI]
    if OPENMPI in options.peers:
        without_launcher = "openmpi skipped: between hosts it needs a launcher (ssh), which a lab does not have"
        why_not = without_launcher if options.lab is not None else contest.why_no_openmpi()
        remarks += [why_not] if why_not else []
        names += [] if why_not else [YIELDING, OPENMPI]
    return names


def check_memory(options: AllreduceOptions, names: Sequence[str]) -> None:
    """Raise ConfigError if the contenders' tensors do not fit into the free memory."""
    copies = len(names) + (COPY in names)  # the copy has a source and a target
    num_bytes = sum(options.sizes) * ITEM_BYTES
    needed = copies * options.num_workers * num_bytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), needed)
    if needed > free:
        raise ConfigError(
            f"{options.num_workers} workers x {copies} tensors x {num_bytes / 1e6:.0f} MB need {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: use fewer --peers, a smaller -np or another --model"
        )


def make_contender(options: AllreduceOptions, placement: Placement, name: str) -> Contender:
    """Make the contender with this name; it is not started yet."""
    sizes = options.sizes
    task = {
        "side": name,
        "device": options.device,
        "sizes": [sum(sizes)] if name == FUSED else sizes,
        "num_workers": placement.num_workers,
        "store": str(placement.folder / f"{name}.store"),
    }

    def mpirun(argv: list[str]) -> list[str]:
        settings = ["--mca", "mpi_yield_when_idle", "1"] if name == YIELDING else []
        count = str(placement.num_workers)
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", count, *settings, *argv]

    strategy = options.strategy if name in (OURS, FUSED, "group", "host") else ""
    launcher = mpirun if name in (OPENMPI, YIELDING) else None
    return placement.contender(name, f"{__name__}:opened", task, strategy=strategy, launcher=launcher)


def make_result(
    options: AllreduceOptions,
    args: Mapping[str, object],
    results: Mapping[str, Timings],
    line_rates: Sequence[float],
    remarks: list[str],
) -> Json:
    """Return the result: ours, the peers, and the bound."""
    ours, num_bytes = results[OURS], sum(options.sizes) * ITEM_BYTES
    shown = dict(results)
    if OPENMPI in results:  # a fair peer gets its best
        best = contest.fastest([YIELDING, OPENMPI], results)
        shown[OPENMPI] = results[best]
        remarks.append(f"openmpi: the faster of mpi_yield_when_idle=1 and its defaults counts, here {best}")
    numbers = contest.measured(ours, num_bytes)
    busy = numbers.get("cpu_busy")
    if options.lab is not None and isinstance(busy, float) and busy > BUSY:
        remarks.append(
            f"the processors are {busy:.0%} busy: they, not the links, limit this run; no verdict about the links"
        )
    extra: Json = {}
    if FUSED in results:
        fused = contest.beside(results[FUSED], ours, num_bytes)
        speedup = fused["speedup"]
        extra["fused"] = {**fused, "one_by_one": 1 / speedup if isinstance(speedup, float) else None}
    return contest.form(
        "allreduce",
        args,
        contest.is_ok(ours),
        remarks,
        strategy=options.strategy,
        ours=numbers,
        peers={name: contest.beside(shown[name], ours, num_bytes) for name in options.peers if name in shown},
        bound=_bound(options, num_bytes, results, line_rates),
        num_tensors=len(options.sizes),
        num_bytes=num_bytes,
        **extra,
    )


def _bound(
    options: AllreduceOptions, num_bytes: int, results: Mapping[str, Timings], line_rates: Sequence[float]
) -> Json:
    ours, lab = results[OURS], options.lab
    if lab is None:
        copies = results[COPY]
        median_s = copies.median_s
        moved = 2 * options.num_workers * num_bytes
        details: Json = {"moved_bytes": moved, "bytes_per_s": moved / median_s if median_s else None}
        if median_s is not None:
            details = {**Summary.of(copies.seconds).to_json(), **details}
        return contest.bound("memory traffic 2*N*S, N processes copying at once", median_s, ours, details)
    nominal = lab.nominal_rate * iperf.MTU_SHARE if lab.nominal_rate else None
    bits_per_s = mean(line_rates) if line_rates else nominal
    line_s = transfer_s(num_bytes, lab.num_hosts, bits_per_s / 8) if bits_per_s and lab.num_hosts > 1 else None
    measured = {"bits_per_s": bits_per_s, "ring_bits_per_s": list(line_rates)}
    return contest.bound("line rate 2(N-1)/N*S/B, B by iperf3 in a ring", line_s, ours, measured)


# --- in the worker processes ---

Values = npt.NDArray[np.float32]
SUM_TIMEOUT_S = 60.0


class Reducer(ABC):
    """One rank of an implementation: its tensors, its barrier, and its all-reduce of all of them at once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.clear()

    def clear(self) -> None:
        """Write zeros, which stay zeros however often they are summed: no overflow, and all pages are really there."""
        for index, size in enumerate(self.sizes):
            self.write(index, np.zeros(size, np.float32))

    @abstractmethod
    def write(self, index: int, values: Values) -> None:
        """Set the operand of this rank."""

    @abstractmethod
    def read(self, index: int) -> Values:
        """Return the sum."""

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def reduce_all(self) -> None: ...

    def sent_bytes(self) -> int | None:
        """Return the bytes sent so far, by the implementation's own count, if it has one."""
        return None


class TensorReducer(Reducer):
    """Tensors of torch, on a device."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.is_cuda = tensors[0].is_cuda
        super().__init__([tensor.numel() for tensor in tensors])

    def write(self, index: int, values: Values) -> None:
        import torch

        self.tensors[index].copy_(torch.from_numpy(values))

    def read(self, index: int) -> Values:
        return cast(Values, self.tensors[index].cpu().numpy())

    def synchronize(self) -> None:
        """Wait for the device: a collective on a GPU returns before it is done."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize(self.tensors[0].device)


class TorchReducer(TensorReducer):
    """torch.distributed on gloo or NCCL, in its default configuration."""

    def barrier(self) -> None:
        import torch.distributed as dist

        self.synchronize()
        dist.barrier()
        self.synchronize()

    def reduce_all(self) -> None:
        import torch.distributed as dist

        works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for work in works:
            work.wait()
        self.synchronize()


class MemoryCopy(TorchReducer):
    """No all-reduce, but the memory traffic that one needs at least: each input is read once, each result written once."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self._targets = [tensor.clone().fill_(1) for tensor in tensors]  # written, so that all pages are really there

    def reduce_all(self) -> None:
        for source, target in zip(self.tensors, self._targets, strict=True):
            target.copy_(source)
        self.synchronize()


class MpiReducer(Reducer):
    """Open MPI through mpi4py, in place."""

    def __init__(self, sizes: Sequence[int]) -> None:
        from mpi4py import MPI

        self._arrays = [np.zeros(size, np.float32) for size in sizes]
        super().__init__(sizes)
        self._comm, self._in_place, self._waitall = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.Request.Waitall

    def write(self, index: int, values: Values) -> None:
        self._arrays[index][...] = values

    def read(self, index: int) -> Values:
        return self._arrays[index]

    def barrier(self) -> None:
        self._comm.Barrier()

    def reduce_all(self) -> None:
        self._waitall([self._comm.Iallreduce(self._in_place, array) for array in self._arrays])


class PliantReducer(TensorReducer):
    """This package's engine: on tensors in its shared memory, or on those of a GPU, which it copies to the host and back."""

    def __init__(self, tensors: Sequence[Any], engine: Any) -> None:
        self._engine = engine
        self._named = [(f"gradient.{index}", tensor) for index, tensor in enumerate(tensors)]
        super().__init__(tensors)

    def barrier(self) -> None:
        self.synchronize()
        self._engine.barrier("bench")

    def reduce_all(self) -> None:
        handles = [self._engine.all_reduce(name, tensor, op="sum") for name, tensor in self._named]
        for handle in handles:
            handle.wait(timeout_s=SUM_TIMEOUT_S)
        self.synchronize()

    def sent_bytes(self) -> int | None:
        return int(sum(self._engine.counters().egress_bytes.values()))


class GroupReducer(PliantReducer):
    """This package's sums on a process group of torch: NCCL between GPUs, else gloo."""

    def __init__(self, tensors: Sequence[Any], engine: Any) -> None:
        from pliant.comm.process_group import GroupOffer, SumGroup

        super().__init__(tensors, engine)
        self._sums = list(tensors)
        self._blocks = (1,) * engine.size
        self._sent = 0
        device = tensors[0].device
        self._group = SumGroup(engine, device, GroupOffer.of(device) if self.is_cuda else GroupOffer("gloo"))
        self._group.start()
        deadline_s = time.monotonic() + START_S
        while not self._group.is_ready:
            if self._group.reason or time.monotonic() > deadline_s:
                raise CommError(f"no process group: {self._group.reason or 'it takes too long'}")
            time.sleep(0.01)

    def read(self, index: int) -> Values:
        return cast(Values, self._sums[index].cpu().numpy())

    def reduce_all(self) -> None:
        from pliant.comm.group_sum import plan_of

        handles = [self._group.sum(name, [tensor], self._blocks, "tree") for name, tensor in self._named]
        self._sums = [handle.wait(timeout_s=SUM_TIMEOUT_S) for handle in handles]
        for size in self.sizes:
            self._sent += plan_of("tree", self._blocks, size, ITEM_BYTES).sent_bytes(self._engine.rank)
        self.synchronize()

    def sent_bytes(self) -> int | None:
        return self._sent

    def close(self) -> None:
        self._group.close()
        self._group.join(10)


def preload() -> None:
    """Import what every side needs, before ranks are forked."""
    import torch.distributed as dist

    from pliant.elastic.member import Session

    assert (dist, Session) is not None, "loaded"


@contextlib.contextmanager
def opened(task: Mapping[str, object], rank: int) -> Iterator[Opened]:
    """Open the task's side; the program of `pliant_repro.worker`."""
    side, sizes, num_workers = cast(str, task["side"]), cast("list[int]", task["sizes"]), cast(int, task["num_workers"])
    with contextlib.ExitStack() as stack:
        if side in (OPENMPI, YIELDING):
            reducer: Reducer = MpiReducer(sizes)
        else:
            reducer = _open_reducer(side, sizes, task, rank, stack)
        reducer.barrier()
        yield {}, lambda command: carry_out(reducer, rank, num_workers, command)


def _open_reducer(
    side: str, sizes: Sequence[int], task: Mapping[str, object], rank: int, stack: contextlib.ExitStack
) -> Reducer:
    """Open a side that works on tensors of torch, until the stack is closed."""
    import torch

    torch.set_num_threads(1)
    on_gpu = task["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if side in (OURS, FUSED, "group", "host"):
        from pliant.elastic.member import Session

        engine = stack.enter_context(Session.join()).engine
        if side == "host" or (side in (OURS, FUSED) and not on_gpu):
            make = engine.empty if not on_gpu else partial(torch.empty, device=device)
            return PliantReducer([make((size,), dtype=torch.float32) for size in sizes], engine)
        ours = GroupReducer([torch.empty(size, device=device) for size in sizes], engine)
        stack.callback(ours.close)
        return ours
    backend = "nccl" if side == "nccl" else "gloo"
    num_workers = cast(int, task["num_workers"])
    stack.enter_context(join_group(f"file://{task['store']}", rank, num_workers, SUM_TIMEOUT_S, backend))
    tensors = [torch.empty(size, device=device) for size in sizes]
    return MemoryCopy(tensors) if side == COPY else TorchReducer(tensors)


def carry_out(side: Reducer, rank: int, num_workers: int, command: Command) -> dict[str, object]:
    """Carry out one command of the controller, and return the answer."""
    if command["do"] == "check":
        return {"wrong": count_wrong(side, rank, num_workers)}
    before = side.sent_bytes()
    wall_s, cpu_s = [], []
    for _ in range(cast(int, command["iterations"])):
        side.barrier()
        cpu_begun_s, begun_s = time.process_time(), time.perf_counter()
        side.reduce_all()
        wall_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - cpu_begun_s)
    sent = side.sent_bytes()
    counted = {"egress_bytes": sent - before} if sent is not None and before is not None else {}
    return {"wall_s": wall_s, "cpu_s": cpu_s, **counted}


def pattern(index: int, size: int, scale: int) -> Values:
    """Return small whole numbers, whose sums are exact, different at neighbouring places and tensors."""
    return ((np.arange(size) + index) % 3 + 1).astype(np.float32) * np.float32(scale)


def contribution(rank: int) -> int:
    return 1 + rank % 2


def count_wrong(side: Reducer, rank: int, num_workers: int) -> int:
    """Reduce a known pattern once, and return how many elements differ from its sum on this rank."""
    for index, size in enumerate(side.sizes):
        side.write(index, pattern(index, size, contribution(rank)))
    side.barrier()
    side.reduce_all()
    total = sum(contribution(each) for each in range(num_workers))
    wrong = sum(
        np.count_nonzero(side.read(index) != pattern(index, size, total)) for index, size in enumerate(side.sizes)
    )
    side.clear()
    return int(wrong)
