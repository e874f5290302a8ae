"""Self-signed certificates for tests of TLS, and contexts that use them."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path, name: str) -> tuple[str, str]:
    """Return the paths of a new certificate for 127.0.0.1 and its key; skip the test if the program openssl is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make certificates: apt install openssl")
    certificate, key = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *curve, "-keyout", key, "-out", certificate, "-days", "2", *names]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    return certificate, key


def tls_contexts(certificate: str, key: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the context of a server with this certificate, and that of a client that accepts any."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client
