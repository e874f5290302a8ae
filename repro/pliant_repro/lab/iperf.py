"""The rate that iperf3 reaches between the hosts of a lab."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from statistics import mean

from pliant.errors import LabError
from pliant_repro.lab.hosts import Lab

_PORT = 5201
_START_TIMEOUT_S = 10.0
MTU_SHARE = 1448 / 1514
"""Share of payload in a full Ethernet frame with TCP timestamps; a shaper counts whole frames."""


def why_no_iperf() -> str:
    """Return why the line rate cannot be measured; empty if it can."""
    return (
        "" if shutil.which("iperf3") else "iperf3 not found, so the bound uses the nominal rate; apt-get install iperf3"
    )


def mean_ring_rate(lab: Lab, remarks: list[str]) -> float | None:
    """Return the mean bits per second of hosts that all send to the next one; None, and a remark, if that cannot be measured."""
    why_not = why_no_iperf()
    if not why_not:
        try:
            return mean(measure(lab, [(host, (host + 1) % lab.num_hosts) for host in range(lab.num_hosts)]))
        except LabError as error:
            why_not = str(error)
    remarks[:] = dict.fromkeys([*remarks, why_not])
    return None


def measure(lab: Lab, pairs: Sequence[tuple[int, int]], *, seconds: int = 2) -> list[float]:
    """Return the bits per second received for each (sender, receiver), all at once, without the first second.

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
