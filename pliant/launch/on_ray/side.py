"""One node of a job on Ray, as its driver sees it: the runner's actor, its output, and its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pliant.cluster import PortRange, Worker
from pliant.launch.on_ray.cluster import why_failed
from pliant.launch.output import Console, LineSplitter
from pliant.launch.ssh import ARRIVED

ASK_S = 5.0
"""How long an actor may take to answer; one that cannot is about to be lost."""
AHEAD = 64
"""So many pieces of output may be under way."""


@dataclass(frozen=True, slots=True)
class Up:
    """The runner's actor runs."""

    node: str


@dataclass(frozen=True, slots=True)
class RunnerEnded:
    """The runner has ended; a negative code is the signal that killed it."""

    node: str
    code: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The actor is gone, most likely with its node."""

    node: str
    why: str


SideEvent = Up | RunnerEnded | Lost


class Lines:
    """What a runner prints: lines of workers have their worker's name already, those of its own get their host's."""

    def __init__(self, host: str, console: Console) -> None:
        self._prefix, self._worker = f"[{host}] ".encode(), f"[{host}.".encode()
        self._console, self._splitter = console, LineSplitter()

    def feed(self, data: bytes) -> None:
        self._show(self._splitter.feed(data))

    def flush(self) -> None:
        self._show(self._splitter.flush())

    def _show(self, lines: Sequence[bytes]) -> None:
        shown = [line if line.startswith(self._worker) else self._prefix + line for line in lines if line != ARRIVED]
        if shown:
            self._console.write(b"".join(line + b"\n" for line in shown))


class Side:
    """The runner of one node."""

    def __init__(self, node: str, host: str, used: set[int], post: Callable[[SideEvent], None]) -> None:
        """`used`: ports of this host that the job has had, which late words may still be about."""
        self.host = host
        self.is_up = False
        self.by_slot: list[int | None] = []
        """The seat of each of the runner's slots; None: nobody is to be there."""
        self._node, self._post = node, post
        self._actor: Any = None
        self._used = used

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], directory: str) -> None:
        """Start the actor and, in it, the runner; what follows comes by `post`, from a thread."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from pliant.launch.on_ray.runner import RayRunner

        placed = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        made = ray.remote(RayRunner).options(num_cpus=0, max_concurrency=8, scheduling_strategy=placed)
        self._actor = made.remote(self.host)
        asked = (list(arguments), dict(environ), directory)
        threading.Thread(target=self._attend, args=asked, name=f"ray-{self.host}", daemon=True).start()

    def _attend(self, arguments: list[str], environ: dict[str, str], directory: str) -> None:
        import ray

        shown = {1: Lines(self.host, Console(1, coloured=False)), 2: Lines(self.host, Console(2, coloured=False))}
        how = {"num_returns": "streaming", "_generator_backpressure_num_objects": AHEAD}
        code = None
        try:
            output = self._actor.run.options(**how).remote(arguments, environ, directory)
            ray.get(self._actor.free_ports.remote(0, 1024, 65535, []))
            self.is_up = True
            self._post(Up(self._node))
            for reference in output:
                number, data = ray.get(reference)
                if number:
                    shown[number].feed(data)
                else:
                    code = int(data)
        except Exception as error:  # the end of a thread: the driver must hear of it, whatever it was
            self._post(Lost(self._node, why_failed(error)))
            return
        finally:
            for lines in shown.values():
                lines.flush()
        self._post(Lost(self._node, "it said no exit code") if code is None else RunnerEnded(self._node, code))

    def free_ports(self, count: int, ports: PortRange) -> list[int]:
        """Ports that were never used; none where the actor does not answer."""
        found = self._ask("free_ports", count, ports.begin, ports.end, sorted(self._used)) or []
        self._used.update(found)
        return list(found)

    def living(self, version: int = -1) -> dict[Worker, int] | None:
        """The slots of workers whose processes live; None where nobody can say, or the runner has not acted on this view."""
        found = self._ask("living")
        if found is None or found[0] < version:
            return None
        return {Worker.parse(name): slot for name, slot in found[1].items()}

    def let_see(self, visible: Mapping[int, str | None]) -> bool:
        """Have slots for these seats, with the devices that each may see; whether the runner knows."""
        self.by_slot = [seat if seat in visible else None for seat in self.by_slot]
        for seat in visible:
            if seat in self.by_slot:
                continue
            # The runner starts a worker on the lowest slot that is free.
            if None in self.by_slot:
                self.by_slot[self.by_slot.index(None)] = seat
            else:
                self.by_slot.append(seat)
        shown = [None if seat is None else visible[seat] for seat in self.by_slot]
        return self._ask("show", shown) is not None

    def drop(self, workers: Sequence[str]) -> None:
        """Kill these workers; returns at once."""
        if workers:
            self._actor.drop.remote(list(workers))

    def end(self) -> None:
        """Ask the runner to end; returns at once."""
        self._actor.end.remote()

    def kill(self) -> None:
        """End the actor, and with it the runner, at once."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def _ask(self, method: str, *arguments: object) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ASK_S)
        except ray.exceptions.RayError:
            return None  # its own thread sees that it is gone
