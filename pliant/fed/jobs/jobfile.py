"""Federated jobs as people write them: our short form, and the artifact's (`artifact`); checked before anything runs.

A file with `participants` is ours, one with `job_conf` or `ps_ip` the artifact's. Paths are looked for beside the file, and
a wrong value is refused with its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ConfigDict, ValidationError

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.jobs.artifact import read_artifact, refusal
from pliant.fed.jobs.job import FedJob, Ground, absolute, checked_parts, with_paths
from pliant.yaml_source import KeyPath, YamlSource, default_job_name, name_error, validation_messages

OURS, THEIRS = ("participants",), ("job_conf", "ps_ip")
"""Keys that only federated jobs have."""
PATHS = ("log_path", "tls_certificate", "tls_key")
TEXTS = frozenset({"name", "model", "devices", "availability", "host", "ssh_user", *PATHS})


def is_federated(page: YamlSource) -> bool:
    return bool(set(page.keys) & {*OURS, *THEIRS})


def read_fed_job(page: YamlSource, name: str = "") -> FedJob:
    """The job on the page, whose tables, data and functions are where it says; `name` goes before the one in it.

    Raises:
        ConfigError: it is none, or not to be run here; one line for each mistake, with its line number.
    """
    from pliant.fed.jobs.trial import tried  # imports torch

    job = parsed(page, name)
    if wrong := tried(job.config, Path(job.directory)):
        raise refusal(page, wrong) if set(page.keys) & set(THEIRS) else page.error(wrong)
    return job


def parsed(page: YamlSource, name: str = "") -> FedJob:
    """The job as the page alone says it; files need be there, and are not looked into.

    Raises:
        ConfigError: it is none; one line for each mistake, with its line number.
    """
    if name and (wrong := name_error(name)):
        raise ConfigError(f"name {wrong}")
    job = read_artifact(page, name) if set(page.keys) & set(THEIRS) else _read_ours(page, name)
    return job.model_copy(update={"log_path_line": f"{page.path}:{page.line(_log_path_place(page))}"})


def _log_path_place(page: YamlSource) -> KeyPath:
    listed = page.values().get("job_conf")
    for number, item in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(item, Mapping) and "log_path" in item:
            return ("job_conf", number, "log_path")
    return ("job_conf", "log_path") if isinstance(listed, Mapping) else ("log_path",)


class _Ours(FedConfig, Ground):
    """All keys of our form."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _read_ours(page: YamlSource, name: str) -> FedJob:
    said = page.values(TEXTS)
    for section in ("selector", "aggregator"):
        said[section] = with_numbers(said[section]) if section in said else None
        if said[section] is None:
            del said[section]
    wrong: dict[KeyPath, str] = {}
    if "name" in said and (why := name_error(str(said["name"]))):
        wrong[("name",)] = f"name {why}"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or default_job_name(page.path)
    try:
        both = _Ours.model_validate(said)
    except ValidationError as error:
        found = validation_messages(error, _Ours, examples={"participants": "participants: 20"})
        raise page.error(found | wrong) from None
    folder = page.path.absolute().parent
    config = FedConfig.model_validate({key: getattr(both, key) for key in FedConfig.model_fields})
    config, missing = with_paths(config, folder)
    wrong |= {place: f"{'.'.join(place)} {path}: no such file or folder" for place, path in missing.items()}
    wrong |= checked_parts(config)
    ground = Ground(**{key: getattr(both, key) for key in Ground.model_fields})
    wrong |= _wrong_tls(ground, folder)
    if wrong:
        raise page.error(wrong)
    paths = {key: absolute(path, folder) for key in PATHS if (path := getattr(ground, key))}
    ground = ground.model_copy(update=paths)
    return FedJob(config=config, ground=ground, directory=str(folder), is_named=is_named)


def _wrong_tls(ground: Ground, folder: Path) -> dict[KeyPath, str]:
    """Also where there are no executors: who asks for TLS is not to be left without it later."""
    from pliant.fed.coordinator import server_tls

    paths = {key: getattr(ground, key) for key in ("tls_certificate", "tls_key")}
    full = {key: absolute(path, folder) if path else "" for key, path in paths.items()}
    wrong: dict[KeyPath, str] = {
        (key,): f"{key} {paths[key]}: no such file" for key, path in full.items() if path and not Path(path).is_file()
    }
    if not wrong and paths["tls_key"] and not paths["tls_certificate"]:
        wrong[("tls_key",)] = "tls_key is of no use without its certificate: add tls_certificate"
    elif not wrong and paths["tls_certificate"]:  # its file may hold the key, too
        try:
            server_tls(full["tls_certificate"], full["tls_key"])
        except ConfigError as error:
            wrong[("tls_certificate",)] = str(error)
    return wrong


def with_numbers(given: object) -> object:
    """Options with numbers where the text is one: YAML takes 1e-3 for text."""
    if not isinstance(given, Mapping):
        return given
    return {key: with_numbers(value) if isinstance(value, Mapping) else _number(value) for key, value in given.items()}


def _number(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
