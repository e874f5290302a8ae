"""Lines of a file on a full disk: what is lost is counted and marked, and nothing else is damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import limited_files, small_disk
from patience import until

from pliant.files import DISK_ERRORS, LineFile, LineFileHandler
from pliant.jobs import keeper
from pliant.launch.output import Console
from pliant.record import Recorder, read
from pliant.tensorboard import EventWriter


def test_lost_lines_are_counted_and_marked_and_a_line_in_part_damages_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "log"
    file = LineFile(path)
    file.append(b"one\n")
    with limited_files(7):
        for line in (b"two and more\n", b"three\n", b"four\nfive\n"):
            file.append(line)
    file.append(b"six\n")
    file.append(b"seven\n")
    with limited_files(0):
        file.append(b"eight\n")
    file.close()
    assert path.read_text().splitlines() == [
        "one", "two", "[4 lines lost: file too large]", "six", "seven", "[1 line lost: file too large]"
    ]  # fmt: skip
    assert [bool(re.search("cannot write", message)) for message in caplog.messages] == [True, False], (
        "a warning a minute"
    )
    assert "4 lines are missing" in caplog.text


def test_a_piece_of_a_line_may_be_lost_and_a_mark_in_part_is_written_again(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log")
    file.append(b"begun")
    with limited_files(5):
        file.append(b", not ended\n")
    with limited_files(10):
        file.append(b"more\n")
    file.append(b"end\n")
    file.close()
    assert (tmp_path / "log").read_text() == "begun\n[1 l\n[2 lines lost: file too large]\nend\n"


def test_a_log_that_was_removed_to_make_room_is_created_again(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log")
    file.append(b"a long line\n")
    with limited_files(0):
        file.append(b"lost\n")
    (tmp_path / "log").unlink()
    file.append(b"new\n")
    file.close()
    assert (tmp_path / "log").read_text() == "[1 line lost: file too large]\nnew\n"


def test_what_is_no_trouble_of_the_disk_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    file = LineFile(tmp_path / "file" / "log")
    read_end, write_end = os.pipe()
    os.close(read_end)
    console = Console(write_end, coloured=False)
    for _ in range(2):
        file.append(b"x\n")
        console.write(b"x\n")
    os.close(write_end)
    assert [message[:12] for message in caplog.messages] == ["cannot write"] * 2


def test_dev_full(caplog: pytest.LogCaptureFixture) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    console = Console(descriptor, coloured=False)
    for _ in range(1000):
        console.write(b"x\n")
    os.close(descriptor)
    [line] = caplog.messages
    assert "the output (No space left on device): 1 lines are lost so far" in line


def test_a_record_marks_the_gap_with_how_much_and_when(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with Recorder(path) as recorder:
        recorder.write("start", 0, replicas=4)
        with limited_files(path.stat().st_size + 9):
            for step in range(1, 4):
                recorder.write("step", step)
        recorder.write("step", 4)
    with limited_files(0), Recorder(tmp_path / "new.jsonl") as recorder:
        recorder.write("step", 5)
    start, gap, step = read(path)
    assert (start.kind, gap.kind, step.kind, step.step) == ("start", "gap", "step", 4)
    assert (gap.data["lost"], gap.data["why"]) == (3, "File too large")
    assert start.time_s <= gap.data["from_s"] <= gap.data["to_s"] <= gap.time_s


def test_the_log_of_a_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    logger = logging.Logger("of a runner")
    logger.addHandler(handler := LineFileHandler(str(path)))
    with limited_files(0):
        logger.warning("lost")
    logger.warning("written")
    handler.close()
    assert path.read_text() == "[1 line lost: file too large]\nwritten\n"
    assert "Traceback" not in capsys.readouterr().err


def test_tensorboard_reads_what_came_before_and_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `tensorboard`"
    )
    writer = EventWriter(tmp_path)
    with limited_files(0):
        writer.add_scalars({"a": 0.5}, 0)  # not even created with its first event
    for step in range(1, 4):
        writer.add_scalars({"a": step}, step)
        [path] = tmp_path.iterdir()
        with limited_files(path.stat().st_size + 10 * step):
            writer.add_scalars({"a": -1}, step)
    writer.add_histogram("h", [1.0, 2.0, 2.0], 4)
    writer.close()
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1), (2, 2), (3, 3)]
    [histogram] = events.Histograms("h")
    assert histogram.histogram_value.num == 3
    assert sum("cannot write" in message for message in caplog.messages) == 1


@pytest.mark.root
def test_a_small_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with Recorder(disk.path / "record.jsonl") as recorder:
            recorder.write("start", 0)
            disk.fill()
            for step in range(100):
                recorder.write("step", step, filler="x" * 100)
            disk.free()
            recorder.write("end", 100)
        facts = read(disk.path / "record.jsonl")
    kinds = [fact.kind for fact in facts]
    assert kinds == ["start", *["step"] * (len(facts) - 3), "gap", "end"]
    assert facts[-2].data["lost"] == 100 - (len(facts) - 3)
    assert facts[-2].data["why"] == "No space left on device"


@pytest.mark.root
@pytest.mark.processes
def test_a_keeper_waits_for_room_to_write_how_its_run_ended(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        place = disk.path
        program = "raise SystemExit(3)"
        with subprocess.Popen([sys.executable, keeper.__file__, place, "0", sys.executable, "-c", program]) as process:
            until(lambda: process.poll() is not None or not children(process.pid), "its run", 20)
            assert process.poll() is None, "it waits"
            assert not (place / "exit.json").exists()
            disk.free()
            assert process.wait(20) == 0
        assert json.loads((place / "exit.json").read_text())["code"] == 3


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_errors_of_disks_are_no_mistakes_of_users() -> None:
    assert not DISK_ERRORS & {errno.EACCES, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EPERM, errno.EPIPE}
