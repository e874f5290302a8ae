"""A real sshd on loopback for a test: its own keys, its own port, nobody's configuration but its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gang import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ADDRESSES = ("127.0.0.1", "127.0.0.2")
DEADLINE_S = 20.0


def missing() -> str:
    """Why there cannot be one; empty if there can."""
    for program in (SSHD, "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"needs {program}: scripts/system-packages installs OpenSSH"
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        try:
            Path("/run/sshd").mkdir(mode=0o755)
        except OSError as error:
            return f"sshd needs /run/sshd: {error.strerror}"
    return ""


@dataclass(frozen=True)
class Sshd:
    port: int
    client: str
    """For PLIANT_SSH."""
    log: Path


@contextmanager
def running(folder: Path) -> Iterator[Sshd]:
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=DEADLINE_S
        )
    port = free_port("0.0.0.0")
    host_key = (folder / "host.pub").read_text()
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "known").write_text("".join(f"[{address}]:{port} {host_key}" for address in ADDRESSES))
    (folder / "sshd_config").write_text(
        "".join(f"ListenAddress {address}:{port}\n" for address in ADDRESSES)
        + f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n Port {port}\n IdentityFile {folder}/user\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n"
        " GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n LogLevel ERROR\n"
    )
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stderr=output
        )
    try:
        _await(process, port, log)
        yield Sshd(port, f"ssh -F {folder}/ssh_config", log)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"sshd does not listen: {log.read_text()}") from None
            time.sleep(0.02)  # pacing a poll with a deadline, not synchronising by it
