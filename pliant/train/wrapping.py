"""What `job.wrap` makes of the program's objects, piece by piece: what it must find out about them, and their trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from pliant.elastic.member import Alone, Member
from pliant.errors import ConfigError
from pliant.train.gradients.catching import Gradients
from pliant.train.gradients.probing import GradientProbe
from pliant.train.optim import Averaging
from pliant.train.placement import Blocks
from pliant.train.priority.crossing import Crossing
from pliant.train.priority.gates import hidden_uses
from pliant.train.priority.tuning import Tuner
from pliant.train.replicas import Replicas
from pliant.train.trainer import Parts, Trainer

Named = Sequence[tuple[str, torch.nn.Parameter]]


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that get gradients, with their names. Raises ConfigError if there are none."""
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not found:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
    return found


def check_epoch(replicas: Replicas) -> None:
    """Raises ConfigError if an epoch has not one batch."""
    if replicas.num_batches == 0:
        raise ConfigError(
            f"{replicas.num_samples} samples give {replicas.count} replicas not one batch of "
            f"{replicas.loading.batch_size}: use a smaller batch_size, or drop_last=False"
        )


def describe_program(parameters: Named, replicas: Replicas, *, follows_view: bool) -> str:
    """What must be the same on all workers, for people to compare."""
    shapes = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in parameters]).encode()
    digest = hashlib.sha256(shapes).hexdigest()[:12]
    count = "a replica per worker" if follows_view else f"{replicas.count} replicas"
    samples = f"{replicas.num_samples} samples by {replicas.loading.batch_size}"
    return f"{count}, {len(parameters)} parameters ({digest}), {samples}"


def no_priority(model: torch.nn.Module, averaging: Averaging | None) -> str:
    """Why sums of this program must travel by `fifo`; empty if they need not."""
    return hidden_uses(model) if averaging is None else f"{averaging.describe()} averages models"


def probe_of(
    monitors: dict[str, int],
    gradients: Gradients,
    optimizers: Sequence[torch.optim.Optimizer],
    averaging: Averaging | None,
) -> GradientProbe | None:
    """What looks at gradients for these monitors, if there are some.

    Raises:
        ConfigError: gradients are not summed here.
    """
    if not monitors:
        return None
    if averaging is not None:
        raise ConfigError(
            f"{averaging.describe()} leaves gradients where they are, but {', '.join(monitors)} compares them with their "
            "sum: do not watch it here"
        )
    return GradientProbe(
        gradients.parameters,
        optimizers,
        noise_scale=monitors.get("noise_scale", 0),
        variance=monitors.get("variance", 0),
    )


def make_trainer(
    member: Member | Alone,
    parts: Parts,
    parameters: Named,
    replicas: Replicas,
    sync: tuple[str, int | None, int | None],
    blocks: Blocks | None,
    *,
    find_unused: bool,
    cap_bytes: int | None,
    follows_view: bool,
    keeps_layout: bool,
    say: Callable[[str], None],
) -> Trainer:
    """A trainer with all that it needs; `sync` is the way that sums travel, and what was asked for its slices."""
    gradients = Gradients(
        parameters,
        replicas.count,
        find_unused=find_unused,
        cap_bytes=cap_bytes,
        always_sums=follows_view,
        on_backward=lambda: trainer.turn_over(),
        before_backward=lambda: crossing.leftover(),
    )
    crossing = Crossing(
        gradients.parameters, gradients.names, can_undo=member.elastic, say=say, optimizers=parts.optimizers
    )
    trainer = Trainer(
        member,
        parts,
        replicas,
        gradients,
        crossing,
        Tuner(*sync, say=say),
        blocks,
        follows_view=follows_view,
        keeps_layout=keeps_layout,
    )
    return trainer
