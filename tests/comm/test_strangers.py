"""A process that does not belong to the job is refused with a reason and logged, and the job is not disturbed.

Three real workers reduce in a loop. Meanwhile clients of all kinds come to rank 0's TCP port and
Unix socket; each must find its refusal in the log, by its address and the reason.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gang import SECRET, Gang, addresses, gang, job, joined, listen, say, specs, told

from pliant import channel
from pliant.channel import HANDSHAKE_S, MAX_STRANGERS
from pliant.cluster import View, Worker
from pliant.comm.engine import Engine
from pliant.identity import WorkerSpec

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server", "no_leaks")]

HELLO = struct.Struct("<6sHBB")
"""The first bytes of a connection, as in `pliant.channel`: a change of the protocol must show."""


# --- in the workers ---


@dataclass(frozen=True)
class Report:
    """The steps and log messages of a worker."""

    num_steps: int
    warnings: list[str]
    others: list[str]
    """Messages of any other level or logger."""


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.others: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.levelno == logging.WARNING and record.name == "pliant.channel"
        (self.warnings if ours else self.others).append(record.getMessage())


def steady(rank: int, spec: WorkerSpec, patience_s: float = HANDSHAKE_S) -> Report:
    """Reduce and check until rank 0 receives "stop"; on any other message, rank 0 reports its progress."""
    channel.HANDSHAKE_S, channel.MOST_TOLD = patience_s, 10_000
    notes = Notes()
    logging.getLogger("pliant").addHandler(notes)
    with joined(spec) as engine:
        num_steps, stop = 0, False
        say("up")
        while not stop:
            tensor = torch.full((40_000,), float(rank + num_steps % 7))
            engine.all_reduce("gradient", tensor).wait(20)
            expected = engine.size * (num_steps % 7) + sum(range(engine.size))
            assert bool((tensor == expected).all()), f"wrong sum in step {num_steps}"
            stop = agree(rank == 0 and told() and answer(num_steps, len(notes.warnings)), engine)
            num_steps += 1
    return Report(num_steps, notes.warnings, notes.others)


def answer(num_steps: int, num_warnings: int) -> bool:
    if listen() == "stop":
        return True
    say((num_steps, num_warnings))
    return False


def agree(stop: bool, engine: Engine) -> bool:
    flag = torch.tensor([float(stop)])
    engine.all_reduce("stop", flag, op="max").wait(20)
    return bool(flag.item())


# --- the job under attack ---


@dataclass
class AttackedJob:
    """A running job, and what rank 0 must have logged when it ends."""

    members: list[WorkerSpec]
    started: Gang
    expected: list[tuple[str, str]]
    """(address of the stranger as logged, part of the reason)."""

    @property
    def target(self) -> Worker:
        return self.members[0].worker

    def progress(self) -> tuple[int, int]:
        """Return the number of steps done and of strangers logged."""
        self.started.tell(0, "how far?")
        num_steps, num_warnings = self.started.hear(0, 20)
        return num_steps, num_warnings

    def settle(self) -> None:
        """Wait until all strangers are refused: each has a thread, so that may take a moment."""
        deadline_s = time.monotonic() + HANDSHAKE_S + 5
        while self.progress()[1] < len(self.expected) and time.monotonic() < deadline_s:
            pass

    def tcp(self, reason: str) -> socket.socket:
        sock = socket.create_connection((self.target.host, self.target.port), timeout=HANDSHAKE_S + 5)
        self.expected.append((str(sock.getsockname()), reason))
        return sock

    def unix(self, reason: str) -> socket.socket:
        found = re.findall(rf"@(pliant-{re.escape(self.target.label)}-\w+)", Path("/proc/net/unix").read_text())
        assert found, f"{self.target} has no Unix socket"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HANDSHAKE_S + 5)
        sock.connect("\0" + found[0])
        self.expected.append(("this host", reason))
        return sock


@contextmanager
def under_attack(patience_s: float = HANDSHAKE_S) -> Iterator[AttackedJob]:
    """Run three workers; at the end check that the log has exactly the expected refusals and that every sum was right."""
    members = specs(addresses("AAB"), number=5)
    with job(steady, members, patience_s) as started:
        assert started.results(30) == ["up"] * 3
        attacked = AttackedJob(members, started, [])
        before, _ = attacked.progress()
        yield attacked
        during, _ = attacked.progress()
        assert during > before, f"no step while strangers came: {before}, then {during}"
        attacked.settle()
        started.tell(0, "stop")
        reports: list[Report] = started.results(30)
    assert len({report.num_steps for report in reports}) == 1, reports
    assert [report.others for report in reports] == [[], [], []]
    assert [report.warnings for report in reports[1:]] == [[], []]
    check_log(reports[0].warnings, attacked)


def check_log(warnings: list[str], job: AttackedJob) -> None:
    left = list(warnings)
    for address, reason in job.expected:
        begin = f"{job.target} refused a connection from {address}: "
        told = [line for line in left if begin in line and reason in line]
        assert told, f"nothing about {address} and {reason!r} in {warnings}"
        left.remove(told[0])
    assert left == [], "more refusals than strangers"


both_ways = pytest.mark.parametrize("way", [AttackedJob.tcp, AttackedJob.unix], ids=["tcp", "unix"])
Way = Callable[[AttackedJob, str], socket.socket]


def greeting(job: AttackedJob, *, protocol: int = channel.PROTOCOL, purpose: str = "worker", name: str = "") -> bytes:
    text = (name or str(job.members[2].worker)).encode()
    return HELLO.pack(b"PLIANT", protocol, len(purpose), len(text)) + purpose.encode() + text + os.urandom(16)


def refusal(sock: socket.socket) -> str:
    """Return the reason that a refused client receives before the connection closes."""
    with sock, sock.makefile("rb") as answer:
        assert answer.read(1) == b"\0", "taken in"
        text = answer.read(int.from_bytes(answer.read(2), "little")).decode()
        assert answer.read() == b"", "more after the refusal"
        return text


def closed(sock: socket.socket) -> None:
    """Wait until the other side has hung up."""
    with sock, suppress(ConnectionResetError):
        while sock.recv(1000):
            pass


def prove(sock: socket.socket, hello: bytes, secret: bytes) -> socket.socket:
    """Do the handshake with `secret` up to the last answer."""
    sock.sendall(hello)
    with sock.makefile("rb") as answer:
        assert answer.read(1) == b"\1", "refused before the proof"
        nonce = answer.read(16)
        answer.read(32)
    sock.sendall(hmac.new(secret, b"connector" + hello + nonce, hashlib.sha256).digest())
    return sock


@both_ways
def test_strangers_are_refused_and_told_why(way: Way) -> None:
    with under_attack() as job:
        reason = "does not know this job's secret"
        assert reason in refusal(prove(way(job, reason), greeting(job), b"a wrong secret"))
        for flaw, reason in (
            (greeting(job, protocol=99), "protocol 99, but this side speaks 4"),
            (greeting(job, purpose="runner"), "this port is for a worker, not for a runner"),
        ):
            sock = way(job, reason)
            sock.sendall(flaw)
            assert reason in refusal(sock)
        reason = "not the name of a worker"
        assert reason in refusal(prove(way(job, reason), greeting(job, name="no worker at all"), SECRET))
        reason = "is not expected here, or already connected"
        for name in (
            "127.0.0.1:1",  # lesser than the target: it would have to wait for the target's call
            str(job.members[2].worker),  # connected already
            str(job.members[0].worker),  # the target itself
        ):
            sock = prove(way(job, reason), greeting(job, name=name), SECRET)
            assert refusal(sock) == f"{name} {reason}"


def test_garbage_and_silence_are_refused() -> None:
    patience_s = 1.0
    with under_attack(patience_s) as job:
        silent = []
        for way in (AttackedJob.tcp, AttackedJob.unix):
            half, nothing = way(job, "time"), way(job, "time")
            half.sendall(greeting(job)[:20])
            silent += [half, nothing]
            for garbage in (
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                os.urandom(4096),
                b"\0" * 70_000,
                b"PLIANX" + b"x" * 20,
            ):
                sock = way(job, "not a pliant process")
                with suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(garbage)
                closed(sock)
            short = way(job, "closed during the handshake")
            short.sendall(b"PLIANT")
            short.close()
        tls_hello(job.tcp("not a pliant process"))
        begin_s = time.monotonic()
        for sock in silent:
            closed(sock)
        assert time.monotonic() - begin_s < patience_s + 2, "half a frame and then silence was let stay"


def tls_hello(sock: socket.socket) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with sock, pytest.raises(OSError):
        context.wrap_socket(sock)


@both_ways
def test_a_flood_of_connections_does_no_harm(way: Way) -> None:
    with under_attack() as job:
        for _ in range(300):
            way(job, "closed during the handshake").close()
        late = way(job, "protocol 99")
        late.sendall(greeting(job, protocol=99))
        assert refusal(late)


def test_beyond_the_limit_the_oldest_makes_room() -> None:
    with under_attack() as job:
        oldest = [job.tcp("too many at once") for _ in range(20)]
        held = [job.tcp("closed during the handshake") for _ in range(MAX_STRANGERS)]
        for sock in oldest:
            closed(sock)
        for sock in held:
            sock.close()


def test_workers_find_each_other_through_a_crowd_of_strangers() -> None:
    members = specs(addresses("AAB"), number=5)
    with gang(steady, [(members[0], 1.0)]) as first:
        crowd = [dial(members[0].worker) for _ in range(MAX_STRANGERS)]
        with gang(late_steady, [(spec,) for spec in members[1:]]) as rest:
            assert rest.results(30) == ["up"] * 2
            assert first.hear(0, 30) == "up"
            first.tell(0, "stop")
            assert first.hear(0, 30).num_steps == rest.hear(0, 30).num_steps == rest.hear(1, 30).num_steps
        for sock in crowd:
            sock.close()


def late_steady(index: int, spec: WorkerSpec) -> Report:
    return steady(index + 1, spec)


def dial(worker: Worker) -> socket.socket:
    """Connect as soon as the worker listens."""
    deadline_s = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((worker.host, worker.port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s, f"{worker} does not listen"
            time.sleep(0.01)


# --- two jobs ---


def test_two_jobs_on_the_same_hosts_do_not_meet() -> None:
    one, other = specs(addresses("AAB"), secret=b"one"), specs(addresses("AAB"), secret=b"other")
    with gang(steady, [(spec,) for spec in one]) as first, gang(steady, [(spec,) for spec in other]) as second:
        assert first.results(30) + second.results(30) == ["up"] * 6
        first.tell(0, "stop")
        second.tell(0, "stop")
        for report in first.results(30) + second.results(30):
            assert report.warnings == report.others == []


@pytest.mark.parametrize("hosts", ["AA", "AB"], ids=["unix", "tcp"])
def test_a_worker_that_takes_another_job_for_its_own_is_refused(hosts: str) -> None:
    """By TCP the stranger finds the port; by Unix socket it does not find the other job at all."""
    mine = specs(addresses(hosts))
    workers = (mine[0].worker, mine[1].worker)
    lost = replace(mine[1], view=View(0, workers, mine[0].view.runners), secret=b"of another job")
    with gang(steady, [(mine[0],)]) as first, gang(astray, [(lost, 0.5 if hosts == "AA" else 20.0)]) as second:
        said = second.hear(0, 30)
        with gang(late_steady, [(mine[1],)]) as rest:
            assert (rest.hear(0, 30), first.hear(0, 30)) == ("up", "up")
            first.tell(0, "stop")
            report = first.hear(0, 30)
    if hosts == "AA":
        assert str(mine[0].worker) in said, said
        assert "is the runner on that host up" in said, said
        assert report.warnings == []
    else:
        assert "another job's worker listens there" in said, said
        assert len(report.warnings) == 1, report.warnings


def astray(index: int, spec: WorkerSpec, timeout_s: float) -> str:
    try:
        with joined(spec, join_timeout_s=timeout_s):
            return "taken in"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
