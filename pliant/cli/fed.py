"""The `pliant fed` commands: a federated job in the foreground, and a selector on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pliant.cli.cluster_output import is_read_by_people, print_table
from pliant.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    fed = typer.Typer(no_args_is_help=True, help="Federated learning: a job in the foreground, a selector on its own.")
    fed.command("select")(select)
    app.add_typer(fed, name="fed")


def select(
    trace: Annotated[
        str, typer.Option("--trace", metavar="TABLE", help="Devices: CSV, .npz, FedScale's pickle, synthetic or equal.")
    ] = "synthetic",
    replay: Annotated[
        str, typer.Option("--replay", metavar="FILE|N", help="What clients would bring (JSON), or N that are drawn.")
    ] = "1000",
    seed: Annotated[int, typer.Option("--seed", help="Of the selector.")] = 233,
    rounds: Annotated[int, typer.Option("--rounds", help="How many.")] = 60,
    selector: Annotated[
        str,
        typer.Option("--selector", metavar="KIND[:PRESET]", help="Instead of the one in the file, as oort:artifact."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON also on a terminal.")] = False,
) -> None:
    """Whom a selector picks, round after round, when the clients' losses are known. Piped: one JSON object."""
    from pliant.fed.config import Choice
    from pliant.fed.replay import drawn_replay, read_replay, replayed

    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: use 1 or more")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: use 0 or more")
    if replay.isdecimal() and not 1 <= int(replay) <= 1_000_000:
        raise ConfigError(f"--replay {replay}: use 1 to 1,000,000 clients, or a file")
    given = drawn_replay(int(replay)) if replay.isdecimal() else read_replay(Path(replay))
    if selector:
        kind, _, preset = selector.partition(":")
        given = given.model_copy(update={"selector": Choice(kind=kind, options={"preset": preset} if preset else {})})
    found = replayed(given, _devices(trace, len(given.clients)), rounds=rounds, seed=seed)
    if as_json or not is_read_by_people():
        print(json.dumps(found, indent=1))
    else:
        _show(found)


def _devices(trace: str, num_clients: int) -> Any:
    from pliant.fed.config import FedConfig
    from pliant.fed.world import World

    return World.of(FedConfig(devices=trace), num_clients, 1).devices


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
