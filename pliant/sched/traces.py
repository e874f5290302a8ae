"""Traces of real clusters, read as they are published; which one a file is, its first line says.

philly      Microsoft Philly, cleaned (timestamp, duration, num_gpus, cluster), or its raw cluster_job_log (JSON)
helios      SenseTime Helios cluster_log.csv (gpu_num, submit_time, duration, vc)
pai         Alibaba PAI pai_task_table.csv (v2020; published without a header line)
openb       Alibaba openb_pod_list*.csv (v2023)
pollux      workloads of Pollux (name, time, application, num_replicas, batch_size); needs its step times
easyscale   EasyScale's job list (name, time, application, max_parallelism, ...)
synthetic   no file: `synthetic` or `synthetic:JOBS` or `synthetic:JOBS:WEEKS`, with Philly's sizes and durations
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pliant.errors import ConfigError, reason
from pliant.sched.workloads import PHILLY_JOBS, PHILLY_WEEKS, Entry, synthetic

PAI_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file, in the order of submission."""

    form: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""


def read(source: str, form: str = "", *, seed: int = 0, limit: int = 0) -> Trace:
    """The trace in a file, or a synthetic one; its first `limit` jobs, if that is not 0.

    Raises:
        ConfigError: no such file, or nothing that can be read as a trace.
    """
    if form and form not in FORMS:
        raise ConfigError(f"--format {form!r} is unknown: use one of {', '.join(FORMS)}")
    if limit < 0:
        raise ConfigError(f"--limit {limit}: use 1 or more, or leave it out")
    trace = _synthetic(source, seed) if source.split(":")[0] == "synthetic" else _from_file(Path(source), form)
    return replace(trace, entries=trace.entries[:limit]) if limit else trace


def _synthetic(source: str, seed: int) -> Trace:
    words = source.split(":")[1:]
    try:
        jobs = int(words[0]) if words else PHILLY_JOBS
        weeks = float(words[1]) if len(words) > 1 else float(PHILLY_WEEKS)
    except ValueError:
        raise ConfigError(f"--trace {source!r}: use synthetic, synthetic:JOBS or synthetic:JOBS:WEEKS") from None
    entries = tuple(synthetic(jobs, weeks=weeks, seed=seed))
    return Trace("synthetic", entries, (f"generated with Philly's sizes and durations, seed {seed}",))


def _from_file(path: Path, form: str) -> Trace:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {reason(error)}; give a file, or synthetic:JOBS") from None
    rows: Iterable[Row]
    if text.lstrip()[:1] in ("[", "{"):
        form, rows = "philly", _philly_log(path, text)
    else:
        lines = text.splitlines()
        columns = [name.strip() for name in lines[0].split(",")] if lines else []
        form = form or _recognised(path, columns)
        headless = form == "pai" and "job_name" not in columns
        rows = csv.DictReader(lines, fieldnames=PAI_COLUMNS if headless else None)
    take = FORMS[form]
    entries, unusable = [], 0
    for number, row in enumerate(rows):
        try:
            entry = take(row, number)
        except KeyError as error:
            raise ConfigError(f"--trace {path}: no column {error} for format {form}; say another --format") from None
        except (ValueError, TypeError):
            entry = None
        if entry is None or entry.devices < 1 or (entry.duration_s <= 0 and not entry.application):
            unusable += 1
        else:
            entries.append(entry)
    if not entries:
        raise ConfigError(f"--trace {path}: no job in it that uses a GPU for a time; is it of format {form}?")
    notes = (
        [f"{unusable} of {unusable + len(entries)} rows have no GPU, no duration, or cannot be read"]
        if unusable
        else []
    )
    return _finished(form, entries, notes)


def _finished(form: str, entries: list[Entry], notes: list[str]) -> Trace:
    named = {entry.name: entry for entry in entries}
    if form == "easyscale" and len(named) < len(entries):
        # The artifact keeps its jobs in a dictionary.
        notes.append(f"{len(entries)} rows have {len(named)} names; of equal names the last counts, as in the artifact")
        entries = list(named.values())
    elif len(named) < len(entries):
        entries = [replace(entry, name=f"{entry.name}#{number}") for number, entry in enumerate(entries)]
    if form not in ("pollux", "easyscale"):
        first_s = min(entry.submitted_s for entry in entries)
        entries = [replace(entry, submitted_s=entry.submitted_s - first_s) for entry in entries]
        notes.append(
            "application and preferred device type of each job are drawn, in the shares of EasyScale's job list"
        )
        notes.append("a recorded duration counts as that on the preferred type with one device for each replica")
    if form != "pollux":  # whose policies go by the order of the file
        entries.sort(key=lambda entry: entry.submitted_s)
    return Trace(form, tuple(entries), tuple(notes))


def _recognised(path: Path, columns: list[str]) -> str:
    found = set(columns)
    marks = {
        "pollux": {"application", "num_replicas", "batch_size"},
        "easyscale": {"application", "max_parallelism", "epochs"},
        "helios": {"gpu_num", "submit_time", "duration"},
        "openb": {"num_gpu", "creation_time", "deletion_time"},
        "pai": {"job_name", "plan_gpu", "inst_num"},
        "philly": {"timestamp", "duration", "num_gpus"},
    }
    for form, needed in marks.items():
        if needed <= found:
            return form
    if len(columns) == len(PAI_COLUMNS):
        return "pai"
    raise ConfigError(
        f"--trace {path}: its columns {columns[:12]} are of no known format; say --format {'|'.join(FORMS)}"
    )


def _seconds(text: str) -> float:
    """A number, or a date and time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        # No zone is named, so none is applied: a day has 86400 s, and no hour is missing in spring.
        return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def _philly(row: Row, number: int) -> Entry:
    name, tenant = row.get("name") or f"philly-{number}", row.get("cluster", "")
    return Entry(name, _seconds(row["timestamp"]), int(row["num_gpus"]), float(row["duration"]), tenant)


def _philly_log(path: Path, text: str) -> Iterator[Row]:
    """Rows of the cleaned form out of the raw log: the times of all attempts together, the GPUs of the last one."""
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--trace {path}: {error}; give Philly's cluster_job_log") from None
    except RecursionError:
        raise ConfigError(f"--trace {path}: nested too deeply; give Philly's cluster_job_log") from None
    if not isinstance(listed, list) or not all(isinstance(job, dict) for job in listed):
        raise ConfigError(f"--trace {path}: no list of jobs; give Philly's cluster_job_log")
    for job in listed:
        total_s, gpus = 0.0, 0
        for attempt in job.get("attempts") or []:
            start, end = attempt.get("start_time"), attempt.get("end_time")
            if start and end and "None" not in (start, end):
                total_s += _seconds(end) - _seconds(start)
                gpus = sum(len(machine.get("gpus", [])) for machine in attempt.get("detail") or []) or gpus
        yield {
            "name": str(job.get("jobid", "")),
            "timestamp": str(job.get("submitted_time", "")),
            "duration": str(total_s),
            "num_gpus": str(gpus),
            "cluster": str(job.get("vc", "")),
        }


def _helios(row: Row, number: int) -> Entry:
    name = row.get("job_id") or f"helios-{number}"
    return Entry(
        name, _seconds(row["submit_time"]), int(float(row["gpu_num"])), float(row["duration"]), row.get("vc", "")
    )


def _pai(row: Row, number: int) -> Entry:
    """`plan_gpu` is hundredths of a GPU for each instance; parts of GPUs are rounded up to whole ones."""
    start, end = float(row["start_time"]), float(row["end_time"])
    gpus = math.ceil(float(row["inst_num"]) * float(row["plan_gpu"]) / 100 - 1e-9)
    return Entry(row["job_name"], start, gpus, end - start)


def _openb(row: Row, number: int) -> Entry:
    created, deleted = float(row["creation_time"]), float(row["deletion_time"])
    started = float(row.get("scheduled_time") or created)
    return Entry(row["name"], created, int(row["num_gpu"]), deleted - started, row.get("qos", ""))


def _pollux(row: Row, number: int) -> Entry:
    return Entry(
        row["name"],
        float(row["time"]),
        int(row["num_replicas"]),
        application=row["application"],
        batch=int(row["batch_size"]),
    )


def _easyscale(row: Row, number: int) -> Entry:
    return Entry(
        row["name"], float(row["time"]), int(row["max_parallelism"]), application=row["application"],
        batch=int(row["batch_size"]), epochs=float(row["epochs"]),
        # One published row says 40, which the artifact takes for true.
        mixed=bool(int(row["enable_heterogeneous_deterministic"])), preferred=row["preferred_gpu"],
    )  # fmt: skip


FORMS: dict[str, Callable[[Row, int], Entry]] = {
    "philly": _philly,
    "helios": _helios,
    "pai": _pai,
    "openb": _openb,
    "pollux": _pollux,
    "easyscale": _easyscale,
}
