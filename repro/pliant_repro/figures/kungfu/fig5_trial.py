"""One run of figure 5: a job between hosts of a lab, and other traffic from the first of them to an outsider.

The job is the artifact's, started by `pliant run` on every host; the traffic is that of `pliant bench traffic`, begun when
the job comes to a given step. What is measured are the lines that the job prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pliant.errors import LaunchError
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate

PROGRAM = Path(__file__).with_name("adapt_strategy.py")
PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
PORT = 5201
WARMUP = 5
GRACE_S = 15.0
NOTICED_BYTES = 200_000
MARK = re.compile(r"^\[[^\]]*::std(?:out|err)\] ")
ITER = re.compile(r"Iter #(\d+): ([\d.]+) img/sec")
VOTE = re.compile(r"AP:: cluster response -> (\d+)")
CHECK = re.compile(r"MonitorStrategy:: Checking Throughput = ([\d.]+) MiB/s, reff= ([\d.]+) MiB/s")
CONSENSUS = "AP:: cluster reached consensus"
CHANGED = "Interference detected."
COMPARED = re.compile(r"AP:: \S+ takes ([\d.]+) x as long")
DECIDED = re.compile(r"policy Interference: (.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a run is made of."""

    workers: int
    batch: int
    kappa: float
    bits_per_s: int
    """That each host may send."""
    steps: int
    adapt: bool = True
    begin_step: int | None = None
    """When the other traffic is started; None: never."""
    traffic_share: float = 0.6
    """Of the first host's link."""
    connections: int = 8
    traffic_s: float = 60.0
    """Then it ends."""
    timeout_s: float = 300.0


@dataclass(slots=True)
class Trial:
    """What the job has said."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    """Images per second of rank 0 in each step."""
    votes: dict[int, int] = field(default_factory=dict)
    """The workers that found a step slow, by the number of the step that was under way when they said so."""
    throughput: dict[int, float] = field(default_factory=dict)
    """MiB/s of rank 0's collectives, likewise."""
    consensus: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    """Steps after which the topology was another."""
    decisions: list[str] = field(default_factory=list)
    compared: dict[int, float] = field(default_factory=dict)
    """How much longer the topology of then would take on the links of then than in quiet times."""
    traffic_begun: int | None = None
    """The step under way when the traffic was there."""
    lines: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One line of rank 0's."""
        step = len(self.rates)
        if found := ITER.search(line):
            self.rates.append(float(found[2]))
        elif found := VOTE.search(line):
            self.votes[step] = int(found[1])
        elif found := CHECK.search(line):
            self.throughput[step] = float(found[1])
        elif CONSENSUS in line:
            self.consensus.append(step)
        elif CHANGED in line:
            self.changes.append(step)
        elif found := DECIDED.search(line):
            self.decisions.append(found[1])
        elif found := COMPARED.search(line):
            self.compared[step] = float(found[1])
        else:
            return
        self.lines.append(line)


def run(lab: Lab, setting: Setting) -> Trial:
    """Run the job to its end, on all hosts of the lab but the last, which is the outsider. The traffic ends by itself.

    Raises:
        LaunchError: a part of it failed, or it took too long.
    """
    trial = Trial(setting)
    outsider = lab.num_hosts - 1
    with contextlib.ExitStack() as parts:
        if setting.begin_step is not None:
            parts.enter_context(_sink(lab, setting))
        before = lab.rx_bytes(outsider)
        runners, said = parts.enter_context(_job(lab, setting))
        first = runners[0].stdout
        assert first is not None, "it was asked for"
        sending = False
        for raw in first:
            trial.take(_bare(raw))
            if not sending and setting.begin_step is not None and len(trial.rates) >= setting.begin_step:
                parts.enter_context(_sender(lab, setting))
                sending = True
            if sending and trial.traffic_begun is None and lab.rx_bytes(outsider) - before > NOTICED_BYTES:
                trial.traffic_begun = len(trial.rates)
        codes = [runner.wait(GRACE_S) for runner in runners]
        if any(codes) or len(trial.rates) < setting.steps:
            said.seek(0)
            last = b"\n".join(said.read().splitlines()[-12:]).decode(errors="replace")
            raise LaunchError(
                f"the job ended with exit codes {codes} after {len(trial.rates)} of {setting.steps} steps; its last words:\n{last}"
            )
    return trial


def _bare(raw: bytes) -> str:
    """The line without the runner's mark."""
    return MARK.sub("", raw.decode(errors="replace")).rstrip()


@contextlib.contextmanager
def _job(lab: Lab, setting: Setting) -> Iterator[tuple[list[subprocess.Popen[bytes]], IO[bytes]]]:
    """The runners, the first of which can be read, and what all others say; they are killed when time is over."""
    hosts = lab.addresses[: setting.workers]
    flags = ["--paced", f"{setting.kappa:g}", "--batch-size", str(setting.batch), "--num-iters", str(setting.steps)]
    flags += [
        "--num-batches-per-iter",
        "1",
        "--kf-optimizer",
        "sync-sgd-monitor",
        *(["--adapt"] if setting.adapt else []),
    ]
    flags += ["--num-warmup-batches", str(WARMUP)]
    environ = _environ() | {"PLIANT_SECRET": secrets.token_hex(16)}
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as started:
        runners = []
        for host, address in enumerate(hosts):
            command = [*PLIANT, "run", "-q", "-np", str(len(hosts)), "-H", ",".join(f"{each}:1" for each in hosts)]
            command += ["-self", address, "-strategy", "STAR", sys.executable, str(PROGRAM), *flags]
            stdout = subprocess.PIPE if host == 0 else said
            runner = started.enter_context(_ended(lab.popen(host, command, stdout=stdout, stderr=said, env=environ)))
            runners.append(runner)
        watch = threading.Timer(setting.timeout_s, _terminate, [runners])
        watch.start()
        started.callback(watch.cancel)
        yield runners, said


def _terminate(runners: list[subprocess.Popen[bytes]]) -> None:
    for runner in runners:
        runner.terminate()


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """It does not outlive the `with`."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # a runner ends its workers first
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _sink(lab: Lab, setting: Setting) -> Iterator[None]:
    """Listens on the outsider; there when this is entered."""
    command = [*PLIANT, "bench", "traffic", "--listen", str(PORT), "--seconds", f"{setting.timeout_s:g}"]
    with _ended(lab.popen(lab.num_hosts - 1, command, stdout=subprocess.PIPE, env=_environ())) as sink:
        assert sink.stdout is not None, "it was asked for"
        if not sink.stdout.readline().startswith(b"listening"):
            raise LaunchError(f"the outsider does not listen on port {PORT}: is another lab's traffic in its way?")
        yield


@contextlib.contextmanager
def _sender(lab: Lab, setting: Setting) -> Iterator[None]:
    """Sends from the first host to the outsider, for some time."""
    command = [*PLIANT, "bench", "traffic", "--to", f"{lab.addresses[-1]}:{PORT}"]
    command += ["--rate", format_rate(round(setting.bits_per_s * setting.traffic_share))]
    command += ["--seconds", f"{setting.traffic_s:g}", "--connections", str(setting.connections)]
    with _ended(lab.popen(0, command, stdout=subprocess.DEVNULL, env=_environ())):
        yield


def _environ() -> dict[str, str]:
    """Ours, with one arithmetic thread each, and without a trace of a job that this may run in."""
    path = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
