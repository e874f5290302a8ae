"""What jobs of a trace are made of: how fast each application is on each device type, and traces that nobody had to record.

Step times are those of EasyScale's figure 12, one batch size for each application; other batch sizes are taken to last
in proportion. A job that may mix device types runs the kernels that make this possible (D1+D2), any other one those of D1.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pliant.errors import ConfigError
from pliant.sched.job import Job, SteadyWork
from pliant.sched.machines import Cluster
from pliant.sched.planner import DeviceType, Types
from pliant.sched.pollux import Application, profiled_job

WEEK_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Model:
    """One of EasyScale's applications."""

    batch: int
    """Samples of one replica, with which the times were measured."""
    samples: float
    """Of an epoch, as its artifact counts them: a hundredth of the data set."""
    fixed_s: Mapping[str, float]
    """Seconds of one replica's step on each device type under D1."""
    mixing_s: Mapping[str, float]
    """The same under D1+D2."""
    share: int
    """Of the artifact's jobs."""
    mixes: bool
    """Whether the artifact lets it use several types: D2 costs it next to nothing."""


def _model(batch: int, samples: float, share: int, mixes: bool, *times: tuple[float, float]) -> Model:
    kinds = ("v100", "p100", "t4")
    fixed, mixing = zip(*times, strict=True)
    return Model(
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
"""How many of the artifact's jobs prefer each type."""
ALIASES = {"v100m16": "v100", "v100m32": "v100"}
"""Device types that count as another one where nobody says how fast they are."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of a trace, as recorded; what a trace does not say is left at its default."""

    name: str
    submitted_s: float
    devices: int
    duration_s: float = 0.0
    """On that many devices of the preferred type; 0: given by epochs."""
    tenant: str = ""
    application: str = ""
    batch: int = 0
    """Samples of one replica; of all together in Pollux' workloads."""
    epochs: float = 0.0
    mixed: bool | None = None
    preferred: str = ""


def jobs_of(
    entries: Sequence[Entry],
    cluster: Cluster,
    *,
    seed: int = 0,
    speeds: Mapping[str, float] | None = None,
    profiles: Mapping[str, Application] | None = None,
) -> list[Job]:
    """New jobs, in the order of the trace. What it leaves open (application, preferred type) is drawn from `seed`.

    Raises:
        ConfigError: an application or a device type that nothing is known about.
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
                profiled_job(
                    profiles[entry.application], entry.name, entry.submitted_s, entry.devices, entry.batch, kinds[0]
                )
            )
            continue
        name = entry.application or chance.choices([n for n, _ in drawn], [share for _, share in drawn])[0]
        preferred = entry.preferred if entry.preferred in kinds else chance.choices(kinds, wishes)[0]
        jobs.append(_steady(entry, name, preferred, kinds, tuple((speeds or {}).items())))
    return jobs


def _steady(
    entry: Entry, application: str, preferred: str, kinds: tuple[str, ...], speeds: tuple[tuple[str, float], ...]
) -> Job:
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
    return Job(
        name=entry.name,
        submitted_s=entry.submitted_s,
        replicas=entry.devices,
        types=types,
        work=SteadyWork(max(float(steps), 1e-9)),
        preferred=preferred,
        mixed=mixed,
        tenant=entry.tenant,
    )


@lru_cache(maxsize=1 << 12)
def _types(
    application: str, mixed: bool, batch: int, kinds: tuple[str, ...], speeds: tuple[tuple[str, float], ...]
) -> Types:
    """Equal jobs share one tuple, so that the planner's memory finds them fast."""
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
"""Of the seconds of a job; between them the logarithm is interpolated. The ends are assumed."""


def synthetic(num_jobs: int = PHILLY_JOBS, *, weeks: float = PHILLY_WEEKS, seed: int = 0) -> list[Entry]:
    """A trace with the sizes and durations of Microsoft's Philly; more jobs by day than by night, fewer at weekends."""
    if num_jobs < 1 or not weeks > 0:
        raise ConfigError(f"a synthetic trace of {num_jobs} jobs in {weeks} weeks: use 1 job and some time, or more")
    chance = random.Random(seed)
    times = sorted(_moment(chance, weeks * WEEK_S) for _ in range(num_jobs))
    sizes = chance.choices(list(PHILLY_DEVICES), list(PHILLY_DEVICES.values()), k=num_jobs)
    return [
        Entry(f"job-{number}", round(time, 3), size, round(_duration(chance.random()), 3), f"vc{chance.randrange(15)}")
        for number, (time, size) in enumerate(zip(times, sizes, strict=True))
    ]


def like_easyscale(num_jobs: int = 62, *, seed: int = 0) -> list[Entry]:
    """Jobs as in EasyScale's list, for those who do not have it: its applications, sizes, preferences and span.

    Of the epochs only the order of magnitude is kept: 2 to 20 where an epoch has the images of ImageNet, else 20 to 200,
    equally likely on a logarithmic scale.
    """
    chance = random.Random(seed)
    entries = []
    for number in range(num_jobs):
        name = chance.choices(list(MODELS), [model.share for model in MODELS.values()])[0]
        least = 2 if MODELS[name].samples == 12_800 else 20
        entries.append(
            Entry(
                f"{name}-{number}", round(chance.uniform(115, 4814)), chance.choices((32, 16, 8, 4), (38, 18, 11, 1))[0],
                application=name, batch=MODELS[name].batch, epochs=round(least * 10 ** chance.random()),
                preferred=chance.choices(list(PREFERENCES), list(PREFERENCES.values()))[0],
            )
        )  # fmt: skip
    return sorted(entries, key=lambda entry: entry.submitted_s)


def _moment(chance: random.Random, span_s: float) -> float:
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
