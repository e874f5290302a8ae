"""Where a federated job's executors run: on this machine, on others over ssh, on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.cluster import Host
from pliant.errors import ConfigError

HERE = ("localhost", "127.0.0.1", "::1")
MOST = 4096
"""Executors in one place: more is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where some executors run."""

    kind: str
    """local, ssh or ray."""
    host: str
    count: int


@dataclass(frozen=True, slots=True)
class Places:
    parts: tuple[Place, ...]

    @property
    def count(self) -> int:
        return sum(place.count for place in self.parts)

    @property
    def listen(self) -> str:
        """Where the server must listen."""
        return "127.0.0.1" if all(place.kind == "local" for place in self.parts) else "0.0.0.0"


def parse_workers(given: int | str | Sequence[str | int]) -> Places:
    """2; `ray:4`; `10.0.0.1:2`; or a list of such.

    Raises:
        ConfigError: it is none of these.
    """
    listed: list[str | int] = [given] if isinstance(given, int | str) else list(given)
    parts = tuple(_place(each) for each in listed)
    if not parts:
        raise ConfigError("workers: the list is empty; give a number, host:n, or ray:n")
    return Places(parts)


def _place(given: str | int) -> Place:
    text = str(given).strip()
    if text.removeprefix("-").isdecimal():
        if int(text) < 0:
            raise ConfigError(f"workers: {text!r} is no number of executors: give 0 or more, host:n, or ray:n")
        place = Place("local", "localhost", int(text))
    elif text.partition(":")[0] == "ray":
        count = text.partition(":")[2] or "1"
        place = Place("ray", "ray", int(count) if count.isdecimal() else 0)
    else:
        try:
            host = Host.parse(text)
        except ConfigError as error:
            why = str(error).removeprefix("-H: ")
            raise ConfigError(f"workers: {why}; give a number, host:n, or ray:n") from None
        place = Place("local" if host.address in HERE else "ssh", host.address, host.slots)
    if not 1 <= place.count <= MOST:
        raise ConfigError(f"workers: {text!r} is no number of executors: give 1 to {MOST}, host:n, or ray:n")
    return place
