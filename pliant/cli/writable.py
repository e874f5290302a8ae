"""Files and folders that a command will write to, tried before its work begins, not after."""

from __future__ import annotations

import os
from pathlib import Path

from pliant.cli.json_output import is_alone
from pliant.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """That the file can be written. Leaves no empty file behind."""
    if path is None or is_alone(path):
        return
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None


def check_picture(path: Path | None) -> None:
    """That `--plot` names a file which can be written, and a kind of picture; and that there is something to draw with."""
    if path is None:
        return
    from pliant.cli import plotting

    plotting.check()
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot {path}: give a name that ends in {', '.join(PICTURES)}")
    check_writable(path, "--plot")


def check_future_file(path: str, flag: str) -> None:
    """That a file can be written there, in a folder that may be yet to be made. Empty: none was asked for."""
    if not path:
        return
    if os.path.isdir(path):
        raise ConfigError(f"{flag} {path} is a directory: give a file, such as {os.path.join(path, 'run.jsonl')}")
    check_future_folder(os.path.dirname(path), flag)
    if os.path.exists(path):
        check_writable(Path(path), flag)


def check_future_folder(path: str, flag: str) -> None:
    """That the folder can be written to, or made. Makes nothing. Empty: none was asked for."""
    if not path:
        return
    nearest = path
    while not os.path.exists(nearest) and nearest != os.path.dirname(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        raise ConfigError(f"{flag} {path}: {nearest} is not a directory; give another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: {nearest} may not be written to by you; give another directory")
