"""The machines of `pliant bench priority --hosts`: the list as the artifact's workflow has it, and the ssh commands.

Workers are started through ssh and told everything else over their standard input, so no secret is on a command line,
and a worker ends when its connection does. No torch.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker, check_host
from pliant.errors import ConfigError, reason
from pliant.identity import WorkerSpec

BASE_PORT = 29500
"""DDP's ranks meet here; the workers of our jobs listen on the ports above."""
_FORM = 'use a list such as ["node1", "node2"] or [{"host": "node1", "iface": "eth0", "slots": 1}]'


@dataclass(frozen=True, slots=True)
class Host:
    """One machine."""

    host: str
    iface: str = ""
    """Its interface towards the others; empty: the one of its default route."""
    slots: int = 1
    """Workers on it."""


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts that a file lists.

    Raises:
        ConfigError: it cannot be read, or has another form.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: {reason(error)}; {_FORM}") from None
    return parse_hosts(text, f"--hosts {path}")


def parse_hosts(text: str, name: str = "--hosts") -> tuple[Host, ...]:
    """A JSON list of names, or of objects with host, iface and slots.

    Raises:
        ConfigError: another form, a host twice, or not one host.
    """
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error}); {_FORM}") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{name} lists no host; {_FORM}")
    hosts = tuple(_host(item, name) for item in items)
    names = [each.host for each in hosts]
    for twice in {each for each in names if names.count(each) > 1}:
        raise ConfigError(f"{name} has {twice} twice: give it once, with its number of slots")
    return hosts


def _host(item: object, name: str) -> Host:
    if isinstance(item, str):
        item = {"host": item}
    if not isinstance(item, dict) or not isinstance(item.get("host"), str) or set(item) - {"host", "iface", "slots"}:
        raise ConfigError(f"{name}: {item!r} is no host; {_FORM}")
    iface, slots = item.get("iface", ""), item.get("slots", 1)
    if not isinstance(iface, str) or isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ConfigError(f"{name}: {item!r}: iface is a name, slots a number of 1 or more")
    return Host(check_host(item["host"]), iface, slots)


def placed(hosts: Sequence[Host]) -> list[Host]:
    """The host of each rank: those of one host are neighbours."""
    return [host for host in hosts for _ in range(host.slots)]


def ssh_argv(host: Host, python: str, module: str, rank: int) -> list[str]:
    """The command that starts a worker there. BatchMode: a question for a password is a failure, not a wait."""
    remote = shlex.join([python, "-m", module, str(rank)])
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    return ["ssh", *options, host.host, f"exec {remote}"]


def identities(hosts: Sequence[Host], number: int, secret: bytes = b"") -> list[dict[str, str]]:
    """The environments that say to the ranks of our job `number` who they are: each job has ports of its own."""
    ranks = placed(hosts)
    base = BASE_PORT + 1 + number * len(ranks)
    members = tuple(Worker(host.host, base + rank) for rank, host in enumerate(ranks))
    view = View(0, members, tuple(Worker(host.host, DEFAULT_RUNNER_PORT) for host in hosts))
    secret = secret or secrets.token_bytes(32)
    return [WorkerSpec(worker=member, view=view, secret=secret).to_environ() for member in members]
