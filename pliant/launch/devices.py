"""Which CUDA device each worker sees. Torch is not imported: a runner must start at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence


def device_files() -> tuple[str, ...]:
    """The names in /dev; empty where there is none."""
    try:
        return tuple(os.listdir("/dev"))
    except OSError:
        return ()


def visible_devices(environ: Mapping[str, str], files: Iterable[str]) -> tuple[str, ...]:
    """The devices that workers may use, as CUDA_VISIBLE_DEVICES would name them.

    A list that the user has set is taken as it is (it may hold UUIDs); otherwise one device per
    /dev/nvidia<number>. Empty means that there is no device to hand out.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        listed = [word.strip() for word in wanted.split(",")]
        # CUDA itself stops at the first invalid entry, so that "0,-1,1" means "0".
        ends = next((i for i, word in enumerate(listed) if word in ("", "-1")), len(listed))
        return tuple(listed[:ends])
    num_devices = sum(1 for name in files if re.fullmatch(r"nvidia\d+", name))
    return tuple(map(str, range(num_devices)))


def device_of_slot(file: str, slot: int) -> str | None:
    """What the JSON list in `file` has for this slot: a scheduler changes it as it gives devices to jobs.

    "" hides all devices; None, and a list that is too short, leave the environment as it is.
    """
    try:
        with open(file) as text:
            listed = json.load(text)
        return listed[slot] if isinstance(listed[slot], str) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def device_environ(slot: int, devices: Sequence[str], *, allow_nvlink: bool) -> dict[str, str]:
    """The variables that give local slot `slot` its device; slots beyond the devices share round-robin.

    With `allow_nvlink` CUDA_VISIBLE_DEVICES stays as it is, since NCCL reaches over NVLink only
    devices that the process can see; the worker then picks by PLIANT_CUDA_VISIBLE_DEVICES.
    """
    if not devices:
        return {}
    device = devices[slot % len(devices)]
    mine = {"PLIANT_CUDA_VISIBLE_DEVICES": device}
    return mine if allow_nvlink else {**mine, "CUDA_VISIBLE_DEVICES": device}
