"""See that all ranks mean the same by a device group and can do it, before torch is asked for anything.

torch's groups would wait for ever for a rank that has other tensors, or no GPU of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

import torch

from pliant.comm.device.config import DeviceGroupConfig
from pliant.comm.device.launch_order import check_equal
from pliant.comm.device.torch_group import check_gpus, gpu_of, problem_of
from pliant.comm.engine import Engine
from pliant.errors import ConfigError, Mismatch


def agree(
    engine: Engine, config: DeviceGroupConfig, tensors: Mapping[str, str], devices: Sequence[torch.device]
) -> str:
    """What this group's names on the engine begin with; all ranks call this, with their tensors described.

    Raises:
        ConfigError: the backend cannot be used on some rank; on every rank, with the remedy.
        Mismatch: the ranks have different tensors or settings; on every rank.
    """
    mine = {
        "token": secrets.token_hex(8),
        "settings": [config.backend, config.hierarchical, config.op],
        "problem": problem_of(config.backend, devices),
        "gpu": gpu_of(config.backend, devices),
        "tensors": tensors,
    }
    said = engine.all_gather_bytes(f"device-group:{config.name}", json.dumps(mine).encode(), timeout_s=config.timeout_s)
    ranks = [json.loads(words) for words in said]
    for rank, found in enumerate(ranks):
        if found["settings"] != ranks[0]["settings"]:
            raise Mismatch(
                f"(backend, hierarchical, op) is {ranks[0]['settings']} on rank 0, but {found['settings']} on "
                f"rank {rank}: make the group alike on all ranks"
            )
    check_equal([found["tensors"] for found in ranks])
    for rank, found in enumerate(ranks):
        if found["problem"]:
            worker = engine.view.workers[rank]
            raise ConfigError(f"backend={config.backend!r} on {worker} (rank {rank}): {found['problem']}")
    check_gpus([found["gpu"] for found in ranks])
    return f"device-group:{config.name}:{ranks[0]['token']}"
