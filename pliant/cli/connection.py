"""How the commands for jobs find a server: the flags, the connection, and waiting for one that has gone."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pliant.cli.output import is_read_by_people, show_waiting
from pliant.errors import ConfigError, ServerUnavailable, UnknownJob

if TYPE_CHECKING:
    from pliant.jobs.client import JobsClient
    from pliant.jobs.status import JobStatus

ServerFlag = Annotated[
    str,
    typer.Option("--server", metavar="URL", help="The job server; default: PLIANT_SERVER, or yours on this machine."),
]
StateFlag = Annotated[
    str,
    typer.Option("--state", metavar="DIR", help="Use the server or the jobs of this state directory."),
]

AWAY_S = 300.0
"""How long a server that has gone may take to come back."""
RETRY_S = 0.5

Answer = TypeVar("Answer")


def connected(server: str, state: str) -> JobsClient:
    """Return a client of the server; raises ServerUnavailable if none is known."""
    from pliant.jobs.client import JobsClient, find_server

    return JobsClient(find_server(server, state))


def connected_or_started(server: str, state: str) -> JobsClient:
    """Return a client of the server. If none is named and none runs for this user, start one in the background."""
    from pliant.jobs.client import JobsClient, find_server, start_embedded

    if server or state or os.environ.get("PLIANT_SERVER"):
        return connected(server, state)
    try:
        found = find_server()
    except ServerUnavailable:
        found = None
    if found is None or found.is_gone:
        found = start_embedded()
        print(
            f"pliant: no server was running: started one at {found.url} (pid {found.pid}), which ends when no job is left",
            file=sys.stderr,
            flush=True,
        )
    return JobsClient(found)


def check_named(*names: str) -> None:
    """Refuse an empty name in one line; click would answer with a page of usage."""
    if not all(names):
        raise ConfigError("which job? give its name; `pliant list` shows the names")


class ReconnectingClient:
    """A client that waits for a server that has gone since it was connected: jobs run on without it."""

    def __init__(self, server: str, state: str, *, start: bool = False) -> None:
        self._place = (server, state)
        self._client = (connected_or_started if start else connected)(server, state)

    def __enter__(self) -> ReconnectingClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def ask(self, question: Callable[[JobsClient], Answer], *, wait: bool = True) -> Answer:
        """Return what `question` returns, now or when there is a server again.

        Raises:
            ServerUnavailable: the server has not come back within AWAY_S; at once if `wait` is false.
        """
        deadline_s = math.inf
        while True:
            try:
                if deadline_s < math.inf:
                    self._client.close()
                    self._client = connected(*self._place)  # it may come back at another port, with another token
                return question(self._client)
            except ServerUnavailable as error:
                if not wait or time.monotonic() > deadline_s:
                    raise
                if deadline_s == math.inf:
                    print(f"pliant: {error} (waiting for it)", file=sys.stderr, flush=True)
                    deadline_s = time.monotonic() + AWAY_S
            time.sleep(RETRY_S)


def await_end(
    server: ReconnectingClient, names: Sequence[str], deadline_s: float, ended: Callable[[JobStatus], None]
) -> list[str]:
    """Wait until all jobs have ended, and call `ended` with each; returns those that have not by `deadline_s`."""
    left = list(names)
    with show_waiting("waiting") as say:
        while True:
            now = {job.name: job for job in server.ask(lambda client: client.jobs())}
            if strange := [name for name in left if name not in now]:
                raise UnknownJob(f"the server knows nothing of {', '.join(strange)} any more: is it another one?")
            for name in [name for name in left if now[name].is_over]:
                left.remove(name)
                ended(now[name])
            say("; ".join(_progress(now[name]) for name in left[:3]) + ("; ..." if len(left) > 3 else ""))
            if not left or time.monotonic() >= deadline_s:
                return left
            time.sleep(0.2)


def _progress(job: JobStatus) -> str:
    unit = "step" if job.federated is None else "round"
    return f"{job.name} {job.state}" + ("" if job.step is None else f", {unit} {job.step}")


# --- texts ---


def print_for_people(line: str) -> None:
    """Print a line on a terminal, and nothing where the output is piped."""
    if is_read_by_people():
        print(line, flush=True)


def devices_text(devices: Mapping[str, int]) -> str:
    """Return `cpu=2,v100=1`; `-` for none."""
    return ",".join(f"{kind}={count}" for kind, count in devices.items() if count) or "-"


def clock_text(at_s: float | None, now_s: float) -> str:
    """Return a time of day, with the date if it was another day; `-` for none."""
    if at_s is None:
        return "-"
    is_today = time.localtime(at_s)[:3] == time.localtime(now_s)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", time.localtime(at_s))
