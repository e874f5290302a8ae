"""What our HTTP clients have in common: kept connections, a time within which an answer must come, the reason of a refusal.

What is asked, and which of pliant's errors a refusal is, is the business of each client.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx

from pliant.errors import ConfigError, ServerUnavailable


class HttpClient(ABC):
    """Keeps connections to one server; for any thread. Proxy variables in the environment are ignored: a job's own hosts
    are not behind one."""

    def __init__(self, base_url: httpx.URL, token: str, verify: bool | ssl.SSLContext, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=verify,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """The server's answer, whatever it says; it may hold the request for `hold_s`."""
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + hold_s)
        try:
            return self._http.request(method, url, params=query, headers=headers, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise ServerUnavailable(self._unreachable(error)) from None

    @abstractmethod
    def _unreachable(self, error: httpx.TransportError) -> str:
        """What is said where no answer came."""


def checked_url(url: str, what: str, example: str) -> httpx.URL:
    """`url`, if it has a scheme and a host; else a ConfigError that calls it `what`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{what} {url!r}: {error}; give a URL such as {example}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{what} {url!r} is not a URL such as {example}")
    return parsed


def reason_of(answer: httpx.Response) -> str:
    """Why a server refused, in its own words."""
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase or str(answer.status_code)
