"""Sources of jobs: the job server or job store, runs in the foreground, config servers, and records on disk."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pliant.cluster import Worker
from pliant.elastic.client import is_etcd, open_client
from pliant.errors import ConfigError, PliantError, ServerUnavailable
from pliant.jobs.client import JobsClient, ServerAddress, StoredJobs, find_server, open_jobs, stop_foreground
from pliant.jobs.status import ENDED, JobStatus, log_path
from pliant.jobs.store import FILE as STORE
from pliant.jobs.store import running_jobs
from pliant.tokens import find_token, state_directory
from pliant.ui.jobs import MOST_LINES, DashboardState, JobControl, JobSource, ShownCluster, ShownJob, job_key
from pliant.ui.timeline import plural

ANSWER_S = 5.0
RECORD = "record.jsonl"
MOST_RECORDS = 500
MOST_DEPTH = 6
SCAN_EVERY = 10
"""Folders are searched for new records and logs only in every so many polls."""
LOG_NAME = re.compile(r"(.+?)(?:@[0-9]+)?\.std(?:out|err)\.log")
"""The name of a worker's log: its label, the version in which it was started, and the stream."""
ENDS_SOON = "told to end after its step"


def open_sources(given: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[JobSource]:
    """Return the sources that the arguments of a command name; without any, all jobs of this user on this machine.

    Raises:
        ConfigError: there is no such file, or what answers at an address is no server of pliant.
        ServerUnavailable: nothing answers at an address.
    """
    if not given:
        where, is_local = str(state_directory(environ)), not environ.get("PLIANT_SERVER")
        mine = StoreSource(where, lambda: open_jobs(environ=environ, timeout_s=ANSWER_S), is_local=is_local)
        return [mine, ForegroundSource(environ)]
    return [*(_open_source(each, environ) for each in given), ForegroundSource(environ, only_known=True)]


def _open_source(given: str, environ: Mapping[str, str]) -> JobSource:
    if given.startswith(("http://", "https://")):
        return _open_address(given, environ)
    if is_etcd(given):
        return _open_membership(given, "")
    path = Path(given).absolute()
    if not path.exists():
        raise ConfigError(f"{given}: no such file; give a {RECORD}, a folder with some, or the address of a server")
    if (path / STORE).is_file():
        return StoreSource(str(path), lambda: open_jobs(state=str(path), environ=environ, timeout_s=ANSWER_S))
    return RecordSource(path)


def _open_address(url: str, environ: Mapping[str, str]) -> JobSource:
    """Return the source for a job server or a config server, whichever answers."""
    server = find_server(url, environ=environ)
    refusal: PliantError | None = None
    if server.url.rstrip("/").count("/") == 2:  # without a path, which the address of a config server has
        try:
            with JobsClient(server, timeout_s=ANSWER_S) as client:
                client.cluster()
            return StoreSource(server.url, lambda: JobsClient(server, timeout_s=ANSWER_S), is_local=False)
        except ServerUnavailable:
            raise
        except PliantError as error:
            refusal = error
    try:
        return _open_membership(url, find_token(url, environ))
    except PliantError as error:
        raise refusal or error from None  # the job server explains best how to give a token


def _open_membership(url: str, token: str) -> JobSource:
    """Return the source for the one job whose membership is kept at `url`; raise ServerUnavailable if nothing answers there."""
    with open_client(url, token, timeout_s=ANSWER_S) as client:
        client.snapshot()
    return ConfigServerSource(url, token)


# --- records ---


class RecordSource:
    """A record, or all records in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._polls = 0

    def poll(self, known: DashboardState) -> None:
        if self._path.is_file():
            self._show(self._path, self._path.stem if self._path.name != RECORD else self._path.parent.name, known)
        elif self._polls % SCAN_EVERY == 0:
            found = list(_find_records(self._path))
            for path in found:
                folder = path.parent
                self._show(path, str(folder.relative_to(self._path)) if folder != self._path else folder.name, known)
            if found:
                known.problems.pop(str(self._path), None)
            else:
                known.problems[str(self._path)] = f"no {RECORD} in {self._path} yet"
        self._polls += 1

    def _show(self, path: Path, name: str, known: DashboardState) -> None:
        job = known.record(path, name)
        if self._polls % SCAN_EVERY <= 1:  # the second time the record has told who its workers are
            job.add_logs(logs_beside(path, job.workers))


def _find_records(folder: Path) -> Iterator[Path]:
    """Yield the records below a folder, up to a depth and a number."""
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


def logs_beside(record: Path, workers: Collection[str]) -> list[Path]:
    """Return where the logs of a job with this record may be: in its folder of the job store, or beside the record, by the
    names of its workers."""
    folder = record.parent
    stored = [folder / "log"] if record.name == RECORD else []
    if folder.name == "aggregator":
        stored.append(folder.parent / "worker" / "log")
    return [*stored, *worker_logs(folder, workers)]


def worker_logs(folder: Path, workers: Collection[str]) -> list[Path]:
    """Return the files that `pliant run --logdir FOLDER` has written for these workers."""
    labels = {Worker.parse(worker).label for worker in workers if _is_worker(worker)}
    return sorted(
        path for path in folder.glob("*.std*.log") if (found := LOG_NAME.fullmatch(path.name)) and found[1] in labels
    )


def _is_worker(text: str) -> bool:
    try:
        Worker.parse(text)
    except ConfigError:  # a record may say anything
        return False
    return True


# --- the job server or the job store ---


class StoreSource:
    """All jobs of a store: through its server while one runs, otherwise read directly.

    Runs of `pliant run` in the foreground are left to `ForegroundSource`, which asks their config servers.
    """

    def __init__(self, where: str, connect: Callable[[], JobsClient | StoredJobs], *, is_local: bool = True) -> None:
        self._where, self._connect, self._is_local = where, connect, is_local
        self._keys: list[str] = []
        self._shown: dict[str, tuple[object, ...]] = {}
        self._polls = 0

    def poll(self, known: DashboardState) -> None:
        try:
            with self._connect() as jobs:
                statuses = [each for each in jobs.jobs() if each.scheduled or each.kind == "federated"]
                self._keys = [self._show(status, jobs, known) for status in statuses]
                devices = jobs.cluster()
        except PliantError as error:
            known.problems[self._where] = str(error)
            known.clusters.pop(self._where, None)
            for key in self._keys:  # the jobs run on, and only their records tell how they are
                if known.jobs[key].reported_state not in ENDED:
                    known.jobs[key].reported_state, known.jobs[key].control = "", None
            self._shown.clear()
            return
        known.problems.pop(self._where, None)
        if devices is None:
            known.clusters.pop(self._where, None)
        else:
            known.clusters[self._where] = ShownCluster(self._where, devices, self._keys)
        self._polls += 1

    def _show(self, status: JobStatus, jobs: JobsClient | StoredJobs, known: DashboardState) -> str:
        if self._is_local and status.record:
            job = known.record(Path(status.record), status.name)
        else:
            job = known.job(f"{self._where}/jobs/{status.name}", status.name)
        job.is_stored, job.name = True, status.name
        job.reported_state, job.reported_why = status.state, status.why
        job.devices = ",".join(f"{kind}={count}" for kind, count in status.devices.items() if count)
        job.begun_s, job.tenant = status.submitted_s, status.tenant
        job.control = None if status.is_over or status.state == "interrupted" else _control(status, jobs)
        if not self._is_local:
            if not job.logs and isinstance(jobs, JobsClient):
                job.logs["log"] = RemoteLog(jobs.server, status.name)
        elif self._polls % SCAN_EVERY == 0:
            job.add_logs([log_path(status), *(logs_beside(Path(status.record), job.workers) if status.record else [])])
        shown = (status.state, status.why, job.devices)
        if self._shown.get(status.name) != shown:
            self._shown[status.name] = shown
            job.cluster_events = list(jobs.job(status.name).events)
        return job.key


def _control(status: JobStatus, jobs: JobsClient | StoredJobs) -> JobControl | None:
    def stop() -> str:
        if status.scheduled and isinstance(jobs, JobsClient):
            with JobsClient(jobs.server, timeout_s=ANSWER_S) as client:
                client.stop(status.name)
        elif not stop_foreground(status.name):
            raise ConfigError(f"{status.name}: no process of it runs on this machine; stop it where it was started")
        return ENDS_SOON

    return JobControl(stop) if isinstance(jobs, JobsClient) or not status.scheduled else None


class RemoteLog:
    """Output of a job whose server is on another machine."""

    def __init__(self, server: ServerAddress, name: str) -> None:
        self._server, self._name = server, name
        self._end, self._rest = 0, ""
        self.text: deque[str] = deque(maxlen=MOST_LINES)
        self.num_lines = 0

    def poll(self) -> None:
        with JobsClient(self._server, timeout_s=ANSWER_S) as client:
            part = client.logs(self._name, self._end)
        self._end = part.end
        *lines, self._rest = (self._rest + part.text).split("\n")
        self.num_lines += len(lines)
        self.text.extend(lines)


# --- config servers ---


class ForegroundSource:
    """The jobs of this user that run in the foreground on this machine with a config server."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, only_known: bool = False) -> None:
        self._environ = environ
        self._only_known = only_known
        """Whether to update only jobs that other sources have found."""
        self._listed: dict[str, ShownJob] = {}
        self._polls = 0

    def poll(self, known: DashboardState) -> None:
        found: dict[str, ShownJob] = {}
        for each in running_jobs(self._environ):
            if self._only_known and job_key(each.record or each.config_server) not in known.jobs:
                continue
            job = (
                known.record(Path(each.record), each.name) if each.record else known.job(each.config_server, each.name)
            )
            if job.is_stored:
                continue
            job.name, job.command, job.begun_s = each.name, each.command, each.started_s
            _ask_config_server(job, each.config_server, each.token or find_token(each.config_server, self._environ))
            if self._polls % SCAN_EVERY == 0 and each.logdir:
                job.add_logs(worker_logs(Path(each.logdir), job.workers))
            found[job.key] = job
        for key, job in self._listed.items():
            if key not in found:
                job.control, job.members = None, ()
                job.reported_state = "finished" if job.timeline.over or job.reported_state == "finished" else "ended"
        self._listed = found
        self._polls += 1


class ConfigServerSource:
    """A job that is known by the address of its config server."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def poll(self, known: DashboardState) -> None:
        _ask_config_server(known.job(self._url, self._url), self._url, self._token)


def _ask_config_server(job: ShownJob, url: str, token: str) -> None:
    """Update whether the job runs, and on which workers."""
    job.control = job.control or config_server_control(url, token)
    try:
        with open_client(url, token, timeout_s=ANSWER_S) as client:
            membership = client.snapshot().membership
    except PliantError as error:
        job.reported_state, job.reported_why = "silent", str(error)
        return
    job.members = tuple(map(str, membership.members))
    over = "ended" if membership.ended_by else "finished"
    job.reported_state = over if membership.over else "running" if membership.members else "starting"
    job.reported_why = membership.ended_by


def config_server_control(url: str, token: str) -> JobControl:
    """Return the control of a job of `pliant run -w` through its config server."""

    def resize(workers: int) -> str:
        if workers < 1:
            raise ConfigError(f"{workers} workers: use 1 or more, or stop the job")
        with open_client(url, token, timeout_s=ANSWER_S) as client:
            view = client.resize(workers)
        return f"asked for {plural(workers, 'worker')} (version {view.number})"

    def stop() -> str:
        with open_client(url, token, timeout_s=ANSWER_S, origin="Stop on the page of pliant dash") as client:
            client.resize(0)
        return ENDS_SOON

    return JobControl(stop, resize)
