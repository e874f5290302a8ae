"""Where jobs are found: what runs on this machine, config servers; and which of all sources the user means."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, PliantError, ServerUnavailable
from pliant.fed.jobs.folders import JobFolder, Jobs
from pliant.launch.registry import running_jobs
from pliant.sched.live.book import FILE as BOOK
from pliant.sched.live.client import LiveClient, find_server
from pliant.ui.clusters import AtCluster, AtState, MyCluster
from pliant.ui.jobs import ANSWER_S, ByConfigServer, ByKeeper, Job, add_logs, key_of, logs_beside
from pliant.ui.records import LOG_EVERY, RECORD, Records
from pliant.ui.seen import Seen, Source


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
    refusal: PliantError | None = None
    if server.url.rstrip("/").count("/") == 2:  # no path: a config server's address has one
        try:
            with LiveClient(server, timeout_s=ANSWER_S) as client:
                client.cluster()
            return AtCluster(server, None)
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
        except PliantError as error:
            refusal = error
    token = environ.get("PLIANT_TOKEN", "")
    with ConfigClient(url, token, timeout_s=ANSWER_S) as client:
        try:
            client.state()
        except ServerUnavailable as error:
            raise ConfigError(f"{error}") from None
        except PliantError as error:
            raise refusal or error from None  # who wants a token says it best the first time
    return AtConfigServer(url, token)
