"""`pliant run --on ray`: passes the options on to a runner on every node that Ray gives."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import typer

from pliant.cli.output import parse_counts
from pliant.cli.run_ssh import forwarded
from pliant.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from pliant.launch.plan import RunOptions

HERE = (
    "file", "on", "ray_address", "devices", "np", "remote_dir", "hosts", "hostfile", "self_host", "nic", "watch",
    "timeout", "logfile", "delay", "secret_file", "builtin_config_port", "start_time", "state_file", "dash", "program",
)  # fmt: skip
"""Options that are not passed on to runners: the driver acts on them, or sends them in another way."""
REFUSED = {
    "ssh": "starts runners over ssh, --on ray has Ray do it: give one of them",
    "hosts": "names hosts, but Ray chooses them: say with --devices what is needed",
    "hostfile": "names hosts, but Ray chooses them: say with --devices what is needed",
    "self_host": "names a host, but Ray chooses them: leave it out",
    "config_server": "names a config server, but with --on ray the driver runs one: leave it out",
    "init_version": "is for runners that are started one by one: leave it out with --on ray",
    "keep": "keeps a runner without workers: leave it out with --on ray",
    "debug_port": "is about one machine: leave it out with --on ray",
    "slot_devices": "is about one machine: leave it out with --on ray",
}


def check_place(on: str, address: str, devices: str) -> bool:
    """Return whether the job runs on Ray.

    Raises:
        ConfigError: `--on` has another value, or an option is for Ray only.
    """
    if on not in ("local", "ray"):
        raise ConfigError(f"--on {on!r} is not known: use local or ray")
    if on == "local" and (address != "auto" or devices):
        flag = f"--devices {devices}" if devices else f"--ray-address {address}"
        raise ConfigError(f"{flag} is for a Ray cluster: add --on ray")
    return on == "ray"


def on_ray(ctx: typer.Context, options: RunOptions, *, address: str, devices: str, directory: str) -> int:
    """Run the job on the Ray cluster at `address`; return its exit code."""
    from pliant.identity import job_secret
    from pliant.jobs.store import registered
    from pliant.launch.on_ray.driver import RayJob, run_on_ray
    from pliant.launch.plan import find_command

    given = {param.name for param in ctx.command.params if _is_given(ctx, param.name or "")}
    for param in ctx.command.params:
        if param.name in REFUSED and param.name in given:
            raise ConfigError(f"{param.opts[-1]} {REFUSED[param.name]}")
    time.sleep(options.delay_s)
    environ = dict(os.environ)
    if not directory:
        find_command(options.program, environ.get("PATH"))  # only for its checks: the nodes have the same files
    wanted = _devices(devices, options.np if "np" in given else None)
    job = RayJob(
        program=options.program,
        arguments=(*forwarded(ctx, HERE), "-t0", repr(options.start_time_s), *options.program),
        devices=wanted,
        bounded=bool(devices),
        asked="--devices" if devices else f"-np {options.np}:",
        np=options.np if "np" in given else sum(wanted.values()),
        directory=directory or os.getcwd(),
        environ=environ,
        secret=job_secret(secret_file=options.secret_file, shared="PLIANT_SECRET" in environ, environ=environ),
        address=address,
        ports=options.port_range,
        config_port=options.builtin_config_port,
        timeout_s=options.timeout_s,
        grace_s=options.grace_s,
        patience_s=options.rendezvous_timeout_s,
        state_file=options.state_file,
        record=os.path.abspath(os.path.join(directory, ctx.params["record"])) if ctx.params["record"] else "",
        independent=options.independent,
        resumes=bool(options.checkpoint_dir),
    )
    try:
        return run_on_ray(job, register=None if options.independent else registered)
    except KeyboardInterrupt:
        return 130  # before there were workers; afterwards the driver handles it


def _devices(text: str, np: int | None) -> dict[str, int]:
    """Return the devices that the job may have, best first; without --devices, a CPU for each worker."""
    if not text:
        return {"cpu": np or 1}
    wanted = parse_counts(text, "--devices")
    room = sum(wanted.values())
    if not room:
        raise ConfigError(f"--devices {text}: use at least one device")
    if np is not None and np > room:
        raise CapacityError(f"-np {np}: --devices {text} has room for {room} workers; ask for fewer, or more devices")
    return wanted


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
