"""The client of the job server, how a server is found or started, and the same questions asked of the store directly.

`open_jobs` returns a `JobsClient` where a server runs, and `StoredJobs` where none does: jobs can be listed, and their logs
read, at any time. What changes a scheduled job needs a server.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pliant.elastic.client import HttpClient, open_client, parse_server_url, refusal_reason
from pliant.errors import ConfigError, LaunchError, NameTaken, NotAllowed, PliantError, ServerUnavailable, UnknownJob
from pliant.jobs.status import (
    ClusterStatus,
    JobDetail,
    JobList,
    JobStatus,
    LogPart,
    ReservedDevices,
    check_forgettable,
    read_log,
    stored_detail,
    stored_statuses,
)
from pliant.jobs.store import JobStore, opened_store
from pliant.tokens import find_token, state_directory

if TYPE_CHECKING:
    from pliant.jobs.schema import JobSpec

PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
SERVER_FILE = "server.json"
"""File in the state directory in which a server says how to reach it."""
START_ONE = "start one with `pliant serve --devices cpu=4`, or name one with --server URL"
MAX_HOLD_S = 60.0
"""The server holds a request for logs at most this long; longer waits take several requests."""
RESERVE_S = 30.0
"""A reservation is answered when the devices are free, which on a busy machine takes longer than a plain answer."""
STARTS_S = 30.0
"""How long an embedded server may take to start."""
NOT_INHERITED = ("PLIANT_JOB", "PLIANT_WORKER", "PLIANT_TOKEN", "PLIANT_JOB_NAME")
DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execv(sys.argv[1], sys.argv[1:])"
"""Run a program that is not the caller's child: nobody has to wait for it, and no terminal ends it."""

Answer = TypeVar("Answer", bound=BaseModel)


# --- finding a server ---


class ServerAddress(BaseModel):
    """How to reach a server, as it has written it down."""

    model_config = ConfigDict(extra="allow", frozen=True)

    url: str
    token: Annotated[str, Field(repr=False)] = ""
    pid: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether the server is known to have ended: it ran on this machine and its process does not exist."""
        return bool(self.pid) and not Path(f"/proc/{self.pid}").exists()


def find_server(url: str = "", state: str = "", environ: Mapping[str, str] = os.environ) -> ServerAddress:
    """Return the server at `url` or PLIANT_SERVER; else the one that wrote itself down in `state` or in the user's state
    directory. PLIANT_TOKEN overrides the token that is written down.

    Raises:
        ServerUnavailable: none is known.
    """
    folder = Path(state) if state else state_directory(environ)
    url = url or ("" if state else environ.get("PLIANT_SERVER", ""))
    noted = _read_address(folder / SERVER_FILE)
    if not url:
        if noted is None:
            raise ServerUnavailable(
                f"no server of yours is known on this machine (no {SERVER_FILE} in {folder}): {START_ONE}"
            )
        found = noted
    elif noted is not None and noted.url.rstrip("/") == url.rstrip("/"):
        found = noted
    else:
        found = ServerAddress(url=url)
    return found.model_copy(update={"token": environ.get("PLIANT_TOKEN") or found.token})


def _read_address(file: Path) -> ServerAddress | None:
    try:
        return ServerAddress.model_validate(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def open_jobs(
    server: str = "", state: str = "", environ: Mapping[str, str] = os.environ, *, timeout_s: float = 10.0
) -> JobsClient | StoredJobs:
    """Return the jobs of a server, as `find_server` finds it; if none runs on this machine, those of the store.

    Raises:
        ServerUnavailable: there is neither a server nor a store.
    """
    try:
        found = find_server(server, state, environ)
        is_known = True
    except ServerUnavailable:
        is_known = False
    if is_known and not found.is_gone:
        return JobsClient(found, timeout_s=timeout_s)
    directory = Path(state).absolute() if state else state_directory(environ)
    store = opened_store(directory)
    if store is None and state:
        raise ServerUnavailable(f"--state {state}: neither a server nor jobs are there: {START_ONE}")
    return StoredJobs(store, ended=found if is_known else None)


def start_embedded(environ: Mapping[str, str] = os.environ) -> ServerAddress:
    """Start a server for the user's store in the background, on loopback; it ends by itself when no job is left.

    Raises:
        LaunchError: it did not start.
    """
    directory = state_directory(environ)
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = directory / "serve.log"
    kept = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    try:
        with log.open("ab") as out:
            begin = out.tell()
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", DETACH, *PLIANT, "serve", "--embedded"],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"{directory}: no server can be started: {error}") from None
    deadline_s = time.monotonic() + STARTS_S
    while time.monotonic() < deadline_s:
        found = _read_address(directory / SERVER_FILE)
        if found is not None and not found.is_gone:
            return find_server(environ={**environ, "PLIANT_SERVER": ""})
        said = log.read_bytes()[begin:].decode(errors="replace")
        if "pliant: " in said:
            raise LaunchError(f"no server could be started: {said.partition('pliant: ')[2].strip()}")
        time.sleep(0.02)
    raise LaunchError(f"no server has started within {STARTS_S:g} s; see {log}")


# --- through a server ---


class JobsClient(HttpClient):
    """A client of the job server, for any thread.

    Raises (when made):
        ConfigError: the URL is wrong.

    Raises (from every call):
        ServerUnavailable: no answer came within `timeout_s`, or the server answered that it cannot.
        UnknownJob, NameTaken, ConfigError: the server refused, with its reason.
    """

    def __init__(self, server: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.server = server
        self._url = parse_server_url(server.url, "--server", "http://10.0.0.1:9200")
        super().__init__(self._url, server.token, timeout_s)

    def submit(self, job: JobSpec) -> JobStatus:
        """Submit a job. NameTaken: there is, or was, one of that name."""
        return self._ask(JobStatus, "POST", "/jobs", body=job.model_dump(mode="json"))

    def jobs(self) -> list[JobStatus]:
        """Return all jobs, the first submitted first."""
        return sorted(self._ask(JobList, "GET", "/jobs").jobs, key=lambda job: job.submitted_s)

    def job(self, name: str) -> JobDetail:
        """Return one job with its history."""
        return self._ask(JobDetail, "GET", _path(name), job=name)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Tell a job to end, after its step or round or at once. Returns when the server has accepted it."""
        self._ask(JobStatus, "DELETE", _path(name), {"kill": "true"} if kill else {}, job=name)

    def resume(self, name: str) -> JobStatus:
        """Let a job that was stopped, has failed or was interrupted go on from its checkpoint."""
        return self._ask(JobStatus, "POST", f"{_path(name)}/resume", job=name)

    def forget(self, name: str) -> JobStatus:
        """Take a job that has ended off the list; its files stay."""
        return self._ask(JobStatus, "POST", f"{_path(name)}/forget", job=name)

    def logs(self, name: str, begin: int = 0, wait_s: float = 0.0) -> LogPart:
        """Return what the job printed from byte `begin` on; if that is nothing yet, what comes within `wait_s`."""
        hold_s = min(wait_s, MAX_HOLD_S)
        query = {"begin": str(begin), "wait_s": f"{hold_s:g}"}
        return self._ask(LogPart, "GET", f"{_path(name)}/logs", query, job=name, hold_s=hold_s)

    def cluster(self) -> ClusterStatus:
        """Return the devices, and which job has which."""
        return self._ask(ClusterStatus, "GET", "/cluster")

    def reserve(self, devices: Mapping[str, int]) -> ReservedDevices:
        """Take devices from the jobs, or give them back (0); returns when they are free."""
        return self._ask(ReservedDevices, "PUT", "/reserve", body=dict(devices), hold_s=RESERVE_S)

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
        answer = self._request(method, path, query=query, body=body, hold_s=hold_s)
        if not answer.is_success:
            raise self._refusal(answer, job)
        try:
            return form.model_validate_json(answer.content)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            why = f"{place} is missing or wrong" if place else "it is not JSON"
            raise ConfigError(
                f"{self._url} is no server of this version of pliant: {why} in its answer to {method} {path}"
            ) from None

    def _describe_unreachable(self, error: httpx.RequestError) -> str:
        if self.server.is_gone:
            return f"the server at {self._url} (pid {self.server.pid}) has ended; its jobs run on: start `pliant serve` again"
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        return f"no server answers at {self._url} ({why}): {START_ONE}"

    def _refusal(self, answer: httpx.Response, job: str) -> PliantError:
        reason = refusal_reason(answer)
        if answer.is_server_error:
            return ServerUnavailable(f"{self._url}: {answer.status_code} {reason}")
        if answer.status_code == 403:
            return NotAllowed(f"{self._url}: {reason}")
        if answer.status_code == 401:
            why = "the token we gave is not its own" if self.server.token else "it wants a token"
            return ConfigError(f"{self._url} refused us, {why}: set PLIANT_TOKEN to that of the server, or your tenant's")
        if answer.status_code == 404 and job:
            return UnknownJob(unknown_job(job, [known.name for known in self.jobs()]))
        if answer.status_code == 409:
            return NameTaken(reason)
        return ConfigError(reason)


def unknown_job(name: str, names: Collection[str]) -> str:
    """Return the message for a name that no job has."""
    if not names:
        return f"no job {name!r}: there has been none yet; `pliant submit job.yml` starts one"
    near = difflib.get_close_matches(name, names, 3) or [known for known in names if name and name in known][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "`pliant list` shows the names"
    return f"no job {name!r}: {hint}"


def _path(name: str) -> str:
    return f"/jobs/{urllib.parse.quote(name, safe='')}"


# --- without a server ---


class StoredJobs:
    """The jobs of a store, read directly because no server runs. Has the reading methods of `JobsClient`."""

    def __init__(self, store: JobStore | None, ended: ServerAddress | None = None) -> None:
        self._store = store
        self.ended = ended
        """The server that has ended without taking its address back."""

    def __enter__(self) -> StoredJobs:
        if self._store is not None:
            self._store.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def jobs(self) -> list[JobStatus]:
        """Return all jobs, the first submitted first."""
        return sorted(self._statuses(), key=lambda job: job.submitted_s)

    def job(self, name: str) -> JobDetail:
        """Return one job with its history."""
        known = {status.name: status for status in self._statuses()}
        if name not in known or self._store is None:
            raise UnknownJob(unknown_job(name, known))
        return stored_detail(known[name], self._store)

    def logs(self, name: str, begin: int = 0, wait_s: float = 0.0) -> LogPart:
        """Return what the job printed from byte `begin` on, as `JobsClient.logs`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            part = read_log(self.job(name), begin)
            if part.text or part.over or time.monotonic() >= deadline_s:
                return part
            time.sleep(0.1)

    def cluster(self) -> None:
        """Return None: without a server nobody gives devices to jobs."""

    def forget(self, name: str) -> JobStatus:
        """Take a job that does not run off the list; its files stay."""
        status = self.job(name)
        check_forgettable(status)
        assert self._store is not None, "there is a job"
        self._store.forget(name)
        return status

    def _statuses(self) -> list[JobStatus]:
        store = self._store
        return [] if store is None else stored_statuses(store.jobs(), store.runs(), store.directory)


def stop_foreground(name: str, *, kill: bool = False, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell a foreground run of that name to end; returns false if there is none."""
    store = opened_store(state_directory(environ))
    if store is None:
        return False
    with store:
        run = next((run for run in store.runs() if run.name == name), None)
    if run is None:
        return False
    if run.config_server and not kill:
        with open_client(
            run.config_server, run.token or find_token(run.config_server, environ), origin="pliant stop"
        ) as client:
            client.resize(0)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL if kill else signal.SIGTERM)
    return True
