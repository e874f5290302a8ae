"""What KungFu's figure 9 published, and the ratio of traffic to compute that follows from it. Pure; no torch.

The artifact gives two throughputs at 32 VMs with one K80 each (ResNet-50, batches of 32): 43.4 images per second and GPU
for KungFu, 12.7 for Horovod 0.16.1. It does not say what the VMs' network carries. What can be derived:

* A K80 trains ResNet-50 at about 50 images per second (TensorFlow's published benchmarks of that time: 50 to 53), so
  a step of 32 images computes for C = 0.64 s.
* KungFu's step lasted 32/43.43 = 0.737 s. With gradients sent as they come and a barrier at the end (P_fifo of
  `pliant.perf`), a step of that length leaves room for T = 0.52 s of traffic, if not a moment of it was lost. So
  T/C <= 0.82: with more traffic 43.4 images per second were impossible. 2(N-1)/N of 102 MB in 0.52 s are 3.0 Gbit/s.
* Figure 5 of the same artifact has a STAR of 8 such VMs at 31.4 images per second. Its root sends 7 times 102 MB in
  each step of 1.02 s, so these VMs carry at least 7 Gbit/s: T/C <= 0.35, where all traffic hides behind backward.

Measured here is the first, T/C = 0.82: the most traffic that the published figure allows, and so the most that any
way of sending can matter. Neither ratio explains Horovod's 12.7: with T/C = 0.82 and no overlap at all a step takes
C + T = 1.16 s, 27.5 images per second. The rest was its own: in 0.16 a coordinator hears of every tensor from every rank
before anything is sent. That cost belongs to that version, and DDP has nothing like it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pliant.errors import ConfigError
from pliant_repro import profiles
from pliant_repro.profiles import LayerShape, Profile
from pliant_repro.scaling_model import Layer, bounds

BATCH = 32
PUBLISHED_NODES = 32
KUNGFU = {"mean": 43.429020, "spread": 1.212320}
"""Images per second and GPU, and 1.96 times their standard deviation."""
HOROVOD = {"mean": 12.701925, "spread": 0.708324}
K80_PER_S = {"resnet50": 50.0, "mobilenet-v2": 100.0}
"""Images per second of one K80. MobileNetV2's is assumed: the artifact has none, and depthwise convolutions suit a K80
badly, so that a fourteenth of the multiply-adds is not taken to be more than twice as fast."""
STAR_NODES, STAR_PER_S = 8, 31.4
"""Figure 5, before any interference."""
NAMES = {"resnet50": "ResNet50", "mobilenet-v2": "MobileNetV2"}
"""As the artifact's lines have them."""
KAPPA = {"resnet50": 30.0, "mobilenet-v2": 30.0}
"""Sizes and rates are divided by this, so that two cores can carry what 32 nodes send."""


def full_profile(model: str) -> Profile:
    """The model at its full size, as fast as on a K80.

    Raises:
        ConfigError: not one of the figure's.
    """
    if model not in K80_PER_S:
        raise ConfigError(f"model {model!r}: this figure has {', '.join(K80_PER_S)}")
    return dataclasses.replace(profiles.profile(model, batch=BATCH), compute_s=BATCH / K80_PER_S[model])


def lab_profile(model: str, speed: float = 1.0) -> Profile:
    """The same as the lab can carry it: fewer parameters, blocks instead of layers, and `speed` times as fast."""
    found = profiles.scaled(full_profile(model), KAPPA[model])
    return dataclasses.replace(found, layers=blocks_of(found.layers), compute_s=found.compute_s / speed)


def blocks_of(layers: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
    """The layers of each block (what their names have before a dot) as one: fewer calls for 32 nodes on two cores."""
    found: dict[str, LayerShape] = {}
    for layer in layers:
        name = layer.name.partition(".")[0]
        so_far = found.get(name, LayerShape(name, (), 0))
        found[name] = LayerShape(name, so_far.tensors + layer.tensors, so_far.macs + layer.macs)
    return tuple(found.values())


def published_bytes_per_s() -> float:
    """What a VM's network must at least have carried for KungFu's ResNet-50: see above."""
    layers = profiles.layers_of(full_profile("resnet50"))
    traffic_s = most_traffic_s(layers, BATCH / KUNGFU["mean"])
    num_bytes = sum(layer.num_bytes for layer in layers)
    return 2 * (PUBLISHED_NODES - 1) / PUBLISHED_NODES * num_bytes / traffic_s


def published_ratio() -> float:
    """T/C: the most traffic that KungFu's ResNet-50 leaves room for, over its compute."""
    profile = full_profile("resnet50")
    return most_traffic_s(profiles.layers_of(profile), BATCH / KUNGFU["mean"]) / profile.compute_s


def star_bytes_per_s() -> float:
    """What the root of figure 5's star must at least have sent."""
    layers = profiles.layers_of(full_profile("resnet50"))
    sent = (STAR_NODES - 1) * sum(layer.num_bytes for layer in layers)
    return sent / most_traffic_s(layers, BATCH / STAR_PER_S)


def most_traffic_s(layers: Sequence[Layer], step_s: float) -> float:
    """T: the most traffic that a step of this length can hold, sent as it comes, with a barrier at its end.

    Raises:
        ConfigError: the step is too short for its compute.
    """
    num_bytes = sum(layer.num_bytes for layer in layers)

    def step_with(traffic_s: float) -> float:
        return bounds(layers, 2, num_bytes / traffic_s).p_fifo_s  # two nodes send every byte once

    low, high = 1e-9, step_s
    if step_with(low) > step_s:
        raise ConfigError(f"a step of {step_s:g} s is shorter than its compute: use a longer one")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if step_with(middle) <= step_s else (low, middle)
    return low


def lab_bits_per_s(model: str, speed: float = 1.0) -> int:
    """What each host of the lab may send: the published network over the scale of the sizes."""
    return round(published_bytes_per_s() * 8 / KAPPA[model] * speed)
