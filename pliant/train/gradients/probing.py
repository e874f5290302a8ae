"""Looks at the gradients of the steps that are due: their noise scale, and their variance between replicas.

`Gradients` shows it each replica's gradients as they are caught and the sums as they come; nothing is shown on
other steps, and nothing is ever changed. What one worker finds is a few numbers, which travel with the row of the
next step; all workers learn the same from everybody's.

The noise scale needs no traffic: squares of the replicas' gradients are taken by whoever hosts them, those of the sums
in equal shares. They are added as integers, so the estimate is the same to the last bit whatever the number of workers.
The variance needs the sum of the replicas' squares, element by element: each worker gets its share of it, by one
collective of low priority that nobody waits for before the next backward.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from pliant.adapt.monitors import NoiseScale, Variance
from pliant.comm.engine import Engine
from pliant.errors import ConfigError
from pliant.train.gradients.dispersion import Dispersion
from pliant.train.gradients.precondition import Denominators

CHUNK = 1 << 15
"""Elements whose squares are added in the gradients' own precision: so many that no more than one thread does it."""
_ONE = 1 << 149
"""The integers count in the least number that a float32 can be."""
NEVER = (-2, 0.0, 1.0)
"""The step before none."""
_ROW = struct.Struct("<qdd?48s48s?3d")
"""The step, the batch of a replica and the scale of its loss; whether there are squares, of the replicas and of the sum; whether there is
a variance, in three numbers."""


@dataclass(slots=True)
class Sample:
    """What is collected about one step."""

    step: int
    batch: float
    noise: bool
    variance: bool
    scale: float = 1.0
    """What a gradient scaler has multiplied the loss with."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """Norms of pieces of the replicas' gradients."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Norms of those pieces of their sums that are this worker's."""
    before: list[torch.Tensor] = field(default_factory=list)
    """One replica alone: norms of the gradients of the step before, seen as those of this one are."""
    differences: list[torch.Tensor] = field(default_factory=list)
    """Of what has changed since."""
    pair: tuple[int, int] | None = None
    """One replica alone: the squares of two steps, as of two replicas."""
    known: bool = True
    """Whether there was all it takes: before Adam's first update there are no denominators."""


class GradientProbe:
    """Collects on due steps, and estimates. Used by the thread that trains."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        noise_scale: int = 0,
        variance: int = 0,
        adam: bool | None = None,
    ) -> None:
        """
        Args:
            noise_scale: estimate it every so many steps; 0: never.
            variance: likewise.
            adam: whether gradients count divided by Adam's denominator, which is what its updates see of them. None:
                if the optimizers are such.
        """
        for name, interval in (("noise_scale", noise_scale), ("variance", variance)):
            if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
                raise ConfigError(f"{name}={interval!r}: use a number of steps, 1 for every one, 0 for never")
        self.noise_interval, self.variance_interval = noise_scale, variance
        self.noise, self.variance = NoiseScale(), Variance()
        self._parameters = list(parameters)
        self._denominators = Denominators.of(optimizers, parameters, adam)
        self._offsets = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._bases = [0, *accumulate(-(-parameter.numel() // CHUNK) for parameter in parameters)]
        """The number of each parameter's first chunk: they are dealt to the workers in turn."""
        self._dispersion = Dispersion(self._offsets)
        self._rank, self._size, self._replicas = 0, 1, 1
        self._filling: Sample | None = None
        """Of the step in progress."""
        self._awaiting: Sample | None = None
        """Of the last step, whose sums may still come."""
        self._done: Sample | None = None
        """Of the last step, complete: what the next row tells."""
        self._told: Sample | None = None
        """What the last row has told. Meanwhile the next one may have become complete."""
        self._previous: torch.Tensor | None = None
        """One replica alone: its gradients of the step before."""
        self._previous_at = NEVER
        """Which step that was, and the size of its batch."""

    # --- which steps ---

    def arrange(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Work in this view from now on. What was not told yet is forgotten: its shares were those of other workers."""
        self._rank, self._size, self._replicas = engine.rank, engine.size, sum(blocks)
        self._filling = self._awaiting = self._done = None
        self._previous_at = NEVER
        self._dispersion.arrange(engine, self._replicas)

    def begin(self, step: int) -> bool:
        """A step begins; whether it is looked at."""
        noise = self._is_due(step, self.noise_interval)
        if self._replicas == 1 and self.noise_interval:
            noise = noise or self._is_due(step + 1, self.noise_interval)  # the first of a pair
        variance = self._replicas > 1 and self._is_due(step, self.variance_interval)
        self._filling = Sample(step, 0.0, noise, variance) if noise or variance else None
        if self._filling is not None:
            self._dispersion.begin()
        return self._filling is not None

    @property
    def wants_parts(self) -> bool:
        """Whether the step in progress is looked at, and not all of it has been shown."""
        return self._filling is not None

    @property
    def wants_sums(self) -> bool:
        """Whether sums of the last step that was looked at may still be shown."""
        return self._awaiting is not None

    @staticmethod
    def _is_due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def took(self, samples: float, scale: float = 1.0) -> None:
        """The gradient that a replica computes now is `scale` times a mean over so many samples."""
        if self._filling is not None:
            self._filling.batch, self._filling.scale = samples, scale

    # --- what is shown ---

    def part(self, index: int, flat: torch.Tensor) -> None:
        """A parameter's gradient of a replica hosted here, divided by N; flat, in the memory order of the parameter."""
        sample = self._filling
        if sample is None:
            return
        if sample.noise:
            if self._replicas == 1:
                self._compare(sample, index, flat)
            sample.parts += self._norms(sample, index, flat, 0, 1)
        if sample.variance:
            self._dispersion.add(index, flat)

    def parts(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Several at once, which on a device costs less."""
        sample = self._filling
        if sample is None:
            return
        if sample.noise and (self._replicas == 1 or self._denominators.are_used):
            for index, flat in zip(indices, flats, strict=True):
                self.part(index, flat)
            return
        if sample.noise:
            sample.parts.append(_stacked_norms(flats))
        if sample.variance:
            for index, flat in zip(indices, flats, strict=True):
                self._dispersion.add(index, flat)

    def _compare(self, sample: Sample, index: int, flat: torch.Tensor) -> None:
        """With the step before; and keep it for the step after."""
        if self._previous is None:
            self._previous = torch.zeros(self._offsets[-1], dtype=flat.dtype, device=flat.device)
        before = self._previous[self._offsets[index] : self._offsets[index + 1]]
        if self._previous_at[0] == sample.step - 1:
            sample.differences += self._norms(sample, index, flat - before, 0, 1)
            sample.before += self._norms(sample, index, before, 0, 1)
        before.copy_(flat)

    def parts_over(self) -> None:
        """The last replica hosted here has shown all its gradients."""
        sample, self._filling = self._filling, None
        self._awaiting = sample
        if sample is None:
            return
        if sample.variance:
            self._dispersion.exchange(sample.step)
        if self._replicas == 1:
            sample.pair = self._pair(sample)
            self.sums_over()

    def total(self, index: int, flat: torch.Tensor) -> None:
        """The sum of a parameter's gradients over all replicas is here, and nobody has changed it yet."""
        sample = self._awaiting
        if sample is None or self._replicas == 1:
            return
        if sample.noise:
            first = (self._rank - self._bases[index]) % self._size
            sample.sums += self._norms(sample, index, flat, first, self._size)
        if sample.variance:
            self._dispersion.keep_mean(index, flat)

    def totals(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Several at once: here parameters are dealt to the workers, not chunks."""
        sample = self._awaiting
        if sample is None or self._replicas == 1:
            return
        if sample.noise and self._denominators.are_used:
            for index, flat in zip(indices, flats, strict=True):
                self.total(index, flat)
            return
        mine = [flat for index, flat in zip(indices, flats, strict=True) if index % self._size == self._rank]
        if sample.noise and mine:
            sample.sums.append(_stacked_norms(mine))
        if sample.variance:
            for index, flat in zip(indices, flats, strict=True):
                self._dispersion.keep_mean(index, flat)

    def sums_over(self) -> None:
        """All sums of the step have been shown."""
        if self._awaiting is not None:
            self._done, self._awaiting = self._awaiting, None

    def _norms(self, sample: Sample, index: int, flat: torch.Tensor, first: int, step: int) -> list[torch.Tensor]:
        """The norms of every `step`-th chunk from the `first` one on."""
        if flat.dtype.itemsize < 4:
            flat = flat.float()  # 16 bits are too few to add squares in
        found = []
        under = self._denominators.of_parameter(index, flat) if self._denominators.are_used else None
        if under is None and self._denominators.are_used:
            sample.known = False
        count, rest = divmod(flat.numel(), CHUNK)
        if first < count:
            rows = flat[: count * CHUNK].view(count, CHUNK)[first::step]
            if under is not None:
                rows = rows / under[: count * CHUNK].view(count, CHUNK)[first::step]
            found.append(torch.linalg.vector_norm(rows, dim=1))
        if rest and count % step == first % step:
            tail = flat[count * CHUNK :]
            if under is not None:
                tail = tail / under[count * CHUNK :]
            found.append(torch.linalg.vector_norm(tail).view(1))
        return found

    # --- what is told, and learned ---

    @property
    def needs_bytes(self) -> int:
        """Of a row."""
        return _ROW.size

    def row(self) -> bytes:
        """What this worker has found about the last step that was looked at, and not told yet."""
        sample = self._told = self._done
        if sample is None:
            return _ROW.pack(-1, 0.0, 1.0, False, b"", b"", False, 0.0, 0.0, 0.0)
        squares = self._squares(sample) if sample.noise and sample.known else None
        spread = self._dispersion.shares(sample.step) if sample.variance else None
        small, big = squares or (0, 0)
        return _ROW.pack(
            sample.step,
            sample.batch,
            sample.scale,
            squares is not None,
            small.to_bytes(48, "little"),
            big.to_bytes(48, "little"),
            spread is not None,
            *(spread or (0.0, 0.0, 0.0)),
        )

    def _squares(self, sample: Sample) -> tuple[int, int] | None:
        """Of the replicas hosted here, and of this worker's share of the sum; None if they are too large."""
        if self._replicas == 1:
            return sample.pair
        small, big = _integer(sample.parts), _integer(sample.sums)
        return None if small is None or big is None else (small, big)

    def _pair(self, sample: Sample) -> tuple[int, int] | None:
        """One replica alone: this step and the one before, in the parts of two."""
        at, self._previous_at = self._previous_at, (sample.step, sample.batch, sample.scale)
        if at != (sample.step - 1, sample.batch, sample.scale):
            return None
        before, after, change = (_integer(norms) for norms in (sample.before, sample.parts, sample.differences))
        if before is None or after is None or change is None:
            return None
        # Each has its gradient divided by 2: |a/2|^2 + |b/2|^2, and |a/2 + b/2|^2.
        # By rounding the second may come out below 0 where they nearly cancel.
        return (before + after) // 4, max(0, (2 * before + 2 * after - change) // 4)

    def learn(self, rows: Sequence[bytes]) -> None:
        """Everybody's rows. Where they do not speak of the same step, as with newcomers among them, they say nothing."""
        told = [_ROW.unpack(row[: _ROW.size]) for row in rows]
        if self._done is self._told:
            self._done = None
        step, batch, scale = told[0][:3]
        if step < 0 or any(each[:3] != (step, batch, scale) for each in told):
            return
        if all(each[3] for each in told):
            replicas = max(2, self._replicas)
            small, big = (sum(int.from_bytes(each[place], "little") for each in told) for place in (4, 5))
            # Parts are divided by N, so the mean of N squares is N times the sum of theirs.
            self.noise.update(small * replicas / _ONE / scale**2, big / _ONE / scale**2, batch, replicas)
        if all(each[6] for each in told):
            norms = self._dispersion.merge([each[7:10] for each in told])
            self.variance.update([norm / scale**2 for norm in norms])

    def figures(self) -> dict[str, float | None]:
        """What is known now."""
        return {
            "noise_scale": self.noise.value,
            "gradient_sqr": self.noise.gradient_sqr,
            "gradient_var": self.noise.gradient_var,
            "variance": self.variance.value,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise.state_dict(), "variance": self.variance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.load_state_dict(state["noise"])
        self.variance.load_state_dict(state["variance"])
        self._filling = self._awaiting = self._done = None
        self._previous_at = NEVER


def _stacked_norms(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each, by few calls. What has 16 bits is squared and added in 32."""
    wide = [flat.float() if flat.dtype.itemsize < 4 else flat for flat in flats]
    return torch.stack(torch._foreach_norm(wide))


def _integer(norms: Sequence[torch.Tensor]) -> int | None:
    """The sum of the squares of these norms, without any rounding that depends on their order; None for infinity."""
    if not norms:
        return 0
    total = 0
    for square in torch.cat(list(norms)).double().square().tolist():
        scaled = square * float(_ONE)
        if not scaled < 1e100:
            return None
        total += int(scaled)
    return total
