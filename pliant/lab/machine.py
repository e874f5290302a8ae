"""What keeps a machine from holding a lab: rights, tools, and parts of the kernel, each with its remedy."""

from __future__ import annotations

import os
import shutil

from pliant.errors import LabError
from pliant.lab.namespaces import command, in_scratch_namespace
from pliant.lab.rates import shaper


def check() -> list[str]:
    """What keeps this machine from holding a lab, each with its remedy; empty where all is well.

    The kernel is asked by trying in a nameless namespace that ends with the trial.
    """
    problems = []
    if os.geteuid() != 0:
        problems.append("not root: network namespaces need it; run with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            problems.append(
                f"`{tool}` not found: install iproute2 (apt-get install iproute2), or put /usr/sbin on PATH"
            )
    if not problems:
        try:
            problems = in_scratch_namespace(_try_kernel)
        except OSError as error:
            problems = [
                f"the kernel gives no network namespace ({error}): leave the container, or give it CAP_SYS_ADMIN"
            ]
    return problems


def _try_kernel() -> list[str]:
    trials = {
        "ip link add b0 type bridge": "no bridge in the kernel: modprobe bridge (CONFIG_BRIDGE)",
        "ip link add v0 type veth peer name v1": "no veth in the kernel: modprobe veth (CONFIG_VETH)",
        f"tc qdisc add dev lo root {' '.join(shaper(10**9))}": "no tbf qdisc in the kernel: modprobe sch_tbf "
        "(CONFIG_NET_SCH_TBF), or use rate none",
    }
    problems = []
    for trial, remedy in trials.items():
        try:
            command(*trial.split())
        except LabError as error:
            problems.append(f"{remedy}; {error}")
    return problems
