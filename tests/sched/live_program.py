"""A training program as a user of the cluster would submit it: `live_program.py NAME REPLICAS EPOCHS [STEP_S]`.

Trains a program of tests/train/programs.py, the same that stock DDP trains as the oracle, and prints the SHA-256 of its
final state. STEP_S makes its steps longer, so that there is time to disturb it; what it computes stays the same.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import torch
from programs import build, digest, one_batch

import pliant


def main(name: str, replicas: str, epochs: str, step_s: str = "0") -> None:
    torch.set_num_threads(1)
    program = build(name)
    with pliant.join(replicas=int(replicas), seed=program.seed) as job:
        model, _, loader = job.wrap(
            program.model,
            program.optimizers,
            program.dataset,
            sync_buffers=program.sync_buffers,
            **program.wrapping,
            **program.loading,
        )
        if program.scheduler is not None:
            job.track("scheduler", program.scheduler)
        for _epoch in job.epochs(int(epochs)):
            for batch in loader:
                # A replica's part of the step, so that more workers are faster, as they would be with a real model.
                time.sleep(float(step_s))
                one_batch(program, model, batch, job.no_sync, lambda loss, samples: None)
        if job.rank == 0:
            print(f"hash {digest(program, program.model.buffers())} after {job.step} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
