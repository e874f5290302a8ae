"""Who is not of the job, or does not speak as agreed, is refused with a line, and harms nobody."""

from __future__ import annotations

import random
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import make_certificate
from patience import until
from worker_processes import DEADLINE_S, SECRET, Disturbed, Nursery, impostor, outcome, sha256, small

from pliant.errors import REFUSED_EXIT, ConfigError
from pliant.fed.coordinator import Coordinator, server_tls
from pliant.fed.data.build import build_task
from pliant.fed.messages import fingerprint
from pliant.fed.rounds.federation import load_checkpoint
from pliant.fed.rounds.loop import FederatedLoop
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.trainer import describe_device
from pliant.fed.worker import CA_VARIABLE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def test_another_secret_is_refused_on_both_sides(
    ward: Nursery, tmp_path: Path, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(small(), secret=SECRET) as coordinator:
        child = ward.worker(tmp_path, coordinator.address, secret=b"another secret, long enough")
        assert child.wait() == REFUSED_EXIT
        assert not coordinator.workers()
        until(lambda: "does not know this job's secret" in caplog.text, "a line in the coordinator's log")
    assert "does not know this job's secret" in child.said()
    assert "Traceback" not in child.said()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two self-signed certificates for 127.0.0.1, each with its key."""
    folder = tmp_path_factory.mktemp("certificates")
    return [make_certificate(folder, name) for name in ("job", "stranger")]


def test_with_certificates_it_is_the_same_and_another_is_refused_on_both_sides(
    ward: Nursery, tmp_path: Path, no_leaks: None, certificates: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    config = small()
    (mine, key), (stranger, _) = certificates
    with Coordinator(config, secret=SECRET, tls=server_tls(mine, key)) as coordinator:
        wrong = ward.worker(tmp_path, coordinator.address, environ={CA_VARIABLE: Path(stranger).read_text()})
        plain = ward.worker(tmp_path, coordinator.address, "--patience", "0.1")
        right = ward.worker(tmp_path, coordinator.address, environ={CA_VARIABLE: Path(mine).read_text()})
        assert wrong.wait() == REFUSED_EXIT
        assert "has another certificate than the job's: self-signed certificate" in wrong.said()
        until(lambda: re.search("refused a connection .*(EOF|unknown ca|eof)", caplog.text), "the coordinator's line")
        assert plain.wait() == 1
        assert "if it wants TLS, set PLIANT_FED_CA" in plain.said()
        coordinator.wait_for(1, 60)
        assert outcome(config, coordinator) == outcome(config)
    assert right.wait() == 0


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


GARBAGE = random.Random(1).randbytes(5000)


@pytest.mark.parametrize("data", [GARBAGE, b"PLIANT" + b"\xff" * 5000, b"\x80\x05\x95" + b"x" * 100])
def test_who_sends_garbage_is_cut_off_and_harms_nobody(
    ward: Nursery, tmp_path: Path, no_leaks: None, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the handshake, and instead of the result of a unit."""
    config = small(tmp_path)
    with Coordinator(config, secret=SECRET) as coordinator:
        host, _, port = coordinator.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(data)
            assert is_closed(stranger)
        ward.started(tmp_path, coordinator, 1)
        with impostor(coordinator, task=fingerprint(build_task(config))) as fake:
            coordinator.wait_for(2, 10)

            def disturb() -> None:
                until(lambda: [e for e in coordinator.workers() if e.name == "impostor" and e.holding], "its unit")
                fake._channel._sock.sendall(data)
                assert is_closed(fake._channel._sock)

            assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 1, disturb)) == outcome(config)
    assert "lost worker impostor" in caplog.text


@pytest.mark.parametrize(
    ("type_", "body", "payload", "said"),
    [
        ("result", {"id": 0}, 1 << 20, "are allowed"),
        ("result", {"id": 0, "trained": [[1, 2]]}, 0, "a result has 0 bytes"),
        ("over", {}, 0, "a worker does not send 'over'"),
        ("ready", {"task": 1}, 0, "ready for the second time"),
    ],
)
def test_a_member_that_does_not_speak_as_agreed_is_cut_off(
    ward: Nursery,
    tmp_path: Path,
    type_: str,
    body: dict[str, Any],
    payload: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small(tmp_path)
    with (
        Coordinator(config, secret=SECRET) as coordinator,
        impostor(coordinator, task=fingerprint(build_task(config))) as fake,
    ):

        def disturb() -> None:
            until(lambda: [e for e in coordinator.workers() if e.holding], "a unit of the impostor")
            fake.send(type_, body, torch.zeros(payload, dtype=torch.uint8))
            until(lambda: not coordinator.workers(), "its end")
            ward.worker(tmp_path, coordinator.address)

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 1, disturb)) == outcome(config)
    assert said in caplog.text


def test_a_message_cut_short_is_as_good_as_none(
    ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small()
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 1)
        with impostor(coordinator) as fake:
            fake._channel._sock.send(struct.pack("<IQ", 1000, 0) + b"{")
        until(lambda: len(coordinator.workers()) == 1, "its loss")
        assert "in the middle of a message" in caplog.text
        assert outcome(config, coordinator) == outcome(config)


def test_other_data_are_refused(ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small()
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 1)
        with impostor(coordinator, task="another") as fake:
            assert "not those of this job" in str(fake.receive())
        with impostor(coordinator, task=fingerprint(build_task(config)), device_kind="another processor") as fake:
            assert "it computes on another processor, and this job on cpu with torch" in str(fake.receive())
        assert outcome(config, coordinator) == outcome(config)


def test_a_job_goes_on_with_the_kind_of_workers_that_it_was_begun_with(
    ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = small(checkpoint_every=1), tmp_path / "job"
    folder.mkdir()
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 1)
        outcome(config, coordinator, folder)
    saved = load_checkpoint(folder, config)
    assert saved is not None
    assert saved.kind == describe_device(torch.device("cpu"))
    longer = small(checkpoint_every=1, rounds=6)
    other = {"task": fingerprint(build_task(config)), "device_kind": "another processor"}
    with Coordinator(longer, secret=SECRET) as coordinator, impostor(coordinator, **other) as fake:
        coordinator.wait_for(1, DEADLINE_S)
        job = FederatedLoop(longer, build_task(longer), coordinator, JobRecorder(folder))
        job.start()
        refusal = fake.receive()
        assert refusal is not None
        assert refusal.body["why"].startswith(f"it computes on another processor, and this job on {saved.kind}")
        ward.started(tmp_path, coordinator, 1)
        job.run()
        assert sha256(job.federation.model) == outcome(longer).sha256


def test_the_coordinators_own_data_decide_and_not_who_comes_first(ward: Nursery, tmp_path: Path) -> None:
    config = small()
    with Coordinator(config, secret=SECRET) as coordinator:
        with impostor(coordinator, task="another") as fake:
            coordinator.wait_for(1, DEADLINE_S)
            coordinator.expect_task(build_task(config))
            assert "not those of this job" in str(fake.receive())
        until(lambda: not coordinator.workers(), "its end")
        ward.started(tmp_path, coordinator, 1)
        assert outcome(config, coordinator) == outcome(config)


def test_what_the_user_gave_wrong_is_one_line(ward: Nursery, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 bytes"):
        Coordinator(small(), secret=b"short")
    with pytest.raises(ConfigError, match="PEM"):
        server_tls("/nowhere.pem")
    with Coordinator(small(), secret=SECRET) as coordinator, pytest.raises(ConfigError, match="cannot listen"):
        Coordinator(small(), secret=SECRET, port=coordinator.port).__enter__()
    with Coordinator(small(model="small_task:nothing"), secret=SECRET) as coordinator:
        child = ward.worker(tmp_path, coordinator.address)
        assert child.wait() == REFUSED_EXIT
    assert "cannot take part: model 'small_task:nothing'" in child.said()
    for address, environ, said in (
        ("nonsense", {}, "is not HOST:PORT"),
        ("a:1", {CA_VARIABLE: "nonsense"}, "holds no certificate"),
        ("a:1", {"PLIANT_SECRET": ""}, "PLIANT_SECRET is unset or empty"),
    ):
        wrong = ward.worker(tmp_path, address, environ=environ)
        assert wrong.wait() == REFUSED_EXIT
        assert said in wrong.said()
        assert "Traceback" not in wrong.said()
