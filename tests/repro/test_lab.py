"""The lab: hosts as network namespaces, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import until
from pliant_repro.bench import traffic
from pliant_repro.lab.hosts import Lab, host_index, missing_for_lab
from pliant_repro.lab.namespaces import labs
from pliant_repro.lab.rates import format_rate, parse_rate, shaper

from pliant.cli.main import main
from pliant.cluster import Worker
from pliant.errors import ConfigError, LabError

MISSING = missing_for_lab()
needs_root = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "a lab is possible")
ROOT = (pytest.mark.root, needs_root)


def rooted(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ROOT:
        test = mark(test)
    return test


def namespaces_of(name: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"pliant-{name}-")]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# Values


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5gbit", 2_500_000_000),
        ("500kbit", 500_000),
        (" 1Gbit ", 10**9),
        ("none", None),
    ],
)
def test_rates_that_work(text: str, bits_per_s: int | None) -> None:
    assert parse_rate(text) == bits_per_s
    assert parse_rate(format_rate(bits_per_s)) == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "1g", "1", "gbit", "-1gbit", "1gbit; reboot", "1gbps", "0gbit", "1e3mbit", "999gbit", "1kbit"]
)
def test_a_bad_rate_says_what_works(text: str) -> None:
    with pytest.raises(ConfigError, match=r"none"):
        parse_rate(text)


@pytest.mark.parametrize("rate", ["8kbit", "1mbit", "100mbit", "1gbit", "10gbit", "100gbit"])
def test_a_shaper_has_room_for_a_frame_and_for_a_late_timer(rate: str) -> None:
    words = shaper(parse_rate(rate) or 0)
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    burst, limit = int(settings["burst"]), int(settings["limit"])
    assert burst >= 1514
    assert burst >= int(settings["rate"].removesuffix("bit")) / 8 * 0.001 - 1
    assert limit >= 2 * burst - 1


def test_a_host_has_two_names_and_one_outside_the_lab_is_refused() -> None:
    assert [host_index(text, 4) for text in ("h0", "3")] == [0, 3]
    for text in ("h4", "10.77.0.1", "x", "-1", ""):
        with pytest.raises(ConfigError, match="h0 to h3"):
            host_index(text, 4)


def test_making_a_lab_object_makes_nothing() -> None:
    lab = Lab(num_hosts=2, rate="1gbit", name="paper")
    assert lab.addresses == ("10.77.0.1", "10.77.0.2")
    assert lab.namespaces == ("pliant-paper-h0", "pliant-paper-h1")
    lab.down()
    with pytest.raises(LabError, match=r"\.up\(\)"), lab:
        pass


@pytest.mark.parametrize(
    "wrong", [{"num_hosts": 0}, {"num_hosts": 300}, {"name": "a-b"}, {"name": ""}, {"rate": "fast"}]
)
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Lab(**wrong)  # type: ignore[arg-type]


def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    problems = missing_for_lab()
    assert [problem.split(":")[0] for problem in problems] == ["not root", "`ip` not found", "`tc` not found"]
    with pytest.raises(LabError, match=r"sudo.*iproute2"):
        Lab(num_hosts=1).up()


# Namespaces


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(num_hosts=3, rate="100mbit").up() as lab:
        yield lab


def connected(lab: Lab, sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
    with lab.call(receiver, lambda: socket.create_server((lab.addresses[receiver], 0))) as server:
        target = (lab.addresses[receiver], server.getsockname()[1])
        client = lab.call(sender, lambda: socket.create_connection(target, timeout=10))
        server.settimeout(10)
        accepted, _ = server.accept()
    accepted.settimeout(10)
    return client, accepted


def transfer_s(lab: Lab, sender: int, receiver: int, num_bytes: int) -> float:
    client, accepted = connected(lab, sender, receiver)
    with client, accepted:
        thread = threading.Thread(target=client.sendall, args=(bytes(num_bytes),))
        begun_s = time.monotonic()
        thread.start()
        room, left = bytearray(1 << 20), num_bytes
        while left:
            left -= accepted.recv_into(room, min(left, len(room)))
        took_s = time.monotonic() - begun_s
        thread.join(10)
    return took_s


@rooted
def test_hosts_reach_each_other_and_nothing_else_and_bytes_are_counted(lab: Lab) -> None:
    def unreachable() -> OSError | None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
            except OSError as error:
                return error
        return None

    sent, received = lab.tx_bytes(0), lab.rx_bytes(2)
    assert transfer_s(lab, 0, 2, 500_000) < 5
    assert 500_000 < lab.tx_bytes(0) - sent < 700_000
    assert 500_000 < lab.rx_bytes(2) - received < 700_000
    assert lab.call(0, unreachable) is not None
    own = {name for _, name in socket.if_nameindex()}
    assert not any(name in own for name in ("e0", "b0", "v0"))


@rooted
def test_a_rate_change_shows_in_the_running_lab(lab: Lab) -> None:
    at_100 = transfer_s(lab, 0, 1, 1_500_000)
    lab.set_rate(0, "20mbit")
    at_20 = transfer_s(lab, 0, 1, 1_500_000)
    assert lab.rate(0) == 20_000_000
    lab.set_rate(0, None)
    unlimited = transfer_s(lab, 0, 1, 1_500_000)
    assert lab.rate(0) is None
    lab.set_rate(0, "100mbit")
    assert lab.rate(0) == 100_000_000
    assert at_20 > 2 * at_100
    assert unlimited < at_100


@rooted
def test_a_cut_link_is_silent_until_it_is_mended() -> None:
    with Lab(num_hosts=2).up() as lab:
        client, accepted = connected(lab, 0, 1)
        with client, accepted:
            lab.cut(1)
            client.sendall(b"into the dark")
            accepted.settimeout(0.1)
            with pytest.raises(TimeoutError):
                accepted.recv(100)
            lab.mend(1)
            accepted.settimeout(20)
            assert accepted.recv(100) == b"into the dark"


@rooted
def test_programs_run_on_their_host(lab: Lab) -> None:
    asked = lab.run(1, ["ip", "-brief", "address", "show", "dev", "e0"])
    assert "10.77.0.2/24" in asked.stdout
    assert asked.returncode == 0
    child = lab.popen(1, [sys.executable, "-c", "import sys; sys.exit(7)"])
    assert child.wait(10) == 7
    with pytest.raises(LabError, match="nosuch"):
        lab.popen(0, ["nosuch"])
    with pytest.raises(LabError, match="timeout_s"):
        lab.run(0, ["sleep", "60"], timeout_s=0.05)


@rooted
def test_two_labs_do_not_meet(lab: Lab) -> None:
    with Lab(num_hosts=2).up() as other:
        assert set(labs()) >= {lab.name, other.name}
        with other.call(1, lambda: socket.create_server((other.addresses[1], 0))) as server:
            target = (lab.addresses[1], server.getsockname()[1])
            with pytest.raises(ConnectionRefusedError):
                lab.call(0, lambda: socket.create_connection(target, timeout=5))
    assert transfer_s(lab, 0, 1, 1000) < 5


@rooted
def test_a_taken_name_harms_nobody(lab: Lab) -> None:
    with pytest.raises(LabError, match=f"pliant lab down {lab.name}"):
        Lab(num_hosts=1, name=lab.name).up()
    assert len(namespaces_of(lab.name)) == 4
    assert transfer_s(lab, 0, 1, 1000) < 5


@rooted
def test_nothing_stays_after_an_exception() -> None:
    lab = Lab(num_hosts=2, rate="1gbit").up()
    child = lab.popen(1, ["sleep", "600"])
    with pytest.raises(ZeroDivisionError), lab:
        _ = 1 / 0
    assert namespaces_of(lab.name) == []
    assert child.returncode == -signal.SIGKILL


@rooted
def test_nothing_stays_when_making_it_fails_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Lab(num_hosts=2, rate="1gbit")

    def refuse(*_: object) -> None:
        raise LabError("injected")

    monkeypatch.setattr(broken, "_shape", refuse)
    with pytest.raises(LabError, match="injected"):
        broken.up()
    assert namespaces_of(broken.name) == []


OWNER = """
import sys, time
from pliant_repro.lab.hosts import Lab
with Lab(num_hosts=2, rate="1gbit").up() as lab:
    child = lab.popen(1, ["setsid", "sleep", "600"])
    print(lab.name, child.pid, flush=True)
    time.sleep(600)
"""


@rooted
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_when_the_owner_is_killed(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, pid = owner.stdout.readline().split()
        assert len(namespaces_of(name)) == 3
        assert alive(int(pid))
        owner.send_signal(number)
        owner.wait(10)
    until(lambda: not namespaces_of(name), "namespaces gone")
    until(lambda: not alive(int(pid)), "the program inside gone")


@rooted
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.3])
def test_nothing_stays_when_the_owner_is_killed_while_making_it(delay_s: float) -> None:
    name = f"t{os.getpid()}x{delay_s * 100:.0f}"
    code = f"from pliant_repro.lab.hosts import Lab; print('go', flush=True); Lab(num_hosts=8, name={name!r}).up()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            owner.wait(delay_s)
        owner.kill()
        owner.wait(10)
    guardian = f"pliant_repro.lab.guardian\0{name}\0"
    until(lambda: not running(guardian), "guardian gone")
    until(lambda: not namespaces_of(name), "namespaces gone")


@rooted
def test_nothing_stays_when_nobody_hears_that_the_name_is_claimed() -> None:
    """The owner was killed while its guardian started."""
    name = f"t{os.getpid()}unheard"
    guardian = subprocess.Popen(
        [sys.executable, "-m", "pliant_repro.lab.guardian", name, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    guardian.stdin.close()
    guardian.stdout.close()
    assert guardian.wait(30) == 0
    assert namespaces_of(name) == []


def running(text: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if text in (entry / "cmdline").read_text():
                    return True
            except OSError:
                continue
    return False


# The commands


def pliant(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from pliant.cli.main import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@rooted
def test_a_detached_lab_lives_until_it_is_taken_down() -> None:
    name = f"t{os.getpid()}cli"
    made = pliant("lab", "up", "--hosts", "2", "--rate", "100mbit", "--name", name, "--detach")
    try:
        assert made.returncode == 0, made.stderr
        assert len(namespaces_of(name)) == 3
        ran = pliant("lab", "exec", "--name", name, "h1", "--", "ip", "-br", "addr", "show", "dev", "e0")
        assert "10.77.0.2/24" in ran.stdout
        assert pliant("lab", "rate", "--name", name, "h0", "2.5gbit").returncode == 0
        listed = pliant("lab", "list").stdout
        assert f"{name}: 2 hosts" in listed
        assert "10.77.0.1  2.5gbit" in listed
    finally:
        gone = pliant("lab", "down", name)
    assert gone.returncode == 0, gone.stderr
    assert namespaces_of(name) == []


@pytest.mark.parametrize(
    "args",
    [
        ("lab", "up", "--rate", "fast"),
        ("lab", "up", "--hosts", "0"),
        ("lab", "down", "nosuchlab"),
        ("bench", "traffic", "--to", "192.0.2.1:80"),
        ("bench", "traffic"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_2(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pliant", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert len(said.strip().splitlines()) == 1, said


# Background traffic


@pytest.mark.parametrize("target", ["127.0.0.1:80", "localhost:80", "[::1]:80", "10.77.0.3:80"])
def test_traffic_goes_to_loopback_and_labs_only(target: str) -> None:
    assert traffic.check_target(target).port == 80
    for outside in ("192.0.2.1:80", "10.78.0.1:80", "[2001:db8::1]:80", "example.org:80", "nowhere"):
        with pytest.raises(ConfigError):
            traffic.check_target(outside)


def test_traffic_keeps_its_rate_and_ends_by_itself() -> None:
    ready: list[str] = []
    taken: list[traffic.Transferred] = []
    sink = threading.Thread(target=lambda: taken.append(traffic.sink(0, 0.8, ready.append)))
    sink.start()
    until(lambda: bool(ready), "the sink listens")
    sent = traffic.send(Worker.parse(ready[0]), 80_000_000, 0.4)
    sink.join(10)
    assert 0.3 < sent.seconds < 1.5
    assert 0.5 < sent.bits_per_s / 80_000_000 < 1.3
    assert taken[0].num_bytes == sent.num_bytes


def test_traffic_to_nobody_says_how_to_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LabError, match="--listen"):
        traffic.send(Worker("127.0.0.1", port), None, 0.2)
