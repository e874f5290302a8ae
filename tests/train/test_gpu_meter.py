"""What a worker's GPU does: nothing without one, and on a machine with a GPU what was held and computed there."""

from __future__ import annotations

import time

import pytest
import torch

from pliant.train.gpu_meter import PERIOD_S, GpuMeter


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_nothing_is_measured_and_nothing_loaded() -> None:
    assert GpuMeter().read(time.monotonic()) == (0.0, 0.0)
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_and_use_are_those_of_the_gpu() -> None:
    held = torch.ones(1 << 28, device="cuda")
    torch.cuda.synchronize()
    meter = GpuMeter()
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 3:  # NVML's own samples are taken within a second
        held.mul_(1.0)
        torch.cuda.synchronize()
    num_bytes, use = meter.read(time.monotonic())
    assert num_bytes >= held.nbytes
    assert num_bytes == torch.cuda.memory_reserved()
    assert use > 0.5
    del held
    torch.cuda.empty_cache()
    assert meter.read(time.monotonic()) == (num_bytes, use), "not read again so soon"
    later = meter.read(time.monotonic() + 2 * PERIOD_S)
    assert later[0] < 1 << 28, "the control: what was given back is not held"
