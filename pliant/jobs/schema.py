"""The schema of jobs: what a job file, the HTTP API and `pliant run -f` say about a job, as pydantic models.

A job has a kind, `train` or `federated`. `read_job` reads a YAML file and reports mistakes with file and line; over the API
the same models travel as JSON with absolute paths, and the OpenAPI description is generated from them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from pliant.errors import ConfigError
from pliant.fed import artifact
from pliant.fed.config import name_stored_preset
from pliant.fed.jobfile import KEYS as FEDERATED_KEYS
from pliant.fed.jobfile import FederatedJob, check_files, kind_mistakes, read_federated
from pliant.identity import parse_verify
from pliant.yaml_source import (
    JointMistakes,
    KeyPath,
    YamlSource,
    default_job_name,
    name_error,
    next_free_name,
    validate,
    validation_messages,
)

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_REPLICAS = 65536
TEXTS = frozenset({
    "kind", "name", "program", "args", "command", "devices", "determinism", "order", "allow", "verify", "env", "hosts", "policy", "monitor", "flags",
})  # fmt: skip
"""Keys of a train job whose scalars are taken as they are written: YAML would make 8 of 010, and False of no."""
PATHS = ("checkpoint_dir", "record", "logdir")

Natural = Annotated[int, Field(ge=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


# --- jobs ---


class TrainJob(BaseModel):
    """A training job as submitted. Strict: JSON of the wrong type is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["train"] = "train"
    name: str
    """Unique in the cluster."""
    program: str
    """Absolute path of the program; "-m" if `args` begin with the name of a module."""
    directory: str
    """Working directory of the program: the job file's directory."""
    args: Texts = ()
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Number of replicas, as in the program's `pliant.join(replicas=N)`."""
    workers: Natural = 0
    """Workers that `pliant run -f` starts with; 0: `max`. The scheduler goes by `min` and `max`."""
    min: Natural = 1
    """Devices that the job keeps once it has started; 0: it may be put off entirely."""
    max: Annotated[int, Field(ge=1, default_factory=lambda given: given.get("replicas", 1))]
    """Devices that the job has at most; default: one for each replica."""
    devices: Texts = ()
    """Device types that the job may use, best first; empty: all types of the cluster."""
    speed: dict[str, Speed] = {}
    """Replica-steps per second by device type, used until they are measured."""
    mixed: bool = False
    """Whether the job may have several device types at a time."""
    determinism: Literal["", "D0", "D1", "D2"] = ""
    """Determinism level; empty: what the program says."""
    order: Literal["", "ddp", "tree"] = ""
    """How gradients are added; empty: what the program says."""
    allow: Texts = ()
    """Operators that may run without a deterministic kernel, besides those that the program allows."""
    verify: str = ""
    """Steps between two comparisons of the workers' states, or off; empty: what the program says."""
    priority: int = 0
    """Jobs of higher priority get devices first."""
    env: dict[str, str] = {}
    hosts: str = ""
    """HOST:SLOTS,... for `pliant run -f`; the scheduler places jobs by itself."""
    checkpoint_dir: str = ""
    """Directory of checkpoints; empty: the job's own, or none with `pliant run -f`."""
    checkpoint_every: Natural = 50
    """Steps between checkpoints; 0: only when the job is put off."""
    policy: Texts = ()
    """Adaptation policies, as `pliant run --policy` takes them."""
    monitor: str = ""
    """Monitors, as `pliant run --monitor` takes them."""
    record: str = ""
    """Path of the record; empty: in the job's own folder, or none with `pliant run -f`."""
    logdir: str = ""
    """Directory for each worker's output."""
    flags: Texts = ()
    """Further flags of `pliant run`, such as [--tensorboard, runs]."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if wrong := name_error(name):
            raise ValueError(wrong)
        return name

    @field_validator("program", "directory")
    @classmethod
    def _check_absolute(cls, path: str, info: ValidationInfo) -> str:
        if path == "-m" and info.field_name == "program":
            return path
        if not os.path.isabs(path) or "\0" in path:
            raise ValueError(f"{path!r} is not an absolute path")
        return path

    @field_validator("verify")
    @classmethod
    def _check_verify(cls, verify: str) -> str:
        try:
            parse_verify(verify, "verify")
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("verify ")) from None  # the key is named by whoever reports it
        return verify

    @field_validator("args", "allow", "policy", "flags")
    @classmethod
    def _check_words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [word for word in words if "\0" in word]:
            raise ValueError(f"{bad[0]!r:.60} holds a NUL, which no program can be given")
        return words

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
    def _check_together(self) -> TrainJob:
        wrong: dict[KeyPath, str] = {}
        if self.max > self.replicas:
            wrong[("max",)] = (
                f"max {self.max}: with {self.replicas} replicas, {self.replicas} devices are the most it can use"
            )
        for key, count in (("min", self.min), ("workers", self.workers)):
            if count > self.max:
                wrong[(key,)] = f"{key} {count} is more than max {self.max}: lower the one or raise the other"
        if self.mixed and self.determinism != "D2":
            wrong[("mixed",)] = "mixed: unlike devices change bits below D2; add determinism: D2"
        if self.devices and (strange := set(self.speed) - set(self.devices)):
            wrong[("speed",)] = (
                f"speed of {', '.join(sorted(strange))}: not among its devices; add it there, or leave it out"
            )
        if wrong:
            raise JointMistakes(wrong)
        return self

    def run_flags(self) -> list[str]:
        """Return the flags of `pliant run` that the job file asks for, without workers and hosts."""
        flags = {
            "--determinism": self.determinism, "--order": self.order, "--verify": self.verify,
            "--checkpoint-dir": self.checkpoint_dir, "--checkpoint-every": self.checkpoint_every if self.checkpoint_dir else "", "--monitor": self.monitor,
            "--record": self.record, "--logdir": self.logdir,
        }  # fmt: skip
        words = [str(word) for flag, value in flags.items() if value != "" for word in (flag, value)]
        listed = (("--allow", self.allow), ("--policy", self.policy))
        return [*words, *(word for flag, values in listed for each in values for word in (flag, each)), *self.flags]


JobSpec = TrainJob | FederatedJob
"""A job of any kind. In JSON and YAML the key `kind` tells which; without it, it is a train job."""

_HIDDEN = ("directory", "kind")
_STAND_INS = {"program": "/", "replicas": MAX_REPLICAS, "determinism": "D2"}
"""Taken for these keys if they are wrong or missing, to see what is wrong with the others."""
_EXAMPLES = {"program": "program: train.py", "replicas": "replicas: 4"}


def job_from_json(value: object) -> JobSpec:
    """Return the job that `value` describes; raises ConfigError in one line if it describes none."""
    if not isinstance(value, dict):
        raise ConfigError(f"a job is an object with name, program, directory, replicas, ...; not {value!r:.60}")
    kind = value.get("kind", "train")
    if kind not in ("train", "federated"):
        raise ConfigError(f"kind {kind!r:.60} is not known: use train or federated")
    model = TrainJob if kind == "train" else FederatedJob
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(validation_messages(error, model, examples=_EXAMPLES, hidden=_HIDDEN).values())
        ) from None


def stored_job(spec: object) -> JobSpec:
    """Return the job of a specification that the store has kept, perhaps since an earlier version; raises ConfigError."""
    match spec:
        case {"config": dict(config), **rest}:
            return job_from_json({**rest, "config": name_stored_preset(config)})
    return job_from_json(spec)


# --- job files ---


class JobFile(NamedTuple):
    """A job that was read from a file."""

    job: JobSpec
    is_named: bool
    """Whether the user chose the name. If not, it is the file's name with a number, and `with_free_name` may change it."""

    @property
    def name(self) -> str:
        return self.job.name

    def with_free_name(self, taken: Collection[str]) -> JobFile:
        """Return the same with the first number in its name that is not taken."""
        if isinstance(self.job, FederatedJob):
            return JobFile(self.job.with_free_name(taken), is_named=False)
        return JobFile(self.job.model_copy(update={"name": next_free_name(self.job.name, taken)}), is_named=False)


def read_job(file: YamlSource | Path, name: str = "") -> JobFile:
    """Return the job that a YAML file describes, in any of the forms; `name` overrides the file's.

    Raises:
        ConfigError: one line for each mistake, with file and line number.
    """
    source = file if isinstance(file, YamlSource) else YamlSource.read(file)
    if not is_federated(source):
        return _read_train(source, name)
    job = read_federated_form(source, name)
    if wrong := check_files(job.config, Path(job.directory)):
        raise artifact.blame_keys(source, wrong) if _is_artifact(source) else source.error(wrong)
    return JobFile(job, is_named=job.is_named)


def is_federated(source: YamlSource) -> bool:
    """Return whether the file describes a federated job, by its kind; by its keys, if it has none of the known kinds."""
    kind = source.values(TEXTS).get("kind", "")
    by_keys = bool(set(source.keys) & {*FEDERATED_KEYS, *artifact.FORM_KEYS})
    return kind == "federated" or (kind != "train" and by_keys)


def is_training(source: YamlSource) -> bool:
    """Return whether the file describes a training job, right or wrong, by its kind or by the program that it names."""
    says_so = source.values(TEXTS).get("kind") == "train" or bool({"program", "command"} & set(source.keys))
    return says_so and not is_federated(source)


def read_federated_form(source: YamlSource, name: str = "") -> FederatedJob:
    """Return the federated job of a file, without looking into the data and tables that it names."""
    if name and (wrong := name_error(name)):
        raise ConfigError(f"name {wrong}")
    job = artifact.read_artifact(source, name) if _is_artifact(source) else read_federated(source, name)
    return job.model_copy(update={"log_path_line": f"{source.path}:{source.line(_log_path_place(source))}"})


def _is_artifact(source: YamlSource) -> bool:
    return bool(set(source.keys) & set(artifact.FORM_KEYS))


def _log_path_place(source: YamlSource) -> KeyPath:
    listed = source.values().get("job_conf")
    for number, item in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(item, Mapping) and "log_path" in item:
            return ("job_conf", number, "log_path")
    return ("job_conf", "log_path") if isinstance(listed, Mapping) else ("log_path",)


def _read_train(source: YamlSource, name: str) -> JobFile:
    said = source.values(TEXTS)
    wrong = kind_mistakes(said)
    if "directory" in said:
        wrong[("directory",)] = "unknown key 'directory': a job runs where its file is"
    folder = source.path.absolute().parent
    if "command" in said:
        wrong |= _split_command(said)
    for key in PATHS:
        if isinstance(said.get(key), str) and said[key]:
            said[key] = os.path.normpath(folder / str(said[key]))
    program = said.get("program")
    if isinstance(program, str) and program.partition(" ")[0] == "-m":
        words, given = program.split()[1:], said.get("args", [])
        said["program"] = "-m"
        if isinstance(given, list):
            said["args"] = [*words, *given]
        first = next(iter([*words, *(given if isinstance(given, list) else [])]), "-")
        if str(first).startswith("-"):
            wrong[("program",)] = "program -m: name the module, as in `program: -m package.train`"
    elif isinstance(program, str):
        said["program"] = os.path.normpath(folder / program)
        if not os.path.isfile(str(said["program"])):
            wrong[("program",)] = f"program {program}: no such file; it is looked for in {folder}"
        elif not program.endswith(".py") and not os.access(str(said["program"]), os.X_OK):
            wrong[("program",)] = f"program {program}: it is neither Python (.py) nor executable; chmod +x it"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or default_job_name(source.path)
    job, found = validate(
        TrainJob, {**said, "directory": str(folder)}, stand_ins=_STAND_INS, examples=_EXAMPLES, hidden=_HIDDEN
    )
    if job is None or found or wrong:
        raise source.error(found | wrong)
    return JobFile(job, is_named=is_named)


def _split_command(said: dict[str, object]) -> dict[KeyPath, str]:
    """Replace `command` by program and args; return what is wrong with it."""
    if clash := [key for key in ("program", "args") if key in said]:
        del said["command"]
        return {("command",): f"command and {clash[0]} say the same: leave one out"}
    command = said.pop("command")
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        return {("command",): f"command {command!r:.60}: {error}"}
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        said["program"] = ""
        return {
            ("command",): f"command {command!r:.60}: write the program and its arguments, as in train.py --epochs 3"
        }
    said["program"], said["args"] = words[0], words[1:]
    return {}
