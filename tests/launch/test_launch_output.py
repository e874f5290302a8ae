"""Lines from bytes, and the thread that reads them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pliant.files import LineFile
from pliant.launch.output import Console, LineSplitter, OutputReader, OutputStream, prefix


def test_lines_are_cut_wherever_the_bytes_break() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"on") == []
    assert splitter.feed(b"e\ntwo\n\nthr") == [b"one", b"two", b""]
    assert splitter.flush() == [b"thr"]
    assert splitter.flush() == []


def test_a_line_without_end_comes_in_pieces_and_memory_stays_bounded() -> None:
    splitter = LineSplitter(max_bytes=10)
    pieces = [piece for _ in range(100) for piece in splitter.feed(b"x" * 7)] + splitter.flush()
    assert b"".join(pieces) == b"x" * 700
    assert max(map(len, pieces)) <= 10
    assert LineSplitter(max_bytes=4).feed(b"abcdefgh\n") == [b"abcd", b"efgh"]


def test_the_prefix_is_kungfus_and_coloured_only_where_asked() -> None:
    assert prefix("127.0.0.1.10000", "stdout", None) == b"[127.0.0.1.10000::stdout] "
    assert prefix("h.1", "stderr", 0) == b"\x1b[36m[h.1::stderr]\x1b[0m "
    assert prefix("h.1", "stderr", 0) != prefix("h.1", "stderr", 1)


def test_a_log_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = LineFile(tmp_path / "file" / "a.log")
    log.append(b"x\n")
    log.append(b"y\n")


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    return tmp_path / "shown"


def test_every_byte_arrives_in_order_and_the_last_lines_are_kept(shown: Path, tmp_path: Path) -> None:
    lines = [b"%d \xff\xfe\x00" % i for i in range(5000)]
    with shown.open("wb", buffering=0) as file:
        reader = OutputReader()
        reader.start()
        read, write = os.pipe()
        log = LineFile(tmp_path / "log")
        stream = OutputStream(read, b"[a] ", Console(file.fileno(), coloured=False), log)
        reader.add(stream)
        with open(write, "wb") as pipe:
            pipe.write(b"\n".join(lines))
        reader.finish()
    assert stream.ended.is_set()
    assert shown.read_bytes() == b"".join(b"[a] " + line + b"\n" for line in lines)
    assert (tmp_path / "log").read_bytes() == b"\n".join(lines)
    assert list(stream.tail) == lines[-20:]
    assert not any(thread.name == "worker-output" for thread in threading.enumerate())


def test_a_pipe_that_a_stranger_holds_is_given_up(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.launch.output.IDLE_S", 0.05)
    with shown.open("wb", buffering=0) as file:
        reader = OutputReader()
        reader.start()
        read, write = os.pipe()
        reader.add(OutputStream(read, b"", Console(file.fileno(), coloured=False), None))
        os.write(write, b"partial")
        reader.finish()
        os.close(write)
    assert shown.read_bytes() == b"partial\n"
