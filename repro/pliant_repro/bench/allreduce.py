"""`pliant bench allreduce`: ours beside gloo and Open MPI, and beside what the hardware allows, in one run.

All sides get the same tensors and one process with one arithmetic thread per rank, and are measured the same way: the side's
barrier, clock, all tensors reduced, clock. The second half of this module runs in the worker processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from pliant.comm.topology import STRATEGIES, Topology, topologies
from pliant.errors import ConfigError, LabError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.contest import Contender, Entry, Placement, Progress, Rules, Series, Summary, check_choice, quantile
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import Lab
from pliant_repro.profiles import tensor_sizes
from pliant_repro.worker import Command, Opened, join_group

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
MPI_TYPES = ("float32", "float64", "int32", "int64")
PEERS = ("gloo", "openmpi")
BUSY = 0.85
"""Above this share of busy processors, they and not the links limit a run between hosts."""
FUSED = "pliant-fused"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllreduceOptions:
    """Options of `pliant bench allreduce`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    num_workers: int = 4
    model: str = "resnet50"
    """A name of `profiles.MODELS`, or a file."""
    mode: str = "par"
    """`seq`: one tensor after the other. `par`: all are submitted, then all awaited."""
    fuse: bool = False
    """Reduce all tensors as one."""
    strategy: str = "AUTO"
    """A name, or `all` for a sweep."""
    peers: tuple[str, ...] = PEERS
    lab: Lab | None = None
    """The lab to run in; None means all on this host."""
    rules: Rules = field(default_factory=Rules)
    dtype: str = "float32"
    determinism: str = "exact"
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_choice("--mode", self.mode, ("seq", "par"))
        check_choice("--dtype", self.dtype, tuple(ITEM_BYTES))
        check_choice("--determinism", self.determinism, ("exact", "fast"))
        check_choice("--strategy", self.strategy, (*STRATEGIES, "all"))
        for peer in self.peers:
            check_choice("--peers", peer, PEERS)
        if not 1 <= self.num_workers <= 256:
            raise ConfigError(f"-np {self.num_workers}: use 1 to 256")
        if self.lab is not None and self.num_workers % self.lab.num_hosts:
            raise ConfigError(
                f"-np {self.num_workers} does not spread evenly over hosts={self.lab.num_hosts}: use a multiple, or leave -np out"
            )
        rules = self.rules
        contest.check_least(
            ("--repeat", rules.rounds, 1), ("--iterations", rules.iterations, 1), ("--warmup", rules.warmup, 0)
        )

    @property
    def strategies(self) -> tuple[str, ...]:
        return STRATEGIES if self.strategy == "all" else (self.strategy,)

    @property
    def compares_fused(self) -> bool:
        """Whether our own time for one fused tensor is measured beside that for all of them, one by one."""
        return not self.fuse and self.strategy != "all" and self.lab is None

    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each tensor that is reduced."""
        sizes = tensor_sizes(self.model)
        return (sum(sizes),) if self.fuse else tuple(sizes)


def parse_peers(text: str) -> tuple[str, ...]:
    """Parse the comma list of `--peers`; `none` or nothing means no peer."""
    names = contest.split_words(text)
    return () if names == ("none",) else names


def parse_lab(text: str) -> Lab:
    """Parse `hosts=4,rate=1gbit[,rx_rate=1gbit]` as a lab that is not up yet.

    Raises:
        ConfigError: the text has another form.
    """
    values = {"hosts": "4", "rate": "1gbit", "rx_rate": "none"}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in values or not equals:
            raise ConfigError(f"--lab: {part!r} not understood; use hosts=4,rate=1gbit,rx_rate=none")
        values[key] = value
    if not values["hosts"].isdecimal():
        raise ConfigError(f"--lab: hosts={values['hosts']} is not a number; use hosts=4,rate=1gbit")
    return Lab(num_hosts=int(values["hosts"]), rate=values["rate"], rx_rate=values["rx_rate"])


def graphs(options: AllreduceOptions) -> Iterator[tuple[str, int, Topology]]:
    """Yield every topology that the chosen strategies use here: (strategy, number, topology)."""
    num_hosts = options.lab.num_hosts if options.lab is not None else 1
    hosts = [f"h{rank * num_hosts // options.num_workers}" for rank in range(options.num_workers)]
    for strategy in options.strategies:
        for number, topology in enumerate(topologies(strategy, hosts)):
            yield strategy, number, topology


def run(options: AllreduceOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold the contest and return its result. Everything started is gone afterwards.

    Raises:
        ConfigError: the model file is damaged, or the machine's memory is too small for the model.
        LabError: no lab can be made here.
    """
    num_bytes = sum(options.sizes()) * ITEM_BYTES[options.dtype]
    check_memory(options, num_bytes)
    remarks: list[str] = []
    lab = options.lab
    with contextlib.ExitStack() as cleanup:
        if lab is not None:
            cleanup.enter_context(lab.up())
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        placement = Placement(num_workers=options.num_workers, folder=folder, lab=lab)
        entries = _enter(options, placement, cleanup, remarks, progress)
        rates = LineRates(lab, remarks, progress)
        rates.measure()
        count = None if lab is None else lambda: sum(lab.tx_bytes(host) for host in range(lab.num_hosts))
        results = contest.hold(entries, options.rules, count_link_bytes=count, progress=progress)
        rates.measure()
    remarks += contest.failures(results)
    return make_result(options, args, num_bytes, results, rates, remarks)


def check_memory(options: AllreduceOptions, num_bytes: int) -> None:
    """Raise ConfigError if the contenders' tensors do not fit into the free memory."""
    copies = 1 + options.compares_fused + len(options.peers) + (0 if options.lab is not None else 2)
    needed = copies * options.num_workers * num_bytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), needed)
    if needed > free:
        raise ConfigError(
            f"{options.num_workers} workers x {copies} contenders x {num_bytes / 1e6:.0f} MB need {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: use fewer --peers, a smaller -np or another --model"
        )


def make_contender(
    options: AllreduceOptions, placement: Placement, side: str, name: str = "", *, yielding: bool = False
) -> Contender:
    """Make the contender `side`: pliant, gloo, copy (memory traffic) or openmpi.

    With `yielding`, Open MPI gives the processor away while it waits, which helps where ranks share cores.
    """
    name = name or side
    sizes = options.sizes()
    task = {
        "side": side, "sizes": [sum(sizes)] if name == FUSED else list(sizes), "num_workers": placement.num_workers,
        "store": str(placement.folder / f"{name}.store"), "parallel": options.mode == "par", "dtype": options.dtype,
        "determinism": options.determinism,
    }  # fmt: skip

    def mpirun(argv: list[str]) -> list[str]:
        settings = ["--mca", "mpi_yield_when_idle", "1"] if yielding else []
        count = str(placement.num_workers)
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", count, *settings, *argv]

    strategy = options.strategies[0] if side == "pliant" else ""
    launcher = mpirun if side == "openmpi" else None
    return placement.contender(name, f"{__name__}:opened", task, strategy=strategy, launcher=launcher)


def why_no_openmpi(options: AllreduceOptions) -> str:
    """Return why Open MPI cannot take part; empty if it can."""
    if options.lab is not None:
        return "openmpi skipped: between hosts it needs a launcher (ssh), which a lab does not have"
    if shutil.which("mpirun") is None:
        return "openmpi skipped: `mpirun` not found; apt-get install openmpi-bin"
    if importlib.util.find_spec("mpi4py") is None:
        return "openmpi skipped: mpi4py not found; pip install mpi4py"
    if options.dtype not in MPI_TYPES:
        return f"openmpi skipped: MPI has no {options.dtype}"
    return ""


def _enter(
    options: AllreduceOptions,
    placement: Placement,
    cleanup: contextlib.ExitStack,
    remarks: list[str],
    progress: Progress,
) -> list[Entry]:
    """Start all contenders at once, and wait for them."""
    ours = make_contender(options, placement, "pliant")
    jobs = [ours]
    if options.compares_fused:
        jobs.append(make_contender(options, placement, "pliant", FUSED))
    if "gloo" in options.peers:
        jobs.append(make_contender(options, placement, "gloo"))
    if options.lab is None:
        jobs.append(make_contender(options, placement, "copy"))
    trials: list[Contender] = []
    if "openmpi" in options.peers:
        why_not = why_no_openmpi(options)
        if why_not:
            remarks.append(why_not)
        else:
            trials = [make_contender(options, placement, "openmpi", "openmpi-yield", yielding=True)]
            trials.append(make_contender(options, placement, "openmpi"))
    for job in (*jobs, *trials):
        cleanup.enter_context(job)
    contest.start_all((*jobs, *trials), options.start_timeout_s, progress)
    entries = [Entry(f"pliant {strategy}", ours, {"strategy": strategy}) for strategy in options.strategies]
    entries += [Entry(job.name, job, sums=job.name != "copy") for job in jobs[1:]]
    if trials:
        entries.append(Entry("openmpi", _choose_trial(trials, options.rules, remarks, progress)))
    return entries


def _choose_trial(trials: Sequence[Contender], rules: Rules, remarks: list[str], progress: Progress) -> Contender:
    """Return the setting of Open MPI that is faster here, and close the other: a fair peer gets its best."""
    brief = Rules(rounds=2, iterations=2, warmup=1, timeout_s=rules.timeout_s)
    entries = [Entry(job.name, job) for job in trials]
    tried = contest.hold(entries, brief, progress=lambda what, _: progress(f"trying {what}", 0.0))
    best = contest.fastest([job.name for job in trials], tried)
    for job in trials:
        if job.name != best:
            job.close()
    shown = ", ".join(
        f"{name} {quantile(series.seconds, 0.5) * 1e3:.1f} ms" if series.rounds else f"{name} failed"
        for name, series in tried.items()
    )
    remarks.append(f"openmpi: the faster of mpi_yield_when_idle=1 and its defaults is used, here {best} ({shown})")
    return next(job for job in trials if job.name == best)


class LineRates:
    """The rates that iperf3 reaches in the lab, before and after the contest; empty without a lab."""

    def __init__(self, lab: Lab | None, remarks: list[str], progress: Progress) -> None:
        self._lab, self._remarks, self._progress = lab, remarks, progress
        self.rings: list[list[float]] = []
        self.pair_bits_per_s: float | None = None
        self.congestion_control = ""

    def measure(self) -> None:
        if self._lab is None or self._lab.num_hosts < 2:
            return
        self.congestion_control = self._lab.congestion_control(0)
        why_not = iperf.why_no_iperf()
        if why_not:
            self._remarks[:] = dict.fromkeys([*self._remarks, why_not])
            return
        self._progress("iperf3", 0.0 if not self.rings else 1.0)
        try:
            if self.pair_bits_per_s is None:
                self.pair_bits_per_s = iperf.measure(self._lab, [(0, 1)])[0]
            self.rings.append(iperf.measure_ring(self._lab))
        except LabError as error:
            self._remarks.append(str(error))

    @property
    def bits_per_s(self) -> float | None:
        """The mean over hosts and measurements; the nominal payload rate without iperf3; None if unknown."""
        if self.rings:
            return sum(sum(ring) / len(ring) for ring in self.rings) / len(self.rings)
        nominal = self._lab.nominal_rate if self._lab is not None else None
        return nominal * iperf.MTU_SHARE if nominal else None


def make_result(
    options: AllreduceOptions,
    args: Mapping[str, object],
    num_bytes: int,
    results: Mapping[str, Series],
    rates: LineRates,
    remarks: list[str],
) -> Json:
    """Return the result: a cell per strategy, and at the top the fastest one."""

    def cell(strategy: str) -> Json:
        ours = results[f"pliant {strategy}"]
        peers = {name: contest.beside(results[name], ours, num_bytes) for name in options.peers if name in results}
        numbers = {"ours": contest.measured(ours, num_bytes), "peers": peers}
        bound = _bound(options, num_bytes, ours, results, rates)
        return {"strategy": strategy, **numbers, "bound": bound, "ok": contest.is_ok(ours)}

    cells = {strategy: cell(strategy) for strategy in options.strategies}
    best = contest.fastest([f"pliant {strategy}" for strategy in cells], results)
    head = cells[best.removeprefix("pliant ")]
    busy = cast(Json, head["ours"]).get("cpu_busy")
    if options.lab is not None and isinstance(busy, float) and busy > BUSY:
        remarks.append(
            f"the processors are {busy:.0%} busy: they, not the links, limit this run; no verdict about the links"
        )
    extra: Json = {"cells": list(cells.values())} if options.strategy == "all" else {}
    if FUSED in results:
        fused = contest.beside(results[FUSED], results[best], num_bytes)
        speedup = fused["speedup"]
        extra["fused"] = {**fused, "one_by_one": 1 / speedup if isinstance(speedup, float) else None}
    ok = all(bool(each["ok"]) for each in cells.values())
    facts = {"num_tensors": len(options.sizes()), "num_bytes": num_bytes}
    top = {key: value for key, value in head.items() if key != "ok"}
    return contest.form("allreduce", args, ok, remarks, **top, **facts, **extra)


def _bound(
    options: AllreduceOptions, num_bytes: int, ours: Series, results: Mapping[str, Series], rates: LineRates
) -> Json:
    if options.lab is None:
        copies = results["copy"]
        median_s = copies.median_s
        moved = 2 * options.num_workers * num_bytes
        details: dict[str, object] = {"moved_bytes": moved, "bytes_per_s": moved / median_s if median_s else None}
        if median_s is not None:
            details = {**Summary.of(copies.seconds).to_json(), **details}
        return contest.bound("memory traffic 2*N*S, N processes copying at once", median_s, ours, details)
    num_hosts, bits_per_s = options.lab.num_hosts, rates.bits_per_s
    median_s = iperf.ring_bound_s(num_hosts, num_bytes, bits_per_s) if bits_per_s and num_hosts > 1 else None
    details = {
        "bits_per_s": bits_per_s,
        "ring_bits_per_s": rates.rings,
        "pair_bits_per_s": rates.pair_bits_per_s,
        "congestion_control": rates.congestion_control,
    }
    return contest.bound("line rate 2(N-1)/N*S/B, B by iperf3 in a ring", median_s, ours, details)


# --- in the worker processes ---

Values = npt.NDArray[np.float32]
SUM_TIMEOUT_S = 60.0


class Reducer(ABC):
    """One rank of an implementation: its tensors, its barrier, and its all-reduce."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.parallel, self.determinism = bool(task["parallel"]), task["determinism"]
        self.sizes: list[int] = task["sizes"]

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def reduce_all(self) -> None: ...

    @abstractmethod
    def write(self, index: int, values: Values) -> None: ...

    @abstractmethod
    def read(self, index: int) -> Values: ...

    def choose(self, options: Mapping[str, str]) -> None:  # noqa: B027 - most sides have no options
        """Apply the options of an entry."""

    def sent_bytes(self) -> int | None:
        """Return the bytes sent so far, by the implementation's own count, if it has one."""
        return None


class TorchReducer(Reducer):
    """Tensors of torch."""

    tensors: list[torch.Tensor]

    def write(self, index: int, values: Values) -> None:
        import torch

        self.tensors[index].copy_(torch.from_numpy(values))

    def read(self, index: int) -> Values:
        return cast(Values, self.tensors[index].float().numpy())


class GlooReducer(TorchReducer):
    """torch.distributed on gloo, in its default configuration."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        import torch

        super().__init__(task)
        self.tensors = [torch.zeros(size, dtype=getattr(torch, task["dtype"])) for size in self.sizes]

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def reduce_all(self) -> None:
        import torch.distributed as dist

        if self.parallel:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
            for work in works:
                work.wait()
        else:
            for tensor in self.tensors:
                dist.all_reduce(tensor)


class MemoryCopy(GlooReducer):
    """No all-reduce, but the memory traffic that one needs at least: each input is read once, each result written once."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__(task)
        self._pairs = [(tensor.numpy(), np.zeros_like(tensor.numpy())) for tensor in self.tensors]
        for source, target in self._pairs:  # so that all pages are really there
            source[...] = 0
            target[...] = 0

    def reduce_all(self) -> None:
        for source, target in self._pairs:
            np.copyto(target, source)


class MpiReducer(Reducer):
    """Open MPI through mpi4py, in place, on NumPy arrays."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        from mpi4py import MPI

        super().__init__(task)
        self._comm, self._in_place, self._waitall = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.Request.Waitall
        self._arrays = [np.zeros(size, dtype=task["dtype"]) for size in self.sizes]

    def barrier(self) -> None:
        self._comm.Barrier()

    def reduce_all(self) -> None:
        if self.parallel:
            self._waitall([self._comm.Iallreduce(self._in_place, array) for array in self._arrays])
        else:
            for array in self._arrays:
                self._comm.Allreduce(self._in_place, array)

    def write(self, index: int, values: Values) -> None:
        self._arrays[index][...] = values

    def read(self, index: int) -> Values:
        return cast(Values, self._arrays[index].astype(np.float32))


class PliantReducer(TorchReducer):
    """This package's engine, on tensors that live in its shared memory."""

    def __init__(self, task: Mapping[str, Any], engine: Any) -> None:
        import torch

        super().__init__(task)
        self._engine, self._strategy = engine, ""
        self.tensors = [engine.empty((size,), getattr(torch, task["dtype"])) for size in self.sizes]
        self._names = [f"gradient.{index}" for index in range(len(self.sizes))]

    def choose(self, options: Mapping[str, str]) -> None:
        strategy = options.get("strategy", "")
        if strategy and strategy != self._strategy:
            self._engine.set_strategy(strategy)
            self._strategy = strategy

    def barrier(self) -> None:
        self._engine.barrier("bench")

    def reduce_all(self) -> None:
        handles = []
        for name, tensor in zip(self._names, self.tensors, strict=True):
            handle = self._engine.all_reduce(name, tensor, op="sum", determinism=self.determinism)
            if self.parallel:
                handles.append(handle)
            else:
                handle.wait(timeout_s=SUM_TIMEOUT_S)
        for handle in handles:
            handle.wait(timeout_s=SUM_TIMEOUT_S)

    def sent_bytes(self) -> int | None:
        return int(sum(self._engine.counters().egress_bytes.values()))


def preload() -> None:
    """Import what every side needs, before ranks are forked."""
    import torch.distributed as dist

    from pliant.elastic.member import Session

    assert (dist, Session) is not None, "loaded"


@contextlib.contextmanager
def opened(task: Mapping[str, object], rank: int) -> Iterator[Opened]:
    """Open the task's side; the program of `pliant_repro.worker`."""
    values = cast("Mapping[str, Any]", task)
    num_workers = values["num_workers"]
    make: Callable[[Mapping[str, Any]], Reducer]
    with contextlib.ExitStack() as stack:
        if values["side"] == "openmpi":
            make = MpiReducer
        else:
            import torch

            torch.set_num_threads(1)
            if values["side"] == "pliant":
                from pliant.elastic.member import Session

                engine = stack.enter_context(Session.join()).engine
                make = lambda values: PliantReducer(values, engine)  # noqa: E731
            else:
                stack.enter_context(join_group(f"file://{values['store']}", rank, num_workers, SUM_TIMEOUT_S))
                make = MemoryCopy if values["side"] == "copy" else GlooReducer
        side = make(values)
        clear(side)
        side.barrier()
        yield {}, lambda command: carry_out(side, rank, num_workers, command)


def carry_out(side: Reducer, rank: int, num_workers: int, command: Command) -> dict[str, object]:
    """Carry out one command of the controller, and return the answer."""
    side.choose(cast("Mapping[str, str]", command["options"]))
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
    """Return small whole numbers, whose sums are exact in every type, different at neighbouring places and tensors."""
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
    wrong = (side.read(index) != pattern(index, size, total) for index, size in enumerate(side.sizes))
    found = sum(int(np.count_nonzero(each)) for each in wrong)
    clear(side)
    return found


def clear(side: Reducer) -> None:
    """Write zeros, which stay zeros however often they are summed: no overflow, and all pages are really there."""
    for index, size in enumerate(side.sizes):
        side.write(index, np.zeros(size, np.float32))
