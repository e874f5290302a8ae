"""Which modules stand in the way: of replicas taking turns (time-slicing), of D1, of D2.

Looks at a model without running it, and gives for each module in the way the reason and the remedy. Whether a job
goes on in spite of them is not decided here, except that `check` refuses what cannot be time-sliced at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from pliant.errors import Unsliceable
from pliant.train.calls import Use, uses

COLLECTIVES = ("all_reduce", "allreduce", "all_gather", "allgather", "all_to_all", "alltoall", "barrier", "broadcast",
               "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")  # fmt: skip
PRODUCTS = ("addbmm", "addmm", "baddbmm", "bilinear", "bmm", "einsum", "linear", "matmul", "mm", "mv", "tensordot",
            "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
            "conv_transpose3d", "multi_head_attention_forward")  # fmt: skip
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_PRODUCT_MODULES = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Their backward on CUDA uses atomics, and torch has no other one (torch.use_deterministic_algorithms lists them).
_ATOMIC = (nn.AvgPool3d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.MaxPool3d, nn.AdaptiveMaxPool2d,
           nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d,
           nn.ReflectionPad1d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
           nn.CTCLoss)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One module that stands in the way."""

    module: str
    """Its name in the model; empty for the model itself."""
    type: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.type}): {self.why}; {self.remedy}"


def obstacles(model: nn.Module) -> list[Obstacle]:
    """What keeps several replicas from taking turns on this model with the bits they would have alone."""
    return _scan(model, lambda module: [*_about_module(module), *_about_tensors(module), *_about_calls(module)])


def nondeterministic(model: nn.Module) -> list[Obstacle]:
    """What has no repeatable kernel on CUDA, so that there not even D0 holds; CPUs have no such modules."""
    return _scan(model, _about_atomics)


def hetero(model: nn.Module) -> list[Obstacle]:
    """What GPUs of different kinds compute with different bits. On CPUs D2 pins these operations, and none is in the way."""
    return _scan(model, _about_vendors)


def check(model: nn.Module) -> None:
    """Raises Unsliceable with all that is in the way of time-slicing."""
    found = obstacles(model)
    if found:
        lines = "".join(f"\n  {each}" for each in found)
        raise Unsliceable(f"replicas cannot take turns on {type(model).__name__}:{lines}")


_Finding = tuple[str, str]
"""Why, and the remedy."""


def _scan(model: nn.Module, look: Callable[[nn.Module], list[_Finding] | Iterator[_Finding]]) -> list[Obstacle]:
    return [
        Obstacle(name, type(module).__name__, why, remedy)
        for name, module in model.named_modules()
        for why, remedy in look(module)
    ]


def _about_module(module: nn.Module) -> Iterator[_Finding]:
    homes = [kind.__module__ for kind in type(module).__mro__]
    if isinstance(module, nn.SyncBatchNorm):
        yield (
            "sums its statistics over all ranks in the middle of forward, so no replica can finish before the others begin",
            "use nn.BatchNorm1d/2d/3d; DDP's way with its buffers is kept exactly",
        )
    elif any(home.startswith(("torch.nn.parallel.", "torch.distributed.")) for home in homes):
        yield "distributes the model by itself", "give the bare model to job.wrap (what was passed to this wrapper)"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        yield "sparse gradients have no place in a bucket", "use sparse=False"
    for name, value in vars(module).items():
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            yield (
                f"draws from a generator of its own ({name}), which all replicas would share",
                "draw from the default generator of torch, numpy or random: each replica has its own state of those",
            )


def _about_tensors(module: nn.Module) -> Iterator[_Finding]:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if nn.parameter.is_lazy(tensor):
            yield f"{name} has no shape yet", "run one batch through the model before job.wrap"
        elif tensor.is_meta:
            yield f"{name} is on the meta device and has no memory", "build the model on a real device"
        elif tensor.layout is not torch.strided:
            yield f"{name} is not dense ({tensor.layout})", "use a dense tensor"
        elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            yield (
                f"{name} is a {type(tensor).__name__}, which is no plain tensor",
                "give the undistributed model to job.wrap",
            )
        elif tensor.is_complex() and tensor.requires_grad:
            yield (
                f"{name} is complex, and the sum of complex gradients follows another order",
                "keep real and imaginary part in a real parameter, and use torch.view_as_complex in forward",
            )


def _about_calls(module: nn.Module) -> Iterator[_Finding]:
    for use in uses(module):
        if _is_collective(use):
            yield (
                f"calls {use.name} ({use.where}): a collective between replicas that take turns would wait for ever",
                "compute it from this replica's own data, or after the step through the job",
            )


def _is_collective(use: Use) -> bool:
    home, _, name = use.name.rpartition(".")
    return home.startswith("torch.distributed") and any(stem in name.lower() for stem in COLLECTIVES)


def _about_atomics(module: nn.Module) -> Iterator[_Finding]:
    interpolates = isinstance(module, nn.Upsample) and module.mode in ("linear", "bilinear", "bicubic", "trilinear")
    bag = isinstance(module, nn.EmbeddingBag) and module.mode == "max"
    if isinstance(module, _ATOMIC) or interpolates or bag:
        yield (
            "on CUDA its backward adds in an order that changes from run to run, and torch has no other kernel",
            "replace it (a mean over dimensions for adaptive pooling to 1, nearest for interpolation), or train on CPUs",
        )


def _about_vendors(module: nn.Module) -> Iterator[_Finding]:
    remedy = "use GPUs of one kind, or CPUs under D2"
    if isinstance(module, _CONVOLUTIONS):
        yield "cuDNN chooses a convolution by the kind of GPU", remedy
    elif isinstance(module, _RECURRENT):
        yield "cuDNN's recurrent kernels depend on the kind of GPU", remedy
    elif isinstance(module, _PRODUCT_MODULES):
        yield "cuBLAS chooses a matrix product by the kind of GPU", remedy
    else:
        found = next((use for use in uses(module) if use.name.rpartition(".")[2] in PRODUCTS), None)
        if found is not None:
            yield f"{found.name.lstrip('.')} ({found.where}) is a vendor's kernel, chosen by the kind of GPU", remedy
