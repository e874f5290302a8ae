"""Estimates of the gradient noise scale, and of the variance of gradients between replicas.

On the steps that are due, the probe is shown each replica's gradients as they are collected and the sums as they arrive;
it never changes anything. What one worker finds travels with its message of the next step, and all workers learn the same
from everybody's.

For the noise scale each worker squares the gradients of its own replicas and an equal share of the sums. The squares are
added as integers, so the estimate is the same to the last bit whatever the number of workers. For the variance each worker
gets its share of the sum of squares by one collective of low priority.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from pliant.adapt.monitors import NoiseScale, Variance
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import CommError

CHUNK = 1 << 15
"""Elements whose squares are added in the gradients' own precision: so few that one thread does it."""
_ONE = 1 << 149
"""The integers count in units of the least positive float32."""
NEVER = (-2, 0.0, 1.0)
"""The step, batch and scale before the first step."""
_ROW = struct.Struct("<qdd?48s48s?3d")
"""The step, the batch of a replica and the scale of its loss; whether there are squares, of the replicas and of the
sum; whether there is a variance, in three numbers.
"""


@dataclass(slots=True)
class ProbedStep:
    """What is collected about one step."""

    step: int
    batch: float
    noise: bool
    variance: bool
    scale: float = 1.0
    """The factor by which a gradient scaler has multiplied the loss."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """Norms of pieces of the replicas' gradients."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Norms of this worker's share of the pieces of the sums."""
    before: list[torch.Tensor] = field(default_factory=list)
    """For a single replica: norms of the gradients of the step before."""
    differences: list[torch.Tensor] = field(default_factory=list)
    """For a single replica: norms of the change since the step before."""
    pair: tuple[int, int] | None = None
    """For a single replica: the squares of two steps, in place of two replicas."""
    known: bool = True
    """Whether everything was known. Before Adam's first update there are no denominators."""


class GradientProbe:
    """Collects gradients on due steps, and estimates. Used by the thread that trains."""

    row_size = _ROW.size

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        noise_scale: int = 0,
        variance: int = 0,
    ) -> None:
        """Estimate the noise scale, and the variance, every so many steps; 0 for never."""
        self.noise_interval, self.variance_interval = noise_scale, variance
        self.noise, self.variance = NoiseScale(), Variance()
        self._parameters = list(parameters)
        self._denominators = AdamDenominators(optimizers, parameters)
        self._offsets = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._bases = [0, *accumulate(-(-parameter.numel() // CHUNK) for parameter in parameters)]
        """The number of each parameter's first chunk. Chunks are dealt to the workers in turn."""
        self._dispersion = GradientVariance(self._offsets)
        self._rank, self._size, self._replicas = 0, 1, 1
        self._filling: ProbedStep | None = None
        """The step in progress."""
        self._awaiting: ProbedStep | None = None
        """The last step, whose sums may still come."""
        self._done: ProbedStep | None = None
        """The last complete step, which the next row reports."""
        self._reported: ProbedStep | None = None
        """The step that the last row has reported. The next one may be complete meanwhile."""
        self._previous: torch.Tensor | None = None
        """For a single replica: its gradients of the step before."""
        self._previous_at = NEVER
        """The number, batch size and loss scale of that step."""

    # --- which steps ---

    def enter_view(self, engine: Engine, blocks: Sequence[int]) -> None:
        """Use this engine from now on. What was not reported yet is dropped: its shares were those of other workers."""
        self._rank, self._size, self._replicas = engine.rank, engine.size, sum(blocks)
        self._filling = self._awaiting = self._done = None
        self._previous_at = NEVER
        self._dispersion.enter_view(engine, self._replicas)

    def begin(self, step: int) -> bool:
        """Begin a step; return whether it is probed."""
        noise = self._is_due(step, self.noise_interval)
        if self._replicas == 1 and self.noise_interval:
            noise = noise or self._is_due(step + 1, self.noise_interval)  # the first of a pair
        variance = self._replicas > 1 and self._is_due(step, self.variance_interval)
        self._filling = ProbedStep(step, 0.0, noise, variance) if noise or variance else None
        if self._filling is not None:
            self._dispersion.begin()
        return self._filling is not None

    @property
    def wants_parts(self) -> bool:
        """Whether the step in progress is probed, and gradients are still missing."""
        return self._filling is not None

    @property
    def wants_sums(self) -> bool:
        """Whether sums of the last probed step are still missing."""
        return self._awaiting is not None

    @staticmethod
    def _is_due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def record_samples(self, samples: float, scale: float = 1.0) -> None:
        """Tell that a replica's next gradient is `scale` times a mean over this many samples."""
        if self._filling is not None:
            self._filling.batch, self._filling.scale = samples, scale

    # --- gradients and sums ---

    def add_gradient(self, index: int, flat: torch.Tensor) -> None:
        """Take a parameter's gradient of a hosted replica, divided by N: flat, in the memory order of the parameter."""
        sample = self._filling
        if sample is None:
            return
        if sample.noise:
            if self._replicas == 1:
                self._compare(sample, index, flat)
            sample.parts += self._norms(sample, index, flat, 0, 1)
        if sample.variance:
            self._dispersion.add(index, flat)

    def add_gradients(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Take several at once, which costs less on a device."""
        sample = self._filling
        if sample is None:
            return
        if sample.noise and (self._replicas == 1 or self._denominators.are_used):
            for index, flat in zip(indices, flats, strict=True):
                self.add_gradient(index, flat)
            return
        if sample.noise:
            sample.parts.append(_stacked_norms(flats))
        if sample.variance:
            for index, flat in zip(indices, flats, strict=True):
                self._dispersion.add(index, flat)

    def _compare(self, sample: ProbedStep, index: int, flat: torch.Tensor) -> None:
        """Compare with the step before, and keep the gradient for the step after."""
        if self._previous is None:
            self._previous = torch.zeros(self._offsets[-1], dtype=flat.dtype, device=flat.device)
        before = self._previous[self._offsets[index] : self._offsets[index + 1]]
        if self._previous_at[0] == sample.step - 1:
            sample.differences += self._norms(sample, index, flat - before, 0, 1)
            sample.before += self._norms(sample, index, before, 0, 1)
        before.copy_(flat)

    def gradients_complete(self) -> None:
        """Take note that the last hosted replica has shown all its gradients."""
        sample, self._filling = self._filling, None
        self._awaiting = sample
        if sample is None:
            return
        if sample.variance:
            self._dispersion.exchange(sample.step)
        if self._replicas == 1:
            sample.pair = self._pair(sample)
            self.sums_complete()

    def add_sum(self, index: int, flat: torch.Tensor) -> None:
        """Take the sum of a parameter's gradients over all replicas, before anybody has changed it."""
        sample = self._awaiting
        if sample is None or self._replicas == 1:
            return
        if sample.noise:
            first = (self._rank - self._bases[index]) % self._size
            sample.sums += self._norms(sample, index, flat, first, self._size)
        if sample.variance:
            self._dispersion.keep_mean(index, flat)

    def add_sums(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Take several at once. Here parameters, not chunks, are dealt to the workers."""
        sample = self._awaiting
        if sample is None or self._replicas == 1:
            return
        if sample.noise and self._denominators.are_used:
            for index, flat in zip(indices, flats, strict=True):
                self.add_sum(index, flat)
            return
        mine = [flat for index, flat in zip(indices, flats, strict=True) if index % self._size == self._rank]
        if sample.noise and mine:
            sample.sums.append(_stacked_norms(mine))
        if sample.variance:
            for index, flat in zip(indices, flats, strict=True):
                self._dispersion.keep_mean(index, flat)

    def sums_complete(self) -> None:
        """Take note that all sums of the step have been shown."""
        if self._awaiting is not None:
            self._done, self._awaiting = self._awaiting, None

    def _norms(self, sample: ProbedStep, index: int, flat: torch.Tensor, first: int, step: int) -> list[torch.Tensor]:
        """Return the norms of every `step`-th chunk from the `first` one on."""
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

    # --- messages between workers ---

    def pack_row(self) -> bytes:
        """Return what this worker has found about the last probed step that was not reported yet."""
        sample = self._reported = self._done
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

    def _squares(self, sample: ProbedStep) -> tuple[int, int] | None:
        """Return the squares of the hosted replicas, and of this worker's share of the sum; None if they are too large."""
        if self._replicas == 1:
            return sample.pair
        small, big = _exact_sum_of_squares(sample.parts), _exact_sum_of_squares(sample.sums)
        return None if small is None or big is None else (small, big)

    def _pair(self, sample: ProbedStep) -> tuple[int, int] | None:
        """For a single replica: return this step and the one before in the parts of two replicas."""
        at, self._previous_at = self._previous_at, (sample.step, sample.batch, sample.scale)
        if at != (sample.step - 1, sample.batch, sample.scale):
            return None
        before, after, change = (
            _exact_sum_of_squares(norms) for norms in (sample.before, sample.parts, sample.differences)
        )
        if before is None or after is None or change is None:
            return None
        # Each has its gradient divided by 2: |a/2|^2 + |b/2|^2, and |a/2 + b/2|^2. Rounding may make the second
        # negative if they nearly cancel.
        return (before + after) // 4, max(0, (2 * before + 2 * after - change) // 4)

    def learn(self, rows: Sequence[bytes]) -> None:
        """Update the estimates from everybody's rows. Rows of different steps, as with new workers, are ignored."""
        reported = [_ROW.unpack(row[: _ROW.size]) for row in rows]
        if self._done is self._reported:
            self._done = None
        step, batch, scale = reported[0][:3]
        if step < 0 or any(each[:3] != (step, batch, scale) for each in reported):
            return
        if all(each[3] for each in reported):
            replicas = max(2, self._replicas)
            small, big = (sum(int.from_bytes(each[place], "little") for each in reported) for place in (4, 5))
            # Parts are divided by N, so the mean of N squares is N times the sum of theirs.
            self.noise.update(small * replicas / _ONE / scale**2, big / _ONE / scale**2, batch, replicas)
        if all(each[6] for each in reported):
            norms = self._dispersion.merge([each[7:10] for each in reported])
            self.variance.update([norm / scale**2 for norm in norms])

    def figures(self) -> dict[str, float | None]:
        """Return the present estimates."""
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
    """Return the norm of each by few calls. 16-bit tensors are squared and added in 32 bits."""
    wide = [flat.float() if flat.dtype.itemsize < 4 else flat for flat in flats]
    return torch.stack(torch._foreach_norm(wide))


def _exact_sum_of_squares(norms: Sequence[torch.Tensor]) -> int | None:
    """Return the sum of the squares of these norms, without rounding that depends on their order; None for infinity."""
    if not norms:
        return 0
    total = 0
    for square in torch.cat(list(norms)).double().square().tolist():
        scaled = square * float(_ONE)
        if not scaled < 1e100:
            return None
        total += int(scaled)
    return total


# --- variance ---


VarianceShare = tuple[float, float, float]
"""The squared norm of the variable that begins before the share, the sum of the norms of the variables in it, and the
squared norm of the variable that ends after it.
"""
NO_STEP = -1
LAST_PRIORITY = 1 << 20
"""A priority behind everything that training needs."""
VARIANCE_CHUNK = 1 << 16
"""Elements that are processed at once, so that intermediate results stay in the cache."""


class GradientVariance:
    """One worker's part in var = mean(g^2) - mean(g)^2, of which the L2 norm of each variable is taken.

    The elements of all parameters, one after the other, are cut into one equal share per worker. Each worker adds up
    the squares of its own replicas; then the owner of each share sums it over all workers. A variable that lies in two
    shares is put together when all have reported. `offsets` tells where each parameter begins, and where the last one
    ends.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = list(offsets)
        self._engine: Engine | None = None
        self._bounds = [0, self._offsets[-1]]
        """Where each worker's share begins."""
        self._squares: torch.Tensor | None = None
        """The squares of all parameters, summed over the hosted replicas; in this worker's share finally over all."""
        self._host: torch.Tensor | None = None
        """CUDA: the same, in memory that collectives can use."""
        self._means: torch.Tensor | None = None
        """This worker's share of the mean gradient."""
        self._written: set[int] = set()
        self._handles: list[Handle] = []
        self._pending = NO_STEP
        """The step whose collectives are on their way."""
        self._found: tuple[int, VarianceShare | None] = (NO_STEP, None)
        """The last step that was evaluated, and the result."""
        self._replicas = 1
        self._retired: list[object] = []

    def enter_view(self, engine: Engine, replicas: int) -> None:
        if self._engine is not None and self._engine.may_be_written_to:
            self._retired.append((self._engine, self._squares, self._host))  # as with buckets: never use it again
        self._engine, self._replicas = engine, replicas
        length = self._offsets[-1]
        self._bounds = [length * rank // engine.size for rank in range(engine.size + 1)]
        self._squares = self._host = self._means = None
        self._handles, self._written = [], set()
        self._pending, self._found = NO_STEP, (NO_STEP, None)

    # --- collecting ---

    def begin(self) -> None:
        """Begin a step, which may be a repeated one."""
        self._written = set()

    def add(self, index: int, flat: torch.Tensor) -> None:
        """Add a replica's gradient of this parameter, divided by N."""
        self._finish_step()  # before the squares of the last step are overwritten
        if self._squares is None:
            self._allocate(flat)
        assert self._squares is not None
        place = self._squares[self._offsets[index] : self._offsets[index + 1]]
        if index in self._written:
            place.addcmul_(flat, flat)
        else:
            self._written.add(index)
            if flat.dtype == place.dtype:
                torch.mul(flat, flat, out=place)
            else:
                place.copy_(flat).square_()

    def _allocate(self, flat: torch.Tensor) -> None:
        assert self._engine is not None, "enter_view() comes first"
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        shared = self._engine.empty(self._offsets[-1], dtype)
        if flat.is_cuda:
            self._engine.pin(shared)
            self._host, self._squares = shared, torch.empty(len(shared), dtype=dtype, device=flat.device)
        else:
            self._squares = shared
        low, high = self._share
        self._means = torch.empty(high - low, dtype=dtype, device=flat.device)

    @property
    def _share(self) -> tuple[int, int]:
        assert self._engine is not None, "enter_view() comes first"
        rank = self._engine.rank
        return self._bounds[rank], self._bounds[rank + 1]

    def exchange(self, step: int) -> None:
        """Sum each share over all workers: all hosted replicas have added theirs."""
        squares = self._squares
        assert squares is not None, "parameters without a gradient"
        for index in range(len(self._offsets) - 1):
            if index not in self._written:
                squares[self._offsets[index] : self._offsets[index + 1]].zero_()
        self._written, self._pending = set(), step
        assert self._means is not None
        self._means.zero_()  # what no replica has used has no sum
        if len(self._bounds) == 2:
            return
        if self._host is None:
            self._submit(squares)
            return
        self._host.copy_(squares, non_blocking=True)
        torch.cuda.current_stream(squares.device).synchronize()
        self._submit(self._host)

    def _submit(self, squares: torch.Tensor) -> None:
        assert self._engine is not None, "enter_view() comes first"
        for root in range(self._engine.size):
            low, high = self._bounds[root], self._bounds[root + 1]
            if low < high:
                handle = self._engine.reduce(
                    f"variance:{root}", squares[low:high], root, order="fast", priority=LAST_PRIORITY
                )
                self._handles.append(handle)

    def keep_mean(self, index: int, flat: torch.Tensor) -> None:
        """Keep this worker's part of the mean gradient of a parameter."""
        low, high = self._share
        begin, end = max(low, self._offsets[index]), min(high, self._offsets[index + 1])
        if begin < end:
            assert self._means is not None
            start = self._offsets[index]
            self._means[begin - low : end - low].copy_(flat[begin - start : end - start])

    # --- evaluating the variance ---

    def shares(self, step: int) -> VarianceShare | None:
        """Return the result of this worker's share for that step; None if a worker was lost."""
        if self._pending == step:
            self._finish_step()
        return self._found[1] if self._found[0] == step else None

    def _finish_step(self) -> None:
        """Wait for the collectives of the last step, and evaluate what they have brought."""
        if self._pending == NO_STEP:
            return
        step, self._pending = self._pending, NO_STEP
        handles, self._handles = self._handles, []
        try:
            for handle in handles:
                handle.wait()
        except CommError:
            return  # the trainer will notice it, too
        assert self._squares is not None
        low, high = self._share
        if self._host is not None and len(self._bounds) > 2:  # a single worker exchanges nothing
            self._squares[low:high].copy_(self._host[low:high], non_blocking=True)
        self._found = (step, self._look(self._squares[low:high], low))

    def _look(self, squares: torch.Tensor, low: int) -> VarianceShare:
        assert self._means is not None
        longest = len(squares) if squares.is_cuda else VARIANCE_CHUNK
        scratch = torch.empty(min(longest, len(squares)), dtype=squares.dtype, device=squares.device)
        norms: list[torch.Tensor] = []
        owners: list[int] = []
        begin, end = low, low + len(squares)
        index = bisect_right(self._offsets, low) - 1
        while begin < end:
            until = min(self._offsets[index + 1], end, begin + longest)
            if begin < until:
                place = slice(begin - low, until - low)
                mean, variance = self._means[place], scratch[: until - begin]
                torch.mul(squares[place], float(self._replicas), out=variance)
                norms.append(torch.linalg.vector_norm(variance.addcmul_(mean, mean, value=-1.0)))
                owners.append(index)
                begin = until
            if begin == self._offsets[index + 1]:
                index += 1
        sums: dict[int, float] = {}
        for owner, norm in zip(owners, torch.stack(norms).tolist() if norms else [], strict=True):
            sums[owner] = sums.get(owner, 0.0) + norm * norm
        first, last = self._cut(low), self._cut(end)
        inner = math.fsum(math.sqrt(square) for owner, square in sums.items() if owner not in (first, last))
        return sums.get(first, 0.0), inner, sums.get(last, 0.0) if last != first else 0.0

    def _cut(self, place: int) -> int:
        """Return the variable that a bound between two shares cuts; -1 if it lies between variables."""
        index = bisect_right(self._offsets, place) - 1
        return index if 0 <= index < len(self._offsets) - 1 and self._offsets[index] < place else -1

    def merge(self, reported: Sequence[Sequence[float]]) -> list[float]:
        """Return the norms, or sums of several, that follow from everybody's shares, in the order of ranks."""
        norms = [inner for _, inner, _ in reported]
        split: dict[int, float] = {}
        for rank, (head, _, tail) in enumerate(reported):
            first, last = self._cut(self._bounds[rank]), self._cut(self._bounds[rank + 1])
            split[first] = split.get(first, 0.0) + head
            if last != first:
                split[last] = split.get(last, 0.0) + tail
        return norms + [math.sqrt(square) for index, square in split.items() if index >= 0]


# --- Adam ---


class AdamDenominators:
    """What Adam divides the gradient of each parameter by: sqrt(v) + eps, as of the last update.

    With it the noise scale is that of Adam's updates. Nothing is divided for other optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._owners: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        """The optimizer and the group of each parameter, by its id."""
        if all(_is_adam(optimizer) for optimizer in optimizers):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    self._owners |= {id(parameter): (optimizer, group) for parameter in group["params"]}
        self.are_used = any(id(parameter) in self._owners for parameter in parameters)

    def of_parameter(self, index: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the denominators, flat, in the memory order of the parameter; None before the first update."""
        parameter = self._parameters[index]
        if id(parameter) not in self._owners:
            return None
        optimizer, group = self._owners[id(parameter)]
        state = optimizer.state.get(parameter, {})
        squares = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if squares is None:
            return None
        correction = 1 - group["betas"][1] ** float(state["step"])
        dense = squares.stride() == parameter.stride()
        flat = squares.as_strided((squares.numel(),), (1,)) if dense else squares.reshape(-1)
        found: torch.Tensor = (flat.to(like) / correction).sqrt_().add_(group["eps"])
        # An element that has never had a gradient would be divided by eps alone, and would outweigh all others.
        return found.masked_fill_(flat == 0, torch.inf)


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    name = type(optimizer).__name__
    return name in ("Adam", "AdamW", "NAdam", "RAdam") and all(
        {"betas", "eps"} <= group.keys() for group in optimizer.param_groups
    )
