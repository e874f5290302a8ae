"""What keeps a machine from holding a lab: rights, tools, and parts of the kernel, each with its remedy."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple

from pliant.errors import LabError
from pliant_repro.lab.namespaces import command, in_scratch_namespace
from pliant_repro.lab.rates import shaper


class Lack(NamedTuple):
    """Something that a lab needs, and that this machine does not give."""

    what: str
    """namespaces, qdiscs, or all of it."""
    why: str
    remedy: str
    """What to type."""

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}"


def check() -> list[str]:
    """What keeps this machine from holding a lab, each with its remedy; empty where all is well."""
    return [str(lack) for lack in lacks()]


def lacks() -> list[Lack]:
    """The same, by what is lacking. The kernel is asked by trying in a nameless namespace that ends with the trial."""
    found = []
    if os.geteuid() != 0:
        found.append(Lack("all", "not root: network namespaces need it", "sudo $(command -v pliant) lab up"))
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            why = f"`{tool}` not found: it is in iproute2, or /usr/sbin is not on PATH"
            found.append(Lack("all", why, "apt-get install iproute2"))
    if not found:
        try:
            found = in_scratch_namespace(_try_kernel)
        except OSError as error:
            why = f"the kernel gives no network namespace ({error})"
            found = [Lack("all", why, "leave the container, or docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN ...")]
    return found


def _try_kernel() -> list[Lack]:
    shaped = f"tc qdisc add dev lo root {' '.join(shaper(10**9))}"
    trials = {
        "ip link add b0 type bridge": Lack("namespaces", "no bridge in the kernel (CONFIG_BRIDGE)", "modprobe bridge"),
        "ip link add v0 type veth peer name v1": Lack(
            "namespaces", "no veth in the kernel (CONFIG_VETH)", "modprobe veth"
        ),
        shaped: Lack(
            "qdiscs", "no tbf qdisc in the kernel (CONFIG_NET_SCH_TBF), so rates are none", "modprobe sch_tbf"
        ),
    }
    found = []
    for trial, lack in trials.items():
        try:
            command(*trial.split())
        except LabError as error:
            found.append(lack._replace(why=f"{lack.why}: {error}"))
    return found
