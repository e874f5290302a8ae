"""The `pliant run` command: reads its flags, and leaves the rest to `pliant.launch`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from pliant.cli import completion
from pliant.cli.embedded import page
from pliant.cli.output import check_future_file, check_future_folder, parse_int
from pliant.cli.run_ray import check_place, on_ray
from pliant.cluster import DEFAULT_RUNNER_PORT, Host, PortRange, parse_hostfile, parse_hosts
from pliant.errors import ConfigError, reason
from pliant.identity import DEFAULT_STRATEGY, parse_schedule
from pliant.launch.duration import parse_duration

if TYPE_CHECKING:
    from pliant.launch.options import RunOptions

log = logging.getLogger(__name__)

PRINTED = {"printed": True}
"""Marks what stdout shows already, so that stderr does not."""
SWITCHES = {"-q", "-w", "-k", "-v", "-allow-nvlink"}
"""Flags without a value, which Go's users also write as `-q=true`."""
OFF = {"-v": "--no-v"}


def go_switches(arguments: Sequence[str], with_value: frozenset[str]) -> list[str]:
    """`arguments` with Go's `-flag=true|false` for switches in our own form; the program's are untouched.

    `with_value` are the flags that take the next argument. A switch set to false is left out
    where that is its default.
    """
    rest = list(arguments)
    done: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        flag = rest.pop(0)
        name, equals, value = flag.partition("=")
        short = name[1:] if name.startswith("--") else name
        if equals and short in SWITCHES and value.lower() in ("true", "false", "1", "0"):
            is_on = value.lower() in ("true", "1")
            done.extend([name] if is_on else [OFF[short]] if short in OFF else [])
            continue
        done.append(flag)
        if flag in with_value and rest:
            done.append(rest.pop(0))
    return done + rest


class GoCommand(TyperCommand):
    """A command whose switches may be written as Go does."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = [param for param in self.params if not getattr(param, "is_flag", False)]
        names = frozenset(name for param in options for name in param.opts if name.startswith("-"))
        return super().parse_args(ctx, go_switches(args, names))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": False}
    app.command("run", cls=GoCommand, context_settings=settings)(run)


# Numbers are taken as text and read here: click would answer a wrong one with a page of usage.
def run(
    ctx: typer.Context,
    program: Annotated[list[str] | None, typer.Argument(metavar="PROGRAM [ARGS]...", show_default=False)] = None,
    np: Annotated[str, typer.Option("-np", "--np", metavar="N", help="Workers in the parse_int job.")] = "1",
    hosts: Annotated[
        str,
        typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", help="The machines; default: this one, enough slots."),
    ] = "",
    hostfile: Annotated[
        str,
        typer.Option("-hostfile", "--hostfile", metavar="FILE", help="One host per line, HOST slots=N; overrides -H."),
    ] = "",
    ssh: Annotated[
        bool, typer.Option("--ssh", help="Start the runners of all hosts from here, over ssh without passwords.")
    ] = False,
    user: Annotated[str, typer.Option("-u", "--user", metavar="USER", help="With --ssh, who to be there.")] = "",
    remote_python: Annotated[
        str, typer.Option("--remote-python", metavar="PATH", help="With --ssh, the hosts' Python; default: as here.")
    ] = "",
    remote_dir: Annotated[
        str, typer.Option("--remote-dir", metavar="DIR", help="With --ssh, where to run there; default: as here.")
    ] = "",
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="local|ray",
            help="Where: hosts as above, or a Ray cluster.",
            autocompletion=completion.one_of("local", "ray"),
        ),
    ] = "local",
    ray_address: Annotated[
        str,
        typer.Option("--ray-address", metavar="HOST:PORT", help="With --on ray, which cluster; auto: this machine's."),
    ] = "auto",
    devices: Annotated[
        str,
        typer.Option(
            "--devices", metavar="TYPE=N,...", help="With --on ray, what the job may have, such as t4=2,cpu=4."
        ),
    ] = "",
    self_host: Annotated[
        str, typer.Option("-self", "--self", metavar="HOST", help="Which of the hosts this machine is.")
    ] = "",
    nic: Annotated[str, typer.Option("-nic", "--nic", metavar="NAME", help="Interface that says the same.")] = "",
    port_range: Annotated[
        str, typer.Option("-port-range", "--port-range", metavar="BEGIN-END", help="Ports for workers.")
    ] = str(PortRange()),
    port: Annotated[
        str, typer.Option("-port", "--port", metavar="PORT", help="Where runners of several hosts meet.")
    ] = str(DEFAULT_RUNNER_PORT),
    strategy: Annotated[
        str,
        typer.Option(
            "-strategy",
            "--strategy",
            metavar="NAME",
            help="Topology that collectives start with.",
            autocompletion=completion.strategies,
        ),
    ] = DEFAULT_STRATEGY,
    timeout: Annotated[
        str, typer.Option("-timeout", "--timeout", metavar="TIME", help="End the job after this long; 0: never.")
    ] = "0",
    grace: Annotated[
        str, typer.Option("-grace", "--grace", metavar="TIME", help="From SIGTERM to SIGKILL for workers.")
    ] = "10s",
    rendezvous_timeout: Annotated[
        str, typer.Option("--rendezvous-timeout", metavar="TIME", help="How long runners wait for each other.")
    ] = "5m",
    heartbeat_timeout: Annotated[
        str, typer.Option("--heartbeat-timeout", metavar="TIME", help="Workers hold a silent peer for lost after this.")
    ] = "10s",
    logdir: Annotated[
        str, typer.Option("-logdir", "--logdir", metavar="DIR", help="Write each worker's output there too.")
    ] = "",
    logfile: Annotated[
        str, typer.Option("-logfile", "--logfile", metavar="FILE", help="Write the runner's own log there too.")
    ] = "",
    show_output: Annotated[bool, typer.Option("-v/--no-v", "--verbose", help="Show workers' output.")] = True,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Leave out arguments, interfaces and environment.")
    ] = False,
    allow_nvlink: Annotated[
        bool, typer.Option("-allow-nvlink", "--allow-nvlink", help="Leave CUDA_VISIBLE_DEVICES alone.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Start and stop workers as the config server says.")
    ] = False,
    keep: Annotated[bool, typer.Option("-k", "--keep", help="With -w, stay after the workers have finished.")] = False,
    resize_schedule: Annotated[
        str,
        typer.Option(
            "--resize-schedule", metavar="STEP:N,...", help="Ask for N workers after STEP steps; 0: stop. Implies -w."
        ),
    ] = "",
    copies: Annotated[
        str,
        typer.Option("--copies", metavar="N", help="Other workers that keep a replica's context, at least: all do."),
    ] = "1",
    determinism: Annotated[
        str,
        typer.Option(
            "--determinism",
            metavar="D0|D1|D2",
            help="How far equal bits go; D2: other machines too.",
            autocompletion=completion.one_of("D0", "D1", "D2"),
        ),
    ] = "",
    checkpoint_dir: Annotated[
        str, typer.Option("--checkpoint-dir", metavar="DIR", help="Where checkpoints go, on all hosts.")
    ] = "",
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", metavar="STEPS", help="Steps between checkpoints.")
    ] = "0",
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|PATH",
            help="Begin with the newest checkpoint, or this one.",
            autocompletion=completion.one_of("auto"),
        ),
    ] = "",
    monitor: Annotated[
        str,
        typer.Option("--monitor", metavar="NAME=STEPS,...", help="Watch noise_scale or variance, every STEPS steps."),
    ] = "",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME[:K=V,...]",
            help="Adapt by this policy, or module:Class; may be repeated.",
            autocompletion=completion.policies,
        ),
    ] = None,
    record: Annotated[
        str, typer.Option("--record", metavar="FILE", help="Append the facts of the run to this file, as JSON lines.")
    ] = "",
    dash: Annotated[
        str, typer.Option("--dash", metavar="PORT", help="Show the page of `pliant dash` there while the job runs.")
    ] = "",
    replay: Annotated[
        str, typer.Option("--replay", metavar="FILE", help="Take this record's decisions on batch and learning rate.")
    ] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve Prometheus' /metrics on each worker's port + 10000.")
    ] = False,
    tensorboard: Annotated[
        str, typer.Option("--tensorboard", metavar="DIR", help="Write scalars for TensorBoard there.")
    ] = "",
    max_restarts: Annotated[
        str, typer.Option("--max-restarts", metavar="N", help="With -w, replace this many crashed workers.")
    ] = "100",
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="With -w, fork Python workers from one that has torch.")
    ] = True,
    config_server: Annotated[
        str, typer.Option("-config-server", "--config-server", metavar="URL", help="The config server to follow.")
    ] = "",
    builtin_config_port: Annotated[
        str,
        typer.Option("-builtin-config-port", "--builtin-config-port", metavar="PORT", help="Run one here, on it."),
    ] = "0",
    init_version: Annotated[
        str, typer.Option("-init-version", "--init-version", metavar="N", help="Below 0: wait to be added.")
    ] = "0",
    secret_file: Annotated[
        str,
        typer.Option("-secret-file", "--secret-file", metavar="FILE", help="The job's secret; or set PLIANT_SECRET."),
    ] = "",
    state_file: Annotated[
        str, typer.Option("--state-file", metavar="FILE", help="Keep the server's address and workers' pids there.")
    ] = "",
    slot_devices: Annotated[
        str,
        typer.Option("--slot-devices", metavar="FILE", help="JSON list: the CUDA device of each slot, as it is now."),
    ] = "",
    debug_port: Annotated[
        str, typer.Option("-debug-port", "--debug-port", metavar="PORT", help="Serve the runner's state as JSON.")
    ] = "0",
    delay: Annotated[str, typer.Option("-delay", "--delay", metavar="TIME", help="Wait before starting.")] = "0",
    start_time: Annotated[
        str, typer.Option("-t0", "--t0", metavar="UNIX", help="When the job began, for workers to know.")
    ] = "",
) -> None:
    """Run PROGRAM in -np workers; on several hosts, start this with the same flags on each of them, or once with --ssh or --on ray.

    The first failure ends the job. Times are such as 90s, 1m30s, 250ms, or seconds.
    """
    from pliant.launch.options import RunOptions
    from pliant.launch.processes import fill_standard_descriptors

    fill_standard_descriptors()
    far = ssh or on != "local"
    if dash and far and not record:
        raise ConfigError(
            "--dash shows a job on other hosts by its record: add --record FILE, in a folder that this machine can read, too"
        )
    kept = ExitStack()
    if dash and not far and not (record and logdir):  # the page shows both; what nobody asked to keep goes with the job
        place = Path(kept.enter_context(TemporaryDirectory(prefix="pliant-run-")))
        record, logdir = record or str(place / "record.jsonl"), logdir or str(place / "logs")
    options = RunOptions(
        program=tuple(program or ()),
        np=parse_int(np, "-np"),
        hosts=_hosts(hosts, hostfile),
        self_host=self_host,
        nic=nic,
        port_range=PortRange.parse(port_range),
        port=parse_int(port, "-port"),
        strategy=strategy,
        timeout_s=parse_duration(timeout, "-timeout"),
        grace_s=parse_duration(grace, "--grace"),
        rendezvous_timeout_s=parse_duration(rendezvous_timeout, "--rendezvous-timeout"),
        heartbeat_timeout_s=parse_duration(heartbeat_timeout, "--heartbeat-timeout"),
        logdir=logdir,
        show_output=show_output,
        quiet=quiet,
        allow_nvlink=allow_nvlink,
        watch=watch,
        keep=keep,
        warm=warm,
        copies=parse_int(copies, "--copies"),
        determinism=determinism.upper(),
        checkpoint_dir=_absolute(checkpoint_dir),
        checkpoint_every=parse_int(checkpoint_every, "--checkpoint-every"),
        resume=resume if resume == "auto" else _absolute(resume),
        resize_schedule=parse_schedule(resize_schedule),
        adapting=_adapting(monitor, policy or [], record, replay, metrics, tensorboard),
        max_restarts=parse_int(max_restarts, "--max-restarts"),
        config_server=config_server,
        builtin_config_port=parse_int(builtin_config_port, "-builtin-config-port"),
        init_version=parse_int(init_version, "-init-version"),
        secret_file=secret_file,
        state_file=_absolute(state_file),
        slot_devices=_absolute(slot_devices),
        debug_port=parse_int(debug_port, "-debug-port"),
        delay_s=parse_duration(delay, "-delay"),
        start_time_s=_start_time(start_time),
    )
    _set_up_log(logfile)
    on_a_cluster = check_place(on, ray_address, devices)
    with kept, page(dash, os.path.abspath(os.path.join(remote_dir if far else "", record))):
        if on_a_cluster:
            code = on_ray(ctx, options, address=ray_address, devices=devices, directory=remote_dir)
        elif ssh:
            from pliant.cli.run_ssh import over_ssh

            code = over_ssh(ctx, options, user=user, python=remote_python, directory=remote_dir)
        else:
            code = _launch(options)
    raise typer.Exit(code)


def _launch(options: RunOptions) -> int:
    from pliant.jobs.store import registered
    from pliant.launch.output import Console
    from pliant.launch.plan import Machine, describe, make_plan
    from pliant.launch.runner import launch

    check_future_file(options.adapting.get("record", ""), "--record")
    check_future_folder(options.adapting.get("tensorboard", ""), "--tensorboard")
    check_future_folder(options.checkpoint_dir, "--checkpoint-dir")
    machine = Machine.this()
    plan = make_plan(options, machine)
    if not options.quiet:
        for line in describe(plan, machine):
            log.info("%s", line)
    try:
        outcome = launch(plan, machine, register=registered)
    except KeyboardInterrupt:
        return 130  # before there were workers; later it is an event like any other
    if outcome.summary:
        log.info("%s", outcome.summary, extra=PRINTED)
        # Past sys.stdout: a reader that has gone away must not turn a good end into an error.
        Console(1, coloured=False).write(f"{outcome.summary}\n".encode())
    return outcome.code


def _set_up_log(logfile: str) -> None:
    """The runner's own messages: to stderr, and to `-logfile`."""
    ours = logging.getLogger("pliant")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("[%(levelname).1s] %(message)s"))
    console.addFilter(lambda record: not hasattr(record, "printed"))
    ours.addHandler(console)
    if logfile:
        try:
            Path(logfile).parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(logfile)
        except OSError as error:
            raise ConfigError(f"-logfile {logfile}: {error.strerror}; give a file that can be written") from None
        file.setFormatter(logging.Formatter("%(asctime)s [%(levelname).1s] %(message)s"))
        ours.addHandler(file)


def _hosts(listed: str, hostfile: str) -> tuple[Host, ...]:
    if hostfile:
        try:
            text = Path(hostfile).read_text()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give a text file with lines <host> [slots=N]"
            raise ConfigError(f"-hostfile {hostfile}: {reason(error)}; {remedy}") from None
        return parse_hostfile(text, f"-hostfile {hostfile}")
    return parse_hosts(listed) if listed else ()


def _adapting(
    monitor: str, policies: Sequence[str], record: str, replay: str, metrics: bool, tensorboard: str
) -> dict[str, str]:
    """What was said of adaptation, for the workers to read."""
    said = {
        "monitor": monitor,
        "policy": "\n".join(policies),
        "record": _absolute(record),
        "replay": _absolute(replay),
        "metrics": "1" if metrics else "",
        "tensorboard": _absolute(tensorboard),
    }
    return {name: value for name, value in said.items() if value}


def _absolute(path: str) -> str:
    """`path` for programs that go to another directory; empty stays empty."""
    return os.path.abspath(path) if path else ""


def _start_time(text: str) -> float:
    try:
        return float(text) if text else time.time()
    except ValueError:
        raise ConfigError(f"-t0 {text!r} is not a Unix time in seconds, such as `date +%s` prints") from None
