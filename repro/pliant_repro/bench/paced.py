"""A net that trains real parameters but only waits where a model would compute.

On a machine with two cores, four nodes cannot compute a ResNet and send its gradients at the rates of the paper. A
paced net leaves the cores to the network: each layer of a profile is one real parameter, and its forward and backward
last as long as the profile says, asleep. Everything else is real: autograd calls its hooks layer by layer, gradients are
dense and depend on the data and on the weights, so that one wrong bit anywhere is seen in the parameters.

What is slept through is a `Device`, with a clock of its own, as a GPU has: Python between two layers costs nothing, as
kernels would have been launched ahead, unless the program had to wait for the network, when the device runs dry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pliant.adapt.limits import Layer
from pliant.errors import ConfigError
from pliant.train import trace
from pliant_repro.bench.profiles import LayerShape, Profile, layers_of

WIDTH = 256
"""Numbers in a sample."""
# Powers of two, so that the products are exact and no processor can round otherwise.
_GAIN = 2.0**-14
"""How much a weight changes what goes through its layer: little, as it happens up to a hundred times."""
_MIX = 2.0**-10
"""How much of a weight is in its gradient."""


class Device:
    """Computes one thing after the other, each for a given time, by its own clock.

    The clock moves by what is computed and by nothing else, so errors of sleeping do not add up. It jumps to the present
    when the device has run dry: `stalled` was called, or the program is more than `slack_s` behind, as after a pause.
    `waited_until` tells when the program last stopped waiting for the network: the clock goes on from there. What the
    program does after that, such as updating parameters, is part of what is paced already.
    """

    def __init__(
        self,
        waited_until: Callable[[], float] | None = None,
        *,
        slack_s: float = 0.05,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._waited_until = waited_until
        self._slack_s = slack_s
        self._now_s = now_s
        self._sleep = sleep
        self._clock_s: float | None = None  # None: has never run, or has run dry
        self.behind_s = 0.0
        """The most that the program was behind the device so far, pauses aside: time that the clock has hidden."""

    def stalled(self) -> None:
        """The program has just waited for something else: what is launched next cannot have begun before now."""
        now_s = self._now_s()
        self._clock_s = now_s if self._clock_s is None else max(self._clock_s, now_s)

    def launch(self, seconds: float) -> tuple[float, float]:
        """Begin to compute for `seconds` after all that was launched before; returns when it begins and ends."""
        if self._clock_s is None:
            self.stalled()
        elif self._waited_until is not None:
            self._clock_s = max(self._clock_s, self._waited_until())
        assert self._clock_s is not None, "stalled() sets it"
        behind_s = self._now_s() - self._clock_s
        if behind_s > self._slack_s:
            self.stalled()
        else:
            self.behind_s = max(self.behind_s, behind_s)
        begin_s = self._clock_s
        self._clock_s = begin_s + seconds
        return begin_s, self._clock_s

    def synchronize(self) -> None:
        """Sleep until everything launched is done. Other threads go on."""
        if self._clock_s is not None:
            left_s = self._clock_s - self._now_s()
            if left_s > 0:
                self._sleep(left_s)

    def run(self, seconds: float) -> tuple[float, float]:
        """Compute for `seconds`, to the end; returns when that began and ended."""
        ran = self.launch(seconds)
        self.synchronize()
        return ran


class PacedLayer(nn.Module):
    """One parameter, used for as long as the layer takes."""

    def __init__(
        self, shape: LayerShape, costs: Layer, device: Device, generator: torch.Generator, *, number: int = 0
    ) -> None:
        super().__init__()
        self.name, self.costs, self.device = shape.name, costs, device
        self.pushed_by = number % WIDTH  # the number in each sample that this layer learns from
        self.weight = nn.Parameter(torch.randn(shape.num_parameters, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        # This touches the parameter, so whoever updates parameters at their first use waits here, before the device is
        # asked to run. Function.apply by itself is no torch function and would be seen by nobody.
        values = self.weight.detach()
        found: Tensor = _Pace.apply(hidden, self.weight, values, self)  # type: ignore[no-untyped-call]
        return found


class PacedNet(nn.Module):
    """The profile's layers one after the other; takes samples of `num_inputs` numbers and gives their loss.

    All nets of one profile and seed start from the same bits, whatever torch's own generator has done.

    Args:
        waited_until: when the program last stopped waiting for the network; None: it calls `device.stalled()` itself.
        device: another one than a new one with `waited_until`.
    """

    num_inputs = WIDTH

    def __init__(
        self,
        profile: Profile,
        waited_until: Callable[[], float] | None = None,
        *,
        seed: int = 1,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        self.profile = profile
        self.device = device if device is not None else Device(waited_until)
        generator = torch.Generator().manual_seed(seed)
        costs = layers_of(profile)
        self.layers = nn.ModuleDict(
            {
                shape.name.replace(".", "_"): PacedLayer(shape, cost, self.device, generator, number=number)
                for number, (shape, cost) in enumerate(zip(profile.layers, costs, strict=True))
            }
        )

    def forward(self, samples: Tensor) -> Tensor:
        """The mean square of what the layers make of the mean of `samples`, whose last dimension is `num_inputs`.

        Raises:
            ConfigError: it is not.
        """
        if samples.shape[-1:] != (WIDTH,):
            raise ConfigError(f"samples of shape {list(samples.shape)}: a paced net takes [..., {WIDTH}]")
        hidden = samples if samples.dim() == 1 else samples.reshape(-1, WIDTH).mean(0)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden.square().mean()


class _Pace(torch.autograd.Function):
    """Scales the hidden values a little by the weight's first elements, and takes its time.

    The weight's gradient is not the derivative of that, which would be zero nearly everywhere: it is the one of a loss
    that pushes the whole weight along the data and pulls it to zero, so that training stays finite for ever. It costs
    one pass over the weight and few calls, because after each sleep a core finds its caches cold; and it is computed
    while the device runs, as it would be.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, values: Tensor, layer: PacedLayer) -> Tensor:
        begin_s, end_s = layer.device.launch(layer.costs.forward_s)
        gain = values[:WIDTH] if len(values) >= WIDTH else values[:1]
        found = torch.addcmul(hidden, hidden, gain, value=_GAIN)
        ctx.save_for_backward(hidden, values)
        ctx.layer = layer
        layer.device.synchronize()
        trace.event("forward", layer.name, begin_s, end_s)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, values = ctx.saved_tensors
        layer: PacedLayer = ctx.layer
        begin_s, end_s = layer.device.launch(layer.costs.backward_s)
        (of_hidden,) = gradients
        push = (hidden[layer.pushed_by] + of_hidden[layer.pushed_by]).tanh_()
        of_weight = torch.add(push, values, alpha=_MIX)
        # Only now may the gradient leave: autograd hands it to its hooks as soon as this returns.
        layer.device.synchronize()
        trace.event("backward", layer.name, begin_s, end_s)
        return of_hidden, of_weight, None, None
