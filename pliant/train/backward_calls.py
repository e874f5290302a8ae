"""Tells a job that its program calls backward, before autograd begins.

Few parameters have hooks, so a backward may reach none that has one. When the program calls the next one, the last one is
over, and the gradients show what it has reached. This costs a function call for each backward, and nothing for a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch


@dataclass(slots=True)
class _Thread:
    """A thread with calls that somebody is told about."""

    listeners: list[Callable[[], None]]
    is_running: bool = False
    """Whether a backward runs. What that calls itself, as checkpointing does, belongs to it."""


_threads: dict[int, _Thread] = {}
_original: Callable[..., None] = torch.autograd.backward
_is_in_place = False
"""Whether `_backward` stands for the original: as `torch.autograd.backward`, or in a wrapper that somebody else has put there
since, and that calls it."""


@functools.wraps(torch.autograd.backward)
def _backward(*args: Any, **kwargs: Any) -> None:
    thread = _threads.get(get_ident())
    if thread is None or thread.is_running:
        return _original(*args, **kwargs)
    for before in thread.listeners:
        before()
    thread.is_running = True
    try:
        return _original(*args, **kwargs)
    finally:
        thread.is_running = False


def listen(before: Callable[[], None]) -> Callable[[], None]:
    """Call `before` whenever this thread is about to run a backward. Returns a function that ends this."""
    global _original, _is_in_place
    if not _is_in_place:
        _original = torch.autograd.backward
    if torch.autograd.backward is _original:
        torch.autograd.backward = _backward  # which Tensor.backward calls
    _is_in_place = True
    number = get_ident()
    thread = _threads.setdefault(number, _Thread([]))
    thread.listeners.append(before)

    def end() -> None:
        global _is_in_place
        if before in thread.listeners:
            thread.listeners.remove(before)
        if not thread.listeners and _threads.get(number) is thread:
            del _threads[number]
        if not _threads and torch.autograd.backward is _backward:
            torch.autograd.backward, _is_in_place = _original, False

    return end
