"""A client of `pliant serve`: one method per request, pliant's errors for its refusals; and how its server is found.

What the server answers is given as values with the fields that we know; a newer server may say more.
"""

from __future__ import annotations

import difflib
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pliant.elastic.client import HttpClient, parse_server_url, refusal_reason
from pliant.errors import ConfigError, NameTaken, PliantError, ServerUnavailable, UnknownJob
from pliant.sched.live.jobfile import JobSpec

SERVER_FILE = "server.json"
"""Where in its state directory a server says how to reach it."""
START_ONE = "start one with `pliant serve --devices cpu=4`, or name one with --server URL"
MAX_HOLD_S = 60.0
"""The server holds a request for logs at most this long; longer waits are made of several."""
RESERVE_S = 30.0
"""A reservation is answered when the devices are free, which on a busy machine takes longer than a plain answer."""

State = Literal["waiting", "starting", "running", "put-off", "finished", "failed", "stopped"]
ENDED: frozenset[State] = frozenset({"finished", "failed", "stopped"})

Answer = TypeVar("Answer", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class JobStatus(_Answer):
    """How a job is."""

    name: str
    state: State
    replicas: int
    devices: dict[str, int]
    """What it has now, by type."""
    workers: int
    """Processes that train now."""
    step: int | None
    steps_per_s: float | None
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    why: str
    """The last decision about it, in words."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


class Event(_Answer):
    """What happened to a job, at a Unix time."""

    at: float
    what: str
    why: str = ""


class JobDetail(JobStatus):
    """How a job is, and how it came to that."""

    events: tuple[Event, ...]
    spec: JobSpec | None = None
    """What was submitted."""


class LogPart(_Answer):
    """What a job has printed from some byte on."""

    text: str
    end: int
    """Where the next part begins."""
    over: bool
    """Whether the job has ended, and nothing comes after `end`."""


class ClusterStatus(_Answer):
    """Who has which devices, by type."""

    devices: dict[str, int]
    reserved: dict[str, int]
    free: dict[str, int]
    jobs: dict[str, dict[str, int]]


class Reserved(_Answer):
    """What is reserved now, and how long it took until these devices were free."""

    reserved: dict[str, int]
    took_s: float


class _Jobs(_Answer):
    jobs: list[JobStatus]


class Server(_Answer):
    """How to reach a server, as it has written it down."""

    url: str
    token: Annotated[str, Field(repr=False)] = ""
    pid: int = 0


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a server keeps its state if it is not told."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "pliant" / "cluster"


def find_server(url: str = "", state: str = "", environ: Mapping[str, str] = os.environ) -> Server:
    """The server that is meant: `url`, PLIANT_SERVER, or the one that wrote itself down in `state` or where it does
    by default. PLIANT_TOKEN goes before the token that is written down.

    Raises:
        ServerUnavailable: none is known.
    """
    folder = Path(state) if state else state_dir(environ)
    url = url or ("" if state else environ.get("PLIANT_SERVER", ""))
    noted = _noted(folder / SERVER_FILE)
    if not url:
        if noted is None:
            raise ServerUnavailable(
                f"no server of yours is known on this machine (no {SERVER_FILE} in {folder}): {START_ONE}"
            )
        found = noted
    elif noted is not None and noted.url.rstrip("/") == url.rstrip("/"):
        found = noted
    else:
        found = Server(url=url)
    return found.model_copy(update={"token": environ.get("PLIANT_TOKEN") or found.token})


def _noted(file: Path) -> Server | None:
    try:
        return Server.model_validate(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


class LiveClient(HttpClient):
    """Talks to the server; for any thread.

    Raises (when made):
        ConfigError: the URL is none.

    Raises (from every call):
        ServerUnavailable: no answer within `timeout_s`, or one that says that it cannot.
        UnknownJob, NameTaken, ConfigError: the server refused, with its reason.
    """

    def __init__(self, server: Server, *, timeout_s: float = 10.0) -> None:
        self.server = server
        self._url = parse_server_url(server.url, "--server", "http://10.0.0.1:9200")
        # Loading the authorities takes longer than a request.
        super().__init__(self._url, server.token, self._url.scheme == "https", timeout_s)

    def submit(self, spec: JobSpec) -> JobStatus:
        """Hand over a job. NameTaken: there is, or was, one of that name."""
        return self._ask(JobStatus, "POST", "/jobs", body=spec.to_json())

    def jobs(self) -> list[JobStatus]:
        """All jobs, the first submitted first."""
        return sorted(self._ask(_Jobs, "GET", "/jobs").jobs, key=lambda job: job.submitted_s)

    def job(self, name: str) -> JobDetail:
        """One job, with its history."""
        return self._ask(JobDetail, "GET", _path(name), job=name)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a job: in good order, or at once. Returns when the server has heard it."""
        self._send("DELETE", _path(name), {"kill": "true"} if kill else {}, job=name)

    def logs(self, name: str, begin: int = 0, wait_s: float = 0.0) -> LogPart:
        """What the job printed from byte `begin` on; if that is nothing yet, what comes within `wait_s`."""
        hold_s = min(wait_s, MAX_HOLD_S)
        query = {"begin": str(begin), "wait_s": f"{hold_s:g}"}
        return self._ask(LogPart, "GET", f"{_path(name)}/logs", query, job=name, hold_s=hold_s)

    def cluster(self) -> ClusterStatus:
        """Who has what."""
        return self._ask(ClusterStatus, "GET", "/cluster")

    def reserve(self, devices: Mapping[str, int]) -> Reserved:
        """Take so many devices of each type from the jobs, or give them back (0); returns when they are free."""
        return self._ask(Reserved, "PUT", "/reserve", body=dict(devices), hold_s=RESERVE_S)

    def _ask(
        self,
        form: type[Answer],
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, object] | None = None,
        job: str = "",
        hold_s: float = 0.0,
    ) -> Answer:
        answer = self._send(method, path, query, body=body, job=job, hold_s=hold_s)
        try:
            return form.model_validate_json(answer.content)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            why = f"{place} is missing or wrong" if place else "it is not JSON"
            raise ConfigError(
                f"{self._url} is no server of this version of pliant: {why} in its answer to {method} {path}"
            ) from None

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, object] | None = None,
        job: str = "",
        hold_s: float = 0.0,
    ) -> httpx.Response:
        answer = self._request(method, path, query=query, body=body, hold_s=hold_s)
        if not answer.is_success:
            raise self._refusal(answer, job)
        return answer

    def _describe_unreachable(self, error: httpx.TransportError) -> str:
        pid = self.server.pid
        if pid and not Path(f"/proc/{pid}").exists():
            return f"the server at {self._url} (pid {pid}) has ended; its jobs run on: start `pliant serve` again"
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        return f"no server answers at {self._url} ({why}): {START_ONE}"

    def _refusal(self, answer: httpx.Response, job: str) -> PliantError:
        reason = refusal_reason(answer)
        if answer.is_server_error:
            return ServerUnavailable(f"{self._url}: {answer.status_code} {reason}")
        if answer.status_code in (401, 403):
            why = "the token we gave is not its own" if self.server.token else "it wants a token"
            return ConfigError(f"{self._url} refused us, {why}: set PLIANT_TOKEN to that of the server")
        if answer.status_code == 404 and job:
            return UnknownJob(self._unknown(job))
        if answer.status_code == 409:
            return NameTaken(reason)
        return ConfigError(reason)

    def _unknown(self, name: str) -> str:
        names = [job.name for job in self.jobs()]
        if not names:
            return f"no job {name!r}: the cluster has had none yet; `pliant submit job.yml` gives it one"
        near = difflib.get_close_matches(name, names, 3) or [known for known in names if name and name in known][:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "`pliant list` shows the names"
        return f"no job {name!r}: {hint}"


def _path(name: str) -> str:
    return f"/jobs/{urllib.parse.quote(name, safe='')}"
