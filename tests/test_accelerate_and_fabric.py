"""The programs of the page on accelerate and Lightning Fabric: theirs on two processes and ours have the same bits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import addresses, run, specs, torchrun

from pliant.errors import ConfigError
from pliant.torchvision_import import import_torchvision

PAGE = Path(__file__).parent.parent / "docs" / "accelerate-and-fabric.md"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
N = 2


def make_importable() -> None:
    """Import torchvision first: Lightning does, which fails beside a torch for CPUs."""
    with contextlib.suppress(ConfigError):
        import_torchvision()


def programs() -> list[str]:
    """Return both sides of the differences on the page: with accelerate, as a job, with Fabric, as a job."""
    shown = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [_side(each.splitlines(), sign) for each in shown for sign in "-+"]


def _side(lines: Sequence[str], sign: str) -> str:
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (sign, " ", ""))


def digest_after(program: str, environ: dict[str, str]) -> str:
    os.environ.update(environ)
    names: dict[str, Any] = {}
    try:
        exec(compile(program, str(PAGE), "exec"), names)
    finally:
        for name in environ:
            os.environ.pop(name, None)
    state = names["optimizer"].state_dict()["state"]
    parts = [
        *names["model"].state_dict().values(),
        *(each for place in sorted(state) for each in state[place].values()),
    ]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def _work(rank: int, program: int, world: Sequence[dict[str, str]], members: Sequence[dict[str, str]]) -> list[str]:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    make_importable()
    theirs, ours = programs()[program : program + 2]
    found = [digest_after(ours, members[rank]), digest_after(ours, {})]
    more = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(N), "TORCHELASTIC_RUN_ID": "test"}
    return [digest_after(theirs, {**world[rank], **more}), *found, digest_after(ours.replace("1e-2", "2e-2"), {})]


@pytest.mark.parametrize("program", [0, 2], ids=["accelerate", "fabric"])
def test_the_programs_of_the_page_have_the_same_bits(program: int) -> None:
    make_importable()
    pytest.importorskip("accelerate" if program == 0 else "lightning.fabric")
    members = [each.to_environ() for each in specs(addresses("A" * N), timeout_s=60)]
    with torchrun(N) as world:
        for theirs, *ours, other in run(_work, N, program, world, members, timeout_s=180):
            assert ours == [theirs] * len(ours)
            assert other != theirs, "another learning rate"


def test_loaders_that_cannot_be_dealt_are_refused() -> None:
    import pliant
    from pliant.integrations.accelerate import prepare_loader

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    data = list(range(8))
    with pliant.join(replicas=2) as job:
        for loader, says in (
            (torch.utils.data.DataLoader(Stream()), "Stream without batches of samples: give a map-style dataset"),
            (torch.utils.data.DataLoader(data, sampler=[1, 2]), "BatchSampler of list: use shuffle=True or False"),  # type: ignore[arg-type]
            (torch.utils.data.DataLoader(data, shuffle=True, generator=torch.Generator()), "leave it out, or use"),
        ):
            with pytest.raises(ConfigError, match=re.escape(says)):
                prepare_loader(job, loader)
