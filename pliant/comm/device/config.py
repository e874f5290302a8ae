"""How a device group behaves. What of it all ranks must have alike is compared in `agreement`."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.comm.device.torch_group import OPS, BackendName
from pliant.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroupConfig:
    """How a device group behaves; equal on all ranks except for the timeouts."""

    backend: BackendName = "nccl"
    """`nccl`: one CUDA device per worker. `gloo`: tensors on the host or on any CUDA device."""
    hierarchical: bool = False
    """Reduce within the host by torch's group, between the hosts by the engine, and broadcast within the host."""
    op: str = "sum"
    """sum, min, max or prod."""
    name: str = "device"
    """Distinguishes groups that live on one engine at the same time."""
    timeout_s: float = 300.0
    """How long a collective, and the making of the group, may take."""
    linger_s: float = 5.0
    """How long `close` waits for the other ranks to close as well."""

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo"):
            raise ConfigError(f"backend={self.backend!r} is unknown: use 'nccl' or 'gloo'")
        if self.op not in OPS:
            raise ConfigError(f"op={self.op!r} is unknown: use one of {', '.join(OPS)}")
        if self.timeout_s <= 0 or self.linger_s < 0:
            raise ConfigError(f"timeout_s={self.timeout_s:g}, linger_s={self.linger_s:g}: use positive numbers")
