"""However many workers host the N replicas, they have the bits of stock DDP on N processes after every step.

That is: parameters, optimizer state and buffers; and every replica has its rank's losses and samples.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gang import FULL, Failed, gang
from golden import IN_TREE, TREE, golden
from stage import new_workers, run_fixed, spec_of, view_of
from subject import Task, compare, compare_all, differing, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PLACES = [
    ("conv", 4, 4, (4,)),
    ("conv", 4, 4, (2, 2)),
    ("conv", 4, 4, (1, 1, 1, 1)),
    ("conv", 3, 2, (2, 1)),
    ("conv", 3, 2, (1, 2)),
    ("conv", 6, 3, (4, 2)),
]
WIDE = [
    ("conv", 2, 2, (2,)),
    ("conv", 2, 2, (1, 1)),
    ("conv", 6, 3, (3, 3)),
    ("conv", 6, 3, (6,)),
    ("lstm", 4, 3, (1, 3)),
    ("lstm", 4, 3, (1, 1, 1, 1)),
    ("transformer", 4, 3, (3, 1)),
    ("transformer", 4, 3, (2, 1, 1)),
    ("conv-loaders", 4, 2, (1, 2, 1)),
]


@pytest.mark.parametrize(("name", "replicas", "epochs", "blocks"), PLACES + WIDE * FULL, ids=str)
def test_any_placement_has_the_bits_of_ddp(
    name: str, replicas: int, epochs: int, blocks: tuple[int, ...], tmp_path: Path
) -> None:
    task = Task(program=name, replicas=replicas, epochs=epochs, journal=str(tmp_path / "journal"), blocks=blocks)
    compare_all([task], run_fixed([task], len(blocks)))


def test_a_program_alone_has_the_bits_of_ddp(tmp_path: Path) -> None:
    runs = [
        ("conv", 2, 2), ("conv", 3, 2), ("conv", 4, 4), ("conv", 6, 3), ("conv-loaders", 4, 2), ("lstm", 4, 3),
        ("transformer", 4, 3),
    ]  # fmt: skip
    tasks = [
        Task(program=name, replicas=replicas, epochs=epochs, journal=str(tmp_path / f"{name}{replicas}"))
        for name, replicas, epochs in runs
    ]
    compare_all(tasks, run_fixed(tasks, 0))


VARIANTS = (
    "conv", "lstm", "transformer", "wide", "accumulating", "scaled", "two-optimizers", "frozen", "unused",
    "unused-accumulating", "unused-kept",
    "shifted", "tied", "channels-last", "bfloat16", "own-buffers", "kept-gradients", "kept-and-cleared-first", "two-passes", "skipping",
    "leaving", "fading",
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_what_programs_do_beyond_the_plain_loop(size: int, tmp_path: Path) -> None:
    tasks = [Task(program=name, replicas=3, epochs=2, journal=str(tmp_path / name)) for name in VARIANTS]
    compare_all(tasks, run_fixed(tasks, size))


@pytest.mark.parametrize("blocks", [(6,), (4, 2), (1, 2, 3)], ids=str)
def test_any_placement_adds_in_the_tree(blocks: tuple[int, ...], tmp_path: Path) -> None:
    journal, order = str(tmp_path / "journal"), {"order": "tree"}
    task = Task(program="conv", replicas=6, epochs=3, journal=journal, blocks=blocks, adapting=order)
    [found] = run_fixed([task], len(blocks))
    compare(found, golden(TREE + "conv", 6, 3))
    assert differing(found, golden("conv", 6, 3)), "the orders cannot be told apart"


@pytest.mark.parametrize("size", [1, 2])
def test_programs_add_in_the_tree(size: int, tmp_path: Path) -> None:
    tasks = [
        Task(program=name, replicas=3, epochs=2, journal=str(tmp_path / name), adapting={"order": "tree"})
        for name in IN_TREE
    ]
    compare_all(tasks, run_fixed(tasks, size), {name: TREE + name for name in IN_TREE})


def test_a_turn_without_backward_is_the_same_error_on_every_worker(tmp_path: Path) -> None:
    view = view_of(new_workers(2))
    tasks = [
        Task(
            program="conv",
            replicas=3,
            epochs=1,
            journal=str(tmp_path / f"{rank}"),
            environ=spec_of(worker, view).to_environ(),
            tampering="no_backward" if rank == 1 else "nothing",
        )
        for rank, worker in enumerate(view.workers)
    ]
    with gang(train, [(task,) for task in tasks]) as started:
        for rank in range(2):
            with pytest.raises(Failed, match=r"replica 2 ended its turn of step 0 without a backward\(\)"):
                started.hear(rank)
