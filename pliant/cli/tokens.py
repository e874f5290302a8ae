"""The token that a server asks its callers for, as a command is given it: in a file, or in PLIANT_TOKEN."""

from __future__ import annotations

import os
from pathlib import Path

from pliant.errors import ConfigError, reason


def token_given(file: str) -> str:
    """What `--token-file` holds; without one, PLIANT_TOKEN; empty where neither was given.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if not file:
        return os.environ.get("PLIANT_TOKEN", "")
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {file} cannot be read: {reason(error)}; give a file that holds the token"
        ) from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: write the token into it")
    return token
