"""The job files of Oort's artifact (Kuiper) and of FedScale (`ps_ip`, `worker_ips`, `job_conf`), as federated jobs.

Every key that either of them knows is read. A value means what their documentation says; where their code does something
else, the documentation wins (docs/federated.md lists the cases): `yogi` is FedYogi, `prox` is FedProx with its sign, False
is false, and completion times are in FedScale's units with the model's real size.

Values are taken as they are written and parsed by the type of the key, not by YAML's guess: 1e5 is a number.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.jobfile import FederatedJob, FedPlacement, absolute, check_parts, with_absolute_paths
from pliant.fed.workers import parse_workers
from pliant.yaml_source import (
    KeyPath,
    YamlSource,
    default_job_name,
    name_error,
    unknown_key_message,
    validation_messages,
)

FORM_KEYS = ("job_conf", "ps_ip")
"""Keys that only files of this form have."""

# --- keys ---

NOTHING = frozenset({"", "none", "null", "~"})
YES, NO = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})

Value = int | float | str | bool
Read = Callable[[str], Value]


def text(given: str) -> str:
    return given


def flag(given: str) -> bool:
    if given.lower() in YES | NO:
        return given.lower() in YES
    raise ValueError("use True or False")


GREATEST = 1e30


def number(least: float = -math.inf, most: float = math.inf) -> Read:
    def read(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            raise ValueError("use a number") from None
        if not least <= value <= most:
            raise ValueError(f"use a number {_range(least, most)}")
        if abs(value) > GREATEST:
            raise ValueError(f"use a number up to {GREATEST:g}")
        return value

    return read


def whole(least: int = 0, most: float = math.inf) -> Read:
    def read(given: str) -> int:
        value = _parse_whole(given)
        if not least <= value <= most:
            raise ValueError(f"use a whole number {_range(least, most)}")
        return value

    return read


def _parse_whole(given: str) -> int:
    """Parse a whole number. Only texts such as 1e5 go through a float, which would lose bits above 2**53."""
    with contextlib.suppress(ValueError):
        return int(given)
    try:
        value = float(given)
    except ValueError:
        raise ValueError("use a whole number") from None
    if not math.isfinite(value) or value != int(value):
        raise ValueError("use a whole number")
    return int(value)


def one_of(*words: str) -> Read:
    def read(given: str) -> str:
        if given not in words:
            raise ValueError(f"use {', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else f"use {words[0]}")
        return given

    return read


def _range(least: float, most: float) -> str:
    if most == math.inf:
        return f"of {least:g} or more"
    return f"from {least:g} to {most:g}"


SAME = {
    "num_participants": "total_worker", "rounds": "epochs", "local_steps": "upload_epoch", "decay_round": "decay_epoch",
    "overcommitment": "overcommit", "device_conf_file": "client_path", "device_avail_file": "user_trace",
    "data_map_file": "data_mapfile", "seed": "sample_seed", "learner": "learners",
}  # fmt: skip
"""FedScale's names by the artifact's. `learner` is accepted because the artifact's parser took prefixes."""
FEDSCALE = frozenset(SAME) - {"learner", "seed"} | {
    "experiment_mode", "engine", "clip_threshold", "target_delta", "max_concurrency", "max_staleness", "async_buffer",
    "connection_timeout", "use_cuda", "save_checkpoint", "wandb_token", "model_zoo", "qfed_q", "malicious_factor",
}  # fmt: skip
"""A file with one of these keys gets FedScale's defaults."""

SELECTOR: Mapping[str, Read] = {
    "exploration_factor": number(0, 1), "exploration_decay": number(0, 1), "exploration_min": number(0, 1),
    "round_threshold": number(0), "round_penalty": number(0), "pacer_delta": number(0), "pacer_step": whole(1),
    "clip_bound": number(0, 1), "cut_off_util": number(0, 1), "sample_window": number(1),
    "blacklist_rounds": whole(-1), "blacklist_max_len": number(0, 1),
}  # fmt: skip
"""Options of the Oort selector; `OortConfig` has the same names."""

USED: Mapping[str, Read] = {
    **SELECTOR,
    "job_name": text, "log_path": text, "time_stamp": text, "ps_ip": text, "ps_port": whole(0, 65535),
    "total_worker": whole(0), "to_device": one_of("cuda", "gpu", "cpu"), "use_cuda": flag,
    "task": text, "data_set": text, "data_dir": text, "data_mapfile": text, "client_path": text, "user_trace": text,
    "model": text, "model_size": number(1), "filter_less": whole(0), "filter_more": whole(1), "sequential": whole(0, 4),
    "skip_partition": flag, "enforce_random": flag, "num_clients": whole(1), "batching": whole(0),
    "epochs": whole(1), "upload_epoch": whole(1), "batch_size": whole(1), "learning_rate": number(1e-12),
    "min_learning_rate": number(0), "decay_factor": number(0, 1), "decay_epoch": whole(1), "eval_interval": whole(1),
    "is_even_avg": flag, "gradient_policy": text, "yogi_eta": number(1e-12), "yogi_tau": number(1e-12),
    "yogi_beta": number(-1, 1), "yogi_beta2": number(-1, 1), "qfed_q": number(0), "proxy_avg": flag, "proxy_mu": number(0),
    "sample_mode": text, "overcommit": number(1, 100), "malicious_clients": number(0, 1), "malicious_factor": number(1),
    "noise_factor": number(0), "clip_threshold": number(1e-12), "target_delta": number(1e-300, 1), "sample_seed": whole(0),
    "clock_factor": number(1e-12), "max_concurrency": whole(1), "max_staleness": whole(0), "async_buffer": whole(1),
}  # fmt: skip

QUIET: Mapping[str, Read] = {
    "manager_port": whole(0, 65535), "this_rank": whole(0), "learners": text, "backend": text, "gpu_device": whole(0),
    "timeout": number(0), "num_loaders": whole(0), "test_bsz": whole(1), "dump_epoch": whole(1), "max_iter_store": whole(0),
    "release_cache": flag, "connection_timeout": number(0), "save_checkpoint": flag, "model_zoo": text,
    "exploration_alpha": number(), "zipf_alpha": text, "num_class": whole(1), "num_classes": whole(1),
}  # fmt: skip
"""Keys that are accepted and change nothing about the result."""


@dataclass(frozen=True, slots=True)
class FixedKey:
    """A key for which only one value is supported."""

    read: Read
    value: Value
    why: str
    refused: bool = True
    """If true, another value is an error. If false, it is ignored with a remark."""


FIXED: Mapping[str, FixedKey] = {
    "filter_class": FixedKey(whole(0), 0, "clients are not left out by their number of classes; leave it out"),
    "duplicate_data": FixedKey(whole(1), 1, "no sample belongs to two clients; leave it out"),
    "stale_threshold": FixedKey(
        whole(0), 0, "rounds are synchronous; for asynchronous ones use gradient_policy: fed-buff, and max_staleness"
    ),
    "resampling_interval": FixedKey(whole(1), 1, "participants are picked for every round; leave it out"),
    "fixed_clients": FixedKey(flag, False, "participants are picked for every round; leave it out"),
    "forward_pass": FixedKey(flag, False, "a job trains; leave it out"),
    "test_only": FixedKey(flag, False, "a job trains; leave it out"),
    "load_model": FixedKey(
        flag, False, "a job begins with a new model, or goes on with `pliant submit --resume NAME`; leave it out"
    ),
    "model_path": FixedKey(text, "", "a job begins with a new model; leave it out"),
    "read_models_path": FixedKey(flag, False, "a job begins with a new model; leave it out"),
    "sampler_path": FixedKey(
        text, "", "the selector's state is in the job's checkpoint, and no pickle of it is read; leave it out"
    ),
    "score_mode": FixedKey(one_of("loss", "norm"), "loss", "utility is taken from the samples' losses; use loss"),
    "experiment_mode": FixedKey(
        one_of("simulation", "deployment"), "simulation", "real clients are reached through Flower; see docs/flower.md"
    ),
    "engine": FixedKey(one_of("pytorch", "tensorflow"), "pytorch", "models are PyTorch's; use pytorch"),
    "loss_decay": FixedKey(number(0, 1), 0.2, "a client's utility is taken from all samples of its first pass", False),
    "capacity_bin": FixedKey(flag, True, "utility counts the samples that were seen", False),
    "test_ratio": FixedKey(number(0, 1), 1.0, "all test samples are used", False),
    "wandb_token": FixedKey(text, "", "records and TensorBoard's events are written, nothing is sent anywhere", False),
}  # fmt: skip

KNOWN = frozenset({*USED, *QUIET, *FIXED, *SAME})


@dataclass(slots=True)
class ArtifactKeys:
    """The values of a configuration by the artifact's names, with mistakes and remarks about them."""

    said: dict[str, Value]
    places: dict[str, KeyPath]
    """KeyPath of each key in the file, also of keys without a value."""
    names: dict[str, str]
    """Spelling of each key in the file."""
    wrong: dict[KeyPath, str]
    remarks: dict[KeyPath, str]
    is_fedscale: bool = False

    def refuse(self, key: str, why: str, between: str = " ") -> None:
        self.wrong.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)}{between}{why}")

    def remark(self, key: str, what: str) -> None:
        self.remarks.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)} {what}")


def parse_keys(job_conf: object) -> ArtifactKeys:
    """Parse `job_conf`: the artifact's list of single-key mappings, or one mapping."""
    found = ArtifactKeys({}, {}, {}, {}, {})
    for place, name, value in _list_items(job_conf, found.wrong):
        key = SAME.get(name, name)
        if name not in KNOWN:
            hint = unknown_key_message(name, name, sorted(KNOWN)).partition(": ")[2]
            found.remarks[place] = f"{name} is not known, and has no effect" + (
                f": {hint}" if hint.startswith("did you") else ""
            )
            continue
        if key in found.places:
            also = f" as {found.names[key]}" if found.names[key] != name else ""
            found.wrong[place] = f"{name} is given twice{also}: leave one out"
            continue
        found.places[key], found.names[key] = place, name
        found.is_fedscale |= name in FEDSCALE
        if not isinstance(value, str):
            found.wrong[place] = f"{name} {value!r:.60}: use one value"
        elif value.strip().lower() not in NOTHING:
            _read_value(found, key, value.strip())
    return found


def _list_items(job_conf: object, wrong: dict[KeyPath, str]) -> list[tuple[KeyPath, str, object]]:
    if isinstance(job_conf, dict):
        return [(("job_conf", name), name, value) for name, value in job_conf.items()]
    if not isinstance(job_conf, list):
        wrong[("job_conf",)] = "job_conf: use a list of keys, as in `- total_worker: 100`"
        return []
    found: list[tuple[KeyPath, str, object]] = []
    for at, item in enumerate(job_conf):
        if isinstance(item, dict):
            found += [(("job_conf", at, name), name, value) for name, value in item.items()]
        else:
            wrong[("job_conf", at)] = f"{item!r:.60} in job_conf: use `- key: value`"
    return found


def _read_value(keys: ArtifactKeys, key: str, value: str) -> None:
    fixed = FIXED.get(key)
    read = fixed.read if fixed is not None else USED.get(key) or QUIET[key]
    try:
        given = read(value)
    except ValueError as error:
        keys.refuse(key, f"{value!r:.60}: {error}")
        return
    if fixed is None:
        keys.said[key] = given
    elif given != fixed.value and fixed.refused:
        keys.refuse(key, f"{value}: {fixed.why}")
    elif given != fixed.value:
        keys.remark(key, f"has no effect: {fixed.why}")


# --- machines ---

TOP = (
    "ps_ip", "worker_ips", "exp_path", "auth", "setup_commands", "job_conf", "executor_entry", "aggregator_entry",
    "use_container", "ports", "data_path", "container_network",
)  # fmt: skip


def _placement(said: Mapping[str, object], keys: ArtifactKeys, folder: Path) -> FedPlacement:
    """Return the placement that the keys beside `job_conf` describe; mistakes and remarks go to `keys`."""
    for key in said:
        if key not in TOP:
            hint = unknown_key_message(key, key, TOP).partition(": ")[2]
            keys.remarks[(key,)] = f"{key} is not known, and has no effect: {hint}"
    if _text_of(said.get("use_container")) not in ("", "false", "default"):
        keys.wrong[("use_container",)] = (
            f"use_container {said['use_container']}: workers are processes; start pliant in containers of your own, "
            "or use Ray (workers: ray:4)"
        )
    for key in ("executor_entry", "aggregator_entry"):
        if _text_of(said.get(key)):
            keys.remarks[(key,)] = f"{key} is not run: coordinator and workers are pliant's own"
    if _text_of(said.get("setup_commands")):
        keys.remarks[("setup_commands",)] = (
            "setup_commands are not run: workers start with the Python that pliant is installed in"
        )
    auth = said.get("auth")
    user = str(auth.get("ssh_user", "")) if isinstance(auth, dict) else ""
    return FedPlacement(
        workers=_workers(said.get("worker_ips"), keys.wrong),
        log_path=absolute(str(keys.said.get("log_path", ".")), folder),
        host=_host(said, keys),
        port=cast(int, keys.said.get("ps_port", 0)),
        ssh_user="" if user.lower() in NOTHING else user,
    )


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return "" if value.strip().lower() in NOTHING else value.strip().lower()
    return str(value) if value else ""


def _host(said: Mapping[str, object], keys: ArtifactKeys) -> str:
    """Return the coordinator's address for workers elsewhere; empty for loopback. It must belong to this machine."""
    places: list[tuple[KeyPath, str]] = [(("ps_ip",), str(said.get("ps_ip", "") or ""))]
    if "ps_ip" in keys.said:
        places.append((keys.places["ps_ip"], str(keys.said["ps_ip"])))
    address = ""
    for place, given in places:
        if given.lower() in NOTHING:
            continue
        found = _own_address(given)
        if not found:
            keys.wrong[place] = (
                f"ps_ip {given}: not an address of this machine, where the coordinator would run; submit it there"
            )
        address = found
    return "" if address.startswith("127.") or address == "::1" else address


def _own_address(name: str) -> str:
    """Resolve `name` to an address of this machine; empty if it is not one."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.bind((where[0], 0))
                return str(where[0])
    return ""


def _workers(given: object, wrong: dict[KeyPath, str]) -> tuple[str, ...]:
    """Parse `worker_ips`: `ip:4`, or FedScale's `ip:[2,2]`, which counts processes per device."""
    if given is None:
        return FedPlacement().workers
    if not isinstance(given, list):
        wrong[("worker_ips",)] = "worker_ips: use a list, as in `- 10.0.0.2:4`"
        return ()
    found = []
    for at, item in enumerate(given):
        try:
            found.append(_worker(str(item)))
        except (ValueError, ConfigError):
            wrong[("worker_ips", at)] = f"{item!r:.60} in worker_ips: use host:4, or host:[2,2]"
    return tuple(found)


def _worker(item: str) -> str:
    where, colon, num = item.replace(" ", "").partition(":[")
    text = f"{where}:{sum(int(each) for each in num.rstrip(']').split(','))}" if colon else item
    parse_workers([text])
    return text


# --- translation ---

OORT_DEFAULTS: Mapping[str, object] = {
    "epochs": 1000, "upload_epoch": 20, "batch_size": 30, "learning_rate": 0.04, "min_learning_rate": 1e-4,
    "decay_factor": 0.95, "decay_epoch": 5, "eval_interval": 5, "overcommit": 1.1, "yogi_eta": 5e-3, "yogi_tau": 1e-3,
    "yogi_beta": 0.999, "yogi_beta2": -1.0, "clock_factor": 2.5, "total_worker": 0,
}  # fmt: skip
FEDSCALE_DEFAULTS: Mapping[str, object] = {
    "epochs": 50, "upload_epoch": 20, "batch_size": 30, "learning_rate": 5e-2, "min_learning_rate": 5e-5,
    "decay_factor": 0.98, "decay_epoch": 10, "eval_interval": 5, "overcommit": 1.3, "yogi_eta": 3e-3, "yogi_tau": 1e-8,
    "yogi_beta": 0.9, "yogi_beta2": 0.99, "clock_factor": 1.0, "total_worker": 4,
}  # fmt: skip
DEFAULTS: Mapping[str, object] = {
    "task": "cv", "data_set": "cifar10", "model": "shufflenet_v2_x2_0", "filter_less": 32, "filter_more": 100_000,
    "sequential": 0, "sample_mode": "random", "sample_seed": 233, "is_even_avg": True, "qfed_q": 1.0, "proxy_mu": 0.1,
    "skip_partition": False, "enforce_random": False, "proxy_avg": False, "max_staleness": 5, "max_concurrency": 10,
    "async_buffer": 10, "target_delta": 1e-4,
}  # fmt: skip
TASKS = ("cv", "speech", "nlp")
DATA = {
    "openimg": "images", "imagenet": "images", "cifar10": "images", "emnist": "images", "femnist": "images",
    "mnist": "fashion-mnist", "google_speech": "speech", "blog": "posts", "reddit": "posts", "stackoverflow": "posts",
}  # fmt: skip
"""Our kind of data by the artifact's data_set in lower case; our own names are accepted, too."""
MODELS = {"mobilenet": "mobilenet_v2", "resnet": "resnet18", "shufflenet": "shufflenet_v2_x2_0", "lr": "logistic"}
TEXT_MODELS = ("albert", "bert", "mobilebert", "distilbert", "gpt")
COST = {"shufflenet": 1.1625, "albert": 6.047, "resnet": 2.437}
"""Cost of a model relative to the one that the device table was measured with; the artifact's numbers."""
POLICIES = {
    "yogi": "fed-yogi", "fedyogi": "fed-yogi", "prox": "fed-prox", "fedprox": "fed-prox", "avg": "fed-avg", "fedavg": "fed-avg",
    "qfedavg": "q-fedavg", "q-fed-avg": "q-fedavg", "fedbuff": "fed-buff",
}  # fmt: skip
FROM: Mapping[tuple[str, ...], str] = {
    ("name",): "job_name", ("rounds",): "epochs", ("participants",): "total_worker", ("selector",): "sample_mode",
    ("aggregator",): "gradient_policy", ("model",): "model", ("data", "kind"): "data_set", ("data", "path"): "data_dir",
    ("data", "map"): "data_mapfile", ("devices",): "client_path", ("availability",): "user_trace", ("data",): "data_set",
    ("local", "steps"): "upload_epoch", ("local", "batch_size"): "batch_size",
}  # fmt: skip
"""The artifact's key to blame for a mistake in a field of `FedConfig`."""


def read_artifact(source: YamlSource, name: str = "") -> FederatedJob:
    """Return the job that a file in the artifact's form describes; `name` overrides the file's."""
    said = source.values(source.keys)
    keys = parse_keys(said.get("job_conf", []))
    if "job_conf" not in said:
        raise source.error({("ps_ip",): "job_conf is missing: add a list of keys, as in `- total_worker: 100`"})
    folder = source.path.absolute().parent
    is_named = bool(name) or "job_name" in keys.said
    chosen = name or str(keys.said.get("job_name", default_job_name(source.path)))
    if why := name_error(chosen):
        keys.refuse("job_name", why)
    placement = _placement(said, keys, folder)
    config = _config(keys, chosen, placement.places.count if placement.places else 0, folder)
    time = _time_stamp(keys)
    if keys.wrong:
        raise source.error(keys.wrong)
    assert config is not None, "without a mistake there is a config"
    remarks = sorted((source.line(place), what) for place, what in keys.remarks.items())
    return FederatedJob(
        config=config,
        placement=placement,
        directory=str(folder),
        time=time,
        is_named=is_named,
        remarks=tuple(f"{source.path}:{line}: {what}" for line, what in remarks),
    )


def blame_keys(source: YamlSource, wrong: Mapping[KeyPath, str]) -> ConfigError:
    """Return the error for mistakes that were found in fields of `FedConfig`, at the lines of the artifact's keys."""
    keys = parse_keys(source.values(source.keys).get("job_conf", []))
    for place, what in wrong.items():
        keys.refuse(_artifact_key(place), what, ": ")
    return source.error(keys.wrong)


def _time_stamp(keys: ArtifactKeys) -> str:
    """Return time_stamp; empty for `logs`, which means none to the artifact."""
    time = str(keys.said.get("time_stamp", ""))
    if time and name_error(time):
        keys.refuse("time_stamp", name_error(time))
    return "" if time == "logs" else time


def _config(keys: ArtifactKeys, name: str, num_workers: int, folder: Path) -> FedConfig | None:
    keys.said = {
        **cast("dict[str, str]", dict(DEFAULTS)),
        **cast("dict[str, str]", dict(FEDSCALE_DEFAULTS if keys.is_fedscale else OORT_DEFAULTS)),
        **keys.said,
    }
    said = keys.said
    participants = said["total_worker"] or num_workers or 1
    text = _is_text(keys)
    values: dict[str, object] = {
        "name": name,
        "seed": said["sample_seed"],
        "data": _data_config(keys, cast(int, participants)),
        "model": _model(keys),
        "local": {
            "steps": said["upload_epoch"], "batch_size": said["batch_size"], "lr": said["learning_rate"],
            "min_lr": said["min_learning_rate"], "lr_decay": said["decay_factor"], "decay_rounds": said["decay_epoch"],
            **({"optimizer": "adamw"} if text else {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}),
        },
        "participants": participants,
        "overcommit": said["overcommit"],
        "rounds": said["epochs"],
        "evaluate_every": said["eval_interval"],
        "selector": _selector(keys),
        "aggregator": _aggregator(keys),
        "malicious": _malicious(keys),
        "devices": _devices(keys),
        "availability": said.get("user_trace", ""),
        "model_bytes": round(cast(float, said["model_size"]) * 125) if "model_size" in said else 0,
        "clock_factor": cast(float, said["clock_factor"]) * _cost(str(said["model"])),
        "batching": said.get("batching"),
        "device": "cpu" if said.get("to_device") == "cpu" or said.get("use_cuda") is False else "",
    }  # fmt: skip
    if values["aggregator"]["kind"] == "fed-buff":  # type: ignore[index]
        values["concurrency"] = said["max_concurrency"]
    if keys.is_fedscale and "clip_threshold" in said:
        values["privacy"] = {
            "clip": said["clip_threshold"], "noise_multiplier": said.get("noise_factor", 0.1), "where": "client",
            "delta": said["target_delta"],
        }  # fmt: skip
    try:
        config, missing = with_absolute_paths(FedConfig.model_validate(values), folder)
    except ValidationError as error:
        for place, what in validation_messages(error, FedConfig).items():
            keys.refuse(_artifact_key(place), f"as {what}")
        return None
    for place, path in missing.items():
        keys.refuse(_artifact_key(place), f"{path}: no such file or folder; give the path of yours")
    for found, what in check_parts(config).items():
        keys.refuse(_artifact_key(found), what, ": ")
    return config


def _artifact_key(place: KeyPath) -> str:
    """Return the artifact's key for a field of `FedConfig`."""
    words = tuple(str(step) for step in place)
    return next((FROM[words[:end]] for end in range(len(words), 0, -1) if words[:end] in FROM), words[-1])


def _is_text(keys: ArtifactKeys) -> bool:
    task = keys.said["task"]
    if task not in TASKS:
        keys.refuse("task", f"{task}: there are {', '.join(TASKS)}")
    return task == "nlp"


def _data_config(keys: ArtifactKeys, participants: int) -> dict[str, object]:
    said, name = keys.said, str(keys.said["data_set"])
    kind = DATA.get(name.lower(), name)
    if name.lower() in ("yelp", "common_voice"):
        keys.refuse("data_set", f"{name} is not read here: give its samples by a function of yours, as module:function")
    mapped = str(said.get("data_mapfile", ""))
    natural = (bool(mapped) or said["skip_partition"]) and not said["enforce_random"]
    data: dict[str, object] = {
        "kind": kind, "path": said.get("data_dir", ""), "map": mapped, "least": max(1, cast(int, said["filter_less"])),
        "most": said["filter_more"],
    }  # fmt: skip
    if natural:
        return {**data, "partition": "natural", "clients": said.get("num_clients", 0)}
    if said["sequential"] == 2:
        keys.refuse("sequential", "2: sizes by Zipf's law are not drawn; use 0 (random), 1, 3, or a data_mapfile")
    if said["sequential"] == 4:
        keys.refuse("sequential", "4: the sizes would be in a file; give a data_mapfile")
    if "num_clients" not in said:
        keys.remark(
            "data_mapfile" if "data_mapfile" in keys.places else "data_set",
            f"has no map of clients: its samples are dealt to {participants} clients, as many as take part in a round; "
            "add num_clients for more",
        )
    clients = said.get("num_clients", participants)
    if said["sequential"] == 1:
        keys.remark("sequential", "1: each client's classes are drawn by Dirichlet's law with alpha 1")
        return {**data, "partition": "dirichlet", "alpha": 1.0, "clients": clients}
    return {**data, "partition": "iid", "clients": clients}


def _model(keys: ArtifactKeys) -> str:
    given = str(keys.said["model"])
    if given.lower().startswith(TEXT_MODELS):
        keys.remark(
            "model", f"{given}: other people's weights are not loaded; `transformer`, on characters, is trained"
        )
        return "transformer"
    return MODELS.get(given.lower(), given)


def _cost(model: str) -> float:
    return next((cost for begin, cost in COST.items() if model.startswith(begin)), 1.0)


def _selector(keys: ArtifactKeys) -> dict[str, object]:
    """Return the selector. Oort's keys are in every configuration and count only if it is the selector."""
    kind = {"kuiper": "oort"}.get(str(keys.said["sample_mode"]), keys.said["sample_mode"])
    if kind != "oort":
        return {"kind": kind}
    options: dict[str, object] = {"preset": "fedscale" if keys.is_fedscale else "artifact"}
    options |= {key: keys.said[key] for key in SELECTOR if key in keys.said}
    if not keys.is_fedscale and "noise_factor" in keys.said:
        options["noise_factor"] = keys.said["noise_factor"]  # to FedScale it is the noise of differential privacy
    return {"kind": kind, "options": options}


def _aggregator(keys: ArtifactKeys) -> dict[str, object]:
    said = keys.said
    given = str(said.get("gradient_policy", ""))
    kind = POLICIES.get(given.lower(), given) or ("fed-prox" if said["proxy_avg"] else "fed-avg")
    if said["proxy_avg"] and kind != "fed-prox":
        keys.refuse(
            "proxy_avg", f"True beside gradient_policy {given}: the proximal term goes with fed-prox; choose one"
        )
    options: dict[str, object] = {}
    if kind in ("fed-avg", "fed-prox", "fed-yogi"):
        options["even"] = said["is_even_avg"]
    if kind == "fed-prox":
        options["mu"] = said["proxy_mu"]
    elif kind == "fed-yogi":
        # The artifact's beta is that of the squares, and beta2 that of the momentum; FedScale's are the other way round.
        first, second = ("yogi_beta", "yogi_beta2") if keys.is_fedscale else ("yogi_beta2", "yogi_beta")
        options |= {
            "lr": said["yogi_eta"], "tau": said["yogi_tau"],
            "beta1": max(0.0, cast(float, said[first])), "beta2": max(0.0, cast(float, said[second])),
        }  # fmt: skip
    elif kind == "q-fedavg":
        options["q"] = said["qfed_q"]
    elif kind == "fed-buff":
        options |= {"size": said["async_buffer"], "max_staleness": said["max_staleness"]}
    return {"kind": kind, "options": options}


def _malicious(keys: ArtifactKeys) -> float:
    """Return the share of malicious clients; FedScale's malicious_factor N means every N-th client."""
    if "malicious_factor" in keys.said:
        every = cast(float, keys.said["malicious_factor"])
        return 1 / every if every < 1e6 else 0.0
    return cast(float, keys.said.get("malicious_clients", 0.0))


def _devices(keys: ArtifactKeys) -> str:
    if "client_path" in keys.said:
        return str(keys.said["client_path"])
    keys.remarks.setdefault(
        ("job_conf",), "no client_path (device_conf_file): the clients' devices are synthetic, drawn like FedScale's"
    )
    return "synthetic"
