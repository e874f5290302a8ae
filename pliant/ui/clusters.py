"""Clusters of `pliant serve` as places where jobs are found: by an address, by a state directory, or this user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pliant.errors import PliantError, ServerUnavailable
from pliant.sched.live.client import ENDED, JobStatus, LiveClient, Server, find_server, state_dir
from pliant.ui.allocation import Happening
from pliant.ui.jobs import ANSWER_S, ByCluster, ClusterLog, Job, add_logs, logs_beside
from pliant.ui.records import RECORD, Records
from pliant.ui.seen import Cluster, Seen


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
            self.lose(seen)
        else:
            seen.problems.pop(self._server.url, None)

    def lose(self, seen: Seen) -> None:
        """The server is gone. Its jobs run on, and only their records tell how they are."""
        cluster = seen.clusters.pop(self._server.url, None)
        for key in cluster.jobs if cluster is not None else ():
            job = seen.jobs[key]
            if job.told_state not in ENDED:
                job.told_state, job.told_why, job.control = "", "", None
        self._told.clear()

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
            if self._cluster is not None:
                self._cluster.lose(seen)
            return
        folder = state_dir(self._environ)
        local = folder if not self._environ.get("PLIANT_SERVER") else None
        self._cluster = self._cluster or AtCluster(server, local)
        self._cluster.look(seen)


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
            if self._cluster is not None:
                self._cluster.lose(seen)
            self._records.look(seen)
            return
        self._cluster = self._cluster or AtCluster(server, self._folder)
        self._cluster.look(seen)
