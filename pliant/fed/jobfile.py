"""Federated jobs as people write them: our short form, and the artifact's (`fed.artifact`); checked before anything runs.

A file with `participants` is ours, one with `job_conf` or `ps_ip` the artifact's. Paths are looked for beside the file, and
a wrong value is refused with its line.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict, ValidationError

from pliant.errors import ConfigError
from pliant.fed.artifact import read_artifact
from pliant.fed.config import FedConfig
from pliant.fed.job import FedJob, Ground, absolute, checked_parts, with_paths
from pliant.mistakes import Place, first_name, mistakes, wrong_name
from pliant.page import Page

OURS, THEIRS = ("participants",), ("job_conf", "ps_ip")
"""Keys that only federated jobs have."""
PATHS = ("log_path", "tls_certificate", "tls_key")
TEXTS = frozenset({"name", "model", "devices", "availability", "host", "ssh_user", *PATHS})


def is_federated(page: Page) -> bool:
    return bool(set(page.keys) & {*OURS, *THEIRS})


def read_fed_job(page: Page, name: str = "") -> FedJob:
    """The job on the page; `name` goes before the one in it.

    Raises:
        ConfigError: it is none; one line for each mistake, with its line number.
    """
    if name and (wrong := wrong_name(name)):
        raise ConfigError(f"name {wrong}")
    job = read_artifact(page, name) if set(page.keys) & set(THEIRS) else _read_ours(page, name)
    return job.model_copy(update={"log_path_line": f"{page.path}:{page.line(_log_path_place(page))}"})


def _log_path_place(page: Page) -> Place:
    listed = page.values().get("job_conf")
    for number, item in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(item, Mapping) and "log_path" in item:
            return ("job_conf", number, "log_path")
    return ("job_conf", "log_path") if isinstance(listed, Mapping) else ("log_path",)


class _Ours(FedConfig, Ground):
    """All keys of our form."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _read_ours(page: Page, name: str) -> FedJob:
    said = page.values(TEXTS)
    for section in ("selector", "aggregator"):
        said[section] = with_numbers(said[section]) if section in said else None
        if said[section] is None:
            del said[section]
    wrong: dict[Place, str] = {}
    if "name" in said and (why := wrong_name(str(said["name"]))):
        wrong[("name",)] = f"name {why}"
    is_named = bool(name) or "name" in said
    said["name"] = name or said.get("name") or first_name(page.path)
    try:
        both = _Ours.model_validate(said)
    except ValidationError as error:
        found = mistakes(error, _Ours, examples={"participants": "participants: 20"})
        raise page.refusal(found | wrong) from None
    folder = page.path.absolute().parent
    config = FedConfig.model_validate({key: getattr(both, key) for key in FedConfig.model_fields})
    config, missing = with_paths(config, folder)
    wrong |= {place: f"{'.'.join(place)} {path}: no such file or folder" for place, path in missing.items()}
    wrong |= checked_parts(config)
    if wrong:
        raise page.refusal(wrong)
    ground = Ground(**{key: getattr(both, key) for key in Ground.model_fields})
    paths = {key: absolute(path, folder) for key in PATHS if (path := getattr(ground, key))}
    ground = ground.model_copy(update=paths)
    return FedJob(config=config, ground=ground, directory=str(folder), is_named=is_named)


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
