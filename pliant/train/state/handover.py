"""The state of a job as it travels to newcomers: offered by those who have it, fetched from all of them at once.

Whoever has the state lends its own memory for reading (no copy is made): parameters do not change before the
newcomers have taken part in the next step, so training goes on while they read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Alone, Member
from pliant.train.state import tree
from pliant.train.state.tree import TensorSpec

LENT = "state:"
"""What the names of lent memory begin with."""


def _prefix(view: int) -> str:
    return f"{LENT}{view}:"


def lend(member: Member | Alone, view: int, state: object) -> int:
    """Let the others of the view to come fetch `state`, before they can ask; how long its table of contents is."""
    contents, hosts = _packed(state)
    member.publish(f"{_prefix(view)}contents", torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    for number, host in enumerate(hosts):
        if host.numel():
            member.publish(f"{_prefix(view)}{number}", host.view(-1))
    return len(contents)


def _packed(state: object) -> tuple[bytes, list[torch.Tensor]]:
    """The table of contents, and the tensors; these are no copies where they are on the host already."""
    skeleton, tensors = tree.flatten(state)
    hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
    specs = [spec.to_json() for spec in tree.describe_tensors(hosts)]
    return json.dumps({"skeleton": skeleton, "tensors": specs}).encode(), hosts


def spread(engine: Engine, state: object | None) -> object:
    """The state of rank 0, on every rank; the others give None.

    Raises:
        CommError: somebody is gone.
    """
    contents, tensors = _packed(state) if engine.rank == 0 else (b"", None)
    contents = engine.all_gather_bytes("spread", contents)[0]
    return _broadcast(engine, "spread", contents, tensors, 0, None)


def relay(engine: Engine, holder: int, lacking: Sequence[int], num_bytes: int, state: object | None) -> object:
    """The state of `holder` on all ranks that lack it: these pass shares of it on to each other, so that the holder sends it
    about once, however many they are. The holder gives its `state`, whose table of contents has `num_bytes`.

    Raises:
        CommError: somebody is gone.
    """
    ranks = sorted([holder, *lacking])
    contents = torch.empty(num_bytes, dtype=torch.uint8)
    tensors: list[torch.Tensor] | None = None
    if engine.rank == holder:
        packed, tensors = _packed(state)
        contents = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    engine.broadcast("relay", contents, holder, ranks=ranks).wait()
    return _broadcast(engine, "relay", bytes(contents.numpy()), tensors, holder, ranks)


def _broadcast(
    engine: Engine,
    name: str,
    contents: bytes,
    tensors: list[torch.Tensor] | None,
    holder: int,
    ranks: Sequence[int] | None,
) -> object:
    """The holder's state on all these ranks, which have its table of contents; the others give no tensors."""
    table = json.loads(contents)
    if tensors is None:
        tensors = [TensorSpec.from_json(entry).empty("cpu") for entry in table["tensors"]]
    waiting = [
        engine.broadcast(f"{name}:{number}", tensor.view(-1).view(torch.uint8), holder, ranks=ranks)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    ]
    for handle in waiting:
        handle.wait()
    return tree.unflatten(table["skeleton"], tensors)


def reclaim(member: Member | Alone) -> None:
    """Lend nothing any more."""
    member.unpublish(LENT)


def fetch(engine: Engine, holders: Sequence[int], num_bytes: int) -> object:
    """The state that the workers of these ranks lend, each asked for its share.

    Raises:
        CommError: one of them is gone.
    """
    prefix = _prefix(engine.view.number)
    contents = torch.empty(num_bytes, dtype=torch.uint8)
    engine.request(holders[0], f"{prefix}contents", contents).wait()
    table = json.loads(bytes(contents.numpy()))
    specs = [TensorSpec.from_json(entry) for entry in table["tensors"]]
    tensors = [spec.empty("cpu") for spec in specs]
    load = dict.fromkeys(holders, 0)
    waiting: list[Handle] = []
    # The largest first, each to whoever has the least to send so far.
    for number in sorted(range(len(specs)), key=lambda number: -specs[number].nbytes):
        if tensors[number].numel():
            source = min(load, key=lambda rank: load[rank])
            load[source] += specs[number].nbytes
            waiting.append(engine.request(source, f"{prefix}{number}", tensors[number].view(-1)))
    for handle in waiting:
        handle.wait()
    return tree.unflatten(table["skeleton"], tensors)
