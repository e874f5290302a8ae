"""Jobs on a Ray cluster of two nodes, each at a loopback address of its own; one of them is taken away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gang import FULL
from golden import golden
from launching import MAIN, Ended, Launcher, Runner
from patience import open_gate, until
from subject import compare, history
from two_nodes import CPUS, HEAD, OTHER, PATIENCE_S, Nodes

from pliant.child import start_ticks
from pliant.errors import ConfigError
from pliant.launch.on_ray.cluster import connected

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("ray_program.py")


@pytest.fixture
def ray(launcher: Launcher, nodes: Nodes) -> Callable[..., Runner]:
    def start(*arguments: object) -> Runner:
        return launcher.start("-q", "--on", "ray", "--ray-address", nodes.address, *arguments)

    return start


def test_resized_and_robbed_of_a_node_it_has_the_bits_of_ddp(
    launcher: Launcher, nodes: Nodes, ray: Callable[..., Runner]
) -> None:
    journals = launcher.directory / "journals"
    journals.mkdir()
    gate = journals / "gate"
    open_gate(gate, 3)
    job = ray("-np", 3, "--devices", "cpu=4", PROGRAM, journals, "conv", 4, 4)
    until(lambda: _committed(journals, 2) == 3, "step 2")
    _resize(launcher, job, 4)
    until(lambda: _count(journals, "prepared", '"roll": 2,') == 3, "all to know the newcomer")
    open_gate(gate, 8)
    until(lambda: _committed(journals, 7) == 4, "step 7 on four")
    assert {path.name.partition(":")[0] for path in journals.glob("*.journal")} == {HEAD, OTHER}, "Ray used one node"
    nodes.remove(OTHER)
    known = ('"roll": 3,', '"roll": 4,')
    until(lambda: any(_count(journals, "prepared", roll) for roll in known), "the loss to be known")
    # For so many there is room. New workers are let in after a step in the newest membership, and nobody knows how many
    # there will be: the loss of a node is one for each of its workers. So there is a step more from time to time.
    resizing = _start_resize(launcher, job, CPUS)
    for steps in (10, 11, 12, 13):
        open_gate(gate, steps)
        with contextlib.suppress(subprocess.TimeoutExpired):
            resizing.wait(5)
    assert resizing.wait(60) == 0  # it may return before the loss of the node is noticed
    until(lambda: len(list(journals.glob(f"{HEAD}:*.journal"))) == CPUS, "all to train on the node that is left")
    open_gate(gate, 14)
    until(lambda: _committed(journals, 13), "step 13")
    _resize(launcher, job, 1)
    open_gate(gate, 1000)
    ended = _end(job)
    assert ended.code == 0, ended
    assert f"the runner on {OTHER} is gone" in ended.stderr
    assert "all 1/1 nodes finished" in ended.last_line
    compare(history(sorted(journals.glob("*.journal"))), golden("conv", 4, 4), repeats=2)


def _resize(launcher: Launcher, job: Runner, size: int) -> None:
    """Have the job run on so many workers, as its user would."""
    assert _start_resize(launcher, job, size).wait(60) == 0


def _start_resize(launcher: Launcher, job: Runner, size: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MAIN, "resize", "--job", str(job.pid), str(size)]
    return subprocess.Popen(command, env=launcher.environ, stdout=subprocess.DEVNULL)


@pytest.mark.skipif(not FULL, reason="takes half a minute: set PLIANT_FULL=1")
def test_all_workers_are_lost_twice_and_it_goes_on_from_its_checkpoint(
    launcher: Launcher, nodes: Nodes, ray: Callable[..., Runner]
) -> None:
    journals = launcher.directory / "journals"
    journals.mkdir()
    gate = journals / "gate"
    open_gate(gate, 5)
    checkpoints = ("--checkpoint-dir", launcher.directory / "checkpoints", "--checkpoint-every", 3)
    nodes.add("127.0.0.5:0:spot=2")
    job = ray("--devices", "spot=2", *checkpoints, PROGRAM, journals, "conv", 4, 4)
    until(lambda: _committed(journals, 4) == 2, "step 4")
    os.kill(_runner_in(launcher.directory), signal.SIGKILL)
    until(lambda: _committed(journals, 4) == 4, "step 4 again, after the loss of the runner")
    open_gate(gate, 9)
    until(lambda: _committed(journals, 8) == 2, "step 8")
    nodes.remove("127.0.0.5")
    nodes.add("127.0.0.6:0:spot=2")
    open_gate(gate, 1000)
    ended = _end(job)
    nodes.remove("127.0.0.6")
    assert ended.code == 0, ended
    assert "its runner was killed by signal 9" in ended.stderr
    assert ended.stdout.count("resumed from") == 2, ended.stdout
    compare(history(sorted(journals.glob("*.journal"))), golden("conv", 4, 4), repeats=8)


def _runner_in(directory: Path) -> int:
    """The runner's process that works there."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if b"pliant.cli.over_ssh" in (process / "cmdline").read_bytes() and Path(
                os.readlink(process / "cwd")
            ).samefile(directory):
                return int(process.name)
    raise AssertionError(f"no runner in {directory}")


def _end(job: Runner) -> Ended:
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    return Ended(job.wait(0), stdout.decode(), stderr.decode())


def _committed(journals: Path, step: int) -> int:
    """How many workers have done this step."""
    return _count(journals, "commit", f'"step": {step},')


def _count(journals: Path, kind: str, fact: str) -> int:
    lines = [line for path in journals.glob("*.journal") for line in path.read_text().splitlines()]
    return sum(line.startswith(f'["{kind}"') and fact in line for line in lines)


def test_ends_of_all_kinds(launcher: Launcher, nodes: Nodes, ray: Callable[..., Runner]) -> None:
    """A worker that fails, Ctrl-C, and a driver that is killed: nothing is left running."""
    launcher.script("fails.py", "raise SystemExit(7)")
    launcher.script(
        "endless.py",
        """
        import os, pathlib, sys, time
        pathlib.Path(f"{sys.argv[1]}.{os.getpid()}.pid").touch()
        time.sleep(100)
        """,
    )
    seeing = ray("--no-warm", "--devices", "t4=2", "sh", "-c", "echo sees=$CUDA_VISIBLE_DEVICES.")
    failing = ray("--no-warm", "-np", 1, "-m", "fails")
    stopped, killed = (ray("--no-warm", "-np", 1, "--devices", "cpu=1", "endless.py", name) for name in ("a", "b"))
    until(lambda: len(launcher.files("*.pid")) == 2, "starting")
    pids = {path.name.split(".")[0]: int(path.name.split(".")[1]) for path in launcher.files("*.pid")}
    stopped.send_signal(signal.SIGINT)
    killed.kill()
    told = _end(stopped)
    assert told.code == 130, told
    assert "SIGINT received" in told.stderr
    failed = _end(failing)
    assert failed.code == 7, failed
    assert re.search(r"worker 127.0.0.\d:\d+ \(rank 0\) failed first: exit code 7", failed.stderr)
    assert sorted(re.findall(r"sees=(.*)\.", _end(seeing).stdout)) == ["0", "1"], "each worker has a GPU of its own"
    until(lambda: not any(start_ticks(pid) for pid in pids.values()), "the workers' end")


def test_asking_for_what_is_not_there(launcher: Launcher, ray: Callable[..., Runner]) -> None:
    launcher.script("train.py", "")
    many, unknown, early = (
        _end(runner)
        for runner in [
            ray("--devices", "t4=3", "train.py"),
            ray("--devices", "v100=1", "train.py"),
            ray("-np", 3, "--devices", "cpu=2", "train.py"),
        ]
    )
    assert re.search(
        r"--devices t4=3: the Ray cluster has cpu=\d, gpu=2, t4=2; ask for 2 or fewer, or add nodes", _line(many)
    )
    assert "the Ray cluster has no v100, it has cpu=" in _line(unknown)
    assert "-np 3: --devices cpu=2 has room for 2 workers" in _line(early)


def test_no_cluster_and_no_ray(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.script("train.py", "")
    here = ("--on", "ray", "-q")
    nobody, nonsense, place, hosts, local = launcher.run_all(
        (*here, "--ray-address", "127.0.0.9:9", "train.py"),
        (*here, "--ray-address", "nonsense", "train.py"),
        ("--on", "moon", "train.py"),
        (*here, "-H", "127.0.0.1:2", "train.py"),
        ("--devices", "cpu=2", "train.py"),
    )
    assert "nobody answers at 127.0.0.9:9" in _line(nobody)
    assert "--ray-address 'nonsense'" in _line(nonsense)
    assert _line(place) == "pliant: --on 'moon' is not known: use local or ray"
    assert "--hosts names hosts, but Ray chooses them" in _line(hosts)
    assert _line(local) == "pliant: --devices cpu=2 is for a Ray cluster: add --on ray"
    # Ray looks for clusters among all processes of the machine, where there may be some.
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", lambda address: None)
    with pytest.raises(ConfigError, match="auto: no Ray cluster runs here; start one with `ray start --head`"):
        connected("auto").__enter__()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--on ray needs Ray: `pip install 'pliant\[ray\]'`"):
        connected("auto").__enter__()


def _line(ended: Ended) -> str:
    """The one line of a refusal."""
    assert ended.code == 2, ended
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr.strip()
