"""A client of the config server: one method per request, pliant's errors for its refusals."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn, TypeVar

import httpx

from pliant.cluster import View, Worker
from pliant.elastic.asking import HttpClient, checked_url, reason_of
from pliant.elastic.membership import Wanted
from pliant.elastic.roll import Roll
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    NotWanted,
    NoView,
    PliantError,
    ServerUnavailable,
    StaleView,
)

MAX_HOLD_S = 60.0
"""The server holds a request for at most this long; longer waits are made of several."""
MAX_REASON_CHARS = 500
_ERRORS: Mapping[int, type[PliantError]] = {403: ClusterCleared, 404: NoView, 409: CapacityError}
_ROLL_ERRORS: Mapping[int, type[PliantError]] = {**_ERRORS, 409: NotWanted}

T = TypeVar("T")


class ConfigClient(HttpClient):
    """Talks to the config server at `url`, such as http://10.0.0.1:9100/config; for any thread.

    `expected` in the calls below is compare-and-set: the version that the change was made from,
    None for whatever there is. `ca_file` replaces the system's certificate authorities.

    Raises (when made):
        ConfigError: `url` is not http://... or https://...

    Raises (from every call):
        ServerUnavailable: no answer within `timeout_s`, or one that says that it cannot.
        StaleView: `expected` is not the server's version any more.
        ConfigError: the server refused, with its reason; ClusterCleared, NoView, CapacityError, NotWanted where it
            is that.
    """

    def __init__(self, url: str, token: str = "", *, ca_file: str = "", timeout_s: float = 10.0) -> None:
        self.url = _checked(url)
        super().__init__(self.url, token, _verification(self.url, ca_file), timeout_s)

    def get(self) -> View | None:
        """The wanted view; None where it is unset."""
        return self.state().view

    def state(self) -> Wanted:
        """The wanted view with its version, which also an unset view has."""
        return self._wanted(self._send("GET", self.url))

    def wait(self, version: int, timeout_s: float) -> Wanted:
        """The state as soon as its version is not `version`; after `timeout_s` the same version, and no view."""
        left_s = timeout_s
        while True:
            hold_s = max(0.0, min(left_s, MAX_HOLD_S))
            url = self.url.copy_merge_params({"wait": f"{hold_s:.3f}"})
            wanted = self._wanted(self._send("GET", url, {"If-None-Match": f'"{version}"'}, hold_s=hold_s))
            left_s -= hold_s
            if wanted.version != version or left_s <= 0:
                return wanted

    def put(self, view: View, expected: int | None = None) -> View:
        """Want `view`; returns it with the number that the server gave it. Its own number is not looked at."""
        return self._change("PUT", self._sibling("/put"), expected, replace(view, number=0).to_json())

    def resize(self, size: int, expected: int | None = None) -> View:
        """Want `size` workers on the hosts of the current view; returns the view."""
        return self._change("POST", self._path("/resize"), expected, {"size": size})

    def equip(self, devices: Mapping[str, int]) -> None:
        """Want these devices, by type, with a worker on each; for a job whose server knows a caterer."""
        self._send("POST", self._path("/devices"), body=dict(devices), errors=_ROLL_ERRORS)

    def occupied(self) -> dict[str, int]:
        """The devices, by type, on which processes of the job live; as `equip`."""
        return self._decoded(self._send("GET", self._path("/devices")), _occupied_in)

    def drop(self) -> None:
        """Kill the workers on devices that are not wanted any more; as `equip`."""
        self._send("POST", self._path("/drop"))

    def add_worker(self, worker: Worker, expected: int | None = None) -> View:
        """Want `worker` as the last rank; returns the view."""
        return self._change("POST", self._path("/addworker"), expected, worker.to_json())

    def remove_worker(self, worker: Worker, expected: int | None = None) -> View:
        """Want `worker` gone; returns the view. Without its last worker a cluster is cleared."""
        return self._change("POST", self._path("/removeworker"), expected, worker.to_json())

    def clear(self, expected: int | None = None) -> View:
        """Want all workers to stop, until a reset; returns the empty view."""
        return self._change("POST", self._path("/clear"), expected)

    def reset(self, expected: int | None = None) -> int:
        """Want nothing in particular; returns the version of that."""
        return _etag(self._send("POST", self._sibling("/reset"), _if_match(expected), expected=expected))

    def roll(self) -> Roll:
        """Who trains now."""
        return self._roll("GET", "/roll")

    def wait_roll(self, after: int, timeout_s: float) -> Roll:
        """The roll as soon as its number is greater than `after`, or the job is over; what it is after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            hold_s = max(0.0, min(deadline_s - time.monotonic(), MAX_HOLD_S))
            roll = self._roll("GET", f"/roll?after={after}&timeout_s={hold_s:.3f}", hold_s=hold_s)
            if roll.number > after or roll.over or time.monotonic() >= deadline_s:
                return roll

    def ready(self, worker: Worker) -> Roll:
        """Say that `worker` can train; it does once the roll lists it. NotWanted: it was removed, and must end."""
        return self._roll("POST", "/ready", _notice(worker))

    def settled(self, worker: Worker, replicas: int = 0) -> Roll:
        """Say that `worker` has the state of a job of so many replicas: others may now leave it to this one."""
        return self._roll("POST", "/settled", {"Worker": worker.to_json(), "Replicas": replicas})

    def lost(self, worker: Worker, reason: str, by: Worker | None = None) -> Roll:
        """Say that `worker` has died or fallen silent; the roll without it is urgent. Nothing if that is known, or if
        the worker that says so (`by`) is itself not on the roll."""
        notice = _notice(worker, reason)
        return self._roll("POST", "/lost", notice if by is None else {**notice, "By": by.to_json()})

    def leave(self, worker: Worker) -> Roll:
        """Say that `worker` goes, after its step. Nothing if that is known."""
        return self._roll("POST", "/leave", _notice(worker))

    def finish(self) -> Roll:
        """Say that the program has run to its end: the roll is over for everybody."""
        return self._roll("POST", "/finish")

    def _roll(self, method: str, target: str, body: Mapping[str, object] | None = None, *, hold_s: float = 0.0) -> Roll:
        answer = self._send(method, self.url.join(target), body=body, hold_s=hold_s, errors=_ROLL_ERRORS)
        return self._decoded(answer, Roll.from_json)

    def _change(
        self, method: str, url: httpx.URL, expected: int | None, body: Mapping[str, object] | None = None
    ) -> View:
        answer = self._send(method, url, _if_match(expected), body, expected=expected)
        return self._view(answer)

    def _send(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        *,
        hold_s: float = 0.0,
        expected: int | None = None,
        errors: Mapping[int, type[PliantError]] = _ERRORS,
    ) -> httpx.Response:
        answer = self._request(method, url, headers=headers, body=body, hold_s=hold_s)
        unset = method == "GET" and answer.status_code == 404 and "etag" in answer.headers
        if not (answer.is_success or answer.status_code == 304 or unset):
            self._refuse(answer, expected, errors)
        return answer

    def _unreachable(self, error: httpx.TransportError) -> str:
        why = str(error) or type(error).__name__
        return f"config server {self.url}: {why}; is it running, and is this its address?"

    def _refuse(
        self, answer: httpx.Response, expected: int | None, errors: Mapping[int, type[PliantError]]
    ) -> NoReturn:
        reason = reason_of(answer)
        if answer.is_server_error:
            raise ServerUnavailable(f"config server {self.url}: {reason}")
        if "etag" not in answer.headers:
            raise ConfigError(f"config server {self.url}: {answer.status_code} {reason}")
        if answer.status_code == 412 and expected is not None:
            raise StaleView(expected, _etag(answer))
        raise errors.get(answer.status_code, ConfigError)(reason)

    def _wanted(self, answer: httpx.Response) -> Wanted:
        return Wanted(_etag(answer), self._view(answer) if answer.is_success else None)

    def _view(self, answer: httpx.Response) -> View:
        return self._decoded(answer, View.from_json)

    def _decoded(self, answer: httpx.Response, decode: Callable[[object], T]) -> T:
        try:
            return decode(answer.json())
        except ValueError:
            raise ConfigError(
                f"{self.url} answered without JSON: it is not a config server; give the address that `pliant config-server` prints"
            ) from None

    def _sibling(self, path: str) -> httpx.URL:
        """Where to change the view: where it is read, unless that is the path for reading that KungFu's commands name."""
        return self._path(path) if self.url.path == "/get" else self.url

    def _path(self, path: str) -> httpx.URL:
        return self.url.copy_with(path=path, query=None)


def _occupied_in(value: object) -> dict[str, int]:
    found = value.get("occupied") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f'{value!r:.80} says nothing of devices: it is {{"occupied": {{"cpu": 2}}}} elsewhere')
    return {str(kind): int(count) for kind, count in found.items()}


def _notice(worker: Worker, reason: str = "") -> dict[str, object]:
    # A reason may quote a peer's bytes as half of a surrogate pair, which UTF-8 cannot carry.
    carried = reason[:MAX_REASON_CHARS].encode(errors="replace").decode()
    return {"Worker": worker.to_json(), "Reason": carried}


def _checked(url: str) -> httpx.URL:
    """`url` with its scheme, host and path; the path is /config where none is given."""
    parsed = checked_url(url, "config server", "http://10.0.0.1:9100/config")
    return parsed.copy_with(path="/config") if parsed.path in ("", "/") else parsed


def _verification(url: httpx.URL, ca_file: str) -> bool | ssl.SSLContext:
    if url.scheme == "http":
        return False  # nothing to verify, and loading the authorities takes longer than the request
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"certificate authority {ca_file!r}: {error}; give a PEM file") from None


def _if_match(expected: int | None) -> dict[str, str]:
    return {} if expected is None else {"If-Match": f'"{expected}"'}


def _etag(answer: httpx.Response) -> int:
    try:
        return int(answer.headers["etag"].strip('"'))
    except (KeyError, ValueError):
        raise ConfigError(
            f"{answer.url} answered without a version: it is not a config server; give the address that `pliant config-server` prints"
        ) from None
