"""Tensors as runs of bytes, and the thread that copies such bytes between them, also from and to a GPU."""

from __future__ import annotations

import bisect
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""The largest piece that is fetched, and the size of a slot. A GPU copies this much in the time that a few messages take."""

OnEnd = Callable[[Exception | None], None]
"""Called once: with None when everything is copied or has arrived, else with the error."""


class ByteRun:
    """Contiguous tensors, seen as one run of bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.flats = [each.detach().view(-1).view(torch.uint8) for each in tensors if each.numel()]
        self._begins = [0, *itertools.accumulate(map(len, self.flats))]
        self.is_on_device = any(each.is_cuda for each in self.flats)
        self.ready: list[torch.cuda.Event] = []
        """Events after which the work that was queued when this object was made has ended."""
        if self.is_on_device:
            devices = {each.device for each in self.flats if each.is_cuda}
            self.ready = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def num_bytes(self) -> int:
        return self._begins[-1]

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.flats]

    def cut(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the bytes from `begin` to `end`, one flat tensor for each tensor that they lie in."""
        found = []
        for index in range(bisect.bisect_right(self._begins, begin) - 1, len(self.flats)):
            first = self._begins[index]
            if first >= end:
                break
            found.append(self.flats[index][max(0, begin - first) : end - first])
        return found


def copy_bytes(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the bytes of `sources`, one after another, to `targets`; both have as many. On a GPU, only queue the copies."""
    into, at = iter(targets), 0
    target = next(into, None)
    for source in sources:
        done = 0
        while done < len(source):
            assert target is not None, "both have as many bytes"
            size = min(len(source) - done, len(target) - at)
            target[at : at + size].copy_(source[done : done + size], non_blocking=True)
            done, at = done + size, at + size
            if at == len(target):
                target, at = next(into, None), 0


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A copy of bytes. If there are none, only `end` is called."""

    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    end: OnEnd
    ready: Sequence[torch.cuda.Event] = ()
    """What a copy from or to a device waits for."""
    pin: Callable[[], None] = lambda: None
    """Called before a copy from or to a device: pins the memory on the host."""


class CopyThread:
    """A thread that copies in the order of submission, and then calls `end`. It starts with the first job."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def submit(self, job: CopyJob) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pliant-lending", daemon=True)
                self._thread.start()
        self._todo.put(job)

    def call(self, act: Callable[[], None]) -> None:
        """Call `act` on this thread, after what was submitted."""
        self.submit(CopyJob([], [], lambda _: act()))

    def close(self) -> None:
        """End the thread after what was submitted."""
        with self._starting:
            if self._thread is not None:
                self._todo.put(None)
                self._thread.join(timeout=10)

    def _run(self) -> None:
        begun: deque[tuple[CopyJob, torch.cuda.Event | Exception | None]] = deque()
        while True:
            try:
                job = self._todo.get(block=not begun)
            except queue.Empty:
                # Everything is queued on the device before the thread waits for the first copy.
                self._end(*begun.popleft())
                continue
            if job is None:
                break
            begun.append((job, self._begin(job)))
            while begun and _has_ended(begun[0][1]):
                self._end(*begun.popleft())
        for each in begun:
            self._end(*each)

    def _begin(self, job: CopyJob) -> torch.cuda.Event | Exception | None:
        try:
            device = next((each.device for each in (*job.targets, *job.sources) if each.is_cuda), None)
            if device is None:
                copy_bytes(job.targets, job.sources)
                return None
            job.pin()
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for event in job.ready:
                stream.wait_event(event)
            with torch.cuda.stream(stream):
                copy_bytes(job.targets, job.sources)
            copied: torch.cuda.Event = stream.record_event()
            return copied
        except Exception as error:
            return error

    def _end(self, job: CopyJob, outcome: torch.cuda.Event | Exception | None) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        try:
            if outcome is not None and not isinstance(outcome, Exception):
                outcome.synchronize()
        except Exception as failure:
            error = failure
        try:
            job.end(error)
        except Exception:
            log.exception("the end of a copy failed")


def _has_ended(outcome: torch.cuda.Event | Exception | None) -> bool:
    try:
        return outcome is None or isinstance(outcome, Exception) or bool(outcome.query())  # type: ignore[no-untyped-call]
    except Exception:
        return True  # whoever waits for it gets the error
