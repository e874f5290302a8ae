"""The scaling contest of KungFu's figure 9: a paced net on ever more hosts of a lab, summed by ours, by DDP on gloo and by Open MPI.

At each number of hosts all contenders live at once and take turns. Ours is measured with KungFu's strategy for many hosts,
with its own choice (AUTO), and with priorities; DDP with its default buckets, scaled like the model, and with the best of
several sizes.

The artifact gives two throughputs at 32 VMs with one K80 each (ResNet-50, batches of 32): 43.4 images per second and GPU for
KungFu, 12.7 for Horovod 0.16.1. It does not say what the VMs' network carries, so that is derived. A K80 trains ResNet-50 at
about 50 images per second, so a step computes for C = 0.64 s. KungFu's step lasted 0.737 s, which with a barrier at its end
(P_fifo of `pliant_repro.scaling_model`) leaves room for at most T = 0.52 s of traffic. The contest has T/C = 0.82: the most
traffic that the published figure allows, and so the most that any way of sending can matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.errors import LabError, LaunchError
from pliant_repro import contest, profiles
from pliant_repro.bench.priority import JUMBO, step_times_s
from pliant_repro.bench.ssh_hosts import BASE_PORT
from pliant_repro.bench.train import PROGRAM, TrainingTask
from pliant_repro.contest import Contender, Placement, Timings, quantile
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import INTERFACE, NETWORK, Lab
from pliant_repro.lab.rates import format_rate
from pliant_repro.profiles import LayerShape, Profile
from pliant_repro.scaling_model import Layer, bounds

Say = Callable[[str], None]


# --- what the artifact published ---

BATCH = 32
PUBLISHED_NODES = 32
KUNGFU = {"mean": 43.429020, "spread": 1.212320}
"""Images per second and GPU, and 1.96 times their standard deviation."""
HOROVOD = {"mean": 12.701925, "spread": 0.708324}
K80_PER_S = {"resnet50": 50.0, "mobilenet-v2": 100.0}
"""Images per second of one K80. MobileNetV2's is assumed: the artifact has none, and depthwise convolutions suit a K80 badly,
so a fourteenth of the multiply-adds is not taken to be more than twice as fast."""
STAR_NODES, STAR_PER_S = 8, 31.4
"""Figure 5, before any interference."""
NAMES = {"resnet50": "ResNet50", "mobilenet-v2": "MobileNetV2"}
"""The names in the artifact's lines."""
KAPPA = {"resnet50": 30.0, "mobilenet-v2": 30.0}
"""Sizes and rates are divided by this, so that two cores can carry what 32 nodes send."""


def full_profile(model: str) -> Profile:
    """Return the model at its full size, as fast as on a K80."""
    return dataclasses.replace(profiles.profile(model, batch=BATCH), compute_s=BATCH / K80_PER_S[model])


def lab_profile(model: str, speed: float = 1.0) -> Profile:
    """Return the model as the lab can carry it: fewer parameters, blocks instead of layers, and `speed` times as fast."""
    found = profiles.scaled(full_profile(model), KAPPA[model])
    blocks: dict[str, LayerShape] = {}
    # One block for all layers whose names begin alike: fewer calls for 32 nodes on two cores.
    for layer in found.layers:
        name = layer.name.partition(".")[0]
        so_far = blocks.get(name, LayerShape(name, (), 0))
        blocks[name] = LayerShape(name, so_far.tensors + layer.tensors, so_far.macs + layer.macs)
    return dataclasses.replace(found, layers=tuple(blocks.values()), compute_s=found.compute_s / speed)


def published_bytes_per_s() -> float:
    """Return what a VM's network must at least have carried for KungFu's ResNet-50: see above."""
    layers = profiles.layers_of(full_profile("resnet50"))
    num_bytes = sum(layer.num_bytes for layer in layers)
    return 2 * (PUBLISHED_NODES - 1) / PUBLISHED_NODES * num_bytes / most_traffic_s(layers, BATCH / KUNGFU["mean"])


def star_bytes_per_s() -> float:
    """Return what the root of figure 5's star must at least have sent."""
    layers = profiles.layers_of(full_profile("resnet50"))
    sent = (STAR_NODES - 1) * sum(layer.num_bytes for layer in layers)
    return sent / most_traffic_s(layers, BATCH / STAR_PER_S)


def most_traffic_s(layers: Sequence[Layer], step_s: float) -> float:
    """Return T: the most traffic that a step of this length can hold, sent as it comes, with a barrier at its end."""
    num_bytes = sum(layer.num_bytes for layer in layers)

    def step_with(traffic_s: float) -> float:
        return bounds(layers, 2, num_bytes / traffic_s).p_fifo_s  # two nodes send every byte once

    low, high = 1e-9, step_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if step_with(middle) <= step_s else (low, middle)
    return low


def lab_bits_per_s(model: str, speed: float = 1.0) -> int:
    """Return what each host of the lab may send: the published network over the scale of the sizes."""
    return round(published_bytes_per_s() * 8 / KAPPA[model] * speed)


# --- options and results ---

HEADERS = 66
"""Bytes of a packet's headers: Ethernet, IP, and TCP with timestamps."""
DDP_CAPS_MB = (25.0, 10.0, 5.0)
"""Bucket sizes of DDP for the full model; the first is its default."""
PATIENCE_S = 240.0
LEAD = 1
CPU_STEP_S, CPU_NODE_S = 0.06, 0.003
"""About what a rank of ours computes in a step, and more for each rank there is: messages."""
SLOW = 0.5
"""Below this speed a step takes so long that not everything is measured by default."""
MOST_BUSY = 0.6
"""Above this share of the cores' time, ranks would wait for processors and not for the network; then time goes slower."""
QUEUE_BYTES = 16_000_000
"""Bytes that may wait at a host's link: more than the send buffers of 31 connections hold, so that nothing is dropped."""
RTO_MIN = "5s"
"""TCP's least retransmission timeout. Links are slower here than the published ones by two orders of magnitude, and so are
their queues; with the usual 200 ms, TCP would take what waits in them for lost, and send it again."""
STRATEGIES = {"tree": "MULTI_BINARY_TREE_STAR", "auto": "AUTO", "priority": "AUTO"}
"""Strategies of our contenders."""
SIDES = (*STRATEGIES, "ddp", "openmpi")
MOST_MPI_NODES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """Options of one sweep over numbers of hosts."""

    model: str = "resnet50"
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    sides: tuple[str, ...] = SIDES
    repeat: int = 2
    iters: int = 2
    warmup: int = 3
    speed: float = 0.0
    """How much faster than they should be compute and links are; 0 means as fast as the cores can carry, at most 1."""
    everywhere: bool = False
    """Whether all sides take part also where time is slow."""

    def speed_at(self, nodes: int) -> float:
        """Return how fast everything is on so many hosts, which share this machine's cores."""
        cpu_s = CPU_STEP_S + CPU_NODE_S * nodes
        step_s = full_profile(self.model).compute_s
        return self.speed or min(1.0, MOST_BUSY * step_s * len(os.sched_getaffinity(0)) / (nodes * cpu_s))

    def sides_at(self, nodes: int) -> tuple[str, ...]:
        """Return who takes part: where time is slow only the best of ours and DDP, unless all are wanted everywhere."""
        if self.everywhere or self.speed_at(nodes) >= SLOW:
            return self.sides
        ours = "priority" if "priority" in self.sides else "auto"
        return tuple(side for side in self.sides if side in (ours, "ddp"))

    def turns_at(self, nodes: int) -> tuple[int, int]:
        """Return the number of turns on so many hosts, and of timed steps in each: one turn where time is slow."""
        return (1, self.iters + 1) if self.speed_at(nodes) < SLOW else (self.repeat, self.iters)

    @property
    def cap_mb(self) -> float:
        """DDP's default bucket size, divided like the model."""
        return DDP_CAPS_MB[0] / KAPPA[self.model]


@dataclass(slots=True, kw_only=True)
class ScalingRun(Timings):
    """Measurements of one side on one number of hosts; `cpu_s` is that of one rank in a step, one per turn."""

    nodes: int
    side: str
    speed: float = 1.0
    """Seconds of the published machine per second here."""
    cap_mb: float | None = None
    busy: list[float] = field(default_factory=list)
    """The share of the processors' time that was used, by any process; one per turn."""
    sent: list[float] = field(default_factory=list)
    """Bytes that the host which sent the most put on its link in a step; one per turn."""
    same_bits: bool = False
    """Whether all ranks ended with the same parameters."""


@dataclass(slots=True)
class Sweep:
    """All measurements of a sweep."""

    options: ScalingOptions
    runs: list[ScalingRun] = field(default_factory=list)
    capacity: dict[int, float] = field(default_factory=dict)
    """Bits per second that a host can send, by nodes; measured with all sending at once where there are few."""
    probed: dict[int, dict[float, float]] = field(default_factory=dict)
    """The step of DDP by bucket size in MiB, by nodes."""
    remarks: list[str] = field(default_factory=list)

    def find(self, nodes: int, side: str) -> ScalingRun | None:
        return next((run for run in self.runs if run.nodes == nodes and run.side == side), None)


# --- the contest ---


def run(
    options: ScalingOptions,
    say: Say = lambda text: None,
    finished: Callable[[Sweep, int], None] = lambda sweep, nodes: None,
) -> Sweep:
    """Hold the contests. Everything started is gone afterwards.

    `finished` is called after each number of hosts, so that what was measured is not lost if the rest never ends.

    Raises:
        LabError: no lab can be made here.
    """
    sweep = Sweep(options)
    for nodes in options.nodes:
        with contextlib.ExitStack() as cleanup:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
            bits_per_s = lab_bits_per_s(options.model, options.speed_at(nodes))
            lab = cleanup.enter_context(Lab(num_hosts=nodes, rate=format_rate(bits_per_s), mtu=JUMBO).up())
            for host in range(nodes):
                _deepen_queue(lab, host, bits_per_s)
            _measure_size(options, lab, folder, sweep, cleanup, say)
        finished(sweep, nodes)
    sweep.remarks = list(dict.fromkeys(sweep.remarks))
    return sweep


def _measure_size(
    options: ScalingOptions, lab: Lab, folder: Path, sweep: Sweep, cleanup: contextlib.ExitStack, say: Say
) -> None:
    nodes = lab.num_hosts
    sweep.capacity[nodes] = _capacity(lab, sweep)
    sides = ["plain"] if nodes == 1 else list(options.sides_at(nodes))
    if "openmpi" in sides and (why_not := why_no_openmpi_on(nodes)):
        sides.remove("openmpi")
        sweep.remarks.append(why_not)
    say(f"{options.model}, {nodes} hosts: starting {', '.join(sides)}")
    jobs = {side: cleanup.enter_context(make_contender(options, lab, folder, side)) for side in sides}
    contest.start_all(jobs.values(), PATIENCE_S, lambda what, fraction: None)
    speed = options.speed_at(nodes)
    runs = [ScalingRun(nodes=nodes, side=side, speed=speed) for side in sides]
    for each in runs:
        each.cap_mb = options.cap_mb if each.side == "ddp" else None
    if "ddp" in jobs and nodes == max(options.nodes):
        best = _probe_buckets(jobs["ddp"], sweep, nodes, say)
        if best is not None and best != options.cap_mb:
            runs.append(ScalingRun(nodes=nodes, side="ddp-best", speed=speed, cap_mb=best))
            jobs["ddp-best"] = jobs["ddp"]
    _take_turns(options, lab, runs, jobs, say)
    sweep.runs += runs


def _take_turns(
    options: ScalingOptions, lab: Lab, runs: Sequence[ScalingRun], jobs: Mapping[str, Contender], say: Say
) -> None:
    """Let all sides warm up and take turns; one that fails is out."""
    repeat, iterations = options.turns_at(lab.num_hosts)

    def take_turn(_: str, each: ScalingRun, turn: int) -> None:
        what = "warming up" if turn == 0 else f"turn {turn} of {repeat}" if turn <= repeat else "comparing bits"
        say(f"{options.model}, {each.nodes} hosts, {each.side}: {what}")
        job = jobs[each.side]
        chosen = {"bucket_cap_mb": each.cap_mb} if each.side == "ddp-best" else {}
        if turn == 0:
            job.ask({"do": "run", "options": chosen, "iterations": options.warmup, "lead": 0}, PATIENCE_S)
        elif turn <= repeat:
            sent, busy = [lab.tx_bytes(host) for host in range(lab.num_hosts)], contest.processor_times()
            answers = job.ask({"do": "run", "options": chosen, "iterations": iterations}, PATIENCE_S)
            each.busy.append(contest.busy_share(busy, contest.processor_times()))
            most = max(lab.tx_bytes(host) - before for host, before in enumerate(sent))
            each.sent.append(most / (iterations + LEAD))
            each.rounds.append(step_times_s(answers, one_clock=True))
            each.cpu_s.append(sum(contest.floats(answer["cpu_s"])[0] for answer in answers) / len(answers))
        else:
            hashes = {str(answer["hash"]) for answer in job.ask({"do": "hash", "options": chosen}, PATIENCE_S)}
            each.same_bits = len(hashes) == 1

    contest.interleave({each.side: each for each in runs}, repeat + 2, take_turn)


def _probe_buckets(job: Contender, sweep: Sweep, nodes: int, say: Say) -> float | None:
    """Measure a few steps of DDP with each bucket size, and return the best size."""
    found: dict[float, float] = {}
    for size in DDP_CAPS_MB:
        cap_mb = size / KAPPA[sweep.options.model]
        say(f"{sweep.options.model}, {nodes} hosts: ddp with buckets of {size:g} MiB in full size")
        chosen = {"bucket_cap_mb": cap_mb}
        try:
            answers = job.ask({"do": "run", "options": chosen, "iterations": 2, "lead": 1}, PATIENCE_S)
        except LaunchError:
            break
        found[cap_mb] = quantile(step_times_s(answers, one_clock=True), 0.5)
    sweep.probed[nodes] = found
    return min(found, key=lambda cap_mb: found[cap_mb]) if found else None


def _deepen_queue(lab: Lab, host: int, bits_per_s: int) -> None:
    """Let more wait at the host's link, and longer, than a lab does by default, which has few connections in mind."""
    burst = max(2 * JUMBO, round(bits_per_s / 8 * 0.010))
    for command in (
        f"tc qdisc replace dev {INTERFACE} root tbf rate {bits_per_s}bit burst {burst} limit {QUEUE_BYTES}",
        f"ip route replace {NETWORK} dev {INTERFACE} proto kernel scope link src {lab.addresses[host]} rto_min {RTO_MIN}",
    ):
        done = lab.run(host, command.split())
        if done.returncode != 0:
            raise LabError(f"`{command}` failed: {done.stderr.strip()}")


def _capacity(lab: Lab, sweep: Sweep) -> float:
    """Return what a host can send: measured if there are few hosts, else what the headers leave."""
    nominal = (lab.nominal_rate or 0) * (1 - HEADERS / JUMBO)
    if not 2 <= lab.num_hosts <= 8 or iperf.why_no_iperf():
        return nominal
    return iperf.mean_ring_rate(lab, sweep.remarks) or nominal


def make_contender(options: ScalingOptions, lab: Lab, folder: Path, side: str) -> Contender:
    """Make the processes of one side, one rank on each host; not started yet."""
    ours = side in STRATEGIES
    task = TrainingTask(
        side="pliant" if ours else side,
        num_workers=lab.num_hosts,
        model=options.model,
        compute="scaling",
        speed=options.speed_at(lab.num_hosts),
        lead=LEAD,
        rendezvous=f"tcp://{lab.addresses[0]}:{BASE_PORT}",
        ddp={"broadcast_buffers": False, "gradient_as_bucket_view": True, "bucket_cap_mb": options.cap_mb},
        join={"sync": "priority" if side == "priority" else "fifo"},
        wrap={"bucket_cap_mb": options.cap_mb, "sync_buffers": False},  # as DDP's broadcast_buffers=False
        bucket_cap_mb=options.cap_mb,
    )
    placement = Placement(num_workers=lab.num_hosts, folder=folder, lab=lab)

    def mpirun(argv: list[str]) -> list[str]:
        return mpirun_argv(lab, write_launch_agent(lab, folder / "enter"), argv)

    launcher = mpirun if side == "openmpi" else None
    return placement.contender(side, PROGRAM, task.to_json(), strategy=STRATEGIES.get(side, ""), launcher=launcher)


# --- Open MPI between the hosts of a lab ---


def why_no_openmpi_on(nodes: int) -> str:
    """Return why Open MPI cannot take part in a lab of so many nodes; empty if it can."""
    if shutil.which("unshare") is None:
        return "openmpi skipped: `unshare` not found; apt-get install util-linux"
    if nodes > MOST_MPI_NODES:
        return f"openmpi skipped beyond {MOST_MPI_NODES} nodes: its ranks poll while they wait, and share the cores of one machine"
    return contest.why_no_openmpi()


def write_launch_agent(lab: Lab, path: Path) -> Path:
    """Write a program that is called like ssh (HOST COMMAND...) and runs the command on that host of the lab.

    The hosts are namespaces of one machine, so a launcher only needs to enter them. Each gets a host name of its own, because
    Open MPI takes daemons with one name for one machine and lets their files collide.
    """
    cases = "\n".join(
        f"  {address}) namespace={namespace} name=node{number};;"
        for number, (address, namespace) in enumerate(zip(lab.addresses, lab.namespaces, strict=True))
    )
    path.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\naddress=$1; shift\ncase "$address" in\n{cases}\n'
        '  *) echo "no such host: $address" >&2; exit 1;;\nesac\n'
        'exec ip netns exec "$namespace" unshare --uts sh -c \'hostname "$0"; eval "$@"\' "$name" "$@"\n'
    )
    path.chmod(0o700)
    return path


def mpirun_argv(lab: Lab, agent: Path, program: Sequence[str]) -> list[str]:
    """Return the command of mpirun on the lab's first host, one rank on each host. Waiting ranks give the processor away."""
    hosts = ",".join(f"{address}:1" for address in lab.addresses)
    settings = {
        "plm_rsh_agent": str(agent), "plm_rsh_no_tree_spawn": "1", "btl": "tcp,self", "btl_tcp_if_include": INTERFACE,
        "oob_tcp_if_include": INTERFACE, "mpi_yield_when_idle": "1", "hwloc_base_binding_policy": "none",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in ("--mca", name, value)]
    count = str(lab.num_hosts)
    argv = ["mpirun", "--allow-run-as-root", "-np", count, "--host", hosts, "--map-by", "node", *flags, *program]
    # The first rank's host gets a name of its own, too.
    return lab.exec_argv(0, ["unshare", "--uts", "sh", "-c", 'hostname node0; exec "$@"', "sh", *argv])
