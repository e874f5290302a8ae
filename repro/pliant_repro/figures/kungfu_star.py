"""Figure 5 of KungFu: other traffic at the root of a star, and the topology that avoids it. Needs root.

Workers of a STAR run in network namespaces of this machine; at about step 30 other traffic leaves the root's host for another
host. Three runs: with adaptation, without, and a longer quiet one in which nothing may change. Layers sleep for as long as a
K80 would compute; sizes and rates are divided so that their ratio is the published one. The lines that the job prints are
measured.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import IO

from pliant.errors import LaunchError
from pliant_repro.bench import scaling as published
from pliant_repro.figures import launch
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, show
from pliant_repro.figures.launch import PLIANT, Task
from pliant_repro.figures.p3 import PACED
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate

PORT, WARMUP, GRACE_S = 5201, 5, 15.0
NOTICED_BYTES = 200_000
ITER = re.compile(r"Iter #\d+: ([\d.]+) img/sec")
CONSENSUS, CHANGED = "AP:: cluster reached consensus", "Interference detected."


@dataclass(frozen=True, kw_only=True, slots=True)
class StarSetting:
    """The size of a run."""

    workers: int
    batch: int
    kappa: float
    bits_per_s: int
    """Rate that each host may send at."""
    steps: int
    adapt: bool = True
    begin_step: int | None = None
    """Step at which the other traffic starts; None means never."""
    traffic_share: float = 0.6
    """Share of the first host's link that the other traffic takes."""
    timeout_s: float = 300.0


@dataclass(slots=True)
class StarRun:
    """The parsed output of a job. A line belongs to the step that was under way when it was printed."""

    setting: StarSetting
    rates: list[float] = field(default_factory=list)
    """Images per second of rank 0 in each step."""
    consensus: list[int] = field(default_factory=list)
    """Steps in which a majority found the collectives slow."""
    changes: list[int] = field(default_factory=list)
    """Steps after which the topology was another."""
    traffic_begun: int | None = None

    def take(self, line: str) -> None:
        """Take in one line of rank 0."""
        if found := ITER.search(line):
            self.rates.append(float(found[1]))
        elif CONSENSUS in line:
            self.consensus.append(len(self.rates))
        elif CHANGED in line:
            self.changes.append(len(self.rates))


# --- running it ---


def run_star(lab: Lab, setting: StarSetting) -> StarRun:
    """Run the job to its end on all hosts of the lab but the last, which receives the other traffic.

    Raises:
        LaunchError: a part of it failed, or it took too long.
    """
    found, sending = StarRun(setting), False
    with contextlib.ExitStack() as parts:
        if setting.begin_step is not None:
            parts.enter_context(_sink(lab, setting))
        before = lab.rx_bytes(lab.num_hosts - 1)
        runners, said = parts.enter_context(_job(lab, setting))
        assert runners[0].stdout is not None, "it was asked for"
        for raw in runners[0].stdout:
            found.take(raw.decode(errors="replace"))
            if not sending and setting.begin_step is not None and len(found.rates) >= setting.begin_step:
                parts.enter_context(_sender(lab, setting))
                sending = True
            if sending and found.traffic_begun is None and lab.rx_bytes(lab.num_hosts - 1) - before > NOTICED_BYTES:
                found.traffic_begun = len(found.rates)
        codes = [runner.wait(GRACE_S) for runner in runners]
        if any(codes) or len(found.rates) < setting.steps:
            said.seek(0)
            last = b"\n".join(said.read().splitlines()[-12:]).decode(errors="replace")
            done = f"{len(found.rates)} of {setting.steps} steps"
            raise LaunchError(f"the job ended with exit codes {codes} after {done}; the end of its output:\n{last}")
    return found


@contextlib.contextmanager
def _job(lab: Lab, setting: StarSetting) -> Iterator[tuple[list[subprocess.Popen[bytes]], IO[bytes]]]:
    """Start the runners; give them and what all but the first print. They are ended when their time is over."""
    hosts = lab.addresses[: setting.workers]
    task = Task(
        model="paced-resnet50", kappa=setting.kappa, batch=setting.batch, steps=setting.steps + WARMUP, warmup=WARMUP,
        lines=True, adapt=setting.adapt,
    )  # fmt: skip
    environ = launch.environment() | {"PLIANT_SECRET": secrets.token_hex(16), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as started:
        runners = []
        for host, address in enumerate(hosts):
            command = [*PLIANT, "run", "-q", "-np", str(len(hosts)), "-H", ",".join(f"{each}:1" for each in hosts)]
            command += ["-self", address, "-strategy", "STAR", *launch.program(task, Path())]
            stdout = subprocess.PIPE if host == 0 else said
            runner = lab.popen(host, command, stdout=stdout, stderr=said, env=environ)
            runners.append(started.enter_context(_ended(runner)))
        timer = threading.Timer(setting.timeout_s, _terminate, [runners])
        timer.start()
        started.callback(timer.cancel)
        yield runners, said


def _terminate(runners: Sequence[subprocess.Popen[bytes]]) -> None:
    for runner in runners:
        runner.terminate()


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the process when the block is left."""
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
def _sink(lab: Lab, setting: StarSetting) -> Iterator[None]:
    """Listen on the last host; it listens when the block is entered."""
    command = [*PLIANT, "bench", "traffic", "--listen", str(PORT), "--seconds", f"{setting.timeout_s:g}"]
    with _ended(lab.popen(lab.num_hosts - 1, command, stdout=subprocess.PIPE, env=launch.environment())) as sink:
        assert sink.stdout is not None, "it was asked for"
        if not sink.stdout.readline().startswith(b"listening"):
            raise LaunchError(f"the last host does not listen on port {PORT}: does another lab's traffic use it?")
        yield


@contextlib.contextmanager
def _sender(lab: Lab, setting: StarSetting) -> Iterator[None]:
    """Send from the first host to the last for some time."""
    command = [*PLIANT, "bench", "traffic", "--to", f"{lab.addresses[-1]}:{PORT}"]
    command += ["--rate", format_rate(round(setting.bits_per_s * setting.traffic_share))]
    command += ["--seconds", "60", "--connections", "8"]
    with _ended(lab.popen(0, command, stdout=subprocess.DEVNULL, env=launch.environment())):
        yield


# --- the figure ---


class Interference(Figure):
    """Other traffic at the root of a star: a vote at once, and a change of topology that brings the throughput back."""

    name = "kungfu-fig5"
    about = "other traffic at the root of a star, and the topology that avoids it; needs root"
    usual_s = 165
    needs_lab = True
    paper = {"before": 29.0, "under_interference": 19.2, "after": 26.9, "recovery": 0.93, "steps_to_recovery": 4}
    paper_rates = (30.2, 29.4, 26.5, 29.4, 31.4, 28.9, 28.7, 28.0, 25.8, 27.9, 28.6, 19.2, 20.9, 23.3, 26.2, 26.9)
    """Images per second and GPU from iteration 20 on, as the artifact prints them."""
    slow, recovered, voted, soon = 0.8, 0.9, 3, 5
    """Shares of the usual throughput that count as slow and as recovered; steps until the vote and until recovery."""
    title = "Other traffic at the root of a star"
    caveats = ("8 VMs with a K80 each are 8 network namespaces here", PACED)

    def run(self, options: Options) -> Result:
        setting, quiet_steps = self.sizes(options)
        begin = setting.begin_step or 0
        fixed = replace(setting, adapt=False, steps=min(setting.steps, begin + 16))
        quiet = replace(setting, batch=2, kappa=setting.kappa * setting.batch / 2, steps=quiet_steps, begin_step=None)
        settings = {"adapting": setting, "fixed": fixed} | ({"quiet": quiet} if quiet_steps else {})
        runs = {}
        with Lab(num_hosts=setting.workers + 1, rate=format_rate(setting.bits_per_s)).up() as lab:
            for name, each in settings.items():
                options.say(f"{name}: {each.workers} workers, STAR, {format_rate(each.bits_per_s)}, {each.steps} steps")
                runs[name] = run_star(lab, each)
        return self.result_of(runs, options)

    def sizes(self, options: Options) -> tuple[StarSetting, int]:
        """Return the run with adaptation, and the number of quiet steps."""
        workers, batch, kappa = options.choose(quick=(4, 4, 160.0), usual=(8, 8, 160.0), full=(8, 32, 40.0))
        steps = options.choose_steps(quick=42, usual=70, full=100)
        # The published root's link, as slow as the gradients are small and as fast as the steps are short. A smaller star
        # has a smaller share of its traffic at the root.
        scale = 8 / kappa * published.BATCH / batch * (workers - 1) / (published.STAR_NODES - 1)
        setting = StarSetting(
            workers=workers,
            batch=batch,
            kappa=kappa,
            bits_per_s=round(published.star_bytes_per_s() * scale),
            steps=steps,
            begin_step=min(22 if options.quick else 26, steps // 2),
            # The rest must suffice for a host's own gradients, for which a small star leaves less time.
            traffic_share=0.6 if options.quick else 0.7,
            timeout_s=900.0 if options.full else 200.0,
        )
        return setting, 0 if options.quick else 500

    def result_of(self, runs: dict[str, StarRun], options: Options) -> Result:
        cells = [self.cell(name, one) for name, one in runs.items()]
        setting = runs["adapting"].setting
        keys = ("before", "under_interference", "after", "recovery", "steps_to_vote", "steps_to_recovery")
        remarks = [
            f"{setting.workers} namespaces, sizes divided by {setting.kappa:g}; the other traffic leaves the root's host with "
            f"{setting.traffic_share:.0%} of its link",
            "the topology is chosen from links that are measured at that moment, while KungFu always takes the star of rank 1; "
            "where hosts share the sums, a step is shorter than with a star in quiet times, so more than 100% can come back",
            *(["the 500 quiet steps are left out with --quick"] if "quiet" not in runs else []),
        ]
        ours = {key: cells[0][key] for key in keys}
        return self.result(options, ours=ours, cells=cells, complaints=self.judge(cells), remarks=remarks)

    def cell(self, name: str, run: StarRun) -> Result:
        rates, begun = run.rates, run.traffic_begun
        usual = median(rates[min(5, len(rates) // 4) : begun])
        disturbed_from = range(begun, len(rates)) if begun is not None else range(0)
        slow = next((step for step in disturbed_from if rates[step] < self.slow * usual), None)
        voted = next((step for step in run.consensus if slow is not None and step > slow), None)
        changed = next((step for step in run.changes if slow is not None and step > slow), None)
        disturbed = rates[slow:changed] if slow is not None else []
        after = rates[changed + 1 :] if changed is not None else []
        since_vote = rates[voted + 1 :] if voted is not None else []
        back = next((step for step, rate in enumerate(since_vote) if rate >= self.recovered * usual), None)
        return {
            "run": name,
            "workers": run.setting.workers,
            "steps": len(rates),
            "img_per_s": rates,
            "before": usual,
            "traffic_begun": begun,
            "slow_from": slow,
            "steps_to_vote": voted - slow if voted is not None and slow is not None else None,
            "changed_at": changed,
            "num_changes": len(run.changes),
            "under_interference": median(disturbed) if disturbed else None,
            "after": median(after) if after else None,
            "recovery": max(since_vote[: self.soon]) / usual if since_vote else None,
            "steps_to_recovery": back + 1 if back is not None else None,
            "ours": {"median_s": run.setting.batch / usual, "iqr_s": None},
        }

    def judge(self, cells: Sequence[Result]) -> list[str]:
        named = {cell["run"]: cell for cell in cells}
        ours, fixed, quiet = named["adapting"], named["fixed"], named.get("quiet")
        if ours["slow_from"] is None:
            return ["the other traffic has not slowed the star down: nothing can be shown"]
        wrong = []
        voted, recovery = ours["steps_to_vote"], ours["recovery"]
        if voted is None or voted > self.voted:
            wrong.append(
                f"a majority after {voted} steps, not within {self.voted}" if voted else "no majority was reached"
            )
        if recovery is None or ours["changed_at"] is None:
            wrong.append("the topology was not changed")
        elif recovery < self.recovered:
            wrong.append(
                f"{recovery:.0%} of the throughput within {self.soon} steps of the vote, not {self.recovered:.0%}"
            )
        lasting = fixed["under_interference"]
        if lasting is None or lasting > self.slow * fixed["before"]:
            wrong.append("without adaptation it was not slower, either")
        if quiet is not None and quiet["num_changes"]:
            wrong.append(f"{quiet['num_changes']} changes in {quiet['steps']} quiet steps")
        return wrong

    def table(self, result: Result) -> TableRows:
        rows = [
            (
                cell["run"], *(show(cell[key]) for key in ("before", "under_interference", "after")),
                show(cell["recovery"], ".0%"), show(cell["steps_to_vote"], "d"), show(cell["steps_to_recovery"], "d"),
                f"{cell['num_changes']} in {cell['steps']}",
            )
            for cell in result["cells"]
        ]  # fmt: skip
        rows.append(("paper", "29.0", "19.2", "26.9", "93%", "1", "4", "1"))
        columns = ("run", "before", "disturbed", "after", "in 5 steps", "voted", "90% after", "changes")
        title = "STAR with other traffic at its root: img/s per worker, share of it regained, steps"
        return TableRows(title, columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        cells = {cell["run"]: cell["img_per_s"] for cell in result["cells"]}
        places = range(20, 20 + len(self.paper_rates))
        lines: dict[str, Points] = {
            "adapting": (range(len(cells["adapting"])), cells["adapting"], "-", "tab:blue"),
            "STAR throughout": (range(len(cells["fixed"])), cells["fixed"], "-", "tab:red"),
            "paper": (places, self.paper_rates, "-", "0.6"),
        }
        ours = result["cells"][0]
        marks = [ours[key] for key in ("traffic_begun", "changed_at") if ours[key] is not None]
        title = "dotted: other traffic begins, new topology"
        return [Panel(title=title, x="step", y="img/s per worker", lines=lines, marks=marks)]

    def headline(self, result: Result) -> Headline:
        measured = show(result["ours"]["recovery"], ".0%")
        return "throughput regained within 5 steps of the vote", f"{self.paper['recovery']:.0%}", measured
