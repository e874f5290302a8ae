"""Workers forked from the warm process, beside what a Python of their own would have done."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import DEADLINE_S, Ended, Launcher
from patience import until

from pliant.launch.processes import WarmLost, WarmProcess, WorkerProcess, WorkerStarter, can_start_warm

pytestmark = pytest.mark.processes


def open_warm(*imports: str) -> WarmProcess:
    up = threading.Event()
    made = WarmProcess({**os.environ, "PYTHONUNBUFFERED": "1", "COLOUR": "red"}, up.set, imports=imports)
    made.__enter__()
    assert up.wait(DEADLINE_S)
    return made


def close_warm(made: WarmProcess) -> None:
    made.__exit__()
    os.close(made.stdout)
    os.close(made.stderr)


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    made = open_warm("numpy", "torch", "no_such_module")
    assert made.is_up
    yield made
    close_warm(made)


def end(process: WorkerProcess) -> Ended:
    assert select.select([process.pidfd], [], [], DEADLINE_S)[0]
    code = process.reap()
    with os.fdopen(process.stdout) as stdout, os.fdopen(process.stderr) as stderr:
        return Ended(code, stdout.read(), stderr.read())


def first_line(process: WorkerProcess) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(process.stdout, 1)
    return line


def run(warm: WarmProcess, *command: object, **environ: str) -> Ended:
    return end(warm.fork([sys.executable, *map(str, command)], environ, None))


def script(directory: Path, text: str, name: str = "program.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


SELF = """
    import __main__, os, pickle, signal, sys
    class Own: pass
    print(sys.argv, sys.path[0], __name__, __file__, __doc__, __spec__, __package__, __annotations__, "serve" in globals())
    print(__main__.Own is Own, pickle.loads(pickle.dumps(Own())).__class__ is Own, os.getsid(0) == os.getpid())
    print([name for name in sorted(vars()) if name.startswith("__")], __builtins__.__name__, sys.stdin.read() == "")
    print(sorted(os.listdir("/proc/self/fd")).index("2"), sys.stdout.line_buffering, sys.stdout.write_through)
    print(repr(__loader__.__class__), sys.flags)
    print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP)])
"""


def plain(*command: object, cwd: Path | None = None) -> Ended:
    """What a Python of its own does."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        start_new_session=True,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def without_ids(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize(
    "text",
    [
        SELF,
        "import sys; sys.exit(7)",
        "import sys; sys.exit('no more')",
        "raise SystemExit",
        "def f():\n    raise ValueError('bad')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error",
        "raise KeyboardInterrupt",
        "x = = 1",
        "import sys; sys.excepthook = lambda *a: print('hooked', a[0], a[2].tb_lineno); 1 / 0",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import os; os._exit(78)",
        "import atexit, sys; atexit.register(print, 'at exit'); sys.stdout.write('unflushed'); 1 / 0",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
        "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    ],
    ids=lambda text: re.sub(r"\W+", "-", text)[:40],
)
def test_a_fork_does_what_a_python_of_its_own_does(warm: WarmProcess, tmp_path: Path, text: str) -> None:
    path = script(tmp_path, text)
    forked, own = run(warm, path, "-m", "--flag"), plain(path, "-m", "--flag")
    assert (forked.code, without_ids(forked.stdout), without_ids(forked.stderr)) == (
        own.code,
        without_ids(own.stdout),
        without_ids(own.stderr),
    )


def test_a_module_runs_as_python_m_does(warm: WarmProcess) -> None:
    forked, own = run(warm, "-m", "calendar", "2024"), plain("-m", "calendar", "2024")
    assert forked.code == own.code == 0
    assert forked.stdout == own.stdout
    missing = run(warm, "-m", "no_such_module")
    assert (missing.code, "No module named no_such_module" in missing.stderr) == (1, True)


def test_a_fork_starts_at_once_with_torch(warm: WarmProcess, tmp_path: Path) -> None:
    text = "import os, sys, time; print(time.monotonic(), 'torch' in sys.modules, flush=True); os._exit(0)"
    path = script(tmp_path, text)
    took_s = []
    for _ in range(10):  # the best of them: others may use the machine
        asked_s = time.monotonic()
        began, has_torch = run(warm, path).stdout.split()
        assert has_torch == "True"
        took_s.append(float(began) - asked_s)
    assert min(took_s) < 0.05


def test_a_fork_has_its_own_environment_and_random_numbers(warm: WarmProcess, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import ctypes, os, random, numpy, torch
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        print(os.environ["COLOUR"], os.environ["WORKER"], libc.getenv(b"WORKER"), "HOME" in os.environ)
        print(random.random(), numpy.random.rand())
        print(torch.rand(1).item())
        """,
    )
    first, second = (run(warm, path, WORKER=name).stdout.splitlines() for name in ("one", "two"))
    assert first[0] == "red one b'one' True"
    assert second[0].startswith("red two")
    assert not set(first[1].split()) & set(second[1].split())
    assert first[2] == second[2]  # torch begins with a fixed seed


LEAVES = """
    import atexit, sys, threading, time
    file = open("kept", "w")
    file.write("not flushed")
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
    atexit.register(lambda: print("exit function"))
    threading.Timer(0.2, lambda: print("thread")).start()

    class Stubborn:
        def __del__(self):
            print("taken apart")

    thing = Stubborn()
    leaving = SystemExit(0)
    leaving.ends_at_once = True
    raise leaving
"""


def test_who_leaves_at_once_ends_in_good_order_but_is_not_taken_apart(warm: WarmProcess, tmp_path: Path) -> None:
    program = script(tmp_path, LEAVES.replace('"kept"', f'"{tmp_path}/kept"'))
    left = run(warm, program)
    assert (left.code, left.stdout, left.stderr) == (0, "thread\nexit function\n", "")
    assert (tmp_path / "kept").read_text() == "not flushed"


def test_a_fork_inherits_its_socket_and_hands_it_on(warm: WarmProcess, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, socket, subprocess, sys
        fd = int(os.environ["PLIANT_LISTEN_FD"])
        print(socket.socket(fileno=fd).getsockname()[1])
        """,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = end(warm.fork([sys.executable, str(path)], {"PLIANT_LISTEN_FD": "999"}, listener))
    assert ended.stdout == f"{port}\n", ended.stderr
    with socket.create_server(("127.0.0.1", port)):
        pass  # nobody holds it, the warm process neither


def test_many_live_at_once_and_a_killed_one_is_told_from_the_others(warm: WarmProcess, tmp_path: Path) -> None:
    path = script(tmp_path, "import sys, time; print('up', flush=True); time.sleep(float(sys.argv[1]))")
    living = [warm.fork([sys.executable, str(path), str(nap)], {}, None) for nap in (600, 600, 0)]
    assert end(living[2]) == Ended(0, "up\n", "")
    for process, signum in zip(living, (signal.SIGKILL, signal.SIGTERM), strict=False):
        assert first_line(process) == b"up\n"
        process.signal(signum)
        assert end(process).code == -signum


def test_a_fork_computes_with_threads_and_gradients(warm: WarmProcess, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch
        torch.set_num_threads(2)
        x = torch.ones(400, 400, requires_grad=True)
        (x @ x).sum().backward()
        print(x.grad.sum().item())
        """,
    )
    assert run(warm, path).stdout == "128000000.0\n"


def test_a_fork_may_spawn_and_fork_workers_of_its_own(warm: WarmProcess, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(square, [2, 3]))
        """,
    )
    assert run(warm, path) == Ended(0, "fork [4, 9]\nspawn [4, 9]\n", "")


ANSWERS = """
    import os, sys
    print(os.getppid(), flush=True)
    sys.exit(int(sys.stdin.readline() or open(os.environ["QUESTION"]).readline()))
"""


def test_a_fork_that_cannot_be_watched_is_ended(
    warm: WarmProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("import time; time.sleep(1000)")
    forked: list[int] = []

    def refuse(pid: int) -> int:
        forked.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="too many open files"):
        warm.fork([sys.executable, str(tmp_path / "program.py")], {}, None)
    [pid] = forked
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_when_the_warm_process_dies_its_forks_live_and_others_are_started_without_it(
    tmp_path: Path, signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.launch.processes.ANSWER_S", 0.2)
    made = open_warm()
    try:
        os.mkfifo(tmp_path / "question")
        path = script(tmp_path, ANSWERS)
        process = made.fork([sys.executable, str(path)], {"QUESTION": str(tmp_path / "question")}, None)
        assert first_line(process) == b"%d\n" % os.getpid(), "its parent is this process"
        os.kill(made.pid, signum)
        hello = script(tmp_path, "print('hello')", "hello.py")
        if signum == signal.SIGSTOP:
            with pytest.raises(WarmLost, match="does not answer"):
                made.fork([sys.executable, str(hello)], {}, None)
        until(lambda: made.was_killed)
        assert end(WorkerStarter([sys.executable, str(hello)], made).start(os.environ, None)).stdout == "hello\n"
        (tmp_path / "question").write_text("7\n")
        assert end(process).code == 7
    finally:
        close_warm(made)


def test_a_fork_ends_with_the_process_that_asked_for_it(tmp_path: Path, alive: Callable[[int], bool]) -> None:
    """Also if the warm process has ended before: nobody else passes the end on."""
    nap = script(tmp_path, "import time; print('up', flush=True); time.sleep(600)", "nap.py")
    asks = script(
        tmp_path,
        f"""
        import os, signal, sys, threading, time
        from pliant.launch.processes import WarmProcess
        up = threading.Event()
        with WarmProcess(dict(os.environ), up.set, imports=()) as warm:
            up.wait()
            worker = warm.fork([sys.executable, {str(nap)!r}], dict(os.environ), None)
            os.read(worker.stdout, 3)
            os.kill(warm.pid, signal.SIGKILL)
            print(worker.pid, flush=True)
            time.sleep(600)
        """,
        "asks.py",
    )
    with subprocess.Popen([sys.executable, str(asks)], stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert alive(pid)
        asking.kill()
    until(lambda: not alive(pid))


def test_only_a_plain_python_program_of_this_python_is_forked(tmp_path: Path) -> None:
    path = str(script(tmp_path, ""))
    assert can_start_warm([sys.executable, path, "-O"])
    assert can_start_warm([sys.executable, "-m", "json.tool"])
    assert not can_start_warm([sys.executable, "-O", path])
    assert not can_start_warm([sys.executable, "-c", "1"])
    assert not can_start_warm([sys.executable])
    assert not can_start_warm(["sh", path])
    assert not can_start_warm([sys.executable, str(tmp_path)])
    other = tmp_path / "python3"
    other.symlink_to(os.path.realpath(sys.executable))
    assert not can_start_warm([str(other), path])


WAIT = """
    import os, pathlib, subprocess, sys, time
    nap = "import os, pathlib, time; pathlib.Path(f'up-{os.getpid()}').touch(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
    pathlib.Path(f"up-{os.getpid()}").touch()
    print("torch" in sys.modules, os.getppid(), flush=True)
    time.sleep(600)
"""


def children_of(pid: int) -> set[int]:
    """The children of all threads of a process."""
    found = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return set(map(int, found.split()))


def test_kill_9_of_the_runner_leaves_neither_forks_nor_the_warm_process(
    launcher: Launcher, alive: Callable[[int], bool]
) -> None:
    launcher.script("wait.py", WAIT)
    runner = launcher.start("-q", "-w", "--warm", "-np", 2, "wait.py", **launcher.without_torch())
    launcher.until(lambda: len(launcher.files("up-*")) == 4, "start of all")
    pids = {int(path.name.removeprefix("up-")) for path in launcher.files("up-*")}
    has_torch, parent = runner.stdout.readline().split()[-2:]
    assert has_torch == b"True"
    assert int(parent) == runner.pid
    children = children_of(runner.pid)
    assert len(children & pids) == 2
    assert len(children - pids) == 3, "the guardian, the config server and the warm process"
    runner.kill()
    runner.wait(DEADLINE_S)
    for pid in pids | children:
        launcher.until(lambda pid=pid: not alive(pid), f"end of {pid}")  # type: ignore[misc]


def test_who_does_not_want_it_or_does_not_train_has_none_and_who_wants_it_has_one_without_w(launcher: Launcher) -> None:
    launcher.script("who.py", "import sys; print('torch' in sys.modules)")
    environ = launcher.without_torch()
    cases = ((("-w", "--no-warm"), False), (("-w",), False), (("-w", "--warm"), True), (("--warm",), True), ((), False))
    for words, expected in cases:
        ended = launcher.run("-q", *words, "-np", 2, "who.py", **environ)
        assert ended.code == 0, ended.stderr
        assert ended.stdout.count(f"] {expected}\n") == 2, (words, ended)


def with_torch(launcher: Launcher, text: str) -> dict[str, str]:
    """An environ in which `import torch` does this."""
    (launcher.directory / "other").mkdir()
    launcher.script("other/torch.py", text)
    launcher.script("who.py", "print('hello')")
    return {"PYTHONPATH": str(launcher.directory / "other")}


def test_a_warm_process_that_cannot_start_is_only_a_notice(launcher: Launcher) -> None:
    ended = launcher.run("-q", "-w", "--warm", "who.py", **with_torch(launcher, "raise OSError('damaged')"))
    assert ended.code == 0
    assert "] hello\n" in ended.stdout
    assert "[warm::stderr] OSError: damaged" in ended.stderr
    assert ended.stderr.count("has ended: from now on each worker imports torch, and starts more slowly") == 1


def test_a_signal_while_it_warms_up_ends_the_job(launcher: Launcher) -> None:
    slow = with_torch(launcher, "import pathlib, time; pathlib.Path('warming').touch(); time.sleep(600)")
    runner = launcher.start("-q", "-w", "--warm", "who.py", **slow)
    launcher.until(lambda: launcher.files("warming"), "begin of the imports")
    runner.terminate()
    assert launcher.end(runner).code == 143
