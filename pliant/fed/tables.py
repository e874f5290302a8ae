"""Reads published tables about clients: CSV files, and pickles without running anything in them."""

from __future__ import annotations

import csv
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.errors import ConfigError


def read_pickle(path: Path) -> object:
    """Read a pickle of plain values (dictionaries, lists, strings, numbers, OrderedDict).

    Raises:
        ConfigError: the file is missing, is no pickle, or wants to call something.
    """
    try:
        with path.open("rb") as file:
            found: object = _Plain(file, path).load()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a file that you have") from None
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle fails in more ways than the module documents
        raise ConfigError(f"{path}: not a pickle, or damaged ({type(error).__name__}: {error})") from None
    return found


class _Plain(pickle.Unpickler):
    def __init__(self, file: object, path: Path) -> None:
        super().__init__(file)  # type: ignore[arg-type]
        self._path = path

    def find_class(self, module: str, name: str) -> type[OrderedDict[object, object]]:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise ConfigError(
            f"{self._path}: this pickle wants {module}.{name}; only plain values and OrderedDict are read, "
            "because a pickle can run anything: save it again without that"
        )


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClientMap:
    """The client of each sample, as published with a data set."""

    samples: tuple[str, ...]
    clients: tuple[str, ...]
    labels: tuple[str, ...] = ()
    """Label of each sample; empty if the map has none."""


_COLUMNS = {
    "samples": ("sample_name", "sample_path", "sample", "file", "path"),
    "clients": ("client_id", "client", "user", "speaker"),
    "labels": ("category_id", "label_id", "sample_category", "label_name", "label"),
}


def read_client_map(path: Path) -> ClientMap:
    """Read FedScale's map (CSV: client_id, sample_name, sample_category, category_id) or the artifact's (pickle: {sample: client}).

    Raises:
        ConfigError: the file cannot be read, or is neither.
    """
    if form_of(path, "a client map") != "csv":
        return _pickled_map(path)
    rows = read_rows(path)
    found = {kind: next((name for name in known if name in rows[0]), "") for kind, known in _COLUMNS.items()}
    if not found["samples"] or not found["clients"]:
        raise ConfigError(f"{path}: its columns are {', '.join(rows[0])}; a client map has client_id and sample_name")
    labels = tuple(row[found["labels"]] for row in rows) if found["labels"] else ()
    return ClientMap(tuple(row[found["samples"]] for row in rows), tuple(row[found["clients"]] for row in rows), labels)


def _pickled_map(path: Path) -> ClientMap:
    found = read_pickle(path)
    plain = (str, int)
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(sample, plain) and isinstance(client, plain) for sample, client in found.items())
    ):
        raise ConfigError(f"{path}: a client map in a pickle is {{sample: client}}; this one is not")
    return ClientMap(tuple(str(each) for each in found), tuple(str(each) for each in found.values()))


def read_sizes(path: Path) -> Ints:
    """Read the number of samples of each client from a CSV with num_samples; rows of one client (one per label) are added up."""
    rows = read_rows(path)
    sizes = int_column(path, rows, "num_samples")
    if "client" in rows[0]:
        own: dict[str, int] = {}
        for row, size in zip(rows, sizes, strict=True):
            own[row["client"]] = own.get(row["client"], 0) + int(size)
        return np.array(list(own.values()), dtype=np.int64)
    return sizes


def read_label_counts(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], Ints]:
    """Read clients, labels, and the number of samples per client and label, from a CSV with client, label, num_samples."""
    rows = read_rows(path)
    for name in ("client", "label"):
        if name not in rows[0]:
            raise ConfigError(f"{path}: no column {name!r}; label counts have client, label, num_samples")
    clients = list(dict.fromkeys(row["client"] for row in rows))
    labels = sorted({row["label"] for row in rows})
    counts = np.zeros((len(clients), len(labels)), dtype=np.int64)
    place = {name: i for i, name in enumerate(clients)}, {name: i for i, name in enumerate(labels)}
    at = np.array([place[0][row["client"]] for row in rows]), np.array([place[1][row["label"]] for row in rows])
    np.add.at(counts, at, int_column(path, rows, "num_samples"))
    return tuple(clients), tuple(labels), counts


def form_of(path: Path, what: str) -> str:
    """Return csv, npz or pickle, by the first bytes and the name of the file.

    Raises:
        ConfigError: the file cannot be read, or is empty; `what` says what is wanted.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(1000)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give {what}") from None
    if not line:
        raise ConfigError(f"{path}: the file is empty; give {what}")
    if line.startswith(b"PK") or path.suffix == ".npz":
        return "npz"
    if line.startswith(b"\x80"):
        return "pickle"
    return "csv" if path.suffix == ".csv" or b"," in line else "pickle"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV with a header line."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [{(k or "").strip(): v or "" for k, v in row.items() if k is not None} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}; give a CSV file with a header line") from None
    if not rows:
        raise ConfigError(f"{path}: no rows in it; give a CSV file with a header line")
    return rows


def row_number(path: Path, place: int) -> int:
    """Return the line number of a row of `read_rows`, as editors count: from 1, with the header."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return next((reader.line_num for number, _ in enumerate(reader) if number == place), place + 2)


def int_column(path: Path, rows: list[dict[str, str]], column: str) -> Ints:
    if column not in rows[0]:
        raise ConfigError(f"{path}: no column {column!r} among {', '.join(rows[0])}")
    found = np.empty(len(rows), np.int64)
    for place, row in enumerate(rows):
        try:
            found[place] = int(row[column])
        except (ValueError, OverflowError):
            where = f"{path}: row {row_number(path, place)}, {column}"
            raise ConfigError(f"{where}: {row[column]!r:.60}: use a whole number") from None
    return found
