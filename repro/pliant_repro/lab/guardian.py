"""The guardian of a lab: a process that claims its name before anything else is made, and removes it when its owner ends.

The owner starts it as `python -m pliant_repro.lab.guardian NAME OWNER_PID`. It outlives the owner, even after `kill -9`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from pliant.errors import LabError
from pliant_repro.lab.namespaces import COMMAND_TIMEOUT_S, command, remove


def start(name: str) -> subprocess.Popen[bytes]:
    """Start the guardian of a new lab; it waits for a last word on its standard input.

    Raises:
        LabError: the name is taken, or no namespace can be made.
    """
    guardian = subprocess.Popen(
        [sys.executable, "-m", "pliant_repro.lab.guardian", name, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C or a kill of our group must not take it along
    )
    assert guardian.stdout is not None, "made with a pipe"
    answer = guardian.stdout.read().decode().strip()
    if answer != "claimed":
        guardian.communicate(timeout=COMMAND_TIMEOUT_S)
        raise LabError(
            answer or f"the lab's guardian ended at once; try `{sys.executable} -m pliant_repro.lab.guardian {name} 1`"
        )
    return guardian


def _guard(name: str, owner_pid: int) -> int:
    """Claim the lab's name, wait for the owner's end, remove the lab.

    The claim is made here and not by the owner, so that a killed owner never leaves a namespace, and there is no doubt about
    whose it is when the name is taken.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    claimed, answer = True, "claimed"
    try:
        command("ip", "netns", "add", f"pliant-{name}-br")
    except LabError as error:
        claimed, answer = False, str(error)
        if "File exists" in answer:
            answer = f"a lab named {name!r} is up already: `pliant lab down {name}`, or take another name"
    with contextlib.suppress(BrokenPipeError):  # the owner may have been killed meanwhile
        print(answer, flush=True)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the owner reads to the end
    if claimed and _last_word(owner_pid) != b"detach":
        remove(name)
    return 0


def _last_word(owner_pid: int) -> bytes:
    """Return what the owner wrote before it closed the pipe or died.

    The owner's death alone is not enough: a tool that it started may still be making something, and holds the pipe. A closed
    pipe alone is not enough either, if the owner's forked children hold it.
    """
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    owner_fd = -1
    with contextlib.suppress(ProcessLookupError):
        owner_fd = os.pidfd_open(owner_pid)
        waiting.register(owner_fd, select.POLLIN)
    timeout_ms = None if owner_fd >= 0 else 5_000
    word = b""
    while ready := [fd for fd, _ in waiting.poll(timeout_ms)]:
        if 0 in ready:
            read = os.read(0, 64)
            word += read
            if not read:
                break
        elif owner_fd in ready:
            waiting.unregister(owner_fd)
            timeout_ms = 5_000
    return word


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1], int(sys.argv[2])))
