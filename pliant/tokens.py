"""Tokens of HTTP servers: how a job's follows from its secret, and where this user's are kept so that commands find them.

Each server of ours that asks for a token writes it to a file that only its owner can read, `tokens/HOST:PORT` in the user's
state directory. Only the standard library is used, so that `pliant run` starts quickly.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pliant.errors import ConfigError
from pliant.files import write_atomic

log = logging.getLogger(__name__)

FOLDER = "tokens"
_EVERYWHERE = "*"
"""Stands for the host of a server that listens on all addresses."""


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's state directory: $PLIANT_HOME, or `pliant` in $XDG_STATE_HOME or in ~/.local/state."""
    if environ.get("PLIANT_HOME"):
        return Path(environ["PLIANT_HOME"]).absolute()
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "pliant"


def check_private(folder: Path) -> None:
    """Refuse a directory that somebody else owns or can write to: what it holds could be forged."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{folder} is not a directory that only you can write to: remove it, or chmod it to 700")


def job_token(secret: bytes) -> str:
    """Return the token of a job's servers, which only those who know the job's secret can derive."""
    return hmac.new(secret, b"config-server", hashlib.sha256).hexdigest()


def random_token() -> str:
    """Return a new token that nobody can guess."""
    return secrets.token_urlsafe(24)


def token_hash(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits."""
    return hashlib.sha256(token.encode()).hexdigest()


# --- files ---


def keep_token(host: str, port: int, token: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Write down the token of the server at this address; return the file.

    Raises:
        ConfigError: it cannot be written, or others could change it.
    """
    folder = state_directory(environ) / FOLDER
    file = folder / _name(host, port)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        write_atomic(file, token, private=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): set PLIANT_TOKEN to a token") from None
    return file


def kept_token(host: str, port: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the token that was written down for the server at this address; empty if there is none."""
    try:
        return (state_directory(environ) / FOLDER / _name(host, port)).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


@contextlib.contextmanager
def token_kept(host: str, port: int, token: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path | None]:
    """Write down the token of the server at this address for the time of the block; yield the file.

    If it cannot be written, a warning is logged and None is yielded: the server is reachable all the same.
    """
    file = None
    try:
        file = keep_token(host, port, token, environ)
    except ConfigError as error:
        log.warning("commands must be given the token of the server at %s:%d: %s", host, port, error)
    try:
        yield file
    finally:
        if file is not None and kept_token(host, port, environ) == token:
            file.unlink(missing_ok=True)


def find_token(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the token for the server at `url`: PLIANT_TOKEN, or what this user's server there has written down.

    Empty if neither is known.
    """
    if environ.get("PLIANT_TOKEN"):
        return environ["PLIANT_TOKEN"]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    except ValueError:
        return ""
    host = "127.0.0.1" if host == "localhost" else host
    return kept_token(host, port, environ) or (kept_token("0.0.0.0", port, environ) if _is_here(host) else "")


def _name(host: str, port: int) -> str:
    bare = host.strip("[]").lower()
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(bare)
        bare = _EVERYWHERE if address.is_unspecified else str(address)
    return f"{bare.replace('/', '_')}:{port}"


def _is_here(host: str) -> bool:
    """Return whether this machine has the address `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
