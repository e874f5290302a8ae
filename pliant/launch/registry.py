"""Which jobs of this user run on this machine: a small file for each, so that `pliant resize` finds them.

A file lives as long as its runner: it is removed at the end, and one whose runner was killed is
recognised by the process id and start time in it, and dropped by whoever reads it. Only the user can
read it, since it holds what the config server asks for; a directory that others could have written
to is not believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath

from pliant.errors import ConfigError

log = logging.getLogger(__name__)

START_ONE = "start one with `pliant run -w -np 4 train.py`, or name its config server with --config-server URL"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job as its runner has written it down."""

    id: str
    """What `--job` takes."""
    pid: int
    """The runner's process."""
    started_s: float
    """When it was written down, as Unix time."""
    start_ticks: int
    """When the process began, in the kernel's ticks: another process with the same id has another one."""
    config_server: str
    """Its URL."""
    command: str
    """The program and its arguments, as for a shell."""
    host: str
    """The address of this machine in the job."""
    token: str = field(default="", repr=False)
    """What the config server asks for; empty where it asks for nothing."""
    record: str = ""
    """The file of its facts, where `--record` names one."""
    logdir: str = ""
    """Where its workers' output goes, where `-logdir` names a directory."""

    def __str__(self) -> str:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))
        return f"{self.id}  pid {self.pid}  {self.config_server}  since {begun}  {self.command:.80}"

    @classmethod
    def from_json(cls, value: object) -> RunningJob:
        """The job that `value` describes; ConfigError if it describes none."""
        kinds: dict[str, type | tuple[type, ...]] = {"pid": int, "start_ticks": int, "started_s": (int, float)}
        names = [known.name for known in fields(cls)]
        if not isinstance(value, dict) or set(value) != set(names):
            raise ConfigError(f"a running job has {', '.join(names)}, not {value!r:.80}")
        for name in names:
            if isinstance(value[name], bool) or not isinstance(value[name], kinds.get(name, str)):
                raise ConfigError(f"{name!r} of a running job is {value[name]!r:.60}")
        return cls(**value)


@contextlib.contextmanager
def registered(
    config_server: str,
    command: Sequence[str],
    *,
    host: str,
    token: str = "",
    record: str = "",
    logdir: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Iterator[RunningJob]:
    """List this process as a running job for the time of the block.

    Where it cannot be listed (no directory can be written), the job runs all the same: that is logged.
    """
    pid = os.getpid()
    job = RunningJob(
        id=f"{_name(command)}-{pid}",
        pid=pid,
        started_s=time.time(),
        start_ticks=start_ticks(pid) or 0,
        config_server=config_server,
        command=shlex.join(command),
        host=host,
        token=token,
        record=record,
        logdir=os.path.abspath(logdir) if logdir else "",
    )
    file: Path | None = None
    try:
        file = _write(job, _home(environ))
    except (OSError, ConfigError) as error:
        log.warning("`pliant resize` will not find this job by itself (%s): give it --config-server", error)
    try:
        yield job
    finally:
        if file is not None and os.getpid() == pid:  # a forked child leaves the block too
            with contextlib.suppress(OSError):
                file.unlink()


def running_jobs(environ: Mapping[str, str] = os.environ) -> list[RunningJob]:
    """The jobs of this user whose runners live, the oldest first; files of dead ones are removed."""
    jobs = {}
    for folder in _folders(environ):
        with contextlib.suppress(OSError, ConfigError):
            _check_private(folder)
            for file in folder.glob("*.json"):
                if job := _read(file):
                    jobs[job.pid] = job
    return sorted(jobs.values(), key=lambda job: (job.started_s, job.pid))


def choose(jobs: Sequence[RunningJob], wanted: str = "") -> RunningJob:
    """The job whose id or pid is `wanted`; without one, the only job there is.

    Raises:
        ConfigError: there is none, or several; the message lists them.
    """
    if not jobs:
        which = f"--job {wanted}: " if wanted else ""
        raise ConfigError(f"{which}no job of yours with a config server runs on this machine: {START_ONE}")
    found = [job for job in jobs if wanted in (job.id, str(job.pid))] if wanted else jobs
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"  {job}" for job in jobs)
    if wanted:
        raise ConfigError(f"--job {wanted} is none of the running jobs:\n{listed}")
    raise ConfigError(f"{len(jobs)} jobs are running: say which with --job ID\n{listed}")


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot; None if there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may itself hold spaces and parentheses.
    words = text.rpartition(")")[2].split()
    return None if words[0] in ("Z", "X") else int(words[19])


def is_held(lock: Path) -> bool:
    """Whether a living process holds that lock file. Looked at with a shared lock: two who look do not see each other."""
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _folders(environ: Mapping[str, str]) -> list[Path]:
    """Where jobs are listed, the best place first. Readers look at all: not every shell of a user knows the first."""
    roots = [Path(f"/tmp/pliant-{os.getuid()}")]
    if environ.get("XDG_RUNTIME_DIR"):
        roots.insert(0, Path(environ["XDG_RUNTIME_DIR"]))
    return [root / "pliant" / "jobs" for root in roots]


def _home(environ: Mapping[str, str]) -> Path:
    """The directory for this user's jobs, made where it is missing."""
    folders = _folders(environ)
    for folder in folders:
        try:
            # What is in XDG_RUNTIME_DIR is ours to make, the directory itself is not.
            mine = [folder.parent, folder] if folder is not folders[-1] else [*reversed(folder.parents[:2]), folder]
            for part in mine:
                with contextlib.suppress(FileExistsError):
                    part.mkdir(mode=0o700)
            _check_private(folder)
        except (OSError, ConfigError):
            if folder is folders[-1]:
                raise
            continue
        return folder
    raise AssertionError("the last folder is returned or raised for")


def _check_private(folder: Path) -> None:
    """Refuse `folder` if anybody but the user (and root) could have put a file, or the folder itself, there."""
    for part in (folder, folder.parent, folder.parent.parent):
        status = part.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(f"{part} is not a directory that only you can write to: remove it, or chmod it to 700")


def _write(job: RunningJob, folder: Path) -> Path:
    file, draft = folder / f"{job.pid}.json", folder / f"{job.pid}.draft"
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(asdict(job), out)
    draft.replace(file)  # readers see all of it or nothing
    return file


def _read(file: Path) -> RunningJob | None:
    """The job in `file`; None if its runner is gone, and then so is the file."""
    try:
        job = RunningJob.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, ConfigError):
        return None
    if start_ticks(job.pid) == job.start_ticks:
        return job
    with contextlib.suppress(OSError):
        file.unlink()
    return None


def _name(command: Sequence[str]) -> str:
    """What people call the program: the script's name, where there is one."""
    script = next((word for word in command if word.endswith(".py")), command[0] if command else "job")
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in PurePath(script).stem)
    return name or "job"
