"""The `pliant bench` commands: measure ours beside its peers and beside what the hardware allows."""

from __future__ import annotations

from typing import Annotated

import typer

from pliant.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(help="Measure ours beside its peers, interleaved, in one run.", no_args_is_help=True)
    bench.command("traffic")(traffic)
    app.add_typer(bench, name="bench")


def traffic(
    to: Annotated[str | None, typer.Option("--to", metavar="HOST:PORT", help="Send there.")] = None,
    listen: Annotated[int | None, typer.Option("--listen", metavar="PORT", help="Take and drop what arrives.")] = None,
    rate: Annotated[
        str, typer.Option("--rate", help="How fast to send: 500mbit, 1gbit, none (as fast as it goes).")
    ] = "500mbit",
    seconds: Annotated[float, typer.Option("--seconds", help="Stop after this long.")] = 10.0,
) -> None:
    """Background traffic, on loopback or between the hosts of a lab; ends by itself."""
    from pliant.bench import traffic as wire
    from pliant.lab import parse_rate

    wire.check_seconds(seconds)
    if (to is None) == (listen is None):
        raise ConfigError("bench traffic: give either --to HOST:PORT or --listen PORT")
    if to is not None:
        done, verb = wire.send(wire.check_target(to), parse_rate(rate), seconds), "sent"
    else:
        done, verb = wire.sink(listen or 0, seconds, lambda where: print(f"listening on {where}", flush=True)), "took"
    print(f"{verb} {done.num_bytes / 1e6:.1f} MB in {done.seconds:.2f} s, {done.bits_per_s / 1e6:.1f} Mbit/s")
