"""KungFu, figure 7: how long a resize takes, from 1 worker to 2 and back; and from 1 host to all and back.

Elastic jobs under `pliant run -w -np 1`, as in the artifact, that print the artifact's lines: one on a single host, and one
by the artifact's schedule 10:$np,20:1,30:$np,...,100:0 with a runner for each of several hosts (loopback addresses).
What they print is the pause between two steps, because training goes on while a newcomer starts; KungFu's 20.39 s for
1 -> 2 include that start, so the time from the request to the first step with all workers stands beside it.
"""

from __future__ import annotations

import re
import secrets
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.errors import LaunchError
from pliant.identity import format_schedule
from pliant.machine import Json
from pliant_repro.bench.stats import quantile
from pliant_repro.figures import trials
from pliant_repro.figures.figures import Options, TableRows, form, timed
from pliant_repro.figures.trials import Task, Trial

NAME = "kungfu-fig7"
PAPER = {"grow": {"median_s": 20.39}, "shrink": {"median_s": 0.04012}}
LINE = re.compile(r"resize (\d+) -> (\d+) took ([\d.]+)(ms|s)")
JOINED = re.compile(r"request to first step with (\d+) workers: ([\d.]+)s")
PROGRAM = Path(__file__).with_name("scaling.py")


def run(options: Options) -> Json:
    cycles = options.choose_steps(quick=1, usual=5, full=20)
    half, pace_s = (20, 0.03) if options.quick else (40, 0.05)
    schedule = [(10 + half * number, 2 if number % 2 == 0 else 1) for number in range(2 * cycles)]
    end = schedule[-1][0] + 10
    model = options.choose_models(quick=("neumf",), usual=("resnet50",))[0]
    task = Task(
        model=model,
        scale=options.scale or ("tiny" if options.quick else "small"),
        steps=end + 100,
        replicas=2,
        flags=("--pace", str(pace_s)),
    )
    options.say(f"{model}: an elastic job, {cycles} x 1 -> 2 -> 1 workers")
    trial = trials.elastic(task, 1, [*schedule, (end, 0)], at_once=False)
    num_hosts = 2 if options.quick else 4
    options.say(f"{num_hosts} hosts: an elastic job, 1 -> {num_hosts} -> 1 workers by the artifact's schedule")
    return result_of(trial, schedule, options, [(num_hosts, on_hosts(num_hosts, options))])


def artifact_schedule(num_hosts: int, last: int = 100) -> list[tuple[int, int]]:
    """10:$np,20:1,30:$np,...,`last`:0."""
    changes = [(step, num_hosts if step % 20 == 10 else 1) for step in range(10, last, 10)]
    return [*changes, (last, 0)]


def on_hosts(num_hosts: int, options: Options) -> str:
    """What a job says that a runner on each of so many loopback addresses runs by the artifact's schedule."""
    addresses = [f"127.0.0.{number + 1}" for number in range(num_hosts)]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    model = ["--model", "ResNet56", "--batch-size", "2"] if options.quick else ["--model", "ResNet50"]
    if not (options.quick or options.full):
        model += ["--batch-size", "2", "--image-size", "64"]
    schedule = format_schedule(artifact_schedule(num_hosts, 30 if options.quick else 100))
    words = ["--elastic", "--resize-schedule", schedule, "--train-steps", "0", *model]
    words += ["--no-cuda"] if options.where == "cpu" else []
    environ = trials.environment(trials.Task(model="", steps=0), pinned=False) | {
        "PLIANT_SECRET": secrets.token_hex(32)
    }

    def run_one(address: str) -> tuple[str, int]:
        flags = ["-q", "-w", "-np", "1", "-H", ",".join(f"{each}:1" for each in addresses), "-port", str(port)]
        command = [sys.executable, "-c", "from pliant.cli.main import main; main()", "run", *flags, "-self", address]
        return trials.finish([*command, sys.executable, str(PROGRAM), *words], environ, 600)

    with ThreadPoolExecutor(num_hosts, "host") as pool:
        ended = list(pool.map(run_one, addresses))
    for address, (output, code) in zip(addresses, ended, strict=True):
        if code != 0:
            last = "\n".join(output.strip().splitlines()[-12:])
            raise LaunchError(f"the runner of {address} ended with exit code {code}; its last words:\n{last}")
    return "".join(output for output, _ in ended)


def result_of(
    trial: Trial,
    schedule: Sequence[tuple[int, int]],
    options: Options,
    hosts: Sequence[tuple[int, str]] = (),
) -> Json:
    """What the lines that the jobs have printed say; `hosts` has the output of those on so many hosts."""
    lines = [match[0] for match in LINE.finditer(trial.output)]
    grows = [seconds for old, new, seconds in map(_parse, lines) if new > old]
    shrinks = [seconds for old, new, seconds in map(_parse, lines) if 0 < new < old]
    joins = join_times_s(trial, [step for step, size in schedule if size == 2])
    cells: list[Json] = [
        {"resize": "1 -> 2", "ours": {**timed(grows), "until_joined": timed(joins)}, "peers": {"paper": _beside("grow", grows)}},
        {"resize": "2 -> 1", "ours": timed(shrinks), "peers": {"paper": _beside("shrink", shrinks)}},
    ]  # fmt: skip
    wrong = judge(cells, len(schedule) // 2)
    for num_hosts, output in hosts:
        found = [match[0] for match in LINE.finditer(output)]
        lines += found
        cells += (more := host_cells(num_hosts, found, output))
        wrong += judge(more, 1)
    for line in lines:
        options.say(line)
    return form(
        NAME,
        options,
        ours={**timed(grows), "grow": timed(grows), "shrink": timed(shrinks), "until_joined": timed(joins)},
        paper=PAPER,
        cells=cells,
        complaints=wrong,
        remarks=[
            "ours: the pause between two steps; the newcomer starts while training goes on (until_joined)",
            "hosts are loopback addresses with a runner each, and share this machine's cores; on real ones: pliant run --ssh "
            "-hostfile hosts.txt -w -np 1 python3 benchmarks/scaling/benchmark_kungfu_scaling.py --elastic --resize-schedule ...",
        ],
        lines=lines,
    )


def host_cells(num_hosts: int, lines: Sequence[str], output: str) -> list[Json]:
    """From one host to all, and back."""
    changes = [_parse(line) for line in lines]
    joins = [float(match[2]) for match in JOINED.finditer(output) if int(match[1]) == num_hosts]
    grows = [seconds for old, new, seconds in changes if (old, new) == (1, num_hosts)]
    shrinks = [seconds for old, new, seconds in changes if (old, new) == (num_hosts, 1)]
    return [
        {"resize": f"1 -> {num_hosts} hosts", "ours": {**timed(grows), "until_joined": timed(joins)},
         "peers": {"paper": _beside("grow", grows)}},
        {"resize": f"{num_hosts} -> 1 hosts", "ours": timed(shrinks), "peers": {"paper": _beside("shrink", shrinks)}},
    ]  # fmt: skip


def _beside(kind: str, samples: Sequence[float]) -> Json:
    paper_s = PAPER[kind]["median_s"]
    return {"median_s": paper_s, "iqr_s": None, "speedup": paper_s / quantile(samples, 0.5) if samples else None}


def _parse(line: str) -> tuple[int, int, float]:
    match = LINE.search(line)
    assert match is not None, f"not a line about a resize: {line!r}"
    return int(match[1]), int(match[2]), float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)


def join_times_s(trial: Trial, asked_at: Sequence[int]) -> list[float]:
    """From the request to the start of the first step with both workers, as the worker that stayed saw it."""
    stayed = max(trial.workers, key=len, default=[])
    ends: dict[int, float] = {}
    for turn in stayed:
        ends[turn.step] = turn.end_s
    grown = [change for change in trial.changes if change["old"] == 1 and change["new"] == 2]
    times = []
    for step in asked_at:
        change = next((change for change in grown if change["step"] >= step), None)
        # Asked for when `step - 1` steps were done; the old view's last step was the one before the change.
        if change is not None and {step - 2, change["step"] - 1} <= ends.keys():
            times.append(ends[int(change["step"]) - 1] + change["pause_s"] - ends[step - 2])
    return times


def judge(cells: Sequence[Json], expected: int) -> list[str]:
    wrong = []
    for one in cells:
        numbers, paper = cast(Json, one["ours"]), cast("dict[str, Json]", one["peers"])["paper"]
        found, limit_s = numbers["median_s"], cast(float, paper["median_s"])
        if not isinstance(found, float) or cast(int, numbers["num_samples"]) < expected:
            wrong.append(f"{one['resize']}: fewer than {expected} resizes took place")
        elif found > limit_s:
            wrong.append(f"{one['resize']} took {found * 1e3:.1f} ms, the paper's {limit_s * 1e3:.1f} ms")
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        numbers, paper = cast(Json, one["ours"]), cast("dict[str, Json]", one["peers"])["paper"]
        joined = cast(Json, numbers.get("until_joined", {})).get("median_s")
        speedup = paper["speedup"]
        rows.append(
            (
                str(one["resize"]), _time(numbers["median_s"]), str(numbers.get("num_samples", 0)), _time(joined),
                _time(paper["median_s"]), f"{speedup:.3g}x" if isinstance(speedup, float) else "-",
            )
        )  # fmt: skip
    columns = ("resize", "pause", "resizes", "request to first step", "paper", "paper / pause")
    return TableRows("resize of an elastic job", columns, tuple(rows))


def _time(seconds: object) -> str:
    if not isinstance(seconds, float):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    labels = [str(one["resize"]) for one in cells]
    series: dict[str, list[float | None]] = {"pause": [], "until joined": [], "paper": []}
    for one in cells:
        numbers, paper = cast(Json, one["ours"]), cast("dict[str, Json]", one["peers"])["paper"]
        joined = cast(Json, numbers.get("until_joined", {})).get("median_s")
        for name, seconds in (("pause", numbers["median_s"]), ("until joined", joined), ("paper", paper["median_s"])):
            series[name].append(seconds * 1e3 if isinstance(seconds, float) else None)
    caption = (
        "Ours: one machine, small model; training goes on while the newcomer starts. Paper: VMs with a GPU each, "
        "TensorFlow, ResNet50; its 1 -> 2 includes the start of a process."
    )
    with plotting.picture(path, "Resize latency", caption) as [axes]:
        plotting.bars(axes, labels, series, {"paper": plotting.PAPER})
        plotting.log_heights(axes)
        axes.set(ylabel="ms")
