"""Memory of gradients stays with a worker from step to step."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from torch import nn
import pliant
torch.set_num_threads(1)
layers = [nn.Sequential(nn.Conv2d(256, 512, 3), nn.Conv2d(512, 256, 1)) for _ in range(6)]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
job = pliant.join(replicas=1)
model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.01))
faults = []
for step in job.steps(8, batch=lambda replica: torch.randn(1, 256, 14, 14)):
    for x in step:
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(sorted(after - before for before, after in zip(faults[3:], faults[4:]))[2])
"""


def _faults(**settings: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PATH": "", **settings}, stdout=subprocess.PIPE, timeout=100, check=True
    )
    return int(done.stdout)


@pytest.mark.processes
def test_a_step_asks_the_system_for_no_memory_unless_the_user_has_settings_of_her_own() -> None:
    num_pages = 6 * (256 * 512 * 9 + 512 * 256) * 4 // resource.getpagesize()
    assert _faults() < num_pages / 20
    assert _faults(MALLOC_TRIM_THRESHOLD_="131072") > num_pages / 2, "the control: glibc gives back what is freed"
