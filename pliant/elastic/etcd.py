"""The membership of a job in etcd: every client applies the rules itself, and writes what follows by compare-and-swap.

All that a config server would keep is one value under one key (`PREFIX/job`, JSON). A change reads it, applies
`ElasticState.after`, and writes the result if the key is still that of the same revision; otherwise it begins again. So no
process of the job is special: whoever reaches a majority of etcd can change the membership, and nobody else can.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Self

from pliant.cluster import BY_PROGRAM, ClusterSnapshot, Membership, View, Worker
from pliant.elastic import membership as rules
from pliant.elastic.etcd_gateway import EtcdAddress, EtcdKey, KeyValue
from pliant.elastic.membership import NO_LIMITS, ElasticState, Limits, ViewRequest, WorkerNotice
from pliant.errors import ConfigError, OtherJob
from pliant.json_text import parse_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobValue:
    """What is kept of a job under its key."""

    state: ElasticState = field(default_factory=ElasticState)
    limits: Limits = NO_LIMITS
    """What a resize may use; from the runner that put the first view."""

    def to_bytes(self) -> bytes:
        return json.dumps({**self.state.to_json(), "Limits": self.limits.to_json()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobValue:
        """Return the value in `data`; an empty one if there is none. Raise ConfigError if it is not one of pliant's."""
        if not data:
            return cls()
        try:
            value = parse_json(data)
            return cls(ElasticState.from_json(value), Limits.from_json(value.get("Limits")))
        except (ValueError, TypeError, ConfigError):
            text = data[:60].decode(errors="backslashreplace")
            raise ConfigError(
                f"{text!r} is not the state of a job of this version: give each job a prefix of its own"
            ) from None


def job_key(address: EtcdAddress) -> str:
    """Return the key that holds the membership of the job at `address`."""
    return f"{address.prefix}/job"


def how_to_reset(url: str) -> str:
    """Return the command with which a user lets another job begin at `url`."""
    address = EtcdAddress.parse(url)
    return f"give another prefix, or forget that job: `etcdctl --endpoints {','.join(address.endpoints)} del {job_key(address)}`"


class EtcdClient:
    """A `MembershipClient` of the job at `url`, such as etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/job-1.

    Raises (when made):
        ConfigError: `url` is not of that form, or a file that the environment names cannot be read.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 10.0, environ: Mapping[str, str] = os.environ, origin: str = ""
    ) -> None:
        address = EtcdAddress.parse(url)
        self._by = origin if origin == BY_PROGRAM else f"{origin or 'a client of etcd'} on {socket.gethostname()}"
        self.job = ""
        self._name = job_key(address)
        self._key = EtcdKey(address, self._name, environ, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._key.close()

    def snapshot(self) -> ClusterSnapshot:
        return self._decode(self._key.read()).state.snapshot

    def wait_for_change(self, known: ClusterSnapshot, timeout_s: float) -> ClusterSnapshot:
        seen = -1
        with closing(self._key.follow(timeout_s)) as values:
            for value in values:
                if value.revision != seen:
                    seen, snapshot = value.revision, self._decode(value).state.snapshot
                    if snapshot.tag != known.tag:
                        return snapshot
        return known

    def restore(self, known: ClusterSnapshot) -> ClusterSnapshot:
        return self._apply(rules.RestoreNotice(known)).snapshot

    def put(self, view: View, expected: int | None = None, limits: Limits | None = None) -> View:
        return self._view_after(rules.PutView(view, expected), limits)

    def resize(self, size: int, expected: int | None = None) -> View:
        return self._view_after(rules.ResizeView(size, expected))

    def add_worker(self, worker: Worker, expected: int | None = None) -> View:
        return self._view_after(rules.AddWorker(worker, expected))

    def reset(self, expected: int | None = None) -> int:
        """Want nothing in particular, so that another job may begin; return the version of that."""
        return self._apply(rules.ResetView(expected)).wanted.version

    def ready(self, worker: Worker) -> Membership:
        return self._apply(rules.ReadyNotice(worker)).membership

    def settled(self, worker: Worker, replicas: int = 0, membership: int = 0) -> Membership:
        return self._apply(rules.SettledNotice(worker, replicas, membership)).membership

    def lost(self, worker: Worker, reason: str, by: Worker | None = None) -> Membership:
        return self._apply(rules.LossNotice(worker, reason, by)).membership

    def leave(self, worker: Worker) -> Membership:
        return self._apply(rules.LeaveNotice(worker)).membership

    def finish(self, worker: Worker) -> Membership:
        return self._apply(rules.FinishNotice(worker)).membership

    def _view_after(self, request: ViewRequest, limits: Limits | None = None) -> View:
        view = self._apply(request, limits).wanted.view
        assert view is not None, "only a reset leaves no view"
        return view

    def _apply(self, request: ViewRequest | WorkerNotice, limits: Limits | None = None) -> ElasticState:
        """Write what follows from `request`, and return it."""
        now = self._key.read()
        while True:
            before = self._decode(now)
            if self.job and before.state.id != self.job and not isinstance(request, rules.RestoreNotice):
                raise OtherJob(f"etcd's key {self._name} does not keep the job that the request is for")
            kept = before.limits if limits is None else limits
            after = before.state.after(request, kept, by=self._by)
            if after is before.state:
                return after
            after = after if after.id else replace(after, id=secrets.token_hex(8))
            written = JobValue(after, kept).to_bytes()
            beaten_by = self._key.replace(written, now.revision)
            if beaten_by is None or beaten_by.value == written:  # it was this very change, if an answer was lost
                log.debug("%s: %s", self._name, request)
                return after
            now = beaten_by

    def _decode(self, found: KeyValue) -> JobValue:
        try:
            return JobValue.from_bytes(found.value)
        except ConfigError as error:
            raise ConfigError(f"etcd's key {self._name}: {error}") from None
