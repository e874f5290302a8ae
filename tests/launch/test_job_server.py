"""The config server of a job as a process of its own: it is killed, its runner is killed, and the job goes on."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from launching import DEADLINE_S, FOLLOW, Launcher, Runner, client_of, members, url_of

from pliant.cluster import Membership, View, Wanted, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import ElasticState
from pliant.elastic.store import StateStore
from pliant.errors import ENDED_EXIT, ConfigError
from pliant.launch.job_server import LONELY_S, MODULE, UNASKED_S, patience_s
from pliant.tokens import find_token, state_directory


def server_of(launcher: Launcher, runner: Runner, *but: int) -> int:
    """The process of the runner's config server; another one than `but`."""
    found: list[int] = []

    def look() -> bool:
        for task in Path(f"/proc/{runner.pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if MODULE.encode() in command and child not in but:
                    found.append(child)
        return bool(found)

    launcher.until(look, "a config server")
    return found[-1]


def folders(launcher: Launcher, runner: Runner) -> list[Path]:
    """Where the state of the runner's config server is kept."""
    return list((state_directory(launcher.environ) / "servers").glob(f"{runner.pid}-*"))


@pytest.mark.processes
def test_a_frozen_or_killed_server_is_started_again_and_has_forgotten_nothing(
    launcher: Launcher, alive: Callable[[int], bool]
) -> None:
    launcher.script("follow.py", FOLLOW)
    runner = launcher.start("-w", "-np", 2, "follow.py", **launcher.without_torch())
    url = url_of(runner)
    token = find_token(url, launcher.environ)
    with ConfigClient(url, token, timeout_s=30) as client:
        workers = members(launcher, 2)
        before = client.snapshot()
        server = server_of(launcher, runner)
        os.kill(server, signal.SIGSTOP)  # frozen, it is noticed and killed
        launcher.until(lambda: "T" in Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0])
        with ConfigClient(url, token, timeout_s=30) as newcomer:
            now = newcomer.snapshot()
        assert not alive(server)
        assert (now.wanted, now.membership, now.id) == (before.wanted, before.membership, before.id), (
            "who asks meanwhile waits, and is answered as if nothing had been"
        )
        again = server_of(launcher, runner, server)
        # Now the server and a worker at once.
        port, victim = workers.popitem()
        os.kill(again, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        with ConfigClient(url, token, timeout_s=30) as newcomer:
            lost = newcomer.wait_for_membership(before.membership.number, 30)
        assert port not in [worker.port for worker in lost.members]
        client.resize(1)
        launcher.until(lambda: client.snapshot().membership.missing(client.get()) == (), "the resize")
        assert [path.stat().st_mode & 0o777 for path in folders(launcher, runner)] == [0o700]
        third = server_of(launcher, runner, server, again)
        client.resize(0)
    ended = launcher.end(runner)
    assert ended.code == ENDED_EXIT, ended.stderr
    assert ended.stderr.count("the config server has ended (killed by SIGKILL") == 2
    assert not alive(third)
    assert not folders(launcher, runner), "the job's state goes with the job"


@pytest.mark.processes
def test_the_server_of_a_killed_runner_ends_by_itself(launcher: Launcher, alive: Callable[[int], bool]) -> None:
    launcher.script("follow.py", FOLLOW)
    runner = launcher.start("-w", "--no-warm", "follow.py")
    url_of(runner)
    (worker,) = members(launcher, 1).values()
    server = server_of(launcher, runner)
    runner.kill()
    runner.wait(DEADLINE_S)
    for pid in (worker, server):
        launcher.until(lambda pid=pid: not alive(pid), f"end of {pid}")  # type: ignore[misc]
    assert not folders(launcher, runner)


@pytest.mark.processes
def test_the_job_goes_on_when_the_first_runner_is_killed(
    launcher: Launcher, free_port: int, alive: Callable[[int], bool]
) -> None:
    launcher.script("follow.py", FOLLOW)
    common = ("-w", "--no-warm", "-np", 2, "-H", "127.0.0.1:1,127.0.0.2:1", "-port", free_port, "follow.py")
    head, other = (
        launcher.start("-self", host, *common, PLIANT_SECRET="s" * 32) for host in ("127.0.0.1", "127.0.0.2")
    )
    with client_of(launcher, head) as client:
        pids, before = members(launcher, 2), client.membership()
        server = server_of(launcher, head)
        head.kill()
        lost = client.wait_for_membership(before.number, 10)
        assert [worker.host for worker in lost.members] == ["127.0.0.2"]
        client.finish(lost.members[0])
    ended = launcher.end(other)
    assert ended.code == 0, ended.stderr
    assert "the runner on 127.0.0.1 is gone; the job goes on without it" in ended.stderr
    launcher.until(lambda: not any(map(alive, (server, *pids.values()))), "end of the server")
    assert not folders(launcher, head)


A, B = Worker("10.0.0.1", 10000), Worker("10.0.0.2", 10000)


def state(*members: Worker, over: bool = False) -> ElasticState:
    runners = tuple(Worker(worker.host, 38080) for worker in members)
    return ElasticState(Wanted(1, View(1, members, runners)), Membership(1, () if over else members, over=over))


def test_an_orphaned_server_stays_as_long_as_workers_on_other_hosts_ask_it() -> None:
    assert patience_s(state(A), A.host) == (LONELY_S, False)
    assert patience_s(state(A, B), A.host) == (UNASKED_S, True)
    assert patience_s(state(A, B, over=True), A.host) == (LONELY_S, True), "the others have still to hear of it"
    assert patience_s(ElasticState(), A.host) == (LONELY_S, False), "nobody was ever wanted"


def test_a_spare_state_that_cannot_be_kept_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "server.sqlite"
    file.write_text("no database, and longer than its header would be " * 9)
    with pytest.raises(ConfigError, match="not a database"), StateStore(str(file)):
        pass
    with StateStore(str(file), durable=False) as store:
        store.save(state(A))
        assert store.state == state(A)
    assert "the state is kept in memory" in caplog.text
    file.unlink()
    with StateStore(str(file), durable=False) as store:
        store.save(state(A))
    with StateStore(str(file), durable=False) as store:
        assert (store.state.wanted, store.state.membership) == (state(A).wanted, state(A).membership)
        assert store.state.restored == 1, "what was not written in time is asked for again"
        with (
            closing(sqlite3.connect(file, timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("SELECT * FROM wanted")
