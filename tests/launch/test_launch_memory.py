"""Workers that the kernel kills because memory has run out, told from those that somebody else kills."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher

from pliant.launch.processes import OutOfMemory, count_oom_kills

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 200 << 20


def machine(folder: Path, **files: str) -> tuple[Path, Path]:
    """Folders that look like /proc and /sys/fs/cgroup; `/` in names is written as `__`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "cgroup"


def test_kills_are_counted_in_the_own_group_and_else_on_the_machine(tmp_path: Path) -> None:
    vmstat, line = "nr_free_pages 7\noom_kill 9\n", "0::/job/a\n"
    (tmp_path / "cgroup/job/a").mkdir(parents=True)
    given = machine(tmp_path, proc__vmstat=vmstat, proc__self__cgroup=line)
    assert count_oom_kills(*given) == 9
    (tmp_path / "cgroup/memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert count_oom_kills(*given) == 3, "a container sees its own group as the root"
    (tmp_path / "cgroup/job/a/memory.events").write_text("oom 1\noom_kill 2\noom_group_kill 0\n")
    assert count_oom_kills(*given) == 2
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/job/b\n3:cpu:/\n0::/job/c\n")
    (tmp_path / "cgroup/memory/job/b").mkdir(parents=True)
    (tmp_path / "cgroup/memory/job/b/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert count_oom_kills(*given) == 5
    assert count_oom_kills(tmp_path / "none", tmp_path / "none") == 0


def test_each_kill_that_the_kernel_counts_explains_one_end() -> None:
    count = [4]
    memory = OutOfMemory(lambda: count[0])
    started = memory.note_start()
    assert not memory.explains(-signal.SIGKILL, started)
    count[0] = 6
    assert not memory.explains(1, started)
    late = memory.note_start()
    assert not memory.explains(-signal.SIGKILL, late), "that was before its start"
    assert memory.explains(-signal.SIGKILL, started)
    assert memory.explains(128 + signal.SIGKILL, started)
    assert not memory.explains(-signal.SIGKILL, started)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes may have 200 MB."""
    version_1 = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if version_1 else CGROUPS) / f"pliant-test-{os.getpid()}"
    limits = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if version_1 else ("memory.max", "memory.swap.max")
    )
    try:
        group.mkdir()
        (group / limits[0]).write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"needs the right to make a control group with a limit ({error.strerror})")
    with contextlib.suppress(OSError):
        (group / limits[1]).write_text(str(LIMIT_BYTES if version_1 else 0))
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


HUNGRY = """
    import os, pathlib, signal, time
    pathlib.Path(f"up-{os.getpid()}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.005)
    eaten = bytearray(1 << 30)
    time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.root
def test_a_worker_that_takes_too_much_memory_is_told_from_one_that_is_killed(
    launcher: Launcher, small_group: Path
) -> None:
    launcher.script("hungry.py", HUNGRY)
    runner = launcher.start("-q", "hungry.py")
    launcher.until(lambda: launcher.files("up-*"), "start of the worker")
    [worker] = [int(path.name.removeprefix("up-")) for path in launcher.files("up-*")]
    for pid in (runner.pid, worker):
        (small_group / "cgroup.procs").write_text(str(pid))
    (launcher.directory / "go").touch()
    ended = launcher.end(runner)
    assert ended.code == 137
    assert "killed by SIGKILL: the machine, or its container, was out of memory" in ended.stderr
