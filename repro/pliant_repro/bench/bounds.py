"""What the hardware allows: the rate that iperf3 reaches between the hosts of a lab, and the bounds that follow."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.errors import LabError
from pliant_repro.lab.hosts import Lab

_PORT = 5201
_START_TIMEOUT_S = 10.0
MTU_SHARE = 1448 / 1514
"""Payload in a full Ethernet frame with TCP timestamps: what a shaper that counts frames leaves of its rate."""


def ring_bound_s(num_hosts: int, num_bytes: int, bits_per_s: float) -> float:
    """2(N-1)/N * S/B: what each host must at least send and receive to all-reduce `num_bytes`."""
    return 2 * (num_hosts - 1) / num_hosts * num_bytes * 8 / bits_per_s


@dataclass(frozen=True, slots=True)
class LineRate:
    """What iperf3 received per host, in bits per second."""

    ring: tuple[float, ...]
    """All hosts at once, each sending to the next and receiving from the one before."""

    @property
    def bits_per_s(self) -> float:
        return sum(self.ring) / len(self.ring)


def why_no_iperf() -> str:
    """Why the line rate cannot be measured; empty where it can."""
    return (
        "" if shutil.which("iperf3") else "iperf3 not found, so the bound uses the nominal rate; apt-get install iperf3"
    )


def measure_ring(lab: Lab, *, seconds: int = 2) -> LineRate:
    """All hosts sending to the next at once: links and processors as busy as in a ring all-reduce.

    Raises:
        LabError: iperf3 failed.
    """
    hosts = range(lab.num_hosts)
    return LineRate(tuple(measure(lab, [(host, (host + 1) % lab.num_hosts) for host in hosts], seconds=seconds)))


def measure(lab: Lab, pairs: Sequence[tuple[int, int]], *, seconds: int = 2) -> list[float]:
    """Bits per second received for each (sender, receiver), all at once; the first second is left out.

    Raises:
        LabError: iperf3 failed or hung.
    """
    servers = [_serve(lab, receiver) for _, receiver in pairs]
    clients = []
    try:
        for server in servers:
            _await_listening(server)
        for sender, receiver in pairs:
            argv = ["iperf3", "-c", lab.addresses[receiver], "-p", str(_PORT), "-O", "1", "-t", str(seconds), "-J"]
            clients.append(lab.popen(sender, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        return [_received(client, timeout_s=seconds + 1 + _START_TIMEOUT_S) for client in clients]
    finally:
        for process in (*clients, *servers):
            process.kill()
            process.communicate()


def _serve(lab: Lab, host: int) -> subprocess.Popen[bytes]:
    argv = ["iperf3", "-s", "-1", "-p", str(_PORT), "--forceflush"]
    return lab.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _await_listening(server: subprocess.Popen[bytes]) -> None:
    assert server.stdout is not None, "made with a pipe"
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    said = b""
    while b"listening" not in said:
        ready, _, _ = select.select([server.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        data = server.stdout.read1(4096) if ready else b""  # type: ignore[attr-defined]
        if not data:
            raise LabError(
                f"iperf3 does not listen after {_START_TIMEOUT_S:g} s: {said.decode(errors='replace').strip()}"
            )
        said += data


def _received(client: subprocess.Popen[bytes], timeout_s: float) -> float:
    try:
        output, _ = client.communicate(timeout=timeout_s)
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"])
    except subprocess.TimeoutExpired:
        raise LabError(f"iperf3 not done after {timeout_s:g} s") from None
    except (ValueError, KeyError) as error:
        raise LabError(f"iperf3 gave no figure ({error!r}); exit status {client.returncode}") from None
