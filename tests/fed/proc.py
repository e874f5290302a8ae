"""Other processes as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def proc_text(pid: int, name: str) -> str:
    """The content of /proc/PID/NAME; empty if the process is gone, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def command_line(pid: int) -> str:
    return proc_text(pid, "cmdline")


def lives(pid: int) -> bool:
    return proc_text(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def descendants(pid: int) -> list[int]:
    parents = {each: proc_text(each, "stat").rpartition(")")[2].split() for each in pids()}
    found = [pid]
    for at in found:
        found += [each for each, stat in parents.items() if stat[1:2] == [str(at)]]
    return found[1:]
