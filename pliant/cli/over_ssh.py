"""The remote end of `pliant run --ssh`: `python -m pliant.cli.over_ssh`, started by sshd, becomes the runner of its host.

It reads one line from its standard input, which says what to run (`launch.processes.RunnerOrder`). When that input ends, because
the user has pressed Ctrl-C or the connection is lost, it ends as after SIGTERM: its workers first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from pliant.launch.output import CONNECTED_LINE
from pliant.launch.processes import RunnerOrder


def main() -> None:
    try:
        order = RunnerOrder.from_line(_read_line(0))
    except (ValueError, KeyError, TypeError) as error:
        print(f"pliant: this is the remote end of `pliant run --ssh`, and got no order: {error!r:.80}", file=sys.stderr)
        sys.exit(2)
    os.environ.update(order.environ)
    # As where its environment is activated: `python3 train.py` shall find this Python, which has torch.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    try:
        os.chdir(os.path.expanduser(order.directory))
    except OSError as error:
        print(f"pliant: {order.directory}: {error.strerror}; name a directory with --remote-dir", file=sys.stderr)
        sys.exit(2)
    os.write(1, CONNECTED_LINE + b"\n")
    threading.Thread(target=_end_with_input, name="ssh-input", daemon=True).start()
    sys.argv = ["pliant", "run", *order.arguments]
    from pliant.cli.main import main as pliant

    pliant()


def _read_line(descriptor: int) -> bytes:
    """Read a line without Python's buffer, whose lock another thread must not hold at the program's end."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(descriptor, 65536)
        if not data:
            break
        line += data
    return line


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
