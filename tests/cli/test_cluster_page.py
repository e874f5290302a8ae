"""What docs/cluster.md says of policies, taken from its own text."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pliant.sched.cluster import Cluster, ScheduledJob
from pliant.sched.decision import decide
from pliant.sched.planner import DeviceType
from pliant.sched.policies import make_policy

Said = tuple[int, str, str]
PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()


@pytest.fixture(autouse=True)
def as_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports is forgotten, and so is where from."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine", None)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """The commands of a text that begin with `pliant`, as words, without their comments."""
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^    \$ (pliant .*)$", text, re.MULTILINE)]


def test_the_policy_of_the_page_runs_as_its_text_says(pliant: Callable[..., Said], tmp_path: Path) -> None:
    text = section("A policy of your own")
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(program)
    simulate, serve = commands(text)
    code, out, err = pliant(*simulate, "--processes", "1")
    assert (code, err) == (0, "")
    assert re.search(r"^mine:OneEach: [\d.]+x as fast as a FIFO of gangs by mean JCT", out, re.MULTILINE)
    assert out.startswith(f"100 jobs of {simulate[simulate.index('--trace') + 1]} on "), "no part of it is an emoji"
    assert serve[0] == "serve"
    policy = make_policy(serve[serve.index("--policy") + 1])
    assert (policy.name, policy.about) == ("OneEach", "One device for each job, first come, first served.")
    jobs = [ScheduledJob(name=name, submitted_s=0.0, replicas=4, types=(DeviceType("cpu", 1.0),)) for name in "ab"]
    assert decide(policy, policy.jobs(jobs), Cluster({"cpu": 4}), 0.0) == {"a": {"cpu": 1}, "b": {"cpu": 1}}


def test_the_page_names_what_policies_are_given() -> None:
    named = set(re.findall(r"`job\.(\w+)", section("A policy of your own")))
    assert named
    job = ScheduledJob(name="a", submitted_s=0.0, replicas=1, types=(DeviceType("cpu", 1.0),))
    assert not [name for name in named if not hasattr(job, name)]


@pytest.mark.parametrize("command", ["sim --trace synthetic:2", "serve --devices cpu=1"])
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("absent:Fair", "cannot import absent"),
        ("absent.py:Fair", "there is no file absent.py"),
        ("pliant.sched.policies:Polux", "did you mean Pollux?"),
    ],
)
def test_a_policy_that_is_not_there_is_refused(
    pliant: Callable[..., Said], command: str, policy: str, told: str
) -> None:
    code, out, err = pliant(*command.split(), "--policy", policy)
    assert (code, out) == (2, "")
    assert err.startswith(f"pliant: --policy {policy}: ")
    assert told in err
    assert err.count("\n") == 1
