"""The job files of Oort's artifact (Kuiper) and of FedScale (`ps_ip`, `worker_ips`, `job_conf`), as federated jobs.

Every key that either of them knows is read. A value means what their documentation says; where their code does something
else, the documentation wins (docs/federated.md lists the cases): `yogi` is FedYogi, `prox` is FedProx with its sign, False
is false, and completion times are in FedScale's units with the model's real size.

Values are taken as they are written and parsed by the type of the key, not by YAML's guess: 1e5 is a number.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    validate,
)

FORM_KEYS = ("job_conf", "ps_ip")
"""Keys that only files of this form have."""

# --- keys ---

NOTHING = frozenset({"", "none", "null", "~"})
FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
Read = Callable[[str], Any]
"""Parses the text of a value; raises ValueError with what to use instead."""


def flag(given: str) -> bool:
    if given.lower() not in FLAGS:
        raise ValueError("use True or False")
    return FLAGS[given.lower()]


def number(least: float = 0, most: float = 1e30, *, is_whole: bool = False) -> Read:
    def read(given: str) -> float:
        with contextlib.suppress(ValueError):
            value: float
            try:
                value = int(given)  # first: a float has no room for all digits of a seed
            except ValueError:
                value = float(given)
            if least <= value <= most and (not is_whole or value == int(value)):
                return int(value) if is_whole else float(value)
        raise ValueError(f"use a {'whole ' if is_whole else ''}number from {least:g} to {most:g}")

    return read


whole = functools.partial(number, is_whole=True)

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
    "round_threshold": number(), "round_penalty": number(), "pacer_delta": number(), "pacer_step": whole(1),
    "clip_bound": number(0, 1), "cut_off_util": number(0, 1), "sample_window": number(1),
    "blacklist_rounds": whole(-1), "blacklist_max_len": number(0, 1),
}  # fmt: skip
"""Options of the Oort selector; `OortConfig` has the same names."""

USED: Mapping[str, Read] = {
    **SELECTOR,
    "job_name": str, "log_path": str, "time_stamp": str, "ps_ip": str, "ps_port": whole(0, 65535), "total_worker": whole(),
    "to_device": str, "use_cuda": flag, "task": str, "data_set": str, "data_dir": str, "data_mapfile": str,
    "client_path": str, "user_trace": str, "model": str, "model_size": number(1), "filter_less": whole(),
    "filter_more": whole(1), "sequential": whole(0, 4), "skip_partition": flag, "enforce_random": flag,
    "num_clients": whole(1), "batching": whole(), "epochs": whole(1), "upload_epoch": whole(1), "batch_size": whole(1),
    "learning_rate": number(1e-12), "min_learning_rate": number(), "decay_factor": number(0, 1), "decay_epoch": whole(1),
    "eval_interval": whole(1), "is_even_avg": flag, "gradient_policy": str, "yogi_eta": number(1e-12),
    "yogi_tau": number(1e-12), "yogi_beta": number(-1, 1), "yogi_beta2": number(-1, 1), "qfed_q": number(),
    "proxy_avg": flag, "proxy_mu": number(), "sample_mode": str, "overcommit": number(1, 100),
    "malicious_clients": number(0, 1), "malicious_factor": number(1), "noise_factor": number(),
    "clip_threshold": number(1e-12), "target_delta": number(1e-300, 1), "sample_seed": whole(), "clock_factor": number(1e-12),
    "max_concurrency": whole(1), "max_staleness": whole(), "async_buffer": whole(1),
}  # fmt: skip

QUIET = frozenset({
    "manager_port", "this_rank", "learners", "backend", "gpu_device", "timeout", "num_loaders", "test_bsz", "dump_epoch",
    "max_iter_store", "release_cache", "connection_timeout", "save_checkpoint", "model_zoo", "exploration_alpha",
    "zipf_alpha", "num_class", "num_classes",
})  # fmt: skip
"""Keys that are accepted and change nothing about the result."""

REFUSED: Mapping[str, tuple[object, str]] = {
    "filter_class": (0, "clients are not left out by their number of classes; leave it out"),
    "duplicate_data": (1, "no sample belongs to two clients; leave it out"),
    "stale_threshold": (0, "rounds are synchronous; for asynchronous ones use gradient_policy: fed-buff, and max_staleness"),
    "resampling_interval": (1, "participants are picked for every round; leave it out"),
    "fixed_clients": (False, "participants are picked for every round; leave it out"),
    "forward_pass": (False, "a job trains; leave it out"),
    "test_only": (False, "a job trains; leave it out"),
    "load_model": (False, "a job begins with a new model, or goes on with `pliant submit --resume NAME`; leave it out"),
    "model_path": ("", "a job begins with a new model; leave it out"),
    "read_models_path": (False, "a job begins with a new model; leave it out"),
    "sampler_path": ("", "the selector's state is in the job's checkpoint, and no pickle of it is read; leave it out"),
    "score_mode": ("loss", "utility is taken from the samples' losses; use loss"),
    "experiment_mode": ("simulation", "real clients are reached through Flower; see docs/flower.md"),
    "engine": ("pytorch", "models are PyTorch's; use pytorch"),
}  # fmt: skip
"""Keys with the only value that is supported, and why."""
IGNORED: Mapping[str, tuple[object, str]] = {
    "loss_decay": (0.2, "a client's utility is taken from all samples of its first pass"),
    "capacity_bin": (True, "utility counts the samples that were seen"),
    "test_ratio": (1, "all test samples are used"),
    "wandb_token": ("", "records and TensorBoard's events are written, nothing is sent anywhere"),
}
"""Keys of which every other value has no effect, and why."""

KNOWN = frozenset({*USED, *QUIET, *REFUSED, *IGNORED, *SAME})


@dataclass(slots=True)
class ArtifactKeys:
    """The values of a configuration by the artifact's names, with mistakes and remarks about them."""

    said: dict[str, Any] = field(default_factory=dict)
    places: dict[str, KeyPath] = field(default_factory=dict)
    """Path of each key in the file, including keys without a value."""
    names: dict[str, str] = field(default_factory=dict)
    """Spelling of each key in the file."""
    wrong: dict[KeyPath, str] = field(default_factory=dict)
    remarks: dict[KeyPath, str] = field(default_factory=dict)
    is_fedscale: bool = False

    def refuse(self, key: str, why: str, between: str = " ") -> None:
        self.wrong.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)}{between}{why}")

    def remark(self, key: str, what: str) -> None:
        self.remarks.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)} {what}")


def parse_keys(job_conf: object) -> ArtifactKeys:
    """Parse `job_conf`: the artifact's list of single-key mappings, or one mapping."""
    found = ArtifactKeys()
    for place, name, value in _list_items(job_conf, found.wrong):
        key = SAME.get(name, name)
        if name not in KNOWN:
            hint = unknown_key_message(name, name, sorted(KNOWN)).partition(": ")[2]
            near = f": {hint}" if hint.startswith("did you") else ""
            found.remarks[place] = f"{name} is not known, and has no effect{near}"
        elif key in found.places:
            also = f" as {found.names[key]}" if found.names[key] != name else ""
            found.wrong[place] = f"{name} is given twice{also}: leave one out"
        else:
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


def _read_value(keys: ArtifactKeys, key: str, text: str) -> None:
    if key in USED:
        try:
            keys.said[key] = USED[key](text)
        except ValueError as error:
            keys.refuse(key, f"{text!r:.60}: {error}")
    elif key in REFUSED and not _is_value(text, REFUSED[key][0]):
        keys.refuse(key, f"{text}: {REFUSED[key][1]}")
    elif key in IGNORED and not _is_value(text, IGNORED[key][0]):
        keys.remark(key, f"has no effect: {IGNORED[key][1]}")


def _is_value(text: str, value: object) -> bool:
    """Return whether the text means this flag, number or word."""
    if isinstance(value, str):
        return text == value
    try:
        return (flag(text) if isinstance(value, bool) else float(text)) == value
    except ValueError:
        return False


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
    for key, why in (
        ("executor_entry", "is not run: coordinator and workers are pliant's own"),
        ("aggregator_entry", "is not run: coordinator and workers are pliant's own"),
        ("setup_commands", "are not run: workers start with the Python that pliant is installed in"),
    ):
        if _text_of(said.get(key)):
            keys.remarks[(key,)] = f"{key} {why}"
    auth = said.get("auth")
    user = str(auth.get("ssh_user", "")) if isinstance(auth, dict) else ""
    return FedPlacement(
        workers=_workers(said.get("worker_ips"), keys.wrong),
        log_path=absolute(keys.said.get("log_path", "."), folder),
        host=_host(said, keys),
        port=keys.said.get("ps_port", 0),
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
        places.append((keys.places["ps_ip"], keys.said["ps_ip"]))
    address = ""
    for place, given in places:
        if given.lower() in NOTHING:
            continue
        address = _own_address(given)
        if not address:
            here = "not an address of this machine, where the coordinator would run; submit it there"
            keys.wrong[place] = f"ps_ip {given}: {here}"
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
        where, colon, counts = str(item).replace(" ", "").partition(":[")
        try:
            text = f"{where}:{sum(map(int, counts.rstrip(']').split(',')))}" if colon else str(item)
            parse_workers([text])
            found.append(text)
        except (ValueError, ConfigError):
            wrong[("worker_ips", at)] = f"{item!r:.60} in worker_ips: use host:4, or host:[2,2]"
    return tuple(found)


# --- translation ---

OORT_DEFAULTS: Mapping[str, object] = {
    "epochs": 1000, "upload_epoch": 20, "batch_size": 30, "learning_rate": 0.04, "min_learning_rate": 1e-4,
    "decay_factor": 0.95, "decay_epoch": 5, "eval_interval": 5, "overcommit": 1.1, "yogi_eta": 5e-3, "yogi_tau": 1e-3,
    "yogi_beta": 0.999, "yogi_beta2": -1.0, "clock_factor": 2.5, "total_worker": 0,
    "task": "cv", "data_set": "cifar10", "model": "shufflenet_v2_x2_0", "filter_less": 32, "filter_more": 100_000,
    "sequential": 0, "sample_mode": "random", "sample_seed": 233, "is_even_avg": True, "qfed_q": 1.0, "proxy_mu": 0.1,
    "skip_partition": False, "enforce_random": False, "proxy_avg": False, "max_staleness": 5, "max_concurrency": 10,
    "async_buffer": 10, "target_delta": 1e-4, "data_dir": "", "data_mapfile": "", "user_trace": "", "batching": None,
    "to_device": "", "use_cuda": True, "gradient_policy": "", "malicious_clients": 0.0, "model_size": 0,
}  # fmt: skip
FEDSCALE_DEFAULTS: Mapping[str, object] = {
    **OORT_DEFAULTS,
    "epochs": 50, "learning_rate": 5e-2, "min_learning_rate": 5e-5, "decay_factor": 0.98, "decay_epoch": 10,
    "overcommit": 1.3, "yogi_eta": 3e-3, "yogi_tau": 1e-8, "yogi_beta": 0.9, "yogi_beta2": 0.99, "clock_factor": 1.0,
    "total_worker": 4,
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
LOCAL = {
    "steps": "upload_epoch", "batch_size": "batch_size", "lr": "learning_rate", "min_lr": "min_learning_rate",
    "lr_decay": "decay_factor", "decay_rounds": "decay_epoch",
}  # fmt: skip
"""The artifact's key for each field of `LocalConfig` that takes its value as it is."""
PLAIN = {
    "rounds": "epochs", "overcommit": "overcommit", "evaluate_every": "eval_interval", "seed": "sample_seed",
    "availability": "user_trace", "batching": "batching",
}  # fmt: skip
"""The same for `FedConfig`."""
FROM: Mapping[tuple[str, ...], str] = {
    **{(name,): key for name, key in PLAIN.items()}, **{("local", name): key for name, key in LOCAL.items()},
    ("name",): "job_name", ("participants",): "total_worker", ("selector",): "sample_mode", ("model",): "model",
    ("aggregator",): "gradient_policy", ("data", "kind"): "data_set", ("data", "path"): "data_dir",
    ("data", "map"): "data_mapfile", ("data", "clients"): "num_clients", ("concurrency",): "max_concurrency", ("devices",): "client_path", ("data",): "data_set",
}  # fmt: skip
"""The artifact's key to blame for a mistake in a field of `FedConfig`."""


def read_artifact(source: YamlSource, name: str = "") -> FederatedJob:
    """Return the job that a file in the artifact's form describes; `name` overrides the file's."""
    said = source.values(source.keys)
    keys = parse_keys(said.get("job_conf", []))
    if "job_conf" not in said:
        keys.wrong[("ps_ip",)] = "job_conf is missing: add a list of keys, as in `- total_worker: 100`"
    folder = source.path.absolute().parent
    is_named = bool(name) or "job_name" in keys.said
    chosen = name or keys.said.get("job_name", default_job_name(source.path))
    time = keys.said.get("time_stamp", "")
    for key, text in (("job_name", chosen), ("time_stamp", time)):
        if text and (why := name_error(text)):
            keys.refuse(key, why)
    placement = _placement(said, keys, folder)
    num_workers = placement.places.count if placement.places else 0
    config = _config(keys, chosen, num_workers, folder) if "job_conf" in said else None
    if keys.wrong or config is None:
        raise source.error(keys.wrong)
    remarks = sorted((source.line(place), what) for place, what in keys.remarks.items())
    return FederatedJob(
        config=config,
        placement=placement,
        directory=str(folder),
        time="" if time == "logs" else time,  # `logs` means none to the artifact
        is_named=is_named,
        remarks=tuple(f"{source.path}:{line}: {what}" for line, what in remarks),
    )


def blame_keys(source: YamlSource, wrong: Mapping[KeyPath, str]) -> ConfigError:
    """Return the error for mistakes that were found in fields of `FedConfig`, at the lines of the artifact's keys."""
    keys = parse_keys(source.values(source.keys).get("job_conf", []))
    for place, what in wrong.items():
        keys.refuse(_artifact_key(place), what, ": ")
    return source.error(keys.wrong)


def _config(keys: ArtifactKeys, name: str, num_workers: int, folder: Path) -> FedConfig | None:
    said = keys.said = {**(FEDSCALE_DEFAULTS if keys.is_fedscale else OORT_DEFAULTS), **keys.said}
    if said["task"] not in TASKS:
        keys.refuse("task", f"{said['task']}: there are {', '.join(TASKS)}")
    participants = said["total_worker"] or num_workers or 1
    text, image = {"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
    data = _data_config(keys, participants)
    if not said["total_worker"]:
        what = f"no total_worker (num_participants): {participants} take part in a round, one for each worker"
        keys.remarks.setdefault(("job_conf",), what)
    cost = next((cost for begin, cost in COST.items() if said["model"].startswith(begin)), 1.0)
    values: dict[str, Any] = {
        **{name: said[key] for name, key in PLAIN.items()},
        "name": name,
        "participants": participants,
        "data": data,
        "model": _model(keys),
        "local": {**{name: said[key] for name, key in LOCAL.items()}, **(text if said["task"] == "nlp" else image)},
        "selector": _selector(keys),
        "aggregator": _aggregator(keys),
        "malicious": said["malicious_clients"],
        "devices": said.get("client_path", "synthetic"),
        "model_bytes": round(said["model_size"] * 125),
        "clock_factor": said["clock_factor"] * cost,
        "device": "cpu" if said["to_device"] == "cpu" or not said["use_cuda"] else "",
    }
    if "malicious_factor" in said:  # every N-th client
        values["malicious"] = 1 / said["malicious_factor"] if said["malicious_factor"] < 1e6 else 0.0
    if "client_path" not in said:
        what = "no client_path (device_conf_file): the clients' devices are synthetic, drawn like FedScale's"
        keys.remarks[("job_conf",)] = "; ".join(filter(None, [keys.remarks.get(("job_conf",)), what]))
    if values["aggregator"]["kind"] == "fed-buff":
        # The default is for larger jobs; who writes a number means it.
        most = data["clients"] or said["max_concurrency"]
        values["concurrency"] = (
            said["max_concurrency"] if "max_concurrency" in keys.places else min(said["max_concurrency"], most)
        )
    if keys.is_fedscale and "clip_threshold" in said:
        noise = said.get("noise_factor", 0.1)
        values["privacy"] = {"clip": said["clip_threshold"], "noise_multiplier": noise, "where": "client",
                             "delta": said["target_delta"]}  # fmt: skip
    made, wrong = validate(FedConfig, values)
    for place, what in wrong.items():
        keys.refuse(_artifact_key(place), f"as {what}")
    if made is None:
        return None
    config, missing = with_absolute_paths(made, folder)
    for place, path in missing.items():
        keys.refuse(_artifact_key(place), f"{path}: no such file or folder; give the path of yours")
    sizes = config.check_sizes(config.data.clients) if config.data.clients else {}
    for found, what in {**sizes, **check_parts(config, is_wrong=bool(keys.wrong))}.items():
        keys.refuse(_artifact_key(found), what, ": ")
    return config


def _artifact_key(place: KeyPath) -> str:
    """Return the artifact's key for a field of `FedConfig`."""
    words = tuple(str(step) for step in place)
    return next((FROM[words[:end]] for end in range(len(words), 0, -1) if words[:end] in FROM), words[-1])


def _data_config(keys: ArtifactKeys, participants: int) -> dict[str, object]:
    said, name = keys.said, keys.said["data_set"]
    if name.lower() in ("yelp", "common_voice"):
        keys.refuse("data_set", f"{name} is not read here: give its samples by a function of yours, as module:function")
    data: dict[str, object] = {
        "kind": DATA.get(name.lower(), name), "path": said["data_dir"], "map": said["data_mapfile"],
        "least": max(1, said["filter_less"]), "most": said["filter_more"],
    }  # fmt: skip
    if (said["data_mapfile"] or said["skip_partition"]) and not said["enforce_random"]:
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
    given: str = keys.said["model"]
    if given.lower().startswith(TEXT_MODELS):
        what = f"{given}: other people's weights are not loaded; `transformer`, on characters, is trained"
        keys.remark("model", what)
        return "transformer"
    return MODELS.get(given.lower(), given)


def _selector(keys: ArtifactKeys) -> dict[str, object]:
    """Return the selector. Oort's keys are in every configuration and count only if it is the selector."""
    kind = {"kuiper": "oort"}.get(keys.said["sample_mode"], keys.said["sample_mode"])
    if kind != "oort":
        return {"kind": kind}
    options: dict[str, object] = {"preset": "fedscale" if keys.is_fedscale else "artifact"}
    options |= {key: keys.said[key] for key in SELECTOR if key in keys.said}
    if not keys.is_fedscale and "noise_factor" in keys.said:
        options["noise_factor"] = keys.said["noise_factor"]  # to FedScale it is the noise of differential privacy
    return {"kind": kind, "options": options}


def _aggregator(keys: ArtifactKeys) -> dict[str, object]:
    said, given = keys.said, keys.said["gradient_policy"]
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
        betas = said["yogi_beta"], said["yogi_beta2"]
        beta1, beta2 = betas if keys.is_fedscale else betas[::-1]
        options |= {"lr": said["yogi_eta"], "tau": said["yogi_tau"], "beta1": max(0.0, beta1), "beta2": max(0.0, beta2)}
    elif kind == "q-fedavg":
        options["q"] = said["qfed_q"]
    elif kind == "fed-buff":
        options |= {"size": said["async_buffer"], "max_staleness": said["max_staleness"]}
    return {"kind": kind, "options": options}
