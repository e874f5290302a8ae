"""A training program as a user of the cluster would submit it: `train_program.py NAME REPLICAS EPOCHS [SETTING=VALUE...]`.

Trains a program of tests/train/programs.py, the same that stock DDP trains as the oracle, and prints the SHA-256 of its
final state. Settings change when things happen, and never what is computed, but for the last:
turn_s=S        each replica's turn takes S seconds longer, so that more workers are faster, as with a real model
gate=FILE       the file holds a number of steps; no further step begins before it holds a larger one
tampered=STEP   at that step one weight is moved by its last bit: the hash must then be another one
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import torch
from programs import Program, build, digest, loading_of, one_step

import pliant

GATE_S = 60.0


def main(name: str, replicas: str, epochs: str, *settings: str) -> None:
    said = dict(setting.split("=", 1) for setting in settings)
    torch.set_num_threads(1)
    program = build(name)
    with pliant.join(replicas=int(replicas), seed=program.seed) as job:
        model, _ = job.wrap(program.model, program.optimizers, sync_buffers=program.sync_buffers, **program.wrapping)
        loader = job.loader(program.dataset, **loading_of(program))
        if program.scheduler is not None:
            job.track("scheduler", program.scheduler)
        for _epoch in job.epochs(int(epochs)):
            for step in loader:
                pass_gate(said.get("gate", ""), step.number)
                if step.number == int(said.get("tampered", -1)):
                    tamper(program)
                one_step(program, model, step, job.no_sync, lambda *_: time.sleep(float(said.get("turn_s", 0))))
        if job.is_first:
            print(f"hash {digest(program, program.model.buffers())} after {job.step} steps", flush=True)


def pass_gate(file: str, step: int) -> None:
    deadline_s = time.monotonic() + GATE_S
    while file and int(Path(file).read_text()) <= step:
        assert time.monotonic() < deadline_s, f"the gate stayed closed at step {step}"
        time.sleep(0.01)


def tamper(program: Program) -> None:
    with torch.no_grad():
        weight = next(program.model.parameters()).view(-1)[:1]
        weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))


if __name__ == "__main__":
    main(*sys.argv[1:])
