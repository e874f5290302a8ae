"""The status of jobs: the answers of the HTTP API as pydantic models, and the same made from the rows of the store.

Knows nothing of how jobs are run, so that clients and the page load little. A newer server may add fields.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from pliant.errors import ENDED_EXIT, ConfigError
from pliant.json_text import parse_json
from pliant.record import MAX_LINE_BYTES

if TYPE_CHECKING:
    from pliant.jobs.store import ForegroundRun, JobStore

State = Literal["waiting", "starting", "running", "put-off", "finished", "failed", "stopped", "interrupted"]
"""`interrupted`: the job's processes are gone and no server runs that would start them again."""
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset({"finished", "failed", "stopped"})
TERMINATED = 143
"""Exit code of a runner or coordinator that was sent SIGTERM, as when its machine is shut down."""
TAIL_BYTES = 4 * MAX_LINE_BYTES
"""The progress of a federated job is looked for in so much of the end of its record."""
BLOCK_BYTES = 1 << 18
"""So much of it is read at once."""
MAX_TEXT_BYTES = 1 << 20
"""Size of one part of a log."""


# --- answers of the API ---


class _Answer(BaseModel):
    """An answer of the server; a newer server may add fields."""

    model_config = ConfigDict(extra="allow", frozen=True)


class FederatedProgress(_Answer):
    """Progress of a federated job."""

    round: int
    rounds: int
    """Rounds that the job shall have."""
    participants: int
    clock_s: float
    """Virtual time."""
    accuracy: float | None
    """Result of the last test."""
    workers: tuple[str, ...]


class JobStatus(_Answer):
    """State of a job."""

    name: str
    state: State
    kind: Literal["train", "federated"] = "train"
    scheduled: bool = True
    """If false, the job runs in a foreground process (`pliant run`, `pliant fed run`) that registered itself."""
    replicas: int
    devices: dict[str, int]
    """Devices that the job has now, by type."""
    workers: int
    """Processes that train now."""
    step: int | None
    """Steps done; of a federated job, rounds."""
    steps_per_s: float | None
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    why: str
    """The last decision about the job, in words."""
    folder: str = ""
    """Folder with the job's log, record and checkpoints, on the server's machine."""
    record: str = ""
    """Path of the job's record; empty where it writes none."""
    tenant: str = ""
    """Who submitted it; empty: the server's owner."""
    federated: FederatedProgress | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in ENDED


class JobEvent(_Answer):
    """One entry in the history of a job."""

    at: float
    """Unix time."""
    what: str
    why: str = ""
    devices: dict[str, int] = {}


class JobDetail(JobStatus):
    """State and history of a job."""

    events: tuple[JobEvent, ...]
    spec: dict[str, Any] | None = None
    """The job as it was submitted; None for a foreground process."""


class JobList(_Answer):
    """All jobs, the first submitted first."""

    jobs: list[JobStatus]


class LogPart(_Answer):
    """A part of a job's output."""

    text: str
    end: int
    """Byte at which the next part begins."""
    over: bool
    """Whether the job has ended and nothing comes after `end`."""


class TenantStatus(_Answer):
    """What a tenant is entitled to, and what its jobs have now; devices by type."""

    name: str
    weight: float
    priority: int
    quota: dict[str, int]
    share: dict[str, float]
    """Devices that it has while all tenants can use as many as there are."""
    has: dict[str, int]
    borrowed: dict[str, int]
    """Those that it has beyond its share, which others leave idle."""
    running: int
    """Number of its jobs that have devices."""
    waiting: int


class ClusterStatus(_Answer):
    """Devices of the cluster by type, and which job has which."""

    devices: dict[str, int]
    reserved: dict[str, int]
    free: dict[str, int]
    jobs: dict[str, dict[str, int]]
    policy: str = ""
    policy_error: str = ""
    """Why the policy has not decided when it was last asked: the decision before stays. Empty if it has."""
    tenants: list[TenantStatus] = []
    """Those who share the cluster by `--tenants`."""


class ReservedDevices(_Answer):
    """The devices that are reserved now, and how long it took until they were free."""

    reserved: dict[str, int]
    took_s: float


# --- from the store ---


def state_after(code: int | None, ending: str, *, finished: bool = False) -> State | None:
    """Return the state in which the end of a run leaves its job; None if the job goes on from its checkpoint.

    `code` is None if nobody has seen the end; `ending` says why the run was told to end, if it was; `finished` means that
    the program is known to have come to its end.
    """
    if finished or (code == 0 and not ending):
        return "finished"
    if ending == "stopped" or (code == ENDED_EXIT and not ending):
        return "stopped"
    is_lost = code is None or code < 0 or code == TERMINATED
    return None if is_lost or code in (0, ENDED_EXIT) else "failed"


def stored_statuses(
    rows: Iterable[Mapping[str, Any]], runs: Iterable[ForegroundRun], directory: Path
) -> list[JobStatus]:
    """Return the status of the jobs in the store of `directory`, and of foreground runs that belong to none of them."""
    runs = list(runs)
    alive, known, found = {run.name for run in runs}, set(), []
    for row in rows:
        known.add(row["name"])
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
            is_gone = row["state"] in ("starting", "running") and row["name"] not in alive
            found.append(stored_status({**row, **_last_end(row, directory)} if is_gone else row))
    return found + [run_status(run) for run in runs if run.name not in known]


def _last_end(row: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return what has become of a job whose processes are gone, as the keeper of its last run has seen it."""
    name = row["name"]
    try:
        end = json.loads((directory / "jobs" / name / f"run-{row['run']}" / "exit.json").read_text())
        state = state_after(
            end["code"], row["ending"], finished=end["code"] == 0 and kind_of(row["spec"]) == "federated"
        )
    except (OSError, ValueError, KeyError):  # in the foreground there is no keeper, and a keeper may be killed
        state = None
    if state is None:
        why = f"its processes are gone: `pliant submit --resume {name}` goes on from its checkpoint, if it has one"
        return {"state": "interrupted", "why": why, "asked": {}}
    why = f"failed with exit code {end['code']}: see its log" if state == "failed" else state
    return {"state": state, "why": why, "exit_code": end["code"], "ended_s": end["at_s"], "asked": {}}


def stored_status(row: Mapping[str, Any]) -> JobStatus:
    """Return the status of a job as the store knows it."""
    spec, folder = row["spec"], row["folder"]
    federated = federated_progress(spec, folder)
    return JobStatus(
        name=row["name"],
        state=row["state"],
        kind=kind_of(spec),
        scheduled=row["scheduled"],
        replicas=spec["replicas"] if federated is None else federated.participants,
        devices={kind: count for kind, count in row.get("asked", {}).items() if count},
        workers=0,
        step=row.get("step") if federated is None else federated.round,
        steps_per_s=None,
        submitted_s=row["submitted_s"],
        started_s=row.get("started_s"),
        ended_s=row.get("ended_s"),
        exit_code=row.get("exit_code"),
        why=row.get("why", ""),
        folder=folder,
        record=record_path(spec, folder),
        tenant=row.get("tenant", ""),
        federated=federated,
    )


def stored_detail(status: JobStatus, store: JobStore) -> JobDetail:
    """Return a status with the history and the specification that the store has."""
    job = store.job(status.name)
    events = tuple(JobEvent.model_validate(event) for event in store.events(status.name))
    return JobDetail(**status.model_dump(), events=events, spec=None if job is None else job["spec"])


def run_status(run: ForegroundRun) -> JobStatus:
    return JobStatus(
        name=run.name, state="running", kind="federated" if run.kind == "federated" else "train", scheduled=False,
        replicas=0, devices={}, workers=0, step=None, steps_per_s=None, submitted_s=run.started_s, started_s=run.started_s,
        ended_s=None, exit_code=None, why=f"runs in the foreground, pid {run.pid}: {run.command}", record=run.record,
    )  # fmt: skip


def kind_of(spec: Mapping[str, Any]) -> Literal["train", "federated"]:
    """Return the kind of a job, given its specification as JSON."""
    return "federated" if spec.get("kind") == "federated" else "train"


def record_path(spec: Mapping[str, Any], folder: str) -> str:
    """Return the path of a job's record, given its specification as JSON and its folder."""
    if kind_of(spec) == "federated":
        return f"{folder}/aggregator/record.jsonl"
    return spec.get("record") or f"{folder}/record.jsonl"


def federated_progress(spec: Mapping[str, Any], folder: str) -> FederatedProgress | None:
    """Return the progress of a federated job, from the end of its record; None for other kinds."""
    if kind_of(spec) != "federated":
        return None
    number, clock_s, accuracy = 0, 0.0, None
    for line in _lines_from_end(Path(record_path(spec, folder))):
        if number and line.startswith(b'{"kind": "round"'):
            continue  # an older one, which may be long
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            fact = parse_json(line)
            if fact.get("kind") == "round" and not number:
                number, clock_s = int(fact["round"]), float(fact["clock_s"])
            elif fact.get("kind") == "test" and accuracy is None:
                accuracy = float(fact["accuracy"])
        if number and accuracy is not None:
            break
    config, placement = spec["config"], spec["placement"]
    return FederatedProgress(
        round=number,
        rounds=config["rounds"],
        participants=config["participants"],
        clock_s=clock_s,
        accuracy=accuracy,
        workers=tuple(placement["workers"]),
    )


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines at the end of a file, the last one first; the first and the last of them may be cut short."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        stop, rest = max(0, at - TAIL_BYTES), b""
        while at > stop:
            begin = max(stop, at - BLOCK_BYTES)
            file.seek(begin)
            rest, *lines = (file.read(at - begin) + rest).split(b"\n")
            yield from reversed(lines)
            at = begin
        yield rest


def check_forgettable(status: JobStatus) -> None:
    """Raise ConfigError if the job has not ended."""
    if not status.is_over and status.state != "interrupted":
        raise ConfigError(f"{status.name} is {status.state}: `pliant stop {status.name}` ends it first")


# --- logs ---


def log_path(status: JobStatus) -> Path:
    """Return the file with the job's output.

    Raises:
        ConfigError: the job runs in the foreground and prints to its own terminal.
    """
    if not status.folder:
        raise ConfigError(f"{status.name} runs in the foreground: its output is on its own terminal")
    return Path(status.folder) / ("aggregator/log" if status.kind == "federated" else "log")


def read_log(status: JobStatus, begin: int) -> LogPart:
    """Return what the job has printed from byte `begin` on, cut at the end of a character."""
    over = status.is_over or status.state == "interrupted"
    try:
        with log_path(status).open("rb") as file:
            file.seek(begin)
            data = file.read(MAX_TEXT_BYTES)
    except OSError:
        data = b""  # the job has not been started yet
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    is_last = over and len(data) < MAX_TEXT_BYTES
    text = decoder.decode(data, final=is_last)
    incomplete, _ = decoder.getstate()
    return LogPart(text=text, end=begin + len(data) - len(incomplete), over=is_last)
