"""`pliant serve --on ray`: three jobs on a cluster of two nodes, one of which is lost, each with the bits of stock DDP."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from gang import FULL
from golden import golden
from patience import open_gate, until
from serving_process import Serving, serving
from two_nodes import CPUS, HEAD, Nodes

from pliant.launch.processes import LivingWorker, read_runner_state

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FULL, reason="takes a minute: set PLIANT_FULL=1"),
]

THIRD = "127.0.0.4"
JOBS = {"conv": 4, "lstm": 3, "adamw": 3}
"""Program and epochs; all of them in one run of the oracle, which other tests ask for, too."""


def workers(server: Serving, *names: str) -> dict[str, LivingWorker]:
    """The living workers of these jobs, as the runners on the nodes, which are all this machine, have written them down."""
    servers = {state.config_server for name in names if (state := server.runner_state(name)) is not None}
    told = [read_runner_state(file) for file in Path(tempfile.gettempdir()).glob("pliant-ray-*/state.json")]
    found = [state.workers for state in told if state is not None and state.config_server in servers]
    return {worker: each for theirs in found for worker, each in theirs.items() if each.lives}


def test_three_jobs_keep_their_bits_on_two_nodes_one_of_which_is_lost(tmp_path: Path, nodes: Nodes) -> None:
    if not nodes.others:
        nodes.add(f"{THIRD}:{CPUS}")
    gates = {name: tmp_path / f"{name}.gate" for name in JOBS}
    for gate in gates.values():
        open_gate(gate, 9)  # nobody finishes before everything has happened
    settings = {name: [name, "4", str(epochs), "turn_s=0.05", f"gate={gates[name]}"] for name, epochs in JOBS.items()}
    flags = ("--on", "ray", "--ray-address", nodes.address, "--devices", "cpu=4", "--interval", "300ms")
    with serving(tmp_path / "state", *flags) as server:
        # Submitted at different times, and resized by the scheduler: one slot is left, and goes to whoever is measured first.
        server.submit("conv", settings["conv"], checkpoint_every=2)
        until(lambda: server.runner_state("conv"), "conv's driver")
        server.submit("lstm", settings["lstm"], checkpoint_every=2)
        server.submit("adamw", settings["adamw"], checkpoint_every=2)
        grown = until(lambda: next((name for name in JOBS if len(workers(server, name)) > 1), None), "one to grow")
        until(lambda: server.members(grown) == 2, f"{grown}'s newcomer")
        open_gate(gates[grown], 12)  # it joins between two steps
        until(lambda: "resize 1 -> 2" in server.output(grown), f"{grown} to train on both")
        until(lambda: all(server.job(name).step for name in JOBS), "all jobs to train")

        # A worker is killed, and replaced by the runner of its node.
        victim = workers(server, grown).popitem()[1]
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not victim.lives and len(workers(server, grown)) == 2, "a replacement")

        # The scheduler is killed, and begun anew: the jobs' drivers are the same processes.
        drivers = {name: server.runner(name) for name in JOBS}
        server.end(signal.SIGKILL)
        server.start()
        assert {name: server.runner(name) for name in JOBS} == drivers

        # A node is lost: what ran there goes on elsewhere.
        there = {worker.partition(":")[0] for worker in workers(server, *JOBS)}
        lost = next(iter(there - {HEAD}), None)
        assert lost is not None, "Ray has put everybody on the head"
        nodes.remove(lost)
        until(lambda: not [worker for worker in workers(server, *JOBS) if worker.startswith(lost)], "its workers' end")

        # A tenant takes two slots: free within the second.
        answer = server.client.reserve({"cpu": 2})
        living = workers(server, *JOBS)
        assert len(living) <= 2, (living, server.log)
        assert answer.took_s <= 1.0, server.log
        server.client.reserve({})
        for gate in gates.values():
            open_gate(gate, 1000)
        for name in JOBS:
            server.finished(name)
        hashes = {name: server.hash(name) for name in JOBS}
    assert hashes == {name: golden(name, 4, epochs)[-1].digest for name, epochs in JOBS.items()}
