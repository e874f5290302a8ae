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
from pliant.mistakes import Place, free_name

LOCAL, RAY = "local", "ray"
HERE = frozenset({"localhost", "127.0.0.1", "::1", LOCAL})
MOST_WORKERS = 10_000


class Crew(BaseModel):
    """Executors in one place."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: str
    """`local`, `ray`, or a host that ssh reaches."""
    num: Annotated[int, Field(ge=1, le=MOST_WORKERS)]

    def __str__(self) -> str:
        return f"{self.where}:{self.num}"

    @classmethod
    def parse(cls, text: str) -> Crew:
        """`host:2`, `ray:4`; ValueError says what is wrong."""
        where, _, num = text.strip().rpartition(":")
        if not where or not num.isdecimal() or not 1 <= int(num) <= MOST_WORKERS:
            raise ValueError(f"{text!r:.60}: use a number of processes, host:2, ray:4, or a list of such")
        return cls(where=LOCAL if where in HERE else where, num=int(num))


class Ground(BaseModel):
    """By whom a job is computed, and where it is kept; makes no difference to its bits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: tuple[Crew, ...] = (Crew(where=LOCAL, num=2),)
    """None: the server itself trains."""
    log_path: str = "."
    """Under it are logs/NAME/TIME/aggregator and worker."""
    host: str = ""
    """The address at which executors elsewhere reach the server; empty: found out."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    ssh_user: str = ""

    @field_validator("workers", mode="before")
    @classmethod
    def _crews(cls, given: object) -> object:
        return crews_of(given)


def crews_of(given: object) -> object:
    """`2`, `host:2`, `ray:4`, or a list of such; what else it is, is left to others to refuse."""
    if isinstance(given, bool) or given is None:
        raise ValueError(f"{given!r}: use a number of processes, host:2, ray:4, or a list of such")
    if isinstance(given, int | str):
        text = str(given).strip()
        if text == "0":
            return ()
        return (Crew.parse(f"{LOCAL}:{text}" if text.isdecimal() else text),)
    if isinstance(given, list):
        return tuple(Crew.parse(str(each)) if isinstance(each, str | int) else each for each in given)
    return given


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

    def renumbered(self, taken: Collection[str]) -> FedJob:
        """The same with a number that makes its name none of `taken`."""
        return self.renamed(free_name(self.config.name, taken), is_named=False)

    def renamed(self, name: str, *, is_named: bool = True) -> FedJob:
        return self.model_copy(update={"config": self.config.model_copy(update={"name": name}), "is_named": is_named})


def absolute(path: str, folder: Path) -> str:
    """Beside the file, where it is relative; `~` is the user's home."""
    return os.path.normpath(folder / os.path.expanduser(path))


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


def checked_parts(config: FedConfig) -> dict[Place, str]:
    """What the parts that a config names say against it. Imports torch: aggregators and models are made of it."""
    from pliant.fed import aggregators, models, selectors, task

    wrong: dict[Place, str] = {}
    try:
        selectors.make(config.selector.kind, **config.selector.options)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        wrong[("selector",)] = str(error)
    try:
        aggregators.make(config.aggregator.kind, config.aggregator.options)  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        wrong[("aggregator",)] = str(error)
    if ":" not in config.model and config.model not in models.MODELS:
        wrong[("model",)] = f"model {config.model!r} is unknown: use {', '.join(models.MODELS)}, or module:function"
    if ":" not in config.data.kind and config.data.kind not in task.KINDS:
        wrong[("data", "kind")] = (
            f"data.kind {config.data.kind!r} is unknown: use {', '.join(task.KINDS)}, or module:function"
        )
    return wrong
