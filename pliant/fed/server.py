"""The server of a federated job, as a process: `python -m pliant.fed.server FOLDER`.

Does the rounds that its folder's checkpoint has not seen, with executors that its keeper starts. Killed at any moment and
started again, it goes on to the same bits. SIGTERM: it ends after the round that it is in.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pliant.errors import CheckpointError, ConfigError, PliantError
from pliant.fed.history import History
from pliant.fed.job import FedJob
from pliant.fed.jobs import JobFolder, write_file
from pliant.fed.loop import simulate
from pliant.fed.pool import Pool, server_tls
from pliant.launch import signals

log = logging.getLogger(__name__)

STOPPED = 75
"""The exit code of a server that was told to stop before its job was done."""
PREDECESSOR_S = 30.0
"""How long a server that was killed may take to be gone."""


def say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True)


def serve(folder: JobFolder) -> int:
    """Do the job; the exit code."""
    job = folder.job()
    told: list[int] = []
    with _alone(folder), signals.handed_to(told.append):
        history = _run(folder, job, lambda: bool(told))
    final = f", accuracy {history.final.accuracy:.2%}" if history.final else ""
    say(f"{job.config.name} ended ({history.why}) after round {len(history.rounds)}{final}")
    return STOPPED if history.why == "stopped" else 0


def _run(folder: JobFolder, job: FedJob, stop: Callable[[], bool]) -> History:
    places, config = job.ground.places, job.config
    if places is None:
        return simulate(config, folder=folder.aggregator, say=say, stop=stop)
    tls = server_tls(job.ground.tls_certificate, job.ground.tls_key) if job.ground.tls_certificate else None
    noted = folder.path / "port"
    port = int(noted.read_text()) if noted.exists() else job.ground.port
    token = (folder.path / "token").read_text()
    with Pool(config, host=places.listen, port=port, token=token, tls=tls) as pool:
        write_file(noted, str(pool.port))
        return simulate(config, workers=pool, folder=folder.aggregator, say=say, stop=stop)


@contextlib.contextmanager
def _alone(folder: JobFolder) -> Iterator[None]:
    """Nobody else writes the record: a server whose keeper was killed is dying now."""
    lock = os.open(folder.path / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline_s = time.monotonic() + PREDECESSOR_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise CheckpointError(f"{folder.path}: another server of this job runs; stop it first") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


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
