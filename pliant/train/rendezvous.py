"""How workers enter a new view together and agree on the state of the job.

Everybody enters the view and reports what it has. The workers with the newest state are its holders; all others fetch the
state from them, and a torn step is repeated. If a worker is lost meanwhile, there is another membership, and the protocol
starts again. A holder lends its own memory for reading and makes no copy: the parameters do not change before the new
workers have taken part in the next step.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pliant.cluster import Membership
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Member
from pliant.errors import REFUSED_EXIT, CollectiveTimeout, CommError, Mismatch, NotWanted, Refused, TrainError
from pliant.train import state_tree
from pliant.train.buckets import BucketLayout
from pliant.train.context import ReplicaContext
from pliant.train.determinism import Fingerprint, Level, differences
from pliant.train.events import Progress, ViewChange

if TYPE_CHECKING:
    from pliant.train.trainer import Trainer


log = logging.getLogger(__name__)
REPORT_BYTES = 8192
"""The fixed size of a report. With one size for all, a single all_gather exchanges them."""


class Left(SystemExit):
    """Raised when this worker is no longer part of the job, in good order. Ends the program with exit code 0."""

    ends_at_once = True
    """Another process waits for this worker's device, so `launch.warm` ends the process without taking the interpreter
    apart."""

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A worker's report when it enters a view."""

    step: int
    """Steps committed here; -1 without a state."""
    offered_bytes: int
    program: str
    """What must be the same on all workers: replicas, parameters, data."""
    fingerprint: dict[str, Any]
    """The properties of the machine that the bits depend on."""
    stays: bool = False
    """If true, it waits until every member has the state. If false, it trains on while others fetch from it."""

    def to_bytes(self) -> bytes:
        return json.dumps([self.step, self.offered_bytes, self.program, self.fingerprint, self.stays]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberReport:
        return cls(*json.loads(data))


class ViewRendezvous:
    """Takes a trainer into its next view."""

    def __init__(
        self,
        member: Member,
        trainer: Trainer,
        state: JobState,
        program: str,
        fingerprint: Fingerprint,
        level: Level,
        start_job: Callable[[bool], None],
        before_end: Callable[[], None],
        notify: Callable[[str], None],
    ) -> None:
        self._member, self._trainer, self._state = member, trainer, state
        self._program, self._fingerprint, self._level = program, fingerprint, level
        self._start_job = start_job
        """Makes the state to start with. Its argument tells whether the job had a state before and lost it."""
        self._before_end = before_end
        """Called when no worker is left to go on: the last chance to write a checkpoint."""
        self._notify = notify
        self._was_listed = self._announces = False
        self.has_state = False

    def join(self) -> None:
        """Enter the job as a new worker: report that it is ready, and wait to be a member."""
        try:
            self._member.ready()
        except NotWanted as error:
            raise Left(str(error)) from None  # removed while it was starting
        self._enter_next(None)

    def enter_next_view(self) -> None:
        """Leave a view that has ended, at a step's boundary, and enter the next one."""
        trainer = self._trainer
        planned = trainer.switch_to if trainer.torn is None else None
        lost, old_size = trainer.torn is not None, self._member.size
        since_s = trainer.torn_s if lost else trainer.step_ended_s or time.monotonic()
        self._enter_next(planned)
        trainer.changes.begin(since_s, old_size, lost)

    def announce(self, change: ViewChange) -> None:
        """Print and record the change. The first of the workers that were there before does so."""
        if self._announces:
            what = f"recovered at step {change.step}:" if change.lost else "resize"
            again = f", {change.repeated} steps are done again" if change.repeated > 1 else ""
            self._notify(f"{what} {change.old_size} -> {change.new_size} took {change.pause_s * 1e3:.1f}ms{again}")
            self._trainer.adaptation.record(
                "view",
                change.step,
                old=change.old_size,
                new=change.new_size,
                pause_s=change.pause_s,
                lost=change.lost,
                repeated=change.repeated,
            )

    def _enter_next(self, planned: int | None) -> None:
        """Enter `planned`, or else the next membership, until one works."""
        after = self._member.entered
        while True:
            membership = self._member.prepared_membership(planned) if planned is not None else None
            membership = membership or self._member.wait_for_membership(after)
            if self.has_state and not membership.members:
                self._before_end()
            if membership.over:
                raise Left("the job is over")
            view = self._member.view_of(membership)
            if self._member.me not in view.workers:
                if self._member.me not in membership.members and (self.has_state or self._was_listed):
                    raise Left(f"{self._member.me} is not a member of view {membership.number}")
                after, planned = membership.number, None  # stand by: more workers than replicas
                continue
            self._was_listed = self._member.entering = True
            try:
                self._enter(membership, planned is not None)
                return
            except CommError as error:
                if not self._member.elastic or isinstance(error, Mismatch | CollectiveTimeout):
                    raise
                log.debug("membership %d was abandoned: %s", membership.number, error)
                after, planned = max(after, membership.number), None
            finally:
                self._member.entering = False

    def _enter(self, membership: Membership, planned: bool) -> None:
        trainer, member = self._trainer, self._member
        view = member.view_of(membership)
        known = set(trainer.view.workers) if trainer.view is not None else set()
        offered = 0
        reclaim_state(member)
        if self.has_state and view.size > 1 and not (planned and known >= set(view.workers)):
            offered = lend_state(member, membership.number, self._state.read())
        engine = member.enter(membership)
        reports = self._submit_report(engine, "settle", offered, stays=not planned)
        if planned:
            # All members of the old view have committed its last step, so they know that they hold the state. They do
            # not wait for the reports of new workers, who fetch the state while these train on.
            holders = [rank for rank, worker in enumerate(view.workers) if worker in known]
        else:
            holders = self._compare(engine, membership, offered, reports)
        trainer.enter_view(engine)
        trainer.state_fetched = None  # do not wait for new members of an abandoned view
        if view.size > 1:
            token = torch.zeros(1, dtype=torch.uint8)
            trainer.state_fetched = engine.all_reduce("fetched", token, op="max", determinism="fast")
        self._announces = engine.rank == holders[0]

    def _compare(self, engine: Engine, membership: Membership, offered: int, submitted: Handle | None) -> list[int]:
        """Find out who has the newest state, obtain it, and return the ranks that had it."""
        reports = self._reports(submitted, offered)
        holders = _holders(reports)
        if not holders:
            if engine.rank == 0:
                self._start_job(membership.number > 1)
                self.has_state = True
                offered = lend_state(self._member, membership.number, self._state.read())
            reports = self._reports(self._submit_report(engine, "begin", offered), offered)
            holders = _holders(reports)
        self._check(reports, holders[0], engine)
        self._obtain_state(engine, reports, holders)
        return holders

    def _obtain_state(self, engine: Engine, reports: Sequence[MemberReport], holders: Sequence[int]) -> None:
        """Take this worker's part in giving everybody the newest state."""
        source, offered = holders[0], reports[holders[0]].offered_bytes
        lacking = [rank for rank in range(engine.size) if rank not in holders]
        if engine.rank in lacking and not offered:
            # The others have left a view together, in good order as they thought, and lend nothing. This is rare: this
            # worker ends, and its runner starts another.
            raise TrainError(
                f"{self._member.me} missed the last step of a view that the others have left: it has to be replaced"
            )
        relayed = len(lacking) > max(2, len(holders)) and offered > 0 and reports[source].stays
        if relayed and (engine.rank in lacking or engine.rank == source):
            own = self._state.read() if engine.rank == source else None
            state = relay_state(engine, source, lacking, offered, own)
        elif engine.rank in lacking:
            # If models are averaged, every holder has its own: all of the state must come from one.
            sources = holders if self._trainer.averaging is None else holders[:1]
            state = fetch_state(engine, sources, offered)
        if engine.rank in lacking:
            self._state.load(cast(dict[str, Any], state))
            self.has_state = True

    def _report(self, offered: int, stays: bool = True) -> MemberReport:
        step = self._trainer.progress.step if self.has_state else -1
        return MemberReport(step, offered, self._program, self._fingerprint.to_json(), stays)

    def _submit_report(self, engine: Engine, name: str, offered: int, stays: bool = True) -> Handle | None:
        """Send everybody this worker's report; return None if it is alone."""
        if engine.view.size == 1:
            return None
        data = self._report(offered, stays).to_bytes()
        assert len(data) <= REPORT_BYTES, f"a report of {len(data)} bytes"
        row = torch.frombuffer(bytearray(data.ljust(REPORT_BYTES)), dtype=torch.uint8)
        return engine.all_gather(name, row)

    def _reports(self, submitted: Handle | None, offered: int) -> list[MemberReport]:
        if submitted is None:
            return [self._report(offered)]
        rows = submitted.wait()
        assert rows is not None, "an all_gather has a result on every rank"
        return [MemberReport.from_bytes(bytes(row.numpy())) for row in rows]

    def _check(self, reports: Sequence[MemberReport], reference: int, engine: Engine) -> None:
        """Refuse to take part if this program or this machine would change the result."""
        theirs, mine = reports[reference], reports[engine.rank]
        if theirs.program != mine.program:
            raise TrainError(
                f"this worker runs another program than {engine.view.workers[reference]}: {mine.program} here, "
                f"{theirs.program} there; start all workers with the same script and data"
            )
        found = differences(self._fingerprint, Fingerprint.from_json(theirs.fingerprint), self._level)
        if found and engine.rank != reference:
            refused = Refused(
                f"{engine.view.workers[engine.rank]} would change bits under {self._level}: {'; '.join(found)}. "
                "Use alike machines, or `--determinism D2`, which pins what differs"
            )
            print(f"pliant: refused: {refused}", file=sys.stderr, flush=True)
            raise SystemExit(REFUSED_EXIT)

    def equalise(self) -> None:
        """Give every worker the state of the first one. Raises CommError if a worker is lost."""
        engine = self._trainer.engine
        assert engine is not None, "there is a view"
        state = spread_state(engine, self._state.read() if engine.rank == 0 else None)
        if engine.rank != 0:
            self._state.load(cast(dict[str, Any], state))


def _holders(reports: Sequence[MemberReport]) -> list[int]:
    """Return the ranks with the newest state."""
    newest = max(report.step for report in reports)
    return [rank for rank, report in enumerate(reports) if report.step == newest and newest >= 0]


# --- the state of the job ---


class JobState:
    """Reads the whole state of a job from its trainer and the tracked objects, and loads it again."""

    def __init__(self, trainer: Trainer, tracked: dict[str, Any]) -> None:
        self._trainer, self._tracked = trainer, tracked

    def read(self) -> dict[str, Any]:
        """Return all that a new worker must know: references, no copies."""
        trainer = self._trainer
        progress, replicas = trainer.progress, trainer.replicas
        return {
            "progress": [progress.epoch, progress.epoch_step, progress.step],
            "model": trainer.user.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.user.optimizers],
            "tracked": {name: each.state_dict() for name, each in self._tracked.items()},
            "buffers": list(trainer.first_buffers),
            "layout": self._layout(),
            "contexts": [context.to_bytes(replicas.num_loader_workers) for context in replicas.contexts],
            "adaptation": trainer.adaptation.state_dict(),
        }

    def _layout(self) -> list[list[int]] | None:
        """Return L2 once it is in use. Under D0 return None, because a restarted DDP begins with L1 again."""
        gradients = self._trainer.gradients
        if gradients.waits_for_order or not gradients.wanted or not self._trainer.keeps_layout:
            return None
        return gradients.layout.to_json()

    def load(self, state: dict[str, Any]) -> None:
        """Load a state. Raises TrainError if its program tracks other objects."""
        trainer = self._trainer
        missing = set(state["tracked"]) ^ set(self._tracked)
        if missing:
            raise TrainError(f"tracked objects differ between workers or from the checkpoint: {sorted(missing)}")
        trainer.user.model.load_state_dict(state["model"])
        for optimizer, saved in zip(trainer.user.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, saved in state["tracked"].items():
            self._tracked[name].load_state_dict(saved)
        trainer.first_buffers = [
            saved.to(own.device) for saved, own in zip(state["buffers"], trainer.first_buffers, strict=True)
        ]
        trainer.buffers.load(trainer.first_buffers)
        if trainer.averaging is not None:
            trainer.averaging.before_load(state["progress"][2])
        layout = state["layout"]
        trainer.gradients.use_layout(BucketLayout.from_json(layout) if layout is not None else None)
        replicas = trainer.replicas
        replicas.contexts = [ReplicaContext.from_bytes(data, replicas.num_loader_workers) for data in state["contexts"]]
        replicas.count = trainer.gradients.num_replicas = len(replicas.contexts)
        trainer.progress = Progress(*state["progress"])
        if "adaptation" in state:  # old checkpoints have none
            trainer.adaptation.load_state_dict(state["adaptation"])


# --- state between workers ---


_LENT_PREFIX = "state:"
"""The prefix of the names of lent memory."""


def _lent_prefix(view: int) -> str:
    return f"{_LENT_PREFIX}{view}:"


def lend_state(member: Member, view: int, state: object) -> int:
    """Let members of the coming view fetch `state`, before any can ask; return the size of its table of contents."""
    contents, hosts = _pack_state(state)
    member.transport.publish(f"{_lent_prefix(view)}contents", torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    for number, host in enumerate(hosts):
        if host.numel():
            member.transport.publish(f"{_lent_prefix(view)}{number}", host.view(-1))
    return len(contents)


def _pack_state(state: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the table of contents, and the tensors: no copies if they are on the host already."""
    skeleton, tensors = state_tree.flatten(state)
    hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
    return json.dumps({"skeleton": skeleton, "tensors": state_tree.describe_tensors(hosts)}).encode(), hosts


def _allocate(table: dict[str, Any]) -> list[torch.Tensor]:
    """Return room for the tensors of a table of contents."""
    return [torch.empty(shape, dtype=state_tree.dtype_of(dtype)) for dtype, shape in table["tensors"]]


def spread_state(engine: Engine, state: object | None) -> object:
    """Return the state of rank 0 on every rank; the others pass None.

    Raises:
        CommError: a worker is lost.
    """
    contents, tensors = _pack_state(state) if engine.rank == 0 else (b"", None)
    contents = engine.all_gather_bytes("spread", contents)[0]
    return _broadcast(engine, "spread", contents, tensors, 0, None)


def relay_state(engine: Engine, holder: int, lacking: Sequence[int], num_bytes: int, state: object | None) -> object:
    """Return the state of `holder` on all ranks that lack it. These pass shares of it on to each other, so the holder
    sends it about once, however many they are. The holder passes its `state`, whose table of contents has
    `num_bytes`.

    Raises:
        CommError: a worker is lost.
    """
    ranks = sorted([holder, *lacking])
    contents = torch.empty(num_bytes, dtype=torch.uint8)
    tensors: list[torch.Tensor] | None = None
    if engine.rank == holder:
        packed, tensors = _pack_state(state)
        contents = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    engine.broadcast("relay", contents, holder, ranks=ranks).wait()
    return _broadcast(engine, "relay", bytes(contents.numpy()), tensors, holder, ranks)


def _broadcast(
    engine: Engine,
    name: str,
    contents: bytes,
    tensors: list[torch.Tensor] | None,
    holder: int,
    ranks: Sequence[int] | None,
) -> object:
    """Return the holder's state on all these ranks, which have its table of contents. The others pass no tensors."""
    table = json.loads(contents)
    tensors = _allocate(table) if tensors is None else tensors
    waiting = [
        engine.broadcast(f"{name}:{number}", tensor.view(-1).view(torch.uint8), holder, ranks=ranks)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    ]
    for handle in waiting:
        handle.wait()
    return state_tree.unflatten(table["skeleton"], tensors)


def reclaim_state(member: Member) -> None:
    """Stop lending."""
    member.transport.unpublish(_LENT_PREFIX)


def fetch_state(engine: Engine, holders: Sequence[int], num_bytes: int) -> object:
    """Fetch the state that these ranks lend, a share from each.

    Raises:
        CommError: one of them is lost.
    """
    prefix = _lent_prefix(engine.view.number)
    contents = torch.empty(num_bytes, dtype=torch.uint8)
    engine.request(holders[0], f"{prefix}contents", contents).wait()
    table = json.loads(bytes(contents.numpy()))
    tensors = _allocate(table)
    load = dict.fromkeys(holders, 0)
    waiting: list[Handle] = []
    # The largest tensors first, each from the holder with the least to send so far.
    for number, tensor in sorted(enumerate(tensors), key=lambda each: -each[1].nbytes):
        if tensor.numel():
            source = min(load, key=lambda rank: load[rank])
            load[source] += tensor.nbytes
            waiting.append(engine.request(source, f"{prefix}{number}", tensor.view(-1)))
    for handle in waiting:
        handle.wait()
    return state_tree.unflatten(table["skeleton"], tensors)
