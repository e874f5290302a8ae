"""The buffers of a model (running statistics and the like): saved, loaded and packed as a whole.

Whose buffers a replica begins its turn with is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = list[torch.Tensor]


class Buffers:
    """The buffers of a model (BatchNorm's running statistics and the like), saved and loaded as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Found once: walking through the modules of a large model costs more than copying what is found there.
        self._places = [(module._buffers, name) for module, name in _owners(model)]
        self.num_bytes = sum(buffer.nbytes for buffer in self._current())
        self._groups = _alike(self._current())

    def _current(self) -> Tensors:
        # Looked up each time: a program may have put another tensor there.
        found = [buffers[name] for buffers, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def save(self) -> Tensors:
        current = self._current()
        saved = [torch.empty_like(buffer) for buffer in current]
        self._copy(saved, current)
        return saved

    def load(self, saved: Sequence[torch.Tensor]) -> None:
        self._copy(self._current(), saved)

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if not self._groups:  # entering `no_grad` would be a sixth of a small model's switch
            return
        with torch.no_grad():
            for group in self._groups:  # of one type: a few launches for all of them
                torch._foreach_copy_([targets[index] for index in group], [sources[index] for index in group])

    def pack(self, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        """All of them as one run of bytes on the host."""
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() for tensor in saved if tensor.numel()]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)

    def unpack(self, flat: torch.Tensor) -> Tensors:
        """What `pack` made, on the devices where the model's buffers are."""
        tensors, begin = [], 0
        for buffer in self._current():
            piece = flat[begin : begin + buffer.nbytes].clone()
            tensors.append(piece.view(buffer.dtype).view(buffer.shape).to(buffer.device))
            begin += buffer.nbytes
        return tensors


def _owners(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Where each buffer is kept, in the order of `model.buffers()`."""
    owners, seen = [], set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                owners.append((module, name))
    return owners


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(groups.values())
