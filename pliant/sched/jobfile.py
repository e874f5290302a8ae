"""What a user asks of the cluster: the job of a job.yml, checked.

A wrong file is refused with the line of each mistake. What goes over the API is the same `JobSpec` as JSON, with
absolute paths. Nothing here talks to a server.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from pliant.errors import ConfigError
from pliant.page import Page

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_REPLICAS = 65536
TEXTS = frozenset({"name", "program", "args", "devices", "determinism", "env"})
"""Keys whose scalars are taken as they are written: YAML would make 8 of 010, and False of no."""

Natural = Annotated[int, Field(ge=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class JobSpec(BaseModel):
    """A job as submitted; wrong values cannot be in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    """Unique in the cluster."""
    program: str
    """An absolute path."""
    directory: str
    """Where the program runs: the job file's directory."""
    args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """N, as the program says it in `pliant.join`."""
    min: Natural = 1
    """Devices that it is guaranteed once started; 0: it may be put off entirely."""
    max: Annotated[int, Field(ge=1, default_factory=lambda given: given.get("replicas", 1))]
    """Devices that it has at most; where it is not given, one for each replica."""
    devices: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Types it may use, best first; empty: all of the cluster."""
    speed: dict[str, Speed] = {}
    """Replica-steps per second on a type, until measured."""
    mixed: bool = False
    """Whether it may have several types at a time."""
    determinism: Literal["", "D0", "D1", "D2"] = ""
    """Empty: what the program says."""
    priority: int = 0
    """Higher goes first."""
    env: dict[str, str] = {}
    checkpoint_every: Natural = 50
    """Steps; 0: only when the job is put off."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80}: use up to 64 letters, digits, . _ and -, beginning with a letter or digit")
        return name

    @field_validator("program", "directory")
    @classmethod
    def _check_absolute(cls, path: str) -> str:
        if not os.path.isabs(path) or "\0" in path:
            raise ValueError(f"{path!r} is not an absolute path")
        return path

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [arg for arg in args if "\0" in arg]:
            raise ValueError(f"{bad[0]!r:.60} holds a NUL, which no program can be given")
        return args

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r:.60} cannot be a variable: use letters, digits and _, as in OMP_NUM_THREADS")
            if name.startswith("PLIANT_"):
                raise ValueError(f"{name} is pliant's own: the scheduler sets it")
        return env

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [kind for number, kind in enumerate(devices) if kind in devices[:number]]:
            raise ValueError(f"{twice[0]!r} is listed twice")
        return devices

    @model_validator(mode="after")
    def _check_together(self) -> JobSpec:
        if self.max > self.replicas:
            raise ValueError(
                f"max {self.max}: with {self.replicas} replicas, {self.replicas} devices are the most it can use"
            )
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}: lower the one or raise the other")
        if self.mixed and self.determinism != "D2":
            raise ValueError("mixed: unlike devices change bits below D2; add determinism: D2")
        if self.devices and (strange := set(self.speed) - set(self.devices)):
            raise ValueError(
                f"speed of {', '.join(sorted(strange))}: not among its devices; add it there, or leave it out"
            )
        return self

    @classmethod
    def from_json(cls, value: object) -> JobSpec:
        """The job that `value` describes; ConfigError, in one line, if it describes none."""
        if not isinstance(value, dict):
            raise ConfigError(f"a job is an object with name, program, directory, replicas, ...; not {value!r:.60}")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigError("; ".join(_told(detail) for detail in _details(error))) from None

    def to_json(self) -> dict[str, object]:
        """As it goes over the API: `from_json` gives the same."""
        return self.model_dump(mode="json")


class JobFile(NamedTuple):
    """A job that was read from a file."""

    spec: JobSpec
    is_named: bool
    """Whether the user chose the name; else it is the file's with a 1, and `renumbered` finds one that is free."""

    def renumbered(self, taken: Collection[str]) -> JobFile:
        """The same with a number that makes its name none of `taken`."""
        stem = self.spec.name.rpartition("-")[0]
        number = next(number for number in itertools.count(1) if f"{stem}-{number}" not in taken)
        return JobFile(self.spec.model_copy(update={"name": f"{stem}-{number}"}), False)


def read_job(page: Page, name: str = "") -> JobFile:
    """The job on the page; `name` goes before the one in it.

    Raises:
        ConfigError: it is no job; one line for each mistake, with its line number.
    """
    said = page.values(TEXTS)
    mistakes: dict[tuple[str | int, ...], str] = {}
    if "directory" in said:
        mistakes[("directory",)] = "unknown key 'directory': a job runs where its file is"
    folder = page.path.absolute().parent
    program = said.get("program")
    if isinstance(program, str):
        said["program"] = os.path.normpath(folder / program)
        if not os.path.isfile(str(said["program"])):
            mistakes[("program",)] = f"program {program}: no such file; it is looked for in {folder}"
        elif not program.endswith(".py") and not os.access(str(said["program"]), os.X_OK):
            mistakes[("program",)] = f"program {program}: it is neither Python (.py) nor executable; chmod +x it"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or f"{_stem(page.path)}-1"
    try:
        spec = JobSpec.model_validate({**said, "directory": str(folder)})
    except ValidationError as error:
        for detail in _details(error):
            mistakes.setdefault(_place(detail), _told(detail))
    if mistakes:
        raise page.refusal(mistakes)
    return JobFile(spec, is_named)


def _stem(path: Path) -> str:
    """The file's name as the beginning of a job's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("._-")[:58] or "job"


def _details(error: ValidationError) -> list[ErrorDetails]:
    """The user's mistakes: not that a default could not be had, because a value before it is wrong."""
    return [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]


def _place(detail: ErrorDetails) -> tuple[str | int, ...]:
    if detail["type"] == "value_error" and not detail["loc"]:
        # What does not fit together is told at the key that the message begins with.
        return (str(detail["ctx"]["error"]).split()[0].rstrip(":"),)
    return detail["loc"]


def _told(detail: ErrorDetails) -> str:
    """One mistake in our words."""
    loc, given = detail["loc"], detail["input"]
    key = ".".join(str(step) for step in loc if step != "[key]")
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(key, JobSpec.model_fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
            return f"unknown key {key!r}: {hint}"
        case "missing":
            return f"{key} is missing: add {_EXAMPLES.get(key, key)}"
        case "value_error":
            return f"{key} {limits['error']}" if key else str(limits["error"])
        case "greater_than_equal" | "less_than_equal" | "greater_than":
            bound, side = next((limits[side], side) for side in ("ge", "le", "gt") if side in limits)
            words = {"ge": f"{bound} or more", "le": f"{bound} or less", "gt": f"more than {bound:g}"}
            return f"{key} {given!r:.60}: use {words[side]}"
        case "literal_error":
            return f"{key} {given!r:.60} is not known: use {str(limits['expected']).replace(repr('') + ', ', '')}"
        case _:
            wanted = next((word for begin, word in _KINDS.items() if detail["type"].startswith(begin)), detail["msg"])
            return f"{key} {given!r:.60}: use {wanted}"


_FIELDS = [name for name in JobSpec.model_fields if name != "directory"]
_EXAMPLES = {"program": "program: train.py", "replicas": "replicas: 4"}
_KINDS = {
    "int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false", "string": "text",
    "tuple": "a list, as in [a, b]", "dict": "a mapping, as in {a: b}",
}  # fmt: skip
