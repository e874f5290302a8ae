"""The reference of Python names: signatures are those of the code, and every name has an example, some of which are run."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import api_reference

PAGE = api_reference.PAGE.read_text()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
ALONE = ["Policies", "Optimizers that average models", "Errors"]
"""Sections whose examples need neither workers nor files."""


def examples(section: str) -> list[str]:
    by_hand = api_reference.BLOCK.sub("", SECTIONS[section])
    return re.findall(r"```python\n(.*?)```", by_hand, re.DOTALL)


def test_signatures_are_those_of_the_code() -> None:
    assert api_reference.page(PAGE) == PAGE, "run `python scripts/api_reference.py`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_block_has_an_example_that_is_python(section: str) -> None:
    told = examples(section)
    for text in told:
        ast.parse(text)
    # In any case of letters: an example has a job, an engine, a handle.
    used = set(re.findall(r"\w+", " ".join(told).lower()))
    first = [api_reference.names(marker)[0] for marker in api_reference.BLOCK.findall(SECTIONS[section])]
    names = [name.rpartition(".")[2] for name in first]
    assert told
    assert not [name for name in names if name.lower() not in used]


@pytest.mark.parametrize("section", ALONE)
def test_examples_that_need_no_job_hold(section: str) -> None:
    known: dict[str, Any] = {"pliant": pliant, "torch": torch, "model": torch.nn.Linear(2, 2)}
    for text in examples(section):
        exec(text, known)
