"""Files that several processes share: replaced whole, private where asked, locked by one process at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.files import create_private, hold_lock, is_locked, write_atomic


def test_a_file_is_replaced_whole_and_can_be_private(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, "first")
    assert path.read_text() == "first"
    write_atomic(path, b"second", private=True)
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError):
        write_atomic(path, "text")
    assert os.listdir(tmp_path) == ["folder"]


def test_only_one_creates_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert create_private(path, "mine")
    assert not create_private(path, "yours")
    assert path.read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_a_lock_is_held_by_one_process_and_released_however_it_ends(tmp_path: Path) -> None:
    path, refusal = tmp_path / "lock", ConfigError("taken")
    assert not is_locked(path)
    hold = (
        "import sys, time; from pathlib import Path; from pliant.errors import ConfigError; from pliant.files import hold_lock\n"
        "with hold_lock(Path(sys.argv[1]), ConfigError('taken')):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        with pytest.raises(ConfigError, match="taken"), hold_lock(path, refusal):
            pass
        holder.kill()
    with hold_lock(path, refusal, wait_s=5):
        assert is_locked(path)
    assert not is_locked(path)
