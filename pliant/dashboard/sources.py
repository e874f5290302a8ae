"""Where jobs are found: records, the list of jobs that run on this machine, config servers, clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant.dashboard.allocation import Happening
from pliant.dashboard.follow import RecordFile
from pliant.dashboard.jobs import (
    ANSWER_S,
    ByCluster,
    ByConfigServer,
    ByKeeper,
    ClusterLog,
    Job,
    add_logs,
    key_of,
    logs_beside,
)
from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, PliantError, ServerUnavailable
from pliant.fed.jobs import JobFolder, Jobs
from pliant.launch.registry import running_jobs
from pliant.sched.book import FILE as BOOK
from pliant.sched.live_client import ENDED, ClusterStatus, JobStatus, LiveClient, Server, find_server, state_dir

RECORD = "record.jsonl"
MOST_RECORDS = 500
MOST_DEPTH = 6
LOG_EVERY = 10
"""New log files beside a record are looked for at every so many looks."""


@dataclass(slots=True)
class Cluster:
    """The devices of a server of `pliant serve`, and who has had them."""

    where: str
    status: ClusterStatus | None = None
    jobs: list[str] = field(default_factory=list)
    """The keys of its jobs."""


@dataclass(slots=True)
class Seen:
    """All that is known by now."""

    jobs: dict[str, Job] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """What cannot be looked at, and why."""

    def job(self, where: str, name: str) -> Job:
        """The job that is known from there; a new one, if it was not."""
        key = key_of(where)
        if key not in self.jobs:
            self.jobs[key] = Job(key, name, where)
        return self.jobs[key]

    def record(self, path: Path, name: str) -> Job:
        """The job that writes this record."""
        job = self.job(str(path), name)
        if job.record is None:
            job.record = RecordFile(path)
        return job


class Source(Protocol):
    """A place to look at. It tells problems by `seen`, and raises nothing but what is a mistake of ours."""

    def look(self, seen: Seen) -> None: ...


class Records:
    """A record, or all those in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looks = 0

    def look(self, seen: Seen) -> None:
        if self._path.is_file():
            self._show(self._path, self._path.stem if self._path.name != RECORD else self._path.parent.name, seen)
        elif self._looks % LOG_EVERY == 0:
            found = list(records_in(self._path))
            for path in found:
                self._show(
                    path,
                    str(path.parent.relative_to(self._path)) if path.parent != self._path else path.parent.name,
                    seen,
                )
            if not found:
                seen.problems[str(self._path)] = f"no {RECORD} in {self._path} yet"
            else:
                seen.problems.pop(str(self._path), None)
        self._looks += 1

    def _show(self, path: Path, name: str, seen: Seen) -> None:
        job = seen.record(path, name)
        if self._looks % LOG_EVERY == 0:
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


class Here:
    """The jobs of this user that run on this machine with a config server."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, only_known: bool = False) -> None:
        self._environ = environ
        self._only_known = only_known
        """Whether to tell only of jobs that other sources have named: that they run, and how to act on them."""
        self._listed: dict[str, Job] = {}

    def look(self, seen: Seen) -> None:
        found: dict[str, Job] = {}
        for each in running_jobs(self._environ):
            record = Path(each.record) if each.record else None
            if self._only_known and key_of(each.record or each.config_server) not in seen.jobs:
                continue
            job = seen.record(record, each.id) if record is not None else seen.job(each.config_server, each.id)
            if job.of_cluster:
                continue
            job.name, job.command, job.begun_s = each.id, each.command, each.started_s
            token = each.token or self._environ.get("PLIANT_TOKEN", "")
            job.control = job.control or ByConfigServer(each.config_server, token)
            if record is not None and job.looked % LOG_EVERY == 0:
                add_logs(job, logs_beside(record, [Path(each.logdir)] if each.logdir else []))
            job.looked += 1
            ask_roll(job, each.config_server, token)
            found[job.key] = job
        for key, job in self._listed.items():
            if key not in found:
                job.control, job.members = None, ()
                job.told_state = "finished" if job.story.over or job.told_state == "finished" else "ended"
        self._listed = found


def ask_roll(job: Job, url: str, token: str) -> None:
    """Whether the job runs, and on whom, by its config server."""
    try:
        with ConfigClient(url, token, timeout_s=ANSWER_S) as client:
            roll = client.roll()
    except PliantError as error:
        job.told_state, job.told_why = "silent", str(error)
        return
    job.members = tuple(map(str, roll.members))
    job.told_state = "finished" if roll.over else "running" if roll.members else "starting"
    job.told_why = ""


class AtConfigServer:
    """A job, through the address of its config server."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def look(self, seen: Seen) -> None:
        job = seen.job(self._url, self._url)
        job.control = job.control or ByConfigServer(self._url, self._token)
        ask_roll(job, self._url, self._token)


class AtCluster:
    """The jobs of a server of `pliant serve`; with its state directory, if that is on this machine, also their records."""

    def __init__(self, server: Server, folder: Path | None) -> None:
        self._server, self._folder = server, folder
        self._told: dict[str, tuple[object, ...]] = {}

    def look(self, seen: Seen) -> None:
        try:
            if self._folder is not None:  # it may have come back at another port
                self._server = find_server(state=str(self._folder))
            with LiveClient(self._server, timeout_s=ANSWER_S) as client:
                self._ask(client, seen)
        except PliantError as error:
            seen.problems[self._server.url] = str(error)
        else:
            seen.problems.pop(self._server.url, None)

    def _ask(self, client: LiveClient, seen: Seen) -> None:
        cluster = seen.clusters.setdefault(self._server.url, Cluster(self._server.url))
        statuses = client.jobs()
        for status in statuses:
            self._show(status, client, seen)
        cluster.jobs = [self._job(status.name, seen).key for status in statuses]
        cluster.status = client.cluster()

    def _job(self, name: str, seen: Seen) -> Job:
        if self._folder is not None:
            return seen.record(self._folder / "jobs" / name / RECORD, name)
        return seen.job(f"{self._server.url}/jobs/{name}", name)

    def _show(self, status: JobStatus, client: LiveClient, seen: Seen) -> None:
        job = self._job(status.name, seen)
        job.of_cluster, job.name = True, status.name
        job.told_state, job.told_why = status.state, status.why
        job.devices = ",".join(f"{kind}={count}" for kind, count in status.devices.items() if count)
        job.begun_s = status.submitted_s
        job.control = ByCluster(self._server, status.name) if status.state not in ENDED else None
        if self._folder is not None:
            add_logs(job, logs_beside(self._folder / "jobs" / status.name / RECORD))
        elif not job.logs:
            job.logs["log"] = ClusterLog(self._server, status.name)
        told = (status.state, status.why, job.devices)
        if self._told.get(status.name) != told:
            self._told[status.name] = told
            job.happenings = [
                Happening(status.name, event.at, event.what, event.why, (event.model_extra or {}).get("devices") or {})
                for event in client.job(status.name).events
            ]


class MyCluster:
    """The cluster of this user on this machine, whenever there is one."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._cluster: AtCluster | None = None

    def look(self, seen: Seen) -> None:
        try:
            server = find_server(environ=self._environ)
        except ServerUnavailable:
            return
        folder = state_dir(self._environ)
        local = folder if not self._environ.get("PLIANT_SERVER") else None
        self._cluster = self._cluster or AtCluster(server, local)
        self._cluster.look(seen)


class MyFederated:
    """The federated jobs of this user on this machine, also those of before."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._jobs = Jobs.of_user(environ)
        self._names: dict[Path, str] = {}
        self._looks = 0

    def look(self, seen: Seen) -> None:
        for folder in self._jobs.all():
            try:
                name = self._names.get(folder.path) or folder.job().config.name
            except ConfigError as error:
                seen.problems[str(folder.path)] = str(error)
                continue
            self._names[folder.path] = name
            self._show(folder, seen.record(folder.aggregator / RECORD, name))
        self._looks += 1

    def _show(self, folder: JobFolder, job: Job) -> None:
        minded = folder.is_minded()
        ended = None if minded else folder.read("exit.json")
        job.told_state = "running" if minded else str(ended.get("state")) if ended is not None else "interrupted"
        job.told_why = "" if ended is None else str(ended.get("why") or "")
        job.control = ByKeeper(folder) if minded else None
        if self._looks % LOG_EVERY == 0:
            add_logs(job, logs_beside(folder.aggregator / RECORD))


def sources(given: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[Source]:
    """What the arguments of the command name; without any, all that this user has on this machine.

    Raises:
        ConfigError: there is no such file, or nothing of ours answers at an address.
    """
    if not given:
        return [MyCluster(environ), Here(environ), MyFederated(environ)]
    return [*(_source(each, environ) for each in given), Here(environ, only_known=True)]


def _source(given: str, environ: Mapping[str, str]) -> Source:
    if given.startswith(("http://", "https://")):
        return _at(given, environ)
    path = Path(given).absolute()
    if not path.exists():
        raise ConfigError(f"{given}: no such file; give a {RECORD}, a folder with some, or the address of a server")
    if (path / BOOK).is_file():
        return AtState(path)
    return Records(path)


def _at(url: str, environ: Mapping[str, str]) -> Source:
    """A cluster's server, or a job's config server, whichever answers."""
    server = find_server(url, environ=environ)
    if server.url.rstrip("/").count("/") == 2:  # no path: a config server's address has one
        try:
            with LiveClient(server, timeout_s=ANSWER_S) as client:
                client.cluster()
            return AtCluster(server, None)
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
        except PliantError:
            pass
    token = environ.get("PLIANT_TOKEN", "")
    with ConfigClient(url, token, timeout_s=ANSWER_S) as client:
        try:
            client.state()
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
    return AtConfigServer(url, token)


class AtState:
    """The state directory of `pliant serve`: its server while that runs, and the records in any case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = Records(folder / "jobs")
        self._cluster: AtCluster | None = None

    def look(self, seen: Seen) -> None:
        try:
            server = find_server(state=str(self._folder))
        except ServerUnavailable:
            self._records.look(seen)
            return
        self._cluster = self._cluster or AtCluster(server, self._folder)
        self._cluster.look(seen)
