"""Traces of jobs: published traces, synthetic ones, and the jobs that a simulation makes of them.

The first line of a file tells its format:

philly      Microsoft Philly, cleaned (timestamp, duration, num_gpus, cluster), or its raw cluster_job_log (JSON)
helios      SenseTime Helios cluster_log.csv (gpu_num, submit_time, duration, vc)
pai         Alibaba PAI pai_task_table.csv (v2020; published without a header line)
openb       Alibaba openb_pod_list*.csv (v2023)
pollux      workloads of Pollux (name, time, application, num_replicas, batch_size); needs its step times
easyscale   EasyScale's job list (name, time, application, max_parallelism, ...)
synthetic   no file: `synthetic` or `synthetic:JOBS` or `synthetic:JOBS:WEEKS`, with Philly's sizes and durations

The step times of applications are those of EasyScale's figure 12, for one batch size each; other batch sizes are assumed
to take proportionally long. A job that may mix device types runs the kernels that make this possible (D1+D2), any other
job those of D1.
"""

from __future__ import annotations

import bisect
import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import ConfigError, reason
from pliant.sched.cluster import Cluster, ScheduledJob, SteadyWork
from pliant.sched.planner import DeviceType, Types

if TYPE_CHECKING:
    from pliant.sched.pollux import Application


# --- jobs of a trace ---

WEEK_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class ApplicationModel:
    """One of EasyScale's applications."""

    batch: int
    """Samples of one replica with which the times were measured."""
    samples: float
    """Samples of an epoch as the artifact counts them: a hundredth of the data set."""
    fixed_s: Mapping[str, float]
    """Seconds of one replica's step on each device type under D1."""
    mixing_s: Mapping[str, float]
    """Seconds of one replica's step on each device type under D1+D2."""
    share: int
    """How many of the artifact's jobs are of this application."""
    mixes: bool
    """Whether the artifact lets it use several device types, because D2 costs it next to nothing."""


def _model(batch: int, samples: float, share: int, mixes: bool, *times: tuple[float, float]) -> ApplicationModel:
    kinds = ("v100", "p100", "t4")
    fixed, mixing = zip(*times, strict=True)
    return ApplicationModel(
        batch, samples / 100, dict(zip(kinds, fixed, strict=True)), dict(zip(kinds, mixing, strict=True)), share, mixes
    )


MODELS = {
    "shufflenetv2": _model(128, 1_280_000, 3, False, (0.2167, 0.4697), (0.3310, 0.8722), (0.4022, 0.6782)),
    "resnet50": _model(64, 1_280_000, 14, False, (0.2688, 0.5860), (0.4393, 1.1595), (0.6591, 1.2230)),
    "vgg19": _model(32, 1_280_000, 2, False, (0.3924, 1.1327), (0.6514, 2.0655), (0.9439, 2.2755)),
    "yolov3": _model(8, 16_551, 7, False, (0.4590, 0.5491), (0.7169, 0.9833), (0.8133, 1.0355)),
    "ncf": _model(1024, 4_970_845, 4, True, (0.0105, 0.0107), (0.0130, 0.0127), (0.0110, 0.0118)),
    "bert": _model(8, 88_641, 15, True, (0.4406, 0.4390), (0.6007, 0.5998), (0.6819, 0.6661)),
    "electra": _model(8, 88_641, 20, True, (0.4418, 0.4433), (0.6023, 0.5958), (0.6853, 0.6654)),
    "swintransformer": _model(32, 1_280_000, 3, True, (0.4114, 0.4289), (0.5945, 0.5941), (0.5974, 0.6153)),
}
PREFERENCES = {"v100": 52, "p100": 13, "t4": 3}
"""How many of the artifact's jobs prefer each device type."""
ALIASES = {"v100m16": "v100", "v100m32": "v100"}
"""Device types that count as another type if no speed is given for them."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One job of a trace as recorded. Fields that the trace does not have keep their default."""

    name: str
    submitted_s: float
    devices: int
    duration_s: float = 0.0
    """Duration on `devices` devices of the preferred type; 0 if the work is given by `epochs`."""
    tenant: str = ""
    application: str = ""
    batch: int = 0
    """Samples of one replica; in Pollux' workloads, samples of all replicas together."""
    epochs: float = 0.0
    mixed: bool | None = None
    preferred: str = ""


def jobs_of(
    entries: Sequence[TraceEntry],
    cluster: Cluster,
    *,
    seed: int = 0,
    speeds: Mapping[str, float] | None = None,
    profiles: Mapping[str, Application] | None = None,
) -> list[ScheduledJob]:
    """Make the jobs of a trace, in its order. Missing applications and preferred types are drawn with `seed`.

    Raises:
        ConfigError: an application or a device type is unknown.
    """
    chance = random.Random(seed)
    kinds = tuple(kind for kind, count in cluster.counts.items() if count)
    wishes = [PREFERENCES.get(ALIASES.get(kind, kind), 0) for kind in kinds]
    if not any(wishes):
        wishes = [cluster.counts[kind] for kind in kinds]
    drawn = [(name, model.share) for name, model in MODELS.items()]
    jobs = []
    for entry in entries:
        if profiles is not None and entry.application in profiles:
            jobs.append(
                profiles[entry.application].make_job(
                    entry.name, entry.submitted_s, entry.devices, entry.batch, kinds[0]
                )
            )
            continue
        name = entry.application or chance.choices([n for n, _ in drawn], [share for _, share in drawn])[0]
        preferred = entry.preferred if entry.preferred in kinds else chance.choices(kinds, wishes)[0]
        jobs.append(_steady(entry, name, preferred, kinds, tuple((speeds or {}).items())))
    return jobs


def _steady(
    entry: TraceEntry, application: str, preferred: str, kinds: tuple[str, ...], speeds: tuple[tuple[str, float], ...]
) -> ScheduledJob:
    if application not in MODELS:
        raise ConfigError(
            f"job {entry.name}: application {application!r} is unknown: use one of {', '.join(MODELS)}, or give --profiles"
        )
    model = MODELS[application]
    mixed = model.mixes if entry.mixed is None else entry.mixed
    types = _types(application, mixed, entry.batch or model.batch, kinds, speeds)
    speed = next(kind.speed for kind in types if kind.name == preferred)
    steps = entry.duration_s * speed
    if not entry.duration_s:
        steps = math.ceil(entry.epochs * model.samples / ((entry.batch or model.batch) * entry.devices))
    return ScheduledJob(
        name=entry.name,
        submitted_s=entry.submitted_s,
        replicas=entry.devices,
        types=types,
        work=SteadyWork(max(float(steps), 1e-9)),
        preferred=preferred,
        mixed=mixed,
    )


@lru_cache(maxsize=1 << 12)
def _types(
    application: str, mixed: bool, batch: int, kinds: tuple[str, ...], speeds: tuple[tuple[str, float], ...]
) -> Types:
    """Return the device types with the job's speeds. Equal jobs share one tuple, which speeds up the planner's cache."""
    model, given = MODELS[application], dict(speeds)
    times = model.mixing_s if mixed else model.fixed_s
    found = []
    for kind in kinds:
        known = ALIASES.get(kind, kind)
        if kind in given:
            speed = given[kind]
        elif known in times:
            speed = model.batch / batch / times[known]
        else:
            raise ConfigError(f"no speed is known of device type {kind!r}: give it, as in --speed {kind}=2.5")
        found.append(DeviceType(kind, speed))
    return tuple(sorted(found, key=lambda each: -each.speed))


PHILLY_JOBS = 82_247
PHILLY_WEEKS = 15
PHILLY_DEVICES = {1: 76_627, 2: 1_818, 4: 1_870, 8: 1_643, 16: 199, 32: 67}
PHILLY_QUANTILES = ((0.0, 1.0), (0.1, 61.0), (0.5, 1_144.0), (0.9, 11_266.0), (0.99, 254_884.0), (1.0, 1_500_000.0))
"""Quantiles of a job's seconds. Between them the logarithm is interpolated; the two ends are assumed."""


def synthetic(num_jobs: int = PHILLY_JOBS, *, weeks: float = PHILLY_WEEKS, seed: int = 0) -> list[TraceEntry]:
    """Make a trace with the sizes and durations of Microsoft's Philly: more jobs by day, fewer at weekends."""
    if num_jobs < 1 or not weeks > 0:
        raise ConfigError(f"a synthetic trace of {num_jobs} jobs in {weeks} weeks: use 1 job and some time, or more")
    chance = random.Random(seed)
    times = sorted(_draw_time(chance, weeks * WEEK_S) for _ in range(num_jobs))
    sizes = chance.choices(list(PHILLY_DEVICES), list(PHILLY_DEVICES.values()), k=num_jobs)
    return [
        TraceEntry(
            f"job-{number}", round(time, 3), size, round(_duration(chance.random()), 3), f"vc{chance.randrange(15)}"
        )
        for number, (time, size) in enumerate(zip(times, sizes, strict=True))
    ]


def like_easyscale(num_jobs: int = 62, *, seed: int = 0) -> list[TraceEntry]:
    """Make jobs like those of EasyScale's list: with its applications, sizes, preferences and time span.

    The number of epochs only has the right order of magnitude: 2 to 20 if an epoch has the images of ImageNet, else 20 to
    200, uniform on a logarithmic scale.
    """
    chance = random.Random(seed)
    entries = []
    for number in range(num_jobs):
        name = chance.choices(list(MODELS), [model.share for model in MODELS.values()])[0]
        least = 2 if MODELS[name].samples == 12_800 else 20
        entries.append(
            TraceEntry(
                f"{name}-{number}", round(chance.uniform(115, 4814)), chance.choices((32, 16, 8, 4), (38, 18, 11, 1))[0],
                application=name, batch=MODELS[name].batch, epochs=round(least * 10 ** chance.random()),
                preferred=chance.choices(list(PREFERENCES), list(PREFERENCES.values()))[0],
            )
        )  # fmt: skip
    return sorted(entries, key=lambda entry: entry.submitted_s)


def _draw_time(chance: random.Random, span_s: float) -> float:
    while True:
        time = chance.random() * span_s
        day, hour = int(time // 86400) % 7, time % 86400 / 3600
        busy = (0.65 + 0.35 * math.sin((hour - 9) / 24 * 2 * math.pi)) * (0.6 if day >= 5 else 1.0)
        if chance.random() < busy:
            return time


def _duration(quantile: float) -> float:
    place = min(max(bisect.bisect_right(PHILLY_QUANTILES, (quantile, math.inf)), 1), len(PHILLY_QUANTILES) - 1)
    (low, short), (high, long) = PHILLY_QUANTILES[place - 1], PHILLY_QUANTILES[place]
    part = (quantile - low) / (high - low)
    return math.exp(math.log(short) * (1 - part) + math.log(long) * part)


# --- files ---

PAI_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file, in the order of submission."""

    form: str
    entries: tuple[TraceEntry, ...]
    notes: tuple[str, ...] = ()
    """Remarks on what was left out or assumed."""


def read(source: str, form: str = "", *, seed: int = 0, limit: int = 0) -> Trace:
    """Read a trace from a file, or generate a synthetic one; keep the first `limit` jobs if that is not 0.

    Raises:
        ConfigError: there is no such file, or it is not a trace.
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
        form = form or _recognise_format(path, columns)
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
    return _finish_trace(form, entries, notes)


def _finish_trace(form: str, entries: list[TraceEntry], notes: list[str]) -> Trace:
    named = {entry.name: entry for entry in entries}
    if form == "easyscale" and len(named) < len(entries):
        # The artifact keeps its jobs in a dictionary by name.
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
    if form != "pollux":  # the policies of Pollux depend on the order of the file
        entries.sort(key=lambda entry: entry.submitted_s)
    return Trace(form, tuple(entries), tuple(notes))


def _recognise_format(path: Path, columns: list[str]) -> str:
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
    """Parse a number of seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        # The traces name no time zone, so none is applied: every day has 86400 s.
        return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def _philly(row: Row, number: int) -> TraceEntry:
    name, tenant = row.get("name") or f"philly-{number}", row.get("cluster", "")
    return TraceEntry(name, _seconds(row["timestamp"]), int(row["num_gpus"]), float(row["duration"]), tenant)


def _philly_log(path: Path, text: str) -> Iterator[Row]:
    """Convert the raw log to rows of the cleaned form: the sum of all attempts' times, the GPUs of the last attempt."""
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


def _helios(row: Row, number: int) -> TraceEntry:
    name = row.get("job_id") or f"helios-{number}"
    return TraceEntry(
        name, _seconds(row["submit_time"]), int(float(row["gpu_num"])), float(row["duration"]), row.get("vc", "")
    )


def _pai(row: Row, number: int) -> TraceEntry:
    """Convert a row of PAI: `plan_gpu` is in hundredths of a GPU per instance; the sum is rounded up to whole GPUs."""
    start, end = float(row["start_time"]), float(row["end_time"])
    gpus = math.ceil(float(row["inst_num"]) * float(row["plan_gpu"]) / 100 - 1e-9)
    return TraceEntry(row["job_name"], start, gpus, end - start)


def _openb(row: Row, number: int) -> TraceEntry:
    created, deleted = float(row["creation_time"]), float(row["deletion_time"])
    started = float(row.get("scheduled_time") or created)
    return TraceEntry(row["name"], created, int(row["num_gpu"]), deleted - started, row.get("qos", ""))


def _pollux(row: Row, number: int) -> TraceEntry:
    return TraceEntry(
        row["name"],
        float(row["time"]),
        int(row["num_replicas"]),
        application=row["application"],
        batch=int(row["batch_size"]),
    )


def _easyscale(row: Row, number: int) -> TraceEntry:
    return TraceEntry(
        row["name"], float(row["time"]), int(row["max_parallelism"]), application=row["application"],
        batch=int(row["batch_size"]), epochs=float(row["epochs"]),
        # One published row says 40, which the artifact reads as true.
        mixed=bool(int(row["enable_heterogeneous_deterministic"])), preferred=row["preferred_gpu"],
    )  # fmt: skip


FORMS: dict[str, Callable[[Row, int], TraceEntry]] = {
    "philly": _philly,
    "helios": _helios,
    "pai": _pai,
    "openb": _openb,
    "pollux": _pollux,
    "easyscale": _easyscale,
}
