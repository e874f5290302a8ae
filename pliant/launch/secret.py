"""The job's secret: what proves to a runner or worker that another belongs to its job."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from pliant.errors import ConfigError

NUM_BYTES = 32
REMEDY = "give every runner the same --secret-file or PLIANT_SECRET, or copy ~/.config/pliant/secret to every host"


def parse_secret(text: str, where: str) -> bytes:
    """`text` as hex digits where it is that (16 bytes or more), else as it stands.

    Raises:
        ConfigError: it is empty or too short to keep a stranger out.
    """
    bare = text.strip()
    if len(bare) < 16:
        raise ConfigError(f"{where} has {len(bare)} characters: use 16 or more, such as `openssl rand -hex 32` prints")
    try:
        raw = bytes.fromhex(bare)
    except ValueError:
        return bare.encode(errors="surrogateescape")
    return raw if len(raw) >= 16 else bare.encode()


def read_secret(path: Path) -> bytes:
    """The secret in `path`; raises ConfigError where it cannot be read."""
    try:
        return parse_secret(path.read_text(errors="surrogateescape"), f"secret file {path}")
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}; give a readable one with --secret-file") from None


def cookie_path(environ: Mapping[str, str]) -> Path:
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(config) / "pliant" / "secret"


def read_or_make_cookie(path: Path) -> bytes:
    """The user's own secret, made on first use and readable by nobody else.

    With a home that the hosts share, every runner of the user finds the same one. It is
    written to the side and linked into place: of two runners that start at once, one wins
    and the other reads what the winner wrote, whole.
    """
    if not path.exists():
        draft = path.with_name(f".secret.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(NUM_BYTES) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        except OSError as error:
            raise ConfigError(f"cannot make {path} ({error.strerror}): {REMEDY}") from None
        finally:
            draft.unlink(missing_ok=True)
    return read_secret(path)


def job_secret(*, secret_file: str, shared: bool, environ: Mapping[str, str]) -> bytes:
    """The secret of a job: from `--secret-file`, or, if other runners must know it (`shared`), from
    PLIANT_SECRET or the user's cookie file. Otherwise random, so that two jobs of one user differ.
    """
    if secret_file:
        return read_secret(Path(secret_file))
    if not shared:
        return secrets.token_bytes(NUM_BYTES)
    if environ.get("PLIANT_SECRET"):
        return parse_secret(environ["PLIANT_SECRET"], "PLIANT_SECRET")
    return read_or_make_cookie(cookie_path(environ))
