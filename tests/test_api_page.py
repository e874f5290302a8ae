"""The reference of Python names: every public one has an example in its section, and those that need no job are run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
ALONE = ["Policies", "Optimizers that average models", "Errors", "Other names"]
"""Sections whose examples need neither workers nor files."""


def examples(section: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_has_an_example_that_is_python(section: str) -> None:
    told = examples(section)
    for text in told:
        ast.parse(text)
    # In any case of letters: an example has a job, an engine, a handle.
    used = set(re.findall(r"\w+", " ".join(told).lower()))
    names = [name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", SECTIONS[section], re.MULTILINE)]
    assert told
    assert not [name for name in names if name.lower() not in used]


@pytest.mark.parametrize("section", ALONE)
def test_examples_that_need_no_job_hold(section: str) -> None:
    known: dict[str, Any] = {"pliant": pliant, "torch": torch, "model": torch.nn.Linear(2, 2)}
    for text in examples(section):
        exec(text, known)
