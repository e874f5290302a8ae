"""Who is not of the job, or does not speak as agreed, is refused with a line, and harms nobody."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from executing import DEADLINE_S, TOKEN, Disturbed, Nursery, frame, outcome, proved, say, sha256, small
from patience import until

from pliant.errors import ConfigError
from pliant.fed.data.build import build_task
from pliant.fed.executors import wire
from pliant.fed.executors.executor import fingerprint
from pliant.fed.executors.pool import Pool, server_tls
from pliant.fed.rounds.federation import load_checkpoint
from pliant.fed.rounds.loop import FederatedLoop
from pliant.fed.rounds.storage import JobRecorder
from pliant.fed.trainer import describe_device

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def test_another_token_is_refused_on_both_sides(
    ward: Nursery, tmp_path: Path, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    with Pool(small(), token=TOKEN) as pool:
        child = ward.executor(tmp_path, pool.address, token="another token, long enough")
        assert child.wait() == 2
        assert not pool.executors()
        until(lambda: "its token is not this job's" in caplog.text, "a line in the server's log")
    assert "its token is another one" in child.said()
    assert "Traceback" not in child.said()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two self-signed certificates for 127.0.0.1, each with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make certificates: apt install openssl")
    folder, made = tmp_path_factory.mktemp("certificates"), []
    for name in ("job", "stranger"):
        certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", *curve, "-keyout", key, "-out", certificate, "-days", "2", *names]
        subprocess.run(command, check=True, capture_output=True, timeout=20)
        made.append((certificate, key))
    return made


def test_with_certificates_it_is_the_same_and_another_is_refused_on_both_sides(
    ward: Nursery,
    tmp_path: Path,
    no_leaks: None,
    certificates: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small()
    (mine, key), (stranger, _) = certificates
    with Pool(config, token=TOKEN, tls=server_tls(mine, key)) as pool:
        wrong = ward.executor(tmp_path, pool.address, "--ca", stranger)
        plain = ward.executor(tmp_path, pool.address, "--patience", "0.1")
        right = ward.executor(tmp_path, pool.address, "--ca", mine)
        assert wrong.wait() == 2
        assert "is not who --ca vouches for: self-signed certificate" in wrong.said()
        until(lambda: re.search("no TLS connection: (it hung up|.*unknown ca)", caplog.text), "the server's line")
        assert plain.wait() == 1
        assert "if it wants TLS, give --ca" in plain.said()
        pool.wait_for(1, 60)
        assert outcome(config, pool) == outcome(config)
    assert right.wait() == 0


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


HUGE = wire.HEAD.pack(wire.MAGIC, wire.Kind.RESULT, 10, 1 << 40)
GARBAGE = random.Random(1).randbytes(5000)


@pytest.mark.parametrize("data", [GARBAGE, HUGE, b"\x80\x05\x95" + b"x" * 100, b"".join(wire.encoded(wire.Kind.OVER))])
def test_who_sends_garbage_is_cut_off_and_harms_nobody(
    ward: Nursery, tmp_path: Path, no_leaks: None, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the handshake, after it, and as one who has taken a unit and answers it with that."""
    config = small(tmp_path)
    with Pool(config, token=TOKEN) as pool:
        host, _, port = pool.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(data)
            assert is_closed(stranger)
        ward.started(tmp_path, pool, 1)
        with proved(pool.address) as fake:
            say(fake, wire.Kind.READY, {"task": fingerprint(build_task(config))})
            pool.wait_for(2, 10)

            def disturb() -> None:
                until(lambda: [e for e in pool.executors() if e.name == "fake" and e.holding], "a unit of the fake's")
                fake.sendall(data)
                assert is_closed(fake)

            assert outcome(config, Disturbed(pool, tmp_path / "gate", 1, disturb)) == outcome(config)
    assert "lost executor fake" in caplog.text


def test_large_payloads_pass_both_ways_at_once_in_the_clear_and_under_tls(certificates: list[tuple[str, str]]) -> None:
    """More than the kernel takes at once: what waits is not lost, mixed up or copied whole."""
    payload = torch.arange(5_000_000, dtype=torch.int32).view(torch.uint8)
    (mine, key), _ = certificates

    async def there_and_back(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> None:
        ends = [wire.Link(), wire.Link()]
        listener = await asyncio.get_running_loop().create_server(lambda: ends[1], "127.0.0.1", ssl=server)
        async with listener:
            address = listener.sockets[0].getsockname()
            await asyncio.get_running_loop().create_connection(lambda: ends[0], *address, ssl=client)
            for end in ends:
                end.admit(payload.numel())
                end.send(wire.Kind.MODEL, {"version": 1}, payload)
                end.send(wire.Kind.BEAT)
            for end in ends:
                found = (await end.receive(wire.Kind.MODEL, timeout_s=60)).payload
                assert found is not None
                assert torch.equal(found, payload)
                await end.receive(wire.Kind.BEAT)
            for end in ends:
                end.close()

    for server, client in ((None, None), (server_tls(mine, key), ssl.create_default_context(cafile=mine))):
        asyncio.run(there_and_back(server, client))


def test_a_frame_cut_short_is_as_good_as_none(ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small()
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 1)
        with proved(pool.address) as fake:
            fake.sendall(b"".join(wire.encoded(wire.Kind.READY, {"task": "x" * 1000}))[:-3])
            fake.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: len(pool.executors()) == 1, "its loss")
        assert "in the middle of a frame" in caplog.text
        assert outcome(config, pool) == outcome(config)


def test_other_data_are_refused(ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small()
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 1)
        with proved(pool.address) as fake:
            say(fake, wire.Kind.READY, {"task": "another"})
            assert "not those of this job" in str(frame(fake))
        with proved(pool.address) as fake:
            say(fake, wire.Kind.READY, {"task": fingerprint(build_task(config)), "kind": "another processor"})
            assert "it computes on another processor, and this job on cpu with torch" in str(frame(fake))
        assert outcome(config, pool) == outcome(config)


def test_a_job_goes_on_with_the_kind_of_executors_that_it_was_begun_with(
    ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, folder = small(checkpoint_every=1), tmp_path / "job"
    folder.mkdir()
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 1)
        outcome(config, pool, folder)
    saved = load_checkpoint(folder, config)
    assert saved is not None
    assert saved.kind == describe_device(torch.device("cpu"))
    longer = small(checkpoint_every=1, rounds=6)
    with Pool(longer, token=TOKEN) as pool, proved(pool.address) as fake:
        say(fake, wire.Kind.READY, {"task": fingerprint(build_task(config)), "kind": "another processor"})
        pool.wait_for(1, DEADLINE_S)
        job = FederatedLoop(longer, build_task(longer), pool, JobRecorder(folder))
        job.start()
        why = until(lambda: frame(fake).get("why"), "the reason")
        assert why.startswith(f"it computes on another processor, and this job on {saved.kind}")
        ward.started(tmp_path, pool, 1)
        job.run()
        assert sha256(job.federation.model) == outcome(longer).sha256


def test_the_servers_own_data_decide_and_not_who_comes_first(ward: Nursery, tmp_path: Path) -> None:
    config = small()
    with Pool(config, token=TOKEN) as pool, proved(pool.address) as fake:
        say(fake, wire.Kind.READY, {"task": "another"})
        pool.wait_for(1, DEADLINE_S)
        pool.expect(fingerprint(build_task(config)))
        assert "not those of this job" in until(lambda: frame(fake).get("why"), "the reason")
        until(lambda: not pool.executors(), "its end")
        ward.started(tmp_path, pool, 1)
        assert outcome(config, pool) == outcome(config)


def test_a_port_that_is_still_taken_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as last:
        port = last.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen at .*: Address already in use.*; choose another"):
            Pool(small(), token=TOKEN, port=port, patience_s=0.05).__enter__()
        caplog.clear()
        pool = Pool(small(), token=TOKEN, port=port, patience_s=DEADLINE_S)
        opening = threading.Thread(target=pool.__enter__)
        opening.start()
        until(lambda: f"{port} is taken: waiting" in caplog.text, "the first try")
    opening.join(DEADLINE_S)
    assert pool.port == port
    pool.close(over=True)


def test_what_the_user_gave_wrong_is_one_line(ward: Nursery, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 characters"):
        Pool(small(), token="short")
    with pytest.raises(ConfigError, match="PEM"):
        server_tls("/nowhere.pem")
    with Pool(small(), token=TOKEN) as pool, pytest.raises(ConfigError, match="cannot listen"):
        Pool(small(), token=TOKEN, port=pool.port).__enter__()
    with Pool(small(model="small_task:nothing"), token=TOKEN) as pool:
        child = ward.executor(tmp_path, pool.address)
        assert child.wait() == 2
    assert "cannot take part: model 'small_task:nothing'" in child.said()
    for flags, said in (
        ((), "is not HOST:PORT"),
        (("--ca", "/nowhere"), "give a readable file"),
        (("--ca", str(child.log)), "holds no certificate"),
    ):
        wrong = ward.executor(tmp_path, "nonsense", *flags) if not flags else ward.executor(tmp_path, "a:1", *flags)
        assert wrong.wait() == 2
        assert said in wrong.said()
        assert "Traceback" not in wrong.said()
