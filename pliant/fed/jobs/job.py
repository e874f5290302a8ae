"""A federated job to be run: what is computed (`FedConfig`, which alone decides the bits), by whom, and where it is kept.

Also what is checked of every job before it runs, in whichever form it was written: its paths, and the parts that it names.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.workers import WorkerPlaces, parse_workers
from pliant.yaml_source import KeyPath, next_free_name

NEED_PATH = ("images", "speech", "play", "posts")
"""Kinds of data that nothing is known of without a path."""


class Ground(BaseModel):
    """By whom a job is computed, and where it is kept; makes no difference to its bits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: tuple[str, ...] = ("2",)
    """Executors: so many here, `host:2` or `ray:4`; none: the server itself trains."""
    log_path: str = "."
    """Under it are logs/NAME/TIME/aggregator and worker."""
    host: str = ""
    """The address at which executors elsewhere reach the server; empty: found out."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    ssh_user: str = ""
    tls_certificate: str = ""
    """The server's, in PEM; executors trust it and no other. Empty: no TLS."""
    tls_key: str = ""

    @field_validator("workers", mode="before")
    @classmethod
    def _listed(cls, given: object) -> tuple[str, ...]:
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
        """None: no executors are wanted."""
        return parse_workers(self.workers) if self.workers else None


class FedJob(BaseModel):
    """A job that was read from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: FedConfig
    ground: Ground = Ground()
    directory: str
    """Where its file is: functions that it names are imported from there."""
    time: str = ""
    """The name of its folder among those of its name; empty: when it was submitted."""
    is_named: bool = True
    """Whether the user chose the name; else it is the file's with a 1, and `renumbered` finds one that is free."""
    remarks: tuple[str, ...] = ()
    """What the user should know about the file, with line numbers."""
    log_path_line: str = ""
    """FILE:LINE of the log_path: whether it can be written to is known only when the job's folder is made."""

    def renumbered(self, taken: Collection[str]) -> FedJob:
        """The same with a number that makes its name none of `taken`."""
        return self.renamed(next_free_name(self.config.name, taken), is_named=False)

    def renamed(self, name: str, *, is_named: bool = True) -> FedJob:
        return self.model_copy(update={"config": self.config.model_copy(update={"name": name}), "is_named": is_named})


def rounds_text(count: int, why: str, config: FedConfig) -> str:
    """How many rounds there were, and why no more, in words."""
    words = {
        "rounds": ", all that were asked for",
        "target": f" until the target of {100 * config.target:g}% was reached",
        "stopped": " until it was told to stop",
    }
    return f"{count} round{'' if count == 1 else 's'}{words.get(why, '')}"


def absolute(path: str, folder: Path) -> str:
    """Beside the file, where it is relative; `~` and `$HOME` are what a shell takes them for."""
    return os.path.normpath(folder / os.path.expandvars(os.path.expanduser(path)))


def with_paths(config: FedConfig, folder: Path) -> tuple[FedConfig, dict[tuple[str, ...], str]]:
    """The same with absolute paths, and the keys of those that lead nowhere."""
    missing: dict[tuple[str, ...], str] = {}

    def found(place: tuple[str, ...], path: str, words: Collection[str] = ()) -> str:
        if not path or path in words:
            return path
        full = absolute(path, folder)
        if not os.path.exists(full):
            missing[place] = path
        return full

    data = config.data
    # What a user's own function is given need not be a file.
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


def checked_parts(config: FedConfig) -> dict[KeyPath, str]:
    """What the parts that a config names say against it. Imports torch: aggregators and models are made of it."""
    from pliant.fed.aggregation import make_aggregator
    from pliant.fed.data import build, models
    from pliant.fed.selection.selectors import make_selector

    wrong: dict[KeyPath, str] = {}
    try:
        make_selector(config.selector.kind, **config.selector.options)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        wrong[("selector",)] = str(error)
    try:
        make_aggregator(config.aggregator.kind, config.aggregator.options)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        wrong[("aggregator",)] = str(error)
    if ":" not in config.model and config.model not in models.MODELS:
        wrong[("model",)] = f"model {config.model!r} is unknown: use {', '.join(models.MODELS)}, or module:function"
    if config.data.kind in NEED_PATH and not config.data.path:
        wrong[("data", "path")] = f"{config.data.kind} lie in a file or folder of yours: give its path"
    if ":" not in config.data.kind and config.data.kind not in build.KINDS:
        wrong[("data", "kind")] = (
            f"data.kind {config.data.kind!r} is unknown: use {', '.join(build.KINDS)}, or module:function"
        )
    return wrong
