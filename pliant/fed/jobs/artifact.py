"""The artifact's job files (ps_ip, worker_ips, job_conf: ...), and FedScale's, as jobs of ours.

Every key that either knows is read (`artifact_keys`). What they mean by a value is done; where they do something else than
they say, it is done as they say (docs/federated.md lists it): `yogi` is FedYogi, `prox` FedProx with its sign, False is
false, and completion times are in FedScale's units with the model's real size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.jobs.artifact_hosts import ground_of
from pliant.fed.jobs.artifact_keys import SELECTOR, Keys, keys_of
from pliant.fed.jobs.job import FedJob, checked_parts, with_paths
from pliant.yaml_source import KeyPath, YamlSource, default_job_name, name_error, validation_messages

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
"""In lower case; ours are known by their own names, too."""
MODELS = {"mobilenet": "mobilenet_v2", "resnet": "resnet18", "shufflenet": "shufflenet_v2_x2_0", "lr": "logistic"}
TEXT_MODELS = ("albert", "bert", "mobilebert", "distilbert", "gpt")
COST = {"shufflenet": 1.1625, "albert": 6.047, "resnet": 2.437}
"""Of a model beside the one that the device table was measured with, as the artifact has it."""
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
"""Which key to point at, where a value is found wrong only in ours."""


def read_artifact(page: YamlSource, name: str = "") -> FedJob:
    """The job on the page; `name` goes before the one in it.

    Raises:
        ConfigError: it is none; one line for each mistake, with its line number.
    """
    said = page.values(page.keys)
    keys = keys_of(said.get("job_conf", []))
    if "job_conf" not in said:
        raise page.error({("ps_ip",): "job_conf is missing: add a list of keys, as in `- total_worker: 100`"})
    folder = page.path.absolute().parent
    is_named = bool(name) or "job_name" in keys.said
    chosen = name or str(keys.said.get("job_name", default_job_name(page.path)))
    if why := name_error(chosen):
        keys.refuse("job_name", why)
    ground = ground_of(said, keys, folder)
    config = _config(keys, chosen, ground.places.count if ground.places else 0, folder)
    time = _time(keys)
    if keys.wrong:
        raise page.error(keys.wrong)
    assert config is not None, "without a mistake there is a config"
    told = sorted((page.line(place), what) for place, what in keys.remarks.items())
    return FedJob(
        config=config,
        ground=ground,
        directory=str(folder),
        time=time,
        is_named=is_named,
        remarks=tuple(f"{page.path}:{line}: {what}" for line, what in told),
    )


def refusal(page: YamlSource, wrong: Mapping[KeyPath, str]) -> ConfigError:
    """What was found wrong with the job of a page, at its keys."""
    keys = keys_of(page.values(page.keys).get("job_conf", []))
    for place, what in wrong.items():
        keys.refuse(_key(place), what, ": ")
    return page.error(keys.wrong)


def _time(keys: Keys) -> str:
    """`logs` is the artifact's word for none."""
    time = str(keys.said.get("time_stamp", ""))
    if time and name_error(time):
        keys.refuse("time_stamp", name_error(time))
    return "" if time == "logs" else time


def _config(keys: Keys, name: str, num_workers: int, folder: Path) -> FedConfig | None:
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
        "data": _data(keys, cast(int, participants)),
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
        config, missing = with_paths(FedConfig.model_validate(values), folder)
    except ValidationError as error:
        for place, what in validation_messages(error, FedConfig).items():
            keys.refuse(_key(place), f"as {what}")
        return None
    for place, path in missing.items():
        keys.refuse(_key(place), f"{path}: no such file or folder; give the path of yours")
    for found, what in checked_parts(config).items():
        keys.refuse(_key(found), what, ": ")
    return config


def _key(place: KeyPath) -> str:
    """The artifact's key for a place of ours."""
    words = tuple(str(step) for step in place)
    return next((FROM[words[:end]] for end in range(len(words), 0, -1) if words[:end] in FROM), words[-1])


def _is_text(keys: Keys) -> bool:
    task = keys.said["task"]
    if task not in TASKS:
        keys.refuse("task", f"{task}: there are {', '.join(TASKS)}")
    return task == "nlp"


def _data(keys: Keys, participants: int) -> dict[str, object]:
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


def _model(keys: Keys) -> str:
    given = str(keys.said["model"])
    if given.lower().startswith(TEXT_MODELS):
        keys.remark(
            "model", f"{given}: other people's weights are not loaded; `transformer`, on characters, is trained"
        )
        return "transformer"
    return MODELS.get(given.lower(), given)


def _cost(model: str) -> float:
    return next((cost for begin, cost in COST.items() if model.startswith(begin)), 1.0)


def _selector(keys: Keys) -> dict[str, object]:
    """Oort's keys stand in every configuration; they count where it is the selector."""
    kind = {"kuiper": "oort"}.get(str(keys.said["sample_mode"]), keys.said["sample_mode"])
    if kind != "oort":
        return {"kind": kind}
    options: dict[str, object] = {"preset": "fedscale" if keys.is_fedscale else "artifact"}
    options |= {key: keys.said[key] for key in SELECTOR if key in keys.said}
    if not keys.is_fedscale and "noise_factor" in keys.said:
        options["noise_factor"] = keys.said["noise_factor"]  # to FedScale it is the noise of differential privacy
    return {"kind": kind, "options": options}


def _aggregator(keys: Keys) -> dict[str, object]:
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


def _malicious(keys: Keys) -> float:
    """A share; FedScale says every how many-th client."""
    if "malicious_factor" in keys.said:
        every = cast(float, keys.said["malicious_factor"])
        return 1 / every if every < 1e6 else 0.0
    return cast(float, keys.said.get("malicious_clients", 0.0))


def _devices(keys: Keys) -> str:
    if "client_path" in keys.said:
        return str(keys.said["client_path"])
    keys.remarks.setdefault(
        ("job_conf",), "no client_path (device_conf_file): the clients' devices are synthetic, drawn like FedScale's"
    )
    return "synthetic"
