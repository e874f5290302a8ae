"""A Ray cluster as pliant sees it: nodes with devices, and placement groups that hold devices.

A type of device is a resource of Ray's: `cpu` is its CPU, `gpu` its GPU, and any other name a custom resource, as in
`ray start --resources '{"t4": 4}'`. A device is held by a placement group of one bundle: Ray chooses the node,
nobody else is given it, and when its node is lost Ray moves it to another one as soon as there is room.
Ray is imported inside: the rest of the launcher must do without it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import CapacityError, ConfigError

log = logging.getLogger(__name__)

START_ONE = "start one with `ray start --head`, or name it by --ray-address, as HOST:PORT"
ANSWER_S = 5.0
BUILT_IN = {"cpu": "CPU", "gpu": "GPU"}
"""Ray's names of the resources that every cluster has, by our names."""
NOT_DEVICES = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of the cluster."""

    id: str
    host: str
    """The address that its workers listen on: its own, or one of loopback where all nodes are one machine."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many devices it has of each type, free or not."""


def nodes_of(listed: Sequence[Mapping[str, Any]]) -> dict[str, RayNode]:
    """Return the living nodes among what `ray.nodes()` lists, by their ids. Pure.

    Raises:
        ConfigError: some nodes, but not all, share an address, so that workers could not be told apart.
    """
    living = sorted((node for node in listed if node["Alive"]), key=lambda node: str(node["NodeID"]))
    addresses = Counter(str(node["NodeManagerAddress"]) for node in living)
    shared = [address for address, count in addresses.items() if count > 1]
    if shared and len(addresses) > 1:
        raise ConfigError(
            f"{addresses[shared[0]]} nodes of the Ray cluster have the address {shared[0]}: "
            "start one per machine, or each with its own --node-ip-address"
        )
    found = {}
    for node in living:
        name, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
        found[name] = RayNode(name, _own_loopback(name) if shared else address, devices_in(node["Resources"]))
    return found


def _own_loopback(node: str) -> str:
    """Return a loopback address for a node that shares its machine with all others; always the same for the same node."""
    number = int(node[-12:], 16)
    return f"127.{1 + number % 254}.{(number >> 8) % 256}.{1 + (number >> 16) % 254}"


def devices_in(resources: Mapping[str, float]) -> dict[str, int]:
    """Return the devices among a node's resources, by our names."""
    found = {ours: int(resources.get(theirs, 0)) for ours, theirs in BUILT_IN.items()}
    for name, count in resources.items():
        if name not in NOT_DEVICES and ":" not in name and "_group_" not in name:
            found[name] = int(count)
    return {name: count for name, count in found.items() if count}


def total(nodes: Mapping[str, RayNode]) -> dict[str, int]:
    """Return how many devices of each type the cluster has."""
    found: Counter[str] = Counter()
    for node in nodes.values():
        found.update(node.devices)
    return dict(found)


def check_devices(wanted: Mapping[str, int], nodes: Mapping[str, RayNode], flag: str = "--devices") -> None:
    """Raise ConfigError or CapacityError where the whole cluster, were it idle, does not have what `flag` asks for."""
    there = total(nodes)
    listed = ", ".join(f"{kind}={count}" for kind, count in sorted(there.items())) or "no devices"
    for kind, count in wanted.items():
        if kind not in there:
            raise ConfigError(
                f"{flag} {kind}={count}: the Ray cluster has no {kind}, it has {listed}; "
                f"""name one of these, or give nodes the resource (`ray start --resources '{{"{kind}": N}}'`)"""
            )
        if count > there[kind]:
            raise CapacityError(
                f"{flag} {kind}={count}: the Ray cluster has {listed}; ask for {there[kind]} or fewer, or add nodes"
            )


def bundle_of(kind: str, nodes: Mapping[str, RayNode]) -> dict[str, float]:
    """Return the Ray resources of one device. A custom type whose nodes all have GPUs is a type of GPU, and takes one."""
    if kind in BUILT_IN:
        return {BUILT_IN[kind]: 1}
    having = [node for node in nodes.values() if kind in node.devices]
    return {kind: 1, "GPU": 1} if having and all("gpu" in node.devices for node in having) else {kind: 1}


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Make this process a driver of the cluster at `address` (`auto`: the one of this machine, or RAY_ADDRESS).

    What Ray itself would print goes nowhere: we say what we make of it.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # runners hold no GPU, their workers do
    try:
        import ray
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        raise ConfigError("--on ray needs Ray: `pip install 'pliant[ray]'`") from None
    try:
        found = canonicalize_bootstrap_address(address)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--ray-address {address!r}: {error}; {START_ONE}") from None
    if found is None:
        raise ConfigError(f"--ray-address {address}: no Ray cluster runs here; {START_ONE}")
    host = _answering(address, found)
    own = {"_node_ip_address": host} if ipaddress.ip_address(host).is_loopback else {}
    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
    try:
        ray.init(address=found, log_to_driver=False, logging_level=logging.CRITICAL, **own)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--ray-address {address}: {why}; {START_ONE}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _answering(address: str, found: str) -> str:
    """Return the host of `found` after checking that something listens there: Ray itself would try for minutes."""
    host, _, port = found.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as sock:
            return str(sock.getpeername()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ray-address {address}: nobody answers at {found} ({error}); {START_ONE}") from None


def living_nodes() -> dict[str, RayNode]:
    """Return the nodes of the connected cluster."""
    import ray

    return nodes_of(ray.nodes())


def own_address() -> str:
    """Return the address at which the nodes can reach this process."""
    import ray

    return str(ray.util.get_node_ip_address())


def own_job() -> str:
    """Return Ray's id of this driver together with the id of the cluster's session, because job ids start again with it."""
    import ray

    return f"{_session()} {ray.get_runtime_context().get_job_id()}"


def has_actors(job: str) -> bool:
    """Return whether an actor of another driver, which may be gone, still lives. `job` is its `own_job`."""
    import ray

    session, _, number = job.partition(" ")
    if session != _session():
        return False
    actors = ray._private.state.actors(job_id=ray.JobID(bytes.fromhex(number)))
    return any(actor["State"] != "DEAD" for actor in actors.values())


def _session() -> str:
    import ray

    return str(ray._private.worker.global_worker.node.session_name)


def _gpus() -> list[str]:
    """Return the GPUs that Ray gave to the task that calls this."""
    import ray

    return [str(each) for each in ray.get_gpu_ids()]


class DeviceHold:
    """One device, held by a placement group from its request until `release`."""

    def __init__(self, bundle: Mapping[str, float]) -> None:
        from ray.util.placement_group import placement_group

        self._group = placement_group([dict(bundle)], strategy="PACK")
        self._has_gpu = "GPU" in bundle
        self._is_cpu = set(bundle) == {"CPU"}
        self._asked: tuple[str, Any] = ("", None)

    def node(self) -> str:
        """Return the id of the node that has the device; empty while Ray is looking for one."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self._group)
        return str(table["bundles_to_node_id"][0]) if table.get("state") == "CREATED" else ""

    def visible(self, node: str) -> tuple[bool, str | None]:
        """Return whether CUDA_VISIBLE_DEVICES for this device is known, and its value; None: as it is on the node.

        A bundle has its own GPU as long as it stays: a task in it can say which.
        """
        if not self._has_gpu:
            return True, "" if self._is_cpu else None
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._asked[0] != node:
            inside = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
            asking = ray.remote(_gpus).options(num_cpus=0, num_gpus=1, scheduling_strategy=inside, max_retries=0)
            self._asked = (node, asking.remote())
        if not ray.wait([self._asked[1]], timeout=0)[0]:
            return False, None
        try:
            return True, ",".join(ray.get(self._asked[1]))
        except ray.exceptions.RayError:
            self._asked = ("", None)  # the node is going: another will be found
            return False, None

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def why_failed(error: Exception) -> str:
    """Return Ray's reason for the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = next((line for line in lines if "No module named" in line), "")
    if missing:
        return f"{missing}: pliant must be installed on every node, for Python {sys.version.split()[0]}"
    told = next((line for line in reversed(lines) if "died" in line.lower() or "dead" in line.lower()), "")
    return told or (lines or [type(error).__name__])[0]
