"""A Ray cluster of two nodes on this machine, each at a loopback address of its own, for the tests beside this file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
CPUS = 3
PATIENCE_S = 60.0
"""Ray starts a process for each runner, and on a busy machine that takes its time."""


@dataclass
class Nodes:
    """The cluster, in a process of its own."""

    folder: Path
    process: subprocess.Popen[str]
    address: str = ""
    others: set[str] = field(default_factory=lambda: {OTHER})
    """Nodes beside the head."""

    def add(self, described: str) -> None:
        """A node more, such as 127.0.0.4:3:t4=2."""
        self._ask(f"add {described}")
        self.others.add(described.partition(":")[0])

    def remove(self, host: str) -> None:
        """As if its machine were switched off."""
        self.others.remove(host)
        self._ask(f"remove {host}")

    def _ask(self, order: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """For as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short names
    command = [
        sys.executable,
        str(Path(__file__).with_name("ray_nodes.py")),
        str(folder),
        f"{HEAD}:{CPUS}:t4=2:gpu=2",
        f"{OTHER}:{CPUS}",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        made = Nodes(folder, process)
        try:
            assert process.stdout is not None
            made.address = process.stdout.readline().strip()
            assert made.address, "the cluster did not start"
            yield made
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
    shutil.rmtree(folder)
