"""The requests that the pages make with curl, made with curl, to servers that really run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked import PLIANT, Program, run
from gang import free_port
from patience import until

from pliant.jobs.client import find_server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here: scripts/system-packages installs it"),
]
DOCS = Path(__file__).parent.parent / "docs"


def shell(lines: list[str], folder: Path, **environ: str) -> list[Any]:
    """Return what each line with curl prints, which is JSON, when one shell reads them all."""
    script = [f"{line}\necho" if line.startswith("curl") else line for line in lines]
    text = "\n".join(["set -e", *script]).replace("curl ", "curl -sS --noproxy '*' ")
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def test_the_config_server_answers_as_the_page_on_running_says(tmp_path: Path) -> None:
    [block] = re.findall(r"^```sh\n(auth=.*?)^```", (DOCS / "running.md").read_text(), re.MULTILINE | re.DOTALL)
    one = {"Runners": [{"IPv4": "127.0.0.1", "Port": 38080}], "Workers": [{"IPv4": "127.0.0.1", "Port": 10000}]}
    (tmp_path / "view.json").write_text(json.dumps(one))
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    port = str(free_port("127.0.0.1"))
    words = [PLIANT, "config-server", "-port", port, "-init", "view.json"]
    with contextlib.closing(Program(words, cwd=tmp_path, env={**os.environ, **home})) as server:
        assert server.stdout.readline() == f"config server at http://127.0.0.1:{port}/config, version 1\n"
        auth, get, put, resize = block.replace("9100", port).splitlines()
        at_this_version = put.replace('"3"', '"1"')
        [before, *changed, after] = shell([auth, get, at_this_version, resize, get], tmp_path, **home)
    assert (before["Version"], [each["Port"] for each in before["Workers"]]) == (1, [10000])
    assert "error" not in json.dumps(changed)
    assert len(after["Workers"]) == 2


def test_the_job_server_answers_as_the_guide_of_the_cluster_says(tmp_path: Path) -> None:
    lines = re.findall(r"^    \$ (curl .+?)(?:  +#.*)?$", (DOCS / "cluster.md").read_text(), re.MULTILINE)
    assert len(lines) == 2
    (tmp_path / "digits.sh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "digits.sh").chmod(0o755)
    (tmp_path / "digits.yml").write_text("program: digits.sh\nname: digits\nreplicas: 1\nflags: [--plain]\n")
    state = ["--state", str(tmp_path / "state")]
    words = [PLIANT, "serve", "--devices", "cpu=1", "--port", "0", *state]
    with contextlib.closing(Program(words, cwd=tmp_path)) as server:
        server.stdout.readline()
        submitted = run([PLIANT, "submit", "digits.yml", *state], cwd=tmp_path, timeout=30)
        assert submitted.returncode == 0, submitted.stderr
        noted = json.loads((tmp_path / "state" / "server.json").read_text())
        environ = {"TOKEN": noted["token"], "URL": noted["url"]}
        listed, _ = shell(lines, tmp_path, **environ)
        assert [job["name"] for job in listed["jobs"]] == ["digits"]
        until(lambda: shell([lines[0]], tmp_path, **environ)[0]["jobs"][0]["state"] == "stopped", "the job is stopped")
        assert find_server(state=str(tmp_path / "state"), environ={}).url == noted["url"]
