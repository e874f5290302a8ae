"""Shell completion: the values of options and arguments that can be completed.

It runs at every press of the tab key: nothing here imports torch, waits for long or prints. What goes wrong is no
completion, and never a message in the middle of somebody's command line.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

ANSWER_S = 1.0
"""How long a server may take to name its jobs."""

Words = Iterable[str | tuple[str, str]]
"""Values to choose from, some with a short help text."""
Completer = Callable[[str], list[str | tuple[str, str]]]


def values(words: Callable[[], Words]) -> Completer:
    """Return a completer of the values that `words` returns."""

    def complete(incomplete: str) -> list[str | tuple[str, str]]:
        try:
            return list(words())
        except Exception:  # a completion that cannot be made is none
            return []

    return complete


def listed(words: Callable[[], Words]) -> Completer:
    """Return a completer for values with commas between them, which completes the last one."""

    def complete(incomplete: str) -> list[str | tuple[str, str]]:
        before, comma, _ = incomplete.rpartition(",")
        found = [each if isinstance(each, str) else each[0] for each in values(words)(incomplete)]
        return [f"{before}{comma}{each}" for each in found if each not in before.split(",")]

    return complete


def one_of(*words: str) -> Completer:
    """Return a completer of these words."""
    return values(lambda: words)


def _names(module: str, attribute: str) -> Callable[[], Words]:
    """Return a function that returns the names in a module, which is imported only then."""
    return lambda: list(getattr(importlib.import_module(module), attribute))


def _jobs(kind: str = "") -> Words:
    from pliant.jobs.client import open_jobs

    with open_jobs(timeout_s=ANSWER_S) as opened:
        return [job.name for job in opened.jobs() if kind in ("", job.kind)]


def _running() -> Words:
    from pliant.jobs.store import running_jobs

    return [(run.name, run.command) for run in running_jobs()]


strategies = values(_names("pliant.comm.topology", "STRATEGIES"))
policies = values(_names("pliant.adapt.registry", "NAMES"))
schedulers = listed(lambda: [*_names("pliant.sched.policies", "POLICIES")(), "all"])
trace_formats = values(_names("pliant.sched.traces", "FORMS"))
selectors = values(_names("pliant.fed.selection.selectors", "NAMES"))
states = listed(_names("pliant.jobs.status", "STATES"))
federated = values(lambda: _jobs("federated"))
jobs = values(_jobs)
running = values(_running)
