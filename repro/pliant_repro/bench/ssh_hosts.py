"""Machines of `pliant bench priority --hosts`: the list as the artifact's workflow has it, and the ssh commands.

Workers are started through ssh and told everything else over their standard input, so no secret is on a command line, and a
worker ends when its connection does.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker, check_host
from pliant.errors import ConfigError, reason
from pliant.identity import WorkerSpec
from pliant_repro.contest import WORKER, Starter, clean_environ

BASE_PORT = 29500
"""Port where the ranks of DDP meet; the workers of our jobs listen on the ports above."""
_FORM = 'use a list such as ["node1", "node2"] or [{"host": "node1", "iface": "eth0", "slots": 1}]'


class Host(BaseModel):
    """One machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    host: Annotated[str, AfterValidator(check_host)]
    iface: str = ""
    """Its interface towards the others; empty means that of its default route."""
    slots: int = Field(1, ge=1)
    """Number of workers on it."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: object) -> object:
        return {"host": value} if isinstance(value, str) else value


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a JSON list of names, or of objects with host, iface and slots.

    Raises:
        ConfigError: the file cannot be read, has another form, or a host twice.
    """
    try:
        hosts = TypeAdapter(list[Host]).validate_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: {reason(error)}; {_FORM}") from None
    except (ValidationError, ConfigError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"--hosts {path} lists no hosts ({why}); {_FORM}") from None
    if not hosts or len({each.host for each in hosts}) < len(hosts):
        raise ConfigError(f"--hosts {path}: give every host once, with its number of slots; {_FORM}")
    return tuple(hosts)


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


def host_identities(hosts: Sequence[Host], number: int) -> list[dict[str, str]]:
    """Return the environment of each rank of our job `number`; each job has its own ports."""
    ranks = hosts_of_ranks(hosts)
    base = BASE_PORT + 1 + number * len(ranks)
    members = tuple(Worker(host.host, base + rank) for rank, host in enumerate(ranks))
    view = View(0, members, tuple(Worker(host.host, DEFAULT_RUNNER_PORT) for host in hosts))
    secret = secrets.token_bytes(32)
    return [WorkerSpec(worker=member, view=view, secret=secret).to_environ() for member in members]
