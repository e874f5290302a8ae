"""Gradients as backward makes them: caught by a hook on each parameter, and checked to be those that a step counts.

A replica has one backward in its turn whose gradients are summed; what the program differentiates otherwise is its own
affair, and what would lead to a wrong sum is refused. Where gradients go is in `summing`; here is also which of DDP's two
layouts they go by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pliant.comm.engine import Engine
from pliant.errors import TrainError
from pliant.train.gradients.layout import Item, Layout, first_layout, rebuilt_layout
from pliant.train.gradients.summing import Sums
from pliant.train.priority.pending import Pending


class Gradients:
    """Catches the gradients of `parameters`, for a job of N replicas, and hands them to `sums`."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        num_replicas: int,
        *,
        find_unused: bool = False,
        cap_bytes: int | None = None,
        always_sums: bool = False,
        on_backward: Callable[[], None],
        before_backward: Callable[[], set[int]] = set,
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.no_sync = False
        """While set, gradients only accumulate in `.grad`."""
        self.ready_order: list[int] = []
        """In which order the gradients of the last complete backward came."""
        self._on_backward, self._before_backward = on_backward, before_backward
        self._find_unused, self._cap_bytes = find_unused, cap_bytes
        self._items = [Item((p.dtype, p.device), p.numel() * p.element_size()) for p in self.parameters]
        wanted = num_replicas > 1 or always_sums
        self.waits_for_order = wanted and not find_unused
        """Whether the first layout is still in use, to be replaced when replica 0's order is known."""
        self.layout = first_layout(self._items, find_unused=find_unused, cap_bytes=cap_bytes)
        self.sums = Sums(
            self.names,
            self.parameters,
            num_replicas,
            self.layout,
            self._generation,
            wanted=wanted,
            find_unused=find_unused,
        )
        self._expecting = self._queued = False
        self._halted = False
        """Whether the step does not count any more: its memory may still be read by others, and is left alone."""
        self._resting = True
        """Whether no replica has its turn: what the program differentiates now is its own affair."""
        self._leftover: set[int] = set()
        """Parameters that were not used in the forward before this backward, as far as can be seen."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._caught, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # --- the layout ---

    @property
    def _generation(self) -> int:
        return 1 if self.waits_for_order else 2

    def use_layout(self, layout: Layout | None) -> None:
        """Use L2 as another worker, or a checkpoint, has it; None goes back to L1, as a restarted DDP would."""
        self.waits_for_order = layout is None and self.sums.wanted and not self._find_unused
        self.layout = layout or first_layout(self._items, find_unused=self._find_unused, cap_bytes=self._cap_bytes)
        self.sums.use_layout(self.layout, self._generation)

    def rebuild(self, ready_order: Sequence[int]) -> None:
        """Replace L1 by L2, for good."""
        self.use_layout(rebuilt_layout(self._items, ready_order, cap_bytes=self._cap_bytes))

    def stay_apart(self) -> None:
        """Gradients are not to be summed: they stay where backward puts them."""
        self.sums.wanted = self.waits_for_order = False

    # --- views and turns ---

    def arrange(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Work in this view from now on: rank r hosts `blocks[r]` replicas."""
        self._expecting = self._halted = False
        self.sums.arrange(engine, blocks)

    def begin_turn(self, slot: int) -> None:
        """The replica in this place among those hosted here computes next."""
        self.sums.begin_turn(slot)
        self._leftover = set()
        self._expecting, self._queued, self._resting = True, False, False

    def halt(self) -> None:
        """The step is torn: catch nothing until there is another view."""
        self._halted = True

    def rest(self) -> None:
        """No replica has its turn."""
        self._resting = True

    def fill_in(self) -> None:
        """The step is torn, but the program's own code may touch gradients before its next batch."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # --- backward ---

    def _caught(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete. Called for every parameter of every replica, so it does the least it can."""
        if parameter.__class__ is Pending or index in self._leftover:
            raise TrainError(
                f"{self.names[index]!r} got a gradient, but its last update was still under way when it was used: something "
                "(compiled or scripted code?) uses it where torch's Python functions do not see it. Use sync='fifo'"
            )
        if self.no_sync or self._resting or self._halted:
            return
        if not self._queued:
            self._begin_backward(index)
        if self.sums.wanted:
            self.sums.put(index, parameter)
            if self.waits_for_order:
                self.ready_order.append(index)

    def _begin_backward(self, index: int) -> None:
        if not self._expecting:
            raise TrainError(
                f"a second backward reached {self.names[index]!r} before the next batch: each replica has one backward "
                "per step whose gradients are summed. To accumulate, put `with job.no_sync():` around all but the last"
            )
        self._leftover = self._before_backward()
        if index in self._leftover:
            self._caught(index, self.parameters[index])
        self._queued = True
        self.ready_order = []
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        with torch.no_grad():
            self.sums.end_turn()
        self._expecting = False
        self._queued = False
        self._on_backward()
