"""Machines of `pliant bench priority --hosts`: the list as the artifact's workflow has it, and the ssh commands.

Workers are started through ssh and told everything else over their standard input, so no secret is on a command line, and a
worker ends when its connection does.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker, check_host
from pliant.errors import ConfigError, reason
from pliant.identity import WorkerSpec
from pliant_repro.contest import WORKER, Starter, clean_environ

BASE_PORT = 29500
"""Port where the ranks of DDP meet; the workers of our jobs listen on the ports above."""
_FORM = 'use a list such as ["node1", "node2"] or [{"host": "node1", "iface": "eth0", "slots": 1}]'


@dataclass(frozen=True, slots=True)
class Host:
    """One machine."""

    host: str
    iface: str = ""
    """Its interface towards the others; empty means that of its default route."""
    slots: int = 1
    """Number of workers on it."""


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read the hosts that a file lists.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: {reason(error)}; {_FORM}") from None
    return parse_hosts(text, f"--hosts {path}")


def parse_hosts(text: str, name: str = "--hosts") -> tuple[Host, ...]:
    """Parse a JSON list of names, or of objects with host, iface and slots.

    Raises:
        ConfigError: the text has another form, a host twice, or no host.
    """
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error}); {_FORM}") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{name} lists no host; {_FORM}")
    hosts = tuple(_parse_host(item, name) for item in items)
    names = [each.host for each in hosts]
    for twice in {each for each in names if names.count(each) > 1}:
        raise ConfigError(f"{name} has {twice} twice: give it once, with its number of slots")
    return hosts


def _parse_host(item: object, name: str) -> Host:
    if isinstance(item, str):
        item = {"host": item}
    if not isinstance(item, dict) or not isinstance(item.get("host"), str) or set(item) - {"host", "iface", "slots"}:
        raise ConfigError(f"{name}: {item!r} is no host; {_FORM}")
    iface, slots = item.get("iface", ""), item.get("slots", 1)
    if not isinstance(iface, str) or isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ConfigError(f"{name}: {item!r}: iface is a name, slots a number of 1 or more")
    return Host(check_host(item["host"]), iface, slots)


def hosts_of_ranks(hosts: Sequence[Host]) -> list[Host]:
    """Return the host of each rank; ranks of one host are neighbours."""
    return [host for host in hosts for _ in range(host.slots)]


def ssh_argv(host: Host, python: str, rank: int) -> list[str]:
    """Return the command that starts a rank there. BatchMode makes a question for a password a failure, not a wait."""
    remote = shlex.join([python, "-m", WORKER, "--rank", str(rank)])
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    return ["ssh", *options, host.host, f"exec {remote}"]


def ssh_starter(host: Host, rank: int, control: Path) -> Starter:
    """Return a starter of a rank over ssh, whose standard input and output are its control connection."""

    def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(control))
            argv, fd = ssh_argv(host, sys.executable, rank), line.fileno()
            return subprocess.Popen(argv, stdin=fd, stdout=fd, stderr=output, env=clean_environ())

    return start


def host_identities(hosts: Sequence[Host], number: int, secret: bytes = b"") -> list[dict[str, str]]:
    """Return the environment of each rank of our job `number`; each job has its own ports."""
    ranks = hosts_of_ranks(hosts)
    base = BASE_PORT + 1 + number * len(ranks)
    members = tuple(Worker(host.host, base + rank) for rank, host in enumerate(ranks))
    view = View(0, members, tuple(Worker(host.host, DEFAULT_RUNNER_PORT) for host in hosts))
    secret = secret or secrets.token_bytes(32)
    return [WorkerSpec(worker=member, view=view, secret=secret).to_environ() for member in members]
