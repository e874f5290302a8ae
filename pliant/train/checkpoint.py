"""Checkpoints of a job: when they are written, which are kept, and the state that a job starts with.

A checkpoint holds the whole state of a job at the end of one step; any number of workers can load it. Only the first
worker writes, in the background, while training goes on. A file appears under its name only when it is complete and on
the disk, and readers check its digest. A damaged file is reported, and the one before it is used.

A directory may hold checkpoints of several runs. Each run has an id, which its checkpoints have in their metadata, and the
directory says which run has begun in it last. A job that has lost all workers goes on from checkpoints of its own run only.
To begin with a checkpoint of another run, the user names it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pliant.errors import CheckpointError, TrainError
from pliant.files import write_atomic
from pliant.train import determinism
from pliant.train.checkpoint_file import Checkpoint, CheckpointImage, read, read_run, read_step, verify
from pliant.train.context import DataPosition, ReplicaContext, RngState

if TYPE_CHECKING:
    from pliant.train.events import Progress, StepCommitted
    from pliant.train.job_state import JobState


log = logging.getLogger(__name__)
SUFFIX = ".safetensors"
_STEP_NAME = re.compile(r"step-(\d{9,})\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, and keeps the last few. Used by one thread.

    `save` returns when the state is copied. A failure to write is reported with `notify`, and training goes on.
    """

    def __init__(
        self, directory: str | Path, keep: int = 2, notify: Callable[[str], None] = log.warning, run: str = ""
    ) -> None:
        """With a `run`, the directory says that this run has begun in it last, once there is room for that."""
        if keep < 1:
            raise TrainError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.directory = Path(directory)
        self._keep, self._run = keep, run
        self._notify = notify
        self._thread: threading.Thread | None = None
        self._copies: list[torch.Tensor] = []  # the last snapshot: the next one has mostly the same shapes
        self.latest: Path | None = None
        """The last file that is complete and on the disk."""

    def save(self, checkpoint: Checkpoint, name: str | None = None) -> None:
        """Copy the state, and write it in the background. Waits for the write before it.

        Without a name the file is named after the step, and removed when `keep` newer ones exist.
        """
        path = self.directory / _file_name(checkpoint.step, name)
        self.flush()
        image = CheckpointImage(checkpoint, into=self._copies)
        self._copies = image.tensors
        # No daemon: the interpreter waits for it, so a program that ends in good order loses no checkpoint.
        self._thread = threading.Thread(target=self._write, args=(path, image), name="pliant-checkpoint")
        self._thread.start()

    def flush(self) -> None:
        """Wait for the last write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, path: Path, image: CheckpointImage) -> None:
        try:
            image.write(path)
            if self._run and run_in(str(self.directory)) != self._run:
                _name_run(self.directory, self._run)
        except CheckpointError as error:
            self._notify(f"{error}. Training goes on; the next save tries again")
            return
        except OSError as error:
            self._notify(f"{_failure(path, image.nbytes, error)}. Training goes on; the next save tries again")
            return
        self.latest = path
        with contextlib.suppress(OSError):  # not worth a message: the next save tries again
            self._prune(path)

    def _prune(self, written: Path) -> None:
        """Remove files that are too old. Files of later steps belong to another run, and are neither counted nor
        removed."""
        step = _step_of(written)
        if step is None:
            return
        steps = {path: found for path in written.parent.iterdir() if (found := _step_of(path)) is not None}
        ours = sorted((path for path, found in steps.items() if found <= step), key=lambda path: steps[path])
        for path in ours[: -self._keep]:
            path.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, notify: Callable[[str], None] = log.warning) -> Checkpoint:
    """Return the checkpoint in this file, or the newest good one of this directory; its tensors are on the CPU."""
    found = newest_checkpoint(path, notify) if Path(path).is_dir() else Path(path)
    if found is None:
        raise CheckpointError(f"{path} holds no whole checkpoint: name another file or directory, or start without one")
    return read(found)


def newest_checkpoint(
    directory: str | Path, notify: Callable[[str], None] = log.warning, run: str | None = None
) -> Path | None:
    """Return the newest checkpoint of the directory, or of this run there, whose digest is right; None if there is none.

    Files of others are skipped silently, our damaged ones with a warning.
    """
    found: list[tuple[int, float, Path]] = []
    for path in Path(directory).glob(f"*{SUFFIX}"):
        try:
            if run is None or read_run(path) == run:
                found.append((read_step(path), path.stat().st_mtime, path))
        except (CheckpointError, OSError) as error:
            if _step_of(path) is not None:
                notify(f"{error}; trying an older one")
    for _, _, path in sorted(found, reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            notify(f"{error}; trying an older one")
        else:
            return path
    return None


# --- runs ---


_RUN_FILE = ".pliant-run"
"""Holds the id of the run that has begun last in a directory."""


def begin_run(directory: str) -> str:
    """Return a new id for a run, and write it to the directory of its checkpoints. Where that cannot be written to, the first
    checkpoint will do it, or say so."""
    run = secrets.token_hex(4)
    if directory:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            _name_run(Path(directory), run)
        except OSError:
            with contextlib.suppress(OSError):  # this run must not go on from checkpoints of the one before
                (Path(directory) / _RUN_FILE).unlink(missing_ok=True)
    return run


def _name_run(directory: Path, run: str) -> None:
    """Write down which run has begun last in this directory."""
    write_atomic(directory / _RUN_FILE, f"{run}\n")


def run_in(directory: str) -> str:
    """Return the id of the run that has begun last in this directory; empty if it is not known, as in version 0.1."""
    try:
        return (Path(directory) / _RUN_FILE).read_text().strip()
    except (OSError, ValueError):
        return ""


def _step_of(path: Path) -> int | None:
    """Return the step in the name of a file that was named after it."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _file_name(step: int, name: str | None) -> str:
    if name is None:
        return f"step-{step:09d}{SUFFIX}"
    if not _NAME.fullmatch(name):
        raise TrainError(f"a checkpoint cannot be named {name!r}: use letters, digits, and _ . + -")
    return name if name.endswith(SUFFIX) else name + SUFFIX


def _failure(path: Path, nbytes: int, error: OSError) -> str:
    if error.errno in _FULL:
        try:
            free = f", {shutil.disk_usage(path.parent).free:,} free"
        except OSError:
            free = ""
        room, remedy = f" ({nbytes:,} bytes needed{free})", "free some space, keep fewer, or name another directory"
    else:
        room, remedy = f" ({nbytes:,} bytes)", "make it a directory this user may write to, or name another one"
    return f"checkpoint {path} not written{room}: {error.strerror or error}: {remedy}"


class Checkpointing:
    """Decides when a job writes checkpoints, and where."""

    def __init__(
        self,
        state: JobState,
        directory: str,
        every: int,
        meta: dict[str, object],
        notify: Callable[[str], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` has `end_step` called after the step in progress, which else is called every so many steps only."""
        self._state, self._notify, self._wake = state, notify, wake
        self._meta = {"torch": torch.__version__, **meta}
        """What a reader wants to know of the job: its level of determinism, its order."""
        self._directory, self._every = directory, every
        """The job's own directory, empty if it has none; and the number of steps between checkpoints, 0 for never."""
        self._writer: CheckpointWriter | None = None
        self._asked: str | None = None
        """The checkpoint to write when the step or the epoch in progress ends; empty for the job's own directory."""

    def ask(self, path: str) -> None:
        """Ask for a checkpoint at the end of the step or the epoch in progress, whichever comes first."""
        if path:
            _file_name(0, Path(path).name)  # a name that cannot be is refused here and now
        self._asked = path
        self._wake()

    def end_step(self, event: StepCommitted, wait_for_sums: Callable[[], bool]) -> None:
        """Write a checkpoint of the committed step, if one is due or asked for. The first worker does so.

        `wait_for_sums` returns False if the step is taken back instead; it is written when it is repeated. If the program has
        left the epoch in this step, one that is due is written when the epoch has ended: a job that is resumed with it
        must not go on with the epoch's other steps.
        """
        path, self._asked = self._asked, None
        is_due = self._every > 0 and event.step % self._every == 0
        if is_due and event.leaves_epoch and path is None:
            self._asked = ""
            self._wake()
        elif (is_due or path is not None) and event.rank == 0 and wait_for_sums():
            self.write(path or "")

    def end_epoch(self, is_first: bool, wait_for_sums: Callable[[], bool]) -> None:
        """Write the checkpoint that was asked for, or was due, after the program had left the steps of its epoch. The epoch
        has ended, or the whole training."""
        path, self._asked = self._asked, None
        if path is not None and is_first and wait_for_sums():
            self.write(path)

    def write_last(self, *, is_between_steps: bool) -> None:
        """Keep the last state: the job is told to end, or its last worker must leave. A job cannot resume in the middle of
        a step, so the state there is not written."""
        if not self._directory:
            return
        if is_between_steps:
            self.write("")
            self.flush()
            return
        self.flush()
        latest = self._writer.latest if self._writer is not None else None
        counts = (
            f"{latest} is the newest checkpoint" if latest is not None else "no checkpoint was written by this worker"
        )
        self._notify(
            f"the job ended in the middle of step {self._state.progress.step}, and that step is not in a checkpoint: {counts}"
        )

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        self.flush()
        self._writer = None

    def write(self, path: str) -> None:
        """Write the present state, which is that of the last step that counts; without a path to the job's directory."""
        directory = Path(path).parent if path else Path(self._directory or ".")
        state, progress = self._state.read(), self._state.progress
        contexts, run = state.pop("contexts"), str(state.pop("run"))
        if self._writer is None or self._writer.directory != directory:
            self.flush()
            is_own = str(directory) == self._directory
            self._writer = CheckpointWriter(directory, notify=self._notify, run=run if is_own else "")
        self._writer.save(
            Checkpoint(
                step=progress.step,
                epoch=progress.epoch,
                num_replicas=self._state.replicas.count,
                meta={**self._meta, "run": run},
                state=state,
                contexts=contexts,
            ),
            name=Path(path).name if path else None,
        )


def set_initial_state(
    state: JobState,
    device: torch.device,
    had_state: bool,
    *,
    asked: str,
    directory: str,
    random: Callable[[int], RngState],
    first: Progress,
    order: str,
    program: str = "",
    notify: Callable[[str], None],
) -> None:
    """Set the state that a job starts with: from a checkpoint, or as the program has built it.

    Args:
        had_state: whether the job has done steps, and lost its state.
        asked: the checkpoint to start from; `auto` is the newest of `directory`, the job's own.
        random: returns the random state that a replica starts with.
        first: where the program begins, if not from a checkpoint.
        order: how the job adds gradients.
        program: describes the program; it is told if another one has written the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or of a job with another number of replicas or another order.
    """
    count = state.replicas.count
    if count > 1 and order == "ddp" and not (found := determinism.self_check(count)).ok:
        notify(f"warning: the result may change with the number of workers (only D0 holds): {found.detail}")
    damaged: list[str] = []
    path = _find_start(asked, directory, had_state, damaged.append)
    for each in damaged:
        notify(each)
    lost = "all workers with the job's state were lost: " if had_state else ""
    if path is not None:
        loaded = load_checkpoint(path)
        if loaded.num_replicas != count:
            raise CheckpointError(
                f"{path} is of a job with {loaded.num_replicas} replicas, this one has {count}: "
                f"that is another experiment; use replicas={loaded.num_replicas}"
            )
        _check_order(path, loaded, order)
        theirs = str(loaded.meta.get("program", ""))
        if theirs and program and theirs != program:
            notify(f"warning: {path} was written by another program: {theirs} there, {program} here")
        state.adaptation.resumed_at = loaded.step  # before the load, which tells what it goes on with
        state.load({**loaded.state, "contexts": loaded.contexts})  # type: ignore[dict-item]
        notify(f"{lost}resumed from {path} at step {loaded.step}")
        state.run = run_in(directory) if had_state else begin_run(directory)
        return
    state.run = run_in(directory) if had_state else begin_run(directory)
    if had_state:
        why = _why_none(directory, state.run) if directory else "without --checkpoint-dir there is no checkpoint"
        notify(f"{lost}beginning again at step {first.step}, because {why}")
    elif damaged:
        notify(f"no checkpoint in {directory} is whole: beginning at step {first.step}")
    state.use_first_buffers(state.buffers.save())
    own = b"" if state.sync_buffers else bytes(state.buffers.pack(state.first_buffers).numpy())
    state.progress.set(first)
    begin = DataPosition(first.epoch, first.epoch_step)
    state.replicas.contexts = [ReplicaContext(random(replica), begin, own) for replica in range(count)]


def _check_order(path: Path, loaded: Checkpoint, order: str) -> None:
    """Refuse a checkpoint of a job that adds gradients in another order. The sum of two does not depend on it."""
    theirs = str(loaded.meta.get("order", "ddp"))  # version 0.1 had no other
    if theirs != order and loaded.num_replicas > 2:
        raise CheckpointError(
            f"{path} is of a job that adds the gradients of its {loaded.num_replicas} replicas in the order {theirs!r}, this one "
            f"in the order {order!r}: that is another experiment; go on with `pliant run --order {theirs}` or "
            f"pliant.join(order={theirs!r})"
        )


def _why_none(directory: str, run: str) -> str:
    """Return why a run that has lost its state finds no checkpoint to go on from."""
    other = newest_checkpoint(directory, lambda _: None)
    if other is None:
        return f"{directory} holds no whole checkpoint"
    return (
        f"{directory} holds no whole checkpoint of this run ({run or 'without an id'}); {other.name} is of run "
        f"{read_run(other) or 'without an id'}, and `--resume {other}` would begin with it"
    )


def _find_start(asked: str, directory: str, had_state: bool, notify: Callable[[str], None]) -> Path | None:
    """Return the checkpoint that a job starts with, if any; a job that has lost its state does not go back further than it
    must. Checkpoints of other runs count only if they were asked for."""
    path = Path(asked) if asked not in ("", "auto") else None
    if asked != "auto" and not (had_state and directory):
        return path
    newest = newest_checkpoint(directory, notify, None if asked == "auto" else run_in(directory))
    if path is not None and path.is_dir():
        path = newest_checkpoint(path, notify)
    if newest is None or path is None:
        return newest or path
    return max(newest, path, key=read_step)
