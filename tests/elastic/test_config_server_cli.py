"""`pliant config-server` as a process: its flags, its signals, and what it remembers after kill -9."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from gang import free_port
from serving import A0, A1, RUN_A, TWO

from pliant.cli.main import main
from pliant.cluster import Membership, Wanted
from pliant.elastic.client import ConfigClient
from pliant.errors import ClusterCleared, ConfigError
from pliant.tokens import find_token

pytestmark = pytest.mark.processes

PROGRAM = [sys.executable, "-c", "from pliant.cli.main import main; main()", "config-server"]


@dataclass(frozen=True)
class Program:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def started(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """The program with `flags` on a free port, from when it has said its address until the block ends."""
    command = [*PROGRAM, "-port", "0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=None if env is None else dict(env)
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            said = re.fullmatch(r"config server at (\S+), version \d+\n", line)
            assert said is not None, line + process.stdout.read()
            yield Program(process, said[1])
        finally:
            process.kill()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Gives the one line that some flags are refused with; in this process, since nothing gets to run."""

    monkeypatch.setattr("pliant.cli.main.COMMANDS", ("config_server",))  # to make all of them takes 0.1 s each time

    def refused(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pliant", "config-server", *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
        return said.err

    return refused


def test_kill_9_and_a_restart_forget_nothing(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with started("--open", "--state", state) as program, ConfigClient(program.url) as client:
        client.put(TWO)
        client.ready(A0)
        client.ready(A1)
        membership = client.lost(A1, "killed by SIGKILL")
        view = client.resize(2)
        newcomer = view.workers[1]
        program.process.kill()
        assert program.process.wait(30) == -signal.SIGKILL
    with started("--open", "--state", state) as program, ConfigClient(program.url) as client:
        assert client.wanted() == Wanted(3, view)
        assert client.membership() == membership == Membership(2, (A0,), urgent=2, wanted=2)
        assert client.ready(newcomer).members == (A0, newcomer), "that A0 was ready has not been forgotten"
        client.clear(expected=3)
        program.process.kill()
    with started("--open", "--state", state) as program, ConfigClient(program.url) as client:
        with pytest.raises(ClusterCleared):
            client.put(TWO)
        assert client.membership() == Membership(
            4, (), urgent=2, over=True, wanted=4, ended_by="POST /clear from 127.0.0.1"
        )
        assert client.reset() == 5
        assert client.membership() == Membership(4, (), urgent=2, wanted=5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None], ids=str)
def test_signals_and_its_time_stop_it_cleanly(number: signal.Signals | None) -> None:
    with started(*(() if number else ("-ttl=0.2",))) as program:
        if number:
            program.process.send_signal(number)
        assert program.process.wait(30) == 0
        assert program.process.stdout is not None
        assert "Traceback" not in program.process.stdout.read()


def test_kungfus_flags_and_stop(tmp_path: Path) -> None:
    init = tmp_path / "init.json"
    init.write_text(json.dumps({"Runners": [RUN_A.to_json()], "Workers": [A0.to_json()]}))
    flags = ("-init", str(init), "-endpoint", "/job", "-ttl", "600", "-H", "127.0.0.1:2", "-port-range", "10000-10009")
    with started("--open", *flags) as program, ConfigClient(program.url) as client:
        assert program.url.endswith("/job")
        view = client.resize(2)
        assert (view.number, view.workers[0], view.size, view.runners) == (2, A0, 2, (RUN_A,))
        assert 10000 < view.workers[1].port <= 10009
        with pytest.raises(ConfigError, match="hold 2 workers"):
            client.resize(3)
        httpx.post(str(client.url.copy_with(path="/stop")), trust_env=False)
        assert program.process.wait(30) == 0


def test_it_says_where_others_reach_it_if_it_listens_everywhere() -> None:
    with started("-host", "0.0.0.0") as program:
        assert program.url.startswith("http://127.0.0.1:")
        assert program.process.stdout is not None
        line = program.process.stdout.readline()
        assert line.startswith("listening on all addresses of this machine (0.0.0.0:")
        for url in re.findall(r"http://\S+", line):
            with ConfigClient(url, find_token(url)) as client:
                assert client.get() is None
    with started("--open") as program:
        assert program.process.stdout is not None
        assert "everybody who reaches this port can change and end the jobs" in program.process.stdout.readline()


def test_without_a_token_it_makes_one_that_its_owner_finds_also_after_a_restart() -> None:
    tokens, port = [], free_port("127.0.0.1")
    for _ in range(2):
        with started("-port", str(port)) as program:
            assert program.url == f"http://127.0.0.1:{port}/config", "on loopback unless told otherwise"
            assert program.process.stdout is not None
            line = program.process.stdout.readline()
            file = Path(line.removeprefix("requests need the token in ").strip())
            assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
            tokens.append(file.read_text())
            assert find_token(program.url) == tokens[-1] not in line
            check_token(program.url, tokens[-1], "")
            program.process.kill()
    assert tokens[0] == tokens[1]
    with started() as program:
        program.process.terminate()
        assert program.process.wait(30) == 0
        assert find_token(program.url) == "", "a port of the moment leaves no file"


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    with started("--token-file", str(file), env={"PLIANT_TOKEN": "from-env"}) as program:
        check_token(program.url, "from-file", "from-env")
    with started(env={"PLIANT_TOKEN": "from-env"}) as program:
        check_token(program.url, "from-env", "")


def check_token(url: str, right: str, wrong: str) -> None:
    with ConfigClient(url, right) as client:
        assert client.get() is None
    with ConfigClient(url, wrong) as client, pytest.raises(ConfigError, match="needs its token"):
        client.get()


def test_a_wrong_value_ends_the_process_with_exit_2() -> None:
    done = subprocess.run([*PROGRAM, "-port", "many"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pliant: -port 'many' is not a whole number: write digits, such as 9100\n"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("-port", "many"), "-port 'many'"),
        (("--port", "70000"), "-port 70000"),
        (("--port", "-1"), "-port -1"),
        (("-host", "256.1.1.1"), "256.1.1.1"),
        (("-ttl", "nan"), "-ttl 'nan'"),
        (("-endpoint", "config"), "-endpoint 'config'"),
        (("-endpoint", "/stop"), "-endpoint '/stop'"),
        (("-endpoint", "/{x}"), "-endpoint '/{x}'"),
        (("-init", "no-such-file"), "-init no-such-file"),
        (("--token-file", "no-such-file"), "--token-file no-such-file"),
        (("--tls-cert", "no-such-file"), "--tls-key"),
        (("-port", "0", "--tls-cert", "no-such-file", "--tls-key", "no-such-file"), "--tls-cert no-such-file"),
        (("-port", "0", "--state", "no-such-folder/state"), "no-such-folder/state"),
        (("-H", "a:b:c:d"), "-H"),
        (("-port-range", "5-1"), "-port-range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_values_are_one_line_and_exit_2(refused: Callable[..., str], flags: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*flags)


@pytest.mark.parametrize("content", ["{", "[]", '{"Workers": [{"IPv4": 1, "Port": 1}], "Runners": []}', "[" * 100_000])
def test_a_wrong_init_file(refused: Callable[..., str], tmp_path: Path, content: str) -> None:
    init = tmp_path / "init.json"
    init.write_text(content)
    assert f"-init {init}: " in refused("-init", str(init))
