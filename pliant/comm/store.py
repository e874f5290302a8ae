"""What this worker keeps for others to fetch: named tensors, the last few versions of each."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

WINDOW = 3


class Store:
    """Named flat CPU tensors. Saving copies, so the original may change at once."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._latest: dict[str, torch.Tensor] = {}
        self._versions: dict[str, OrderedDict[int, torch.Tensor]] = {}

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

    def get(self, name: str, version: int | None) -> torch.Tensor | None:
        """What was saved last, or under this version; None if there is nothing."""
        with self._lock:
            if version is None:
                return self._latest.get(name)
            versions = self._versions.get(name)
            return versions.get(version) if versions is not None else None
