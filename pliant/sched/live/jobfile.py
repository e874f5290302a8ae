"""What a user asks of the cluster: the job of a job.yml, checked.

A wrong file is refused with the line of each mistake. What goes over the API is the same `JobSpec` as JSON, with
absolute paths. Nothing here talks to a server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pliant.errors import ConfigError
from pliant.yaml_source import KeyPath, YamlSource, default_job_name, name_error, next_free_name, validation_messages

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
        if wrong := name_error(name):
            raise ValueError(wrong)
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
            raise ConfigError(
                "; ".join(validation_messages(error, cls, examples=_EXAMPLES, hidden=_HIDDEN).values())
            ) from None

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
        return JobFile(self.spec.model_copy(update={"name": next_free_name(self.spec.name, taken)}), False)


def read_job(page: YamlSource, name: str = "") -> JobFile:
    """The job on the page; `name` goes before the one in it.

    Raises:
        ConfigError: it is no job; one line for each mistake, with its line number.
    """
    said = page.values(TEXTS)
    wrong: dict[KeyPath, str] = {}
    if "directory" in said:
        wrong[("directory",)] = "unknown key 'directory': a job runs where its file is"
    folder = page.path.absolute().parent
    program = said.get("program")
    if isinstance(program, str):
        said["program"] = os.path.normpath(folder / program)
        if not os.path.isfile(str(said["program"])):
            wrong[("program",)] = f"program {program}: no such file; it is looked for in {folder}"
        elif not program.endswith(".py") and not os.access(str(said["program"]), os.X_OK):
            wrong[("program",)] = f"program {program}: it is neither Python (.py) nor executable; chmod +x it"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or default_job_name(page.path)
    try:
        spec = JobSpec.model_validate({**said, "directory": str(folder)})
    except ValidationError as error:
        wrong = validation_messages(error, JobSpec, examples=_EXAMPLES, hidden=_HIDDEN) | wrong
    if wrong:
        raise page.error(wrong)
    return JobFile(spec, is_named)


_HIDDEN = ("directory",)
_EXAMPLES = {"program": "program: train.py", "replicas": "replicas: 4"}
