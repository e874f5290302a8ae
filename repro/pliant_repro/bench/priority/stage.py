"""Where the sides of `pliant bench priority` run, and how their processes are started: in a lab here, or over ssh."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pliant_repro.bench import contenders
from pliant_repro.bench.contenders import Ground
from pliant_repro.bench.contest import Starter, ToldJob
from pliant_repro.bench.priority import hosts as machines
from pliant_repro.bench.priority.hosts import Host
from pliant_repro.bench.priority.options import PriorityOptions
from pliant_repro.bench.priority.worker import Task
from pliant_repro.lab.hosts import INTERFACE, Lab

WORKER = "pliant_repro.bench.priority.worker"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the ranks run: in a lab on this machine, or on hosts."""

    options: PriorityOptions
    folder: Path
    lab: Lab | None = None

    @property
    def hosts(self) -> list[Host]:
        """Of each rank; only without a lab."""
        return machines.placed(self.options.hosts)

    def job(
        self,
        name: str,
        side: str,
        number: int,
        slice_bytes: int | None = None,
        in_flight_bytes: int | None = None,
    ) -> ToldJob:
        """The processes of one side, not started yet, which take their task when they are ready."""
        options = self.options
        environs: Sequence[Mapping[str, str]] = [{}] * options.nodes
        sockets: Sequence[socket.socket] = ()
        if side not in ("ddp", "plain"):
            if self.lab is not None:
                environs, sockets = contenders.identities(self._ground(), "AUTO")
            else:
                environs = machines.identities(options.hosts, number)
        task = Task(
            side=side,
            num_workers=options.nodes,
            model=options.model,
            compute=options.compute,
            batch=options.batch,
            size=options.size,
            slice_bytes=slice_bytes,
            in_flight_bytes=in_flight_bytes,
            meeting=f"tcp://{self.lab.addresses[0] if self.lab else self.hosts[0].host}:{machines.BASE_PORT}",
            ifaces=tuple(INTERFACE if self.lab else host.iface for host in (self.hosts or [Host("")] * options.nodes)),
            environs=tuple(dict(each) for each in environs),
            pinned=options.compute == "real" and self.lab is not None,
            trace=str(self.folder / f"trace-{name}") if options.trace is not None else "",
        )
        control = self.folder / f"{name}.sock"
        if self.lab is not None:
            argv = [sys.executable, "-m", WORKER, str(control), *self.lab.namespaces]
            starters = [contenders.launcher(argv, sockets)]
        else:
            starters = [self._over_ssh(rank, control) for rank in range(options.nodes)]
        return ToldJob(name, options.nodes, starters, control, {"task": task.to_json()})

    def _ground(self) -> Ground:
        return Ground(num_workers=self.options.nodes, sizes=(), folder=self.folder, lab=self.lab)

    def _over_ssh(self, rank: int, control: Path) -> Starter:
        def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
            # One socket is both its input and its output, so that ssh carries the whole conversation.
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(control))
                return subprocess.Popen(
                    machines.ssh_argv(self.hosts[rank], sys.executable, WORKER, rank),
                    stdin=line.fileno(),
                    stdout=line.fileno(),
                    stderr=output,
                    env=contenders.clean_environ(),
                )

        return start
