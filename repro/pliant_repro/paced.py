"""A network that trains real parameters but only waits where a model would compute.

On a machine with two cores, four nodes cannot compute a ResNet and send its gradients at the rates of the paper. A paced net
leaves the cores to the network: each layer of a profile is one real parameter, and its forward and backward pass sleep for as
long as the profile says. Everything else is real: autograd calls its hooks layer by layer, and gradients are dense and depend
on data and weights, so that one wrong bit anywhere shows in the parameters.

Sleeping happens on a `Device` with its own clock, like a GPU: Python code between two layers costs nothing, because kernels
would have been launched ahead, unless the program had to wait for the network and the device ran idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant.train import trace
from pliant_repro.profiles import LayerShape, Profile, layers_of
from pliant_repro.scaling_model import Layer

WIDTH = 256
"""Length of a sample."""
SLACK_S = 0.05
# Powers of two, so that the products are exact and no processor can round otherwise.
_GAIN = 2.0**-14
"""How much a weight changes the activations of its layer: little, because there are up to a hundred layers."""
_MIX = 2.0**-10
"""Share of a weight in its gradient."""


class Device:
    """Simulated device that computes one thing after the other, each for a given time, by its own clock.

    The clock advances by computed time only, so errors of sleeping do not add up. It jumps to the present when the device has
    run idle: after `stalled`, or when the program is more than SLACK_S behind, as after a pause. `waited_until` returns when
    the program last stopped waiting for the network; the clock goes on from there. What the program does after that, such as
    updating parameters, is part of the paced time already.
    """

    def __init__(
        self,
        waited_until: Callable[[], float] | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._waited_until = waited_until
        self._now_s = now_s
        self._sleep = sleep
        self._clock_s: float | None = None  # None: the device has never run

    def stalled(self) -> None:
        """Note that the program has just waited: what is launched next cannot begin before now."""
        now_s = self._now_s()
        self._clock_s = now_s if self._clock_s is None else max(self._clock_s, now_s)

    def launch(self, seconds: float) -> tuple[float, float]:
        """Start to compute for `seconds` after everything launched before; return when that begins and ends."""
        if self._clock_s is None:
            self.stalled()
        elif self._waited_until is not None:
            self._clock_s = max(self._clock_s, self._waited_until())
        assert self._clock_s is not None, "stalled() sets it"
        if self._now_s() - self._clock_s > SLACK_S:
            self.stalled()
        begin_s = self._clock_s
        self._clock_s = begin_s + seconds
        return begin_s, self._clock_s

    def synchronize(self) -> None:
        """Sleep until everything launched is done; other threads keep running."""
        if self._clock_s is not None:
            left_s = self._clock_s - self._now_s()
            if left_s > 0:
                self._sleep(left_s)


class PacedLayer(nn.Module):
    """One parameter, in use for as long as the layer computes."""

    def __init__(
        self, shape: LayerShape, costs: Layer, device: Device, generator: torch.Generator, *, number: int = 0
    ) -> None:
        super().__init__()
        self.name, self.costs, self.device = shape.name, costs, device
        self.pushed_by = number % WIDTH  # index in each sample of the number that this layer learns from
        self.weight = nn.Parameter(torch.randn(shape.num_parameters, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        # Priority synchronisation waits for a parameter at its first use in a torch function. Function.apply is none, so
        # this line makes the program wait here, before the device starts to run.
        values = self.weight.detach()
        found: Tensor = _Pace.apply(hidden, self.weight, values, self)  # type: ignore[no-untyped-call]
        return found


class PacedNet(nn.Module):
    """The layers of a profile one after the other; takes samples of `num_inputs` numbers and returns their loss.

    All nets of one profile and seed start from the same bits, whatever torch's own generator has done. `waited_until` is
    passed to the device; without it, the program calls `device.stalled()` itself.
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
        """Return the mean square of the last activations, computed from the mean of `samples`.

        Raises:
            ConfigError: the last dimension of `samples` is not `num_inputs`.
        """
        if samples.shape[-1:] != (WIDTH,):
            raise ConfigError(f"samples of shape {list(samples.shape)}: a paced net takes [..., {WIDTH}]")
        hidden = samples if samples.dim() == 1 else samples.reshape(-1, WIDTH).mean(0)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden.square().mean()


class _Pace(torch.autograd.Function):
    """Scale the activations a little by the weight's first elements, and take the layer's time.

    The weight's gradient is not the derivative of that, which would be zero nearly everywhere. It is that of a loss that
    pushes the whole weight along the data and pulls it to zero, so that training stays finite. It costs one pass over the
    weight and few calls, because a core's caches are cold after each sleep; and it is computed while the device runs.
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
        # The gradient may leave only now: autograd passes it to its hooks as soon as this returns.
        layer.device.synchronize()
        trace.event("backward", layer.name, begin_s, end_s)
        return of_hidden, of_weight, None, None
