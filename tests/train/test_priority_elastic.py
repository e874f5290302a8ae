"""Priority sync while workers come, go and die: a step whose sums were only half there is taken back, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gang import FULL, Failed, gang
from golden import golden
from stage import ALL, Actor, Stage, new_workers, run_fixed, spec_of, staged, view_of
from subject import Fault, Task, compare, differing, history, train
from test_crash import KILLS, MORE_KILLS

from pliant.cluster import Worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
EPOCHS = {"conv": 4, "adamw": 3, "nesterov": 3}
CONV = Task(program="conv", replicas=4, epochs=EPOCHS["conv"], journal="", sync="priority", slice_bytes=4096)
TORN = 3
"""The step whose sums a worker withholds (see `tampering.withholding`)."""


def _check(stage: Stage, program: str = "conv", *, dead: int = 0, repeats: int | None = None) -> None:
    compare(stage.history, golden(program, 4, EPOCHS[program]), repeats=dead if repeats is None else repeats)
    codes = [actor.exit_code for actor in stage.actors]
    assert sorted(code for code in codes if code) == [-signal.SIGKILL] * dead
    assert any(commit["crossed"] for commit in stage.history.commits), "no step was like those of priority sync"


# --- changes in good order ---


@pytest.mark.parametrize("sync", ["priority", *(("slicing", "auto") if FULL else ())])
def test_views_change_and_bits_do_not(sync: str, tmp_path: Path) -> None:
    """4 -> 2 -> 3 workers, one of them new; then one has to leave."""
    first, second, third, fourth, fifth = new_workers(5, HOSTS)
    task = replace(CONV, sync=sync, tampering="wavering" if sync == "auto" else "nothing")
    with staged(task, tmp_path) as stage:
        stage.change([first, second, third, fourth])
        stage.advance(3)
        stage.change([second, fourth])
        stage.advance(stage.step + 3)
        stage.change([second, fifth, fourth])
        stage.advance(stage.step + 2)
        stage.kill(second, signal.SIGTERM)
        stage.until(lambda: stage.client.membership().members == (fifth, fourth))
        stage.open_gate(ALL)
        stage.until_over()
        _check(stage)
        sizes = [commit["size"] for commit in stage.history.commits]
        assert set(sizes) >= {4, 2, 3}
        assert max(commit["step"] for commit in history([stage.actor(second).journal]).commits) < 19


def test_a_notice_in_mid_run(tmp_path: Path) -> None:
    """Nobody stands at a gate: the worker leaves while sums are under way."""
    workers = new_workers(3, HOSTS)
    with staged(replace(CONV, program="adamw", epochs=EPOCHS["adamw"]), tmp_path) as stage:
        stage.faults[workers[0]] = Fault("forward", 5, signal.SIGTERM)
        stage.want(workers)
        stage.until_over()
        _check(stage, "adamw")
        last = max(commit["step"] for commit in history([stage.actor(workers[0]).journal]).commits)
        assert 5 <= last < len(golden("adamw", 4, EPOCHS["adamw"])) - 1


def test_a_checkpoint_in_mid_run(tmp_path: Path) -> None:
    """It has the step that was asked for, though its sums were under way; and is gone on with by other workers."""
    saved = tmp_path / "saved.safetensors"
    base = replace(CONV, program="adamw", epochs=3, journal=str(tmp_path / "saving"))
    oracle = golden("adamw", 4, 3)
    [found] = run_fixed([replace(base, save=str(saved), save_at=7)], 2, hosts=HOSTS)
    compare(found, oracle)
    assert any(commit["crossed"] for commit in found.commits)
    [found] = run_fixed([replace(base, load=str(saved), journal=str(tmp_path / "resumed"))], 3, hosts=HOSTS)
    compare(found, oracle, begin=7)


# --- deaths ---


@pytest.mark.parametrize(("moment", "rank", "step"), KILLS[:4] + (KILLS[4:] + MORE_KILLS) * FULL, ids=str)
def test_a_worker_is_killed(moment: str, rank: int, step: int, tmp_path: Path) -> None:
    workers = new_workers(3, HOSTS)
    with staged(CONV, tmp_path) as stage:
        stage.replaces = rank == 0
        stage.faults[workers[rank]] = Fault(moment, step)
        stage.want(workers)
        stage.until_over()
        _check(stage, dead=1)
        survivors = [stage.actor(worker) for index, worker in enumerate(workers) if index != rank]
        assert all(actor.exit_code == 0 for actor in survivors), "a survivor was not the same process to the end"


@pytest.mark.parametrize("program", ["conv", "adamw", "nesterov"])
def test_a_step_that_was_used_half_is_taken_back(program: str, tmp_path: Path) -> None:
    """Everybody has updated some parameters with sums of step 3, and waits for others in the forward of step 4, when it
    is certain that those will never come. Both steps are done again."""
    workers = new_workers(3, HOSTS)
    with staged(replace(CONV, program=program, epochs=EPOCHS[program]), tmp_path) as stage:
        survivors = _tear(stage, workers, dying=workers[1])
        _check(stage, program, dead=1, repeats=0)
        assert [actor.exit_code for actor in survivors] == [0, 0]
        assert [list(actor.repeated) for actor in survivors] == [[2], [2]]
        draws = program != "nesterov"
        assert any(commit["brief"] for commit in stage.history.commits) != draws, "how much is told with a step"


def test_the_last_step_of_an_epoch_is_taken_back(tmp_path: Path) -> None:
    """Nothing comes between its end and doing it again: what the program had cleared must be clear by itself."""
    workers = new_workers(3, HOSTS)
    with staged(CONV, tmp_path) as stage:
        stage.changes[workers[1]] = {"tampering": "withholding_the_last_of_an_epoch"}
        stage.want(workers)
        others = [workers[0], workers[2]]
        stage.until(lambda: all(stage.waiting.get(worker) == 5 for worker in others))
        stage.kill(workers[1])
        stage.until_over()
        _check(stage, dead=1, repeats=0)


def test_two_die_after_each_other_in_a_step_that_was_used_half(tmp_path: Path) -> None:
    workers = new_workers(4, HOSTS)
    with staged(CONV, tmp_path) as stage:
        stage.faults[workers[3]] = Fault("settling", TORN)
        stage.replaces = True
        _tear(stage, workers, dying=workers[1])
        _check(stage, dead=2, repeats=0)


def test_without_taking_back_the_bits_change(tmp_path: Path) -> None:
    """So the test above can fail."""
    workers = new_workers(3, HOSTS)
    with staged(replace(CONV, tampering="nothing_kept"), tmp_path) as stage:
        _tear(stage, workers, dying=workers[1])
        assert differing(stage.history, golden("conv", 4, EPOCHS["conv"]))


def _tear(stage: Stage, workers: Sequence[Worker], dying: Worker) -> list[Actor]:
    """Have one worker withhold sums until all others are in the next forward, and kill it there. The others."""
    stage.changes[dying] = {"tampering": "withholding"}
    stage.want(workers)
    others = [worker for worker in workers if worker != dying]
    stage.until(lambda: all(stage.blocked.get(worker) == TORN + 1 for worker in others))
    stage.kill(dying)
    stage.until_over()
    return [stage.actor(worker) for worker in others]


def test_two_are_stopped_in_turn(tmp_path: Path) -> None:
    """For less than the time after which they would be lost: the others wait, and nothing else happens."""
    workers = new_workers(3, HOSTS)
    with staged(replace(CONV, program="dawdling"), tmp_path) as stage:
        stage.faults = {
            workers[1]: Fault("backward", 6, signal.SIGSTOP),
            workers[2]: Fault("forward", 8, signal.SIGSTOP),
        }
        stage.want(workers)
        for worker in workers[1:]:
            pid = stage.actor(worker).pid
            stage.until(lambda pid=pid: _status(pid)[0] == "T")  # type: ignore[misc]
            end_s = time.monotonic() + (5 if FULL else 0.3)
            stage.until(lambda end_s=end_s: time.monotonic() > end_s)  # type: ignore[misc]
            stage.kill(worker, signal.SIGCONT)
        stage.until_over()
        _check(stage)
        assert {commit["view"] for commit in stage.history.commits} == {1}


def test_a_job_that_is_not_elastic_ends_with_the_name_of_the_lost(tmp_path: Path) -> None:
    """Two wait in a forward for what the third one withholds, and it is killed."""
    view = view_of(new_workers(3, HOSTS))
    tasks = [
        replace(CONV, replicas=3, journal=str(tmp_path / f"{rank}"), environ=spec_of(worker, view).to_environ())
        for rank, worker in enumerate(view.workers)
    ]
    tasks[1] = replace(tasks[1], tampering="withholding")
    with gang(train, [(task,) for task in tasks]) as started:
        deadline_s = time.monotonic() + 60
        while not all(_is_blocked(tasks[rank]) for rank in (0, 2)):
            assert time.monotonic() < deadline_s, "the others never waited"
            time.sleep(0.01)  # pacing a poll with a deadline
        killed_s = started.kill(1)
        for rank in (0, 2):
            with pytest.raises(Failed, match=rf"WorkerLost.*{view.workers[1]}"):
                started.hear(rank)
        assert time.monotonic() - killed_s < 10


def _is_blocked(task: Task) -> bool:
    path = Path(task.journal)
    lines = path.read_text().splitlines() if path.exists() else []
    return any(json.loads(line)[:1] == ["blocked"] and json.loads(line)[1]["step"] == TORN + 1 for line in lines)


@pytest.mark.skipif(not FULL, reason="takes minutes: PLIANT_FULL=1")
@pytest.mark.timeout(900)
def test_a_thousand_steps(tmp_path: Path) -> None:
    """With one slice in flight, and nobody in time with anybody."""
    task = replace(
        CONV, program="dawdling-long", replicas=3, epochs=30, journal=str(tmp_path / "long"), in_flight_bytes=4096
    )
    [found] = run_fixed([task], 3, hosts=HOSTS, timeout_s=600)
    oracle = golden("conv-long", 3, 30)
    assert len(oracle) >= 1000
    compare(found, oracle)


# --- rest and end ---


def test_who_waits_does_not_burn_and_who_is_done_goes(tmp_path: Path) -> None:
    """A second and a half of blocked waiting costs less than 2 % of a processor; the end takes less than two seconds."""
    workers = new_workers(2, HOSTS)
    with staged(CONV, tmp_path) as stage:
        stage.changes[workers[1]] = {"tampering": "withholding"}
        stage.want(workers)
        stage.until(lambda: stage.blocked.get(workers[0]) == TORN + 1)
        pids = [stage.actor(worker).pid for worker in workers]
        used_s, began_s = [_cpu_s(pid) for pid in pids], time.monotonic()
        stage.until(lambda: time.monotonic() > began_s + 1.5)
        lasted_s = time.monotonic() - began_s
        shares = [(_cpu_s(pid) - before_s) / lasted_s for pid, before_s in zip(pids, used_s, strict=True)]
        stage.kill(workers[1])
        stage.until_over()
        _check(stage, dead=1, repeats=0)
        survivor = stage.actor(workers[0])
        assert 0 < survivor.looped_s < survivor.ended_s < survivor.looped_s + 2
    assert max(shares) < 0.02, f"{shares} of a processor while all were waiting"


def _status(pid: int) -> list[str]:
    """Of a process, as in proc(5), from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    """Of all threads of a process, the engine's among them."""
    fields = _status(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
