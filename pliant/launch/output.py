"""The output of workers: read line by line, prefixed, shown, written to files, and the last lines kept.

One thread reads the pipes of all workers. Bytes pass through as they came: nothing is decoded, so
that no output can raise an exception, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pliant.files import LineFile

MAX_LINE_BYTES = 64 << 10
"""Longer lines are cut into pieces of this size, so that memory stays bounded."""
CHUNK_BYTES = 64 << 10
TAIL_LINES = 20
IDLE_S = 2.0
"""After the workers have ended, a pipe that another process holds open is given up after this much silence."""
CONNECTED_LINE = b"pliant: arrived over ssh"
"""The first line that a remote runner prints: what comes later, and the exit code, are the runner's."""
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class LineSplitter:
    """Cuts a stream of bytes into lines, without their newline."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes; a line that grows beyond the limit comes in pieces."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        pieces = [piece for line in lines for piece in self._cut(line)]
        if len(self._rest) > self._max_bytes:
            *more, self._rest = self._cut(self._rest)
            pieces.extend(more)
        return pieces

    def flush(self) -> list[bytes]:
        """Return what came after the last newline, if anything."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _cut(self, line: bytes) -> list[bytes]:
        if len(line) <= self._max_bytes:
            return [line]
        return [line[i : i + self._max_bytes] for i in range(0, len(line), self._max_bytes)]


def prefix(label: str, stream: str, colour: int | None) -> bytes:
    """Return `[127.0.0.1.10000::stdout] `, in a colour if a number for it is given."""
    text = f"[{label}::{stream}]"
    if colour is None:
        return f"{text} ".encode()
    return f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m ".encode()


class Console:
    """Writes whole lines to a descriptor; writes nothing more once its reader is gone."""

    def __init__(self, descriptor: int, *, coloured: bool) -> None:
        self.coloured = coloured
        # `pliant run ... | head` must not end a training job, and neither must a full disk behind `pliant run > file`.
        self.write = LineFile(descriptor, "the output").append


def show_runner_lines(console: Console, host: str, lines: Sequence[bytes]) -> None:
    """Show output of the runner on another host: lines of workers have their prefix already, other lines get the host's."""
    own, worker = f"[{host}] ".encode(), f"[{host}.".encode()
    shown = [line if line.startswith(worker) else own + line for line in lines if line != CONNECTED_LINE]
    if shown:
        console.write(b"".join(line + b"\n" for line in shown))


@dataclass
class OutputStream:
    """One of the two pipes of a worker, and where its lines go."""

    descriptor: int
    prefix: bytes
    console: Console | None
    file: LineFile | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self.tail.extend(lines)
        if self.console is not None:
            self.console.write(b"".join(self.prefix + line + b"\n" for line in lines))

    def read(self) -> bool:
        """Read what the pipe has; return False at its end."""
        try:
            data = os.read(self.descriptor, CHUNK_BYTES)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return True
            data = b""
        if self.file is not None and data:
            self.file.append(data)
        self.take(self.splitter.feed(data) if data else self.splitter.flush())
        return bool(data)

    def close(self) -> None:
        self.take(self.splitter.flush())
        os.close(self.descriptor)
        if self.file is not None:
            self.file.close()
        self.ended.set()


class OutputReader:
    """A thread that reads all streams. Call `start`, `add` streams, and `finish` when the workers have ended."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._new: list[OutputStream] = []
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def add(self, stream: OutputStream) -> None:
        with self._lock:
            self._new.append(stream)
        os.write(self._wake_write, b"+")

    def finish(self) -> None:
        """Read every stream to its end and stop; a pipe that another process holds open is left after a while.

        Blocks as long as the terminal or pipe behind the console does, as any program that prints.
        """
        self._finishing = True
        os.write(self._wake_write, b".")
        self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        last_data_s = time.monotonic()
        while not (self._finishing and self._num_open() == 0):
            events = self._selector.select(0.1 if self._finishing else None)
            if any(key.data is not None for key, _ in events):
                last_data_s = time.monotonic()
            for key, _ in events:
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    self._register_new()
                    last_data_s = time.monotonic()
                elif not key.data.read():
                    self._close(key.data)
            if self._finishing and not events and time.monotonic() - last_data_s > IDLE_S:
                break
        for stream in self._streams():
            self._close(stream)

    def _num_open(self) -> int:
        with self._lock:
            return len(self._new) + len(self._streams())

    def _streams(self) -> list[OutputStream]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _register_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for stream in new:
            os.set_blocking(stream.descriptor, False)
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def _close(self, stream: OutputStream) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(stream.descriptor)
        stream.close()
