"""The devices of a job on a Ray cluster, and the workers on them. Pure; `driver` does the rest.

A device slot is requested, placed on a node, assigned to a worker, and released. When its node is lost, it waits until Ray has
found it another. A worker that crashes is replaced by the runner of its node, in the same slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.cluster import View, Worker
from pliant.errors import CapacityError


@dataclass(slots=True)
class DeviceSlot:
    """One device for one worker."""

    number: int
    kind: str
    node: str = ""
    """The node that has the device; empty while there is none."""
    worker: Worker | None = None
    """The worker on it; None: none has been assigned yet."""
    visible: str | None = None
    """The value of CUDA_VISIBLE_DEVICES for its worker; None: as it is on the node."""
    leaving: bool = False
    """Whether it is not wanted any more: it is released as soon as its worker has ended."""

    @property
    def is_vacant(self) -> bool:
        return bool(self.node) and self.worker is None


@dataclass(slots=True)
class DeviceSlots:
    """All device slots of a job."""

    kinds: Sequence[str]
    """The device types that the job may use, the best first."""
    most: Mapping[str, int] = field(default_factory=dict)
    """How many devices of a type a resize may ask for; a type that is not listed has no limit."""
    all: dict[int, DeviceSlot] = field(default_factory=dict)
    _next: int = 0

    def devices_for(self, size: int) -> dict[str, int]:
        """Return the devices for `size` workers: as many of the best type as are allowed, then of the next.

        Raises:
            CapacityError: that is more than the job may have.
        """
        chosen: dict[str, int] = {}
        left = size
        for kind in self.kinds:
            chosen[kind] = min(left, self.most.get(kind, left))
            left -= chosen[kind]
        if left:
            listed = ", ".join(f"{kind}={self.most[kind]}" for kind in self.kinds)
            raise CapacityError(f"size {size}: --devices {listed} holds {size - left} workers; ask for fewer")
        return chosen

    def want(self, devices: Mapping[str, int], view: View | None) -> None:
        """Request these devices; if there are more, the last workers of the view leave theirs."""
        ranks = {worker: rank for rank, worker in enumerate(view.workers)} if view is not None else {}
        for kind in {*devices, *(slot.kind for slot in self.all.values())}:
            mine = [slot for slot in self.all.values() if slot.kind == kind and not slot.leaving]
            for _ in range(devices.get(kind, 0) - len(mine)):
                self.all[self._next] = DeviceSlot(self._next, kind)
                self._next += 1
            # Those without a worker first, then those whose worker has crashed: that costs nobody anything.
            mine.sort(
                key=lambda slot: (
                    (2, 0) if slot.worker is None else (0, ranks[slot.worker]) if slot.worker in ranks else (1, 0)
                )
            )
            for slot in mine[devices.get(kind, 0) :]:
                slot.leaving = True
                if slot.worker is None:
                    del self.all[slot.number]

    def lose(self, node: str) -> None:
        """Note that `node` is lost, with all workers on it."""
        for slot in self.on(node):
            slot.node, slot.worker = "", None
            if slot.leaving:
                del self.all[slot.number]

    def follow(self, view: View, hosts: Mapping[str, str]) -> None:
        """Note which workers have replaced crashed ones in `view`. `hosts` has the nodes' addresses."""
        assigned = {slot.worker for slot in self.all.values()}
        for worker in view.workers:
            if worker in assigned:
                continue
            for slot in self.all.values():
                lost = slot.worker is not None and slot.worker not in view.workers and not slot.leaving
                if lost and hosts.get(slot.node) == worker.host:
                    slot.worker = worker
                    break

    def reassign(self, node: str, by_local_rank: Sequence[int | None], local_ranks: Mapping[Worker, int]) -> None:
        """Note on which device each worker of `node` really runs: workers that start together may swap their devices.

        `by_local_rank` has the number of the device slot of each local rank, and `local_ranks` the workers' ranks.
        """
        for worker, local_rank in local_ranks.items():
            number = by_local_rank[local_rank] if local_rank < len(by_local_rank) else None
            given = self.all.get(number) if number is not None else None
            now = next((slot for slot in self.on(node) if slot.worker == worker), None)
            if given is not None and now is not None and not (given.leaving or now.leaving):
                given.worker, now.worker = now.worker, given.worker

    def on(self, node: str) -> list[DeviceSlot]:
        return [slot for slot in self.all.values() if slot.node == node]

    def leave(self, living: Collection[Worker], node: str) -> None:
        """Remove the slots on `node` that were to be released and whose workers are not among `living`."""
        for slot in self.on(node):
            if slot.leaving and slot.worker not in living:
                del self.all[slot.number]

    @property
    def nodes(self) -> list[str]:
        """The nodes that have workers of the job, in the order of their first worker."""
        return list(dict.fromkeys(slot.node for slot in self.all.values() if slot.worker is not None))

    @property
    def leaving(self) -> list[DeviceSlot]:
        return [slot for slot in self.all.values() if slot.leaving]

    @property
    def unplaced(self) -> list[DeviceSlot]:
        return [slot for slot in self.all.values() if not slot.node]

    @property
    def vacant(self) -> list[DeviceSlot]:
        return [slot for slot in self.all.values() if slot.is_vacant]

    @property
    def wanted(self) -> list[Worker]:
        """The assigned workers whose devices are still wanted."""
        return [slot.worker for slot in self.all.values() if slot.worker is not None and not slot.leaving]

    def occupied(self) -> dict[str, int]:
        """Return the number of devices with a worker, by type; for any thread."""
        return dict(Counter(slot.kind for slot in list(self.all.values()) if slot.worker is not None))
