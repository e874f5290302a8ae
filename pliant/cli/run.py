"""The `pliant run` command: reads its options, or a job file, and leaves the rest to `pliant.launch`.

`RunArguments` lists the options by panel of the help page. Options that few people need are hidden from it; they are
listed in docs/cli.md. KungFu's spellings with one dash (`-port-range`) and Go's `-q=true` are accepted for all of them.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from pliant.cli import completion, output
from pliant.cli.dash import page_beside
from pliant.cli.output import check_future_file, check_future_folder, parse_int
from pliant.cli.run_ray import check_place, on_ray
from pliant.cluster import DEFAULT_RUNNER_PORT, Host, PortRange, parse_hostfile, parse_hosts
from pliant.duration import parse_duration
from pliant.errors import ConfigError, reason
from pliant.files import LineFileHandler
from pliant.identity import DEFAULT_STRATEGY, CheckSettings, parse_schedule, parse_verify
from pliant.stall_rule import parse_stall_timeout

if TYPE_CHECKING:
    from pliant.jobs.schema import TrainJob
    from pliant.launch.plan import RunOptions

log = logging.getLogger(__name__)

PRINTED = {"printed": True}
"""Marks log records that stdout shows already, so that stderr does not."""
JOB = "pliant.job"
"""Key of the job that `-f` has read, in the context of the command."""


# --- options ---


def _panel(title: str) -> Any:
    """Return a function that makes the options of one panel of the help page; with an empty title, hidden ones."""

    def option(names: str, metavar: str, help: str, complete: completion.Completer | None = None) -> Any:
        more = {"rich_help_panel": title or None, "hidden": not title, "show_default": False}
        return output.option(names, metavar, help, complete, **more)

    return option


_where, _elastic, _state = _panel("Where it runs"), _panel("Elasticity"), _panel("State")
_adapt, _output, _hidden = _panel("Adaptation"), _panel("Output"), _panel("")


# Numbers are taken as text and parsed below: click would answer a wrong one with a page of usage.
@dataclass
class RunArguments:
    """The options of `pliant run` as text."""

    # fmt: off
    np: Annotated[str, _where("-np --np", "N", "Workers in the whole job; default 1.")] = "1"
    file: Annotated[str, _where("-f --file", "JOB.YML", "Job file, as `pliant submit` reads it; other options override it.")] = ""
    hosts: Annotated[str, _where("-H --hosts", "HOST:SLOTS,...", "Machines; default: this one.")] = ""
    hostfile: Annotated[str, _where("--hostfile", "FILE", "One host per line, HOST slots=N.")] = ""
    ssh: Annotated[bool, _where("--ssh", "", "Start the runners of all hosts from here, over ssh without passwords.")] = False
    user: Annotated[str, _where("-u --user", "USER", "With --ssh, the user on the hosts.")] = ""
    on: Annotated[str, _where("--on", "local|ray", "Run on hosts as above, or on a Ray cluster.", completion.one_of("local", "ray"))] = "local"
    devices: Annotated[str, _where("--devices", "TYPE=N,...", "With --on ray, what the job may have, as in t4=2,cpu=4.")] = ""
    remote_dir: Annotated[str, _where("--remote-dir", "DIR", "With --ssh or --on ray, the directory there; default: as here.")] = ""
    plain: Annotated[bool, _where("--plain", "", "For a program that does not train: it need not call pliant.join.")] = False
    secret_file: Annotated[str, _where("--secret-file", "FILE", "The job's secret, if runners are started one by one.")] = ""

    watch: Annotated[bool, _elastic("-w --watch", "", "Let the job be resized, and replace workers that crash.")] = False
    config_server: Annotated[str, _elastic("--config-server", "URL", "Follow this config server, or etcd://HOSTS; default: the job's own.")] = ""
    resize_schedule: Annotated[str, _elastic("--resize-schedule", "STEP:N,...", "Have N workers from STEP on; 0 stops. Implies -w.")] = ""
    max_restarts: Annotated[str, _elastic("--max-restarts", "N", "Replace so many that fail by themselves; 0: nobody; default 100.")] = "100"
    independent: Annotated[bool, _hidden("--independent", "", "With -w, for programs that never join: each worker is replaced by itself.")] = False
    heartbeat_timeout: Annotated[str, _elastic("--heartbeat-timeout", "TIME", "A worker silent for longer is lost; default 10s.")] = "10s"
    stall_timeout: Annotated[str, _elastic("--stall-timeout", "TIME|off", "Replace a worker that hangs; default 60s or more.", completion.one_of("off"))] = ""
    timeout: Annotated[str, _elastic("--timeout", "TIME", "End the job after this long.")] = "0"

    checkpoint_dir: Annotated[str, _state("--checkpoint-dir", "DIR", "Directory of checkpoints, on all hosts.")] = ""
    checkpoint_every: Annotated[str, _state("--checkpoint-every", "STEPS", "Steps between checkpoints.")] = "0"
    resume: Annotated[str, _state("--resume", "auto|PATH", "Begin with the newest checkpoint, or with this one.", completion.one_of("auto"))] = ""
    determinism: Annotated[str, _state("--determinism", "D0|D1|D2", "D0: bits hold until workers change; D1 (default): on any like workers; D2: on unlike machines.", completion.one_of("D0", "D1", "D2"))] = ""
    order: Annotated[str, _state("--order", "ddp|tree", "How gradients are added: as DDP on gloo does (default on CPUs), or along a binary tree (on GPUs).", completion.one_of("ddp", "tree"))] = ""
    allow: Annotated[list[str] | None, _state("--allow", "OPERATOR", "Let this operator run without a deterministic kernel; repeatable.")] = None
    verify: Annotated[str, _state("--verify", "STEPS|off", "Compare the workers' states every STEPS steps; default 100.", completion.one_of("off"))] = ""

    policy: Annotated[list[str] | None, _adapt("--policy", "NAME[:K=V,...]", "Adapt by this policy, or module:Class; repeatable.", completion.policies)] = None
    monitor: Annotated[str, _adapt("--monitor", "NAME=STEPS,...", "Measure noise_scale or variance every STEPS steps.")] = ""
    strategy: Annotated[str, _adapt("--strategy", "NAME", "Topology that collectives start with.", completion.strategies)] = DEFAULT_STRATEGY
    replay: Annotated[str, _adapt("--replay", "FILE", "Repeat this record's decisions on batch and learning rate.")] = ""

    record: Annotated[str, _output("--record", "FILE", "Append the facts of the run, as JSON lines.")] = ""
    dash: Annotated[str, _output("--dash", "PORT", "Show the page of `pliant dash` there.")] = ""
    logdir: Annotated[str, _output("--logdir", "DIR", "Write each worker's output there, too.")] = ""
    tensorboard: Annotated[str, _output("--tensorboard", "DIR", "Write scalars for TensorBoard.")] = ""
    metrics: Annotated[bool, _output("--metrics", "", "Serve Prometheus' /metrics on each worker's port + 10000.")] = False
    quiet: Annotated[bool, _output("-q --quiet", "", "Do not log arguments, interfaces and environment.")] = False

    ray_address: Annotated[str, _hidden("--ray-address", "HOST:PORT", "With --on ray, the cluster; auto: this machine's.")] = "auto"
    remote_python: Annotated[str, _hidden("--remote-python", "PATH", "With --ssh, the hosts' Python; default: as here.")] = ""
    self_host: Annotated[str, _hidden("--self", "HOST", "Which of the hosts this machine is.")] = ""
    nic: Annotated[str, _hidden("--nic", "NAME", "Interface whose address says which host this is.")] = ""
    port_range: Annotated[str, _hidden("--port-range", "BEGIN-END", "Ports for workers.")] = str(PortRange())
    port: Annotated[str, _hidden("--port", "PORT", "Port at which runners of several hosts meet.")] = str(DEFAULT_RUNNER_PORT)
    grace: Annotated[str, _hidden("--grace", "TIME", "Time from SIGTERM to SIGKILL for workers.")] = "10s"
    rendezvous_timeout: Annotated[str, _hidden("--rendezvous-timeout", "TIME", "How long runners wait for each other.")] = "5m"
    logfile: Annotated[str, _hidden("--logfile", "FILE", "Write the runner's own log there, too.")] = ""
    show_output: Annotated[bool, _hidden("-v/--no-v --verbose", "", "Show workers' output.")] = True
    allow_nvlink: Annotated[bool, _hidden("--allow-nvlink", "", "Leave CUDA_VISIBLE_DEVICES alone.")] = False
    keep: Annotated[bool, _hidden("-k --keep", "", "With -w, stay after the workers have finished.")] = False
    warm: Annotated[bool | None, _hidden("--warm/--no-warm", "", "Fork Python workers from one that has imported torch; default: with -w, except for --plain.")] = None
    builtin_config_port: Annotated[str, _hidden("--builtin-config-port", "PORT", "Port of the job's own config server.")] = "0"
    init_version: Annotated[str, _hidden("--init-version", "N", "Below 0: wait to be added.")] = "0"
    state_file: Annotated[str, _hidden("--state-file", "FILE", "Keep the server's address and workers' pids there.")] = ""
    slot_devices: Annotated[str, _hidden("--slot-devices", "FILE", "JSON list: the CUDA device of each slot.")] = ""
    debug_port: Annotated[str, _hidden("--debug-port", "PORT", "Serve the runner's state as JSON.")] = "0"
    delay: Annotated[str, _hidden("--delay", "TIME", "Wait before starting.")] = "0"
    start_time: Annotated[str, _hidden("--t0", "UNIX", "When the job began; workers find it in PLIANT_JOB_START.")] = ""
    check: Annotated[str, _hidden("--check", "JSON", "")] = ""
    # fmt: on

    def to_options(self, program: Sequence[str]) -> RunOptions:
        """Parse and check all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        from pliant.launch.plan import RunOptions

        return RunOptions(
            program=tuple(program),
            np=parse_int(self.np, "-np"),
            hosts=read_hosts(self.hosts, self.hostfile),
            self_host=self.self_host,
            nic=self.nic,
            port_range=PortRange.parse(self.port_range),
            port=parse_int(self.port, "-port"),
            strategy=self.strategy,
            timeout_s=parse_duration(self.timeout, "-timeout"),
            grace_s=parse_duration(self.grace, "--grace"),
            rendezvous_timeout_s=parse_duration(self.rendezvous_timeout, "--rendezvous-timeout"),
            heartbeat_timeout_s=parse_duration(self.heartbeat_timeout, "--heartbeat-timeout"),
            stall_timeout_s=parse_stall_timeout(self.stall_timeout),
            logdir=self.logdir,
            show_output=self.show_output,
            quiet=self.quiet,
            allow_nvlink=self.allow_nvlink,
            watch=self.watch,
            keep=self.keep,
            plain=self.plain,
            warm=self.warm,
            determinism=self.determinism.upper(),
            order=self.order.lower(),
            allow=tuple(self.allow or ()),
            verify=parse_verify(self.verify.lower()),
            checkpoint_dir=_absolute(self.checkpoint_dir),
            checkpoint_every=parse_int(self.checkpoint_every, "--checkpoint-every"),
            resume=self.resume if self.resume == "auto" else _absolute(self.resume),
            resize_schedule=parse_schedule(self.resize_schedule),
            adapting=self._adaptation(),
            check=CheckSettings.from_text(self.check) if self.check else None,
            max_restarts=parse_int(self.max_restarts, "--max-restarts"),
            independent=self.independent,
            config_server=self.config_server,
            builtin_config_port=parse_int(self.builtin_config_port, "-builtin-config-port"),
            init_version=parse_int(self.init_version, "-init-version"),
            secret_file=self.secret_file,
            state_file=_absolute(self.state_file),
            slot_devices=_absolute(self.slot_devices),
            debug_port=parse_int(self.debug_port, "-debug-port"),
            delay_s=parse_duration(self.delay, "-delay"),
            start_time_s=_start_time(self.start_time),
        )

    def _adaptation(self) -> dict[str, str]:
        """Return the settings of adaptation that workers read."""
        settings = {
            "monitor": self.monitor,
            "policy": "\n".join(self.policy or ()),
            "record": _absolute(self.record),
            "replay": _absolute(self.replay),
            "metrics": "1" if self.metrics else "",
            "tensorboard": _absolute(self.tensorboard),
        }
        return {name: value for name, value in settings.items() if value}


# --- the command ---


class RunCommand(TyperCommand):
    """A command that accepts KungFu's spellings, and takes options and program from a job file."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        has_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        }
        off = {name: param.secondary_opts[0] for param in self.params if param.secondary_opts for name in param.opts}
        flags, program = split_flags(args, has_value, off)
        file = next((value for flag, value in pairwise(flags) if flag in ("-f", "--file")), "")
        if file and not ctx.resilient_parsing:
            job = _read_train_job(file)
            ctx.meta[JOB] = job
            placed = ["--np", str(job.workers or job.max), *(["--hosts", job.hosts] if job.hosts else [])]
            flags = [*placed, *job.run_flags(), *flags]
            program = program or [job.program, *job.args]
        is_module = program[:1] == ["-m"]  # no option of ours, although it looks like one
        return super().parse_args(ctx, [*flags, *(["--"] if is_module else []), *program])


def split_flags(
    arguments: Sequence[str], has_value: Mapping[str, bool], off: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Split the arguments into options, in the spelling of `has_value`, and the program with its own arguments.

    `-port-range 1-9` becomes `--port-range 1-9`, `-q=true` becomes `-q`, and `-q=false` is left out.

    Args:
        has_value: all options, and whether each takes a value.
        off: the options that turn others off.
    """
    rest = list(arguments)
    flags: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("--", "-m"):
        name, equals, value = rest.pop(0).partition("=")
        if name not in has_value and f"-{name}" in has_value:
            name = f"-{name}"
        if equals and has_value.get(name) is False and value.lower() in ("true", "false", "1", "0"):
            is_on = value.lower() in ("true", "1")
            flags += [name] if is_on else [off[name]] if name in off else []
        elif equals and has_value.get(name):
            flags += [name, value]
        else:
            flags.append(f"{name}{equals}{value}")
            if has_value.get(name) and rest:
                flags.append(rest.pop(0))
    return flags, rest


def _read_train_job(file: str) -> TrainJob:
    from pliant.jobs.schema import TrainJob, read_job

    job = read_job(Path(file)).job
    if not isinstance(job, TrainJob):
        raise ConfigError(f"-f {file} describes a federated job: `pliant fed run {file}` runs it")
    return job


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": False}
    app.command("run", cls=RunCommand, context_settings=settings)(run)


def run(
    ctx: typer.Context,
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM|-m MODULE [ARGS]...", show_default=False)
    ] = None,
    **given: Any,
) -> None:
    """Run PROGRAM, or a Python module, in -np workers. On several hosts, start this on each of them, or once with --ssh or --on ray.

    The first failure ends the job, unless -w is given. Times are such as 90s, 1m30s, 250ms, or seconds.
    """
    from pliant.launch.processes import fill_standard_descriptors

    fill_standard_descriptors()
    arguments = RunArguments(**given)
    far = arguments.ssh or arguments.on != "local"
    if arguments.dash and far and not arguments.record:
        raise ConfigError(
            "--dash shows a job on other hosts by its record: add --record FILE, in a folder that this machine can read, too"
        )
    with ExitStack() as stack:
        if arguments.dash and not far and not (arguments.record and arguments.logdir):
            # The page shows both. Nobody asked to keep them, so they go with the job.
            place = Path(stack.enter_context(TemporaryDirectory(prefix="pliant-run-")))
            arguments.record = arguments.record or str(place / "record.jsonl")
            arguments.logdir = arguments.logdir or str(place / "logs")
        options = arguments.to_options(program or ())
        _set_up_log(arguments.logfile)
        on_a_cluster = check_place(arguments.on, arguments.ray_address, arguments.devices)
        shown = os.path.abspath(os.path.join(arguments.remote_dir if far else "", arguments.record))
        if JOB in ctx.meta:
            job: TrainJob = ctx.meta[JOB]
            os.environ.update(job.env)
            os.chdir(job.directory)
        stack.enter_context(page_beside(arguments.dash, shown))
        if on_a_cluster:
            address, directory = arguments.ray_address, arguments.remote_dir
            code = on_ray(ctx, options, address=address, devices=arguments.devices, directory=directory)
        elif arguments.ssh:
            from pliant.cli.run_ssh import over_ssh

            python, directory = arguments.remote_python, arguments.remote_dir
            code = over_ssh(ctx, options, user=arguments.user, python=python, directory=directory)
        else:
            code = _launch(options)
    raise typer.Exit(code)


def _set_signature() -> None:
    """Give `run` the options of `RunArguments` as parameters, which typer reads from its signature."""
    hints = get_type_hints(RunArguments, include_extras=True)
    own = list(inspect.signature(run, eval_str=True).parameters.values())[:2]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(RunArguments)
    ]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]


_set_signature()


def _launch(options: RunOptions) -> int:
    from pliant.jobs.store import registered
    from pliant.launch.output import Console
    from pliant.launch.plan import Machine, describe, make_plan
    from pliant.launch.runner import launch
    from pliant.tokens import state_directory

    check_future_file(options.adapting.get("record", ""), "--record")
    check_future_folder(options.adapting.get("tensorboard", ""), "--tensorboard")
    check_future_folder(options.checkpoint_dir, "--checkpoint-dir")
    machine = Machine.this()
    plan = make_plan(options, machine)
    if not options.quiet:
        for line in describe(plan, machine):
            log.info("%s", line)
    try:
        outcome = launch(
            plan,
            machine,
            register=None if options.independent else registered,
            servers=state_directory(machine.environ) / "servers",
        )
    except KeyboardInterrupt:
        return 130  # before there were workers; afterwards the runner handles it
    if outcome.summary:
        log.info("%s", outcome.summary, extra=PRINTED)
        # Not through sys.stdout: a reader that has gone away must not turn success into an error.
        Console(1, coloured=False).write(f"{outcome.summary}\n".encode())
    return outcome.code


def _set_up_log(logfile: str) -> None:
    """Send the runner's own messages to stderr and to `--logfile`."""
    ours = logging.getLogger("pliant")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("[%(levelname).1s] %(message)s"))
    console.addFilter(lambda record: not hasattr(record, "printed"))
    ours.addHandler(console)
    if logfile:
        try:
            file = LineFileHandler(logfile)
        except OSError as error:
            raise ConfigError(f"-logfile {logfile}: {error.strerror}; give a file that can be written") from None
        file.setFormatter(logging.Formatter("%(asctime)s [%(levelname).1s] %(message)s"))
        ours.addHandler(file)


def read_hosts(listed: str, hostfile: str) -> tuple[Host, ...]:
    """Return the hosts of `--hostfile`, or else of `--hosts`; empty means this machine."""
    if hostfile:
        try:
            text = Path(hostfile).read_text()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give a text file with lines <host> [slots=N]"
            raise ConfigError(f"-hostfile {hostfile}: {reason(error)}; {remedy}") from None
        return parse_hostfile(text, f"-hostfile {hostfile}")
    return parse_hosts(listed) if listed else ()


def _start_time(text: str) -> float:
    try:
        return float(text) if text else time.time()
    except ValueError:
        raise ConfigError(f"-t0 {text!r} is not a Unix time in seconds, such as `date +%s` prints") from None


def _absolute(path: str) -> str:
    """Return `path` for programs that change their directory; empty stays empty."""
    return os.path.abspath(path) if path else ""
