"""Where jobs are found: what runs on this machine, servers of `pliant serve`, config servers, records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, PliantError, ServerUnavailable
from pliant.fed.jobs.folders import JobFolder, Jobs
from pliant.launch.registry import running_jobs
from pliant.sched.live.book import FILE as BOOK
from pliant.sched.live.client import ENDED, JobStatus, LiveClient, Server, find_server, state_dir
from pliant.ui.jobs import (
    ANSWER_S,
    ClusterEvent,
    ConfigServerControl,
    DashboardState,
    FederatedControl,
    JobSource,
    RemoteLog,
    SchedulerControl,
    ShownCluster,
    ShownJob,
    add_logs,
    key_of,
    logs_beside,
)

# --- records ---


RECORD = "record.jsonl"
MOST_RECORDS = 500
MOST_DEPTH = 6
LOG_EVERY = 10
"""New records in a folder, and log files beside one, are looked for at every so many looks."""


class RecordSource:
    """A record, or all those in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._polls = 0

    def poll(self, known: DashboardState) -> None:
        if self._path.is_file():
            self._show(self._path, self._path.stem if self._path.name != RECORD else self._path.parent.name, known)
        elif self._polls % LOG_EVERY == 0:
            found = list(records_in(self._path))
            for path in found:
                self._show(
                    path,
                    str(path.parent.relative_to(self._path)) if path.parent != self._path else path.parent.name,
                    known,
                )
            if not found:
                known.problems[str(self._path)] = f"no {RECORD} in {self._path} yet"
            else:
                known.problems.pop(str(self._path), None)
        self._polls += 1

    def _show(self, path: Path, name: str, known: DashboardState) -> None:
        job = known.record(path, name)
        if self._polls % LOG_EVERY == 0:
            add_logs(job, logs_beside(path))


def records_in(folder: Path) -> Iterator[Path]:
    """The records below, not too deep, and not too many."""
    depth, count = len(folder.parts), 0
    for place, folders, files in os.walk(folder):
        if len(Path(place).parts) - depth >= MOST_DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "checkpoints")
        if RECORD in files:
            yield Path(place) / RECORD
            count += 1
        if count >= MOST_RECORDS:
            return


# --- clusters ---


class ServerSource:
    """The jobs of a server of `pliant serve`; with its state directory, if that is on this machine, also their records."""

    def __init__(self, server: Server, folder: Path | None) -> None:
        self._server, self._folder = server, folder
        self._told: dict[str, tuple[object, ...]] = {}

    def poll(self, known: DashboardState) -> None:
        try:
            if self._folder is not None:  # it may have come back at another port
                self._server = find_server(state=str(self._folder))
            with LiveClient(self._server, timeout_s=ANSWER_S) as client:
                self._ask(client, known)
        except PliantError as error:
            known.problems[self._server.url] = str(error)
            self.lose(known)
        else:
            known.problems.pop(self._server.url, None)

    def lose(self, known: DashboardState) -> None:
        """The server is gone. Its jobs run on, and only their records tell how they are."""
        cluster = known.clusters.pop(self._server.url, None)
        for key in cluster.jobs if cluster is not None else ():
            job = known.jobs[key]
            if job.reported_state not in ENDED:
                job.reported_state, job.reported_why, job.control = "", "", None
        self._told.clear()

    def _ask(self, client: LiveClient, known: DashboardState) -> None:
        cluster = known.clusters.setdefault(self._server.url, ShownCluster(self._server.url))
        statuses = client.jobs()
        for status in statuses:
            self._show(status, client, known)
        cluster.jobs = [self._job(status.name, known).key for status in statuses]
        cluster.status = client.cluster()

    def _job(self, name: str, known: DashboardState) -> ShownJob:
        if self._folder is not None:
            return known.record(self._folder / "jobs" / name / RECORD, name)
        return known.job(f"{self._server.url}/jobs/{name}", name)

    def _show(self, status: JobStatus, client: LiveClient, known: DashboardState) -> None:
        job = self._job(status.name, known)
        job.of_cluster, job.name = True, status.name
        job.reported_state, job.reported_why = status.state, status.why
        job.devices = ",".join(f"{kind}={count}" for kind, count in status.devices.items() if count)
        job.begun_s = status.submitted_s
        job.control = SchedulerControl(self._server, status.name) if status.state not in ENDED else None
        if self._folder is not None:
            add_logs(job, logs_beside(self._folder / "jobs" / status.name / RECORD))
        elif not job.logs:
            job.logs["log"] = RemoteLog(self._server, status.name)
        told = (status.state, status.why, job.devices)
        if self._told.get(status.name) != told:
            self._told[status.name] = told
            job.cluster_events = [
                ClusterEvent(status.name, event.at, event.what, event.why, (event.model_extra or {}).get("devices") or {})
                for event in client.job(status.name).events
            ]


class UserServerSource:
    """The cluster of this user on this machine, whenever there is one."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._cluster: ServerSource | None = None

    def poll(self, known: DashboardState) -> None:
        try:
            server = find_server(environ=self._environ)
        except ServerUnavailable:
            if self._cluster is not None:
                self._cluster.lose(known)
            return
        folder = state_dir(self._environ)
        local = folder if not self._environ.get("PLIANT_SERVER") else None
        self._cluster = self._cluster or ServerSource(server, local)
        self._cluster.poll(known)


class StateSource:
    """The state directory of `pliant serve`: its server while that runs, and the records in any case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = RecordSource(folder / "jobs")
        self._cluster: ServerSource | None = None

    def poll(self, known: DashboardState) -> None:
        try:
            server = find_server(state=str(self._folder))
        except ServerUnavailable:
            if self._cluster is not None:
                self._cluster.lose(known)
            self._records.poll(known)
            return
        self._cluster = self._cluster or ServerSource(server, self._folder)
        self._cluster.poll(known)


# --- this machine ---


class ForegroundSource:
    """The jobs of this user that run on this machine with a config server."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, only_known: bool = False) -> None:
        self._environ = environ
        self._only_known = only_known
        """Whether to tell only of jobs that other sources have named: that they run, and how to act on them."""
        self._listed: dict[str, ShownJob] = {}

    def poll(self, known: DashboardState) -> None:
        found: dict[str, ShownJob] = {}
        for each in running_jobs(self._environ):
            record = Path(each.record) if each.record else None
            if self._only_known and key_of(each.record or each.config_server) not in known.jobs:
                continue
            job = known.record(record, each.id) if record is not None else known.job(each.config_server, each.id)
            if job.of_cluster:
                continue
            job.name, job.command, job.begun_s = each.id, each.command, each.started_s
            token = each.token or self._environ.get("PLIANT_TOKEN", "")
            job.control = job.control or ConfigServerControl(each.config_server, token)
            if record is not None and job.looked % LOG_EVERY == 0:
                add_logs(job, logs_beside(record, [Path(each.logdir)] if each.logdir else []))
            job.looked += 1
            ask_config_server(job, each.config_server, token)
            found[job.key] = job
        for key, job in self._listed.items():
            if key not in found:
                job.control, job.members = None, ()
                job.reported_state = "finished" if job.timeline.over or job.reported_state == "finished" else "ended"
        self._listed = found


def ask_config_server(job: ShownJob, url: str, token: str) -> None:
    """Whether the job runs, and on whom, by its config server."""
    try:
        with ConfigClient(url, token, timeout_s=ANSWER_S) as client:
            roll = client.membership()
    except PliantError as error:
        job.reported_state, job.reported_why = "silent", str(error)
        return
    job.members = tuple(map(str, roll.members))
    job.reported_state = "finished" if roll.over else "running" if roll.members else "starting"
    job.reported_why = ""


class ConfigServerSource:
    """A job, through the address of its config server."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def poll(self, known: DashboardState) -> None:
        job = known.job(self._url, self._url)
        job.control = job.control or ConfigServerControl(self._url, self._token)
        ask_config_server(job, self._url, self._token)


class FederatedSource:
    """The federated jobs of this user on this machine, also those of before."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._jobs = Jobs.of_user(environ)
        self._names: dict[Path, str] = {}
        self._polls = 0

    def poll(self, known: DashboardState) -> None:
        for folder in self._jobs.all():
            try:
                name = self._names.get(folder.path) or folder.job().config.name
            except ConfigError as error:
                known.problems[str(folder.path)] = str(error)
                continue
            self._names[folder.path] = name
            self._show(folder, known.record(folder.aggregator / RECORD, name))
        self._polls += 1

    def _show(self, folder: JobFolder, job: ShownJob) -> None:
        minded = folder.is_minded()
        ended = None if minded else folder.read("exit.json")
        job.reported_state = "running" if minded else str(ended.get("state")) if ended is not None else "interrupted"
        job.reported_why = "" if ended is None else str(ended.get("why") or "")
        job.control = FederatedControl(folder) if minded else None
        if self._polls % LOG_EVERY == 0:
            add_logs(job, logs_beside(folder.aggregator / RECORD))


def sources(given: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[JobSource]:
    """What the arguments of the command name; without any, all that this user has on this machine.

    Raises:
        ConfigError: there is no such file, or nothing of ours answers at an address.
    """
    if not given:
        return [UserServerSource(environ), ForegroundSource(environ), FederatedSource(environ)]
    return [*(_source(each, environ) for each in given), ForegroundSource(environ, only_known=True)]


def _source(given: str, environ: Mapping[str, str]) -> JobSource:
    if given.startswith(("http://", "https://")):
        return _at(given, environ)
    path = Path(given).absolute()
    if not path.exists():
        raise ConfigError(f"{given}: no such file; give a {RECORD}, a folder with some, or the address of a server")
    if (path / BOOK).is_file():
        return StateSource(path)
    return RecordSource(path)


def _at(url: str, environ: Mapping[str, str]) -> JobSource:
    """A cluster's server, or a job's config server, whichever answers."""
    server = find_server(url, environ=environ)
    refusal: PliantError | None = None
    if server.url.rstrip("/").count("/") == 2:  # no path: a config server's address has one
        try:
            with LiveClient(server, timeout_s=ANSWER_S) as client:
                client.cluster()
            return ServerSource(server, None)
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
        except PliantError as error:
            refusal = error
    token = environ.get("PLIANT_TOKEN", "")
    with ConfigClient(url, token, timeout_s=ANSWER_S) as client:
        try:
            client.wanted()
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
        except PliantError as error:
            raise refusal or error from None  # who wants a token says it best the first time
    return ConfigServerSource(url, token)
