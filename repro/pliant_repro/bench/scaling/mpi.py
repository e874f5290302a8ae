"""Open MPI between the hosts of a lab: what stands in for ssh, and the command line of mpirun.

The hosts are namespaces of one machine, so a launcher needs no network: it enters the namespace. Each daemon also gets a
host name of its own, because Open MPI takes daemons with one name for one machine and lets their files collide.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from pliant_repro.lab.hosts import INTERFACE, Lab

MOST_NODES = 8
WHY_NO_MORE = (
    f"openmpi is left out beyond {MOST_NODES} nodes: its ranks poll while they wait, so that on a machine with fewer cores "
    "than ranks they take the processor from each other, and every rank loads torch by itself"
)


def why_not() -> str:
    """Why Open MPI cannot take part; empty where it can."""
    if shutil.which("mpirun") is None:
        return "openmpi is left out: `mpirun` not found; apt-get install openmpi-bin"
    if importlib.util.find_spec("mpi4py") is None:
        return "openmpi is left out: mpi4py not found; pip install 'pliant[bench]'"
    if shutil.which("unshare") is None:
        return "openmpi is left out: `unshare` not found; apt-get install util-linux"
    return ""


def write_agent(lab: Lab, path: Path) -> Path:
    """A program that is called like ssh (HOST COMMAND...) and runs the command on that host of the lab."""
    cases = "\n".join(
        f"  {address}) namespace={namespace} name=node{number};;"
        for number, (address, namespace) in enumerate(zip(lab.addresses, lab.namespaces, strict=True))
    )
    path.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\naddress=$1; shift\ncase "$address" in\n{cases}\n'
        '  *) echo "no such host: $address" >&2; exit 1;;\nesac\n'
        'exec ip netns exec "$namespace" unshare --uts sh -c \'hostname "$0"; eval "$@"\' "$name" "$@"\n'
    )
    path.chmod(0o700)
    return path


def command(lab: Lab, agent: Path, program: Sequence[str]) -> list[str]:
    """mpirun on the lab's first host, one rank on each host. Waiting ranks give the processor away."""
    hosts = ",".join(f"{address}:1" for address in lab.addresses)
    settings = {
        "plm_rsh_agent": str(agent),
        "plm_rsh_no_tree_spawn": "1",
        "btl": "tcp,self",
        "btl_tcp_if_include": INTERFACE,
        "oob_tcp_if_include": INTERFACE,
        "mpi_yield_when_idle": "1",
        "hwloc_base_binding_policy": "none",
    }
    flags = [word for name, value in settings.items() for word in ("--mca", name, value)]
    count = str(lab.num_hosts)
    argv = ["mpirun", "--allow-run-as-root", "-np", count, "--host", hosts, "--map-by", "node", *flags, *program]
    # The first rank's host has a name of its own, too.
    return lab.exec_argv(0, ["unshare", "--uts", "sh", "-c", 'hostname node0; exec "$@"', "sh", *argv])
