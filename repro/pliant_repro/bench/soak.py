"""`pliant bench soak`: a real job under a stream of random faults, with stock DDP's digests as the oracle.

`soak_plan` chooses the faults and `soak_judge` says what is wrong; both are pure. `soak_job` starts the job and does what was
chosen. Here is the loop between them, and DDP, which trains as many steps as the job has done, when the job is over.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench import soak_judge
from pliant_repro.bench.elastic import ElasticOptions, StepBegun, training_task
from pliant_repro.bench.soak_job import SoakHosts, SoakJob
from pliant_repro.bench.soak_judge import Digests, Finding, ProcessSample, StepTimes
from pliant_repro.bench.soak_plan import Fault, Situation, Trainer, next_fault, next_pause_s
from pliant_repro.bench.train import PROGRAM
from pliant_repro.contest import Placement, check_least, form

REPLICAS = 4
SLOTS = 2
SAMPLE_PERIOD_S = 3.0
ORACLE_STEPS = 500
"""Steps that DDP does between two signs of life."""
QUIET_S = 3.0
"""The last faults are over for this long when the job ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """Options of `pliant bench soak`.

    Raises (when made):
        ConfigError: a value is not possible.
    """

    minutes: float
    seed: int
    kinds: tuple[str, ...]
    num_hosts: int = 3
    in_lab: bool = True
    model: str = "small"
    least_step_s: float = 0.05
    start_timeout_s: float = 120.0
    keep_logs: str = ""
    """Where to leave the logs of the job; empty: nowhere, unless something is wrong."""

    def __post_init__(self) -> None:
        check_least(("--minutes", self.minutes, 0.05))
        if not 2 <= self.num_hosts <= 8:
            raise ConfigError(f"--hosts {self.num_hosts}: use 2 to 8, so that one may be lost")

    def elastic(self) -> ElasticOptions:
        return ElasticOptions(
            num_workers=REPLICAS, model=self.model, batch=4, size=16, replicas=REPLICAS, seed=5, digests=True,
            least_step_s=self.least_step_s,
        )  # fmt: skip


def run(options: SoakOptions, args: Mapping[str, object], say: Callable[[str], None]) -> Json:
    """Do it, and return the result; `say` shows a line."""
    with tempfile.TemporaryDirectory(prefix="pliant-soak-") as folder:
        place = Path(folder)
        with SoakHosts(options.num_hosts, in_lab=options.in_lab) as hosts:
            job = SoakJob(hosts, SLOTS, options.elastic(), place)
            with job:
                soak = Soak(options, job, say)
                soak.run()
        times, reports = soak.times, list(job.seen.reports)
        findings = [*job.failures, *soak_judge.lost_steps(times), *soak_judge.growth(soak.samples)]
        findings += soak_judge.hangs(times, soak.done, soak.ended_s)
        num_steps = max(times.first_s, default=0)
        say(f"the job is over after {num_steps} steps: stock DDP does the same")
        compared, wrong = soak_judge.wrong_bits(reports, ddp_digests(options, num_steps, place))
        findings += wrong
        if not compared:
            findings.append(Finding("other", "no digest was compared"))
        for each in findings[:50]:
            say(f"{each.kind}: {each.text}")
        if findings or options.keep_logs:
            (place / "reports.log").write_bytes(b"".join(each.to_line() for each in reports))
            say(f"logs: {_keep_logs(place, options.keep_logs)}")
    counts = soak_judge.count(findings)
    say(soak_judge.last_line(len(soak.done), num_steps, counts))
    by_kind = {kind: sum(fault.kind == kind for _, fault in soak.done) for kind in options.kinds}
    memory = soak_judge.memory(soak.samples)
    return form(
        "soak", args, not findings, [f"{each.kind}: {each.text}" for each in findings], faults=len(soak.done),
        by_kind=by_kind, steps=num_steps, digests_compared=compared, counts=dict(counts),
        longest_silence_s=soak_judge.longest_silence_s(times), memory=memory,
    )  # fmt: skip


def _keep_logs(place: Path, asked: str) -> Path:
    """Copy the logs to where they outlive the soak."""
    target = Path(asked or tempfile.mkdtemp(prefix="pliant-soak-logs-"))
    target.mkdir(parents=True, exist_ok=True)
    for path in place.iterdir():
        if path.name.endswith(".log"):
            shutil.copy(path, target / path.name)
    if (place / "kept").is_dir():
        shutil.copytree(
            place / "kept",
            target / "disk",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.safetensors", "filler"),
        )
    return target


@dataclass(slots=True)
class Soak:
    """The loop: choose a fault, do it, and watch."""

    options: SoakOptions
    job: SoakJob
    say: Callable[[str], None]
    times: StepTimes = field(default_factory=StepTimes)
    samples: list[ProcessSample] = field(default_factory=list)
    done: list[tuple[float, Fault]] = field(default_factory=list)
    """The faults, with their times by the monotonic clock."""
    ended_s: float = 0.0
    _begun_s: float = 0.0
    _num_read: int = 0
    _newest: dict[int, StepBegun] = field(default_factory=dict)
    _first_seen_s: dict[int, float] = field(default_factory=dict)
    _ends: list[tuple[float, int, Fault, Callable[[], None]]] = field(default_factory=list)
    """What is to be put right, and when."""
    _killed: set[int] = field(default_factory=set)
    _told: tuple[float, Fault, int] | None = None
    """The last fault, and the newest step then, until it is shown what came of it."""

    def run(self) -> None:
        """Do faults until the time is over, put everything right, and let the job train on for a moment."""
        options, chance, tick = self.options, random.Random(self.options.seed), itertools.count()
        self._await_first_step()
        self._begun_s = time.monotonic()
        end_s = self._begun_s + 60 * options.minutes
        next_s, sample_s = self._begun_s + 1.0, 0.0
        while (now_s := time.monotonic()) < end_s:
            self._read()
            self._put_right(now_s)
            self.job.check()
            if now_s >= sample_s:
                sample_s = now_s + SAMPLE_PERIOD_S
                self._sample(now_s)
            if now_s >= next_s:
                next_s = now_s + next_pause_s(chance)
                fault = next_fault(chance, self._situation(), options.kinds)
                if fault is not None:
                    self._tell()
                    mend = self.job.do(fault)
                    self._killed |= {each.pid for each in fault.workers if fault.kind == "kill"}
                    self.done.append((now_s, fault))
                    self._told = (now_s, fault, max(self.times.first_s, default=0))
                    heapq.heappush(self._ends, (now_s + fault.lasts_s, next(tick), fault, mend or (lambda: None)))
            self._tell_if_over()
            with self.job.seen.changed:
                self.job.seen.changed.wait(0.02)
            if now_s - max(self.times.first_s.values()) > 6 * soak_judge.HANG_S:
                self.say("nobody trains any more: giving up")
                break
        self._put_right(float("inf"))
        self._train_on()
        self._tell()
        self.ended_s = time.monotonic()
        self._read()

    def _await_first_step(self) -> None:
        deadline_s = time.monotonic() + self.options.start_timeout_s
        while not self.job.seen.reports:
            self.job.check()
            if time.monotonic() > deadline_s or self.job.failures:
                raise LaunchError(f"the job did not begin: {self.job.failures or self.job.last_words()}")
            time.sleep(0.05)  # pacing a poll with a deadline

    def _train_on(self) -> None:
        """Wait until everybody trains again: a step that is not done now is never done."""
        target, deadline_s = max(self.times.first_s, default=0) + 10, time.monotonic() + soak_judge.HANG_S + QUIET_S
        while time.monotonic() < deadline_s:
            self._read()
            self.job.check()
            if max(self.times.first_s, default=0) >= target:
                return
            time.sleep(0.05)  # pacing a poll with a deadline

    def _read(self) -> None:
        reports = self.job.seen.reports
        for begun in reports[self._num_read :]:
            self._num_read += 1
            self.times.add(begun)
            self._newest[begun.pid] = begun
            self._first_seen_s.setdefault(begun.pid, begun.at_s)
        for pid in (self.job.seen.ended | self._killed) & self._newest.keys():
            del self._newest[pid]

    def _situation(self) -> Situation:
        top = max((each.step for each in self._newest.values()), default=0)
        named = self.job.members()
        members = [each for each in self._newest.values() if each.worker in named and top - each.step <= 1]
        members.sort(key=lambda each: self._first_seen_s[each.pid])
        hosts = {address: host for host, address in enumerate(self.job.hosts.addresses)}
        return Situation(
            at_s=time.monotonic() - self._begun_s,
            trainers=tuple(Trainer(each.worker, hosts[each.worker.rpartition(":")[0]], each.pid) for each in members),
            hosts=frozenset(self.job.runners),
            warm_hosts=frozenset(host for host in self.job.runners if self.job.warm_process(host)),
            under_way=[fault for _, _, fault, _ in self._ends],
            max_workers=min(REPLICAS, SLOTS * len(self.job.runners)),
        )

    def _put_right(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            heapq.heappop(self._ends)[3]()

    def _sample(self, now_s: float) -> None:
        oldest = min(self._newest, key=self._first_seen_s.__getitem__, default=0)
        self.samples += self.job.samples(now_s, oldest)

    def _tell_if_over(self) -> None:
        if self._told is not None and max(self.times.first_s) > self._told[2]:
            self._tell()

    def _tell(self) -> None:
        """Show the last fault, and what was seen after it."""
        if self._told is None:
            return
        (at_s, fault, step), self._told = self._told, None
        begun_s = self.times.first_s.get(step + 1)
        size = next((each.size for each in reversed(self.job.seen.reports)), 0)
        after = (
            f"next step after {begun_s - at_s:.2f} s, {size} workers"
            if begun_s is not None
            else "no step before the next fault"
        )
        self.say(f"{at_s - self._begun_s:8.2f} s  step {step:6d}  {fault.text}: {after}")


def ddp_digests(options: SoakOptions, num_steps: int, folder: Path) -> Digests:
    """Return the digests of stock DDP on gloo, one process for each replica, after each of so many steps."""
    from pliant_repro import zoo

    task = training_task(options.elastic(), zoo.network(options.model).optimizer).to_json()
    task |= {"side": "ddp", "num_workers": REPLICAS, "rendezvous": f"file://{folder / 'ddp.store'}", "join": {}}
    digests: list[tuple[str, str]] = []
    with contextlib.ExitStack() as cleanup:
        placement = Placement(num_workers=REPLICAS, folder=folder)
        job = cleanup.enter_context(placement.contender("ddp", PROGRAM, task, strategy=""))
        contest.start_all([job], options.start_timeout_s, lambda *_: None)
        while len(digests) < num_steps:
            answers = job.ask({"do": "digests", "iterations": min(ORACLE_STEPS, num_steps - len(digests))}, 600.0)
            states, buffers = (cast("Sequence[str]", answers[0][key]) for key in ("states", "buffers"))
            digests += zip(states, buffers, strict=True)
    return digests
