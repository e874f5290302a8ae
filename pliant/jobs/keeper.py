"""The keeper of a run: starts its process, waits for it, and writes down how it ended; the scheduler may be killed meanwhile.

`keeper.py PLACE LOCK COMMAND...`, with the standard library only, so that it starts in 20 ms and needs little memory. It keeps
a training run (`pliant run`) and the coordinator of a federated job alike. PLACE/started.json says which process COMMAND
is, and which its keeper, PLACE/exit.json how it ended. LOCK is an open, locked descriptor, inherited from the scheduler: the keeper lives as long as
somebody holds the lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

RETRY_S = 1.0


def start_ticks(pid: int) -> int:
    """Return when a process began; `pliant.child` cannot be imported here."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def write(path: str, value: dict[str, object]) -> None:
    """Write a JSON file: all of it or nothing."""
    with open(f"{path}.draft", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.draft", path)


def try_to_write(path: str, value: dict[str, object]) -> bool:
    """Write a JSON file, and return whether that was possible: a full disk must not make a run look abandoned."""
    try:
        write(path, value)
    except OSError:
        return False
    return True


def keep(place: str, command: list[str]) -> None:
    """Run `command` to its end. On a full disk, wait for room to write down how it ended."""
    process = subprocess.Popen(command)  # the lock stays here: other descriptors are not inherited
    started: dict[str, object] = {
        "pid": process.pid, "start_ticks": start_ticks(process.pid), "keeper": os.getpid(),
    }  # fmt: skip
    while not try_to_write(f"{place}/started.json", started):
        try:
            process.wait(RETRY_S)
            break
        except subprocess.TimeoutExpired:
            continue
    ended: dict[str, object] = {"code": process.wait(), "at_s": time.time()}
    while not try_to_write(f"{place}/exit.json", ended):
        time.sleep(RETRY_S)


if __name__ == "__main__":
    # Handlers, not SIG_IGN: what is started here shall have the usual signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    keep(sys.argv[1], sys.argv[3:])
