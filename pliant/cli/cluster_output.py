"""What the commands that talk to the cluster's server share: finding it, and tables for people or for the next program."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pliant.cli import completion
from pliant.cli.output import show_waiting
from pliant.errors import ConfigError, ServerUnavailable, UnknownJob
from pliant.launch.duration import span_text as span_text

if TYPE_CHECKING:
    from pliant.sched.live.client import JobStatus, LiveClient

ServerFlag = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", help="The cluster's server; default: PLIANT_SERVER, or yours on this machine."
    ),
]
StateFlag = Annotated[
    str,
    typer.Option("--state", metavar="DIR", help="Find the server by its state directory, as `pliant serve` has it."),
]
JobArgument = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="The job.", autocompletion=completion.jobs)
]

AWAY_S = 300.0
"""How long a server that has gone may take to come back."""
RETRY_S = 0.5

Answer = TypeVar("Answer")


def connected(server: str, state: str) -> LiveClient:
    """A client of the server that is meant."""
    from pliant.sched.live.client import LiveClient, find_server

    return LiveClient(find_server(server, state))


def check_named(*names: str) -> None:
    """Refuse an empty name in one line; click would answer with a page of usage."""
    if not all(names):
        raise ConfigError("which job? give its name; `pliant list` shows the names")


def devices_text(devices: Mapping[str, int]) -> str:
    """`cpu=2,v100=1`; `-` for none."""
    return ",".join(f"{kind}={count}" for kind, count in devices.items() if count) or "-"


def clock_text(at_s: float | None, now_s: float) -> str:
    """A time of day, with the date where it was another day; `-` for none."""
    if at_s is None:
        return "-"
    is_today = time.localtime(at_s)[:3] == time.localtime(now_s)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", time.localtime(at_s))


class Patient:
    """A client that waits for a server that has gone since it was connected: jobs run on without it."""

    def __init__(self, server: str, state: str) -> None:
        self._place = (server, state)
        self._client = connected(server, state)

    def __enter__(self) -> Patient:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def ask(self, question: Callable[[LiveClient], Answer], *, wait: bool = True) -> Answer:
        """What `question` answers, now or when there is a server again.

        Raises:
            ServerUnavailable: it has not come back within AWAY_S; or at once, if that is not waited for.
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
    server: Patient, names: Sequence[str], deadline_s: float, ended: Callable[[JobStatus], None]
) -> list[str]:
    """Until all of `names` have ended, or `deadline_s` has passed: those that have not. A terminal shows how far they are."""
    with show_waiting("waiting") as say:
        return _await_end(server, list(names), deadline_s, ended, say)


def _await_end(
    server: Patient, left: list[str], deadline_s: float, ended: Callable[[JobStatus], None], say: Callable[[str], None]
) -> list[str]:
    while True:
        now = {job.name: job for job in server.ask(lambda client: client.jobs())}
        if strange := [name for name in left if name not in now]:
            raise UnknownJob(f"the server knows nothing of {', '.join(strange)} any more: is it another one?")
        for name in [name for name in left if now[name].is_over]:
            left.remove(name)
            ended(now[name])
        say("; ".join(_standing(now[name]) for name in left[:3]) + ("; ..." if len(left) > 3 else ""))
        if not left or time.monotonic() >= deadline_s:
            return left
        time.sleep(0.2)


def _standing(job: JobStatus) -> str:
    return f"{job.name} {job.state}" + ("" if job.step is None else f", step {job.step}")
