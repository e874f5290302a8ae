"""Executors as a launcher starts them: here, over a real ssh, on a real Ray; started again when they die, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from executing import TOKEN, Disturbed, Nursery, held, outcome, small
from gang import FULL
from patience import until

from pliant.errors import ConfigError, LaunchError
from pliant.fed.executors import launch, pool
from pliant.fed.executors.carriers import last_line
from pliant.fed.executors.launch import MAX_QUICK, Executors, Restarts, opened
from pliant.fed.executors.places import Place, parse_workers
from pliant.fed.executors.pool import Pool
from pliant.fed.executors.settings import Settings

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "launch"), str(TESTS / "on_ray")]

import sshd  # noqa: E402

# Values


def test_where_executors_run() -> None:
    assert parse_workers(2).parts == (Place("local", "localhost", 2),)
    assert parse_workers("2").parts == (Place("local", "localhost", 2),)
    assert parse_workers("ray:4").parts == (Place("ray", "ray", 4),)
    mixed = parse_workers(["localhost:1", "10.0.0.1:2", "node7", "[fd00::2]:3"])
    assert [(each.kind, each.host, each.count) for each in mixed.parts] == [
        ("local", "localhost", 1),
        ("ssh", "10.0.0.1", 2),
        ("ssh", "node7", 1),
        ("ssh", "fd00::2", 3),
    ]
    assert mixed.count == 7
    assert mixed.listen == "0.0.0.0"
    assert parse_workers([2]).listen == "127.0.0.1"


@pytest.mark.parametrize("given", [0, -1, "0", "ray:0", "ray:x", [], "a:b:c:d", "host:0", ""])
def test_what_is_no_place_is_one_line(given: object) -> None:
    with pytest.raises(ConfigError, match="workers"):
        parse_workers(given)  # type: ignore[arg-type]


def test_an_unknown_host_and_ray_without_ray_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Executors(parse_workers("no-such-host.invalid:1"), port=1, token="t")
    with pytest.raises(ConfigError, match="cannot be reached: .*; `ssh no-such-host.invalid true` must work$"):
        there.__enter__()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^workers: ray needs Ray: `pip install 'pliant\[ray\]'`$"):
        Executors(parse_workers("ray:2"), port=1, token="t").__enter__()


def test_who_dies_is_started_again_ever_later_and_not_for_ever() -> None:
    assert Restarts().after(0, 1.0) is None
    assert Restarts().after(2, 100.0) is None
    quick = Restarts()
    assert [quick.after(1, 1.0) for _ in range(MAX_QUICK)] == [0.0, 0.5, 1.0, 2.0, None]
    slow = Restarts()
    pauses = [slow.after(-9, 20.0) for _ in range(9)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert slow.after(-9, 100.0) == 0.0


def test_a_letter_arrives_as_it_was_written() -> None:
    told = Settings(server="a:1", token=TOKEN, ca="-----\n", patience_s=3, environ={"OMP_NUM_THREADS": "1"}, seat=3)
    assert Settings.from_line(told.to_line()) == told
    assert told.to_line().count(b"\n") == 1
    assert TOKEN not in repr(told)
    with pytest.raises(ConfigError, match="no letter"):
        Settings.from_line(b"")
    with pytest.raises(ConfigError, match="no letter"):
        Settings.from_line(b'{"strange": 1}\n')


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("one\ntwo\n\n")
    assert last_line(log) == "two"
    assert last_line(log, 9) == ""


class Undying:
    """A process that the kernel does not let go."""

    pid = 4321

    def __init__(self, gone: threading.Event) -> None:
        self._gone, self.told = gone, list[str]()

    def wait(self) -> tuple[int, str]:
        self._gone.wait(60)
        return -9, "killed"

    def end(self) -> None:
        self.told.append("end")

    def kill(self) -> None:
        self.told.append("kill")


def test_what_does_not_end_is_named_and_left(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.05)
    gone = threading.Event()
    carrier = Undying(gone)
    monkeypatch.setattr(Executors, "_carry", lambda self, seat: carrier)
    with Executors(parse_workers(1), port=1, token=TOKEN) as launched:
        until(lambda: launched._seats[0].carrier, "its start")
    assert carrier.told == ["end", "kill"]
    assert "executor 0 (process 4321) was killed, and has not ended within 0.05 s: it is left" in caplog.text
    gone.set()
    monkeypatch.setattr(pool, "CLOSE_S", 0.05)
    let_go, opened_pool = threading.Event(), Pool(small(), token=TOKEN)
    with opened_pool:
        thread = opened_pool._thread
        opened_pool._call(let_go.wait, 60)
    assert "thread pliant-fed-pool has not ended within 0.05 s" in caplog.text
    let_go.set()
    assert thread is not None
    thread.join(60)


# Processes


def processes_of(token: str, parent: int = 0) -> set[int]:
    """Executors that live: children of `parent`, or all of ours that were told `token` (by their open logs)."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command = (path / "cmdline").read_bytes()
                state, owner = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if b"pliant.fed.executors.executor" in command and state != "Z" and (not parent or int(owner) == parent):
                assert token.encode() not in command
                found.add(int(path.name))
    return found


@pytest.mark.processes
def test_a_job_whose_executor_is_killed_and_started_again(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    config = small(tmp_path)
    expected = outcome(config)
    with opened(config, 1, logs=lambda rank: tmp_path / "worker" / f"log_{rank}") as pool:
        pids: list[int] = []

        def disturb() -> None:
            pids.append(until(held(tmp_path, pool), "a unit in somebody's hands"))
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: [each for each in pool.executors() if each.ready and each.pid != pids[0]], "its successor")
            pids.append(pool.executors()[0].pid)

        assert outcome(config, Disturbed(pool, tmp_path / "gate", 2, disturb)) == expected
    assert not processes_of(TOKEN, os.getpid())
    assert "the job is over" in (tmp_path / "worker" / "log_0").read_text()


@pytest.mark.processes
def test_executors_end_with_their_launcher_however_it_ends(ward: Nursery, tmp_path: Path, nothing_left: None) -> None:
    launcher = ward.start(tmp_path / "launcher", "_launcher", 2)
    until(lambda: len(processes_of(TOKEN, launcher.pid)) == 2, "two executors")
    children = processes_of(TOKEN, launcher.pid)
    launcher.kill()
    until(lambda: not [pid for pid in children if _lives(pid)], "their end")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.processes
def test_stopped_while_they_start_they_are_gone_at_once(no_leaks: None) -> None:
    begun_s = time.monotonic()
    with Executors(parse_workers(2), port=1, token=TOKEN):
        until(lambda: len(processes_of(TOKEN, os.getpid())) == 2, "two executors")
    assert not processes_of(TOKEN, os.getpid())
    assert time.monotonic() - begun_s < 60


@pytest.mark.processes
def test_a_job_is_told_when_there_will_be_no_executor(tmp_path: Path, no_leaks: None) -> None:
    """The module of its model is not in the folder where executors run: each ends with that, and is not started again."""
    config = small(tmp_path)
    with Pool(config, token=TOKEN) as pool:
        launched = Executors(
            parse_workers(1), port=pool.port, token=TOKEN, directory=str(tmp_path), given_up=pool.fail
        )  # fmt: skip
        with launched, pytest.raises(LaunchError, match="no executor runs any more.*small_task.*log_0"):
            outcome(config, pool)
    assert "small_task" in launched.given_up()


def test_ssh_logs_in_as_the_job_says(tmp_path: Path, no_leaks: None) -> None:
    """Shown by a user who cannot be, and who is told in a line."""
    config = small(tmp_path)
    with (
        pytest.raises(LaunchError, match="cannot be started: -u 'a b' is not the name of a user"),
        opened(config, "127.0.0.2:1", user="a b") as pool,
    ):
        outcome(config, pool)


@pytest.mark.processes
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "there is one")
def test_executors_over_ssh(tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a host that is reached by ssh; its connection is cut, it ends there, and is started again."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    config = small(tmp_path)
    expected = outcome(config)
    with sshd.running(folder) as server, Pool(config, host="0.0.0.0", token=TOKEN) as pool:
        monkeypatch.setenv("PLIANT_SSH", server.client)
        launched = Executors(
            parse_workers("127.0.0.2:1"),
            port=pool.port,
            token=TOKEN,
            directory=str(Path(__file__).parent),
            logs=lambda rank: tmp_path / f"log_{rank}",
            given_up=pool.fail,
        )
        with launched:
            gone: list[int] = []

            def disturb() -> None:
                gone.append(until(held(tmp_path, pool), "a unit in somebody's hands"))
                (client,) = _children(os.getpid(), b"127.0.0.2")
                os.kill(client, signal.SIGKILL)
                until(lambda: not _lives(gone[0]), "its end")
                until(lambda: [each for each in pool.executors() if each.ready], "its successor")

            assert outcome(config, Disturbed(pool, tmp_path / "gate", 2, disturb)) == expected
            (last,) = pool.executors()
        assert "0 on 127.0.0.2" in last.name
        until(lambda: not _lives(last.pid), "the end of the last one")


def _children(parent: int, word: bytes) -> list[int]:
    found = []
    for pid in subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split():
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(not FULL, reason="takes a minute: set PLIANT_FULL=1 to run it")
def test_executors_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on a local cluster; one is killed mid-round, and Ray gives it a place again."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from two_nodes import two_nodes

    monkeypatch.chdir(Path(__file__).parent)
    config = small(tmp_path)
    expected = outcome(config)
    with two_nodes() as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with opened(config, "ray:2", logs=lambda rank: tmp_path / f"log_{rank}") as pool:
            pool.wait_for(2, 120)
            pids = {each.pid for each in pool.executors()}

            def disturb() -> None:
                victim = until(held(tmp_path, pool), "a unit in somebody's hands")
                os.kill(victim, signal.SIGKILL)
                until(lambda: {e.pid for e in pool.executors() if e.ready} - pids, "its successor", 120)

            assert outcome(config, Disturbed(pool, tmp_path / "gate", 2, disturb)) == expected
            pids |= {each.pid for each in pool.executors()}
        until(lambda: not [pid for pid in pids if _lives(pid)], "the end of all")
        assert "the job is over" in (tmp_path / "log_0").read_text() + (tmp_path / "log_1").read_text()
        with pytest.raises(ConfigError, match="ray"), opened(config, "ray:99"):
            pass
