"""`pliant serve` with real jobs: whatever happens to them and to it, each ends with the bits of stock DDP."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from patience import open_gate, until
from serving_process import serving

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import train_program
from gang import FULL, run
from golden import golden

JOBS = {"conv": 4, "adamw": 3}
"""Program and epochs; all of them in one run of the oracle, which other tests ask for, too."""


def _hash_alone(rank: int, *words: str) -> str:
    """In a forked process: the hash that the program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_program.main(*words)
    return printed.getvalue().split()[1]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_two_jobs_on_three_slots_keep_their_bits_whatever_happens(tmp_path: Path) -> None:
    gates = {name: tmp_path / f"{name}.gate" for name in JOBS}
    for gate in gates.values():
        open_gate(gate, 9)  # nobody finishes before everything has happened
    settings = {name: ["4", str(epochs), "turn_s=0.05", f"gate={gates[name]}"] for name, epochs in JOBS.items()}
    with serving(tmp_path / "state", "--devices", "cpu=3", "--interval", "300ms") as server:
        # Submitted at different times.
        server.submit("conv", ["conv", *settings["conv"]], checkpoint_every=3)
        until(lambda: server.runner_state("conv"), "conv's runner")
        server.submit("adamw", ["adamw", *settings["adamw"]], checkpoint_every=3)

        # Resized by the scheduler: one slot is left, and goes to whoever is measured first.
        grown = until(
            lambda: next((name for name in JOBS if len(server.workers(name)) > 1), None),
            "a job to be given the third slot",
        )
        assert "grows from 1 cpu to 2 cpu" in server.log
        until(lambda: server.members(grown) == 2, f"{grown}'s newcomer")
        open_gate(gates[grown], 12)  # it joins between two steps
        until(lambda: "resize 1 -> 2" in server.output(grown), f"{grown} to train on both")

        # A worker is killed, and replaced by its runner.
        victim = server.workers(grown)[-1]
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not victim.lives and len(server.workers(grown)) == 2, "a replacement")

        # The scheduler is killed, and begun anew: jobs run on meanwhile, and are the same processes afterwards.
        until(lambda: all(server.job(name).step for name in JOBS), "all jobs to train")
        runners = {name: server.runner(name) for name in JOBS}
        server.end(signal.SIGKILL)
        server.start()
        assert {name: server.runner(name) for name in JOBS} == runners
        assert all(server.job(name).state == "running" for name in JOBS)

        # A tenant takes a slot while no job comes to the end of its step: a worker is killed, and the slot is free in time.
        assert server.client.reserve({"cpu": 1}).took_s <= 1.0
        assert sum(len(server.workers(name)) for name in JOBS) <= 2
        # It takes another while they train: one of two jobs is put off, with a checkpoint, and goes on later.
        for gate in gates.values():
            open_gate(gate, 1000)
        assert server.client.reserve({"cpu": 2}).took_s <= 1.0
        assert sum(len(server.workers(name)) for name in JOBS) <= 1
        put_off = until(lambda: [name for name in JOBS if server.job(name).state == "put-off"], "a job to be put off")
        assert len(put_off) == 1
        server.client.reserve({})

        for name in JOBS:
            server.finished(name)
        assert "resumed from" in server.output(put_off[0])
        hashes = {name: server.hash(name) for name in JOBS}
    assert hashes == {name: golden(name, 4, epochs)[-1].digest for name, epochs in JOBS.items()}
    [control] = run(_hash_alone, 1, "conv", "4", "4", "tampered=3")
    assert control != hashes["conv"], "the same program, of which one bit is wrong in one step"


WAITS_AND_FAILS = """#!/bin/sh
for _ in $(seq 6000); do [ -e "$1" ] && exit 3; sleep 0.01; done
"""
"""No Python: it starts at once."""


def pliant(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([forked.PLIANT, *arguments], cwd=Path.cwd(), timeout=60)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_jobs_give_way_in_good_order_and_ends_are_seen_though_nobody_looked(tmp_path: Path) -> None:
    state, signal_file, fails = tmp_path / "state", tmp_path / "go", tmp_path / "fails.sh"
    fails.write_text(WAITS_AND_FAILS)
    fails.chmod(0o755)
    with serving(state, "--devices", "cpu=3", "--interval", "300ms") as server:
        server.submit("a", ["conv", "4", "400", "turn_s=0.01"], min=2, max=2, checkpoint_every=0)
        server.submit("fails", [str(signal_file)], program=str(fails), replicas=1, priority=1)

        second = pliant("serve", "--state", str(state), "--devices", "cpu=3")
        assert second.returncode == 2
        assert f"the server with pid {server.pid} uses it" in second.stderr
        until(lambda: server.job("a").step and len(server.workers("a")) == 2, "two workers that train")

        # The job of lower priority gives a slot, between two steps, and nobody is killed.
        reserved = pliant("serve", "--state", str(state), "--reserve", "cpu=1")
        assert len(server.workers("a")) == 1, reserved.stderr
        took = re.fullmatch(r"reserved cpu=1, free after (\d\.\d\d) s\n", reserved.stdout)
        assert took is not None, reserved
        assert float(took[1]) <= 1.0

        # A run that ends while there is no server is known to the next one, with its exit code.
        until(lambda: server.workers("fails"), "the other job's worker")
        server.end(signal.SIGKILL)
        signal_file.touch()
        until(lambda: list((state / "jobs" / "fails").glob("run-*/exit.json")), "the keeper to write the exit code")
        server.start()
        failed = until(lambda: (job := server.job("fails")).is_over and job, "the end to be seen")
        assert (failed.state, failed.exit_code) == ("failed", 3)
        assert server.job("a").state == "running"
        assert server.client.cluster().reserved == {"cpu": 1}

        # Taking everything puts the job off; it comes back where it was.
        answer = server.client.reserve({"cpu": 3})
        assert answer.took_s <= 1.0
        assert server.workers("a") == []
        off = until(lambda: (job := server.job("a")).state == "put-off" and job, "it to be put off")
        given_back = pliant("serve", "--state", str(state), "--reserve", "cpu=0")
        assert given_back.stdout == "nothing is reserved: all devices are for jobs\n", given_back.stderr
        until(lambda: (job := server.job("a")).state == "running" and job.step, "it to train again")
        if "killed" not in server.events("a"):  # on a machine too slow to leave within the second, it begins anew
            resumed = re.search(r"resumed from \S+ at step (\d+)", server.output("a"))
            assert resumed is not None
            assert int(resumed[1]) >= off.step, "nothing was lost"

        # Stopped in good order: the end of the run, the processes, and the server, which leaves its jobs alone.
        runner = server.runner("a")
        server.client.stop("a")
        assert until(lambda: (job := server.job("a")).is_over and job, "its end").state == "stopped"
        assert not Path(f"/proc/{runner}").exists()
        assert "jobs run on" in server.end(signal.SIGTERM)
        assert not (state / "server.json").exists()


STORM_JOBS = {"conv": 12, "lstm": 12, "adamw": 10}


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FULL, reason="minutes; set PLIANT_FULL=1")
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_over_live_jobs_changes_no_bit(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    gate = tmp_path / "gate"
    open_gate(gate, 20)
    with serving(tmp_path / "state", "--devices", "cpu=4", "--interval", "300ms") as server:
        for name, epochs in STORM_JOBS.items():
            arguments = [name, "4", str(epochs), "turn_s=0.02", f"gate={gate}"]
            server.submit(name, arguments, checkpoint_every=5, min=chance.choice([0, 1, 2]))
        for round_ in range(20):
            open_gate(gate, 20 + 2 * round_)  # so that nobody has finished before the last round
            until(lambda: any(job.state == "running" for job in server.client.jobs()), "a job that trains")
            name = chance.choice(list(STORM_JOBS))
            workers = server.workers(name)
            match chance.choice(["reserve", "reserve", "worker", "workers", "runner", "server", "nothing"]):
                case "reserve":
                    server.client.reserve({"cpu": (wanted := chance.randrange(4))})
                    assert sum(len(server.workers(each)) for each in STORM_JOBS) <= 4 - wanted
                case "worker" if workers:
                    kill(chance.choice(workers).pid)
                case "workers":
                    for worker in workers:
                        kill(worker.pid)
                case "runner" if server.job(name).state == "running":
                    kill(server.runner(name))
                case "server":
                    server.end(signal.SIGKILL)
                    server.start()
            time.sleep(chance.random())  # the storm's own pace
        server.client.reserve({})
        open_gate(gate, 1000)
        for name in STORM_JOBS:
            server.finished(name)
        hashes = {name: server.hash(name) for name in STORM_JOBS}
    assert hashes == {name: golden(name, 4, epochs)[-1].digest for name, epochs in STORM_JOBS.items()}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
