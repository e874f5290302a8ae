"""The server of a federated job, as a process: `python -m pliant.fed.jobs.server FOLDER`.

Does the rounds that its folder's checkpoint has not seen, with executors that its keeper starts. Killed at any moment and
started again, it goes on to the same bits. SIGTERM: it ends after the round that it is in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pliant.errors import CheckpointError, ConfigError, PliantError
from pliant.fed.coordinator import Coordinator, server_tls
from pliant.fed.data.build import build_task
from pliant.fed.history import History
from pliant.fed.jobs.folders import JobFolder, locked, write_file
from pliant.fed.jobs.job import FedJob, rounds_text
from pliant.fed.rounds.loop import FederatedLoop, default_device
from pliant.fed.rounds.storage import JobRecorder, Watch
from pliant.fed.trainer import InProcess
from pliant.fed.workers import coordinator_with_workers
from pliant.launch import signals

log = logging.getLogger(__name__)

STOPPED = 75
"""The exit code of a server that was told to stop before its job was done."""
PREDECESSOR_S = 30.0
"""How long a server that was killed may take to be gone."""


def say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True)


def serve(folder: JobFolder) -> int:
    """Do the job with the executors that the keeper starts; the exit code."""
    job = folder.job()
    told: list[int] = []
    with _alone(folder), signals.handed_to(told.append), _pool(folder, job) as pool:
        history = _rounds(folder, job, pool, lambda: bool(told), say)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its work is done: whoever stops it now gets to know how it ended
    final = f"; accuracy {history.final.accuracy:.2%}" if history.final else ""
    say(f"{job.config.name} ended: {rounds_text(len(history.rounds), history.why, job.config)}{final}")
    return STOPPED if history.why == "stopped" else 0


@contextlib.contextmanager
def _pool(folder: JobFolder, job: FedJob) -> Iterator[Coordinator | None]:
    """Where executors come to; None: none are wanted."""
    places, ground = job.ground.places, job.ground
    if places is None:
        yield None
        return
    tls = server_tls(ground.tls_certificate, ground.tls_key) if ground.tls_certificate else None
    noted = folder.path / "port"
    again = noted.exists()  # executors come to where the last server was, which may not be quite gone
    port = int(noted.read_text()) if again else ground.port
    token = (folder.path / "token").read_text()
    with Coordinator(job.config, host=places.listen, port=port, secret=bytes.fromhex(token), tls=tls) as pool:
        write_file(noted, str(pool.port))
        yield pool


def run(
    folder: JobFolder, *, stop: Callable[[], bool], say: Callable[[str], None], watch: Watch | None = None
) -> History:
    """Do the job in this process, executors and all: nobody restarts it."""
    job = folder.job()
    ground = job.ground
    with _alone(folder), contextlib.ExitStack() as stack:
        pool = None
        if ground.workers:
            pool = stack.enter_context(
                coordinator_with_workers(
                    job.config,
                    ground.workers,
                    log=folder.path / "worker" / "log",
                    tls_cert=ground.tls_certificate,
                    tls_key=ground.tls_key,
                    server_host=ground.host,
                    port=ground.port,
                    user=ground.ssh_user,
                )
            )
        return _rounds(folder, job, pool, stop, say, watch)


def _rounds(
    folder: JobFolder,
    job: FedJob,
    pool: Coordinator | None,
    stop: Callable[[], bool],
    say: Callable[[str], None],
    watch: Watch | None = None,
) -> History:
    made = build_task(job.config)
    if pool is not None:
        pool.expect_task(made)
    workers = pool or InProcess(made, default_device(job.config))
    return FederatedLoop(
        job.config, made, workers, JobRecorder(folder.aggregator, say=say, watch=watch), stop=stop
    ).run()


def _alone(folder: JobFolder) -> contextlib.AbstractContextManager[int]:
    """Nobody else writes the record: a server whose keeper was killed is dying now."""
    refusal = CheckpointError(f"{folder.path}: another server of this job runs; stop it first")
    return locked(folder.path / "server.lock", PREDECESSOR_S, refusal)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("pliant").setLevel(logging.INFO)
    folder = JobFolder(Path(sys.argv[1]))
    try:
        os.chdir(folder.job().directory)
        return serve(folder)
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        return 2
    except PliantError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
