"""The models of `pliant bench priority`: their sizes, and the bounds that follow, against published figures."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pliant_repro.profiles import PROFILES, SCALES, layers_of, profile, scaled
from pliant_repro.scaling_model import bounds

from pliant.errors import ConfigError

# Published Gbit/s on 4 nodes, with r, samples per second at P_fifo and at P*, and the cap of the gain in percent.
PUBLISHED = {
    "resnet50": [
        (1, 3.86, 24.0, 26.1, 9),
        (2, 1.93, 44.5, 52.2, 17),
        (3, 1.29, 62.1, 78.2, 26),
        (4, 0.96, 77.5, 100.6, 30),
        (5, 0.77, 91.1, 100.6, 11),
        (6, 0.64, 100.6, 100.6, 0),
    ],
    "vgg": [
        (3, 3.96, 12.8, 13.9, 8),
        (5, 2.37, 20.3, 23.2, 14),
        (8, 1.48, 30.3, 37.1, 22),
        (10, 1.19, 36.2, 46.4, 28),
        (12, 0.99, 41.6, 55.1, 32),
        (15, 0.79, 49.0, 55.1, 12),
        (20, 0.59, 55.1, 55.1, 0),
    ],
}
CELLS = [(model, *row) for model, rows in PUBLISHED.items() for row in rows]


@pytest.mark.parametrize(
    ("model", "num_layers", "num_parameters", "giga_macs"),
    [
        ("resnet50", 54, 25_557_032, 4.09),
        ("inception-v3", 95, 23_834_568, 5.71),
        ("vgg", 19, 143_667_240, 19.63),
        ("mobilenet-v2", 53, 3_504_872, 0.30),
    ],
)
def test_models_have_their_published_sizes(model: str, num_layers: int, num_parameters: int, giga_macs: float) -> None:
    found = profile(model)
    assert (len(found.layers), found.num_parameters) == (num_layers, num_parameters)
    assert sum(layer.macs for layer in found.layers) / 1e9 == pytest.approx(giga_macs, abs=0.01)
    assert len({layer.name for layer in found.layers}) == num_layers


def test_the_heaviest_layer_is_where_the_paper_has_it() -> None:
    def heaviest(model: str) -> tuple[int, float]:
        found = profile(model)
        sizes = [layer.num_parameters for layer in found.layers]
        return sizes.index(max(sizes)), round(max(sizes) / found.num_parameters, 3)

    assert profile("sockeye").num_parameters == pytest.approx(28e6, rel=0.02)
    assert heaviest("sockeye") == (0, 0.317)
    assert heaviest("vgg") == (16, 0.715)


@pytest.mark.parametrize(("model", "gbit_per_s", "r", "fifo_per_s", "star_per_s", "cap_percent"), CELLS)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_bounds_are_the_published_ones(
    model: str,
    gbit_per_s: float,
    r: float,
    fifo_per_s: float,
    star_per_s: float,
    cap_percent: float,
    is_scaled: bool,
) -> None:
    chosen = scaled(profile(model)) if is_scaled else profile(model)
    limits = bounds(layers_of(chosen), 4, gbit_per_s * 1e9 / 8 / chosen.scale)
    assert limits.r == pytest.approx(r, rel=0.01)
    assert chosen.batch / limits.p_fifo_s == pytest.approx(fifo_per_s, rel=0.01)
    assert chosen.batch / limits.p_star_s == pytest.approx(star_per_s, rel=0.01)
    assert 100 * limits.gain_cap == pytest.approx(cap_percent, abs=0.6)


@pytest.mark.parametrize("model", PROFILES)
def test_layers_share_the_time_of_a_step(model: str) -> None:
    found = profile(model)
    layers = layers_of(found)
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    assert forward_s + backward_s == pytest.approx(found.compute_s)
    assert backward_s == pytest.approx(2 * forward_s)
    assert sum(layer.num_bytes for layer in layers) == found.num_bytes == 4 * found.num_parameters


@pytest.mark.parametrize("model", PROFILES)
def test_scaling_keeps_the_times_and_divides_the_bytes(model: str) -> None:
    found, small = profile(model), scaled(profile(model))
    assert small.scale == SCALES[model]
    assert small.num_bytes == pytest.approx(found.num_bytes / SCALES[model], rel=1e-4)
    assert [layer.forward_s for layer in layers_of(small)] == [layer.forward_s for layer in layers_of(found)]
    assert scaled(scaled(found, 2), 5).scale == 10
    assert {layer.num_parameters for layer in scaled(found, 1e12).layers} == {1}


def test_a_step_takes_longer_with_more_samples() -> None:
    assert profile("vgg", batch=64).compute_s == pytest.approx(2 * 0.581)


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match="'lenet'.*resnet50, inception-v3, vgg, sockeye"):
        profile("lenet")
    with pytest.raises(ConfigError, match="batch=0"):
        profile("vgg", batch=0)
    for kappa in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="kappa="):
            scaled(profile("vgg"), kappa)


def test_needs_no_torch() -> None:
    check = "import pliant_repro.profiles, pliant_repro.scaling_model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0
