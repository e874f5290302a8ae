"""The commands `pliant fed run` (a federated job in the foreground) and `pliant fed select` (a selector on its own)."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_writable,
    is_stdout,
    option,
    print_table,
    save_json,
    show_waiting,
)
from pliant.errors import ConfigError, NameTaken, PliantError

if TYPE_CHECKING:
    from pliant.fed.jobfile import FederatedJob
    from pliant.jobs.federated import FederatedFolder


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    fed = typer.Typer(
        no_args_is_help=True, help="Federated learning: run a job in the foreground, or try a client selector."
    )
    fed.command("run")(run)
    fed.command("select", cls=JsonCommand)(select)
    app.add_typer(fed, name="fed")


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="CONF.YML", show_default=False, help="A federated job.")
    ] = None,
    name: Annotated[str, option("--name", "NAME", "Name of the job; overrides the file's.")] = "",
    workers: Annotated[str, option("--workers", "N|HOST:N,...", "Workers; overrides the file's; 0: none.")] = "",
    resume: Annotated[
        str, option("--resume", "NAME", "Go on with an interrupted job, from its checkpoint.", completion.federated)
    ] = "",
) -> None:
    """Run a federated job in the foreground; SIGTERM ends it after its round, Ctrl-C at once."""
    from pliant.fed.jobfile import make_job_folder
    from pliant.jobs.federated import FederatedFolder

    if resume:
        if file is not None or name or workers:
            raise ConfigError("--resume goes on with what was begun: leave file, --name and --workers out")
        folder = FederatedFolder(_resumable(resume))
    elif file is None:
        raise ConfigError("which job? give its file, as in `pliant fed run conf.yml`")
    else:
        with show_waiting(f"reading {file}, and what it names"):
            job = _with_checked_name(_read(file, name, workers))
            for remark in job.remarks:
                print(f"pliant: {remark}", file=sys.stderr, flush=True)
            folder = FederatedFolder(make_job_folder(job))
    raise typer.Exit(_run_in_foreground(folder))


def _resumable(name: str) -> Path:
    """Return the folder of a job that can go on."""
    from pliant.jobs.client import open_jobs

    with open_jobs() as opened:
        job = opened.job(name)
    if job.kind != "federated":
        raise ConfigError(f"{name} is a training job: `pliant submit --resume {name}` lets it go on")
    if job.state == "finished":
        raise ConfigError(f"{name} has finished: there is nothing to go on with; run it again for a new run")
    return Path(job.folder)


def _with_checked_name(job: FederatedJob) -> FederatedJob:
    """Return the job under a name that no job in the store has; an ended federated job gives its name to the next one."""
    from pliant.jobs.client import open_jobs

    with open_jobs() as opened:
        known = {each.name: each for each in opened.jobs()}
    if not job.is_named:
        return job.with_free_name(known)
    before = known.get(job.name)
    if before is not None and (before.kind != "federated" or not (before.is_over or before.state == "interrupted")):
        raise NameTaken(f"the name {job.name} is taken by a job that is {before.state}: stop it first, or give --name")
    return job


def _read(file: Path, name: str, workers: str) -> FederatedJob:
    from pliant.fed.jobfile import FederatedJob, FedPlacement
    from pliant.jobs.schema import is_training, read_job
    from pliant.yaml_source import YamlSource, validation_messages

    source = YamlSource.read(file)
    job = None if is_training(source) else read_job(source, name).job
    if not isinstance(job, FederatedJob):
        raise ConfigError(
            f"{file}: a training job: `pliant run -f {file}` or `pliant submit {file}` takes it; "
            "a federated job says `participants: N`, or has the job_conf of Oort's artifact"
        )
    if not workers:
        return job
    from pydantic import ValidationError

    try:
        placement = FedPlacement(**{**job.placement.model_dump(), "workers": workers.split(",")})
    except ValidationError as error:
        raise ConfigError(f"--{next(iter(validation_messages(error, FedPlacement).values()))}") from None
    return job.model_copy(update={"placement": placement})


def _run_in_foreground(folder: FederatedFolder) -> int:
    """Run the job in this process, and write into the store how it ended; returns the exit code."""
    from pliant.fed.jobfile import rounds_text
    from pliant.jobs.federated import run_job
    from pliant.jobs.store import foreground_job

    job = folder.job()
    signalled: list[int] = []
    entry = foreground_job(job.model_dump(mode="json"), job.name, folder.path, folder.record)
    before = signal.signal(signal.SIGTERM, lambda number, frame: signalled.append(number))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        stored, (say, watch) = stack.enter_context(entry), stack.enter_context(_shown(folder))

        def end(state: str, code: int, why: str = "") -> None:
            stored.update(state=state, exit_code=code, why=why)

        try:
            with contextlib.chdir(job.directory):  # where functions that the job names are looked for
                history = run_job(folder, stop=lambda: bool(signalled), say=say, watch=watch)
        except PliantError as error:
            end("failed", 2 if isinstance(error, ConfigError) else 1, str(error))
            raise
        except (Exception, SystemExit) as error:  # such as a function of the user's raises
            end("failed", 1, f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": "))
            with folder.log.open("a") as log:
                traceback.print_exc(file=log)
            raise
        except KeyboardInterrupt:
            end("stopped", 130, "ended at once")
            message = f"pliant: ended; `pliant fed run --resume {job.name}` goes on {folder.start_point}"
            print(message, file=sys.stderr)
            return 130
        stopped = history.why == "stopped"
        end("stopped" if stopped else "finished", 128 + signal.SIGTERM if stopped else 0)
    best = "" if history.best is None else f"; best accuracy {history.best.accuracy:.2%} in round {history.best.round}"
    print(f"{rounds_text(len(history.rounds), history.why, job.config)}{best}; {folder.path}")
    return 128 + signal.SIGTERM if stopped else 0


@contextlib.contextmanager
def _shown(folder: FederatedFolder) -> Iterator[tuple[Callable[[str], None], Callable[[str, Any], None]]]:
    """Show progress on a terminal; yields a function for lines, and one for facts of the record."""
    console = Console(highlight=False, emoji=False)
    rounds = folder.job().config.rounds
    columns = (TextColumn("round {task.completed:.0f} of {task.total:.0f}"), BarColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[now]}"))  # fmt: skip
    with (
        folder.log.open("a") as log,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=rounds, now="starting")

        def say(line: str) -> None:
            print(line, file=log, flush=True)
            console.print(line, soft_wrap=True, markup=False)

        def watch(kind: str, fact: Any) -> None:
            if kind == "round":
                bar.update(task, completed=fact["round"], now=f"{fact['clock_s'] / 3600:.2f} h on the virtual clock")

        yield say, watch


def select(
    trace: Annotated[
        str,
        option(
            "--trace",
            "TABLE",
            "Table of the clients' devices: CSV, .npz, FedScale's pickle, synthetic or equal.",
            completion.one_of("synthetic", "equal"),
        ),
    ] = "synthetic",
    replay: Annotated[
        str, option("--replay", "FILE|N", "Losses and sizes of the clients (JSON), or N to draw N clients at random.")
    ] = "1000",
    seed: Annotated[int, option("--seed", "", "Seed of the selector.")] = 233,
    rounds: Annotated[int, option("--rounds", "", "Number of rounds.")] = 60,
    selector: Annotated[
        str,
        option(
            "--selector",
            "KIND[:PRESET]",
            "Selector to use instead of the file's, such as oort:artifact.",
            completion.selectors,
        ),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Show which clients a selector picks, round after round, with known losses."""
    from pliant.fed.config import NamedOptions
    from pliant.fed.rounds.replay import draw_replay, read_replay, replay_selection

    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: use 1 or more")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: use 0 or more")
    if replay.isdecimal() and not (len(replay) < 9 and 1 <= int(replay) <= 1_000_000):
        raise ConfigError(f"--replay {replay}: use 1 to 1,000,000 clients, or a file")
    check_writable(json_file)
    given = draw_replay(int(replay)) if replay.isdecimal() else read_replay(Path(replay))
    if selector:
        kind, _, preset = selector.partition(":")
        given = given.model_copy(
            update={"selector": NamedOptions(kind=kind, options={"preset": preset} if preset else {})}
        )
    with show_waiting(f"picking in {rounds} rounds"):
        found = replay_selection(given, _devices(trace, len(given.clients)), rounds=rounds, seed=seed)
    save_json(found, json_file)
    if not is_stdout(json_file):
        _show(found)


def _devices(trace: str, num_clients: int) -> Any:
    from pliant.fed.clients import SimulatedClients
    from pliant.fed.config import FedConfig

    return SimulatedClients.of(FedConfig(devices=trace), num_clients, 1).devices


def _show(found: dict[str, Any]) -> None:
    rows = [
        [
            str(each["round"]), str(len(each["picked"])), _number(each.get("exploration"), 3), _number(each.get("round_s"), 1),
            _number(each["duration_s"], 1), " ".join(str(client) for client in each["picked"]),
        ]
        for each in found["rounds"]
    ]  # fmt: skip
    columns = ("round", "picked", "exploration", "T, s", "took, s", "clients")
    print_table(columns, rows, columns[:-1], cut=True)
    print(
        f"{found['coverage']} of {found['clients']} clients took part; {found['clock_s'] / 3600:.2f} h; {found['devices']}"
    )


def _number(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, float) else "-"
