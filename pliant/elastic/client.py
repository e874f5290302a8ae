"""Clients of the store of the membership: one call per request, a thread that follows the store, and a thread that sends to it.

`MembershipClient` is what runners, workers and commands ask of a store; `open_client` returns the one for a URL.
`ConfigClient` asks a config server, and raises pliant's errors where the server refuses. `ConfigFollower` and
`ConfigSender` are what workers and runners alike use while a job runs: one hands over every new state of the cluster, the
other delivers messages, and repeats them until the store answers. `HttpClient` is the base of all
HTTP clients in pliant.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar
from urllib.parse import urljoin

import httpx

from pliant.cluster import ORIGIN_HEADER, ClusterSnapshot, Membership, View, Wanted, Worker
from pliant.elastic.membership import Limits
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    InvalidView,
    NotWanted,
    NoView,
    OtherJob,
    PliantError,
    ServerUnavailable,
    StaleView,
)
from pliant.json_text import parse_json

log = logging.getLogger(__name__)

FOLLOW_HOLD_S = 25.0
RETRY_S = 0.2
OTHER_JOB_S = 2.0
"""How long to wait before a server of another job is asked again."""
ANSWER_S = 10.0
"""How long an answer may take beyond the time that is given to a call."""
_REFUSALS = {kind.__name__: kind for kind in (CapacityError, ClusterCleared, InvalidView, NotWanted, NoView, OtherJob)}
"""What a refusal raises, by the kind that the server says; ConfigError for any other."""

T = TypeVar("T")


# --- any HTTP server of ours ---


class HttpClient(ABC):
    """Keeps connections to one server, for any number of threads.

    Proxy variables in the environment are ignored: the hosts of a job are not behind a proxy.
    """

    def __init__(self, base_url: httpx.URL, token: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # The system's authorities, or those of SSL_CERT_FILE. Reading their certificates takes longer than a request.
            verify=ssl.create_default_context() if base_url.scheme == "https" else False,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()

    def _request(
        self,
        method: str,
        url: httpx.URL | str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        hold_s: float = 0.0,
    ) -> httpx.Response:
        """Return the server's answer, whatever its status. The server may hold the request for `hold_s`."""
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + hold_s)
        try:
            return self._http.request(method, url, params=query, headers=headers, json=body, timeout=timeout)
        except httpx.RequestError as error:  # no connection, or what comes back is no HTTP
            raise ServerUnavailable(self._describe_unreachable(error)) from None

    @abstractmethod
    def _describe_unreachable(self, error: httpx.RequestError) -> str:
        """Return the message of the ServerUnavailable that is raised if no answer came."""


def parse_server_url(url: str, what: str, example: str) -> httpx.URL:
    """Return `url` if it has a scheme and a host; raise a ConfigError that calls it `what` otherwise."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{what} {url!r}: {error}; give a URL such as {example}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{what} {url!r} is not a URL such as {example}")
    return parsed


def refusal_reason(answer: httpx.Response) -> str:
    """Return why a server refused, in its own words."""
    try:
        return str(parse_json(answer.content)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase or str(answer.status_code)


# --- single requests ---


class MembershipClient(Protocol):
    """Asks the store that keeps the wanted view and the membership of one job; for any number of threads.

    `expected` is compare-and-set: the version of the wanted view that a change was made from, None for any.

    Raises (from every call):
        ServerUnavailable: the store did not answer in time, or cannot answer now.
        StaleView: `expected` is not the version any more.
        ConfigError: the request was refused, with the reason; ClusterCleared, NoView, CapacityError, NotWanted where
            it is that.
        OtherJob: the store does not keep the job `job`.
    """

    job: str
    """If it is set, the id of the only job that a change is for (`ClusterSnapshot.id`)."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def snapshot(self) -> ClusterSnapshot:
        """Return the wanted view and the membership of one moment."""

    def wait_for_change(self, known: ClusterSnapshot, timeout_s: float) -> ClusterSnapshot:
        """Return the snapshot as soon as it is another than `known`; `known` itself after `timeout_s`."""

    def restore(self, known: ClusterSnapshot) -> ClusterSnapshot:
        """Tell a store that has lost its state what was known of it; return what it knows after that.

        Raises:
            OtherJob: it keeps the state of another job.
        """

    def put(self, view: View, expected: int | None = None, limits: Limits | None = None) -> View:
        """Want `view`; return it with the number that the store gave it. Its own number does not matter.

        A store that was not given any limits of resizes at its own start keeps `limits`.
        """

    def resize(self, size: int, expected: int | None = None) -> View:
        """Want `size` workers on the hosts of the current view; return the view."""

    def add_worker(self, worker: Worker, expected: int | None = None) -> View:
        """Want `worker` as the last rank; return the view."""

    def ready(self, worker: Worker) -> Membership:
        """Report that `worker` can train; it does once it is a member. NotWanted: it was removed, and must end."""

    def settled(self, worker: Worker, replicas: int = 0, membership: int = 0) -> Membership:
        """Report that `worker` has the state of a job with so many replicas: others may leave it to this worker.

        `membership` is the number of the one in which it has done a step; 0 if it has done none yet.
        """

    def lost(self, worker: Worker, reason: str, by: Worker | None = None) -> Membership:
        """Report that `worker` has died or fallen silent: the next membership, without it, is urgent.

        Nothing happens if that is known, or if the worker that reports it (`by`) is itself not a member.
        """

    def leave(self, worker: Worker) -> Membership:
        """Report that `worker` goes, after its step. Nothing happens if that is known."""

    def finish(self, worker: Worker) -> Membership:
        """Report that the program of `worker` has run to its end: the job is over for all workers."""


def is_etcd(url: str) -> bool:
    """Return whether `url` names a store in etcd, rather than a config server."""
    return url.startswith(("etcd://", "etcds://"))


def reset_remedy(url: str) -> str:
    """Return how a user resets the store at `url`, so that another job may begin."""
    if is_etcd(url):
        from pliant.elastic.etcd import how_to_reset

        return how_to_reset(url)
    return f"reset it first, as with `curl {urljoin(url, '/reset')} -X POST -H 'Authorization: Bearer TOKEN'`"


def open_client(url: str, token: str = "", *, timeout_s: float = 10.0, origin: str = "") -> MembershipClient:
    """Return a client of the store at `url`; raise ConfigError if `url` names none.

    `token` is a config server's; etcd has users of its own, whom the environment names as it does for etcdctl.
    `origin` says in words who asks, such as `pliant stop`: runners show it if a request ends the job before its last step.
    """
    if is_etcd(url):
        from pliant.elastic.etcd import EtcdClient  # most jobs have none

        return EtcdClient(url, timeout_s=timeout_s, origin=origin)
    return ConfigClient(url, token, timeout_s=timeout_s, origin=origin)


class ConfigClient(HttpClient):
    """Talks to the config server at `url`, such as http://10.0.0.1:9100/config; for any number of threads.

    `expected` in the calls below is compare-and-set: the version that the change was made from, None for any.

    Raises (when made):
        ConfigError: `url` is not http://... or https://...

    Raises (from every call):
        ServerUnavailable: no answer within `timeout_s`, or one that says that the server cannot.
        StaleView: `expected` is not the server's version any more.
        ConfigError: the server refused, with its reason; ClusterCleared, NoView, CapacityError, NotWanted where it
            is that.
    """

    def __init__(self, url: str, token: str = "", *, timeout_s: float = 10.0, origin: str = "") -> None:
        """`origin` says in words who asks (see `open_client`)."""
        parsed = parse_server_url(url, "config server", "http://10.0.0.1:9100/config")
        self.url = parsed.copy_with(path="/config") if parsed.path in ("", "/") else parsed
        self.job = ""
        super().__init__(self.url, token, timeout_s)
        if origin:
            self._http.headers[ORIGIN_HEADER] = origin

    def get(self) -> View | None:
        """Return the wanted view; None where it is unset."""
        return self.wanted().view

    def wanted(self) -> Wanted:
        """Return the wanted view with its version, which also an unset view has."""
        answer = self._send("GET", self.url)
        return Wanted(_version_of(answer), self._view(answer) if answer.is_success else None)

    def membership(self) -> Membership:
        """Return who trains now."""
        return self._membership("GET", "/membership")

    def snapshot(self) -> ClusterSnapshot:
        """Return the wanted view and the membership of one moment."""
        return self._decode(self._send("GET", self._path("/state")), ClusterSnapshot.from_json)

    def wait_for_change(self, known: ClusterSnapshot, timeout_s: float) -> ClusterSnapshot:
        """Return the snapshot as soon as it is another than `known`; `known` itself after `timeout_s`.

        The server holds a request for a minute at most, so that a longer wait is made of several requests.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            hold_s = max(0.0, deadline_s - time.monotonic())
            url = self._path("/state").copy_merge_params({"wait": f"{hold_s:.3f}"})
            answer = self._send("GET", url, {"If-None-Match": f'"{known.tag}"'}, hold_s=hold_s)
            if answer.status_code != 304:
                return self._decode(answer, ClusterSnapshot.from_json)
            if time.monotonic() >= deadline_s:
                return known

    def wait_for_membership(self, after: int, timeout_s: float) -> Membership:
        """Return the membership as soon as its number is above `after`, or the job is over; what it is at `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        snapshot = self.snapshot()
        while snapshot.membership.number <= after and not snapshot.membership.over and time.monotonic() < deadline_s:
            snapshot = self.wait_for_change(snapshot, deadline_s - time.monotonic())
        return snapshot.membership

    def restore(self, known: ClusterSnapshot) -> ClusterSnapshot:
        """Tell a server that has lost its state what was known of it; return what it knows after that.

        Raises:
            OtherJob: it keeps the state of another job.
        """
        answer = self._send("POST", self._path("/restore"), body=known.to_json())
        return self._decode(answer, ClusterSnapshot.from_json)

    def put(self, view: View, expected: int | None = None, limits: Limits | None = None) -> View:
        """Want `view`; return it with the number that the server gave it. Its own number does not matter.

        `limits` is not sent: a config server has its own.
        """
        return self._change("PUT", self._view_path("/put"), expected, replace(view, number=0).to_json())

    def resize(self, size: int, expected: int | None = None) -> View:
        """Want `size` workers on the hosts of the current view; return the view."""
        return self._change("POST", self._path("/resize"), expected, {"size": size})

    def set_devices(self, devices: Mapping[str, int]) -> None:
        """Want these devices, by type, with a worker on each; for a job whose server has a resource provider."""
        self._send("POST", self._path("/devices"), body=dict(devices))

    def occupied_devices(self) -> dict[str, int]:
        """Return the devices, by type, on which processes of the job live; for the same jobs as `set_devices`."""
        occupied: dict[str, int] = self._send("GET", self._path("/devices")).json()["occupied"]
        return occupied

    def drop_unwanted(self) -> None:
        """Kill the workers on devices that are not wanted any more; for the same jobs as `set_devices`."""
        self._send("POST", self._path("/drop"))

    def add_worker(self, worker: Worker, expected: int | None = None) -> View:
        """Want `worker` as the last rank; return the view."""
        return self._change("POST", self._path("/addworker"), expected, worker.to_json())

    def remove_worker(self, worker: Worker, expected: int | None = None) -> View:
        """Want `worker` gone; return the view. Without its last worker a cluster is cleared."""
        return self._change("POST", self._path("/removeworker"), expected, worker.to_json())

    def clear(self, expected: int | None = None) -> View:
        """Want all workers to stop, until a reset; return the empty view."""
        return self._change("POST", self._path("/clear"), expected)

    def reset(self, expected: int | None = None) -> int:
        """Want nothing in particular; return the version of that."""
        return _version_of(self._send("POST", self._view_path("/reset"), _if_match(expected), expected=expected))

    def ready(self, worker: Worker) -> Membership:
        """Report that `worker` can train; it does once it is a member. NotWanted: it was removed, and must end."""
        return self._membership("POST", "/ready", _notice(worker))

    def settled(self, worker: Worker, replicas: int = 0, membership: int = 0) -> Membership:
        """Report that `worker` has the state of a job with so many replicas: others may leave it to this worker.

        `membership` is the number of the one in which it has done a step; 0 if it has done none yet.
        """
        body = {"Worker": worker.to_json(), "Replicas": replicas, "Membership": membership}
        return self._membership("POST", "/settled", body)

    def lost(self, worker: Worker, reason: str, by: Worker | None = None) -> Membership:
        """Report that `worker` has died or fallen silent: the next membership, without it, is urgent.

        Nothing happens if that is known, or if the worker that reports it (`by`) is itself not a member.
        """
        notice = _notice(worker, reason)
        return self._membership("POST", "/lost", notice if by is None else {**notice, "By": by.to_json()})

    def leave(self, worker: Worker) -> Membership:
        """Report that `worker` goes, after its step. Nothing happens if that is known."""
        return self._membership("POST", "/leave", _notice(worker))

    def finish(self, worker: Worker) -> Membership:
        """Report that the program of `worker` has run to its end: the job is over for all workers."""
        return self._membership("POST", "/finish", _notice(worker))

    def _membership(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Membership:
        answer = self._send(method, self._path(path), body=body)
        return self._decode(answer, Membership.from_json)

    def _change(
        self, method: str, url: httpx.URL, expected: int | None, body: Mapping[str, object] | None = None
    ) -> View:
        return self._view(self._send(method, url, _if_match(expected), body, expected=expected))

    def _send(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        *,
        hold_s: float = 0.0,
        expected: int | None = None,
    ) -> httpx.Response:
        meant = {"Pliant-Job": self.job} if self.job else {}
        answer = self._request(method, url, headers={**meant, **(headers or {})}, body=body, hold_s=hold_s)
        is_unset = method == "GET" and answer.status_code == 404 and "etag" in answer.headers
        if not (answer.is_success or answer.status_code == 304 or is_unset):
            self._raise_refusal(answer, expected)
        return answer

    def _describe_unreachable(self, error: httpx.RequestError) -> str:
        why = str(error) or type(error).__name__
        return f"config server {self.url}: {why}; is it running, and is this its address?"

    def _raise_refusal(self, answer: httpx.Response, expected: int | None) -> NoReturn:
        reason = refusal_reason(answer)
        if answer.is_server_error:
            raise ServerUnavailable(f"config server {self.url}: {reason}")
        if answer.status_code == 401:
            raise ConfigError(f"config server {self.url}: {reason}; commands take it from PLIANT_TOKEN")
        if "etag" not in answer.headers:
            raise ConfigError(f"config server {self.url}: {answer.status_code} {reason}")
        if answer.status_code == 412 and expected is not None:
            raise StaleView(expected, _version_of(answer))
        raise self._decode(answer, _refusal_in)

    def _view(self, answer: httpx.Response) -> View:
        return self._decode(answer, View.from_json)

    def _decode(self, answer: httpx.Response, decode: Callable[[object], T]) -> T:
        try:
            return decode(parse_json(answer.content))
        except ValueError:
            raise ConfigError(
                f"{self.url} answered without JSON: it is not a config server; give the address that "
                "`pliant config-server` prints"
            ) from None

    def _view_path(self, path: str) -> httpx.URL:
        """Return where to change the view: where it is read, unless that is /get, which KungFu's commands only read."""
        return self._path(path) if self.url.path == "/get" else self.url

    def _path(self, path: str) -> httpx.URL:
        return self.url.copy_with(path=path, query=None)


def _refusal_in(value: object) -> PliantError:
    said = value if isinstance(value, dict) else {}
    return _REFUSALS.get(said.get("kind", ""), ConfigError)(str(said.get("error")))


def _notice(worker: Worker, reason: str = "") -> dict[str, object]:
    # A reason may quote a peer's bytes as half of a surrogate pair, which UTF-8 cannot carry.
    carried = reason.encode(errors="replace").decode()
    return {"Worker": worker.to_json(), "Reason": carried}


def _if_match(expected: int | None) -> dict[str, str]:
    return {} if expected is None else {"If-Match": f'"{expected}"'}


def _version_of(answer: httpx.Response) -> int:
    try:
        return int(answer.headers["etag"].strip('"'))
    except (KeyError, ValueError):
        raise ConfigError(
            f"{answer.url} answered without a version: it is not a config server; give the address that "
            "`pliant config-server` prints"
        ) from None


# --- following the server, and sending to it ---


class ConfigFollower:
    """A thread that holds a request at the config server and calls `on_change`, from it, with every new snapshot.

    While the server cannot be reached it tries again, and says so once, at the level `lost_level` of logging. So it does
    while the server of another job answers: nothing of that is handed over. A server that has forgotten the job is told of it.
    """

    def __init__(
        self,
        url: str,
        token: str,
        on_change: Callable[[ClusterSnapshot], None],
        *,
        on_contact: Callable[[str], None] = lambda why: None,
        lost_level: int = logging.WARNING,
    ) -> None:
        """`on_contact` is called with the reason when the server cannot be reached any more, and with "" when it can again."""
        self.lost_s: float | None = None
        """Since when the server of this job has not answered, by `time.monotonic`; None while it does."""
        self._url, self._token, self._on_change, self._lost_level = url, token, on_change, lost_level
        self._on_contact = on_contact
        self._stopping = threading.Event()

    def start(self, known: ClusterSnapshot) -> None:
        """Begin to follow; the first change is relative to `known`."""
        threading.Thread(target=self._follow, args=(known,), name="follow-config", daemon=True).start()

    def stop(self) -> None:
        """Hand over nothing more. The thread ends with its held request, or with the process."""
        self._stopping.set()

    def _follow(self, known: ClusterSnapshot) -> None:
        said = ""
        with open_client(self._url, self._token) as client:
            while not self._stopping.is_set():
                try:
                    latest = client.wait_for_change(known, FOLLOW_HOLD_S)
                    if not latest.has_kept(known):
                        latest = client.restore(known)
                except PliantError as error:
                    kind = type(error).__name__
                    self.lost_s = time.monotonic() if self.lost_s is None else self.lost_s
                    if said != kind and not self._stopping.is_set():
                        why = f"{self._url}: {error}" if isinstance(error, OtherJob) else str(error)
                        log.log(self._lost_level, "%s; the job goes on as it is", why)
                        self._on_contact(why)
                    said = kind
                    self._stopping.wait(OTHER_JOB_S if isinstance(error, OtherJob) else RETRY_S)
                    continue
                self.lost_s = None
                if said:
                    self._on_contact("")
                    log.log(min(self._lost_level, logging.INFO), "config server %s answers again", self._url)
                    said = ""
                if latest.restored > known.restored and known.id:
                    log.log(min(self._lost_level, logging.INFO), "config server %s was told who trains", self._url)
                if latest != known and not self._stopping.is_set():
                    self._on_change(latest)
                known = latest


class ConfigSender:
    """A thread that sends messages to the config server, and repeats what it did not answer.

    Messages are sent in their order, except that one which has to be repeated goes to the end of the queue: it must not
    keep others beyond their time. The thread starts with `start`, or with the first message. `close` drops what was not
    sent.
    """

    def __init__(self, url: str, token: str, origin: str = "") -> None:
        self.job = ""
        """If it is set, the id of the job (`ClusterSnapshot.id`): for a server that keeps another one nothing is meant."""
        self._url, self._token, self._origin = url, token, origin
        self._messages: queue.SimpleQueue[_Message[Any]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._client: MembershipClient | None = None
        self._thread = threading.Thread(target=self._run, name="send-config", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it runs; raise ConfigError if the URL names no store."""
        if self._client is not None:
            return  # without the lock: a signal handler may send while this thread holds it
        with self._starting:
            if self._client is None:
                self._client = open_client(self._url, self._token, origin=self._origin)
                self._thread.start()

    def submit(self, call: Callable[[MembershipClient], T], *, give_up_s: float = float("inf")) -> Future[T]:
        """Have `call` made with a client, from the thread; return at once.

        While the server is unavailable the call is repeated for `give_up_s`, and then the result is ServerUnavailable.
        """
        message = _Message(call, time.monotonic() + give_up_s)
        if self._closing.is_set():
            message.future.set_exception(ServerUnavailable("this worker has left the job: nothing more is sent"))
            return message.future
        self.start()
        self._messages.put(message)
        return message.future

    def ask(self, call: Callable[[MembershipClient], T], give_up_s: float) -> T:
        """Have `call` made, and return its result.

        Raises:
            ServerUnavailable: the server has not answered for `give_up_s`.
        """
        try:
            return self.submit(call, give_up_s=give_up_s).result(timeout=give_up_s + ANSWER_S)
        except TimeoutError:
            raise ServerUnavailable(f"config server {self._url} has not answered for {give_up_s:g} s") from None

    def report(self, what: str, call: Callable[[MembershipClient], object]) -> None:
        """Send a notice, whose refusal is only logged: `what` says of whom or what it is."""

        def log_refusal(done: Future[object]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None and not self._closing.is_set():
                log.warning("the config server refused the report that %s: %s", what, error)

        self.submit(call).add_done_callback(log_refusal)

    def close(self) -> None:
        self._closing.set()
        self._messages.put(_Message(lambda _: None, 0.0))
        if self._client is not None:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        assert self._client is not None, "the thread starts with the first message"
        with self._client as client:
            while not self._closing.is_set():
                self._deliver(client, self._messages.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait().future.cancel()

    def _deliver(self, client: MembershipClient, message: _Message[Any]) -> None:
        client.job = self.job
        try:
            result = message.call(client)
        except ServerUnavailable as error:
            if time.monotonic() >= message.deadline_s:
                message.future.set_exception(error)
                return
            if not message.has_warned:
                log.warning("%s; trying again", error)
            message.has_warned = True
            self._messages.put(message)
            self._closing.wait(RETRY_S)
        except BaseException as error:  # whoever waits for the result raises it
            message.future.set_exception(error)
        else:
            message.future.set_result(result)


@dataclass(slots=True)
class _Message(Generic[T]):
    """A call that is to be made with a client."""

    call: Callable[[MembershipClient], T]
    deadline_s: float
    """When to give up."""
    future: Future[T] = field(default_factory=Future)
    has_warned: bool = False
