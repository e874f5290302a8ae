"""Reads published tables about clients: CSV files, and pickles without running anything in them."""

from __future__ import annotations

import csv
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pliant.errors import ConfigError, refuse_file


def read_pickle(path: Path) -> object:
    """Read a pickle of plain values and OrderedDict; raises ConfigError if it is no pickle, or wants to call something."""
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
T = TypeVar("T")


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
    """Read FedScale's map (CSV: client_id, sample_name, sample_category, category_id) or the artifact's (pickle: {sample: client})."""
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
    if not isinstance(found, dict) or not found or not all(isinstance(e, str | int) for e in (*found, *found.values())):
        raise ConfigError(f"{path}: a client map in a pickle is {{sample: client}}; this one is not")
    return ClientMap(tuple(str(each) for each in found), tuple(str(each) for each in found.values()))


def read_sizes(path: Path) -> Ints:
    """Read the number of samples of each client from a CSV with num_samples; rows of one client (one per label) are added up."""
    rows = read_rows(path)
    sizes = _num_samples(path, rows)
    if "client" not in rows[0]:
        return np.array(sizes, dtype=np.int64)
    own = Counter[str]()
    for row, size in zip(rows, sizes, strict=True):
        own[row["client"]] += size
    return np.array(list(own.values()), dtype=np.int64)


def read_label_counts(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], Ints]:
    """Read clients, labels, and the number of samples per client and label, from a CSV with client, label, num_samples."""
    rows = read_rows(path)
    for name in ("client", "label"):
        if name not in rows[0]:
            raise ConfigError(f"{path}: no column {name!r}; label counts have client, label, num_samples")
    clients = {name: place for place, name in enumerate(dict.fromkeys(row["client"] for row in rows))}
    labels = {name: place for place, name in enumerate(sorted({row["label"] for row in rows}))}
    counts = np.zeros((len(clients), len(labels)), dtype=np.int64)
    for row, size in zip(rows, _num_samples(path, rows), strict=True):
        counts[clients[row["client"]], labels[row["label"]]] += size
    return tuple(clients), tuple(labels), counts


def form_of(path: Path, what: str) -> str:
    """Return csv, npz or pickle, by the first bytes and the name of the file; `what` says in errors what is wanted."""
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


def _num_samples(path: Path, rows: list[dict[str, str]]) -> list[int]:
    return read_column(path, rows, "num_samples", _size, "use a whole number, 0 or more")


def _size(text: str) -> int:
    if (size := int(text)) < 0:
        raise ValueError
    return size


def read_column(path: Path, rows: list[dict[str, str]], name: str, parse: Callable[[str], T], remedy: str) -> list[T]:
    """Parse one column of `read_rows`. What `parse` refuses is a ConfigError with a line for each mistake."""
    if name not in rows[0]:
        raise ConfigError(f"{path}: no column {name!r} among {', '.join(rows[0])}")
    found, wrong = [], []
    for place, row in enumerate(rows):
        try:
            found.append(parse(row[name]))
        except ValueError:
            wrong.append(place)
    if wrong:
        lines = _line_numbers(path)
        raise refuse_file([f"{path}:{lines[place]}: {name} {rows[place][name]!r:.60}: {remedy}" for place in wrong])
    return found


def _line_numbers(path: Path) -> list[int]:
    """Return the last line of each row of a CSV."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return [reader.line_num for _ in reader]
