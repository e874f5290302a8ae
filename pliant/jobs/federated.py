"""The coordinator of a federated job, as a process: `python -m pliant.jobs.federated FOLDER`.

Does the rounds that the checkpoint in the folder does not have yet, with workers that end with this process. If it is killed
at any moment and started again, it goes on to the same bits. On SIGTERM it ends after the round that it is in.

    FOLDER/job.json       the job as submitted
           aggregator/    log, record.jsonl, training_perf, checkpoint
           worker/log     output of all workers
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pliant.errors import CheckpointError, ConfigError, PliantError
from pliant.fed.config import name_stored_preset
from pliant.fed.data.build import build_task
from pliant.fed.history import History
from pliant.fed.jobfile import FederatedJob, rounds_text
from pliant.fed.rounds.loop import FederatedLoop, default_device
from pliant.fed.rounds.storage import JobRecorder, Watch
from pliant.fed.trainer import InProcess
from pliant.fed.workers import coordinator_with_workers
from pliant.files import hold_lock
from pliant.jobs.status import TERMINATED
from pliant.jobs.store import registered
from pliant.json_text import parse_json
from pliant.launch import events

PREDECESSOR_S = 30.0
"""How long a coordinator that was killed may take to be gone."""


@dataclass(frozen=True, slots=True)
class FederatedFolder:
    """The files of one federated job."""

    path: Path

    @property
    def aggregator(self) -> Path:
        return self.path / "aggregator"

    @property
    def log(self) -> Path:
        return self.aggregator / "log"

    @property
    def record(self) -> Path:
        return self.aggregator / "record.jsonl"

    @property
    def start_point(self) -> str:
        """Where the job would go on, in words."""
        has_checkpoint = (self.aggregator / "checkpoint.safetensors").exists()
        return "from its checkpoint" if has_checkpoint else "from its beginning"

    @property
    def worker_log(self) -> Path:
        """The output of all workers."""
        return self.path / "worker" / "log"

    def job(self) -> FederatedJob:
        """Read the job; raises ConfigError if the folder holds none."""
        try:
            stored = parse_json((self.path / "job.json").read_bytes())
            return FederatedJob.model_validate(stored | {"config": name_stored_preset(stored["config"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "its job.json is damaged, or of another version"
            raise ConfigError(f"{self.path}: {why}; give the folder of a federated job") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other coordinators of this job out; waits for one that was killed to be gone.

        Raises:
            CheckpointError: another coordinator of this job runs.
        """
        refusal = CheckpointError(f"{self.path}: another coordinator of this job runs; stop it first")
        with hold_lock(self.path / "lock", refusal, wait_s=PREDECESSOR_S):
            yield


def run_job(
    folder: FederatedFolder, *, stop: Callable[[], bool], say: Callable[[str], None], watch: Watch | None = None
) -> History:
    """Do the job's remaining rounds in this process, with workers that this process starts.

    `stop` is asked after each round, `say` is called with lines for people and `watch` with facts.
    """
    job = folder.job()
    placement = job.placement
    with folder.locked(), contextlib.ExitStack() as stack:
        coordinator = None
        if placement.workers:
            coordinator = stack.enter_context(
                coordinator_with_workers(
                    job.config,
                    placement.workers,
                    log=folder.worker_log,
                    tls_cert=placement.tls_certificate,
                    tls_key=placement.tls_key,
                    server_host=placement.host,
                    port=placement.port,
                    user=placement.ssh_user,
                )
            )
        task = build_task(job.config)
        if coordinator is not None:
            coordinator.expect_task(task)
        workers = coordinator or InProcess(task, default_device(job.config))
        recorder = JobRecorder(folder.aggregator, say=say, watch=watch)
        return FederatedLoop(job.config, task, workers, recorder, stop=stop).run()


def _say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True)


def _coordinate(folder: FederatedFolder) -> int:
    """Run the job as the scheduler has it; returns the exit code."""
    job = folder.job()
    signalled: list[int] = []
    known = registered("", [job.name], kind="federated", name=job.name, record=str(folder.record))
    with known, events.handle_signals(signalled.append):
        history = run_job(folder, stop=lambda: bool(signalled), say=_say)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done: the exit code must tell how it ended
    final = f"; accuracy {history.final.accuracy:.2%}" if history.final else ""
    _say(f"{job.name} ended: {rounds_text(len(history.rounds), history.why, job.config)}{final}")
    return TERMINATED if history.why == "stopped" else 0


def main() -> int:
    """Run the coordinator of the folder that is the first argument."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("pliant").setLevel(logging.INFO)
    folder = FederatedFolder(Path(sys.argv[1]))
    try:
        os.chdir(folder.job().directory)
        return _coordinate(folder)
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        return 2
    except PliantError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
