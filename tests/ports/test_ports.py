"""Programs in the structure of published scripts: their ports have the bits of stock DDP, wherever they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from gang import FULL, Failed
from porting import FOLDER, Fault, Plan, copy_folder, run_ddp, run_elastic, run_fixed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@dataclass(frozen=True, slots=True)
class Port:
    """A pair of programs: `NAME_ddp.py` for stock DDP, `NAME.py` for pliant."""

    name: str
    fault: Fault
    before: tuple[str, ...] | None = None
    """The arguments of an earlier run, whose checkpoint the program then resumes; None: there is none."""
    arguments: tuple[str, ...] = ()
    first: int = 0
    """The number of the first step of the resumed job."""
    fault_of_two: Fault | None = None
    """The fault of a job with two replicas, if it is another."""


PORTS = [
    Port("nanogpt", Fault("backward", 1), ("--max_iters", "4"), ("--init_from", "resume"), first=3),
    Port("imagenet", Fault("evaluation", 1, step=4), ("--epochs", "2"), ("--resume", "checkpoint.pth.tar")),
    # With two replicas the scaler skips the optimizer's steps where the fault would be.
    Port("mingpt", Fault("outer", 0), ("1",), ("3",), fault_of_two=Fault("forward", 0)),
    Port("torchrun", Fault("forward", 0), ("1",), ("3",)),
    Port("wgan", Fault("outer", 1, step=4)),
    Port("gan", Fault("outer", 1)),
    Port("ema", Fault("forward", 2)),
    Port("loop", Fault("backward", 0)),
    Port("sampler", Fault("forward", 1)),
    Port("stream", Fault("backward", 2)),
]


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.name)
def test_a_port_has_the_bits_of_ddp(port: Port, tmp_path: Path) -> None:
    """On N workers, on one, and while workers come, go and are killed."""
    for replicas in (3, 2) if FULL else (3,):
        base = tmp_path / str(replicas)
        ddp, fixed = base / "ddp", base / "fixed"
        ddp.mkdir(parents=True)
        fixed.mkdir()
        old, new = FOLDER / f"{port.name}_ddp.py", FOLDER / f"{port.name}.py"
        if port.before is not None:
            earlier = run_ddp(old, port.before, replicas, ddp)
            assert run_fixed(new, port.before, replicas, replicas, fixed) == {earlier}, f"{replicas} workers, earlier"
        alone, elastic = copy_folder(ddp, base / "alone"), copy_folder(ddp, base / "elastic")
        expected = run_ddp(old, port.arguments, replicas, ddp)
        assert expected, "DDP has printed no hash"
        assert run_fixed(new, port.arguments, replicas, replicas, fixed) == {expected}, f"{replicas} workers"
        assert run_fixed(new, port.arguments, replicas, 1, alone) == {expected}, f"{replicas} replicas on one worker"
        if replicas == 3 or FULL:
            fault = port.fault_of_two if replicas == 2 and port.fault_of_two else port.fault
            plan = Plan.with_fault(port.first, replicas, fault)
            found = run_elastic(new, port.arguments, replicas, plan, elastic)
            assert found.hashes == {expected}, "workers that come and go"
            assert (found.killed, found.started, found.repeated) == (1, 2 * replicas, []), found
            assert found.sizes >= {1, replicas}, found


def test_a_counter_in_a_turn_gives_other_bits(tmp_path: Path) -> None:
    """The negative control: on one worker this counter counts replicas."""
    source = (FOLDER / "nanogpt.py").read_text()
    wrong = source.replace("    state.iter_num += 1\n", "").replace(
        "    for X, Y in step:\n", "    for X, Y in step:\n        state.iter_num += 1\n"
    )
    assert wrong != source
    hashes = []
    for name, text in (("right", source), ("wrong", wrong)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
        hashes.append(run_fixed(tmp_path / name / "train.py", ("--max_iters", "4"), 3, 1, tmp_path / name))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("counted", "complaint"),
    [
        ("if count % 2 == 0:", r"is in loop \d over step \d, but .* is in loop \d over step \d"),
        ("for group in optimizer_G.param_groups:\n            group['lr'] = 0.01 / count\n        if i % 2 == 0:", "the workers do not have the same state"),
    ],
    ids=["passes", "learning rate"],
)  # fmt: skip
def test_a_counter_that_a_new_worker_does_not_know_is_noticed(counted: str, complaint: str, tmp_path: Path) -> None:
    """It begins at 0 there. `enumerate(loader)` does not, and job.state does not."""
    source = (FOLDER / "wgan.py").read_text()
    wrong = source.replace("for epoch in", "count = 0\nfor epoch in").replace("if i % n_critic == 0:", counted)
    wrong = wrong.replace("        optimizer_D.zero_grad()\n", "        count += 1\n        optimizer_D.zero_grad()\n")
    (tmp_path / "train.py").write_text(wrong)
    with pytest.raises(Failed, match=complaint):
        run_elastic(tmp_path / "train.py", (), 3, Plan(sizes={1: 1, 4: 3}), tmp_path)
