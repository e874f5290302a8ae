"""One key of an etcd cluster, through etcd's own HTTP gateway: read it, replace it if it is unchanged, follow its changes.

The gateway speaks the same protocol as etcd's clients, in JSON: keys and values are base64, numbers are strings. Reads are
linearizable, so a member that is cut off from the majority does not answer with what was true once: it does not answer.
The endpoints are tried in turn, with short timeouts, until one answers; TLS and credentials are those of etcdctl.
"""

from __future__ import annotations

import contextlib
import select
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from pliant.cluster import Worker, is_address
from pliant.errors import ConfigError, ServerUnavailable
from pliant.machine import is_local

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/pliant"
EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/job-1"
CONNECT_S = 0.3
"""An endpoint that has not accepted a connection by then is down; for `DOWN_S` it is tried after the others."""
DOWN_S = 10.0
FIRST_ANSWER_S = 0.5
"""How long an endpoint may take to answer before the next one is tried. It doubles with every round, so that a cluster with
slow disks is not asked for ever in vain."""
CHECK_S = 1.0
"""A watch that has been silent for this long is compared with the value: an endpoint that is cut off is silent, too."""
PAUSE_S = 0.1
"""Between two rounds, where all endpoints refuse at once."""
_INVALID_ARGUMENT, _PERMISSION_DENIED, _FAILED_PRECONDITION, _UNAUTHENTICATED = 3, 7, 9, 16
"""Codes of gRPC."""
_NOT_ETCD = "give the client URLs of etcd 3.4 or later, as etcds://... if they begin with https"


# --- where the cluster is ---


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The endpoints of an etcd cluster, and the prefix of the keys of one job."""

    endpoints: tuple[str, ...]
    """URLs such as http://10.0.0.1:2379. Those of this machine come first: they stay in reach when a cable does not."""
    prefix: str
    text: str
    """As the user has given it."""

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Parse `etcd://host:port,host:port/prefix`, or `etcds://...` for TLS.

        Raises:
            ConfigError: it is not of that form.
        """
        try:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                raise ConfigError("credentials are not taken from the URL: set ETCDCTL_USER=name:password")
            if parts.query or parts.fragment:
                raise ConfigError("? and # are not understood")
            hosts = [_parse_endpoint(text) for text in parts.netloc.split(",")]
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"config server {url!r}: {error}; give a URL such as {EXAMPLE}") from None
        scheme = "https" if parts.scheme == "etcds" else "http"
        hosts.sort(key=lambda host: not (is_address(host.host) and is_local(host.host)))
        return cls(tuple(f"{scheme}://{host}" for host in hosts), parts.path.rstrip("/") or DEFAULT_PREFIX, url)


def _parse_endpoint(text: str) -> Worker:
    """Return the host and port of one endpoint."""
    has_port = text.rpartition(":")[2].isdecimal() and not text.endswith("]")
    return Worker.parse(text if has_port else f"{text}:{DEFAULT_PORT}")


def _tls_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context that ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY describe."""
    authority, certificate = environ.get("ETCDCTL_CACERT") or None, environ.get("ETCDCTL_CERT", "")
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, environ.get("ETCDCTL_KEY") or None)
    except OSError as error:
        given = ", ".join(
            f"{name}={environ[name]}" for name in ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY") if environ.get(name)
        )
        raise ConfigError(f"{given}: {error.strerror or error}; name PEM files that this user can read") from None
    return context


def _credentials(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the user and the password of ETCDCTL_USER and ETCDCTL_PASSWORD, in etcdctl's two forms."""
    user, colon, password = environ.get("ETCDCTL_USER", "").partition(":")
    if not user:
        return None
    return user, password if colon else environ.get("ETCDCTL_PASSWORD", "")


# --- one key ---


@dataclass(frozen=True, slots=True)
class KeyValue:
    """What a key holds, and the revision of etcd in which it was written: 0 where there is no such key."""

    value: bytes = field(default=b"", repr=False)
    revision: int = 0

    @classmethod
    def from_range(cls, answer: Mapping[str, Any]) -> KeyValue:
        for found in answer.get("kvs", ()):
            return cls(b64decode(found.get("value", "")), int(found["mod_revision"]))
        return cls()


class EtcdKey:
    """One key of an etcd cluster; for any number of threads. `environ` has the variables of etcdctl.

    Raises (from every call):
        ServerUnavailable: no endpoint has answered within `timeout_s`.
        ConfigError: etcd refuses, with its reason, or this is not etcd.
    """

    def __init__(self, address: EtcdAddress, key: str, environ: Mapping[str, str], timeout_s: float) -> None:
        self._address, self._key, self._timeout_s = address, b64encode(key.encode()).decode(), timeout_s
        self._credentials = _credentials(environ)
        self._token: str | None = None  # empty: etcd asks for no users
        self.endpoint = address.endpoints[0]
        """The one that answered last."""
        self._down_until_s: dict[str, float] = {}
        has_tls = address.endpoints[0].startswith("https")
        self._http = httpx.Client(verify=_tls_context(environ) if has_tls else False, trust_env=False)

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()

    def read(self) -> KeyValue:
        """Return what the key holds now."""
        return KeyValue.from_range(self._ask("/v3/kv/range", {"key": self._key}))

    def replace(self, value: bytes, revision: int) -> KeyValue | None:
        """Write `value` if the key is still that of `revision`; return None, or what it holds instead.

        If an answer is lost and the request is repeated, the value that it holds instead may be this one.
        """
        answer = self._ask(
            "/v3/kv/txn",
            {
                "compare": [{"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}],
                "success": [{"request_put": {"key": self._key, "value": b64encode(value).decode()}}],
                "failure": [{"request_range": {"key": self._key}}],
            },
        )
        if answer.get("succeeded"):
            return None
        return KeyValue.from_range(answer["responses"][0]["response_range"])

    def follow(self, timeout_s: float) -> Generator[KeyValue, None, None]:
        """Yield what the key holds, again after every change, and whenever `CHECK_S` have passed; end after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._watch() as watch:
                while True:
                    yield self.read()
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        return
                    watch.wait(min(CHECK_S, left_s))
                    if not watch.is_open or watch.endpoint != self.endpoint:
                        break

    @contextlib.contextmanager
    def _watch(self) -> Iterator[_Watch]:
        answer = self._send("/v3/watch", {"create_request": {"key": self._key}}, stream=True)
        try:
            yield _Watch(answer, self.endpoint)
        finally:
            answer.close()

    # Requests

    def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        answer = self._send(path, body)
        try:
            value: dict[str, Any] = answer.json()
            value["header"]["revision"]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{answer.url} does not answer as etcd does: {_NOT_ETCD}") from None
        return value

    def _send(self, path: str, body: Mapping[str, object], *, stream: bool = False) -> httpx.Response:
        """Return the answer of the first endpoint that can give one."""
        deadline_s = time.monotonic() + self._timeout_s
        wait_s = min(FIRST_ANSWER_S, self._timeout_s)
        silent: dict[str, str] = {}
        while True:
            for endpoint in self._in_order():
                try:
                    answer = self._send_to(endpoint, path, body, wait_s, stream=stream)
                except (httpx.RequestError, ServerUnavailable) as error:
                    _refuse_wrong_tls(error)
                    silent[endpoint] = str(error) or type(error).__name__
                    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                        self._down_until_s[endpoint] = time.monotonic() + DOWN_S
                else:
                    self.endpoint = endpoint
                    return answer
                if time.monotonic() >= deadline_s:
                    said = "; ".join(f"{where}: {why}" for where, why in silent.items())
                    raise ServerUnavailable(
                        f"{self._address.text} has no answer ({said}): is a majority of etcd in reach, and, if it has TLS, "
                        "does the URL begin with etcds://?"
                    )
            wait_s = min(2 * wait_s, max(FIRST_ANSWER_S, deadline_s - time.monotonic()))
            time.sleep(PAUSE_S)

    def _in_order(self) -> list[str]:
        """Return the endpoints as they are to be tried: the one that answered last, those after it, those that are down."""
        begin, now_s = self._address.endpoints.index(self.endpoint), time.monotonic()
        rotated = (*self._address.endpoints[begin:], *self._address.endpoints[:begin])
        return sorted(rotated, key=lambda endpoint: self._down_until_s.get(endpoint, 0.0) > now_s)

    def _send_to(
        self, endpoint: str, path: str, body: Mapping[str, object], wait_s: float, *, stream: bool = False
    ) -> httpx.Response:
        if self._credentials and self._token is None:
            self._token = self._authenticate(endpoint, wait_s)
        answer = self._post(endpoint, path, body, wait_s, stream=stream)
        if self._credentials and not answer.is_success and _refusal_in(answer).is_about_the_user:
            self._token = self._authenticate(
                endpoint, wait_s
            )  # it has expired, or etcd was started again, or has users now
            answer = self._post(endpoint, path, body, wait_s, stream=stream)
        if answer.is_success:
            return answer
        refusal = _refusal_in(answer)
        if refusal.is_about_the_user:
            raise ConfigError(
                f"{endpoint} lets nobody in without a user ({refusal.why}): set ETCDCTL_USER=name:password"
            )
        if refusal.code == _PERMISSION_DENIED:
            raise ConfigError(
                f"{endpoint}: {refusal.why}; let the user of ETCDCTL_USER read and write the keys under {self._address.prefix}/"
            )
        if refusal.code == _INVALID_ARGUMENT:
            raise ConfigError(f"{endpoint}: {refusal.why}")
        if refusal.code is None and answer.is_client_error:
            raise ConfigError(f"{endpoint} answers {answer.status_code} ({refusal.why:.100}): {_NOT_ETCD}")
        raise ServerUnavailable(refusal.why)

    def _authenticate(self, endpoint: str, wait_s: float) -> str:
        """Return a token for the user of ETCDCTL_USER; an empty one if etcd asks for no users."""
        assert self._credentials is not None, "only for a user"
        name, password = self._credentials
        self._token = None
        answer = self._post(endpoint, "/v3/auth/authenticate", {"name": name, "password": password}, wait_s)
        if answer.is_success:
            return str(answer.json()["token"])
        refusal = _refusal_in(answer)
        if refusal.code == _FAILED_PRECONDITION:
            return ""
        if refusal.is_about_the_user:
            raise ConfigError(f"{endpoint} refuses the user {name} ({refusal.why}): correct ETCDCTL_USER=name:password")
        raise ServerUnavailable(refusal.why)

    def _post(
        self, endpoint: str, path: str, body: Mapping[str, object], wait_s: float, *, stream: bool = False
    ) -> httpx.Response:
        headers = {"Authorization": self._token} if self._token else {}
        timeout = httpx.Timeout(wait_s, connect=min(CONNECT_S, wait_s))
        request = self._http.build_request("POST", f"{endpoint}{path}", json=body, headers=headers, timeout=timeout)
        return self._http.send(request, stream=stream)


class _Watch:
    """The open answer to a request to watch, which grows by a line whenever the key changes."""

    def __init__(self, answer: httpx.Response, endpoint: str) -> None:
        self.endpoint = endpoint
        """Which endpoint has given it."""
        self.is_open = True
        self._lines = answer.iter_lines()
        self._grown = select.poll()  # not select.select, which knows no descriptor above 1023
        self._grown.register(answer.extensions["network_stream"].get_extra_info("socket"), select.POLLIN)
        self._read_line()  # says that the watch is there: no change from now on is missed

    def wait(self, timeout_s: float) -> None:
        """Return as soon as the key has changed, or `timeout_s` have passed."""
        if not self.is_open:
            time.sleep(min(PAUSE_S, timeout_s))
        # A line that has come together with the one before it is older than the read that followed that one.
        elif self._grown.poll(timeout_s * 1000):
            self._read_line()

    def _read_line(self) -> None:
        try:
            self.is_open = "canceled" not in next(self._lines)
        except (StopIteration, httpx.RequestError):
            self.is_open = False


@dataclass(frozen=True, slots=True)
class EtcdRefusal:
    """Why etcd refused: gRPC's code, None if the answer is not etcd's, and the reason in words."""

    code: int | None
    why: str

    @property
    def is_about_the_user(self) -> bool:
        """Whether another user, or a new token, may be let in."""
        is_named = "user" in self.why or "auth" in self.why
        return self.code == _UNAUTHENTICATED or (self.code == _INVALID_ARGUMENT and is_named)


def _refusal_in(answer: httpx.Response) -> EtcdRefusal:
    answer.read()
    try:
        said = answer.json()
        return EtcdRefusal(int(said["code"]), str(said["error"]))
    except (ValueError, LookupError, TypeError):
        return EtcdRefusal(None, answer.text.strip() or answer.reason_phrase)


def _refuse_wrong_tls(error: Exception) -> None:
    """Raise a ConfigError if no repetition can help: one of the two sides does not trust the other's certificate."""
    why = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in why:
        raise ConfigError(
            f"etcd's certificate is not trusted ({why}): set ETCDCTL_CACERT to its authority's file"
        ) from None
    if "ALERT" in why and "CERTIFICATE" in why:
        raise ConfigError(f"etcd does not trust this client ({why}): set ETCDCTL_CERT and ETCDCTL_KEY") from None
