"""Every flag of `pliant run` arrives where it should, in its single-dash and its long form."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import pliant.cli.main
import pliant.cli.run
from pliant.cluster import Host, PortRange
from pliant.errors import ConfigError
from pliant.launch.plan import RunOptions


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    """The command sets up logging for its process, which here is the tests'."""
    ours = logging.getLogger("pliant")
    handlers, level, propagate = list(ours.handlers), ours.level, ours.propagate
    yield
    for handler in set(ours.handlers) - set(handlers):
        ours.removeHandler(handler)
        handler.close()
    ours.setLevel(level)
    ours.propagate = propagate


build = pliant.cli.main.build  # before a test has put another in its place


@functools.cache
def app() -> typer.Typer:
    return build()


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunOptions:
    seen: list[RunOptions] = []
    monkeypatch.setattr(pliant.cli.run, "_launch", lambda options: seen.append(options) or 0)
    app()(["run", *arguments], standalone_mode=False)
    return seen[0]


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["-np", "4"], "np", 4),
        (["--np", "4"], "np", 4),
        (["-H", "10.0.0.1:4,[::1]:2"], "hosts", (Host("10.0.0.1", 4), Host("::1", 2))),
        (["-self", "10.0.0.1"], "self_host", "10.0.0.1"),
        (["-nic=eth0"], "nic", "eth0"),
        (["-port-range", "20000-20010"], "port_range", PortRange(20000, 20010)),
        (["-port", "4000"], "port", 4000),
        (["-strategy", "multi_star"], "strategy", "MULTI_STAR"),
        (["-timeout", "1m30s"], "timeout_s", 90.0),
        (["--grace", "250ms"], "grace_s", 0.25),
        (["--rendezvous-timeout", "1m"], "rendezvous_timeout_s", 60.0),
        (["--heartbeat-timeout", "3s"], "heartbeat_timeout_s", 3.0),
        (["--stall-timeout", "90s"], "stall_timeout_s", 90.0),
        (["--stall-timeout", "off"], "stall_timeout_s", 0.0),
        (["-logdir", "logs"], "logdir", "logs"),
        (["-q"], "quiet", True),
        (["-q=true"], "quiet", True),
        (["-q=false"], "quiet", False),
        (["-v=false"], "show_output", False),
        (["--no-v"], "show_output", False),
        (["-allow-nvlink"], "allow_nvlink", True),
        (["-w"], "watch", True),
        (["-w", "--no-warm"], "warm", False),
        (["--warm"], "warm", True),
        (["--plain"], "plain", True),
        (["--max-restarts", "0"], "max_restarts", 0),
        (["--determinism", "d2"], "determinism", "D2"),
        (["--order", "Tree"], "order", "tree"),
        (["--checkpoint-dir", "ck"], "checkpoint_dir", str(Path.cwd() / "ck")),
        (["--checkpoint-dir", "/ck", "--checkpoint-every", "50"], "checkpoint_every", 50),
        (["--checkpoint-dir", "/ck", "--resume", "auto"], "resume", "auto"),
        (["--checkpoint-dir", "/ck", "--resume", "ck/7"], "resume", str(Path.cwd() / "ck/7")),
        (["--resize-schedule", "20:4,10:2"], "resize_schedule", ((10, 2), (20, 4))),
        (["--resize-schedule", "10:2"], "watch", True),
        (["-config-server", "http://x:1/config"], "config_server", "http://x:1/config"),
        (["-builtin-config-port", "9100"], "builtin_config_port", 9100),
        (["-w", "-k"], "keep", True),
        (["-debug-port", "8080"], "debug_port", 8080),
        (["-delay", "2s"], "delay_s", 2.0),
        (["-t0", "12.5"], "start_time_s", 12.5),
        (["-init-version", "7"], "init_version", 7),
        (["-w", "-config-server", "http://x", "-init-version=-1"], "init_version", -1),
        (["--secret-file", "f"], "secret_file", "f"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_flag_arrives(monkeypatch: pytest.MonkeyPatch, flags: list[str], field: str, value: object) -> None:
    assert getattr(parsed(monkeypatch, *flags, "prog"), field) == value


def test_all_that_follows_the_program_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(monkeypatch, "-np", "2", "python3", "x.py", "-np", "9", "--np=8", "-q=true", "--", "-w", "-H")
    assert options.program == ("python3", "x.py", "-np", "9", "--np=8", "-q=true", "--", "-w", "-H")
    assert options.np == 2
    assert not options.quiet
    module = parsed(monkeypatch, "-np=2", "-q", "-m", "package.train", "-m", "--np=8", "--", "-q")
    assert (module.program, module.np) == (("-m", "package.train", "-m", "--np=8", "--", "-q"), 2)


@pytest.mark.parametrize(
    ("words", "forks"),
    [
        (["-w"], True),
        (["-w", "--no-warm"], False),
        (["-w", "--plain"], False),
        (["-w", "--plain", "--warm"], True),
        (["-w", "--independent"], True),
        ([], False),
        (["--warm"], True),
    ],
)
def test_who_trains_and_may_grow_is_forked(monkeypatch: pytest.MonkeyPatch, words: list[str], *, forks: bool) -> None:
    assert parsed(monkeypatch, *words, "p.py").forks_workers is forks
    assert not parsed(monkeypatch, "-w", "p.py", "--help").forks_workers, "it only prints, and needs no torch"


def test_the_artifacts_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "-q -np 8 -strategy STAR -H 10.0.0.1:4,10.0.0.2:4 -nic eth0 python3 adapt.py --kf-optimizer=sync-sgd"
    options = parsed(monkeypatch, *line.split())
    assert options.program == ("python3", "adapt.py", "--kf-optimizer=sync-sgd")
    line = "-np 32 -H 10.0.0.1:1,10.0.0.2:31 -strategy STAR -nic eth0 -port-range 11100-11200 bench -model r -mode par"
    assert parsed(monkeypatch, *line.split()).program == ("bench", "-model", "r", "-mode", "par")


def test_a_hostfile_overrides_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\n10.0.0.1 slots=4\nnode2\n")
    for flag in ("-hostfile", "--hostfile"):
        options = parsed(monkeypatch, "-H", "10.9.9.9:1", flag, str(file), "prog")
        assert options.hosts == (Host("10.0.0.1", 4), Host("node2", 1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-np", "0"], "-np 0: use 1 or more"),
        (["-np", "two"], "-np 'two' is not a whole number"),
        (["-hostfile", "/no/such/file"], "-hostfile /no/such/file: No such file"),
        (["-H", "10.0.0.1:x"], "-H: '10.0.0.1:x' is not"),
        (["-port-range", "9-8"], "-port-range 9-8: the end lies before the begin"),
        (["-port-range", "all"], "-port-range 'all' is not <begin>-<end>"),
        (["-timeout", "soon"], "-timeout 'soon' is not a duration"),
        (["--max-restarts", "many"], "--max-restarts 'many' is not a whole number"),
        (["--determinism", "D3"], "--determinism 'D3' is not known: use one of D0, D1, D2"),
        (["--resume", "auto"], "--resume auto needs a directory for checkpoints: add --checkpoint-dir DIR"),
        (["--checkpoint-every", "5"], "--checkpoint-every 5 needs a directory for checkpoints: add --checkpoint-dir"),
        (["--resize-schedule", "10"], "--resize-schedule: '10' is not <step>:<workers>"),
        (["--policy", "grow"], "--policy grow: there is no 'grow'; use grow-batch-size"),
        (["--policy", "provision:speed=3"], "'speed=3' is no option of it"),
        (["-logfile", "/proc/none/log"], "-logfile /proc/none/log"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(monkeypatch, *flags, "prog")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-program"], "program 'no-such-program' does not exist"),
        (["-H", "192.0.2.9:4", "true"], "this machine is not in the host list 192.0.2.9"),
        (["-np", "3", "-H", "127.0.0.1:2", "true"], "-np 3: not enough capacity"),
        (["-strategy", "SPIRAL", "true"], "-strategy 'SPIRAL' is not known"),
        (["-nic", "nic9", "true"], "-nic nic9: this interface does not exist"),
        ([], "no program to run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_program_ends_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(pliant.cli.main, "build", app)
    monkeypatch.setattr("sys.argv", ["pliant", "run", "-q", *arguments])
    with pytest.raises(SystemExit) as caught:
        pliant.cli.main.main()
    told = capfd.readouterr().err
    assert caught.value.code == 2
    assert message in told
    assert told.count("\n") == 1
