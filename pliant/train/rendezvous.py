"""How workers enter a new view together and agree on the state of the job.

Everybody enters the view and reports what it has. The workers with the newest state are its holders; all others fetch the
state from them, and a torn step is repeated. If a worker is lost meanwhile, there is another membership, and the protocol
starts again. A holder lends its tensors as they are, on their device, and they leave it when somebody asks: the parameters do
not change before the new workers have taken part in the next step.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pliant.cluster import Membership
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.elastic.member import Member
from pliant.errors import (
    GIVEN_UP,
    GIVEN_UP_EXIT,
    REFUSED_EXIT,
    CollectiveTimeout,
    CommError,
    Mismatch,
    MustBeReplaced,
    NotWanted,
    Refused,
)
from pliant.train import state_tree
from pliant.train.determinism import Fingerprint, Level, differences
from pliant.train.phases import Report, ranks_behind

if TYPE_CHECKING:
    from pliant.train.job_state import JobState

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


class GivenUp(Left):
    """Raised when the others have given this worker up, though it lives. Ends the program with a code that has it replaced."""

    ends_at_once = False

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.code = GIVEN_UP_EXIT


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A worker's report when it enters a view."""

    passes: int
    """Passes that count here; -1 without a state."""
    has_sums: bool
    """Whether the sums of the next pass are here."""
    in_step: bool
    """Whether a pass of the present step counts here already."""
    offered_bytes: int
    program: str
    """What must be the same on all workers: replicas, parameters, data."""
    fingerprint: dict[str, Any]
    """The properties of the machine that the bits depend on."""
    stays: bool = False
    """If true, it waits until every member has the state. If false, it trains on while others fetch from it."""

    def to_bytes(self) -> bytes:
        return json.dumps(list(astuple(self))).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberReport:
        return cls(*json.loads(data))

    @property
    def of_phases(self) -> Report:
        return Report(self.passes, self.has_sums, self.in_step)


@dataclass(frozen=True, slots=True)
class EnteredView:
    """A view that this worker has entered."""

    engine: Engine
    reports: Sequence[MemberReport]
    """Those of all workers; after a planned change only this worker's own."""
    announces: bool
    """Whether this worker tells about the change."""
    was_planned: bool
    """Whether all workers of the last view had agreed on it; else one of them was lost, or the job begins."""
    made_state: bool = False
    """Whether this worker has made the state that it starts with."""


class ViewRendezvous:
    """Takes a worker into its next view."""

    def __init__(
        self,
        member: Member,
        state: JobState,
        program: str,
        fingerprint: Fingerprint,
        level: Level,
        start_job: Callable[[bool], None],
        before_end: Callable[[bool], None],
        begin_wait: Callable[[Engine], None] = lambda engine: None,
    ) -> None:
        self._member, self._state = member, state
        self._program, self._fingerprint, self._level = program, fingerprint, level
        self._start_job = start_job
        """Makes the state to start with. Its argument tells whether the job has done steps, and lost its state."""
        self._before_end = before_end
        """Called when no worker is left to go on: the last chance to write a checkpoint. Its argument tells whether the
        state is that of the end of a step."""
        self._begin_wait = begin_wait
        """Called when this worker has reported what it has, and waits for the reports of the others."""
        self._was_listed = False
        self._engine: Engine | None = None
        self._lent: set[int] = set()
        """The views for which this worker may lend its state."""
        self.has_state = False
        self._own: Mapping[state_tree.Place, torch.Tensor] | None = None
        """Where the state can be written, if that is known already."""
        self._is_torn = False
        """Whether a part of a state has been written over what the program has built."""
        self._sources: tuple[Sequence[int], int] = (), 0
        """The ranks from which the state was fetched last, and the size of its table of contents."""

    def report_ready(self) -> None:
        """Report that this worker can take part, as a new one."""
        try:
            self._member.ready()
        except NotWanted as error:
            raise Left(str(error)) from None  # removed while it was starting

    def enter(self, planned: int | None, own: Report) -> EnteredView:
        """Enter `planned`, or else the next membership, until one works. `own` is what this worker reports.

        Raises:
            Left: this worker is no longer part of the job, or the job is over.
        """
        after, stood_by = self._member.entered, False
        while True:
            membership = self._member.prepared_membership(planned) if planned is not None else None
            membership = membership or self._member.wait_for_membership(after)
            has_finished = membership.over and not self._member.was_told_to_end
            if not membership.members and self.has_state and not has_finished and not stood_by:
                self._end_job(own, is_agreed=membership.number == planned)
            if membership.over:
                raise Left("the job is over")
            view = self._member.view_of(membership)
            if self._member.me not in view.workers:
                self._check_dropped(membership)
                after, planned, stood_by = membership.number, None, True  # it may take part later
                continue
            self._was_listed = self._member.entering = True
            try:
                return self._enter(membership, planned is not None, own)
            except CommError as error:
                if not self._member.elastic or isinstance(error, Mismatch | CollectiveTimeout):
                    raise
                log.debug("membership %d was abandoned: %s", membership.number, error)
                after, planned = max(after, membership.number), None
            finally:
                self._member.entering = False

    def _end_job(self, own: Report, *, is_agreed: bool) -> None:
        """Take this worker's part in the end of a job that was told to end. Where all workers have agreed on it
        (`is_agreed`), each waits until all have come here: they all end after the same step, and the first writes a
        checkpoint of it. Else a worker was lost, or somebody would not wait any longer."""
        self._before_end(not own.in_step)
        if is_agreed and self._engine is not None and self._engine.size > 1:
            with contextlib.suppress(CommError):
                self._engine.barrier("end")

    def _check_dropped(self, membership: Membership) -> None:
        """Return if this worker may stand by, though it does not take part in `membership`.

        Raises:
            Left: it is no longer part of the job.
            MustBeReplaced: it had just got the state when another worker was lost.
        """
        member = self._member
        if member.me in membership.members:
            return
        if self.has_state and member.is_wanted and membership.urgent > member.entered:
            raise MustBeReplaced(
                f"{member.me} had just got the state of the job when another worker was lost: the others are in the middle "
                "of a step that it cannot join. It ends, and its runner starts another in its place"
            )
        if self.has_state and member.is_given_up(membership):
            why = f"{member.me} was silent, or kept the others waiting, and is not in view {membership.number}"
            print(f"pliant: {GIVEN_UP}: {why}; its runner starts another", file=sys.stderr, flush=True)
            raise GivenUp(why)
        if self.has_state or (self._was_listed and not member.is_wanted):
            raise Left(f"{member.me} is not a member of view {membership.number}")

    def _enter(self, membership: Membership, planned: bool, own: Report) -> EnteredView:
        member = self._member
        view = member.view_of(membership)
        known = set(self._engine.view.workers) if self._engine is not None else set()
        offered = 0
        if self.has_state and view.size > 1 and not (planned and known >= set(view.workers)):
            lent = self._state.read()
            lent["tracked"] = copy.deepcopy(lent["tracked"])  # the program may change them before its next pass
            offered = lend_state(member, membership.number, lent)
        self._lent.add(membership.number)
        engine = self._engine = member.enter(membership)
        for number in self._lent - {membership.number}:  # until now somebody in an older view may have asked for it
            reclaim_state(member, number)
        self._lent = {membership.number}
        report = self._report(own, offered, stays=not planned)
        submitted = self._submit_report(engine, "settle", report)
        reports: Sequence[MemberReport] = [report]
        made_state = False
        if planned:
            # All members of the old view have done its last pass, so they know that they hold the state. They do not
            # wait for the reports of new workers, who fetch the state while these train on.
            first = next(rank for rank, worker in enumerate(view.workers) if worker in known)
        else:
            if self.has_state:
                self._begin_wait(engine)
            self._own = self._state.own_tensors() if not self.has_state and engine.size > 1 else None
            reports = self._wait_for_reports(submitted, report)
            if not _holders(reports):
                if engine.rank == 0 and self._is_torn:
                    raise MustBeReplaced(
                        f"{member.me} was receiving the state when the last worker that had it was lost: its parameters are "
                        "not those that its program has built. It ends, and its runner starts another"
                    )
                if engine.rank == 0:
                    self._start_job(membership.begun)
                    self.has_state = made_state = True
                    offered = lend_state(member, membership.number, self._state.read())
                    report = self._report(Report(self._state.progress.passes), offered, stays=True)
                reports = self._wait_for_reports(self._submit_report(engine, "begin", report), report)
            first = _holders(reports)[0]
            self._check(reports, first, engine)
        return EnteredView(engine, reports, engine.rank == first, planned, made_state)

    def share_state(self, view: EnteredView) -> None:
        """Take this worker's part in giving everybody the newest state. Raises CommError if a worker is lost."""
        engine, reports = view.engine, view.reports
        holders = _holders(reports)
        source, offered = holders[0], reports[holders[0]].offered_bytes
        lacking = ranks_behind([report.of_phases for report in reports])
        if engine.rank in lacking and not offered:
            # The others have left a view together, in good order as they thought, and lend nothing. This is rare: this
            # worker ends, and its runner starts another.
            raise MustBeReplaced(
                f"{self._member.me} missed the last step of a view that the others have left: it has to be replaced"
            )
        # On one host a holder copies the state once for all of them, as they read it at about the same time.
        hosts = {engine.view.hosts[rank] for rank in lacking}
        relayed = len(lacking) > max(2, len(holders)) and len(hosts) > 1 and offered > 0 and reports[source].stays
        if relayed and (engine.rank in lacking or engine.rank == source):
            own = self._state.read() if engine.rank == source else None
            state = relay_state(engine, source, lacking, offered, own)
            if engine.rank in lacking:
                self._state.load(cast(dict[str, Any], state))
        elif engine.rank in lacking:
            # If models are averaged, every holder has its own: all of the state must come from one.
            self._sources = holders if self._state.averaging is None else holders[:1], offered
            self._fetch(engine)
        self.has_state = self.has_state or engine.rank in lacking

    def _fetch(self, engine: Engine) -> None:
        """Fetch the state and load it: straight in this worker's own tensors, unless it has an older state. Such a state
        is kept until the new one is here, because it may be the only one that is left."""
        in_place = not self.has_state
        own, self._own = self._own, None
        if in_place and own is None:
            own = self._state.own_tensors()
        own, device = (own, self._state.device) if in_place else (None, None)
        self._is_torn = self._is_torn or in_place
        state = fetch_state(engine, *self._sources, own, device)
        self._state.load(cast(dict[str, Any], state), in_place=in_place)
        self._is_torn = False

    def reload_state(self) -> None:
        """Load the state that was fetched last once more: what the program has done to it since does not count."""
        if self._state.reload():
            return
        engine, self.has_state = self._engine, False
        assert engine is not None, "it was fetched in a view"
        try:
            self._fetch(engine)  # it is lent until this worker has done a step
        except CommError as error:
            raise MustBeReplaced(
                f"the program of {self._member.me} has changed parameters before its first step, and the state could not be "
                f"fetched once more ({error}): it has to be replaced"
            ) from None
        self.has_state = True
        self._state.forget_loaded()

    def report_fetched(self, view: EnteredView) -> Handle | None:
        """Report that this worker has the state; return what is done when everybody in the view has it."""
        if view.engine.size == 1:
            return None
        with contextlib.suppress(CommError):  # a worker is lost: the next exchange will fail
            token = torch.zeros(1, dtype=torch.uint8)
            return view.engine.all_reduce("fetched", token, op="max", order="fast")
        return None

    def _report(self, own: Report, offered: int, *, stays: bool) -> MemberReport:
        fingerprint = self._fingerprint.to_json()
        return MemberReport(own.passes, own.has_sums, own.in_step, offered, self._program, fingerprint, stays)

    def _submit_report(self, engine: Engine, name: str, report: MemberReport) -> Handle | None:
        """Send everybody this worker's report; return None if it is alone."""
        if engine.view.size == 1:
            return None
        data = report.to_bytes()
        assert len(data) <= REPORT_BYTES, f"a report of {len(data)} bytes"
        row = torch.frombuffer(bytearray(data.ljust(REPORT_BYTES)), dtype=torch.uint8)
        return engine.all_gather(name, row)

    def _wait_for_reports(self, submitted: Handle | None, own: MemberReport) -> list[MemberReport]:
        if submitted is None:
            return [own]
        rows = submitted.wait()
        assert rows is not None, "an all_gather has a result on every rank"
        return [MemberReport.from_bytes(bytes(row.numpy())) for row in rows]

    def _check(self, reports: Sequence[MemberReport], reference: int, engine: Engine) -> None:
        """Refuse to take part if this program or this machine would change the result."""
        theirs, mine = reports[reference], reports[engine.rank]
        if theirs.program != mine.program:
            raise Refused(
                f"this worker runs another program than {engine.view.workers[reference]}: {mine.program} here, "
                f"{theirs.program} there; start all workers with the same script, options and data"
            )
        found = differences(self._fingerprint, Fingerprint.from_json(theirs.fingerprint), self._level)
        if found and engine.rank != reference:
            refused = Refused(
                f"{engine.view.workers[engine.rank]} would change bits under {self._level}: {'; '.join(found)}. "
                "Make this machine like the others. Under D1, `--determinism D2` admits other processors and GPUs; D0 admits "
                "every machine, but then a change of workers may change bits"
            )
            print(f"pliant: refused: {refused}", file=sys.stderr, flush=True)
            raise SystemExit(REFUSED_EXIT)

    def equalise(self) -> None:
        """Give every worker the state of the first one. Raises CommError if a worker is lost."""
        engine = self._engine
        assert engine is not None, "there is a view"
        state = spread_state(engine, self._state.read() if engine.rank == 0 else None)
        if engine.rank != 0:
            self._state.load(cast(dict[str, Any], state))


def _holders(reports: Sequence[MemberReport]) -> list[int]:
    """Return the ranks with the newest state."""
    newest = max(report.passes for report in reports)
    return [rank for rank, report in enumerate(reports) if report.passes == newest and newest >= 0]


# --- state between workers ---


_LENT_PREFIX = "state:"
"""The prefix of the names of lent memory."""


def _lent_prefix(view: int) -> str:
    return f"{_LENT_PREFIX}{view}:"


def lend_state(member: Member, view: int, state: object) -> int:
    """Let members of the coming view fetch `state`, before any can ask; return the size of its table of contents. The
    tensors stay where they are: nothing is copied until somebody asks."""
    skeleton, tensors = state_tree.flatten(state)
    tensors = [tensor.detach().contiguous() for tensor in tensors]
    contents = _contents(skeleton, tensors)
    prefix = _lent_prefix(view)
    member.transport.lend(f"{prefix}contents", [torch.frombuffer(bytearray(contents), dtype=torch.uint8)])
    member.transport.lend(f"{prefix}tensors", tensors)
    return len(contents)


def _contents(skeleton: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the table of contents of a state."""
    on_device = [number for number, tensor in enumerate(tensors) if tensor.is_cuda]
    described = state_tree.describe_tensors(tensors)
    return json.dumps({"skeleton": skeleton, "tensors": described, "on_device": on_device}).encode()


def _pack_state(state: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the table of contents, and the tensors on the host: no copies if they are there already."""
    skeleton, tensors = state_tree.flatten(state)
    hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
    return _contents(skeleton, hosts), hosts


def _allocate(
    table: dict[str, Any],
    own: Mapping[state_tree.Place, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Return room for the tensors of a table of contents: that of `own` ones where they are alike, else new ones, on
    `device` if their holder has them on a device."""
    own = own or {}
    places = state_tree.places(table["skeleton"]) if own else {}
    on_device = set(table["on_device"]) if device is not None else set()
    made = []
    for number, (dtype, shape) in enumerate(table["tensors"]):
        found = own.get(places[number]) if number in places else None
        if found is None or list(found.shape) != shape or state_tree.dtype_name(found.dtype) != dtype:
            where = device if number in on_device else None
            found = torch.empty(shape, dtype=state_tree.dtype_of(dtype), device=where)
        made.append(found)
    return made


def spread_state(engine: Engine, state: object | None, source: int = 0) -> object:
    """Return the state of rank `source` on every rank; the others pass None.

    Raises:
        CommError: a worker is lost.
    """
    contents, tensors = _pack_state(state) if engine.rank == source else (b"", None)
    contents = engine.all_gather_bytes("spread", contents)[source]
    return _broadcast(engine, "spread", contents, tensors, source, None)


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


def reclaim_state(member: Member, view: int | None = None) -> None:
    """Stop lending to the members of this view, or to all."""
    member.transport.reclaim(_LENT_PREFIX if view is None else _lent_prefix(view))


def fetch_state(
    engine: Engine,
    holders: Sequence[int],
    num_bytes: int,
    own: Mapping[state_tree.Place, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> object:
    """Fetch the state that these ranks lend, a share from each. What has its place in `own` is written there; for the rest
    there is new memory, on `device` if it is on a device there.

    Raises:
        CommError: one of them is lost. What is `own` may be written to in part.
    """
    prefix = _lent_prefix(engine.view.number)
    contents = torch.empty(num_bytes, dtype=torch.uint8)
    engine.request(holders[0], f"{prefix}contents", contents).wait()
    table = json.loads(bytes(contents.numpy()))
    tensors = _allocate(table, own, device)
    fetching = engine.fetch(holders, f"{prefix}tensors", tensors)
    state = state_tree.unflatten(table["skeleton"], tensors)  # it refers to them, and reads nothing
    fetching.wait()
    return state
