"""The `pliant lab` commands: hosts as network namespaces, to try everything on one machine."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from pliant.cli.output import JsonCommand, JsonFile, check_writable, is_stdout, save_json, show_waiting
from pliant.errors import ConfigError
from pliant_repro.cli import completion as repro_completion
from pliant_repro.lab.hosts import Lab, host_index
from pliant_repro.lab.namespaces import labs, remove
from pliant_repro.lab.rates import format_rate, parse_rate

Name = Annotated[
    str | None,
    typer.Option(
        "--name", help="Which lab; may be left out where there is only one.", autocompletion=repro_completion.labs
    ),
]
HostName = Annotated[str, typer.Argument(metavar="HOST", help="h0 or 0")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    lab = typer.Typer(help="Hosts as network namespaces with rate limits (needs root).", no_args_is_help=True)
    lab.command("up")(up)
    lab.command("down")(down)
    lab.command("list", cls=JsonCommand)(show)
    lab.command("rate")(rate)
    # Options after HOST belong to the program, with or without `--`.
    lab.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(execute)
    app.add_typer(lab, name="lab")


def up(
    hosts: Annotated[int, typer.Option("--hosts", help="How many hosts.")] = 4,
    rate: Annotated[str, typer.Option("--rate", help="What each may send: 1gbit, 100mbit, 2.5gbit, none.")] = "1gbit",
    name: Annotated[str | None, typer.Option("--name", help="The lab's name; random if not given.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return; the lab lives until `lab down`.")] = False,
) -> None:
    """Make a lab, and keep it until Ctrl-C (or, with --detach, until `pliant lab down`)."""
    lab = Lab(num_hosts=hosts, rate=rate, name=name)
    ended = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)  # they wait for sigtimedwait from here on
    with ExitStack() as up:
        with show_waiting(f"making {hosts} hosts"):
            up.enter_context(lab.up())
        print(f"lab {lab.name}: {hosts} hosts, {lab.addresses[0]} to {lab.addresses[-1]}, rate {rate}")
        print(f"try: pliant lab exec --name {lab.name} h0 -- ping -c1 {lab.addresses[-1]}", flush=True)
        if detach:
            print(f"end: pliant lab down {lab.name}")
            lab.detach()
            return
        print("end: Ctrl-C", flush=True)
        # Wake up every second to see whether `pliant lab down` has removed the lab.
        while lab.name in labs() and signal.sigtimedwait(ended, 1.0) is None:
            pass


def down(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Which lab; may be left out where there is only one.", autocompletion=repro_completion.labs
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every lab on this machine, also those in use.")] = False,
) -> None:
    """Remove a lab and kill what runs in it."""
    if everything and name is not None:
        raise ConfigError(f"lab down {name} --all: give a name or --all, not both")
    if everything:
        chosen = list(labs())
    elif name is not None and name in labs():  # also one that is half made, which cannot be attached to
        chosen = [name]
    else:
        chosen = [Lab.attach(name).name]
    for each in chosen:
        with show_waiting(f"removing {each}"):
            remove(each)
        print(f"lab {each} removed")


def show(json_file: JsonFile = None) -> None:
    """List the labs of this machine."""
    check_writable(json_file)
    found = labs()
    hosts = {name: _hosts(name) if num_hosts else [] for name, num_hosts in found.items()}
    keys = ("host", "address", "rate")
    listed = [{"name": name, "hosts": [dict(zip(keys, each, strict=True)) for each in hosts[name]]} for name in hosts]
    save_json({"labs": listed}, json_file)
    if is_stdout(json_file):
        return
    if not found:
        print("no lab; make one with `pliant lab up`")
    for name in hosts:
        if not hosts[name]:
            print(f"{name}: being made, or left by a machine crash; `pliant lab down {name}` removes it")
            continue
        print(f"{name}: {len(hosts[name])} hosts")
        for host, address, rate in hosts[name]:
            print(f"  {host}  {address}  {rate}")


def _hosts(name: str) -> list[tuple[str, str, str]]:
    """Return the name, address and rate of each host."""
    lab = Lab.attach(name)
    return [(f"h{host}", address, format_rate(lab.rate(host))) for host, address in enumerate(lab.addresses)]


def rate(
    host: HostName,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="1gbit, 100mbit, 2.5gbit, none")],
    name: Name = None,
) -> None:
    """Change what a host may send while everything runs."""
    parse_rate(rate)
    lab = Lab.attach(name)
    index = host_index(host, lab.num_hosts)
    lab.set_rate(index, rate)
    print(f"{lab.name} h{index}: sends at {rate}", file=sys.stderr)


def execute(
    host: HostName,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")],
    name: Name = None,
) -> None:
    """Run a program on a host of a lab, in place of this one."""
    lab = Lab.attach(name)
    program = command[1:] if command[0] == "--" else command
    argv = lab.exec_argv(host_index(host, lab.num_hosts), program)
    os.execvp(argv[0], argv)
