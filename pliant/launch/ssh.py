"""Runners on other hosts over the system's ssh: one ssh process per host, watched until all have ended.

What a runner must know travels through ssh's standard input as one line of JSON (`RunnerOrder`): where, with which flags and
environment, and the secret, which must not be on any command line. That input stays open as long as the job shall run:
the far end (`pliant.cli.over_ssh`) stops its job when that input ends, so that a lost connection leaves nothing running.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pliant.cluster import Host
from pliant.duration import format_duration
from pliant.errors import ENDED_EXIT, ConfigError, LaunchError
from pliant.launch.events import handle_signals
from pliant.launch.output import CONNECTED_LINE, Console, OutputReader, OutputStream, show_runner_lines
from pliant.launch.processes import REMOTE_MODULE, RunnerOrder

log = logging.getLogger(__name__)

FORWARDED_PREFIXES = ("PLIANT_", "NCCL_", "OMP_", "MKL_", "GLOO_", "ETCDCTL_")
"""Prefixes of the variables that are sent to the runners; all others are those of the host that they run on."""
KEPT = ("PLIANT_SSH",)
FORWARD_VARIABLE = "PLIANT_HAND_OVER"
"""The variable that names further variables to send, separated by commas."""
SSH_FAILED = 255
KILLED = (SSH_FAILED, 128 + signal.SIGKILL)
"""What ssh ends with when the host, the connection or the runner there was killed."""
NOT_STARTED = (126, 127)
MARGIN_S = 10.0
"""How much longer than its workers' grace period a runner may take to end."""
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SshJob:
    """A job whose runners are started over ssh, one on each host."""

    hosts: tuple[Host, ...]
    """ssh connects to their public addresses; runners connect to each other by `address`."""
    arguments: tuple[str, ...]
    """The arguments of `pliant run` with its program, without -H and -self."""
    python: str
    """The Python of the hosts, with pliant installed."""
    directory: str
    environ: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    user: str = ""
    grace_s: float = 10.0
    elastic: bool = False
    """Whether the job goes on when a host is lost (`-w`)."""

    def order_for(self, host: Host) -> RunnerOrder:
        listed = ",".join(f"{_bracketed(each.address)}:{each.slots}" for each in self.hosts)
        who = ("-H", listed, "-self", host.address)
        return RunnerOrder(
            directory=self.directory,
            arguments=(*who, *self.arguments),
            environ={**forwarded_environ(self.environ), "PLIANT_SECRET": self.secret.hex()},
        )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def forwarded_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to send with a job: pliant's, those of known libraries, and those that PLIANT_HAND_OVER names."""
    named = environ.get(FORWARD_VARIABLE, "").split(",")
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(FORWARDED_PREFIXES) or name in named) and name not in KEPT
    }


def shell_path(path: str) -> str:
    """Return `path` quoted for a shell, where `~/` is the home directory of the user who runs the shell."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def ssh_command(host: Host, user: str, remote: str, environ: Mapping[str, str]) -> list[str]:
    """Return the ssh command that runs `remote`, a line for the remote shell. PLIANT_SSH replaces the program and options.

    Raises:
        ConfigError: the user's name, or PLIANT_SSH, is not one.
    """
    if user and not _USER.fullmatch(user):
        raise ConfigError(f"-u {user!r} is not the name of a user: use one such as ubuntu")
    try:
        base = shlex.split(environ.get("PLIANT_SSH", "")) or ["ssh"]
    except ValueError as error:
        raise ConfigError(
            f"PLIANT_SSH {environ['PLIANT_SSH']!r}: {error}; use a command such as `ssh -p 2222`"
        ) from None
    # No terminal, no questions: they would hang among the output of the others.
    options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    asked = [word for option in options for word in ("-o", option)]
    return [*base, "-T", *asked, *(("-l", user) if user else ()), host.public, remote]


class _RunnerStream(OutputStream):
    """Output of the remote runner on `host`."""

    arrived = False
    host = ""

    def take(self, lines: list[bytes]) -> None:
        self.arrived = self.arrived or CONNECTED_LINE in lines
        self.tail.extend(line for line in lines if line != CONNECTED_LINE)
        if self.console is not None:
            show_runner_lines(self.console, self.host, lines)


class _SshRunner:
    """The ssh process of one host."""

    def __init__(self, host: Host, command: Sequence[str], order: RunnerOrder, reader: OutputReader) -> None:
        self.host = host
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us alone: we end them in order
            )
        except OSError as error:
            raise LaunchError(f"{command[0]}: {error.strerror}; install OpenSSH's client, or set PLIANT_SSH") from None
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._order = order
        # The reader closes what it was given, and so does Popen.
        self.out = _RunnerStream(os.dup(self._popen.stdout.fileno()), b"", Console(1, coloured=False), None)
        self.err = _RunnerStream(os.dup(self._popen.stderr.fileno()), b"", Console(2, coloured=False), None)
        self._popen.stdout.close()
        self._popen.stderr.close()
        for stream in (self.out, self.err):
            stream.host = host.address
            reader.add(stream)

    def attend(self, events: queue.SimpleQueue[_SshEvent]) -> None:
        """Send the order, and post the exit code when ssh has ended. Runs in a thread, because both may take long."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.write(self._order.to_line())
            self._popen.stdin.flush()
        code = self._popen.wait()
        for stream in (self.out, self.err):
            stream.ended.wait(MARGIN_S)
        events.put((self, code))

    def end(self) -> None:
        """Ask the remote runner to stop."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._popen.stdin.close()

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()

    def why(self, code: int) -> str:
        """Return the message about an end with this exit code."""
        last = next((line.decode(errors="replace").strip() for line in reversed(self.err.tail) if line.strip()), "")
        said = f" ({last})" if last else ""
        name = self.host.public
        if self.out.arrived:
            if code == SSH_FAILED:
                return f"host {name}: the connection was lost, or the runner was killed{said}"
            return f"host {name}: its runner ended with exit code {code}"
        if code == SSH_FAILED:
            return f"host {name} cannot be reached over ssh{said}: `ssh {name} true` must work without a question"
        if code in NOT_STARTED or "No module named" in last:
            return (
                f"host {name}: pliant does not start there{said}; install it with `pliant remote-install`, "
                "or name the Python that has it with --remote-python"
            )
        return f"host {name}: ended with exit code {code} before its runner began{said}"


_SshEvent = tuple[_SshRunner, int] | int
"""An ssh that has ended with its exit code, or a signal to this process."""


def run_over_ssh(job: SshJob) -> int:
    """Start a runner on every host, and wait until all have ended; return 0, or the exit code of the first failure.

    The first failure, SIGINT and SIGTERM end all; a second signal does not wait. A host that is lost is no failure of an
    elastic job, as long as others are left. Call it from the main thread.

    Raises:
        ConfigError, LaunchError: before anything was started, or ssh itself cannot be.
    """
    begun_s = time.monotonic()
    remote = f"exec {shell_path(job.python)} -m {REMOTE_MODULE}"
    commands = {host: ssh_command(host, job.user, remote, job.environ) for host in job.hosts}
    reader = OutputReader()
    reader.start()
    runners: list[_SshRunner] = []
    events: queue.SimpleQueue[_SshEvent] = queue.SimpleQueue()
    try:
        with handle_signals(events.put):
            for host, command in commands.items():
                runner = _SshRunner(host, command, job.order_for(host), reader)
                runners.append(runner)
                threading.Thread(target=runner.attend, args=(events,), name=f"ssh-{host.address}", daemon=True).start()
            code, num_lost = _mind(runners, events, job.grace_s + MARGIN_S, elastic=job.elastic)
    finally:
        for runner in runners:
            runner.end()
            runner.kill()
        reader.finish()
    if code == 0:
        done, lost = len(runners) - num_lost, f" ({num_lost} lost)" if num_lost else ""
        summary = f"all {done}/{done} hosts finished{lost}, took {format_duration(time.monotonic() - begun_s)}\n"
        Console(1, coloured=False).write(summary.encode())
    return code


def _mind(
    runners: Sequence[_SshRunner], events: queue.SimpleQueue[_SshEvent], patience_s: float, *, elastic: bool
) -> tuple[int, int]:
    """Wait until every ssh has ended; return the exit code of the first failure, which ends the others, and how many hosts
    were only lost."""
    running, code, num_lost = list(runners), 0, 0
    deadline_s: float | None = None
    while running:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            log.error(
                "%s did not end within %g s: giving up", ", ".join(one.host.public for one in running), patience_s
            )
            event = signal.SIGKILL
            deadline_s = None
        if isinstance(event, tuple):
            runner, ended = event
            running.remove(runner)
            if ended == ENDED_EXIT and not code:
                code = ended  # no failure: the others end by themselves
            if ended in (0, ENDED_EXIT) or deadline_s is not None:
                continue
            if elastic and running and runner.out.arrived and ended in KILLED:
                log.warning("%s; the job goes on without it", runner.why(ended))
                num_lost += 1
                continue
            log.error("%s", runner.why(ended))
            code = ended if code in (0, ENDED_EXIT) else code
        elif deadline_s is not None or event == signal.SIGKILL:
            for runner in running:
                runner.kill()
            continue
        else:
            code = 128 + event if code in (0, ENDED_EXIT) else code
        deadline_s = time.monotonic() + patience_s
        for runner in running:
            runner.end()
    return code, num_lost
