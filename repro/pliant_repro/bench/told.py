"""The ranks' end of a contest: each is told what to do, and answers, one JSON object per line. No torch here.

`bench.contest` has the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

Command = Mapping[str, object]


class Line:
    """What a rank hears and says. When nobody can tell it anything more, the process ends at once, whatever it is doing."""

    def __init__(self, source: IO[bytes], target: IO[bytes]) -> None:
        self._source, self._target = source, target
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # A controller killed before it accepted us shows as a reset, not as an end.
        with contextlib.suppress(ConnectionError):
            for line in self._source:
                command = json.loads(line)
                if command["do"] == "stop":
                    self._commands.put(None)
                    return
                self._commands.put(command)
        os._exit(3)

    def next(self) -> Command | None:
        """The next command; None: it is told to stop, and nothing follows."""
        return self._commands.get()

    def __iter__(self) -> Iterator[Command]:
        """The commands until it is told to stop."""
        while (command := self.next()) is not None:
            yield command

    def answer(self, **values: object) -> None:
        self._target.write(json.dumps(values).encode() + b"\n")
        self._target.flush()


def obeyed(source: IO[bytes], target: IO[bytes], be: Callable[[Line], None]) -> int:
    """Let `be` do what it is told. What it fails of is its last answer; the exit status."""
    line = Line(source, target)
    try:
        be(line)
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            line.answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def take_place(rank: int, environs: Sequence[Mapping[str, str]]) -> None:
    """Make the environment that of this rank, and close what others listen on: it was inherited where one process has
    started all ranks."""
    for other, environ in enumerate(environs):
        if other != rank and "PLIANT_LISTEN_FD" in environ:
            with contextlib.suppress(OSError):
                os.close(int(environ["PLIANT_LISTEN_FD"]))
    os.environ.update(environs[rank] if environs else {})
