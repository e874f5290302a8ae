"""`pliant bench allreduce`: ours beside gloo and Open MPI, and beside what the hardware allows, in one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.comm.topology import STRATEGIES, Topology, topologies
from pliant.errors import ConfigError, LabError, LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench import bounds, contenders, report
from pliant_repro.bench.contenders import Ground
from pliant_repro.bench.contest import Entry, Job, Rules, Series, hold
from pliant_repro.bench.stats import Summary, quantile
from pliant_repro.bench.worker import DTYPES
from pliant_repro.lab.hosts import Lab
from pliant_repro.profiles import tensor_sizes

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
_BUSY = 0.85
_FUSED = "pliant-fused"
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllreduceOptions:
    """What `pliant bench allreduce` was asked for.

    Raises (when made):
        ConfigError: a value that cannot be, with those that can.
    """

    num_workers: int = 4
    model: str = "resnet50"
    """A name of `bench.models` or a file."""
    mode: str = "par"
    """`seq`: one tensor after the other; `par`: all submitted, then all awaited."""
    fuse: bool = False
    """All tensors as one."""
    strategy: str = "AUTO"
    """A name, or `all` for a sweep."""
    peers: tuple[str, ...] = contenders.PEERS
    lab: Lab | None = None
    """Where to run; None: all on this host."""
    rules: Rules = field(default_factory=Rules)
    dtype: str = "float32"
    determinism: str = "exact"
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        _choose("--mode", self.mode, ("seq", "par"))
        _choose("--dtype", self.dtype, DTYPES)
        _choose("--determinism", self.determinism, ("exact", "fast"))
        _choose("--strategy", self.strategy, (*STRATEGIES, "all"))
        for peer in self.peers:
            _choose("--peers", peer, contenders.PEERS)
        if not 1 <= self.num_workers <= 256:
            raise ConfigError(f"-np {self.num_workers}: use 1 to 256")
        if self.lab is not None and self.num_workers % self.lab.num_hosts:
            raise ConfigError(
                f"-np {self.num_workers} does not spread evenly over hosts={self.lab.num_hosts}: use a multiple, or leave -np out"
            )
        for flag, value, least in (
            ("--repeat", self.rules.rounds, 1),
            ("--iterations", self.rules.iterations, 1),
            ("--warmup", self.rules.warmup, 0),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: use {least} or more")

    @property
    def strategies(self) -> tuple[str, ...]:
        return STRATEGIES if self.strategy == "all" else (self.strategy,)

    @property
    def compares_fused(self) -> bool:
        """Whether our own time for one fused tensor is measured beside that for all of them, one by one."""
        return not self.fuse and self.strategy != "all" and self.lab is None

    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor that is reduced."""
        sizes = tensor_sizes(self.model)
        return (sum(sizes),) if self.fuse else tuple(sizes)


def _choose(flag: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value!r}: use one of {', '.join(known)}")


def parse_peers(text: str) -> tuple[str, ...]:
    """The comma list of `--peers`; `none` or nothing for no peer."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return () if names == ["none"] else tuple(dict.fromkeys(names))


def parse_lab(text: str) -> Lab:
    """`hosts=4,rate=1gbit[,rx_rate=1gbit]` as a lab that is not up yet.

    Raises:
        ConfigError: another form.
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
    """Every topology that the chosen strategies use here: (strategy, number, topology)."""
    num_hosts = options.lab.num_hosts if options.lab is not None else 1
    hosts = [f"h{rank * num_hosts // options.num_workers}" for rank in range(options.num_workers)]
    for strategy in options.strategies:
        for number, topology in enumerate(topologies(strategy, hosts)):
            yield strategy, number, topology


def run(options: AllreduceOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold the contest; the result in the one form of all benches. Everything started is gone afterwards.

    Raises:
        ConfigError: the model file is damaged, or the machine's memory is too small for it.
        LabError: no lab can be made here.
    """
    sizes = options.sizes()
    num_bytes = sum(sizes) * _ITEM_BYTES[options.dtype]
    _check_memory(options, num_bytes)
    remarks: list[str] = []
    with contextlib.ExitStack() as cleanup:
        if options.lab is not None:
            cleanup.enter_context(options.lab.up())
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        ground = Ground(
            num_workers=options.num_workers,
            sizes=sizes,
            folder=folder,
            parallel=options.mode == "par",
            dtype=options.dtype,
            determinism="exact" if options.determinism == "exact" else "fast",
            lab=options.lab,
        )
        entries = _enter(options, ground, cleanup, remarks, progress)
        rates = _LineRates(options.lab, remarks, progress)
        rates.measure()
        count = None if options.lab is None else functools.partial(_all_tx_bytes, options.lab)
        results = hold(entries, options.rules, count_link_bytes=count, progress=progress)
        rates.measure()
    remarks += report.failures(results)
    return _result(options, args, num_bytes, results, rates, remarks)


def _check_memory(options: AllreduceOptions, num_bytes: int) -> None:
    copies = 1 + options.compares_fused + len(options.peers) + (0 if options.lab is not None else 2)
    needed = copies * options.num_workers * num_bytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), needed)
    if needed > free:
        raise ConfigError(
            f"{options.num_workers} workers x {copies} contenders x {num_bytes / 1e6:.0f} MB need {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: use fewer --peers, a smaller -np or another --model"
        )


def _all_tx_bytes(lab: Lab) -> int:
    return sum(lab.tx_bytes(host) for host in range(lab.num_hosts))


def _enter(
    options: AllreduceOptions, ground: Ground, cleanup: contextlib.ExitStack, remarks: list[str], progress: Progress
) -> list[Entry]:
    """Start everyone who takes part, all at once, and wait for them."""
    jobs = [contenders.pliant(ground, options.strategies[0])]
    if options.compares_fused:
        whole = dataclasses.replace(ground, sizes=(sum(ground.sizes),))
        jobs.append(contenders.pliant(whole, options.strategies[0], name=_FUSED))
    if "gloo" in options.peers:
        jobs.append(contenders.gloo(ground))
    if options.lab is None:
        jobs.append(contenders.memory(ground))
    trials: list[Job] = []
    if "openmpi" in options.peers:
        why_not = contenders.why_no_openmpi(ground)
        if why_not:
            remarks.append(why_not)
        else:
            trials = [contenders.openmpi(ground, yielding=True), contenders.openmpi(ground, yielding=False)]
    for job in (*jobs, *trials):
        cleanup.enter_context(job).start()
    for number, job in enumerate((*jobs, *trials)):
        progress(f"starting {job.name}", number / (len(jobs) + len(trials)))
        with contextlib.suppress(LaunchError):  # the job keeps its failure, and gives it at its first turn
            job.ready(options.start_timeout_s)
    ours = jobs[0]
    entries = [Entry(_label(strategy), ours, {"strategy": strategy}) for strategy in options.strategies]
    entries += [Entry(job.name, job, sums=job.name != "copy") for job in jobs[1:]]
    if trials:
        entries.append(Entry("openmpi", _better(trials, options.rules, remarks, progress)))
    return entries


def _label(strategy: str) -> str:
    return f"pliant {strategy}"


def _better(trials: Sequence[Job], rules: Rules, remarks: list[str], progress: Progress) -> Job:
    """The setting of Open MPI that is faster here; the other is closed. A fair peer gets its best."""
    brief = Rules(rounds=2, iterations=2, warmup=1, timeout_s=rules.timeout_s)
    tried = hold(
        [Entry(job.name, job) for job in trials], brief, progress=lambda what, _: progress(f"trying {what}", 0.0)
    )
    best = report.fastest([job.name for job in trials], tried)
    for job in trials:
        if job.name != best:
            job.close()
    shown = ", ".join(
        f"{name} {quantile(series.seconds, 0.5) * 1e3:.1f} ms" if series.rounds else f"{name} failed"
        for name, series in tried.items()
    )
    remarks.append(f"openmpi: the faster of mpi_yield_when_idle=1 and its defaults is used, here {best} ({shown})")
    return next(job for job in trials if job.name == best)


class _LineRates:
    """The rates that iperf3 reaches in the lab, before and after the contest; nothing without a lab."""

    def __init__(self, lab: Lab | None, remarks: list[str], progress: Progress) -> None:
        self._lab, self._remarks, self._progress = lab, remarks, progress
        self.rings: list[bounds.LineRate] = []
        self.pair_bits_per_s: float | None = None
        self.congestion_control = ""

    def measure(self) -> None:
        if self._lab is None or self._lab.num_hosts < 2:
            return
        self.congestion_control = self._lab.congestion_control(0)
        why_not = bounds.why_no_iperf()
        if why_not:
            self._remarks[:] = dict.fromkeys([*self._remarks, why_not])
            return
        self._progress("iperf3", 0.0 if not self.rings else 1.0)
        try:
            if self.pair_bits_per_s is None:
                self.pair_bits_per_s = bounds.measure(self._lab, [(0, 1)])[0]
            self.rings.append(bounds.measure_ring(self._lab))
        except LabError as error:
            self._remarks.append(str(error))

    @property
    def bits_per_s(self) -> float | None:
        """The mean over hosts and measurements; the nominal payload rate where iperf3 is missing; None: unknown."""
        if self.rings:
            return sum(rate.bits_per_s for rate in self.rings) / len(self.rings)
        nominal = self._lab.nominal_rate if self._lab is not None else None
        return nominal * bounds.MTU_SHARE if nominal else None


def _result(
    options: AllreduceOptions,
    args: Mapping[str, object],
    num_bytes: int,
    results: Mapping[str, Series],
    rates: _LineRates,
    remarks: list[str],
) -> Json:
    def cell(strategy: str) -> Json:
        ours = results[_label(strategy)]
        peers = {name: report.beside(results[name], ours, num_bytes) for name in options.peers if name in results}
        return {
            "strategy": strategy,
            "ours": report.measured(ours, num_bytes),
            "peers": peers,
            "bound": _bound(options, num_bytes, ours, results, rates),
            "ok": report.is_ok(ours),
        }

    best = report.fastest([_label(strategy) for strategy in options.strategies], results).removeprefix("pliant ")
    cells = [cell(strategy) for strategy in options.strategies]
    head = next(each for each in cells if each["strategy"] == best)
    ours = head["ours"]
    assert isinstance(ours, dict), "made by measured()"
    busy = ours.get("cpu_busy")
    if options.lab is not None and isinstance(busy, float) and busy > _BUSY:
        remarks.append(
            f"the processors are {busy:.0%} busy: they, not the links, limit this run; no verdict about the links"
        )
    result: Json = {
        "bench": "allreduce",
        "args": dict(args),
        **head,
        "ok": all(bool(each["ok"]) for each in cells),
        "num_tensors": len(options.sizes()),
        "num_bytes": num_bytes,
        "machine": machine(),
        "remarks": remarks,
    }
    if options.strategy == "all":
        result["cells"] = cells
    if _FUSED in results:
        fused = report.beside(results[_FUSED], results[_label(best)], num_bytes)
        speedup = fused["speedup"]
        result["fused"] = {**fused, "one_by_one": 1 / speedup if isinstance(speedup, float) else None}
    return result


def _bound(
    options: AllreduceOptions, num_bytes: int, ours: Series, results: Mapping[str, Series], rates: _LineRates
) -> Json:
    if options.lab is None:
        copies = results["copy"]
        median_s = Summary.of(copies.seconds).median if copies.rounds and not copies.failure else None
        moved = 2 * options.num_workers * num_bytes
        details: dict[str, object] = {"moved_bytes": moved, "bytes_per_s": moved / median_s if median_s else None}
        if median_s is not None:
            details = {**Summary.of(copies.seconds).to_json(), **details}
        return report.bound("memory traffic 2*N*S, N processes copying at once", median_s, ours, details)
    num_hosts, bits_per_s = options.lab.num_hosts, rates.bits_per_s
    median_s = bounds.ring_bound_s(num_hosts, num_bytes, bits_per_s) if bits_per_s and num_hosts > 1 else None
    details = {
        "bits_per_s": bits_per_s,
        "ring_bits_per_s": [list(rate.ring) for rate in rates.rings],
        "pair_bits_per_s": rates.pair_bits_per_s,
        "congestion_control": rates.congestion_control,
    }
    return report.bound("line rate 2(N-1)/N*S/B, B by iperf3 in a ring", median_s, ours, details)
