"""`pliant serve` as a real process, for the tests beside this file."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
from patience import until

from pliant.elastic.client import ConfigClient
from pliant.jobs.client import JobsClient, ServerAddress, find_server
from pliant.jobs.schema import job_from_json
from pliant.jobs.status import JobStatus
from pliant.launch.processes import LivingWorker, RunnerState, read_runner_state

PROGRAM = Path(__file__).with_name("train_program.py")


class Serving:
    """A server, which may be killed and started again, and its jobs."""

    def __init__(self, state: Path, *flags: str) -> None:
        self.state = state
        self._flags = flags
        self._process: forked.Program | None = None
        self.client: JobsClient

    def start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
        words = [forked.PLIANT, "serve", "--state", self.state, "--port", "0", *self._flags]
        self._process = forked.Program(words, cwd=Path.cwd(), env=environ, stderr=self.state.with_suffix(".log"))
        line = self._process.stdout.readline()
        assert line.startswith("pliant serve at http://127.0.0.1:"), self.log
        self.client = JobsClient(find_server(state=str(self.state), environ={}))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.state.with_suffix(".log").read_text()

    def end(self, signum: int) -> str:
        """Signal the server, and wait for its end; what it printed."""
        assert self._process is not None
        self.client.close()
        self._process.send_signal(signum)
        said, _ = self._process.communicate(timeout=20)
        return said

    def client_of(self, token: str) -> JobsClient:
        """A client with another token than the owner's."""
        return JobsClient(ServerAddress(url=self.client.server.url, token=token))

    def submit(self, name: str, args: list[str], *, client: JobsClient | None = None, **more: Any) -> None:
        given = {
            "name": name,
            "program": str(PROGRAM),
            "directory": str(self.state.parent),
            "args": args,
            "replicas": 4,
        }
        (client or self.client).submit(job_from_json({**given, **more}))

    def job(self, name: str) -> JobStatus:
        return self.client.job(name)

    def events(self, name: str) -> list[str]:
        return [event.what for event in self.client.job(name).events]

    # --- what really runs ---

    def _runs(self, name: str) -> list[Path]:
        return sorted((self.state / "jobs" / name).glob("run-*"), key=lambda path: int(path.name[4:]))

    def runner_state(self, name: str) -> RunnerState | None:
        runs = self._runs(name)
        return read_runner_state(runs[-1] / "state.json") if runs else None

    def runner(self, name: str) -> int:
        return int(json.loads((self._runs(name)[-1] / "started.json").read_text())["pid"])

    def workers(self, name: str) -> list[LivingWorker]:
        """Processes of its workers that live."""
        state = self.runner_state(name)
        return [each for each in state.workers.values() if each.lives] if state is not None else []

    def members(self, name: str) -> int:
        """Workers on the roll of its config server: ready, and in the job from the next step's boundary on."""
        state = self.runner_state(name)
        if state is None:
            return 0
        with ConfigClient(state.config_server, (self._runs(name)[-1] / "token").read_text()) as client:
            return len(client.membership().members)

    def output(self, name: str) -> str:
        return (self.state / "jobs" / name / "log").read_text()

    def hash(self, name: str) -> str:
        """What the job printed at its end."""
        found = re.findall(r"hash (\w{64}) after", self.output(name))
        assert len(found) == 1, self.output(name)
        return str(found[0])

    def finished(self, name: str) -> JobStatus:
        """The job, once it is over; it must have finished."""
        status = until(lambda: (job := self.job(name)).is_over and job, f"{name}: {self.job(name)}")
        assert status.state == "finished", f"{status}\n{self.output(name)}\n{self.log}"
        return status

    def close(self) -> None:
        """Nothing may be left behind."""
        if self._process is None:
            return
        if self._process.poll() is not None:
            self.start()
        for job in self.client.jobs():
            self.client.stop(job.name, kill=True)
        until(lambda: all(job.is_over for job in self.client.jobs()), "the last jobs to be killed", 20)
        self.end(signal.SIGTERM)


@contextmanager
def serving(state: Path, *flags: str) -> Iterator[Serving]:
    server = Serving(state, *flags)
    server.start()
    try:
        yield server
    finally:
        server.close()
