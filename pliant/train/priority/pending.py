"""A parameter whose next value is on its way, which torch itself tells when anything uses it.

Its class is `Pending` meanwhile, and with that changes what torch does when it is used. Whoever uses it (a layer of the
next forward, `state_dict`, a print) waits for this one parameter and goes on with an ordinary one. So it does not matter
who uses a parameter, where and in which order: tied weights, functional use and branches are right without knowing of
them, and a stale weight is impossible as long as it is used through torch's Python face. Compiled or scripted code is not.

What has to be done before a parameter can be used is its owner's affair; see `crossing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

_Tensor: Any = torch.Tensor
_READ_GRADIENT = _Tensor.grad.__get__
_METADATA = frozenset(
    getattr(found, "__get__", found) if not callable(found) else found
    for found in (
        getattr(_Tensor, name, None)  # some are of some versions of torch only
        for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda", "is_cpu", "is_sparse",
            "is_meta", "is_quantized", "is_nested", "names", "itemsize", "nbytes", "is_mps", "is_xpu", "grad_fn",
            "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "output_nr", "size", "dim", "numel",
            "nelement", "ndimension", "stride", "element_size", "is_contiguous", "storage_offset", "is_floating_point",
            "is_complex", "is_signed", "get_device", "__len__", "register_hook", "is_pinned", "is_shared",
            "register_post_accumulate_grad_hook", "__hash__",
        )
    )
    if found is not None
)  # fmt: skip
"""What can be asked of a parameter without using its values."""


class Owner(Protocol):
    """Who knows how to make a parameter ready."""

    def use(self, index: int) -> None:
        """Something is about to use this parameter: have it ready, and release it."""

    def gradient_is_read(self, index: int) -> None:
        """Somebody reads its gradient, which is a use as well."""


_owners: dict[int, tuple[Owner, int]] = {}
"""By id: whose they are, and their number there. (An attribute would be pickled with the parameter.)"""


class Pending(Parameter):
    """A parameter whose next value is on its way. Whatever uses it waits for that."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _READ_GRADIENT and isinstance(args[0], Pending) and id(args[0]) in _owners:
            owner, index = _owners[id(args[0])]
            owner.gradient_is_read(index)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _complete_all(args)
        if kwargs:
            _complete_all(list(kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def suspend(parameter: Parameter, owner: Owner, index: int) -> None:
    """From now on a use of this parameter asks its owner first."""
    _owners[id(parameter)] = (owner, index)
    parameter.__class__ = Pending


def release(parameter: Parameter) -> None:
    """It is an ordinary parameter again."""
    _make_plain(parameter)
    _owners.pop(id(parameter), None)


def _make_plain(parameter: Parameter) -> None:
    if isinstance(parameter, Pending):
        parameter.__class__ = Parameter  # type: ignore[assignment]


def _complete_all(values: Any) -> None:
    """Have all pending parameters among these ready."""
    for value in values:
        if isinstance(value, Pending):
            owner = _owners.get(id(value))
            if owner is None:
                _make_plain(value)  # a copy of one, whose values are its own
            else:
                owner[0].use(owner[1])
        elif isinstance(value, list | tuple):
            _complete_all(value)
        elif isinstance(value, dict):
            _complete_all(value.values())
