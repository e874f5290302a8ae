"""A Ray cluster of several nodes on this machine, in a process of its own: `ray_nodes.py FOLDER HOST:CPUS[:NAME=N] ...`.

The first node is the head. Each has a loopback address, as if it were a machine. Prints the cluster's address; then lines on its input
(`remove HOST`, `add HOST:CPUS`) are carried out, each answered by a line; the end of its input is the end of the cluster.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SMALL = 80 << 20
QUICK = {
    "prestart_worker_first_driver": False,
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 2000,
}
"""By default a lost node is noticed after 15 s; and each driver would bring a process for every CPU, needed or not."""


def settings(described: str) -> dict[str, Any]:
    host, cpus, *more = described.split(":")
    resources = {name: float(count) for name, count in (word.split("=") for word in more)}
    gpus = int(resources.pop("gpu", 0))
    return {
        "node_ip_address": host,
        "num_cpus": int(cpus),
        "num_gpus": gpus,
        "resources": resources,
        "object_store_memory": SMALL,
        "include_log_monitor": False,
    }


def main() -> None:
    folder, first, *others = sys.argv[1:]
    os.environ["RAY_TMPDIR"] = folder
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    from ray.cluster_utils import Cluster

    head = {**settings(first), "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {each.split(":")[0]: cluster.add_node(wait=False, **settings(each)) for each in others}
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, described = line.split()
        if word == "remove":
            cluster.remove_node(nodes.pop(described), allow_graceful=False)
        else:
            nodes[described.split(":")[0]] = cluster.add_node(**settings(described))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
