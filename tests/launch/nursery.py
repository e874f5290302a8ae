"""A process that has imported the launcher once, and forks runners for tests: 20 ms instead of 400.

Started as a script with a socket's number. Each request brings arguments, directory, environment, whether it is under
nohup, and three descriptors: stdout, stderr, and where to write the runner's process id and, at its end, its exit
status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def warm_up() -> None:
    """Import all that a runner needs, also what the libraries import at their first use."""
    import pliant.cli.main as cli
    import pliant.elastic.client
    import pliant.elastic.server
    import pliant.launch.runner  # noqa: F401
    from pliant.errors import ConfigError

    cli.COMMANDS = ("run",)
    with suppress(ConfigError):
        cli.build()(["run", "-np", "0", "true"], standalone_mode=False)


def become_runner(request: dict[str, object], stdout: int, stderr: int) -> None:
    """Run `pliant run` in this process, and end it."""
    from pliant.cli.main import main

    code = 1
    # Not what the tests were started with: they may themselves be under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if request["nohup"] else signal.SIG_DFL)
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 64)
        os.chdir(str(request["directory"]))
        os.environ.clear()
        os.environ.update(dict(request["environ"]))
        sys.argv = ["pliant", "run", *request["arguments"]]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def serve(requests: socket.socket) -> None:
    """Fork a runner per request, and a process beside it that reports its end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        if os.fork() == 0:
            stdout, stderr, status = descriptors
            pid = os.fork()
            if pid == 0:
                become_runner(json.loads(message), stdout, stderr)
            os.close(stdout)
            os.close(stderr)
            requests.close()
            os.write(status, f"{pid}\n".encode())
            _, ended = os.waitpid(pid, 0)
            with suppress(OSError):
                os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


if __name__ == "__main__":
    warm_up()
    serve(socket.socket(fileno=int(sys.argv[1])))
