"""Which devices a job on a Ray cluster has, and who sits on them. Pure; `driver` does the rest.

A seat is asked for, placed on a node, given to a worker, and left. When its node is lost it stands without a place again until
Ray has found it another. A worker that crashes is replaced by the runner of its node, in the same seat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.cluster import View, Worker
from pliant.errors import CapacityError


@dataclass(slots=True)
class Seat:
    """One device for one worker."""

    number: int
    kind: str
    node: str = ""
    """Where it is; empty as long as there is no room for it."""
    worker: Worker | None = None
    """Who sits there; None: nobody was told to, yet."""
    visible: str | None = None
    """What CUDA_VISIBLE_DEVICES is there; None: whatever the node has."""
    leaving: bool = False
    """Not wanted any more, and free as soon as its worker has gone."""

    @property
    def is_vacant(self) -> bool:
        return bool(self.node) and self.worker is None


@dataclass(slots=True)
class Seats:
    """The seats of a job."""

    kinds: Sequence[str]
    """The types it may use, the best first."""
    most: Mapping[str, int] = field(default_factory=dict)
    """How many of a type it may ask for by itself; not listed: as many as there are."""
    all: dict[int, Seat] = field(default_factory=dict)
    _next: int = 0

    def devices_for(self, size: int) -> dict[str, int]:
        """The devices of `size` workers: as many of the best type as may be, then of the next.

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
        """Have these devices: the last in the view leave, where there are more."""
        ranks = {worker: rank for rank, worker in enumerate(view.workers)} if view is not None else {}
        for kind in {*devices, *(seat.kind for seat in self.all.values())}:
            mine = [seat for seat in self.all.values() if seat.kind == kind and not seat.leaving]
            for _ in range(devices.get(kind, 0) - len(mine)):
                self.all[self._next] = Seat(self._next, kind)
                self._next += 1
            # Those without a worker first, then those whose worker has crashed: that costs nobody anything.
            mine.sort(
                key=lambda seat: (
                    (2, 0) if seat.worker is None else (0, ranks[seat.worker]) if seat.worker in ranks else (1, 0)
                )
            )
            for seat in mine[devices.get(kind, 0) :]:
                seat.leaving = True
                if seat.worker is None:
                    del self.all[seat.number]

    def lose(self, node: str) -> None:
        """Note that all on `node` is gone."""
        for seat in self.on(node):
            seat.node, seat.worker = "", None
            if seat.leaving:
                del self.all[seat.number]

    def follow(self, view: View, hosts: Mapping[str, str]) -> None:
        """Note who has come in place of whom, where a runner has replaced a crashed worker. `hosts`: the nodes' addresses."""
        seated = {seat.worker for seat in self.all.values()}
        for worker in view.workers:
            if worker in seated:
                continue
            for seat in self.all.values():
                lost = seat.worker is not None and seat.worker not in view.workers and not seat.leaving
                if lost and hosts.get(seat.node) == worker.host:
                    seat.worker = worker
                    break

    def reseat(self, node: str, by_slot: Sequence[int | None], slots: Mapping[Worker, int]) -> None:
        """Note in which slots of `node`'s runner its workers are: a slot has the device of a certain seat, and workers that come
        at the same time may have taken each other's."""
        for worker, slot in slots.items():
            number = by_slot[slot] if slot < len(by_slot) else None
            given = self.all.get(number) if number is not None else None
            now = next((seat for seat in self.on(node) if seat.worker == worker), None)
            if given is not None and now is not None and not (given.leaving or now.leaving):
                given.worker, now.worker = now.worker, given.worker

    def on(self, node: str) -> list[Seat]:
        return [seat for seat in self.all.values() if seat.node == node]

    def leave(self, living: Collection[Worker], node: str) -> None:
        """Note who still lives on `node`: seats that were to be left, and are, are gone."""
        for seat in self.on(node):
            if seat.leaving and seat.worker not in living:
                del self.all[seat.number]

    @property
    def nodes(self) -> list[str]:
        """Where the job has workers, in the order in which it came there."""
        return list(dict.fromkeys(seat.node for seat in self.all.values() if seat.worker is not None))

    @property
    def leaving(self) -> list[Seat]:
        return [seat for seat in self.all.values() if seat.leaving]

    @property
    def unplaced(self) -> list[Seat]:
        return [seat for seat in self.all.values() if not seat.node]

    @property
    def vacant(self) -> list[Seat]:
        return [seat for seat in self.all.values() if seat.is_vacant]

    @property
    def wanted(self) -> list[Worker]:
        """Those who sit where they shall."""
        return [seat.worker for seat in self.all.values() if seat.worker is not None and not seat.leaving]

    def occupied(self) -> dict[str, int]:
        """By type; may be asked from another thread."""
        return dict(Counter(seat.kind for seat in list(self.all.values()) if seat.worker is not None))
