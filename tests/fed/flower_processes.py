"""A SuperLink and its SuperNodes as processes on loopback, with TLS and keys of their own."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from gang import free_port
from patience import until as until_happened
from proc import descendants, pids, proc_text

APP = Path(__file__).parent / "flower_app"
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
BIN = Path(sys.executable).parent
DEADLINE_S = 240.0
MARK = "PLIANT_FLOWER_TEST"


def until(holds: Callable[[], object], what: str) -> None:
    """Flower's processes take their time."""
    until_happened(holds, what, DEADLINE_S)


def authority(path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate("tests", key, "tests", key, x509.BasicConstraints(ca=True, path_length=None))
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def server_certificate(folder: Path, signer: ec.EllipticCurvePrivateKey) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = _certificate("server", key, "tests", signer, here)
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_private(key, serialization.PrivateFormat.PKCS8))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, by: str, signer: ec.EllipticCurvePrivateKey, more: x509.ExtensionType
) -> x509.Certificate:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, by))
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(more, critical=isinstance(more, x509.BasicConstraints))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def node_key(path: Path) -> Path:
    """The private key; the public one lies beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path


class Deployment:
    """Everything that is started carries a mark, and is gone after `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port("127.0.0.1")
        self.environ = {
            **os.environ, MARK: uuid4().hex, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []
        signer, _ = authority(folder / "ca.pem")
        authority(folder / "other.pem")
        server_certificate(folder, signer)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.pem"}"\n'
        )

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            argv = [str(BIN / str(words[0])), *map(str, words[1:])]
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=self.environ, cwd=self.folder)
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def superlink(self) -> None:
        self.start(
            "link", "flower-superlink", "--host", "127.0.0.1", "--port", self.port, "--ssl-certfile", "server.pem",
            "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.pem", "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        until(lambda: "Uvicorn running" in self.log("link"), "the SuperLink is up")

    def register(self, keys: list[Path]) -> None:
        """In one process: each would import all of Flower."""
        run = "from flwr.cli.app import app; import sys\nfor key in sys.argv[1:]: app(['supernode', 'register', key, 'here'], standalone_mode=False)"
        public = [str(key.with_suffix(".pub")) for key in keys]
        done = subprocess.run([sys.executable, "-c", run, *public], env=self.environ, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr.decode()

    def supernode(self, name: str, client: int, key: Path, *, trusts: str = "ca.pem") -> subprocess.Popen[bytes]:
        return self.start(
            name, "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", trusts,
            "--auth-supernode-private-key", key, "--node-config", f"partition-id={client}",
            "--host", "127.0.0.1", "--port", free_port("127.0.0.1"), "--max-retries", "1",
        )  # fmt: skip

    def run(self, app: Path, settings: dict[str, object]) -> None:
        """`flwr run`, which returns as soon as the SuperLink has the app."""
        words = " ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in settings.items()
        )
        argv = [str(BIN / "flwr"), "run", str(app), "here", "--run-config", words]
        done = subprocess.run(argv, env=self.environ, cwd=self.folder, capture_output=True, timeout=100)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """kill -9 of a SuperNode and all that it has started: as if its machine had lost power."""
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)

    def close(self) -> None:
        for process in self.processes[::-1]:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        until(self._gone, "all processes are gone")
        for process in self.processes:
            process.wait(5)

    def _gone(self) -> bool:
        """Kill what is left: Flower starts its helpers in sessions of their own."""
        left = [pid for pid in pids() if f"{MARK}={self.environ[MARK]}" in proc_text(pid, "environ").split("\0")]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left
