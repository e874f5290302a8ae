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
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import ConfigError, reason, refuse_file
from pliant.sched.cluster import Cluster, ScheduledJob, SteadyWork
from pliant.sched.planner import DeviceType, Types
from pliant.sched.rows import Row, check_header, decode, read_header, read_rows, seconds_of_date

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
    slowness: float = 1.0
    """How many times as long it takes as these values say."""


JITTER_GAPS = 10.0
"""A perturbed job comes up to this many mean gaps between submissions earlier or later."""
ESTIMATE_ERROR = 0.2
"""Standard deviation of the logarithm of a perturbed job's slowness: for two jobs of three it is between 0.82 and 1.22."""


def perturb(entries: Sequence[TraceEntry], seed: int) -> list[TraceEntry]:
    """Return the same jobs as they might have come another time: in another order, and not as long as was estimated."""
    chance = random.Random(f"perturbed {seed}")
    times = [entry.submitted_s for entry in entries]
    most_s = JITTER_GAPS * (max(times) - min(times)) / len(entries)
    moved = [
        replace(
            entry,
            submitted_s=round(max(0.0, entry.submitted_s + chance.uniform(-most_s, most_s)), 3),
            slowness=math.exp(chance.gauss(0.0, ESTIMATE_ERROR)),
        )
        for entry in entries
    ]
    return sorted(moved, key=lambda entry: entry.submitted_s)


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
            application = profiles[entry.application]
            job = application.make_job(entry.name, entry.submitted_s, entry.devices, entry.batch, kinds[0])
            job.work.slowness, job.tenant = entry.slowness, entry.tenant
            jobs.append(job)
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
        work=SteadyWork(max(float(steps), 1e-9) * entry.slowness, slowness=entry.slowness),
        preferred=preferred,
        mixed=mixed,
        tenant=entry.tenant,
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


MAX_JOBS, MAX_WEEKS = 1_000_000, 520
"""Limits of synthetic traces."""
PHILLY_JOBS = 82_247
PHILLY_WEEKS = 15
PHILLY_DEVICES = {1: 76_627, 2: 1_818, 4: 1_870, 8: 1_643, 16: 199, 32: 67}
PHILLY_QUANTILES = ((0.0, 1.0), (0.1, 61.0), (0.5, 1_144.0), (0.9, 11_266.0), (0.99, 254_884.0), (1.0, 1_500_000.0))
"""Quantiles of a job's seconds. Between them the logarithm is interpolated; the two ends are assumed."""


def synthetic(num_jobs: int = PHILLY_JOBS, *, weeks: float = PHILLY_WEEKS, seed: int = 0) -> list[TraceEntry]:
    """Make a trace with the sizes and durations of Microsoft's Philly: more jobs by day, fewer at weekends."""
    if not (1 <= num_jobs <= MAX_JOBS and 0 < weeks <= MAX_WEEKS):
        raise ConfigError(
            f"a synthetic trace of {num_jobs:.10g} jobs in {weeks:g} weeks: use 1 to {MAX_JOBS:,} jobs, and more than 0 up to "
            f"{MAX_WEEKS} weeks"
        )
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

MAX_DEVICES = 65_536
"""Devices that one job may ask for, as in a job file."""
MAX_DURATION_S = 366 * 86400.0
"""Recorded durations are a year at most: longer ones are milliseconds or dates, and policies with rounds would take hours."""
MAX_BATCH, MAX_EPOCHS = 10**9, 10**6
NAMED_ROWS = 5
"""Skipped rows whose lines are named."""
PAI_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file, in the order of submission."""

    form: str
    entries: tuple[TraceEntry, ...]
    notes: tuple[str, ...] = ()
    """Remarks on what was left out or assumed."""
    unused_rows: int = 0
    """Rows of jobs that had no device, or no time on it, as published traces have them."""
    skipped_rows: int = 0
    """Wrong rows that were left out because the user asked for that."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How the rows of a format are read."""

    columns: tuple[str, ...]
    """Columns that a file must have."""
    take: Callable[[Row, int], TraceEntry]
    """Makes a job of a row, which has a number; mistakes are left in the row."""
    unique: bool = True
    """Whether each row is a job of its own, so that no two may have one name."""


def read(
    source: str,
    form: str = "",
    *,
    seed: int = 0,
    limit: int = 0,
    skip_bad: bool = False,
    profiles: Mapping[str, Application] | None = None,
) -> Trace:
    """Read a trace from a file, or generate a synthetic one; keep the first `limit` jobs if that is not 0.

    If `skip_bad`, wrong rows are left out and counted. Applications are looked up in `profiles` and in `MODELS`.

    Raises:
        ConfigError: there is no such file, it is not a trace, or some of its rows are wrong; with a line for each mistake.
    """
    if form and form not in FORMS:
        raise ConfigError(f"--format {form!r} is unknown: use one of {', '.join(FORMS)}")
    if limit < 0:
        raise ConfigError(f"--limit {limit}: use 1 or more, or leave it out")
    if source.split(":")[0] == "synthetic":
        trace = _synthetic(source, seed)
    else:
        trace = _from_file(Path(source), form, skip_bad=skip_bad, profiles=profiles)
    return replace(trace, entries=trace.entries[:limit]) if limit else trace


def _synthetic(source: str, seed: int) -> Trace:
    words = source.split(":")[1:]
    try:
        jobs = int(words[0]) if words else PHILLY_JOBS
        weeks = float(words[1]) if len(words) > 1 else float(PHILLY_WEEKS)
    except ValueError:
        raise ConfigError(f"--trace {source!r:.60}: use synthetic, synthetic:JOBS or synthetic:JOBS:WEEKS") from None
    entries = tuple(synthetic(jobs, weeks=weeks, seed=seed))
    return Trace("synthetic", entries, (f"generated with Philly's sizes and durations, seed {seed}",))


def _from_file(path: Path, form: str, *, skip_bad: bool, profiles: Mapping[str, Application] | None) -> Trace:
    try:
        text = decode(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {reason(error)}; give a file, or synthetic:JOBS") from None
    form, rows = _open_rows(path, text, form)
    format_, known = FORMS[form], _known_applications(form, profiles)
    entries: list[TraceEntry] = []
    mistakes: list[str] = []
    bad: list[int] = []
    unused, lines = 0, dict[str, int]()
    for number, row in enumerate(rows):
        entry = None if row.mistakes else format_.take(row, number)
        if entry is not None and not row.mistakes:
            _check_entry(row, entry, known, profiles or {}, lines if format_.unique else {})
        if entry is None or row.mistakes:
            bad.append(row.line)
            mistakes += [f"{path}:{row.line}: {mistake}" for mistake in row.mistakes]
        elif entry.devices < 1 or (entry.duration_s <= 0 and not entry.application):
            unused += 1
        else:
            entries.append(entry)
    if mistakes and not skip_bad:
        total = len(bad) + unused + len(entries)
        remedy = f"{len(bad)} of {total} rows are wrong: mend them, or add --skip-bad to go on without them"
        raise refuse_file(mistakes, remedy if entries else "")
    if not entries:
        skipped = f", and {len(bad)} wrong rows were skipped" if bad else ""
        raise ConfigError(f"{path}:1: no job in it that uses a GPU for a time{skipped}; is it of format {form}?")
    notes = [f"{unused} of {unused + len(bad) + len(entries)} rows have no GPU, or no duration"] if unused else []
    if bad:
        named = ", ".join(map(str, bad[:NAMED_ROWS])) + (", ..." if len(bad) > NAMED_ROWS else "")
        notes.append(f"{len(bad)} wrong rows were skipped: line{'' if len(bad) == 1 else 's'} {named}")
    return replace(_finish_trace(form, entries, notes), unused_rows=unused, skipped_rows=len(bad))


def _known_applications(form: str, profiles: Mapping[str, Application] | None) -> set[str] | None:
    """Return the applications that jobs may have; None if they cannot be known, because Pollux' profiles are not given."""
    if form == "pollux" and profiles is None:
        return None
    return {*MODELS, *(profiles or {})}


def _check_entry(
    row: Row,
    entry: TraceEntry,
    known: set[str] | None,
    profiles: Mapping[str, Application],
    lines: dict[str, int],
) -> None:
    """Remember in the row what is wrong with its job; `lines` are those of the names before it."""
    if (before := lines.setdefault(entry.name, row.line)) != row.line:
        row.refuse(f"{entry.name!r:.60} is the name of the job in line {before}, too: give each job its own")
    if entry.application and known is not None and entry.application not in known:
        row.refuse(
            f"application {entry.application!r:.60} is unknown: use one of {', '.join(sorted(known))}, or give --profiles"
        )
    if entry.application in profiles:
        try:
            profiles[entry.application].check_job(entry.devices, entry.batch)
        except ConfigError as error:
            row.refuse(str(error))


def _open_rows(path: Path, text: str, form: str) -> tuple[str, Iterable[Row]]:
    """Return the format of a file and its rows; raises ConfigError if its beginning shows that it is no trace."""
    if not text.strip():
        raise ConfigError(f"{path}:1: the file is empty: give a trace; --format says which it is")
    if text.lstrip()[:1] in ("[", "{"):
        return "philly", _philly_log(path, text)
    columns = read_header(text)
    form = form or _recognise_format(path, columns)
    if form == "pai" and "job_name" not in columns:
        return form, read_rows(text, PAI_COLUMNS)
    if wrong := check_header(columns, FORMS[form].columns, f"format {form}"):
        mistakes = [f"{path}:1: {each}" for each in wrong]
        raise refuse_file(mistakes, f"its columns are {', '.join(columns)[:200]}; say another --format, or mend them")
    return form, read_rows(text)


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
    """Return the format with the most of its columns in the file, if those that mark it are there."""
    found = set(columns)
    for form, needed in MARKS.items():
        if needed <= found:
            return form
    if len(columns) == len(PAI_COLUMNS):
        return "pai"
    near = max(FORMS, key=lambda form: len(found & set(FORMS[form].columns)))
    missing = [name for name in FORMS[near].columns if name not in found]
    hint = f"; of format {near} it lacks {', '.join(missing)}" if len(missing) < len(FORMS[near].columns) else ""
    raise ConfigError(
        f"{path}:1: its columns {columns[:12]!s:.200} are of no known format{hint}; say --format {'|'.join(FORMS)}"
    )


MARKS = {
    "pollux": {"application", "num_replicas", "batch_size"},
    "easyscale": {"application", "max_parallelism", "epochs"},
    "helios": {"gpu_num", "submit_time", "duration"},
    "openb": {"num_gpu", "creation_time", "deletion_time"},
    "pai": {"job_name", "plan_gpu", "inst_num"},
    "philly": {"timestamp", "duration", "num_gpus"},
}
"""Columns by which a format is recognised."""


def _devices(row: Row, key: str, *, least: int = 0) -> int:
    return row.whole(key, least=least, most=MAX_DEVICES)


def _duration_of(row: Row, key: str) -> float:
    return row.number(key, most=MAX_DURATION_S, unit="seconds")


def _span(row: Row, begin: tuple[str, float], end: tuple[str, float]) -> float:
    """Return the seconds between two moments; 0 if one of them was not recorded (nan)."""
    seconds = end[1] - begin[1]
    if seconds < 0 or seconds > MAX_DURATION_S:
        what = "before" if seconds < 0 else "more than a year after"
        row.refuse(f"{end[0]} {end[1]:.15g} is {what} {begin[0]} {begin[1]:.15g}: give both in seconds, the end last")
    return 0.0 if math.isnan(seconds) else seconds


def _philly(row: Row, number: int) -> TraceEntry:
    name, tenant = row.optional("name") or f"philly-{number}", row.optional("cluster")
    return TraceEntry(name, row.moment("timestamp"), _devices(row, "num_gpus"), _duration_of(row, "duration"), tenant)


def _philly_log(path: Path, text: str) -> Iterator[Row]:
    """Convert the raw log to rows of the cleaned form. Where it is no JSON any more, a last row says so.

    Jobs are parsed one by one, because that tells the line of each.
    """
    decoder, at = json.JSONDecoder(), len(text) - len(text.lstrip())
    if text[at] != "[":
        raise ConfigError(f"{path}:{text.count(chr(10), 0, at) + 1}: no list of jobs; give Philly's cluster_job_log")
    at = _skip_space(text, at + 1)
    line, counted, wrong, is_first = 1, 0, "", True
    while not wrong and text[at : at + 1] != "]":
        has_comma = text[at : at + 1] == ","
        at = _skip_space(text, at + 1) if has_comma and not is_first else at
        line, counted = line + text.count("\n", counted, at), at
        try:
            job, at = decoder.raw_decode(text, at)
            wrong = "" if is_first or has_comma else "not JSON: no comma before this job"
        except RecursionError:
            wrong = "nested too deeply"
        except json.JSONDecodeError as error:
            line += text.count("\n", counted, error.pos)
            wrong = f"not JSON: {error.msg}; is the file cut off?"
        except ValueError:
            wrong = "not JSON: a number of thousands of digits"
        if wrong:
            yield Row(line, {}, [f"{wrong}; give Philly's cluster_job_log"])
        else:
            yield _philly_job(line, job)
        at, is_first = _skip_space(text, at), False


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\t", "\r"):
        at += 1
    return at


def _philly_job(line: int, job: object) -> Row:
    """Return a job of the raw log as a row: the sum of all attempts' times, and the GPUs of the last attempt."""
    if not isinstance(job, dict):
        return Row(line, {}, [f"{job!r:.60} is no job: use an object with jobid, submitted_time and attempts"])
    total_s, gpus, wrong = 0.0, 0, []
    attempts = job.get("attempts") or []
    if not isinstance(attempts, list) or not all(isinstance(each, dict) for each in attempts):
        attempts, wrong = [], [f"attempts {attempts!r:.60}: use a list of objects"]
    for attempt in attempts:
        start, end = attempt.get("start_time"), attempt.get("end_time")
        if not start or not end or "None" in (start, end):
            continue  # it never ran, or nobody saw its end
        times = [seconds_of_date(each) if isinstance(each, str) else None for each in (start, end)]
        if None in times or times[1] < times[0]:  # type: ignore[operator]
            wrong.append(f"attempt from {start!r:.40} to {end!r:.40}: use dates and times, the end last")
            continue
        total_s += times[1] - times[0]  # type: ignore[operator]
        gpus = _count_gpus(attempt.get("detail") or [], wrong) or gpus
    values = {
        "name": job.get("jobid", ""), "timestamp": job.get("submitted_time", ""), "duration": str(total_s), "num_gpus": str(gpus),
        "cluster": job.get("vc", ""),
    }  # fmt: skip
    for key, shown in (("name", "jobid"), ("timestamp", "submitted_time"), ("cluster", "vc")):
        if not isinstance(values[key], str):
            wrong.append(f"{shown} {values[key]!r:.60}: use text")
    return Row(line, values, wrong)


def _count_gpus(machines: object, wrong: list[str]) -> int:
    if isinstance(machines, list) and all(
        isinstance(each, dict) and isinstance(each.get("gpus", []), list) for each in machines
    ):
        return sum(len(each.get("gpus", [])) for each in machines)
    wrong.append(f"detail {machines!r:.60}: use a list of objects with gpus, a list")
    return 0


def _helios(row: Row, number: int) -> TraceEntry:
    name = row.optional("job_id") or f"helios-{number}"
    return TraceEntry(
        name, row.moment("submit_time"), _devices(row, "gpu_num"), _duration_of(row, "duration"), row.optional("vc")
    )


def _pai(row: Row, number: int) -> TraceEntry:
    """Convert a row of PAI: `plan_gpu` is in hundredths of a GPU per instance; the sum is rounded up to whole GPUs.

    Nothing is written for what was not recorded: such a task never ran, or had no GPU.
    """
    start, end = row.moment("start_time", blank=math.nan), row.moment("end_time", blank=math.nan)
    instances = row.number("inst_num", most=MAX_DEVICES, unit="a number", blank=0.0)
    share = row.number("plan_gpu", most=100.0 * MAX_DEVICES, unit="hundredths of a GPU", blank=0.0)
    gpus = math.ceil(instances * share / 100 - 1e-9)
    if gpus > MAX_DEVICES:
        row.refuse(f"inst_num {instances:g} times plan_gpu {share:g}: use {MAX_DEVICES:,} GPUs or less")
    ran_s = _span(row, ("start_time", start), ("end_time", end))
    return TraceEntry(row.text("job_name"), 0.0 if math.isnan(start) else start, gpus, ran_s)


def _openb(row: Row, number: int) -> TraceEntry:
    created, deleted = row.moment("creation_time"), row.moment("deletion_time", blank=math.nan)
    started = row.moment("scheduled_time", blank=created) if row.has("scheduled_time") else created
    ran_s = _span(row, ("scheduled_time", started), ("deletion_time", deleted))
    return TraceEntry(row.text("name"), created, _devices(row, "num_gpu"), ran_s, row.optional("qos"))


def _pollux(row: Row, number: int) -> TraceEntry:
    return TraceEntry(
        row.text("name"),
        row.moment("time"),
        _devices(row, "num_replicas", least=1),
        application=row.text("application"),
        batch=row.whole("batch_size", least=1, most=MAX_BATCH),
    )


def _easyscale(row: Row, number: int) -> TraceEntry:
    epochs = row.number("epochs", most=MAX_EPOCHS, unit="a number above 0,")
    if epochs <= 0 and not row.mistakes:
        row.refuse_value("epochs", "a number above 0")
    return TraceEntry(
        row.text("name"), row.moment("time"), _devices(row, "max_parallelism", least=1), application=row.text("application"),
        batch=row.whole("batch_size", least=1, most=MAX_BATCH), epochs=epochs,
        # One published row says 40, which the artifact reads as true.
        mixed=bool(row.whole("enable_heterogeneous_deterministic", most=MAX_DEVICES)), preferred=row.text("preferred_gpu"),
    )  # fmt: skip


FORMS: dict[str, TraceFormat] = {
    "philly": TraceFormat(("timestamp", "duration", "num_gpus"), _philly),
    "helios": TraceFormat(("submit_time", "duration", "gpu_num"), _helios),
    "pai": TraceFormat(("job_name", "inst_num", "start_time", "end_time", "plan_gpu"), _pai, unique=False),
    "openb": TraceFormat(("name", "num_gpu", "creation_time", "deletion_time"), _openb),
    "pollux": TraceFormat(("name", "time", "application", "num_replicas", "batch_size"), _pollux),
    "easyscale": TraceFormat(
        (
            "name", "time", "application", "max_parallelism", "batch_size", "epochs", "enable_heterogeneous_deterministic",
            "preferred_gpu",
        ),
        _easyscale,
        unique=False,
    ),
}  # fmt: skip
"""Formats by name. A row of PAI is one of a job's tasks, and of EasyScale's equal names the last counts."""
