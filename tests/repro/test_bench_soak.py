"""The soak: a plan that leaves somebody the state, a judge that finds what is wrong, and a short real one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command import command
from pliant_repro.bench import soak_judge
from pliant_repro.bench.elastic import StepBegun
from pliant_repro.bench.soak_judge import (
    ProcessSample,
    StepTimes,
    count,
    growth,
    hangs,
    last_line,
    lost_steps,
    wrong_bits,
)
from pliant_repro.bench.soak_plan import FAULT_KINDS, Fault, Situation, Trainer, next_fault, parse_fault_kinds

from pliant.errors import ConfigError

ALL = tuple(FAULT_KINDS)
DDP = [(f"state {step}", f"buffers {step}") for step in range(1, 11)]


def trainers(*hosts: int) -> tuple[Trainer, ...]:
    return tuple(
        Trainer(f"10.77.0.{host + 1}:{10000 + number}", host, 100 + number) for number, host in enumerate(hosts)
    )


def situation(*hosts: int, under_way: Sequence[Fault] = (), at_s: float = 0.0) -> Situation:
    return Situation(
        at_s=at_s, trainers=trainers(*hosts), hosts=frozenset({0, 1, 2}), warm_hosts=frozenset({0, 2}), under_way=under_way,
        max_workers=4,
    )  # fmt: skip


def test_the_same_seed_gives_the_same_faults_and_all_kinds_come() -> None:
    def some(seed: int) -> list[Fault | None]:
        chance = random.Random(seed)
        return [next_fault(chance, situation(0, 1, 2, 2), ALL) for _ in range(300)]

    assert some(3) == some(3) != some(4)
    assert {fault.kind for fault in some(3) if fault is not None} == set(ALL)


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 1), (2, 2, 1), (0, 1, 2, 2)], ids=str)
def test_one_that_has_the_state_is_always_left_alone(hosts: tuple[int, ...]) -> None:
    chance = random.Random(1)
    for _ in range(500):
        before = situation(*hosts, at_s=chance.choice([0.0, 200.0]))
        under_way: list[Fault] = []
        for _ in range(4):  # faults that overlap
            fault = next_fault(chance, replace(before, under_way=under_way), ALL)
            if fault is None:
                continue
            under_way.append(fault)
            gone = {each.pid for fault in under_way for each in fault.workers}
            away = {fault.host for fault in under_way if fault.kind in ("runner", "cut")}
            left = [each for each in before.trainers if each.pid not in gone and each.host not in away]
            assert left, [fault.text for fault in under_way]
            if before.at_s:
                assert before.trainers[0] in left, "in this era the oldest one is spared"


def test_nobody_is_dismissed_while_those_who_stay_may_be_about_to_be_lost() -> None:
    frozen, killed = Fault("stop", "", trainers(0), lasts_s=8.0), Fault("kill", "", trainers(1), lasts_s=1.0)
    for under_way, may_resize in (([frozen, killed], False), ([frozen], True), ([killed], True)):
        chance = random.Random(5)
        faults = [next_fault(chance, situation(0, 1, 2, 2, under_way=under_way), ALL) for _ in range(200)]
        assert any(fault is not None and fault.kind == "resize" for fault in faults) == may_resize


def test_nobody_who_trains_means_no_fault_and_few_are_made_more() -> None:
    assert next_fault(random.Random(1), situation(), ALL) is None
    chance = random.Random(2)
    kinds = [fault.kind for _ in range(100) if (fault := next_fault(chance, situation(1), ALL)) is not None]
    assert kinds.count("resize") > 50
    assert not {"kill", "stop", "runner", "cut"}.intersection(kinds) - {"runner", "cut"}


def test_kinds_are_chosen_by_name() -> None:
    assert parse_fault_kinds("", in_lab=True) == ALL
    assert "cut" not in parse_fault_kinds("", in_lab=False)
    assert parse_fault_kinds("stop, kill", in_lab=False) == ("stop", "kill")
    with pytest.raises(ConfigError, match="--faults fire: use some of kill,stop"):
        parse_fault_kinds("fire", in_lab=True)
    with pytest.raises(ConfigError, match="--faults cut: it needs network namespaces"):
        parse_fault_kinds("cut", in_lab=False)


# --- the judge ---


def begun(step: int, at_s: float, rank: int = 0, worker: str = "a:1") -> StepBegun:
    """What a worker reports; its process has the number of its rank."""
    digest, buffers = DDP[step - 1] if step else ("", "")
    return StepBegun(
        pid=rank,
        worker=worker,
        rank=rank,
        size=2,
        step=step,
        own=step,
        at_s=at_s,
        ended_s=at_s,
        digest=digest,
        buffers=buffers,
    )


def times_of(reports: Sequence[StepBegun]) -> StepTimes:
    times = StepTimes()
    for each in reports:
        times.add(each)
    return times


GOOD = [begun(step, step + rank / 10, rank) for step in range(10) for rank in range(2)]


def test_a_job_that_did_all_steps_once_is_fine_in_whatever_order_its_reports_arrive() -> None:
    shuffled = sorted(GOOD, key=lambda each: each.rank)
    assert lost_steps(times_of(shuffled)) == []
    assert wrong_bits(shuffled, DDP) == (18, [])
    assert hangs(times_of(GOOD), [], 12.0) == []
    taken_again = [*GOOD[:9], begun(4, 4.5), *GOOD[10:]]  # before anybody began step 5
    assert lost_steps(times_of(taken_again)) == []
    woken = [*GOOD, begun(4, 9.5, rank=1)]  # it was frozen, and is not heard of any more
    assert lost_steps(times_of(woken)) == []


AGAIN = [*GOOD, begun(4, 9.5), begun(5, 9.6)]


def test_a_step_that_counted_and_is_done_again_is_found() -> None:
    [found] = lost_steps(times_of(AGAIN))
    assert found.text == "step 4 was done again 4.500 s after step 5 had begun"


def test_another_bit_is_found() -> None:
    flipped = [replace(each, digest="flipped") if (each.step, each.rank) == (7, 1) else each for each in GOOD]
    compared, [found] = wrong_bits(flipped, DDP)
    assert compared == 18
    assert found.text == "after step 7 a:1 (rank 1) has another state than DDP"
    buffers = [replace(each, buffers="flipped") if each.step == 3 else each for each in GOOD]
    assert len(wrong_bits(buffers, DDP)[1]) == 1, "buffers count on rank 0"


def test_a_silence_is_found_unless_faults_explain_it() -> None:
    late = [*GOOD, *(begun(10, 40.0, rank) for rank in range(2))] if len(DDP) > 9 else GOOD
    cut, kill = Fault("cut", "", lasts_s=15.0), Fault("kill", "")
    assert len(hangs(times_of(late), [], 41.0)) == 1
    assert len(hangs(times_of(late), [(9.5, kill), (8.0, kill)], 41.0)) == 1
    assert hangs(times_of(late), [(9.5, cut)], 41.0) == []
    assert len(hangs(times_of(late), [(-20.0, cut), (40.5, cut)], 41.0)) == 1, "faults of other times explain nothing"
    assert len(hangs(times_of(GOOD), [], 30.0)) == 1, "also at the end"


def test_growth_of_old_processes_is_found() -> None:
    def process(role: str, fds: float, rss: float, seconds: int = 300) -> list[ProcessSample]:
        return [
            ProcessSample(role, 1, at_s, int(20 + fds * at_s), int((100 << 20) + rss * at_s))
            for at_s in range(0, seconds, 3)
        ]

    assert growth(process("runner", 0, 0)) == []
    assert growth(process("young", 1, 1 << 20, seconds=90)) == []
    [fds] = growth(process("server", 0.2, 0))
    assert "descriptors" in fds.text
    [rss] = growth(process("worker", 0, 200_000))
    assert "worker (pid 1) in 255 s: from" in rss.text
    [listed] = soak_judge.memory(process("runner", 0, 0))
    assert listed["process"] == "runner"


def test_the_last_line() -> None:
    findings = [*lost_steps(times_of(AGAIN)), *hangs(times_of(GOOD), [], 60.0)]
    assert last_line(12, 345, count(findings)) == "12 faults, 345 steps: 1 lost steps, 0 wrong bits, 1 hangs, 0 leaks"


# --- a real one ---


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_a_short_soak(tmp_path: Path) -> None:
    """On loopback addresses, with whatever needs no root; as `pliant bench soak` does it."""
    result = tmp_path / "soak.json"
    ended = command(
        "bench", "soak", "--minutes", "0.15", "--seed", "3", "--hosts", "2", "--no-lab", "--logs", str(tmp_path / "logs"),
        "--json", str(result),
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    found = json.loads(result.read_text())
    assert found["ok"]
    assert found["faults"] >= 3
    assert found["digests_compared"] > 20
    assert ended.output.splitlines()[-1].endswith("0 lost steps, 0 wrong bits, 0 hangs, 0 leaks")
