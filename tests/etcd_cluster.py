"""A real etcd cluster of one or more members, as processes of this machine or of hosts in namespaces."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from gang import free_port
from patience import until

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd: apt install etcd-server")
Spawn = Callable[[int, Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts the program of member `int`, whose output goes to the file."""


def spawn_here(member: int, argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)


@dataclass
class EtcdCluster:
    """Its members, each a process with a folder of its own; `hosts` are where they listen."""

    folder: Path
    hosts: tuple[str, ...] = ("127.0.0.1",)
    tls: tuple[str, ...] = ()
    """Certificate and key of all members; with a third file, clients need a certificate of that authority."""
    election_ms: int = 1000
    """How long a member hears nothing of the leader before it stands for election; 1000 is etcd's default."""
    spawn: Spawn = spawn_here
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken: list[int] = []
        for _ in range(2 * len(self.hosts)):
            taken.append(free_port("127.0.0.1", taken))
        self.clients = [f"{host}:{port}" for host, port in zip(self.hosts, taken[::2], strict=True)]
        self._peers = [f"{host}:{port}" for host, port in zip(self.hosts, taken[1::2], strict=True)]

    @property
    def url(self) -> str:
        """For --config-server, without a prefix."""
        return f"{'etcds' if self.tls else 'etcd'}://{','.join(self.clients)}"

    def start(self, *members: int) -> None:
        """Start these members (again)."""
        scheme = "https" if self.tls else "http"
        for member in members:
            client, peer = f"{scheme}://{self.clients[member]}", f"http://{self._peers[member]}"
            tls = ("--cert-file", self.tls[0], "--key-file", self.tls[1]) if self.tls else ()
            if len(self.tls) > 2:
                tls = (*tls, "--client-cert-auth", "--trusted-ca-file", self.tls[2])
            everyone = ",".join(f"m{number}=http://{address}" for number, address in enumerate(self._peers))
            command = (
                "etcd", "--name", f"m{member}", "--data-dir", str(self.folder / f"m{member}"), "--logger", "zap",
                "--heartbeat-interval", str(self.election_ms // 10), "--election-timeout", str(self.election_ms),
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", everyone, *tls,
            )  # fmt: skip
            self.processes[member] = self.spawn(member, command, self.folder / f"m{member}.log")

    def kill(self, member: int) -> None:
        process = self.processes.pop(member)
        process.kill()
        process.wait(10)

    def leader(self) -> int:
        """Return the member that leads, once there is one (only without TLS)."""
        return int(until(self._leader, "a leader of etcd", 30)) - 1

    def _leader(self) -> int | None:
        """Return the number of the leader, counted from 1."""
        for client in self.clients:
            with contextlib.suppress(httpx.TransportError, KeyError):
                said = httpx.post(f"http://{client}/v3/maintenance/status", json={}, trust_env=False, timeout=2).json()
                if said["leader"] == said["header"]["member_id"]:
                    return self.clients.index(client) + 1
        return None


@contextlib.contextmanager
def etcd_cluster(folder: Path, **settings: object) -> Iterator[EtcdCluster]:
    """A cluster for the time of the block; its members are told to come up, and may still be on their way."""
    cluster = EtcdCluster(folder, **settings)  # type: ignore[arg-type]
    try:
        cluster.start(*range(len(cluster.hosts)))
        yield cluster
    finally:
        for member in list(cluster.processes):
            cluster.kill(member)
