"""The keys of the artifact's and FedScale's configurations: how each is read, and which cannot be had here.

Values are taken as they are written, and read by what the key is, not by YAML's guess: 1e5 is a number, and False is false
(to the artifact's own parser every word is true). FedScale's names of the same things are in `SAME`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pliant.yaml_source import KeyPath, unknown_key_message

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
        value = _exact(given)
        if not least <= value <= most:
            raise ValueError(f"use a whole number {_range(least, most)}")
        return value

    return read


def _exact(given: str) -> int:
    """Floats, as in 1e5, hold no more than 53 bits: they are for what is not written as an integer."""
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
"""FedScale's names, and the artifact's; `learner` worked there by its beginning."""
FEDSCALE = frozenset(SAME) - {"learner", "seed"} | {
    "experiment_mode", "engine", "clip_threshold", "target_delta", "max_concurrency", "max_staleness", "async_buffer",
    "connection_timeout", "use_cuda", "save_checkpoint", "wandb_token", "model_zoo", "qfed_q", "malicious_factor",
}  # fmt: skip
"""Who writes one of these means FedScale's defaults."""

SELECTOR: Mapping[str, Read] = {
    "exploration_factor": number(0, 1), "exploration_decay": number(0, 1), "exploration_min": number(0, 1),
    "round_threshold": number(0), "round_penalty": number(0), "pacer_delta": number(0), "pacer_step": whole(1),
    "clip_bound": number(0, 1), "cut_off_util": number(0, 1), "sample_window": number(1),
    "blacklist_rounds": whole(-1), "blacklist_max_len": number(0, 1),
}  # fmt: skip
"""Oort's options, by the names that `OortConfig` has from there."""

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
"""Known there, and without effect on what comes out here."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key that has one value here."""

    read: Read
    value: Value
    why: str
    refused: bool = True
    """Whether another value cannot be had; else it only has no effect, which is said."""


FIXED: Mapping[str, Fixed] = {
    "filter_class": Fixed(whole(0), 0, "clients are not left out by their number of classes; leave it out"),
    "duplicate_data": Fixed(whole(1), 1, "no sample belongs to two clients; leave it out"),
    "stale_threshold": Fixed(
        whole(0), 0, "rounds are synchronous; for asynchronous ones use gradient_policy: fed-buff, and max_staleness"
    ),
    "resampling_interval": Fixed(whole(1), 1, "participants are picked for every round; leave it out"),
    "fixed_clients": Fixed(flag, False, "participants are picked for every round; leave it out"),
    "forward_pass": Fixed(flag, False, "a job trains; leave it out"),
    "test_only": Fixed(flag, False, "a job trains; leave it out"),
    "load_model": Fixed(
        flag, False, "a job begins with a new model, or goes on with `pliant submit --resume NAME`; leave it out"
    ),
    "model_path": Fixed(text, "", "a job begins with a new model; leave it out"),
    "read_models_path": Fixed(flag, False, "a job begins with a new model; leave it out"),
    "sampler_path": Fixed(
        text, "", "the selector's state is in the job's checkpoint, and no pickle of it is read; leave it out"
    ),
    "score_mode": Fixed(one_of("loss", "norm"), "loss", "utility is taken from the samples' losses; use loss"),
    "experiment_mode": Fixed(
        one_of("simulation", "deployment"), "simulation", "real clients are reached through Flower; see docs/flower.md"
    ),
    "engine": Fixed(one_of("pytorch", "tensorflow"), "pytorch", "models are PyTorch's; use pytorch"),
    "loss_decay": Fixed(number(0, 1), 0.2, "a client's utility is taken from all samples of its first pass", False),
    "capacity_bin": Fixed(flag, True, "utility counts the samples that were seen", False),
    "test_ratio": Fixed(number(0, 1), 1.0, "all test samples are used", False),
    "wandb_token": Fixed(text, "", "records and TensorBoard's events are written, nothing is sent anywhere", False),
}  # fmt: skip

KNOWN = frozenset({*USED, *QUIET, *FIXED, *SAME})


@dataclass(slots=True)
class Keys:
    """What a configuration says, by the artifact's names; and what is to be told about it."""

    said: dict[str, Value]
    places: dict[str, KeyPath]
    """Where each stands; also of those that say nothing."""
    names: dict[str, str]
    """As each is written there."""
    wrong: dict[KeyPath, str]
    remarks: dict[KeyPath, str]
    is_fedscale: bool = False

    def refuse(self, key: str, why: str, between: str = " ") -> None:
        self.wrong.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)}{between}{why}")

    def remark(self, key: str, what: str) -> None:
        self.remarks.setdefault(self.places.get(key, ("job_conf",)), f"{self.names.get(key, key)} {what}")


def keys_of(job_conf: object) -> Keys:
    """The artifact's list of single keys; a mapping will do, too."""
    found = Keys({}, {}, {}, {}, {})
    for place, name, value in _items(job_conf, found.wrong):
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
            _read(found, key, value.strip())
    return found


def _items(job_conf: object, wrong: dict[KeyPath, str]) -> list[tuple[KeyPath, str, object]]:
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


def _read(keys: Keys, key: str, value: str) -> None:
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
