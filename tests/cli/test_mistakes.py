"""A stranger's mistakes, on every command: one line that names the value and the remedy, an exit code, and no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints, version
from pathlib import Path

import pytest

from pliant.cli.main import REPRO_COMMANDS

Said = tuple[int, str, str]
MAIN = "from pliant.cli.main import main; main()"

MISTAKES = [
    # what click would answer with a page
    ("lst", "No such command 'lst'", "`pliant -h`"),
    ("plan", "Missing option '--replicas'", "`pliant plan -h`"),
    ("plan --replicas many --speed a=1", "'many' is not a valid integer", "`pliant plan -h`"),
    ("demo --nonsense", "No such option", "`pliant demo -h`"),
    ("resize", "Missing argument 'N'", "`pliant resize -h`"),
    ("forget a --now", "No such option", "`pliant forget -h`"),
    ("bench allreduce --repeat", "requires an argument", "`pliant bench allreduce -h`"),
    # numbers
    ("plan --replicas 0 --speed a=1", "--replicas 0", "1 or more"),
    ("plan --replicas 4 --speed a=nan", "a=nan", "TYPE=NUMBER"),
    ("plan --replicas 4 --speed a=1 --have a=inf", "a=inf", "TYPE=NUMBER"),
    ("plan --replicas 4 --speed =1", "'=1'", "TYPE=NUMBER"),
    ("plan --replicas 4 --speed a=1 --have b=1", "--have b", "add it to --speed"),
    ("plan --replicas 4 --speed a=1 --have a=1.5", "--have a=1.5", "whole number"),
    ("plan --replicas 4 --speed a=-1", "a=-1", "above 0"),
    ("sim --trace synthetic:x", "synthetic:x", "synthetic:JOBS"),
    ("sim --trace synthetic:2 --processes 1 --interval 0", "--interval 0", "above 0"),
    ("sim --trace synthetic:2 --processes 1 --restart -1", "--restart -1", "0 or more"),
    ("sim --trace synthetic:2 --processes 1 --seeds 0", "--seeds 0", "use 1 to 1,000"),
    ("sim --trace synthetic:2 --processes 1 --mtbf often", "'often'", "use 90s"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 0", "--mtbf '0'", "above 0"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 3d/a100", "'3d/a100'", "name one of these"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 3d/node", "'3d/node'", "--cluster v100=8x4"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 3d,4d", "'4d'", "give it once"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 3d --repair -1", "--repair '-1'", "use 90s"),
    ("sim --trace synthetic:2 --processes 1 --mtbf 3d --checkpoint-every x", "--checkpoint-every 'x'", "use 90s"),
    ("sim --trace synthetic:2 --processes -1", "--processes -1", "1 or more"),
    ("sim --trace synthetic:2 --processes 1 --policy nobody", "'nobody'", "use "),
    ("sim --trace synthetic:2 --processes 1 --cluster v100", "v100", "TYPE=DEVICES"),
    ("sim --trace synthetic:2 --processes 1 --reserve v100", "v100", "TYPE=N@BEGIN-END"),
    ("sim --trace synthetic:2 --tenants absent.yml", "absent.yml", "give a YAML file"),
    ("demo --epochs 0", "--epochs 0", "1 or more"),
    ("demo --timeout -1", "--timeout -1", "above 0"),
    ("demo --pace nan", "--pace nan", "0 to 60"),
    ("reproduce all report", "reproduce report", "there are "),
    ("fed run fed.yml --workers 99999999999", "'99999999999'", "1 to "),
    ("demo --path 9", "'9'", "number of workers"),
    ("demo --png picture.gif", "picture.gif", ".png"),
    ("doctor --replicas 0", "--replicas 0", "1 or more"),
    ("fed select --rounds 0", "--rounds 0", "1 or more"),
    ("fed select --seed -1", "--seed -1", "0 or more"),
    ("fed select --replay 0", "--replay 0", "1 to 1,000,000"),
    (f"fed select --replay {'9' * 5000}", "--replay 9", "1 to 1,000,000"),
    ("fed select --selector nobody", "nobody", "use "),
    ("bench traffic --listen 70000", "--listen 70000", "1 to 65535"),
    ("bench traffic --to 127.0.0.1:1 --seconds -1", "--seconds -1", "more than 0"),
    ("bench traffic --to example.org:1", "example.org:1", "give an address"),
    ("bench traffic", "bench traffic", "give either"),
    ("bench train -np 1,x", "1,x", "use numbers"),
    ("bench train --device tpu", "tpu", "cpu, cuda"),
    ("bench resize -np 1", "-np 1", "use 2 to"),
    ("bench fed --what else", "else", "select or simulate"),
    ("bench fed --clients 5 --pick 9", "--pick 9", "pick"),
    ("bench preemption --rate none", "--rate none", "100mbit"),
    ("bench priority --rate fast", "fast", "use "),
    ("bench allreduce --model absent", "absent", "resnet50"),
    ("bench allreduce --lab hosts=x", "hosts=x", "hosts=4"),
    ("run", "no program to run", "pliant run -np 4 train.py"),
    ("run -np two train.py", "-np 'two'", "such as 4"),
    ("run -timeout soon train.py", "-timeout 'soon'", "90s"),
    ("run -strategy STARS train.py", "'STARS'", "use one of"),
    ("run -H a:b:c:d train.py", "a:b:c:d", "such as 10.0.0.1:4"),
    ("run --policy nobody -np 1 train.py", "nobody", "use "),
    ("run --stall-timeout 0 train.py", "--stall-timeout '0'", "off"),
    ("run --dash x train.py", "--dash 'x'", "1 to 65535"),
    ("resize -1", "'-1'", "use 0 (ends the job) or more"),
    ("resize 2 --timeout x", "--timeout 'x'", "90s"),
    ("serve --port 0", "no devices to give", "--devices cpu=4"),
    ("serve --devices cpu", "'cpu'", "TYPE=NUMBER"),
    ("serve --devices cpu=-1", "cpu=-1", "whole number"),
    ("serve --devices cpu=4,cpu=2", "--devices 'cpu=2'", "each type once"),
    ("plan --replicas 4 --speed a=1,a=2", "--speed 'a=2'", "each type once"),
    ("serve --port 99999 --devices cpu=1", "--port 99999", "1 to 65535"),
    ("serve --port x --devices cpu=1", "--port 'x'", "such as 9200"),
    ("serve --policy srtf --devices cpu=1", "'srtf'", "easyscale-heter"),
    ("serve --on moon --devices cpu=1", "--on 'moon'", "local or ray"),
    ("serve --interval 0 --devices cpu=1", "--interval 0", "above 0"),
    ("serve --interval soon --devices cpu=1", "'soon'", "90s"),
    ("serve --host a=b --devices cpu=1", "a=b", "address"),
    ("serve --token-file absent --devices cpu=1", "absent", "holds the token"),
    ("serve --server http://127.0.0.1:1", "http://127.0.0.1:1", "add --reserve"),
    ("serve --reserve cpu", "'cpu'", "TYPE=NUMBER"),
    ("config-server -port many", "'many'", "such as 9100"),
    ("config-server -ttl long", "'long'", "90s"),
    ("dash --port x", "'x'", "such as 9300"),
    ("top --interval 0", "--interval 0", "100ms"),
    ("top run.jsonl --job nobody --once", "--job nobody", "there are: "),
    ("report", "which jobs?", "pliant report"),
    ("report run.jsonl --target x", "--target 'x'", "0.8"),
    ("reproduce nothing", "nothing", "there are "),
    ("reproduce kungfu-fgi8 --no-plot", "kungfu-fgi8", "did you mean kungfu-fig8?"),
    ("reproduce all --limit -1 --no-plot", "--limit -1", "minutes, or 0"),
    ("reproduce --quick --full kungfu-fig8 --no-plot", "--quick and --full", "one of them"),
    ("reproduce --steps -3 kungfu-fig8 --no-plot", "--steps -3", "1 or more"),
    ("lab down nobody", "'nobody'", "pliant lab up"),
    ("lab up --hosts 0", "0 hosts", "use 1 to"),
    ("lab up --rate fast", "'fast'", "1gbit"),
    ("remote-install", "needs to know the hosts", "-H HOST"),
    ("remote-install -H a --timeout x", "--timeout 'x'", "such as 4"),
    ("remote-install -H a --spec x --pip-args ' --dry-run", "--pip-args", "as for a shell"),
    # files
    ("sim --trace absent.csv", "absent.csv", "give a file"),
    ("sim --trace folder", "folder", "give a file"),
    ("sim --trace binary", "binary", "give a file"),
    ("sim --trace empty", "empty", "--format"),
    ("sim --trace synthetic:2 --plot absent/x.png", "--plot absent/x.png", "can be written"),
    ("sim --trace synthetic:2 --plot x.gifx", "--plot x.gifx", ".png"),
    ("run --dash 99999 train.py", "--dash '99999'", "1 to 65535"),
    ("sim --trace deep.json", "deep.json", "nested"),
    ("sim --trace hollow.json", "hollow.json", "list of jobs"),
    ("sim --trace synthetic:2 --table folder", "--table folder", "can be written"),
    ("submit absent.yml", "absent.yml", "give a YAML file"),
    ("submit folder", "folder", "give a YAML file"),
    ("submit binary", "binary", "give a YAML file"),
    ("submit broken.yml", "broken.yml:2", "not closed?"),
    ("submit program.py", "program.py:", "`program: program.py`"),
    ("fed run program.py", "program.py:", "a program"),
    ("run -f program.py", "program.py:", "a program"),
    ("submit empty", "empty", "key: value"),
    ("fed run absent.yml", "absent.yml", "give a YAML file"),
    ("fed run job.yml", "job.yml: a training job", "participants: N"),
    ("fed run bad-job.yml", "bad-job.yml: a training job", "`pliant run -f bad-job.yml` or `pliant submit bad-job.yml`"),
    ("fed run", "which job?", "pliant fed run"),
    ("fed run --resume nobody", "'nobody'", "there has been none yet"),
    ("fed select --replay absent.json", "absent.json", "give a replay"),
    ("fed select --replay binary", "binary", "give a replay"),
    ("fed select --trace absent.csv --replay 5", "absent.csv", "give "),
    ("report absent/folder", "absent/folder", "give "),
    ("report folder", "folder", "give "),
    ("report binary", "binary", "give "),
    ("bench priority --validate absent.json", "absent.json", "--json FILE"),
    ("bench priority --validate hollow.json", "hollow.json", "--json FILE"),
    ("bench priority --hosts binary", "binary: it is not text", "use a list"),
    ("bench allreduce --model binary", "binary", "resnet50"),
    ("run absent.py", "absent.py", "check the name"),
    ("run folder", "folder", "is a directory"),
    ("run -np 2 job.yml", "'job.yml'", "`pliant run -f job.yml`"),
    ("run -hostfile absent train.py", "-hostfile absent", "slots=N"),
    ("run -hostfile binary train.py", "-hostfile binary", "slots=N"),
    ("run -logfile binary/x train.py", "-logfile", "can be written"),
    ("run --replay absent train.py", "absent", "--record"),
    ("run --record folder train.py", "folder is a directory", "run.jsonl"),
    ("run --record binary/run.jsonl train.py", "binary is not a directory", "give another"),
    ("run --checkpoint-dir binary train.py", "binary is not a directory", "give another"),
    ("run --tensorboard binary/deep/er train.py", "binary is not a directory", "give another"),
    ("config-server -init absent.json -port 0", "absent.json", "another file"),
    ("config-server -init broken.yml -port 0", "broken.yml", "config server"),
    ("config-server --token-file absent -port 0", "--token-file absent", "holds the token"),
    ("config-server --token-file empty -port 0", "--token-file empty", "write the token"),
    ("config-server --tls-cert binary --tls-key binary -port 0", "--tls-cert binary", "PEM"),
    ("resize 2 --config-server etcd://h1:70000/job", "70000", "such as etcd://"),
    ("serve --devices cpu=1 --state binary", "--state", "directory"),
    ("dash absent.jsonl", "absent.jsonl", "give a "),
    ("top absent.jsonl --once", "absent.jsonl", "give a "),
    ("doctor absent.py:build", "absent.py", "name one"),
    ("doctor folder:build", "folder", "name one"),
    ("reproduce report absent", "absent", "reproduce all"),
    ("reproduce kungfu-fig8 --no-plot --out binary", "--out binary", "can be written"),
    ("reproduce kungfu-fig8 --replot --out folder", "kungfu-fig8.json", "run `pliant reproduce"),
]


@pytest.fixture
def littered(tmp_path: Path) -> Iterator[Path]:
    """Files that are not what they should be."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "program.py").write_text('"""What it does."""\nimport pliant\n')
    (tmp_path / "fed.yml").write_text("participants: 2\ndata: {kind: digits}\n")
    (tmp_path / "broken.yml").write_text("a: [1,\n")
    (tmp_path / "job.yml").write_text("program: train.py\nreplicas: 1\n")
    (tmp_path / "bad-job.yml").write_text("program: absent.py\nreplicas: many\nparticipant: 2\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "hollow.json").write_text('{"bench": "priority", "cells": [{}]}')
    (tmp_path / "run.jsonl").write_text('{"kind": "step", "step": 3, "time_s": 1.0}\n')
    return tmp_path


@pytest.mark.parametrize(("line", "value", "remedy"), MISTAKES, ids=lambda value: value[:60])
def test_a_mistake_is_one_line(pliant: Callable[..., Said], littered: Path, line: str, value: str, remedy: str) -> None:
    code, out, err = pliant(*line.split(" "))
    assert err.startswith("pliant: "), err
    assert err.count("\n") == 1, err
    assert value in err
    assert remedy in err
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    "line",
    ["top http://127.0.0.1:1 --once", "top http://127.0.0.1:1/config --once", "dash http://127.0.0.1:1",
     "list --server http://127.0.0.1:1", "stop x --server http://127.0.0.1:1"],
)  # fmt: skip
def test_a_server_that_is_not_there_is_a_failure_and_one_line(pliant: Callable[..., Said], line: str) -> None:
    code, out, err = pliant(*line.split(" "))
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("pliant: ")
    assert "http://127.0.0.1:1" in err
    assert "start one with `pliant serve" in err or "is it running" in err


def test_a_port_in_use_is_one_line(pliant: Callable[..., Said]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (
            ("config-server", "-host", "127.0.0.1", "-port", port),
            ("serve", "--devices", "cpu=1", "--port", port),
            ("dash", "--port", port),
            ("serve", "--devices", "cpu=1", "--port", "0", "--dash", port),
            ("run", "--dash", port, __file__),
        ):
            code, _, err = pliant(*words)
            assert code == 2, err
            assert err.splitlines()[-1].startswith("pliant: "), err
            assert "Address already in use" in err.splitlines()[-1]


def test_a_package_that_is_not_installed_is_told_with_its_remedy(
    pliant: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    code, out, err = pliant("sim", "--trace", "synthetic:2", "--plot", "x.png")
    assert (code, out) == (2, "")
    assert err == (
        "pliant: plots need matplotlib: pip install 'pliant[examples]', or ask for none (without --plot, or with --no-plot)\n"
    )


def test_help_and_version(pliant: Callable[..., Said]) -> None:
    assert pliant("--version") == (0, f"pliant {version('pliant')}\n", "")
    code, out, err = pliant()
    assert (code, err) == (2, "")
    assert "reproduce" in out
    assert pliant("bench")[0] == 2
    assert pliant("plan", "-h")[0] == 0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """The program in a process of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(*words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", MAIN, *words]
        processes.append(subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environ, cwd=tmp_path))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_reader_that_leaves_is_no_traceback(started: Callable[..., subprocess.Popen[bytes]]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open("/dev/full", "wb") as device, open(writes, "wb") as pipe:
        listing = started("reproduce", "--list", stdout=pipe.fileno())
        full = started("reproduce", "--list", stdout=device.fileno())
    assert listing.communicate(timeout=60)[1] == b""
    assert listing.returncode == 128 + signal.SIGPIPE
    assert (
        full.communicate(timeout=60)[1]
        == b"pliant: what was written: No space left on device; make room, as `df -h` shows\n"
    )
    assert full.returncode == 1


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_is_no_traceback(
    started: Callable[..., subprocess.Popen[bytes]], number: signal.Signals, code: int
) -> None:
    process = started("bench", "traffic", "--listen", "0", "--seconds", "60")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"listening on ")
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == code


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "from pliant.cli.program import main; main()", "list"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("name", REPRO_COMMANDS)
def test_without_pliant_repro_its_commands_say_how_to_install_it(
    pliant: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("pliant.cli.main.entry_points", lambda group: EntryPoints())
    code, out, err = pliant(name, "--anything", "1")
    assert (code, out) == (2, "")
    assert f"`pliant {name}` is part of pliant-repro, which is not installed: pip install" in err
    code, out, _ = pliant("--help")
    assert code == 0
    assert name not in out.split()
