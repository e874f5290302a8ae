"""What a worker does in a run of `pliant check`: it writes digests of the state after each step, and ends early."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.errors import TrainError
from pliant.identity import CheckSettings
from pliant.train.events import StepCommitted
from pliant.train.rendezvous import Left
from pliant.train.state_parts import StatePart, digests_of, parts_of

if TYPE_CHECKING:
    from pliant.cluster import Worker
    from pliant.train.worker_run import WorkerRun

NEWCOMER_WAIT_S = 120.0
"""How long the others wait for a new worker."""
POLL_S = 0.01


class StepDigests:
    """A listener for committed steps. The first worker of each step writes the digests of the state."""

    def __init__(
        self,
        run: WorkerRun,
        worker: Worker,
        settings: CheckSettings,
    ) -> None:
        """Begin with the state before the first step."""
        trainer = run.need_trainer()
        self._run, self._state, self._settings = run, trainer.state, settings
        self._wait_for_sums = trainer.driver.wait_for_sums
        self._file = Path(settings.folder, f"{worker}.jsonl".replace(":", "-"))
        if run.rank == 0:
            facts = {
                "replicas": run.settings.replicas,
                "averaging": trainer.averaging is not None,
                "not_promised": trainer.adaptation.not_promised,
            }
            self._write({**facts, "digests": digests_of(self._parts())})

    def _write(self, line: Mapping[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def __call__(self, event: StepCommitted) -> None:
        """Write the digests of a step; raise Left after the last one."""
        settings = self._settings
        if not self._wait_for_sums():
            return  # the step is done again
        if event.rank == 0:
            self._write({"step": event.step - 1, "workers": event.num_workers, "digests": digests_of(self._parts())})
        if event.step >= settings.steps:
            self._run.finish()
            raise Left("the steps to be checked are done")
        if event.step == settings.grow_at:
            self._grow()

    def _parts(self) -> Iterator[StatePart]:
        """Yield the parts of the state that must be the same in each run of a program. Generators of Python and NumPy
        are left out: most programs do not seed them."""
        for part in parts_of(self._state, self._state.buffers.save()):
            if part.kind != "random":
                yield part
        for replica, context in enumerate(self._state.replicas.contexts):
            yield StatePart("random", f"torch's random state of replica {replica}", context.random.torch)
            if context.random.cuda is not None:
                yield StatePart("random", f"CUDA's random state of replica {replica}", context.random.cuda)

    def _grow(self) -> None:
        """Wait for a new worker: in a few short steps it would come too late."""
        run, member = self._run, self._run.member
        run.resize(self._settings.grow_to)
        deadline_s = time.monotonic() + NEWCOMER_WAIT_S
        while member.prepared <= max(0, member.entered):
            if time.monotonic() > deadline_s:
                raise TrainError(
                    f"the second worker did not join within {NEWCOMER_WAIT_S:g} s: see its messages above; if the program "
                    "takes longer to start, give --workers, which leaves out the run with a new worker"
                )
            time.sleep(POLL_S)
