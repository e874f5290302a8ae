"""Workers as `pliant run` starts them: here, over a real ssh, on a real Ray; replaced when they die, and gone at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from gang import FULL
from patience import until
from proc import command_line, descendants, lives, pids
from worker_processes import SECRET, Disturbed, Nursery, held, outcome, small

from pliant.errors import REFUSED_EXIT, ConfigError, LaunchError
from pliant.fed.coordinator import Coordinator
from pliant.fed.workers import (
    MAX_QUICK_ENDS,
    RunRestarts,
    WorkerPlace,
    WorkerProcesses,
    coordinator_with_workers,
    last_line,
    parse_workers,
    run_commands,
)

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "launch"), str(TESTS / "on_ray")]

import sshd  # noqa: E402

# --- values ---


def test_where_workers_run() -> None:
    assert parse_workers(2).parts == (WorkerPlace("local", "localhost", 2),)
    assert parse_workers("2").parts == (WorkerPlace("local", "localhost", 2),)
    assert parse_workers("ray:4").parts == (WorkerPlace("ray", "ray", 4),)
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


def test_there_is_one_run_for_this_machine_one_for_each_ssh_host_and_one_for_ray() -> None:
    places = parse_workers([1, "localhost:2", "10.0.0.1:2", "[fd00::2]:3", "ray:4"])
    here, first, second, ray = run_commands(
        places, port=7, secret_file=Path("/s"), server_host="10.0.0.9", device="cuda", directory="/d", user="me"
    )
    assert here[here.index("-np") + 1] == "3"
    assert first[first.index("--ssh") :][:7] == ["--ssh", "-H", "10.0.0.1:2", "--remote-dir", "/d", "-u", "me"]
    assert "[fd00::2]:3" in second
    assert ray[ray.index("--on") :][:2] == ["--on", "ray"]
    assert "gpu=4" in ray
    assert here[-6:] == ["-m", "pliant.fed.worker", "--server", "10.0.0.9:7", "--device", "cuda"]


def test_an_unknown_host_is_told_with_what_to_do() -> None:
    there = WorkerProcesses(parse_workers("no-such-host.invalid:1"), port=1, secret=SECRET)
    with pytest.raises(
        ConfigError, match="cannot be reached: .*; check its name, and that `ssh no-such-host.invalid true`"
    ):
        there.__enter__()


def test_a_run_that_ends_is_started_again_ever_later_and_not_for_ever() -> None:
    assert [RunRestarts().after(code, 100.0) for code in (0, 2, REFUSED_EXIT)] == [None] * 3
    quick = RunRestarts()
    assert [quick.after(1, 1.0) for _ in range(MAX_QUICK_ENDS)] == [0.0, 0.5, None]
    slow = RunRestarts()
    assert [slow.after(255, 100.0) for _ in range(5)] == [0.0] * 5


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("one\ntwo\n\n[I] three\n")
    assert last_line(log) == "two"
    assert last_line(log, 8) == ""


# --- processes ---


def runs_of(address: str) -> set[int]:
    """Living `pliant run`s of workers, by the coordinator's address on the command line. No secret is on it."""
    commands = {pid: command_line(pid) for pid in pids() if lives(pid)}
    found = {pid for pid, command in commands.items() if "pliant.fed.worker" in command and address in command}
    assert not [pid for pid in found if SECRET.hex() in commands[pid]]
    return found


@pytest.mark.processes
def test_a_job_whose_worker_is_killed_and_replaced(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    config = small(tmp_path)
    expected = outcome(config)
    with coordinator_with_workers(config, 1, log=tmp_path / "worker" / "log") as coordinator:
        seen: list[int] = []

        def disturb() -> None:
            seen.append(until(held(tmp_path, coordinator), "a worker with a unit"))
            os.kill(seen[0], signal.SIGKILL)
            until(lambda: [each for each in coordinator.workers() if each.ready and each.pid != seen[0]], "another")
            seen.append(coordinator.workers()[0].pid)

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 2, disturb)) == expected
    assert not [pid for pid in seen if lives(pid)]
    assert not runs_of(coordinator.address)
    assert "the job is over" in (tmp_path / "worker" / "log").read_text()


@pytest.mark.processes
def test_workers_end_with_their_coordinator_however_it_ends(ward: Nursery, tmp_path: Path, nothing_left: None) -> None:
    config = small()
    with Coordinator(config, secret=SECRET) as coordinator:
        launcher = ward.start(tmp_path / "launcher", "_launcher", 1, coordinator.port, str(Path(__file__).parent))
        coordinator.wait_for(1, 60)
        pids = {each.pid for each in coordinator.workers()} | runs_of(coordinator.address)
        launcher.kill()
        until(lambda: not [pid for pid in pids if lives(pid)], "their end")


@pytest.mark.processes
def test_stopped_while_they_start_they_are_gone_at_once(no_leaks: None) -> None:
    begun_s = time.monotonic()
    with WorkerProcesses(parse_workers(2), port=2, secret=SECRET):
        until(lambda: runs_of("127.0.0.1:2"), "their run")
    assert not runs_of("127.0.0.1:2")
    assert time.monotonic() - begun_s < 60


@pytest.mark.processes
def test_a_job_is_told_when_there_will_be_no_worker(tmp_path: Path, no_leaks: None) -> None:
    """The module of its model is not in the folder where workers run: each ends with that, and is not replaced."""
    config = small(tmp_path)
    with Coordinator(config, secret=SECRET) as coordinator:
        launched = WorkerProcesses(
            parse_workers(1), port=coordinator.port, secret=SECRET, directory=str(tmp_path), given_up=coordinator.fail
        )
        with launched, pytest.raises(LaunchError, match="no worker runs any more.*small_task.*log"):
            outcome(config, coordinator)


@pytest.mark.processes
def test_ssh_logs_in_as_the_job_says(tmp_path: Path, no_leaks: None) -> None:
    """Shown by a user who cannot be, and who is told in a line."""
    config = small(tmp_path)
    with (
        pytest.raises(LaunchError, match="-u 'a b' is not the name of a user"),
        coordinator_with_workers(config, "127.0.0.2:1", user="a b") as coordinator,
    ):
        outcome(config, coordinator)


@pytest.mark.processes
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "there is one")
def test_workers_over_ssh(tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a host that is reached by ssh; its connection is cut, it ends there, and is started again."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    config = small(tmp_path)
    expected = outcome(config)
    monkeypatch.chdir(Path(__file__).parent)
    with sshd.running(folder) as server:
        monkeypatch.setenv("PLIANT_SSH", server.client)
        with coordinator_with_workers(config, "127.0.0.2:1", log=tmp_path / "log") as coordinator:
            gone: list[int] = []

            def disturb() -> None:
                gone.append(until(held(tmp_path, coordinator), "a worker with a unit", 60))
                ours = {pid: command_line(pid) for pid in descendants(os.getpid())}
                (client,) = [pid for pid, command in ours.items() if "BatchMode" in command and "127.0.0.2" in command]
                os.kill(client, signal.SIGKILL)
                until(lambda: not lives(gone[0]), "its end", 60)
                until(lambda: [each for each in coordinator.workers() if each.ready], "another", 60)

            assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 2, disturb)) == expected
            (last,) = coordinator.workers()
        assert "127.0.0.2" in last.name
        until(lambda: not lives(last.pid), "the end of the last one")


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(not FULL, reason="takes a minute: set PLIANT_FULL=1 to run it")
def test_workers_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on a local cluster; one is killed in a round, and Ray gives it a place again."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from two_nodes import two_nodes

    monkeypatch.chdir(Path(__file__).parent)
    config = small(tmp_path)
    expected = outcome(config)
    with two_nodes() as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with coordinator_with_workers(config, "ray:2", log=tmp_path / "log") as coordinator:
            coordinator.wait_for(2, 120)
            pids = {each.pid for each in coordinator.workers()}

            def disturb() -> None:
                victim = until(held(tmp_path, coordinator), "a worker with a unit")
                os.kill(victim, signal.SIGKILL)
                until(lambda: {e.pid for e in coordinator.workers() if e.ready} - pids, "another", 120)

            assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 2, disturb)) == expected
            pids |= {each.pid for each in coordinator.workers()}
        until(lambda: not [pid for pid in pids if lives(pid)], "the end of all")
        assert "the job is over" in (tmp_path / "log").read_text()
