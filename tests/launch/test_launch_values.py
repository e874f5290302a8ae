"""Durations, devices, secrets and ports: the small values of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pliant.cluster import PortRange
from pliant.duration import format_duration, parse_duration
from pliant.errors import ConfigError
from pliant.identity import job_secret, parse_secret, user_secret_path
from pliant.launch.addresses import bind_ports
from pliant.launch.plan import device_environ, visible_devices


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("1m30s", 90),
        ("250ms", 0.25),
        ("1h2m3.5s", 3723.5),
        ("90", 90),
        ("0", 0),
        (".5s", 0.5),
        ("2us", 2e-6),
    ],
)
def test_durations_are_read_as_go_writes_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "1x", "-5", "-5s", "1m 30s", "inf", "nan", "s"])
def test_other_durations_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="-timeout .*use 90s"):
        parse_duration(text, "-timeout")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(116.6, "1m56.6s"), (0.04, "0.0s"), (59.96, "1m0.0s"), (3600, "1h0m0.0s"), (3723.45, "1h2m3.4s"), (7, "7.0s")],
)
def test_durations_are_shown_with_one_decimal(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_devices_are_counted_from_their_files() -> None:
    assert visible_devices({}, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"]) == ("0", "1")
    assert visible_devices({}, ["null"]) == ()


def test_a_list_that_is_set_already_is_what_slots_index() -> None:
    devices = visible_devices({"CUDA_VISIBLE_DEVICES": "5, GPU-7f"}, ["nvidia0"])
    assert devices == ("5", "GPU-7f")
    assert device_environ(1, devices, allow_nvlink=False)["CUDA_VISIBLE_DEVICES"] == "GPU-7f"
    assert device_environ(2, devices, allow_nvlink=False)["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices_are_not_handed_out(hidden: str) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": hidden}, ["nvidia0"]) == ()
    assert device_environ(0, (), allow_nvlink=False) == {}


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match="-self or -nic"):
        bind_ports("192.0.2.77", 1, PortRange())


def test_a_secret_is_hex_or_text() -> None:
    assert parse_secret("00" * 16 + "\n", "x") == bytes(16)
    assert parse_secret("correct horse battery", "x") == b"correct horse battery"
    with pytest.raises(ConfigError, match="PLIANT_SECRET has 5 characters: use 16"):
        parse_secret("short", "PLIANT_SECRET")


def test_a_job_of_one_host_has_a_secret_of_its_own() -> None:
    environ = {"PLIANT_SECRET": "x" * 20}
    first, second = (job_secret(secret_file="", shared=False, environ=environ) for _ in range(2))
    assert first != second
    assert len(first) == 32


def test_a_shared_secret_comes_from_file_then_environment_then_cookie(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    cookie = job_secret(secret_file="", shared=True, environ=environ)
    path = user_secret_path(environ)
    assert path == tmp_path / ".config/pliant/secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert job_secret(secret_file="", shared=True, environ=environ) == cookie
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]

    environ["PLIANT_SECRET"] = "e" * 17
    assert job_secret(secret_file="", shared=True, environ=environ) == b"e" * 17
    file = tmp_path / "file"
    file.write_text("f" * 21)
    assert job_secret(secret_file=str(file), shared=False, environ=environ) == b"f" * 21


def test_a_secret_file_that_is_not_there_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file.*--secret-file"):
        job_secret(secret_file=str(tmp_path / "none"), shared=True, environ={})
