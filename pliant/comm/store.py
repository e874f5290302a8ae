"""What this worker lets others fetch: copies of named tensors, the last few versions of each, or tensors themselves."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

WINDOW = 3


class Store:
    """Named flat CPU tensors. Saving copies, so the original may change at once; publishing does not."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._latest: dict[str, torch.Tensor] = {}
        self._versions: dict[str, OrderedDict[int, torch.Tensor]] = {}
        self._published: dict[str, torch.Tensor] = {}

    def save(self, name: str, tensor: torch.Tensor, version: int | None) -> None:
        """Keep a copy; with a version, the oldest beyond the window is forgotten."""
        copy = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        with self._lock:
            self._latest[name] = copy
            if version is not None:
                versions = self._versions.setdefault(name, OrderedDict())
                versions[version] = copy
                versions.move_to_end(version)
                while len(versions) > self._window:
                    versions.popitem(last=False)

    def publish(self, name: str, flat: torch.Tensor) -> None:
        """Let others read this very memory under a name, until it is unpublished."""
        with self._lock:
            self._published[name] = flat

    def unpublish(self, prefix: str) -> None:
        """Forget what was published under names that begin so."""
        with self._lock:
            for name in [name for name in self._published if name.startswith(prefix)]:
                del self._published[name]

    def get(self, name: str, version: int | None) -> torch.Tensor | None:
        """What was saved last, or under this version; None if there is nothing."""
        with self._lock:
            if version is None:
                found = self._published.get(name)
                return self._latest.get(name) if found is None else found
            versions = self._versions.get(name)
            return versions.get(version) if versions is not None else None
