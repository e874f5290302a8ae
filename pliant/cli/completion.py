"""Shell completion: the two flags that install it, and the values of options and arguments that can be completed.

It runs at every press of the tab key: nothing here imports torch, waits for long or prints. What goes wrong is no
completion, and never a message in the middle of somebody's command line.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from typer.core import TyperGroup

from pliant.errors import ConfigError

if TYPE_CHECKING:
    import click

INSTALL, SHOW = "--install-completion", "--show-completion"
SHELLS = ("bash", "zsh", "fish")
ANSWER_S = 1.0
"""How long a server may take to name its jobs."""

Words = Iterable[str | tuple[str, str]]
"""Values to choose from, some with a short help text."""
Completer = Callable[[str], list[str | tuple[str, str]]]


class FrontDoor(TyperGroup):
    """The program itself: its flags for completion take the shell's name, for where it cannot be detected."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in (INSTALL, SHOW) and not ctx.resilient_parsing:
            _set_up(args[0], *args[1:])
            ctx.exit()
        return super().parse_args(ctx, args)


def _set_up(flag: str, shell: str = "", *more: str) -> None:
    setup = importlib.import_module("typer.completion")
    shell = shell or setup._get_shell_name() or ""
    if shell not in SHELLS or more:
        raise ConfigError(f"{' '.join((flag, shell, *more))}: name the shell, one of {', '.join(SHELLS)}")
    if flag == SHOW:
        print(setup.get_completion_script(prog_name="pliant", complete_var="_PLIANT_COMPLETE", shell=shell))
    else:
        _, path = setup.install(shell=shell, prog_name="pliant")
        print(f"{shell} completion is in {path}; it works in new terminals")


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


# --- what there is ---


def _strategies() -> Words:
    from pliant.comm.topology import STRATEGIES

    return STRATEGIES


def _policies() -> Words:
    from pliant.adapt.registry import NAMES

    return NAMES


def _schedulers() -> Words:
    from pliant.sched.policies import POLICIES

    return [*POLICIES, "all"]


def _selectors() -> Words:
    from pliant.fed.selection.selectors import NAMES

    return NAMES


def _states() -> Words:
    from typing import get_args

    from pliant.jobs.status import State

    return get_args(State)


def _federated() -> Words:
    return _jobs("federated")


def _jobs(kind: str = "") -> Words:
    from pliant.jobs.client import open_jobs

    with open_jobs(timeout_s=ANSWER_S) as opened:
        return [job.name for job in opened.jobs() if kind in ("", job.kind)]


def _running() -> Words:
    from pliant.jobs.store import running_jobs

    return [(run.name, run.command) for run in running_jobs()]


strategies = values(_strategies)
policies = values(_policies)
schedulers = listed(_schedulers)
selectors = values(_selectors)
states = listed(_states)
federated = values(_federated)
jobs = values(_jobs)
running = values(_running)
