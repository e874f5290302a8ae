"""The `pliant report` command: federated jobs side by side, by their records or by the artifact's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import completion
from pliant.cli.output import (
    JsonFile,
    check_picture,
    check_writable,
    is_stdout,
    option,
    print_table,
    save_json,
    show_waiting,
)
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.fed.participation import ClientFigures, Spread
    from pliant.fed.report import Comparison, TargetReached

COLUMNS = ("job", "selector", "rounds", "best", "final", "at round", "hours", "speedup")
CLIENT_COLUMNS = ("job", "clients", "never picked", "times picked", "jain", "cut", "lost", "seconds", "loss")


def report(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB...",
            show_default=False,
            help="Names of jobs, their folders, record.jsonl, or training_perf of the artifact or of FedScale.",
            autocompletion=completion.federated,
        ),
    ] = None,
    compare: Annotated[
        bool, option("--compare", "", "Compare the jobs with the first one; this is the default.")
    ] = True,
    target: Annotated[
        str,
        option("--target", "SHARE", "The accuracy to reach, 0.8 or 80; default: the best that every tested job reached."),
    ] = "",
    metric: Annotated[
        str, option("--metric", "", "accuracy, top_5 or loss.", completion.one_of("accuracy", "top_5", "loss"))
    ] = "accuracy",
    plot: Annotated[Path | None, option("--plot", "FILE", "A picture of the curves.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare how long federated jobs took, on the virtual clock, to reach an accuracy, and how their clients took part."""
    from pliant.fed.report import compare as compared
    from pliant.fed.report import read_curve

    if not jobs:
        raise ConfigError("which jobs? give names, folders or files, as in `pliant report --compare logs/a logs/b`")
    goal = _number(target)
    check_picture(plot)
    check_writable(json_file)
    with show_waiting("reading what the jobs have written") as say:
        found = compared([read_curve(_path(job)) for job in jobs], target=goal, metric=metric)
        if plot is not None:
            from pliant.cli import plotting

            say("drawing")
            plotting.accuracy_curves(found, plot)
    save_json(found.as_json(), json_file)
    if not is_stdout(json_file):
        _print(found)


def _number(target: str) -> float | None:
    """Parse `--target`; click would answer a wrong one with a page of usage."""
    if not target:
        return None
    try:
        return float(target)
    except ValueError:
        raise ConfigError(f"--target {target!r} is not a number: use a share such as 0.8, or 80") from None


def _path(job: str) -> Path:
    """A file or folder, or that of the job of this name."""
    path = Path(job)
    if path.exists() or "/" in job:
        return path
    from pliant.jobs.client import open_jobs

    with open_jobs() as opened:
        return Path(opened.job(job).folder)


def _print(found: Comparison) -> None:
    is_share = found.metric != "loss"

    def told(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}" if is_share else f"{value:.4f}"

    names = [run.curve.name.partition("/")[0] for run in found.runs]
    if len(set(names)) < len(names):
        names = [run.curve.name for run in found.runs]
    rows = [_row(name, run, told) for name, run in zip(names, found.runs, strict=True)]
    print_table(COLUMNS, rows, COLUMNS[2:])
    if found.target is None:
        print("target: none, because no model was tested yet")
    else:
        print(f"target: {found.metric} {told(found.target)}{found.reached_by}; hours of the virtual clock")
    _print_clients(names, [run.curve.clients for run in found.runs])


def _print_clients(names: Sequence[str], found: Sequence[ClientFigures | None]) -> None:
    """Print how the clients of each job took part; of a single job, also who."""
    rows = [_client_row(name, each) for name, each in zip(names, found, strict=True) if each is not None]
    if not rows:
        return
    print()
    print_table(CLIENT_COLUMNS, rows, CLIENT_COLUMNS[1:])
    print("times picked, seconds of an update, loss of a client: least, median, most over the clients")
    if len(found) == 1 and found[0] is not None:
        print()
        for name, text in found[0].facts():
            print(f"{name:<20}{text}")


def _client_row(name: str, found: ClientFigures) -> list[str]:
    picked = found.picked

    def three(spread: Spread | None) -> str:
        return "-" if spread is None else f"{spread.least:.3g} {spread.median:.3g} {spread.most:.3g}"

    return [
        name,
        "-" if found.clients is None else str(found.clients),
        "-" if picked.never is None else str(picked.never),
        f"{picked.least} {picked.median:g} {picked.most}",
        "-" if picked.jain is None else f"{picked.jain:.2f}",
        str(found.cut.total),
        str(found.lost.total),
        three(found.duration_s),
        three(found.loss),
    ]


def _row(name: str, run: TargetReached, told: Callable[[float | None], str]) -> list[str]:
    return [
        name,
        run.curve.about.get("sample_mode", "-"),
        str(run.curve.num_rounds),
        told(run.best),
        told(run.final),
        "never" if run.point is None else str(run.point.round),
        "-" if run.hours is None else f"{run.hours:.2f} h",
        "-" if run.speedup is None else f"{run.speedup:.2f}x",
    ]
