"""Version 0.1 of pliant as a contender of `pliant bench gpu packed`.

The ranks are started by the `pliant run` of that version, with its folder first on the path, and this package behind it. The
loop has one level there: its body runs once for each replica, and the optimizer acts in the last turn of a step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from pliant.errors import ConfigError
from pliant_repro.worker import Command, Opened

PROGRAM = "pliant_repro.bench.version01:opened"
COMMAND = "from pliant.cli.main import main; main()"
MAX_EPOCHS, EPOCH_STEPS = 1_000_000, 5_000


def launcher(folder: Path, num_workers: int) -> Callable[[list[str]], list[str]]:
    """Return a function from the command line of a rank to the one that starts all ranks with the version in `folder`."""
    behind = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    folder = folder.resolve()
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2]), *behind])

    def wrap(argv: Sequence[str]) -> list[str]:
        run = [sys.executable, "-c", COMMAND, "run", "-q", "-np", str(num_workers)]
        # In that folder, because the present one is the first on the path of `python -m`.
        return ["env", "-C", str(folder), f"PYTHONPATH={path}", *run, *argv]

    return wrap


@contextlib.contextmanager
def opened(values: Mapping[str, Any], rank: int) -> Iterator[Opened]:
    """Open the training of a TrainingTask's values with version 0.1; a program of `pliant_repro.worker`."""
    import torch

    import pliant
    from pliant_repro import zoo

    if not Path(pliant.__file__).is_relative_to(Path.cwd()):
        raise ConfigError(f"version 0.1 was to be measured, but pliant is {pliant.__file__}")
    torch.set_num_threads(1)
    device, network = values["device"], zoo.network(values["model"])
    with pliant.join(replicas=values["replicas"]) as job:
        model = zoo.build(values["model"], device)
        if values["compiled"]:
            model.compile()
        batch, size = values["batch"] or network.batch, values["size"] or network.size
        length = EPOCH_STEPS * values["replicas"] * batch
        dataset = zoo.ReadyBatches(network.kind, size, length, device, classes=network.classes)
        optimizer = zoo.make_optimizer(network.optimizer, model)
        wrap: Any = job.wrap
        model, optimizer, loader = wrap(
            model, optimizer, dataset, batch_size=batch, shuffle=False, collate_fn=zoo.as_is
        )
        if device == "cuda":  # 0.1 only warns of kernels that are not deterministic
            torch.use_deterministic_algorithms(True)
        turns = (each for _epoch in job.epochs(MAX_EPOCHS) for each in loader)
        hosted = values["replicas"] // values["num_workers"]

        def step() -> None:
            for inputs, targets in islice(turns, hosted):
                with torch.autocast(device, torch.bfloat16, enabled=values["autocast"]):
                    loss = zoo.compute_loss(model, inputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

        def wait() -> None:
            if device == "cuda":
                torch.cuda.synchronize()

        def carry_out(command: Command) -> dict[str, object]:
            assert command["do"] == "run", f"only run, not {command['do']!r}"
            iterations = cast(int, command["iterations"])
            for _ in range(values["lead"]):
                step()
            wait()
            cpu_s, begun_s = time.process_time(), time.monotonic()
            for _ in range(iterations):
                step()
            wait()
            wall_s, cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_s
            if device == "cuda":
                torch.cuda.empty_cache()
            return {"wall_s": [wall_s / iterations], "cpu_s": [cpu_s / iterations]}

        yield {}, carry_out
