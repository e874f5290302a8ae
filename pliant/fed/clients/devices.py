"""How fast clients' devices are, and so how long a client's part of a round takes on the virtual clock.

Tables are read as published: CSV (compute_ms_per_sample, bandwidth_kbps), NumPy's .npz with the same names, FedScale's
pickle {id: {computation, communication}}, or the artifact's {id: [compute, bandwidth]}; all in milliseconds of a
sample's forward pass, and kbit/s (of 1000 bits). When they are there is `availability`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.errors import ConfigError
from pliant.fed.pickles import read_pickle
from pliant.fed.tables import form_of, read_rows, row_number

Floats = NDArray[np.float64]
PASSES = 3.0
"""A training step in forward passes, as FedScale counts: the backward pass takes two."""

COMPUTE_MS = ((0, 15), (0.05, 19), (0.3, 25), (0.4, 28), (0.5, 41), (0.6, 64), (0.62, 95), (0.64, 118), (0.7, 138), (0.9, 174), (1, 199))  # fmt: skip
BANDWIDTH_KBPS = ((0, 1017), (0.1, 1818), (0.3, 3500), (0.5, 6075), (0.7, 11_840), (0.9, 32_500), (0.99, 100_000), (1, 204_000))  # fmt: skip
"""Quantiles of FedScale's device table; between them the logarithm is interpolated."""


@dataclass(frozen=True, slots=True)
class Devices:
    """One row for each device."""

    compute_ms: Floats
    """Of one sample's forward pass."""
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
        """Client i has the device of row i; where rows run out, they begin anew."""
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
        """Seconds of each client (or of `clients`) to fetch the model, train on so many samples, and send its update.

        `samples` counts a sample as often as it is trained on: local steps times batch size, or one number for each.
        """
        trained = np.asarray(samples, dtype=np.float64)
        compute = passes * trained * self.compute_ms[clients] / 1000
        links = down_bytes * 0.008 / self.down_kbps[clients] + up_bytes * 0.008 / self.up_kbps[clients]
        total: Floats = compute + links
        return total


def read_devices(path: Path) -> Devices:
    """A table of devices, in whichever form.

    Raises:
        ConfigError: no such file, or no such table.
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
    return _named(path, compute, down, up)


def _named(path: Path, compute_ms: Floats, down_kbps: Floats, up_kbps: Floats) -> Devices:
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
    for name, row in in_order(found):
        if isinstance(row, dict):
            values: Sequence[object] = (row.get("computation"), row.get("communication"))
        else:
            values = row if isinstance(row, (list, tuple)) else ()
        if len(values) != 2 or not all(isinstance(each, (int, float)) for each in values):
            raise ConfigError(
                f"{path}: device {name!r} is {_short(row)}; FedScale has {{computation, communication}}, the artifact two numbers"
            )
        compute.append(values[0])
        link.append(values[1])
    both = np.array(link, dtype=np.float64)
    return _named(path, np.array(compute, dtype=np.float64), both, both)


def in_order(found: Mapping[object, object]) -> list[tuple[object, object]]:
    """The entries of a published dictionary by their numbers, where they have such; else as they are."""
    if all(isinstance(name, int) for name in found):
        return sorted(found.items(), key=lambda item: int(str(item[0])))
    return list(found.items())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def synthetic_devices(num_clients: int, *, seed: int = 0) -> Devices:
    """Devices that nobody measured: drawn with the quantiles of FedScale's table, compute and link independently."""
    if num_clients < 1:
        raise ConfigError(f"{num_clients} synthetic devices: use 1 or more")
    chance = np.random.default_rng(seed)
    compute, link = (_drawn(table, chance.random(num_clients)) for table in (COMPUTE_MS, BANDWIDTH_KBPS))
    return Devices(compute, link, link, f"synthetic: drawn with the quantiles of FedScale's device table, seed {seed}")


def _drawn(table: tuple[tuple[float, float], ...], places: Floats) -> Floats:
    quantiles, values = zip(*table, strict=True)
    drawn: Floats = np.exp(np.interp(places, quantiles, np.log(values)))
    return drawn
