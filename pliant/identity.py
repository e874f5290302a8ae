"""The identity of a launched process, as its environment says, and the secret of its job. Torch-free.

A runner writes a `WorkerSpec` to the environment of each worker, and `worker_spec()` reads it back: nothing else reads those
variables. `job_secret` finds or makes the secret with which the processes of a job know each other.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pliant.cluster import View, Worker
from pliant.errors import ConfigError, NotLaunched
from pliant.files import create_private
from pliant.stall_rule import format_stall_timeout, parse_stall_timeout

DEFAULT_STRATEGY = "AUTO"
JOB_NAME = "PLIANT_JOB_NAME"
"""Environment variable by which `pliant serve` tells the processes of a job the job's name."""
SECRET_BYTES = 32
SECRET_REMEDY = (
    "give every runner the same --secret-file or PLIANT_SECRET, or copy ~/.config/pliant/secret to every host"
)


def parse_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `<step>:<workers>,...`, such as `10:2,20:4,100:0`, into pairs in the order of steps.

    Raises:
        ConfigError: with the entry that is not understood.
    """
    pairs: dict[int, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        matched = re.fullmatch(r"(\d+):(\d+)", entry)
        if matched is None:
            raise ConfigError(f"--resize-schedule: {entry!r} is not <step>:<workers>, such as 10:2,20:4,100:0")
        step, size = int(matched[1]), int(matched[2])
        if step in pairs:
            raise ConfigError(f"--resize-schedule: step {step} is listed twice; list it once")
        pairs[step] = size
    return tuple(sorted(pairs.items()))


def parse_verify(text: str, flag: str = "--verify") -> int | None:
    """Parse the number of steps between two comparisons of the workers: 0 for `off`, and None for an empty text.

    Raises:
        ConfigError: it is neither.
    """
    if text in ("", "off"):
        return 0 if text else None
    if re.fullmatch(r"[0-9]{1,9}", text) is None or int(text) < 1:
        raise ConfigError(f"{flag} {text!r}: use a number of steps, 1 or more, or off")
    return int(text)


def format_verify(steps: int | None) -> str:
    return "" if steps is None else str(steps or "off")


def format_schedule(schedule: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{step}:{size}" for step, size in schedule)


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What the workers of one run of `pliant check` have to do."""

    folder: str
    """Where they write the digests of each step."""
    steps: int
    """The job ends after so many steps."""
    grow_at: int = 0
    """After so many steps there will be `grow_to` workers; 0: never."""
    grow_to: int = 0

    def to_text(self) -> str:
        return json.dumps([getattr(self, each.name) for each in fields(self)])

    @classmethod
    def from_text(cls, text: str) -> CheckSettings:
        return cls(*json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Settings that `pliant run` hands on to the workers of a job as they are."""

    strategy: str = DEFAULT_STRATEGY
    """The topology that collectives start with."""
    heartbeat_timeout_s: float = 10.0
    """A peer silent for this long is lost."""
    stall_timeout_s: float | None = None
    """How long a worker may keep the others waiting; None: by its median step; 0: for ever (`pliant.stall_rule`)."""
    determinism: str = ""
    """D0, D1 or D2; empty where the program decides."""
    order: str = ""
    """How the gradients of the replicas are added: ddp or tree; empty where the program decides."""
    allow: tuple[str, ...] = ()
    """Operators that may run without a deterministic kernel, besides those that the program allows."""
    verify: int | None = None
    """Steps between two comparisons of the workers; 0: none; None: what the program says."""
    checkpoint_dir: str = ""
    """Where checkpoints go, as an absolute path; empty means none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 means only when the program asks."""
    resume: str = ""
    """`auto` (the newest good checkpoint, if any), a checkpoint's path, or empty."""
    resize_schedule: tuple[tuple[int, int], ...] = ()
    """(step, number of workers): what to ask for once that many steps are done."""
    adapting: Mapping[str, str] = field(default_factory=dict)
    """The command line's settings of monitors, policies, record, replay, metrics and tensorboard, as typed; empty ones
    are left out."""
    check: CheckSettings | None = None
    """For a run of `pliant check`."""

    def settings(self) -> dict[str, Any]:
        """Return these settings by name, without those of a subclass."""
        return {each.name: getattr(self, each.name) for each in fields(WorkerSettings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec(WorkerSettings):
    """What a launched process must know to find its job, and the settings of the job."""

    worker: Worker
    """The worker that this process is."""
    view: View
    """The view in which the process was started, with this worker in it."""
    secret: bytes = field(repr=False)
    """The secret with which the members of the job know each other."""
    config_server: str = ""
    """URL of the config server; empty where the job has none."""
    listen_fd: int | None = None
    """A listening socket inherited from the runner, so that nobody can take the port in between."""
    board_fd: int | None = None
    """The progress board of the runner (`pliant.progress_board`); None without a runner."""
    board_slot: int = 0
    """This worker's slot there."""
    tls_cert: str = ""
    """Certificate file: connections between hosts are encrypted where it is given."""
    tls_key: str = ""
    """Its private key, where it is not in the same file."""
    token: str = field(default="", repr=False)
    """The token of the config server; empty where it has none."""
    elastic: bool = False
    """Whether the job follows the membership of the config server: workers may come and go."""
    shadow: bool = False
    """Whether the job runs already, so that this worker warms up before it reports that it is ready (`train.shadow`)."""

    def __post_init__(self) -> None:
        self.view.rank_of(self.worker)

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables from which `worker_spec` reads this back."""
        environ = {}
        for each in fields(self):
            write, _ = _TEXT_FORMS.get(each.name, (str, str))
            text = write(getattr(self, each.name))
            if text or each.name not in _OMITTED_IF_EMPTY:
                environ[f"PLIANT_{each.name.upper()}"] = text
        return environ


_OMITTED_IF_EMPTY = ("check", "listen_fd", "board_fd", "tls_cert", "tls_key", "token")
_TEXT_FORMS: dict[str, tuple[Callable[[Any], str], Callable[[str], object]]] = {
    "worker": (str, Worker.parse),
    "view": (lambda view: json.dumps(view.to_json()), lambda text: View.from_json(json.loads(text))),
    "secret": (bytes.hex, bytes.fromhex),
    **dict.fromkeys(("listen_fd", "board_fd"), (lambda number: "" if number is None else str(number), int)),
    "heartbeat_timeout_s": (repr, float),
    "stall_timeout_s": (format_stall_timeout, parse_stall_timeout),
    **dict.fromkeys(("elastic", "shadow"), (lambda is_so: str(int(is_so)), lambda text: text == "1")),
    "allow": (",".join, lambda text: tuple(text.split(","))),
    "verify": (format_verify, parse_verify),
    **dict.fromkeys(("checkpoint_every", "board_slot"), (str, int)),
    "resize_schedule": (format_schedule, parse_schedule),
    "adapting": (lambda settings: json.dumps(dict(settings)), json.loads),
    "check": (lambda settings: settings.to_text() if settings else "", CheckSettings.from_text),
}
"""How fields of a WorkerSpec that are not text are written and read."""


def worker_spec(environ: Mapping[str, str] = os.environ) -> WorkerSpec:
    """Read who this process is from its environment.

    Raises:
        NotLaunched: it was not started by `pliant run`.
        ConfigError: a variable is damaged.
    """
    if "PLIANT_WORKER" not in environ:
        raise NotLaunched("PLIANT_WORKER is unset: start this script with `pliant run`")
    values: dict[str, Any] = {}
    try:
        for each in fields(WorkerSpec):
            text = environ.get(f"PLIANT_{each.name.upper()}", "")
            if text:
                _, read = _TEXT_FORMS.get(each.name, (str, str))
                values[each.name] = read(text)
            elif each.name in ("view", "secret"):
                raise ConfigError(
                    f"PLIANT_{each.name.upper()} is unset or empty although PLIANT_WORKER is set: use `pliant run`"
                )
    except ValueError as error:
        raise ConfigError(f"a PLIANT_ variable is damaged ({error}): start with `pliant run`") from None
    return WorkerSpec(**values)


# --- the secret of a job ---


def parse_secret(text: str, where: str) -> bytes:
    """Return `text` as the bytes of its hex digits if it is hex (16 bytes or more), else as it stands.

    Raises:
        ConfigError: it is empty or too short to keep a stranger out.
    """
    bare = text.strip()
    if len(bare) < 16:
        raise ConfigError(f"{where} has {len(bare)} characters: use 16 or more, such as `openssl rand -hex 32` prints")
    try:
        raw = bytes.fromhex(bare)
    except ValueError:
        return bare.encode(errors="surrogateescape")
    return raw if len(raw) >= 16 else bare.encode()


def read_secret(path: Path) -> bytes:
    """Return the secret in the file `path`; raise ConfigError where it cannot be read."""
    try:
        return parse_secret(path.read_text(errors="surrogateescape"), f"secret file {path}")
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}; give a readable one with --secret-file") from None


def user_secret_path(environ: Mapping[str, str]) -> Path:
    """Return where the secret of a user is kept."""
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(config) / "pliant" / "secret"


def read_or_make_secret(path: Path) -> bytes:
    """Return the user's own secret, made on first use and readable by nobody else.

    With a home directory that the hosts share, every runner of the user finds the same one.
    """
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_private(path, secrets.token_hex(SECRET_BYTES) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot make {path} ({error.strerror}): {SECRET_REMEDY}") from None
    return read_secret(path)


def job_secret(*, secret_file: str, shared: bool, environ: Mapping[str, str]) -> bytes:
    """Return the secret of a job: from `--secret-file`, or, if other runners must know it (`shared`), from PLIANT_SECRET
    or the user's own secret file. Otherwise it is random, so that two jobs of one user differ.
    """
    if secret_file:
        return read_secret(Path(secret_file))
    if not shared:
        return secrets.token_bytes(SECRET_BYTES)
    if environ.get("PLIANT_SECRET"):
        return parse_secret(environ["PLIANT_SECRET"], "PLIANT_SECRET")
    return read_or_make_secret(user_secret_path(environ))
