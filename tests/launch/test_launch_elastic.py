"""Runners of elastic and of independent jobs, with real workers that crash, leave and come."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from launching import Launcher, client_of

from pliant.errors import ENDED_EXIT
from pliant.jobs.client import stop_foreground
from pliant.jobs.store import running_jobs

FOLLOW = """
    import os, pathlib, sys
    from pliant.identity import worker_spec
    from pliant.elastic.client import ConfigClient

    spec = worker_spec()
    me = spec.worker
    with ConfigClient(spec.config_server, spec.token) as client:
        membership = client.ready(me)
        while me not in membership.members and not membership.over:
            membership = client.wait_for_membership(membership.number, 30)
        print(f"trains {'torch' in sys.modules}", flush=True)  # before it is up: it is killed right after
        pathlib.Path(f"up-{me.port}-{os.getpid()}").touch()
        while me in membership.members:
            membership = client.wait_for_membership(membership.number, 30)
"""


def up(launcher: Launcher, count: int) -> dict[int, int]:
    """The process of each port that trains or has."""
    launcher.until(lambda: len(launcher.files("up-*")) == count, f"start of {count} members")
    found = (path.name.split("-")[1:] for path in launcher.files("up-*"))
    return {int(port): int(pid) for port, pid in found}


@pytest.mark.processes
def test_a_killed_member_is_lost_and_replaced(launcher: Launcher, alive: Callable[[int], bool], free_port: int) -> None:
    launcher.script("follow.py", FOLLOW)
    ports = f"{free_port}-{min(free_port + 30, 65535)}"
    runner = launcher.start("-w", "--warm", "-np", 2, "-port-range", ports, "follow.py", **launcher.without_torch())
    with client_of(launcher, runner) as client:
        (first_port, first), (_, second) = sorted(up(launcher, 2).items())
        before = client.membership()
        [job] = [job for job in running_jobs(launcher.environ) if job.pid == runner.pid]
        assert job.config_server == str(client.url)
        os.kill(first, signal.SIGKILL)
        lost = client.wait_for_membership(before.number, 20)
        assert lost.urgent == lost.number
        now = up(launcher, 3)
        membership = client.membership()
        assert now[membership.members[0].port] == second
        assert first_port not in [worker.port for worker in membership.members]
        client.resize(1)
        launcher.until(lambda: len([pid for pid in now.values() if alive(pid)]) == 1, "end of the one removed")
    assert stop_foreground(job.name, environ=launcher.environ)
    ended = launcher.end(runner)
    assert ended.code == ENDED_EXIT, ended.stderr
    assert "the job was ended before its last step: pliant stop (POST /resize from 127.0.0.1)\n" in ended.stderr
    assert "finished" not in ended.stdout
    assert not [job for job in running_jobs(launcher.environ) if job.pid == runner.pid]
    assert f"lost 127.0.0.1.{first_port}: killed by SIGKILL" in ended.stderr
    assert "killed by SIGKILL; replacing it now\n" in ended.stderr
    assert ended.stdout.count("trains True") == 3


@pytest.mark.processes
def test_a_program_that_always_crashes_ends_the_job(launcher: Launcher) -> None:
    launcher.script(
        "crash.py",
        FOLLOW.replace("while me in membership.members", "sys.exit(5)\n        while me in membership.members"),
    )
    ended = launcher.run("-q", "-w", "--no-warm", "-np", 2, "--max-restarts", 2, "crash.py")
    assert ended.code == 5
    assert re.search(r"worker 127.0.0.1:\d+ .*was the last one, and failed: exit code 5", ended.stderr)


@pytest.mark.processes
def test_the_job_goes_on_when_a_host_dies(launcher: Launcher, free_port: int) -> None:
    launcher.script("follow.py", FOLLOW)
    common = ("-w", "--no-warm", "-np", 2, "-H", "127.0.0.1:1,127.0.0.2:1", "-port", free_port, "follow.py")
    head, other = (
        launcher.start("-self", host, *common, PLIANT_SECRET="s" * 32) for host in ("127.0.0.1", "127.0.0.2")
    )
    with client_of(launcher, head) as client:
        up(launcher, 2)
        membership = client.membership()
        assert len(membership.members) == 2
        other.kill()
        lost = client.wait_for_membership(membership.number, 20)
        assert [worker.host for worker in lost.members] == ["127.0.0.1"]
        client.finish(lost.members[0])
    ended = launcher.end(head)
    assert ended.code == 0, ended.stderr
    assert "the runner on 127.0.0.2 is gone; the job goes on without it" in ended.stderr


INDEPENDENT = """
import os, pathlib, sys
once = pathlib.Path("crashed")
try:
    once.touch(exist_ok=False)
    os.kill(os.getpid(), 9)
except FileExistsError:
    print("worked")
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 78])
def test_independent_workers_are_replaced_one_by_one_until_all_have_ended(launcher: Launcher, code: int) -> None:
    program = launcher.script("independent.py", INDEPENDENT)
    ended = launcher.run("-w", "--no-warm", "--independent", "-np", "2", program, str(code))
    assert ended.code == code
    assert ended.stdout.count("worked") == 2
    assert "killed by SIGKILL" in ended.stderr
    assert "killed by SIGKILL; replacing it now\n" in ended.stderr
    if code:
        assert ended.stderr.splitlines()[-1].endswith("was the last one, and failed: exit code 78: worked")
