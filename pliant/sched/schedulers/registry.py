"""Which job gets which devices: all policies by name. Each `allocate`s in the form that `base` describes. Pure."""

from __future__ import annotations

from pliant.errors import ConfigError
from pliant.sched.schedulers.base import Changes, Policy
from pliant.sched.schedulers.easyscale import Heterogeneous, Homogeneous
from pliant.sched.schedulers.fifo import GangFifo, OneJob
from pliant.sched.schedulers.goodput import Optimus, Pollux
from pliant.sched.schedulers.queues import ShortestRemaining, Tiresias

__all__ = ["POLICIES", "Changes", "Policy", "make", "parse"]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (OneJob, GangFifo, Homogeneous, Heterogeneous, ShortestRemaining, Tiresias, Optimus, Pollux)
}


def make(name: str) -> Policy:
    """A new policy of this name, with no memory of others."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown: use {', '.join(POLICIES)}, or all")
    return POLICIES[name]()


def parse(text: str) -> list[str]:
    """From `all` or `a,b`."""
    chosen = list(POLICIES) if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    if not chosen:
        raise ConfigError(f"--policy {text!r}: name one of {', '.join(POLICIES)}, or all")
    for name in chosen:
        make(name)
    return list(dict.fromkeys(chosen))
