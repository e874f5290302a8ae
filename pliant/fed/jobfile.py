"""Federated jobs as people write them: the model of a job, our YAML form of it, and checks that need no training.

`FedConfig` alone decides the bits of a job. `FedPlacement` says by which workers it is computed and where its files go.
The form of Oort's artifact and of FedScale is read by `fed.artifact`; `jobs.schema` decides which form a file has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pliant.errors import ConfigError
from pliant.fed.config import DataConfig, FedConfig
from pliant.fed.workers import WorkerPlaces, parse_workers
from pliant.yaml_source import KeyPath, YamlSource, default_job_name, name_error, next_free_name, validate

if TYPE_CHECKING:
    from torch import Tensor

KEYS = ("participants",)
"""Keys of our form that no other kind of job has."""
PATHS = ("log_path", "tls_certificate", "tls_key")
TEXTS = frozenset({"name", "model", "devices", "availability", "host", "ssh_user", *PATHS})
"""Keys whose scalars are taken as they are written."""
MAX_TABLE_BYTES = 16 << 20
"""Larger tables are not read by the checks, only by the job."""
NUM_DIGITS = 1438
"""Training samples of `digits`."""
NUM_TESTS = {"digits": 359, "fashion-mnist": 10_000}
"""Test samples by kind of data, where that is known."""
SHAPES = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "images": (3, 64, 64), "speech": (1, 32, 32)}
"""Shape of a sample by kind of data; samples of the other kinds are texts."""


# --- the job ---


class FedPlacement(BaseModel):
    """The workers of a federated job and where its files go. Changes nothing about the result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: tuple[str, ...] = ("2",)
    """Worker processes: `2` on this machine, `host:2` over ssh, `ray:4`; empty: the coordinator itself trains."""
    log_path: str = "."
    """The job's folder is LOG_PATH/logs/NAME/TIME."""
    host: str = ""
    """The address at which workers elsewhere reach the coordinator; empty: found automatically."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    ssh_user: str = ""
    tls_certificate: str = ""
    """PEM file with the coordinator's certificate, the only one that workers trust. Empty: no TLS."""
    tls_key: str = ""

    @field_validator("workers", mode="before")
    @classmethod
    def _parse_workers(cls, given: object) -> tuple[str, ...]:
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if wrong := [each for each in listed if isinstance(each, bool) or not isinstance(each, int | str)]:
            raise ValueError(f"{wrong[0]!r:.60}: give a number, host:n, ray:n, or a list of such")
        texts = tuple(str(each).strip() for each in listed)
        if texts in ((), ("0",)):
            return ()
        try:
            parse_workers(texts)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("workers: ")) from None
        return texts

    @property
    def places(self) -> WorkerPlaces | None:
        """The parsed `workers`; None where the coordinator itself trains."""
        return parse_workers(self.workers) if self.workers else None

    @property
    def num_local_workers(self) -> int:
        """Processes that train on this machine, the coordinator included where it trains itself."""
        places = self.places
        if places is None:
            return 1
        return sum(place.count for place in places.parts if place.kind == "local")


class FederatedJob(BaseModel):
    """A federated job as submitted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["federated"] = "federated"
    config: FedConfig
    placement: FedPlacement = FedPlacement()
    directory: str
    """The job file's directory: functions that the job names are imported from there."""
    time: str = ""
    """Name of the job's folder below LOG_PATH/logs/NAME; empty: the time of submission."""
    is_named: bool = True
    """Whether the user chose the name. If not, it is the file's name with a number, and `with_free_name` may change it."""
    remarks: tuple[str, ...] = ()
    """What the user should know about the file, with line numbers."""
    log_path_line: str = ""
    """FILE:LINE of log_path, for an error message: that it cannot be written is noticed only when the job begins."""
    priority: int = 0
    """Jobs of higher priority get devices first."""

    @property
    def name(self) -> str:
        return self.config.name

    def with_free_name(self, taken: Collection[str]) -> FederatedJob:
        """Return the job with the first number in its name that is not taken."""
        return self.renamed(next_free_name(self.config.name, taken), is_named=False)

    def renamed(self, name: str, *, is_named: bool = True) -> FederatedJob:
        return self.model_copy(update={"config": self.config.model_copy(update={"name": name}), "is_named": is_named})


def rounds_text(count: int, why: str, config: FedConfig) -> str:
    """Say how many rounds a job had and why it ended."""
    words = {
        "rounds": ", all that were asked for",
        "target": f" until the target of {100 * config.target:g}% was reached",
        "stopped": " until it was told to stop",
    }
    return f"{count} round{'' if count == 1 else 's'}{words.get(why, '')}"


def make_job_folder(job: FederatedJob) -> Path:
    """Make LOG_PATH/logs/NAME/TIME with `aggregator` and `worker`, as the artifact does, and write `job.json` into it."""
    runs = Path(job.placement.log_path) / "logs" / job.name
    try:
        folder = _make_new_folder(runs, job.time)
        (folder / "job.json").write_text(job.model_dump_json(indent=1))
        (folder / "aggregator").mkdir()
        (folder / "worker").mkdir()
    except OSError as error:
        where = f"{job.log_path_line}: " if job.log_path_line else ""
        raise ConfigError(
            f"{where}log_path {job.placement.log_path}: {error.strerror or error}; give a folder that can be written to"
        ) from None
    return folder


def _make_new_folder(runs: Path, time_stamp: str) -> Path:
    """Make a folder named after the time; two jobs of one second get a number."""
    stamp = time_stamp or time.strftime("%m%d_%H%M%S")
    for number in range(1000):
        path = runs / (stamp if not number else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        if time_stamp:
            raise ConfigError(f"{path} is there already: leave time_stamp out, or give another")
    raise ConfigError(f"{runs}: a thousand jobs began in this second")


# --- our form ---


class _FederatedFile(FedConfig, FedPlacement):
    """All keys of our form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["federated"] = "federated"
    priority: int = 0


def kind_mistakes(said: Mapping[str, object]) -> dict[KeyPath, str]:
    """Return what is wrong with the `kind` of a job file; for files of any form."""
    kind = said.get("kind", "train")
    if kind in ("train", "federated"):
        return {}
    return {("kind",): f"kind {kind!r:.60} is not known: use train or federated"}


def read_federated(source: YamlSource, name: str = "") -> FederatedJob:
    """Return the job that a file in our form describes; `name` overrides the file's."""
    said = source.values(TEXTS)
    for section in ("selector", "aggregator"):
        if section in said:
            said[section] = _with_numbers(said[section])
    wrong = kind_mistakes(said)
    if "name" in said and (why := name_error(str(said["name"]))):
        wrong[("name",)] = f"name {why}"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or default_job_name(source.path)
    both, found = validate(_FederatedFile, said, examples={"participants": "participants: 20"})
    wrong = found | wrong
    if both is None:
        raise source.error(wrong)
    folder = source.path.absolute().parent
    config = FedConfig.model_validate({key: getattr(both, key) for key in FedConfig.model_fields})
    config, missing = with_absolute_paths(config, folder)
    placement = FedPlacement(**{key: getattr(both, key) for key in FedPlacement.model_fields})
    later: dict[KeyPath, str] = {
        place: f"{'.'.join(place)} {path}: no such file or folder" for place, path in missing.items()
    }
    if config.data.partition != "natural" and config.data.clients:  # of a natural one, the data tell how many there are
        later |= config.check_sizes(config.data.clients)
    later |= _check_tls(placement, folder)
    # A default stands in for a value that is wrong already: nothing is said about that.
    later |= check_parts(config, is_wrong=bool(wrong or later))
    wrong |= {place: text for place, text in later.items() if not any(place[: len(bad)] == bad for bad in wrong)}
    if wrong:
        raise source.error(wrong)
    paths = {key: absolute(path, folder) for key in PATHS if (path := getattr(placement, key))}
    placement = placement.model_copy(update=paths)
    return FederatedJob(
        config=config, placement=placement, directory=str(folder), is_named=is_named, priority=both.priority
    )


def absolute(path: str, folder: Path) -> str:
    """Return `path` relative to `folder`, with `~` and `$HOME` expanded as a shell does."""
    return os.path.normpath(folder / os.path.expandvars(os.path.expanduser(path)))


def with_absolute_paths(config: FedConfig, folder: Path) -> tuple[FedConfig, dict[tuple[str, ...], str]]:
    """Return the config with absolute paths, and the keys of paths that do not exist."""
    missing: dict[tuple[str, ...], str] = {}

    def found(place: tuple[str, ...], path: str, words: Collection[str] = ()) -> str:
        if not path or path in words:
            return path
        full = absolute(path, folder)
        if not os.path.exists(full):
            missing[place] = path
        return full

    data = config.data
    # The `path` that a user's own function is given need not be a file.
    own = ":" in data.kind
    data = data.model_copy(
        update={
            "path": data.path if own else found(("data", "path"), data.path),
            "map": found(("data", "map"), data.map),
            "sizes": found(("data", "sizes"), data.sizes),
        }
    )
    return config.model_copy(
        update={
            "data": data,
            "devices": found(("devices",), config.devices, ("synthetic", "equal")),
            "availability": found(("availability",), config.availability, ("synthetic",)),
        }
    ), missing


def _check_tls(placement: FedPlacement, folder: Path) -> dict[KeyPath, str]:
    """Return what is wrong with the TLS files. Checked also without workers, which may be added later."""
    paths = {key: getattr(placement, key) for key in ("tls_certificate", "tls_key")}
    full = {key: absolute(path, folder) if path else "" for key, path in paths.items()}
    wrong: dict[KeyPath, str] = {
        (key,): f"{key} {paths[key]}: no such file" for key, path in full.items() if path and not Path(path).is_file()
    }
    if not wrong and paths["tls_key"] and not paths["tls_certificate"]:
        wrong[("tls_key",)] = "tls_key is of no use without its certificate: add tls_certificate"
    elif not wrong and paths["tls_certificate"]:  # the file may hold the key, too
        from pliant.fed.coordinator import server_tls

        try:
            server_tls(full["tls_certificate"], full["tls_key"])
        except ConfigError as error:
            wrong[("tls_certificate",)] = str(error)
    return wrong


def _with_numbers(given: object) -> object:
    """Return options with texts such as 1e-3, which YAML takes for text, turned into numbers."""
    if isinstance(given, Mapping):
        return {key: _with_numbers(value) for key, value in given.items()}
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            return float(given)
    return given


# --- checks ---


def check_parts(config: FedConfig, *, is_wrong: bool = False) -> dict[KeyPath, str]:
    """Return what is wrong with the selector, aggregator, model and data that a config names.

    The options of the aggregator are checked last, if nothing else `is_wrong`, because that imports torch.
    """
    from pliant.fed.data import names
    from pliant.fed.selection.selectors import make_selector

    selector, aggregator = config.selector, config.aggregator
    wrong = _failures({
        ("selector",): lambda: make_selector(selector.kind, **selector.options),  # type: ignore[arg-type]
        ("aggregator",): lambda: names.check_aggregator(aggregator.kind),
        ("model",): lambda: names.check_model(config.model),
        ("data", "kind"): lambda: names.check_kind(config.data),
        ("data", "path"): lambda: names.check_path(config.data),
    })  # fmt: skip
    if wrong or is_wrong:
        return wrong
    from pliant.fed.aggregation import make_aggregator

    return _failures({("aggregator",): lambda: make_aggregator(aggregator.kind, aggregator.options)})  # type: ignore[arg-type]


def _failures(checks: Mapping[KeyPath, Callable[[], object]]) -> dict[KeyPath, str]:
    """Return the error of each check that fails."""
    wrong: dict[KeyPath, str] = {}
    for place, check in checks.items():
        try:
            check()
        except (ConfigError, TypeError) as error:
            wrong[place] = str(error)
    return wrong


def check_files(config: FedConfig, folder: Path) -> dict[KeyPath, str]:
    """Return what is wrong with the tables, data and functions that a config names, by key. Imports torch.

    Paths must be absolute; functions are imported from `folder`. Data are not loaded, and only small tables are read:
    the rest is checked when the job builds its task.
    """
    from pliant.fed.clients import read_availability, read_devices
    from pliant.fed.data import datasets, models
    from pliant.fed.data.user_functions import find_function, is_function_name
    from pliant.fed.tables import read_client_map, read_sizes

    data = config.data

    def read_small(path: str, read: Callable[[Path], object]) -> None:
        if Path(path).stat().st_size <= MAX_TABLE_BYTES:
            read(Path(path))

    checks: dict[KeyPath, Callable[[], object]] = {}
    if config.devices not in ("synthetic", "equal"):
        checks[("devices",)] = lambda: read_small(config.devices, read_devices)
    if config.availability not in ("", "synthetic"):
        checks[("availability",)] = lambda: read_small(config.availability, read_availability)
    if data.map:
        checks[("data", "map")] = lambda: read_small(data.map, read_client_map)
    if data.sizes:
        checks[("data", "sizes")] = lambda: read_small(data.sizes, read_sizes)
    if is_function_name(data.kind):
        checks[("data", "kind")] = lambda: datasets.check_function(data.kind, data.path)
    else:
        checks[("data", "path") if data.path else ("data",)] = lambda: _check_data(data)
    if is_function_name(config.model):
        checks[("model",)] = lambda: find_function(config.model, "model", models.OWN, 2)
    elif not is_function_name(data.kind):
        checks[("model",)] = lambda: models.check(config.model, _empty_sample(data.kind))
    with _importing_from(folder):
        return _failures(checks) or _failures({("data", "clients"): lambda: _check_num_samples(data)})


def _check_data(data: DataConfig) -> None:
    from pliant.fed.data import datasets

    path = Path(data.path)
    if data.kind == "fashion-mnist":
        datasets.fashion_files(path if data.path else None)
    elif data.kind == "digits" and importlib.util.find_spec("sklearn") is None:
        raise ConfigError(datasets.NO_DIGITS)
    elif data.kind == "images" and not path.is_dir():
        raise ConfigError(f"{path}: no folder; give one with a folder of images for each class")
    elif data.kind == "speech" and next(path.glob("*/*_nohash_*.wav"), None) is None:
        raise ConfigError(datasets.NOT_THERE.format(path))
    elif data.kind in ("play", "posts") and not path.is_file():
        raise ConfigError(f"{path}: no file; give {'a text' if data.kind == 'play' else 'a CSV of author and text'}")


def _empty_sample(kind: str) -> Tensor:
    import torch

    return torch.empty(SHAPES[kind]) if kind in SHAPES else torch.empty(80, dtype=torch.int64)


def _check_num_samples(data: DataConfig) -> None:
    """Check that there is a sample for each client, where the number of samples is known."""
    from pliant.fed.data import datasets, partition

    if data.kind in NUM_TESTS:
        partition.check_test_samples(NUM_TESTS[data.kind], data.test_samples)
    if data.partition == "natural" or data.sizes:
        return
    if data.kind == "digits":
        partition.check_clients(NUM_DIGITS, data.clients)
    elif data.kind == "fashion-mnist":
        labels = datasets.fashion_files(Path(data.path) if data.path else None)["train-labels-idx1-ubyte"]
        partition.check_clients(len(datasets.read_idx(labels)), data.clients)


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Make modules in `folder` importable for the block, and forget them: another job may have modules of these names."""
    before, path = set(sys.modules), list(sys.path)
    with contextlib.chdir(folder):
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).is_relative_to(folder):
                    del sys.modules[name]
