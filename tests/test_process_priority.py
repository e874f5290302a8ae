"""A worker that warms up has a smaller share of busy cores, and gets its own back."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from pliant import process_priority
from pliant.process_priority import NICE_VARIABLE, WARM_UP_NICE, can_come_back, warm_up_environ

PROGRAM = """
import json, os, threading
from pliant.process_priority import come_back, step_back
def values():
    try:
        session = open("/proc/self/autogroup").read().split()[-1]
    except OSError:
        session = None
    return [session, *(os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task"))]
os.setsid()
step_back()
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
low = values()
come_back()
print(json.dumps([low, values(), "PLIANT_NICE" in os.environ]))
stop.set()
"""


def _run(environ: dict[str, str]) -> list[object]:
    given = {name: value for name, value in os.environ.items() if name != NICE_VARIABLE} | environ
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=given, stdout=subprocess.PIPE, timeout=60, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_worker_steps_back_and_comes_back_with_its_threads() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    low = min(own + WARM_UP_NICE, 19) if can_come_back(own) else own
    has_session = Path("/proc/self/autogroup").exists()
    session, no_session = (str(WARM_UP_NICE), "0") if has_session else (None, None)
    assert _run(warm_up_environ()) == [[session, low, low], [no_session, own, own], False]
    assert _run({}) == [[no_session, own, own]] * 2 + [False], "others keep their share"
    assert _run({NICE_VARIABLE: "own"}) == [[session, own, own], [no_session, own, own], False]


@pytest.mark.parametrize(
    ("limit", "right", "expected"), [(0, False, False), (0, True, True), (20, False, True), (15, False, False)]
)
def test_only_threads_that_could_come_back_step_back(limit: int, right: bool, expected: bool) -> None:
    with (
        mock.patch.object(resource, "getrlimit", return_value=(limit, limit)),
        mock.patch.object(process_priority, "_has_right", return_value=right),
        mock.patch.object(os, "getpriority", return_value=0),
    ):
        assert warm_up_environ() == {NICE_VARIABLE: "0" if expected else "own"}
