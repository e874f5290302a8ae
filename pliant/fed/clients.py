"""Simulated clients: how fast their devices are, when they are available, and how long their part of a round takes.

Device tables are read as published: CSV (compute_ms_per_sample, bandwidth_kbps), NumPy's .npz with the same names, FedScale's
pickle {id: {computation, communication}}, or the artifact's {id: [compute, bandwidth]}; in milliseconds of a sample's
forward pass, and kbit/s (1000 bits). Availability traces are FedScale's, and repeat after their period.
"""

from __future__ import annotations

import copy
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.selection.base import Floats, Ids, Mask
from pliant.fed.tables import form_of, read_column, read_pickle, read_rows

PASSES = 3.0
"""Forward passes that a training step takes, as FedScale counts: the backward pass takes two."""

COMPUTE_MS = ((0, 15), (0.05, 19), (0.3, 25), (0.4, 28), (0.5, 41), (0.6, 64), (0.62, 95), (0.64, 118), (0.7, 138), (0.9, 174), (1, 199))  # fmt: skip
BANDWIDTH_KBPS = ((0, 1017), (0.1, 1818), (0.3, 3500), (0.5, 6075), (0.7, 11_840), (0.9, 32_500), (0.99, 100_000), (1, 204_000))  # fmt: skip
"""Quantiles of FedScale's device table; between them the logarithm is interpolated."""
COLUMNS = ("compute_ms_per_sample", "bandwidth_kbps")


@dataclass(frozen=True, slots=True)
class Devices:
    """A table with one row for each device."""

    compute_ms: Floats
    """Milliseconds of one sample's forward pass."""
    kbps: Floats
    """Rate of the link, in either direction."""
    note: str = ""
    """Where the numbers are from."""

    def __len__(self) -> int:
        return len(self.compute_ms)

    def for_clients(self, num_clients: int) -> Devices:
        """Give client i the device of row i; if there are fewer rows, they repeat."""
        rows = np.arange(num_clients) % len(self)
        return Devices(self.compute_ms[rows], self.kbps[rows], self.note)

    def round_s(
        self, samples: ArrayLike, *, model_bytes: float, passes: float = PASSES, clients: Ids | slice = slice(None)
    ) -> Floats:
        """Return the seconds of each client (or of `clients`) to fetch the model, train on `samples` samples, and send it.

        `samples` counts a sample as often as it is trained on (local steps times batch size); one number, or one per client.
        """
        trained = np.asarray(samples, dtype=np.float64)
        compute = passes * trained * self.compute_ms[clients] / 1000
        total: Floats = compute + 2 * (model_bytes * 0.008 / self.kbps[clients])
        return total


def read_devices(path: Path) -> Devices:
    """Read a device table in any of the forms above; raises ConfigError if it is none."""
    form = form_of(path, "a table of devices, or synthetic")
    if form == "csv":
        rows = read_rows(path)
        remedy = "speeds are numbers above 0"
        columns = {name: np.array(read_column(path, rows, name, _speed, remedy)) for name in COLUMNS if name in rows[0]}
    else:
        columns = _arrays(path) if form == "npz" else _pickled_columns(path)
    if len(columns) < len(COLUMNS):
        found = ", ".join(columns) or "none"
        raise ConfigError(f"{path}: it has {found} of the columns of a table of devices: {', '.join(COLUMNS)}")
    compute_ms, kbps = (columns[name] for name in COLUMNS)
    if compute_ms.ndim != 1 or compute_ms.shape != kbps.shape:
        raise ConfigError(f"{path}: columns of shape {compute_ms.shape} and {kbps.shape}: give one entry per device")
    for name, column in columns.items():
        if (wrong := np.flatnonzero(~(np.isfinite(column) & (column > 0)))).size:
            raise ConfigError(f"{path}: {name}[{wrong[0]}] is {column[wrong[0]]:g}: speeds are numbers above 0")
    return Devices(compute_ms, kbps, path.name)


def _speed(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _arrays(path: Path) -> dict[str, Floats]:
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: np.asarray(found[name], dtype=np.float64) for name in COLUMNS if name in found.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not NumPy's .npz, or damaged ({error})") from None


def _pickled_columns(path: Path) -> dict[str, Floats]:
    found = []
    for name, row in _pickled_devices(path):
        values = (row.get("computation"), row.get("communication")) if isinstance(row, dict) else row
        if not _are_numbers(values) or len(values) != 2:
            forms = "FedScale has {computation, communication}, the artifact two numbers"
            raise ConfigError(f"{path}: device {name!r} is {row!r:.60}; {forms}")
        found.append(values)
    compute_ms, kbps = np.array(found, dtype=np.float64).T
    return dict(zip(COLUMNS, (compute_ms, kbps), strict=True))


def _pickled_devices(path: Path) -> list[tuple[object, object]]:
    """Return the entries of a published dictionary; sorted, if its keys are numbers."""
    found = read_pickle(path)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: a pickled table is a dictionary of devices; this one is not")
    return sorted(found.items()) if all(isinstance(name, int) for name in found) else list(found.items())


def _are_numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, (list, tuple)) and all(isinstance(each, (int, float)) for each in values)


def synthetic_devices(num_clients: int, *, seed: int = 0) -> Devices:
    """Draw devices with the quantiles of FedScale's table, compute and link independently."""
    chance = np.random.default_rng(seed)
    compute, link = (_draw_quantiles(table, chance.random(num_clients)) for table in (COMPUTE_MS, BANDWIDTH_KBPS))
    return Devices(compute, link, f"synthetic: drawn with the quantiles of FedScale's device table, seed {seed}")


def _draw_quantiles(table: tuple[tuple[float, float], ...], places: Floats) -> Floats:
    quantiles, values = zip(*table, strict=True)
    drawn: Floats = np.exp(np.interp(places, quantiles, np.log(values)))
    return drawn


DAY_S = 86_400.0
HOUR_S = 3_600.0
DAYS, SPREAD_H = 7, 8.0
"""Length of synthetic traces, and how far local times differ in them."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Which clients are available at one moment; one entry for each client."""

    there: Mask
    until_s: Floats
    """When available clients become unavailable (infinite: never); -infinite for the others."""
    back_s: Floats
    """When unavailable clients come back (infinite: never); the moment itself for the others."""


class Availability:
    """The intervals in which clients are available, sorted, disjoint and in one array."""

    def __init__(
        self, client: ArrayLike, begin_s: ArrayLike, end_s: ArrayLike, period_s: ArrayLike, note: str = ""
    ) -> None:
        """Interval k belongs to client[k]; `period_s` has one entry for each client.

        Intervals may come in any order. Parts outside the period are cut off, overlapping ones are joined.
        """
        self.note = note
        self.period_s = np.asarray(period_s, dtype=np.float64)
        owner = np.asarray(client, dtype=np.int64)
        begin, end = np.asarray(begin_s, dtype=np.float64), np.asarray(end_s, dtype=np.float64)
        if not (np.isfinite(begin).all() and np.isfinite(end).all() and np.isfinite(self.period_s).all()):
            raise ConfigError("availability: intervals and periods must end at finite times")
        begin, end = np.maximum(begin, 0), np.minimum(end, self.period_s[owner])
        kept = end > begin
        owner, begin, end = _disjoint(owner[kept], begin[kept], end[kept])
        # One more entry, so that the index behind the last interval is valid.
        self._begin_s, self._end_s = np.append(begin, 0.0), np.append(end, 0.0)
        starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(self.period_s)))]).astype(np.int64)
        self._first, self._behind = starts[:-1], starts[1:]
        self._forget()

    def _forget(self) -> None:
        self._since_s = np.full(len(self), math.inf)  # nothing is known yet
        self._change_s = np.full(len(self), -math.inf)
        self._now = Presence(np.zeros(len(self), bool), np.zeros(len(self)), np.zeros(len(self)))

    def __len__(self) -> int:
        return len(self.period_s)

    @classmethod
    def always(cls, num_clients: int) -> Availability:
        """All clients are always available."""
        every = np.arange(num_clients)
        return cls(every, np.zeros(num_clients), np.ones(num_clients), np.ones(num_clients), "always there")

    def intervals(self, client: int) -> list[tuple[float, float]]:
        places = slice(self._first[client], self._behind[client])
        return list(zip(self._begin_s[places].tolist(), self._end_s[places].tolist(), strict=True))

    def for_clients(self, num_clients: int) -> Availability:
        """Give client i the trace of row i; if there are fewer rows, they repeat."""
        rows = np.arange(num_clients) % len(self)
        found = copy.copy(self)  # the intervals themselves are shared
        found.period_s, found._first, found._behind = self.period_s[rows], self._first[rows], self._behind[rows]
        found._forget()
        return found

    def at(self, now_s: float) -> Presence:
        """Return the presence of all clients. As the clock goes on, only clients whose state has ended are looked up again."""
        stale = np.flatnonzero((now_s < self._since_s) | (now_s >= self._change_s))
        if len(stale):
            found = self.of(stale, now_s)
            # Into new arrays: callers may still hold the old ones.
            there, until, back = self._now.there.copy(), self._now.until_s.copy(), self._now.back_s.copy()
            there[stale], until[stale], back[stale] = found.there, found.until_s, found.back_s
            self._since_s[stale] = now_s
            self._change_s[stale] = np.where(found.there, found.until_s, found.back_s)
            self._now = Presence(there, until, back)
        return Presence(self._now.there, self._now.until_s, np.where(self._now.there, now_s, self._now.back_s))

    def of(self, clients: Ids, now_s: ArrayLike) -> Presence:
        """Return the presence of some clients, at one moment or each at its own."""
        period = self.period_s[clients]
        now = np.broadcast_to(np.asarray(now_s, dtype=np.float64), period.shape)
        cycle = np.floor(now / period)
        # The quotient is rounded, so the rest may lie a little outside of the period.
        cycle += (now - (cycle + 1) * period >= 0).astype(np.float64) - (now - cycle * period < 0)
        # The next period's beginning as that period will compute it: the answer must not depend on when it is asked for.
        start, following, local = cycle * period, (cycle + 1) * period, now - cycle * period
        first, behind = self._first[clients], self._behind[clients]
        after = self._next_begin(first, behind, local)
        empty = first == behind
        last = np.maximum(after - 1, first)
        begin, end = self._begin_s, self._end_s
        there = (after > first) & (local < end[last])
        opens_at_0 = begin[first] == 0
        whole = opens_at_0 & (end[first] == period)
        wraps = opens_at_0 & (end[last] == period)
        until = np.where(wraps, following + end[first], start + end[last])
        back = np.where(after < behind, start + begin[after], following + begin[first])
        return Presence(
            there,
            np.where(there, np.where(whole, math.inf, until), -math.inf),
            np.where(empty, math.inf, np.where(there, now, back)),
        )

    def _next_begin(self, first: Ids, behind: Ids, local: Floats) -> Ids:
        """Return the index of each client's first interval that begins later than `local`: bisection for all clients at once."""
        low, high = first.copy(), behind.copy()
        while (low < high).any():
            middle = (low + high) // 2
            later = (low < high) & (self._begin_s[middle] > local)
            low = np.where((low < high) & ~later, middle + 1, low)
            high = np.where(later, middle, high)
        return low


def _disjoint(owner: Ids, begin: Floats, end: Floats) -> tuple[Ids, Floats, Floats]:
    apart = (owner[1:] > owner[:-1]) | ((owner[1:] == owner[:-1]) & (begin[1:] > end[:-1]))
    if apart.all():
        return owner, begin, end
    order = np.lexsort((begin, owner))
    owner, begin, end = owner[order], begin[order], end[order]
    # How far each interval and those before it reach: a running maximum within each client, by doubling.
    reach, shift = end.copy(), 1
    while shift < len(owner) and (same := owner[shift:] == owner[:-shift]).any():
        reach[shift:] = np.where(same, np.maximum(reach[shift:], reach[:-shift]), reach[shift:])
        shift *= 2
    opens = np.ones(len(owner), dtype=bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (begin[1:] > reach[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(owner))[: len(first)] - 1
    return owner[first], begin[first], reach[last]


def read_availability(path: Path) -> Availability:
    """Read FedScale's trace: a pickle {id: {active: [s], inactive: [s], finish_time: s, ...}}.

    A last interval without an end lasts until `finish_time`. Raises ConfigError if it is no such trace.
    """
    trace = "a trace as FedScale's, or synthetic"
    if form_of(path, trace) != "pickle":
        raise ConfigError(f"{path}: this is no pickle; give {trace}")
    owner: list[int] = []
    begin: list[float] = []
    end: list[float] = []
    period: list[float] = []
    for number, (name, row) in enumerate(_pickled_devices(path)):
        known = row if isinstance(row, dict) else {}
        active, inactive, finish = (known.get(key) for key in ("active", "inactive", "finish_time"))
        if not (_are_numbers(active) and _are_numbers(inactive) and isinstance(finish, int | float) and finish > 0):
            raise ConfigError(f"{path}: device {name!r} has no active, inactive and finish_time, as FedScale's have")
        if not 0 <= len(active) - len(inactive) <= 1:
            raise ConfigError(f"{path}: device {name!r} comes {len(active)} times and goes {len(inactive)} times")
        owner += [number] * len(active)
        begin += active
        end += [*inactive, finish][: len(active)]
        period.append(float(finish))
    return Availability(owner, begin, end, period, path.name)


def synthetic_availability(num_clients: int, *, seed: int = 0) -> Availability:
    """Draw a synthetic trace of phones that are available while they charge.

    Each has its own bedtime (22:30, sd 1.2 h, and 0.7 h from night to night), sleep (7.5 h, sd 1.2 h) and habit of
    charging at night (in 80 % of the nights on average), and charges 1.5 times a day for half an hour on average
    between 8:00 and 20:00. Local times differ by up to 8 hours, equally likely. Repeats after a week.
    """
    chance = np.random.default_rng(seed)
    zone = chance.uniform(-SPREAD_H / 2, SPREAD_H / 2, num_clients)
    bed, sleep = chance.normal(22.5, 1.2, num_clients), chance.normal(7.5, 1.2, num_clients)
    habit = chance.beta(8, 2, num_clients)
    nights = np.repeat(np.arange(num_clients), DAYS)
    day = np.tile(np.arange(DAYS), num_clients) * 24.0
    charged = chance.random(len(nights)) < habit[nights]
    begin = day + (bed + zone)[nights] + chance.normal(0, 0.7, len(nights))
    length = np.clip(sleep[nights] + chance.normal(0, 0.7, len(nights)), 2, 12)
    naps = chance.poisson(1.5, len(nights))
    napper = np.repeat(nights, naps)
    nap_begin = np.repeat(day, naps) + zone[napper] + chance.uniform(8, 20, len(napper))
    nap = np.clip(chance.exponential(0.5, len(napper)), 1 / 12, 4)
    owner = np.concatenate([nights[charged], napper])
    begins = np.concatenate([begin[charged], nap_begin])
    lengths = np.concatenate([length[charged], nap])
    note = f"synthetic: {num_clients} phones that charge at night, drawn with seed {seed}; nobody recorded this"
    return _wrap_periods(owner, begins * HOUR_S, lengths * HOUR_S, np.full(num_clients, DAYS * DAY_S), note)


def _wrap_periods(owner: Ids, begin_s: Floats, length_s: Floats, period_s: Floats, note: str) -> Availability:
    """Continue intervals that end after the period at its beginning; whole seconds."""
    period = period_s[owner]
    begin = np.round(begin_s % period)
    end = np.round(begin + length_s)
    over = np.flatnonzero(end > period)
    return Availability(
        np.concatenate([owner, owner[over]]),
        np.concatenate([begin, np.zeros(len(over))]),
        np.concatenate([end, end[over] - period[over]]),
        period_s,
        note,
    )


EQUAL = (41.0, 6075.0)
"""ms per sample and kbit/s of equal devices: the median of FedScale's table."""
DEVICES, PRESENCE, SELECTION = 3, 4, 5
"""Purposes of a job's seed. Each has its own random numbers: fast clients must not be the large ones by chance."""


def derive_seed(seed: int, purpose: int) -> int:
    """Return a seed of its own for each purpose of a job's seed."""
    return int(np.random.SeedSequence((seed, purpose)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True, slots=True)
class SimulatedClients:
    """All clients of a job on the virtual clock: one device and one availability pattern for each."""

    devices: Devices
    availability: Availability
    batch_size: int
    model_bytes: int
    """Bytes that travel each way."""
    passes: float = PASSES

    @classmethod
    def of(cls, config: FedConfig, num_clients: int, model_bytes: int) -> SimulatedClients:
        """Create the clients of a config; reads the tables that it names."""
        return cls(
            _devices(config, num_clients),
            _availability(config, num_clients),
            config.local.batch_size,
            config.model_bytes or model_bytes,
            PASSES * config.clock_factor,
        )

    def __len__(self) -> int:
        return len(self.devices)

    def round_s(self, steps: int | Ids, clients: Ids | slice = slice(None)) -> Floats:
        """Return the seconds that a round with `steps` local steps takes each client."""
        samples = np.asarray(steps) * self.batch_size
        return self.devices.round_s(samples, model_bytes=self.model_bytes, passes=self.passes, clients=clients)

    def compute_s(self, steps: int, clients: Ids) -> Floats:
        """Return the part of `round_s` that is spent on the steps."""
        return self.devices.round_s(steps * self.batch_size, model_bytes=0, passes=self.passes, clients=clients)


def _devices(config: FedConfig, num_clients: int) -> Devices:
    if config.devices == "synthetic":
        return synthetic_devices(num_clients, seed=derive_seed(config.seed, DEVICES))
    if config.devices == "equal":
        compute_ms, kbps = (np.full(num_clients, each) for each in EQUAL)
        return Devices(compute_ms, kbps, "all alike")
    return read_devices(Path(config.devices)).for_clients(num_clients)


def _availability(config: FedConfig, num_clients: int) -> Availability:
    if not config.availability:
        return Availability.always(num_clients)
    if config.availability == "synthetic":
        return synthetic_availability(num_clients, seed=derive_seed(config.seed, PRESENCE))
    return read_availability(Path(config.availability)).for_clients(num_clients)
