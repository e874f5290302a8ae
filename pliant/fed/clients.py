"""Simulated clients: how fast their devices are, when they are available, and how long their part of a round takes.

Device tables are read as published: CSV (compute_ms_per_sample, bandwidth_kbps), NumPy's .npz with the same names, FedScale's
pickle {id: {computation, communication}}, or the artifact's {id: [compute, bandwidth]}; in milliseconds of a sample's
forward pass, and kbit/s (1000 bits). Availability traces are FedScale's, and repeat after their period.
"""

from __future__ import annotations

import copy
import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.selection.base import Floats, Ids
from pliant.fed.tables import form_of, read_pickle, read_rows, row_number

PASSES = 3.0
"""Forward passes that a training step takes, as FedScale counts: the backward pass takes two."""

COMPUTE_MS = ((0, 15), (0.05, 19), (0.3, 25), (0.4, 28), (0.5, 41), (0.6, 64), (0.62, 95), (0.64, 118), (0.7, 138), (0.9, 174), (1, 199))  # fmt: skip
BANDWIDTH_KBPS = ((0, 1017), (0.1, 1818), (0.3, 3500), (0.5, 6075), (0.7, 11_840), (0.9, 32_500), (0.99, 100_000), (1, 204_000))  # fmt: skip
"""Quantiles of FedScale's device table; between them the logarithm is interpolated."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A table with one row for each device."""

    compute_ms: Floats
    """Milliseconds of one sample's forward pass."""
    down_kbps: Floats
    up_kbps: Floats
    note: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        for name in ("compute_ms", "down_kbps", "up_kbps"):
            column = getattr(self, name)
            if column.ndim != 1 or len(column) != len(self.compute_ms) or not len(column):
                raise ConfigError(
                    f"devices: {name} has shape {list(column.shape)}; all columns need one entry per device"
                )
            if not (np.isfinite(column).all() and (column > 0).all()):
                row = int(np.flatnonzero(~(np.isfinite(column) & (column > 0)))[0])
                raise ConfigError(f"devices: {name} of row {row} is {column[row]}; speeds are numbers above 0")

    def __len__(self) -> int:
        return len(self.compute_ms)

    def for_clients(self, num_clients: int) -> Devices:
        """Give client i the device of row i; if there are fewer rows, they repeat."""
        if num_clients < 1:
            raise ConfigError(f"devices for {num_clients} clients: use 1 or more")
        rows = np.arange(num_clients) % len(self)
        return Devices(self.compute_ms[rows], self.down_kbps[rows], self.up_kbps[rows], self.note)

    def round_s(
        self,
        samples: ArrayLike,
        *,
        down_bytes: float,
        up_bytes: float,
        passes: float = PASSES,
        clients: NDArray[np.int64] | slice = slice(None),
    ) -> Floats:
        """Return the seconds of each client (or of `clients`) to fetch the model, train on `samples` samples, and send its update.

        `samples` counts a sample as often as it is trained on (local steps times batch size); one number, or one per client.
        """
        trained = np.asarray(samples, dtype=np.float64)
        compute = passes * trained * self.compute_ms[clients] / 1000
        links = down_bytes * 0.008 / self.down_kbps[clients] + up_bytes * 0.008 / self.up_kbps[clients]
        total: Floats = compute + links
        return total


def read_devices(path: Path) -> Devices:
    """Read a device table in any of the forms above.

    Raises:
        ConfigError: the file is missing, or is no such table.
    """
    form = form_of(path, "a table of devices, or synthetic")
    if form == "npz":
        return _from_columns(path, _arrays(path))
    if form == "pickle":
        return _from_pickle(path)
    rows = read_rows(path)
    return _from_columns(path, {name: _column(path, rows, name) for name in rows[0] if name in _NAMES})


def _column(path: Path, rows: Sequence[Mapping[str, str]], name: str) -> Floats:
    found = np.empty(len(rows))
    for place, row in enumerate(rows):
        try:
            found[place] = float(row[name])
        except ValueError:
            found[place] = np.nan
        if not 0 < found[place] < np.inf:
            where = f"{path}: row {row_number(path, place)}, {name}"
            raise ConfigError(f"{where}: {row[name]!r:.60}: speeds are numbers above 0")
    return found


_NAMES = ("compute_ms_per_sample", "bandwidth_kbps", "down_kbps", "up_kbps")


def _from_columns(path: Path, columns: Mapping[str, Floats]) -> Devices:
    both = columns.get("bandwidth_kbps")
    compute = columns.get("compute_ms_per_sample")
    down, up = columns.get("down_kbps", both), columns.get("up_kbps", both)
    if compute is None or down is None or up is None:
        raise ConfigError(
            f"{path}: it has {', '.join(columns) or 'none'} of the columns of a table of devices: "
            "compute_ms_per_sample, and bandwidth_kbps or down_kbps and up_kbps"
        )
    for name, column in columns.items():  # by the names that the user gave them
        if column.ndim == 1 and (wrong := np.flatnonzero(~(np.isfinite(column) & (column > 0)))).size:
            raise ConfigError(f"{path}: {name}[{wrong[0]}] is {column[wrong[0]]:g}: speeds are numbers above 0")
    return _named_after(path, compute, down, up)


def _named_after(path: Path, compute_ms: Floats, down_kbps: Floats, up_kbps: Floats) -> Devices:
    try:
        return Devices(compute_ms, down_kbps, up_kbps, path.name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _arrays(path: Path) -> dict[str, Floats]:
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: np.asarray(found[name], dtype=np.float64) for name in found.files if name in _NAMES}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not NumPy's .npz, or damaged ({error})") from None


def _from_pickle(path: Path) -> Devices:
    found = read_pickle(path)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: a pickled table of devices is a dictionary of them; this one is not")
    compute, link = [], []
    for name, row in sort_by_number(found):
        if isinstance(row, dict):
            values: Sequence[object] = (row.get("computation"), row.get("communication"))
        else:
            values = row if isinstance(row, (list, tuple)) else ()
        if len(values) != 2 or not all(isinstance(each, (int, float)) for each in values):
            raise ConfigError(
                f"{path}: device {name!r} is {row!r:.60}; FedScale has {{computation, communication}}, the artifact two numbers"
            )
        compute.append(values[0])
        link.append(values[1])
    both = np.array(link, dtype=np.float64)
    return _named_after(path, np.array(compute, dtype=np.float64), both, both)


def sort_by_number(found: Mapping[object, object]) -> list[tuple[object, object]]:
    """Return the entries of a published dictionary sorted by number, if its keys are numbers."""
    if all(isinstance(name, int) for name in found):
        return sorted(found.items(), key=lambda item: int(str(item[0])))
    return list(found.items())


def synthetic_devices(num_clients: int, *, seed: int = 0) -> Devices:
    """Draw devices with the quantiles of FedScale's table, compute and link independently."""
    if num_clients < 1:
        raise ConfigError(f"{num_clients} synthetic devices: use 1 or more")
    chance = np.random.default_rng(seed)
    compute, link = (_draw_quantiles(table, chance.random(num_clients)) for table in (COMPUTE_MS, BANDWIDTH_KBPS))
    return Devices(compute, link, link, f"synthetic: drawn with the quantiles of FedScale's device table, seed {seed}")


def _draw_quantiles(table: tuple[tuple[float, float], ...], places: Floats) -> Floats:
    quantiles, values = zip(*table, strict=True)
    drawn: Floats = np.exp(np.interp(places, quantiles, np.log(values)))
    return drawn


Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
DAY_S = 86_400.0
HOUR_S = 3_600.0
TRACE = "a trace as FedScale's, or synthetic"


@dataclass(frozen=True, slots=True)
class Presence:
    """Which clients are available at one moment; one entry for each client."""

    there: Flags
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

        Raises:
            ConfigError: a period that is no time, or times that are no numbers.
        """
        self.note = note
        self.period_s = np.asarray(period_s, dtype=np.float64)
        if not len(self.period_s) or not (np.isfinite(self.period_s).all() and (self.period_s > 0).all()):
            raise ConfigError("availability: each client needs a period above 0 s")
        owner = np.asarray(client, dtype=np.int64)
        begin, end = np.asarray(begin_s, dtype=np.float64), np.asarray(end_s, dtype=np.float64)
        if not (np.isfinite(begin).all() and np.isfinite(end).all()):
            raise ConfigError("availability: intervals must begin and end at finite times")
        begin, end = np.maximum(begin, 0), np.minimum(end, self.period_s[owner])
        kept = end > begin
        owner, begin, end = _disjoint(owner[kept], begin[kept], end[kept])
        self._begin_s, self._end_s = begin, end
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
        if num_clients < 1:
            raise ConfigError(f"availability of {num_clients} clients: use 1 or more")
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

    def of(self, clients: Ints, now_s: ArrayLike) -> Presence:
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
        at = _Lookup(self._begin_s, self._end_s)
        there = (after > first) & (local < at.end(last))
        opens_at_0 = at.begin(first) == 0
        whole = opens_at_0 & (at.end(first) == period)
        wraps = opens_at_0 & (at.end(last) == period)
        until = np.where(wraps, following + at.end(first), start + at.end(last))
        back = np.where(after < behind, start + at.begin(after), following + at.begin(first))
        return Presence(
            there & ~empty,
            np.where(there & ~empty, np.where(whole, math.inf, until), -math.inf),
            np.where(empty, math.inf, np.where(there, now, back)),
        )

    def _next_begin(self, first: Ints, behind: Ints, local: Floats) -> Ints:
        """Return the index of each client's first interval that begins later than `local`: bisection for all clients at once."""
        low, high = first.copy(), behind.copy()
        at = _Lookup(self._begin_s, self._end_s)
        while (low < high).any():
            middle = (low + high) // 2
            later = (low < high) & (at.begin(middle) > local)
            low = np.where((low < high) & ~later, middle + 1, low)
            high = np.where(later, middle, high)
        return low

    def as_fedscale(self) -> dict[int, dict[str, object]]:
        """Return the trace in FedScale's form; clients are numbered from 1, as there."""
        kind = "synthetic" if self.note.startswith("synthetic") else "unknown"
        found: dict[int, dict[str, object]] = {}
        for client in range(len(self)):
            places = slice(self._first[client], self._behind[client])
            begin, end = self._begin_s[places].tolist(), self._end_s[places].tolist()
            found[client + 1] = {
                "duration": sum(end) - sum(begin),
                "active": begin,
                "inactive": end,
                "finish_time": float(self.period_s[client]),
                "model": kind,
            }
        return found

    def save(self, path: Path) -> None:
        """Write FedScale's pickle."""
        path.write_bytes(pickle.dumps(self.as_fedscale(), protocol=4))


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Arrays of all intervals with one more entry, so that an index beyond the last one is valid."""

    begins: Floats
    ends: Floats

    def begin(self, places: Ints) -> Floats:
        return self.begins[np.minimum(places, len(self.begins) - 1)] if len(self.begins) else np.zeros(len(places))

    def end(self, places: Ints) -> Floats:
        return self.ends[np.minimum(places, len(self.ends) - 1)] if len(self.ends) else np.zeros(len(places))


def _disjoint(owner: Ints, begin: Floats, end: Floats) -> tuple[Ints, Floats, Floats]:
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

    A last interval without an end lasts until `finish_time`.

    Raises:
        ConfigError: the file is missing, or is no such trace.
    """
    if form_of(path, TRACE) != "pickle":
        raise ConfigError(f"{path}: this is no pickle; give {TRACE}")
    found = read_pickle(path)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: a trace of availability is a dictionary of devices; this one is not")
    owner: list[int] = []
    begin: list[float] = []
    end: list[float] = []
    period: list[float] = []
    for number, (name, row) in enumerate(sort_by_number(found)):
        active, inactive, finish = (
            (row.get("active"), row.get("inactive"), row.get("finish_time"))
            if isinstance(row, dict)
            else (None, None, None)
        )
        if not (_are_numbers(active) and _are_numbers(inactive) and isinstance(finish, (int, float)) and finish > 0):
            raise ConfigError(
                f"{path}: device {name!r} has no active, inactive and finish_time, as FedScale's trace has"
            )
        if not 0 <= len(active) - len(inactive) <= 1:
            raise ConfigError(f"{path}: device {name!r} comes {len(active)} times and goes {len(inactive)} times")
        owner += [number] * len(active)
        begin += active
        end += [*inactive, finish][: len(active)]
        period.append(float(finish))
    return Availability(owner, begin, end, period, path.name)


def _are_numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(isinstance(each, (int, float)) for each in values)


def synthetic_availability(num_clients: int, *, days: int = 7, spread_h: float = 8.0, seed: int = 0) -> Availability:
    """Draw a synthetic trace of phones that are available while they charge.

    Each has its own bedtime (22:30, sd 1.2 h, and 0.7 h from night to night), sleep (7.5 h, sd 1.2 h) and habit of
    charging at night (in 80 % of the nights on average), and charges 1.5 times a day for half an hour on average
    between 8:00 and 20:00. Local times differ by up to `spread_h` hours, equally likely. Repeats after `days` days.
    """
    if num_clients < 1 or days < 1 or not 0 <= spread_h <= 24:
        raise ConfigError(
            f"a synthetic trace of {num_clients} clients, {days} days, spread_h={spread_h}: use 1 or more of each, and 0 to 24 h"
        )
    chance = np.random.default_rng(seed)
    zone = chance.uniform(-spread_h / 2, spread_h / 2, num_clients)
    bed, sleep = chance.normal(22.5, 1.2, num_clients), chance.normal(7.5, 1.2, num_clients)
    habit = chance.beta(8, 2, num_clients)
    nights = np.repeat(np.arange(num_clients), days)
    day = np.tile(np.arange(days), num_clients) * 24.0
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
    return _wrap_periods(owner, begins * HOUR_S, lengths * HOUR_S, np.full(num_clients, days * DAY_S), note)


def _wrap_periods(owner: Ints, begin_s: Floats, length_s: Floats, period_s: Floats, note: str) -> Availability:
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
        """Create the clients of a config; reads the tables that it names.

        Raises:
            ConfigError: a table is missing or damaged.
        """
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
        return self.devices.round_s(
            np.asarray(steps) * self.batch_size,
            down_bytes=self.model_bytes,
            up_bytes=self.model_bytes,
            passes=self.passes,
            clients=clients,
        )

    def compute_s(self, steps: int, clients: Ids) -> Floats:
        """Return the part of `round_s` that is spent on the steps."""
        return self.devices.round_s(
            steps * self.batch_size, down_bytes=0, up_bytes=0, passes=self.passes, clients=clients
        )

    def at(self, now_s: float) -> Presence:
        return self.availability.at(now_s)


def _devices(config: FedConfig, num_clients: int) -> Devices:
    if config.devices == "synthetic":
        return synthetic_devices(num_clients, seed=derive_seed(config.seed, DEVICES))
    if config.devices == "equal":
        compute_ms, kbps = (np.full(num_clients, each) for each in EQUAL)
        return Devices(compute_ms, kbps, kbps, "all alike")
    return read_devices(Path(config.devices)).for_clients(num_clients)


def _availability(config: FedConfig, num_clients: int) -> Availability:
    if not config.availability:
        return Availability.always(num_clients)
    if config.availability == "synthetic":
        return synthetic_availability(num_clients, seed=derive_seed(config.seed, PRESENCE))
    return read_availability(Path(config.availability)).for_clients(num_clients)
