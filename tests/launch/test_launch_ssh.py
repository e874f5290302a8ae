"""`pliant run --ssh` and `pliant remote-install` through a real sshd on two loopback addresses."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sshd
from launching import FOLLOW, Launcher, Runner, members, url_of
from typer.testing import CliRunner

from pliant.cli import run_ssh
from pliant.cli.main import build
from pliant.cli.remote_install import install_script
from pliant.cluster import Host
from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError
from pliant.launch.processes import RunnerOrder
from pliant.launch.ssh import SshJob, forwarded_environ, ssh_command

needs_sshd = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "there is one")
HOSTS = "127.0.0.1:1,127.0.0.2:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as found:
        yield found


class Remote:
    """`pliant run --ssh`, with hosts that the server stands for."""

    def __init__(self, launcher: Launcher, server: sshd.Sshd, port: int) -> None:
        self.launcher = launcher
        self._flags = ("--ssh", "-H", HOSTS, "-np", 2, "-q", "-port", port)
        self._environ = {"PLIANT_SSH": server.client}

    def start(self, *arguments: object, **environ: str) -> Runner:
        return self.launcher.start(*self._flags, *arguments, **{**self._environ, **environ})


@pytest.fixture
def remote(launcher: Launcher, server: sshd.Sshd, free_port: int) -> Remote:
    return Remote(launcher, server, free_port)


# What is said, without a server


def test_a_letter_arrives_as_it_was_written() -> None:
    letter = RunnerOrder(directory="/a b", arguments=["-np", "2", "x y"], environ={"PLIANT_X": "\n'\""})
    line = letter.to_line()
    assert line.count(b"\n") == 1
    assert RunnerOrder.from_line(line) == letter


def test_the_secret_is_in_the_letter_and_on_no_command_line() -> None:
    secret = bytes(range(32))
    hosts = (Host("10.0.0.1", 2), Host("fd00::2", 1, "node7"))
    job = SshJob(hosts=hosts, arguments=("-np", "3", "a.py"), python="/opt/a b/python", directory="/w", secret=secret,
                 environ={"PLIANT_TLS_CERT": "c", "PLIANT_SSH": "ssh -p 1", "AWS_KEY": "no", "OMP_NUM_THREADS": "1"})  # fmt: skip
    letter = job.order_for(hosts[1])
    assert letter.environ == {"PLIANT_TLS_CERT": "c", "OMP_NUM_THREADS": "1", "PLIANT_SECRET": secret.hex()}
    assert letter.arguments == ("-H", "10.0.0.1:2,[fd00::2]:1", "-self", "fd00::2", "-np", "3", "a.py")
    command = ssh_command(hosts[1], "me", "exec it", job.environ)
    assert command[:3] == ["ssh", "-p", "1"]
    assert command[-4:] == ["-l", "me", "node7", "exec it"]
    assert secret.hex() not in repr(job) + " ".join(command)
    assert "AWS_KEY" not in forwarded_environ(job.environ)


@pytest.mark.parametrize("user", ["-oProxyCommand=x", "a b", "a;b"])
def test_a_users_name_cannot_be_an_option_of_ssh(user: str) -> None:
    with pytest.raises(ConfigError, match="-u"):
        ssh_command(Host("10.0.0.1"), user, "true", {})


def test_a_broken_ssh_command_is_named() -> None:
    with pytest.raises(ConfigError, match="PLIANT_SSH"):
        ssh_command(Host("10.0.0.1"), "", "true", {"PLIANT_SSH": "ssh 'x"})


def test_every_flag_is_passed_on_but_those_that_are_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(run_ssh, "over_ssh", lambda ctx, options, **_: seen.append(run_ssh.forwarded(ctx)) or 0)
    words = "run --ssh -u me -nic eth0 -H 10.0.0.1:1 -np 1 -w -v=false -strategy STAR --no-warm --resize-schedule 10:1 p.py -np 9"
    assert CliRunner().invoke(build(), words.split()).exit_code == 0
    assert sorted(seen[0]) == sorted(
        ["-np", "1", "-w", "--no-v", "--strategy", "STAR", "--no-warm", "--resize-schedule", "10:1"]
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--ssh p.py", "-hostfile FILE or -H"),
        ("--ssh -H 10.0.0.1:1 -np 2 p.py", "not enough capacity"),
        ("--ssh -H 10.0.0.1:1 --dash 0 p.py", "add --record FILE"),
    ],
)
def test_what_cannot_work_is_refused_before_ssh_is_called(words: str, why: str) -> None:
    answer = CliRunner().invoke(build(), ["run", *words.split()])
    assert isinstance(answer.exception, ConfigError)
    assert why in str(answer.exception)


# Through the server


@needs_sshd
@pytest.mark.processes
def test_a_job_of_two_hosts_runs_in_this_directory_with_our_variables(remote: Remote, launcher: Launcher) -> None:
    launcher.script(
        "spec.py",
        """
        import os
        from pliant.identity import worker_spec  # the Python that has pliant, whatever PATH sshd gives
        spec = worker_spec()
        print(spec.view.rank_of(spec.worker), spec.view.size, os.getcwd(), os.environ["PLIANT_FOO"], flush=True)
        print("a line of", spec.worker.host, flush=True)
        """,
    )
    ended = launcher.end(remote.start("-m", "spec", PLIANT_FOO="with 'quotes'"))
    assert ended.code == 0, ended
    for rank, host in enumerate(sshd.ADDRESSES):
        assert re.search(rf"^\[{host}\.\d+::stdout\] {rank} 2 {launcher.directory} with 'quotes'$", ended.stdout, re.M)
        assert f"[{host}] all 1/1 local workers finished" in ended.stdout
    assert "all 2/2 hosts finished, took" in ended.last_line
    assert "arrived over ssh" not in ended.stdout


@needs_sshd
@pytest.mark.processes
def test_the_first_failure_ends_all_and_its_exit_code_is_ours(remote: Remote, launcher: Launcher) -> None:
    launcher.script(
        "fails.py",
        """
        import sys, time
        from pliant.identity import worker_spec
        spec = worker_spec()
        sys.exit(7) if spec.view.rank_of(spec.worker) else time.sleep(600)
        """,
    )
    ended = launcher.end(remote.start("fails.py"))
    assert ended.code == 7, ended
    assert re.search(r"host 127\.0\.0\.[12]: its runner ended with exit code 7", ended.stderr)


SLEEPER = """
import os, pathlib, time
from pliant.identity import worker_spec
spec = worker_spec()
pathlib.Path(f"pid-{spec.view.rank_of(spec.worker)}").write_text(str(os.getpid()))
print("up", flush=True)
time.sleep(600)
"""


def await_lines(runner: Runner, text: bytes, count: int) -> bytes:
    seen = b""
    while seen.count(text) < count:
        line = runner.stdout.readline()
        assert line, seen
        seen += line
    return seen


@needs_sshd
@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_ctrl_c_and_even_a_kill_leave_nothing_running(
    remote: Remote, launcher: Launcher, alive: Callable[[int], bool], signum: signal.Signals
) -> None:
    """A kill closes the connections, and that is the order to stop."""
    launcher.script("sleeper.py", SLEEPER)
    runner = remote.start("sleeper.py")
    await_lines(runner, b"] up\n", 2)
    pids = [int((launcher.directory / f"pid-{rank}").read_text()) for rank in range(2)]
    watched = [os.pidfd_open(pid) for pid in pids]
    runner.send_signal(signum)
    if signum == signal.SIGINT:
        assert launcher.end(runner).code == 130
    for pidfd in watched:
        assert select.select([pidfd], [], [], sshd.DEADLINE_S)[0], "a worker outlived its job"
        os.close(pidfd)


@needs_sshd
@pytest.mark.processes
def test_an_elastic_job_goes_on_when_the_runner_of_the_first_host_is_killed(
    remote: Remote, launcher: Launcher, alive: Callable[[int], bool]
) -> None:
    launcher.script("follow.py", FOLLOW)
    home = {"PLIANT_HOME": str(launcher.directory / "home"), "PLIANT_TOKEN": "t" * 20}
    runner = remote.start("-w", "--no-warm", "follow.py", **home)
    with ConfigClient(url_of(runner), "t" * 20) as client:
        pids, membership = members(launcher, 2), client.membership()
        [first] = [pids[worker.port] for worker in membership.members if worker.host == "127.0.0.1"]
        os.kill(int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        lost = client.wait_for_membership(membership.number, 10)
        assert [worker.host for worker in lost.members] == ["127.0.0.2"]
        client.finish(lost.members[0])
    ended = launcher.end(runner)
    assert ended.code == 0, ended.stderr
    assert not alive(first)
    assert re.search(r"host 127.0.0.1: .* the runner was killed.*; the job goes on without it", ended.stderr)
    assert ended.last_line.startswith("all 1/1 hosts finished (1 lost), took")


@needs_sshd
def test_a_host_that_cannot_be_reached_is_named_in_one_line(launcher: Launcher, server: sshd.Sshd) -> None:
    launcher.script("p.py", "")
    ended = launcher.run("--ssh", "-H", "127.0.0.3:1", "-q", "p.py", PLIANT_SSH=server.client)
    assert ended.code == 255
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("[E]")]
    assert "host 127.0.0.3 cannot be reached over ssh (ssh: connect to host 127.0.0.3" in line


@needs_sshd
@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [("--remote-python", "/none/python", "pliant does not start there"), ("--remote-dir", "/none", "--remote-dir")],
)
def test_a_host_without_what_is_needed_says_so(
    launcher: Launcher, server: sshd.Sshd, flag: str, value: str, why: str
) -> None:
    launcher.script("p.py", "")
    ended = launcher.run("--ssh", flag, value, "-H", "127.0.0.1:1", "-q", "p.py", PLIANT_SSH=server.client)
    assert ended.code != 0
    assert why in ended.stderr
    assert "127.0.0.1" in ended.stderr


# Installing


def test_a_dry_run_prints_the_command_of_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIANT_SSH", raising=False)
    (tmp_path / "hosts.txt").write_text("10.0.0.19\n10.0.0.20 slots=4 # the second\n")
    answer = CliRunner().invoke(
        build(),
        f"remote-install -u me -hostfile {tmp_path}/hosts.txt --dry-run --spec pliant==0.1.0".split(),
    )
    assert answer.exit_code == 0, answer
    first, second = answer.stdout.splitlines()
    assert first.startswith("ssh -T -o BatchMode=yes")
    assert " -l me 10.0.0.19 " in first
    assert " -l me 10.0.0.20 " in second
    assert "pip install -q --disable-pip-version-check pliant==0.1.0" in first


def test_paths_and_names_are_quoted_for_the_far_shell() -> None:
    script = install_script(
        "~/a b", "python3; rm -rf x", "pliant==1", is_file=False, pip_args="--index-url 'http://x y'"
    )
    assert "\"$HOME\"/'a b'/bin/python" in script
    assert "'python3; rm -rf x' -m venv" in script
    assert "--index-url 'http://x y'" in script


def test_without_hosts_nothing_is_installed() -> None:
    answer = CliRunner().invoke(build(), ["remote-install"])
    assert isinstance(answer.exception, ConfigError)


@needs_sshd
@pytest.mark.processes
def test_this_checkout_is_installed_over_ssh_and_a_bad_host_is_named(
    tmp_path: Path, server: sshd.Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIANT_SSH", server.client)
    venv = tmp_path / "far away"
    # With this Python's own packages in sight there is a pip, and nothing to download.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True, timeout=60
    )
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "here.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    answer = CliRunner().invoke(
        build(),
        [
            *["remote-install", "-H", "127.0.0.1,127.0.0.3", "--pip-args"],
            "--no-deps --ignore-installed",
            "--venv",
            str(venv),
        ],
    )
    assert answer.exit_code == 1
    good, bad = answer.stdout.splitlines()
    assert re.fullmatch(rf"127\.0\.0\.1: pliant \S+ in {venv}, took [\d.]+s", good), answer.stdout
    assert bad.startswith("127.0.0.3: cannot be reached over ssh (ssh: connect to host 127.0.0.3")
    assert (site / "pliant" / "launch" / "ssh.py").is_file()
    assert (venv / "bin" / "pliant").is_file()
    assert not list(venv.glob("*.whl"))
