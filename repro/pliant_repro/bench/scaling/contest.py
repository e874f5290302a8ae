"""The scaling contest: a paced net on ever more hosts of a lab, summed by ours, by DDP on gloo and by Open MPI.

At each number of hosts all sides live at once and take turns, so that what disturbs one disturbs all. Ours is measured with
KungFu's strategy for many hosts, with its own choice (AUTO), and with priorities; DDP with its default buckets, scaled like
the model, and with the best of several sizes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from pliant.errors import ConfigError, LabError, LaunchError
from pliant_repro.bench import bounds as links
from pliant_repro.bench import contenders, processors
from pliant_repro.bench.contenders import Ground
from pliant_repro.bench.contest import Job, Starter, ToldJob
from pliant_repro.bench.priority.contest import step_times_s
from pliant_repro.bench.scaling import mpi, published
from pliant_repro.bench.scaling.worker import LEAD, Task
from pliant_repro.bench.stats import quantile
from pliant_repro.lab.hosts import INTERFACE, NETWORK, Lab
from pliant_repro.lab.rates import format_rate

WORKER = "pliant_repro.bench.scaling.worker"
MEETING_PORT = 29500
JUMBO = 9000
"""Bytes of a packet, so that headers matter as little as at the full rate."""
HEADERS = 66
"""Of a packet: Ethernet, IP, and TCP with timestamps."""
DDP_CAPS_MB = (25.0, 10.0, 5.0)
"""Bucket sizes of DDP for the full model; the first is its default."""
PATIENCE_S = 240.0
CPU_STEP_S, CPU_NODE_S = 0.06, 0.003
"""About what a rank of ours computes in a step, and more for each rank there is: messages."""
SLOW = 0.5
"""Below this speed a step takes so long that not everything is measured by default."""
MOST_BUSY = 0.6
"""Of the cores' time; beyond it, ranks wait for each other's processors and not for the network. Time goes slower then."""
QUEUE_BYTES = 16_000_000
"""How much may wait at a host's link: more than the send buffers of 31 connections hold, so that nothing is dropped."""
RTO_MIN = "5s"
"""TCP's least patience. Links are slower here than the published ones by two orders of magnitude, and so are their queues;
with the usual 200 ms it would take what waits in them for lost, and send it again."""
STRATEGIES = {"tree": "MULTI_BINARY_TREE_STAR", "auto": "AUTO", "priority": "AUTO"}
"""Of our sides."""
SIDES = (*STRATEGIES, "ddp", "openmpi")

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """One sweep over numbers of hosts.

    Raises (when made):
        ConfigError: a value that cannot be, with those that can.
    """

    model: str = "resnet50"
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    sides: tuple[str, ...] = SIDES
    repeat: int = 2
    iters: int = 2
    warmup: int = 3
    speed: float = 0.0
    """Compute and links so many times as fast as they should be; 0: as fast as the cores can carry, at most 1."""

    everywhere: bool = False
    """All sides also where time is slow."""

    def __post_init__(self) -> None:
        published.full_profile(self.model)
        for side in self.sides:
            if side not in SIDES:
                raise ConfigError(f"side {side!r}: use some of {', '.join(SIDES)}")
        if not self.nodes or not all(1 <= each <= 64 for each in self.nodes):
            raise ConfigError(f"nodes={self.nodes}: use numbers from 1 to 64")
        if self.repeat < 1 or self.iters < 2 or self.warmup < 2 or self.speed < 0:
            raise ConfigError(
                f"{self}: use 1 repeat, 2 iterations, 2 steps of warmup, or more, and a speed of 0 or more"
            )

    def speed_at(self, nodes: int) -> float:
        """How fast everything is on so many hosts, which share this machine's cores."""
        cpu_s = CPU_STEP_S + CPU_NODE_S * nodes
        step_s = published.full_profile(self.model).compute_s
        return self.speed or min(1.0, MOST_BUSY * step_s * len(os.sched_getaffinity(0)) / (nodes * cpu_s))

    def sides_at(self, nodes: int) -> tuple[str, ...]:
        """Who takes part: where time is slow only the best of ours and DDP, unless everyone is wanted everywhere."""
        if self.everywhere or self.speed_at(nodes) >= SLOW:
            return self.sides
        ours = "priority" if "priority" in self.sides else "auto"
        return tuple(side for side in self.sides if side in (ours, "ddp"))

    def turns_at(self, nodes: int) -> tuple[int, int]:
        """How often everyone gets a turn on so many hosts, and for how many timed steps: one turn where time is slow."""
        return (1, self.iters + 1) if self.speed_at(nodes) < SLOW else (self.repeat, self.iters)

    @property
    def cap_mb(self) -> float:
        """DDP's default bucket, as much smaller as the model is."""
        return DDP_CAPS_MB[0] / published.KAPPA[self.model]


@dataclass(slots=True)
class Run:
    """What one side did on one number of hosts."""

    nodes: int
    side: str
    speed: float = 1.0
    """Seconds of the published machine per second here."""
    cap_mb: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each step, turn by turn."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of one rank in a step, by its process's clock; one per turn."""
    busy: list[float] = field(default_factory=list)
    """The share of the processors' time that was used, by whomever; one per turn."""
    sent: list[float] = field(default_factory=list)
    """Bytes that the host which sent the most put on its link in a step; one per turn."""
    same_bits: bool = False
    """Whether all ranks ended with the same parameters."""
    failure: str = ""

    @property
    def seconds(self) -> list[float]:
        return [second for each in self.rounds for second in each]

    @property
    def median_s(self) -> float | None:
        return quantile(self.seconds, 0.5) if self.rounds and not self.failure else None


@dataclass(slots=True)
class Sweep:
    """What came out."""

    options: ScalingOptions
    runs: list[Run] = field(default_factory=list)
    capacity: dict[int, float] = field(default_factory=dict)
    """Bits per second that a host can send, measured with all sending at once where there are few, by nodes."""
    probed: dict[int, dict[float, float]] = field(default_factory=dict)
    """The step of DDP by bucket size in MiB, by nodes."""
    remarks: list[str] = field(default_factory=list)

    def find(self, nodes: int, side: str) -> Run | None:
        return next((run for run in self.runs if run.nodes == nodes and run.side == side), None)


def run(
    options: ScalingOptions,
    progress: Progress = lambda text: None,
    finished: Callable[[Sweep, int], None] = lambda sweep, nodes: None,
) -> Sweep:
    """Hold the contests. Everything started is gone afterwards.

    `finished` is told after each number of hosts, so that what was measured is not lost if the rest never ends.

    Raises:
        LabError: no lab can be made here.
    """
    sweep = Sweep(options)
    for nodes in options.nodes:
        with contextlib.ExitStack() as cleanup:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
            bits_per_s = published.lab_bits_per_s(options.model, options.speed_at(nodes))
            lab = cleanup.enter_context(Lab(num_hosts=nodes, rate=format_rate(bits_per_s), mtu=JUMBO).up())
            for host in range(nodes):
                _deepen(lab, host, bits_per_s)
            _at_size(Stage(options, lab, folder), sweep, cleanup, progress)
        finished(sweep, nodes)
    sweep.remarks = list(dict.fromkeys(sweep.remarks))
    return sweep


def _at_size(stage: Stage, sweep: Sweep, cleanup: contextlib.ExitStack, progress: Progress) -> None:
    options, nodes = stage.options, stage.lab.num_hosts
    sweep.capacity[nodes] = _capacity(stage.lab, sweep)
    sides = (
        ["plain"]
        if nodes == 1
        else [each for each in options.sides_at(nodes) if _takes_part(each, nodes, sweep.remarks)]
    )
    progress(f"{options.model}, {nodes} hosts: starting {', '.join(sides)}")
    jobs = {side: cleanup.enter_context(stage.job(side)) for side in sides}
    speed = options.speed_at(nodes)
    runs = [Run(nodes, side, speed, options.cap_mb if side == "ddp" else None) for side in sides]
    for job in jobs.values():
        job.start()
    for job in jobs.values():  # one after the other: their ranks meet now, which takes the processors for a while
        with contextlib.suppress(LaunchError):  # the job keeps its failure, and gives it at its first turn
            job.ready(PATIENCE_S)
    if "ddp" in jobs:
        best = _probe(jobs["ddp"], sweep, nodes, progress)
        if best is not None and best != options.cap_mb:
            runs.append(Run(nodes, "ddp-best", speed, best))
            jobs["ddp-best"] = jobs["ddp"]
    hold(stage, runs, jobs, progress)
    sweep.runs += runs


def _deepen(lab: Lab, host: int, bits_per_s: int) -> None:
    """Let more wait at the host's link, and longer, than a lab does by itself, which has few connections in mind."""
    burst = max(2 * JUMBO, round(bits_per_s / 8 * 0.010))
    for command in (
        f"tc qdisc replace dev {INTERFACE} root tbf rate {bits_per_s}bit burst {burst} limit {QUEUE_BYTES}",
        f"ip route replace {NETWORK} dev {INTERFACE} proto kernel scope link src {lab.addresses[host]} rto_min {RTO_MIN}",
    ):
        done = lab.run(host, command.split())
        if done.returncode != 0:
            raise LabError(f"`{command}` failed: {done.stderr.strip()}")


def _takes_part(side: str, nodes: int, remarks: list[str]) -> bool:
    why_not = ""
    if side == "openmpi":
        why_not = mpi.why_not() or (mpi.WHY_NO_MORE if nodes > mpi.MOST_NODES else "")
        remarks += [why_not] if why_not else []
    return not why_not


def _capacity(lab: Lab, sweep: Sweep) -> float:
    """What a host can send: measured with all sending at once where there are few hosts, else what the headers leave."""
    nominal = (lab.nominal_rate or 0) * (1 - HEADERS / JUMBO)
    if not 2 <= lab.num_hosts <= 8 or links.why_no_iperf():
        return nominal
    try:
        return links.measure_ring(lab).bits_per_s
    except LabError as error:
        sweep.remarks.append(str(error))
        return nominal


def hold(stage: Stage, runs: Sequence[Run], jobs: Mapping[str, Job], progress: Progress) -> None:
    """Let everyone warm up and take turns. Never raises for what a side does wrong: it is out then."""
    options = stage.options
    repeat, iterations = options.turns_at(stage.lab.num_hosts)
    for turn in range(repeat + 2):
        for each in runs:
            if each.failure:
                continue
            progress(f"{options.model}, {each.nodes} hosts, {each.side}: {_turn(turn, repeat)}")
            job = jobs[each.side]
            try:
                if turn == 0:
                    ask = {"do": "run", "cap_mb": each.cap_mb, "iterations": options.warmup, "lead": 0}
                    job.ask(ask, PATIENCE_S)
                elif turn <= repeat:
                    take_turn(each, job, stage.lab, iterations)
                elif each.side != "ddp-best":  # whose ranks answer for another model
                    hashes = {str(answer["hash"]) for answer in job.ask({"do": "hash"}, PATIENCE_S)}
                    each.same_bits = len(hashes) == 1
            except LaunchError as error:
                each.failure = str(error)


def _turn(number: int, repeat: int) -> str:
    return "warming up" if number == 0 else f"turn {number} of {repeat}" if number <= repeat else "comparing bits"


def take_turn(each: Run, job: Job, lab: Lab, iterations: int) -> None:
    """One window of one side, into its record."""
    sent, busy = [lab.tx_bytes(host) for host in range(lab.num_hosts)], processors.times()
    answers = job.ask({"do": "run", "cap_mb": each.cap_mb, "iterations": iterations}, PATIENCE_S)
    each.busy.append(processors.busy_share(busy, processors.times()))
    steps = iterations + LEAD
    each.sent.append(max(lab.tx_bytes(host) - before for host, before in enumerate(sent)) / steps)
    each.rounds.append(step_times_s([cast("list[float]", answer["marks_s"]) for answer in answers], one_clock=True))
    each.cpu_s.append(sum(cast(float, answer["cpu_s"]) for answer in answers) / len(answers))


def _probe(job: Job, sweep: Sweep, nodes: int, progress: Progress) -> float | None:
    """A few steps of DDP with each bucket size; the best size. On the largest number of hosts only."""
    options = sweep.options
    if nodes < max(options.nodes):
        return None
    found: dict[float, float] = {}
    for size in DDP_CAPS_MB:
        cap_mb = size / published.KAPPA[options.model]
        progress(f"{options.model}, {nodes} hosts: ddp with buckets of {size:g} MiB in full size")
        try:
            answers = job.ask({"do": "run", "cap_mb": cap_mb, "iterations": 2, "lead": 1}, PATIENCE_S)
        except LaunchError:
            break
        marks = [cast("list[float]", answer["marks_s"]) for answer in answers]
        found[cap_mb] = quantile(step_times_s(marks, one_clock=True), 0.5)
    sweep.probed[nodes] = found
    return min(found, key=lambda cap_mb: found[cap_mb]) if found else None


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the ranks of all sides run: one on each host of a lab."""

    options: ScalingOptions
    lab: Lab
    folder: Path

    def job(self, side: str) -> ToldJob:
        """The processes of one side, not started yet."""
        task, sockets = self._task(side)
        control = self.folder / f"{side}.sock"
        argv = [sys.executable, "-m", WORKER, str(control)]
        if side == "openmpi":
            starter = self._mpirun(argv)
        else:
            starter = contenders.launcher([*argv, *self.lab.namespaces], sockets)
        return ToldJob(side, self.lab.num_hosts, [starter], control, {"task": task.to_json()})

    def _task(self, side: str) -> tuple[Task, Sequence[socket.socket]]:
        environs: Sequence[dict[str, str]] = ()
        sockets: Sequence[socket.socket] = ()
        if side in STRATEGIES:
            ground = Ground(num_workers=self.lab.num_hosts, sizes=(), folder=self.folder, lab=self.lab)
            environs, sockets = contenders.identities(ground, STRATEGIES[side])
        task = Task(
            kind="pliant" if side in STRATEGIES else side,
            model=self.options.model,
            num_workers=self.lab.num_hosts,
            speed=self.options.speed_at(self.lab.num_hosts),
            sync="priority" if side == "priority" else "fifo",
            cap_mb=self.options.cap_mb,
            meeting=f"tcp://{self.lab.addresses[0]}:{MEETING_PORT}",
            environs=tuple(environs),
        )
        return task, sockets

    def _mpirun(self, argv: Sequence[str]) -> Starter:
        def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
            agent = mpi.write_agent(self.lab, self.folder / "enter")
            return contenders.launcher(mpi.command(self.lab, agent, argv))(output)

        return start
