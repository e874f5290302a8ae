"""`pliant run --ssh`: the same flags, carried out by a runner on every host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from pliant.cluster import place
from pliant.errors import ConfigError
from pliant.tokens import find_token

if TYPE_CHECKING:
    from pliant.launch.plan import RunOptions

LOCAL = (
    "file", "ssh", "user", "remote_python", "remote_dir", "hosts", "hostfile", "self_host", "nic", "secret_file", "dash", "program",
)  # fmt: skip
"""Flags that are not passed on: hosts and the secret reach the runners by other ways, and the dashboard runs here."""


def forwarded(ctx: typer.Context, left_out: Sequence[str] = LOCAL) -> list[str]:
    """Return the flags that the user has given, for another `pliant run`."""
    words: list[str] = []
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if param.name in left_out or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[param.name or ""]
        if getattr(param, "is_flag", False):
            words.append((param.opts if value else param.secondary_opts)[0])
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [param.opts[0], str(each)]
    return words


def over_ssh(ctx: typer.Context, options: RunOptions, *, user: str, python: str, directory: str) -> int:
    """Run the job on all hosts of `options`; return the exit code."""
    from pliant.identity import job_secret
    from pliant.launch.addresses import resolve, resolve_hosts
    from pliant.launch.ssh import SshJob, run_over_ssh

    if not options.hosts:
        raise ConfigError("--ssh needs to know the hosts: give -hostfile FILE or -H HOST:SLOTS,...")
    # Names are looked up here, once: a host may know itself by an address that means nothing to the others.
    hosts = tuple(
        replace(found, public=named.public)
        for named, found in zip(options.hosts, resolve_hosts(options.hosts, resolve), strict=True)
    )
    place(hosts, options.np, options.port_range)  # for its checks, which each host would have to repeat
    environ = dict(os.environ)
    if options.config_server and (token := find_token(options.config_server, environ)):
        environ["PLIANT_TOKEN"] = token  # it may be kept here only
    return run_over_ssh(
        SshJob(
            hosts=hosts,
            arguments=(*forwarded(ctx), "-t0", repr(options.start_time_s), *options.program),
            python=python or sys.executable,
            directory=directory or os.getcwd(),
            environ=environ,
            secret=job_secret(secret_file=options.secret_file, shared="PLIANT_SECRET" in environ, environ=environ),
            user=user,
            grace_s=options.grace_s,
            elastic=options.watch,
        )
    )
