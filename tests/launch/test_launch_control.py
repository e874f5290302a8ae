"""Runners of several hosts: who has come, the verdict, and the handshake, over loopback."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pliant.cluster import Worker
from pliant.errors import ConfigError
from pliant.launch import control
from pliant.launch.control import HeadRunner, HostGroup, MemberRunner
from pliant.launch.events import STRANDED, Verdict

FLAGS = {"-np": 2, "-w": False}
HOSTS = ["h1", "h2", "h3"]
SECRET = b"s" * 16


def test_an_assembly_knows_who_is_missing() -> None:
    made = HostGroup(HOSTS, FLAGS)
    made.join("h2", FLAGS, [5])
    assert made.missing == ("h1", "h3")


@pytest.mark.parametrize(
    ("host", "flags", "message"),
    [
        ("h9", FLAGS, "host h9 is not in the list h1,h2,h3 of the first runner"),
        ("h1", FLAGS, "a runner on h1 has joined already"),
        ("h2", {**FLAGS, "-np": 3}, "-np is 3 on h2 but 2 on h1: start all runners with the same flags"),
    ],
)
def test_whoever_does_not_fit_is_refused(host: str, flags: dict[str, object], message: str) -> None:
    made = HostGroup(HOSTS, FLAGS)
    made.join("h1", FLAGS, [1])
    with pytest.raises(ConfigError, match=message):
        made.join(host, flags, [1])


def test_the_job_is_over_when_nobody_is_busy_and_somebody_is_done() -> None:
    made = HostGroup(HOSTS, FLAGS)
    assert made.set_status("h1", "done") is None
    assert made.set_status("h2", "idle") is None
    assert made.set_status("h3", "busy") is None
    assert made.set_status("h3", "done") == Verdict("", 0)
    assert made.leave("h2") is None


def test_the_job_fails_when_nobody_is_busy_and_no_host_can_start_workers() -> None:
    made = HostGroup(HOSTS, FLAGS, elastic=True)
    assert made.set_status("h1", "stranded", "no server", 1) is None
    assert made.set_status("h2", "idle") is None
    assert made.set_status("h3", "stranded", "no server", 1) == Verdict("no server", 1)
    well = HostGroup(HOSTS[:2], FLAGS, elastic=True)
    assert well.set_status("h1", "done") is None
    assert well.set_status("h2", "stranded", "no server", 1) == Verdict("", 0), (
        "the other one knows that it has finished"
    )


def test_a_stranded_host_ends_the_job_once_nobody_else_can_go_on_whoever_says_so_last() -> None:
    for order in (("h1", "h2", "h3"), ("h2", "h1", "h3"), ("h2", "h3", "h1")):
        made = HostGroup(HOSTS, FLAGS, elastic=True)
        for host in HOSTS:
            made.join(host, FLAGS, [1])
        made.begun = True
        said = [made.set_status(host, STRANDED, "no server", 1) if host == "h1" else made.leave(host) for host in order]
        assert said == [None, None, Verdict("no server", 1)]


def test_the_first_failure_stays_the_verdict() -> None:
    made = HostGroup(HOSTS, FLAGS)
    assert made.fail("h2 broke", 3) == Verdict("h2 broke", 3)
    assert made.fail("h1 followed", 1) == Verdict("h2 broke", 3)


def test_one_that_leaves_before_the_begin_may_come_again_and_later_is_a_failure() -> None:
    made = HostGroup(HOSTS, FLAGS)
    made.join("h2", FLAGS, [1])
    assert made.leave("h2") is None
    made.join("h2", FLAGS, [2])
    made.begun = True
    assert made.leave("h2") == Verdict("the runner on h2 is gone", 1)


class Meeting:
    """A head in this thread's name, and members as a test adds them."""

    def __init__(self, port: int) -> None:
        self.verdicts: queue.Queue[Verdict] = queue.Queue()
        self.address = Worker("127.0.0.1", port)
        self.head = HeadRunner(self.address, HostGroup(["h1", "h2"], FLAGS), SECRET, self.verdicts.put, "u")
        self.member_verdicts: queue.Queue[Verdict] = queue.Queue()
        self.member = MemberRunner(self.address, SECRET, self.member_verdicts.put)

    def meet(self) -> tuple[control.Body, control.Body]:
        welcomed: list[control.Body] = []
        other = threading.Thread(target=lambda: welcomed.append(self.member.meet("h2", FLAGS, [7, 8], 10)))
        other.start()
        ours = self.head.meet("h1", FLAGS, [5], 10)
        other.join(10)
        return ours, welcomed[0]


@pytest.fixture
def meeting(free_port: int) -> Iterator[Meeting]:
    made = Meeting(free_port)
    made.head.open()
    yield made
    made.member.close()
    made.head.close()


def test_everybody_gets_everybodys_ports(meeting: Meeting) -> None:
    ours, theirs = meeting.meet()
    assert ours == theirs == {"ports": {"h1": [5], "h2": [7, 8]}, "config_server": "u"}


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(("done",), Verdict("", 0)), (("failed", "worker x failed", 9), Verdict("worker x failed", 9))],
    ids=["done", "failed"],
)
def test_the_end_is_told_to_all(meeting: Meeting, status: tuple[Any, ...], verdict: Verdict) -> None:
    meeting.meet()
    meeting.head.send_status("h1", "done")
    meeting.member.send_status("h2", *status)
    assert meeting.verdicts.get(timeout=10) == meeting.member_verdicts.get(timeout=10) == verdict


def test_a_runner_that_vanishes_is_a_failure(meeting: Meeting) -> None:
    meeting.meet()
    meeting.member.close()
    assert meeting.verdicts.get(timeout=10) == Verdict("the runner on h2 is gone", 1)


def test_a_head_that_vanishes_is_a_failure(meeting: Meeting) -> None:
    meeting.meet()
    meeting.head.close()
    assert meeting.member_verdicts.get(timeout=10) == Verdict(f"the runner at {meeting.address} is gone", 1)


def test_other_flags_are_refused_and_the_right_runner_can_still_come(meeting: Meeting) -> None:
    wrong = MemberRunner(meeting.address, SECRET, meeting.member_verdicts.put)
    with pytest.raises(ConfigError, match="-np is 4 on h2"):
        wrong.meet("h2", {**FLAGS, "-np": 4}, [1], 10)
    wrong.close()
    assert meeting.meet()[0]["ports"] == {"h1": [5], "h2": [7, 8]}


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9000, b'{"host": 3}\n', b"[1]\n", b'{"mac": "x']
)
def test_noise_disturbs_nobody(meeting: Meeting, noise: bytes) -> None:
    with socket.create_connection((meeting.address.host, meeting.address.port), timeout=5) as sock:
        with contextlib.suppress(OSError):  # refused already
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
        meeting.meet()
