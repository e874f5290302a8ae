"""`pliant run` as its users see it: real runners, tiny workers, one host."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DEADLINE_S, MAIN, Launcher

from pliant.tokens import find_token

pytestmark = pytest.mark.processes

HELLO = """
    import os, sys
    print("hello from", os.environ["PLIANT_WORKER"], *sys.argv[1:])
"""
# Says that it is up by a file of its process id, then works until it is told to end.
STEPS = """
    import os, pathlib, signal, sys, time
    def end(*_):
        pathlib.Path(f"step-done-{os.getpid()}").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path(f"up-{os.getpid()}").touch()
    while True:
        time.sleep(60)
"""
STUBBORN = """
    import os, pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(f"up-{os.getpid()}").touch()
    while True:
        time.sleep(60)
"""


def up(launcher: Launcher, count: int) -> list[int]:
    launcher.until(lambda: len(launcher.files("up-*")) == count, f"start of {count} workers")
    return [int(path.name.removeprefix("up-")) for path in launcher.files("up-*")]


@pytest.mark.parametrize("interpreter", [[], [sys.executable]], ids=["script", "python script"])
def test_all_workers_run_and_the_last_line_says_so(launcher: Launcher, interpreter: list[str]) -> None:
    launcher.script("hello.py", HELLO)
    ended = launcher.run("-np", 3, *interpreter, "hello.py", "-np", "9", "--flag")
    assert ended.code == 0
    lines = ended.stdout.splitlines()
    assert sorted(line.split("::")[1] for line in lines[:-1]) == sorted(
        f"stdout] hello from 127.0.0.1:{port} -np 9 --flag" for port in re.findall(r"\.(\d+)::", ended.stdout)
    )
    assert re.fullmatch(r"all 3/3 local workers finished, took \d+\.\ds", ended.last_line)
    assert "\x1b" not in ended.stdout  # no colours in a pipe


def test_a_worker_finds_its_spec_and_inherits_its_socket(launcher: Launcher) -> None:
    launcher.script(
        "spec.py",
        """
        import os, socket
        from pliant.identity import worker_spec
        spec = worker_spec()
        sock = socket.socket(fileno=spec.listen_fd)
        assert sock.getsockname() == (spec.worker.host, spec.worker.port), sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        print(spec.view.size, spec.strategy, spec.heartbeat_timeout_s, len(spec.secret))
        print(os.environ["PYTHONUNBUFFERED"], "CUDA_VISIBLE_DEVICES" in os.environ)
        """,
    )
    ended = launcher.run("-q", "-np", 2, "-strategy", "ring", "--heartbeat-timeout", "3s", "spec.py")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("] 2 RING 3.0 32\n") == 2
    assert ended.stdout.count("] 1 ") == 2
    assert ended.stderr == ""


def test_the_first_failure_ends_the_job_with_its_last_lines(launcher: Launcher) -> None:
    launcher.script("steps.py", STEPS)
    launcher.script(
        "fail.py",
        """
        import os, runpy, sys, pathlib, time
        if os.environ["PLIANT_LOCAL_RANK"] == "0":
            runpy.run_path("steps.py")
        while not list(pathlib.Path().glob("up-*")):
            time.sleep(0.005)
        for i in range(30):
            print("trouble", i, file=sys.stderr)
        sys.exit(7)
        """,
    )
    ended = launcher.run("-q", "-np", 2, "-v=false", "fail.py")
    assert ended.code == 7
    assert re.search(
        r"worker 127.0.0.1:\d+ \(rank 1\) failed first: exit code 7; its last lines of stderr:", ended.stderr
    )
    assert re.findall(r"^  trouble (\d+)$", ended.stderr, re.M) == [str(i) for i in range(10, 30)]
    assert len(launcher.files("step-done-*")) == 1  # the other one was told, and had time
    assert "finished" not in ended.stdout


def test_a_worker_that_is_killed_is_named_with_its_signal(launcher: Launcher) -> None:
    ended = launcher.run("-q", "sh", "-c", "kill -SEGV $$")
    assert ended.code == 128 + signal.SIGSEGV
    assert "killed by SIGSEGV; it printed nothing" in ended.stderr


def test_a_program_that_the_kernel_refuses_is_explained(launcher: Launcher) -> None:
    tool = launcher.script("tool", "no interpreter line")
    tool.chmod(0o755)
    ended = launcher.run("-q", "./tool")
    assert ended.code == 126
    assert "cannot run ./tool: Exec format error: start it with its interpreter" in ended.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_leaves_workers_time_to_finish_the_step(launcher: Launcher, signum: int, code: int) -> None:
    launcher.script("steps.py", STEPS)
    runner = launcher.start("-q", "-np", 2, "steps.py")
    up(launcher, 2)
    runner.send_signal(signum)
    ended = launcher.end(runner)
    assert ended.code == code
    assert len(launcher.files("step-done-*")) == 2
    assert f"{signal.Signals(signum).name} received by the runner" in ended.stderr


def test_under_nohup_a_hangup_is_nothing(launcher: Launcher) -> None:
    launcher.script("steps.py", STEPS)
    launcher.nohup = True
    runner = launcher.start("-q", "-np", 2, "steps.py")
    up(launcher, 2)
    runner.send_signal(signal.SIGHUP)
    runner.terminate()
    ended = launcher.end(runner)
    assert ended.code == 143
    assert len(launcher.files("step-done-*")) == 2, "a second signal would have killed them"
    assert "SIGHUP" not in ended.stderr


def test_a_second_signal_kills_at_once(launcher: Launcher, alive: Callable[[int], bool]) -> None:
    launcher.script("stubborn.py", STUBBORN)
    runner = launcher.start("-q", "--grace", "10m", "stubborn.py")
    (pid,) = up(launcher, 1)
    runner.send_signal(signal.SIGTERM)
    assert b"SIGTERM received" in runner.stderr.readline()
    runner.send_signal(signal.SIGTERM)
    assert launcher.end(runner).code == 143
    assert not alive(pid)


def test_the_timeout_and_the_grace_end_a_stubborn_job(launcher: Launcher, alive: Callable[[int], bool]) -> None:
    launcher.script("stubborn.py", STUBBORN)
    ended = launcher.run("-q", "-timeout", "300ms", "--grace", "50ms", "stubborn.py")
    assert ended.code == 124
    assert "the job was not done after -timeout 0.3s" in ended.stderr
    assert not any(alive(int(path.name.removeprefix("up-"))) for path in launcher.files("up-*"))


FAMILY = """
    import os, pathlib, subprocess, sys, time
    nap = "import os, pathlib, time; pathlib.Path(f'up-{os.getpid()}').touch(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", nap])
    subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
    subprocess.Popen(["sh", "-c", f'"{sys.executable}" -c "{nap}" & wait'])
    pathlib.Path(f"up-{os.getpid()}").touch()
    while len(list(pathlib.Path().glob("up-*"))) < 4:
        time.sleep(0.005)
    if "end" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    time.sleep(600)
"""


def test_kill_9_of_the_runner_leaves_nothing(launcher: Launcher, alive: Callable[[int], bool]) -> None:
    launcher.script("family.py", FAMILY)
    runner = launcher.start("-q", "family.py")
    pids = up(launcher, 4)
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()
    runner.kill()
    runner.wait(DEADLINE_S)
    for pid in [*pids, *map(int, children)]:  # the guardian among them
        launcher.until(lambda pid=pid: not alive(pid), f"end of {pid}")  # type: ignore[misc]


def test_without_its_guardian_a_runner_goes_on_and_leaves_nothing_when_it_is_ended(
    launcher: Launcher, alive: Callable[[int], bool]
) -> None:
    launcher.script("family.py", FAMILY)
    runner = launcher.start("-q", "family.py")
    pids = up(launcher, 4)
    children = map(int, Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split())
    [guardian] = [pid for pid in children if b"\0guard\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guardian, signal.SIGKILL)
    launcher.until(lambda: not alive(guardian), "the end of the guardian")
    assert runner.poll() is None
    runner.terminate()
    assert launcher.end(runner).code == 143
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("code", [0, 5])
def test_children_do_not_outlive_their_worker(launcher: Launcher, alive: Callable[[int], bool], code: int) -> None:
    launcher.script("family.py", FAMILY)
    ended = launcher.run("-q", "family.py", "end", code)
    assert ended.code == code
    assert not any(alive(pid) for pid in up(launcher, 4))


def test_two_jobs_on_one_host_do_not_meet(launcher: Launcher) -> None:
    launcher.script("steps.py", STEPS)
    first = launcher.start("-q", "-np", 2, "steps.py")
    second = launcher.start("-q", "-np", 2, "steps.py")
    pids = up(launcher, 4)
    seen = [
        dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)
        for pid in pids
    ]
    assert len({environ["PLIANT_WORKER"] for environ in seen}) == 4
    assert len({environ["PLIANT_SECRET"] for environ in seen}) == 2
    for runner in (first, second):
        runner.terminate()
    assert [launcher.end(runner).code for runner in (first, second)] == [143, 143]


def test_a_taken_port_is_skipped_and_a_full_range_refused(launcher: Launcher, free_port: int) -> None:
    wide, full = (f"{free_port}-{end}" for end in (min(free_port + 20, 65535), free_port))
    with socket.create_server(("127.0.0.1", free_port)):  # the only one of the range for the second
        skipped, refused = launcher.run_all(
            ("-q", "-port-range", wide, "sh", "-c", "echo $PLIANT_WORKER"), ("-q", "-port-range", full, "true")
        )
    assert skipped.code == 0
    assert f"] 127.0.0.1:{free_port}\n" not in skipped.stdout
    assert refused.code == 2
    assert "no free port" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        (["-nic", "lo"], "127.0.0.1"),
        (["-self", "::1"], "::1"),
        (["-H", "[::1]:2"], "::1"),
        (["-H", "localhost:1"], "127.0.0.1"),
    ],
    ids=str,
)
def test_the_address_is_the_flags(launcher: Launcher, flags: list[str], label: str) -> None:
    launcher.script("hello.py", HELLO)
    ended = launcher.run("-q", *flags, "hello.py")
    assert ended.code == 0, ended.stderr
    shown = f"[{label}]" if ":" in label else label
    assert re.match(rf"\[{re.escape(label)}\.(\d+)::stdout\] hello from {re.escape(shown)}:\1\n", ended.stdout)


def test_no_line_is_lost_and_any_byte_passes(launcher: Launcher) -> None:
    launcher.script(
        "many.py",
        r"""
        import sys
        out = sys.stdout.buffer
        for i in range(100_000):
            out.write(b"%d \xff\n" % i)
        out.write(b"\x00\x1b[31m no newline")
        """,
    )
    runner = launcher.start("-q", "many.py")
    stdout, _ = runner.communicate(timeout=DEADLINE_S)
    lines = [line.split(b"] ", 1)[-1] for line in stdout.split(b"\n")]
    assert lines[:100_000] == [b"%d \xff" % i for i in range(100_000)]
    assert lines[100_000] == b"\x00\x1b[31m no newline"
    assert runner.wait(0) == 0


def test_a_reader_that_goes_away_does_not_end_the_job(launcher: Launcher) -> None:
    launcher.script("talk.py", "for i in range(20000): print(i)\nopen('talked', 'w')\n")
    runner = launcher.start("-q", "talk.py")
    runner.stdout.close()
    launcher.until(lambda: (launcher.directory / "talked").exists(), "end of the worker")
    assert runner.wait(DEADLINE_S) == 0
    assert b"cannot write the output" in runner.stderr.read()


def test_a_runner_without_stdout_still_runs(launcher: Launcher) -> None:
    command = f'"{sys.executable}" -c "{MAIN}" run --plain -q -logdir logs -np 2 echo hi >&- 2>&- <&-'
    assert subprocess.run(["sh", "-c", command], cwd=launcher.directory, timeout=DEADLINE_S).returncode == 0
    assert [log.read_text() for log in launcher.files("logs/*")] == ["hi\n", "hi\n"]


def test_logs_are_written_where_asked(launcher: Launcher) -> None:
    ended = launcher.run("-logdir", "logs", "-logfile", "own/run.log", "-v=false", "sh", "-c", "printf 'a\\nb'")
    assert ended.code == 0
    (log,) = launcher.files("logs/*")
    assert re.fullmatch(r"127\.0\.0\.1\.\d+\.stdout\.log", log.name)  # no stderr, no file
    assert log.read_text() == "a\nb"
    assert ended.stdout == ended.last_line + "\n"
    own = (launcher.directory / "own/run.log").read_text()
    assert "[I] command: sh -c" in own
    assert ended.last_line in own


def test_quiet_leaves_out_the_dump_and_no_secret_is_ever_in_it(launcher: Launcher) -> None:
    loud, quiet = launcher.run_all(("true",), ("-q", "true"), PLIANT_SECRET="hush" * 5)
    assert "[I] nic lo: 127.0.0.1" in loud.stderr
    assert "hush" not in loud.stderr + loud.stdout
    assert quiet.stderr == ""


def test_prefixes_are_coloured_on_a_terminal_only(launcher: Launcher) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", "--plain", "-q", "echo", "hi"],
        env={**launcher.environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    while b"finished" not in shown:
        shown += os.read(ours, 4096)
    process.wait(DEADLINE_S)
    os.close(ours)
    assert re.search(rb"\x1b\[36m\[127\.0\.0\.1\.\d+::stdout\]\x1b\[0m hi", shown)


def test_each_worker_gets_a_device_and_sharing_is_said(launcher: Launcher) -> None:
    show = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES/$PLIANT_CUDA_VISIBLE_DEVICES")
    ended, linked = launcher.run_all(
        ("-q", "-np", 3, *show), ("-q", "-np", 2, "-allow-nvlink", *show), CUDA_VISIBLE_DEVICES="5,7"
    )
    assert sorted(re.findall(r"\] (\S+)\n", ended.stdout)) == ["5/5", "5/5", "7/7"]
    assert ended.stderr.startswith("[W] 3 workers share 2 CUDA devices of 127.0.0.1, and compete for them; with 2")
    assert sorted(re.findall(r"\] (\S+)\n", linked.stdout)) == ["5,7/5", "5,7/7"]


def test_the_debug_port_shows_views_and_workers(launcher: Launcher, free_port: int) -> None:
    launcher.script("steps.py", STEPS)
    runner = launcher.start("-q", "-np", 2, "-init-version", 3, "-debug-port", free_port, "steps.py")
    pids = up(launcher, 2)
    url = f"http://127.0.0.1:{free_port}/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=10)
    token = {"Authorization": f"Bearer {find_token(url, launcher.environ)}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=token), timeout=10) as answer:
        state = json.load(answer)
    assert len(state["stages"]["3"]["Workers"]) == 2
    assert sorted(worker["pid"] for worker in state["workers"].values()) == sorted(pids)
    assert {worker["state"] for worker in state["workers"].values()} == {"running"}
    runner.terminate()
    assert launcher.end(runner).code == 143


def test_a_taken_debug_port_is_a_users_mistake(launcher: Launcher, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        ended = launcher.run("-q", "-debug-port", free_port, "true")
    assert ended.code == 2
    assert f"-debug-port {free_port} on 127.0.0.1" in ended.stderr


def test_delay_waits_before_the_start(launcher: Launcher) -> None:
    before_s = time.monotonic()
    ended = launcher.run("-q", "-delay", "500ms", "true")
    assert time.monotonic() - before_s > 0.5
    assert float(re.findall(r"took (\S+)s", ended.last_line)[0]) < 0.5  # it is not the job's time
