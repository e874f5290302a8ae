"""Levels pin what they say, fingerprints tell machines apart, and the order of the sum is proved, not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from pliant.comm import order
from pliant.errors import ConfigError, TrainError
from pliant.train import determinism
from pliant.train.determinism import (
    PINS,
    Fingerprint,
    SettingsWatch,
    cublas_workspace,
    differences,
    fingerprint,
    level_of,
    pin,
    self_check,
    settings,
)
from pliant.train.events import StepCommitted

INTEL = Fingerprint(
    torch="2.13.0", num_threads=2, cpu_capability="AVX512", cpu_vendor="GenuineIntel", cpu_model="Xeon", cpu_isa="AVX512_CORE_AMX",
    aten_pin="", onednn_pin="", mkl_pin="", threads_pin="", flags="cudnn.tf32",
)  # fmt: skip
AMD = replace(INTEL, cpu_vendor="AuthenticAMD", cpu_model="EPYC", cpu_isa="AVX2", cpu_capability="AVX2", num_threads=8)
PINNED = {"aten_pin": "avx2", "onednn_pin": "AVX2", "mkl_pin": "COMPATIBLE", "threads_pin": "1"}


def pinned(it: Fingerprint, **other: str) -> Fingerprint:
    return replace(it, num_threads=1, cpu_capability="AVX2", **{**PINNED, **other})  # type: ignore[arg-type]


def test_equal_machines_are_welcome() -> None:
    for level in ("D0", "D1"):
        assert differences(INTEL, replace(INTEL), level) == []  # type: ignore[arg-type]
    assert differences(pinned(INTEL), pinned(INTEL), "D2") == []


@pytest.mark.parametrize(
    "change",
    [{"torch": "2.11.0"}, {"num_threads": 3}, {"cpu_capability": "AVX2"}, {"cpu_model": "EPYC"}, {"cpu_isa": "AVX2"},
     {"onednn_pin": "AVX2"}, {"mkl_pin": "AVX2"}, {"flags": "none"}, {"gpu": "NVIDIA H200"}, {"cuda": "13.0"},
     {"cudnn": "9"}, {"driver": "580"}, {"allowed": "put_"}],
    ids=str,
)  # fmt: skip
def test_whatever_changes_bits_is_refused_under_d1(change: dict[str, str]) -> None:
    (line, *_) = differences(INTEL, replace(INTEL, **change), "D1")  # type: ignore[arg-type]
    assert "here" in line
    assert "there" in line
    assert str(next(iter(change.values()))) in line or "gpu" in change
    assert differences(INTEL, replace(INTEL, **change), "D0") == []  # type: ignore[arg-type]


def test_different_machines_are_welcome_under_d2_if_pinned_alike() -> None:
    assert differences(INTEL, AMD, "D1")
    assert differences(pinned(INTEL), pinned(AMD), "D1")
    assert differences(pinned(INTEL), pinned(AMD), "D2") == []


@pytest.mark.parametrize(
    "other",
    [
        AMD,  # not pinned at all
        pinned(AMD, mkl_pin="AVX2"),
        pinned(AMD, onednn_pin="SSE41"),
        pinned(AMD, onednn_pin=""),
        replace(pinned(AMD), cpu_isa="AVX"),  # the pin asks for more than there is
        replace(pinned(AMD), torch="2.11.0"),
        replace(pinned(AMD), num_threads=2),
        replace(pinned(AMD), cpu_capability="DEFAULT"),
    ],
)
def test_under_d2_the_pins_themselves_must_be_alike(other: Fingerprint) -> None:
    assert differences(pinned(INTEL), other, "D2")


def test_mkl_has_one_pin_for_all_vendors() -> None:
    here, there = pinned(INTEL, mkl_pin="AVX2"), pinned(AMD, mkl_pin="AVX2")
    assert any("COMPATIBLE" in line for line in differences(here, there, "D2"))
    assert differences(here, replace(here, cpu_model="another Xeon"), "D2") == []


def test_fingerprint_survives_json() -> None:
    mine = fingerprint()
    assert Fingerprint.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    assert Fingerprint.from_json({**mine.to_json(), "from the future": 1}) == mine
    assert mine.num_threads == torch.get_num_threads()
    for nonsense in (None, {}, {**mine.to_json(), "torch": 3}):
        with pytest.raises(ConfigError, match="fingerprint"):
            Fingerprint.from_json(nonsense)


def test_levels() -> None:
    assert [level_of(text) for text in ("D0", "d1", "D2")] == ["D0", "D1", "D2"]
    with pytest.raises(ConfigError, match="'D3'"):
        level_of("D3")


def test_pin_below_d2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    assert pin("D0") == []
    assert settings() == before, "D0 leaves torch as it is"
    lines = pin("D1")
    assert torch.backends.cudnn.benchmark is False
    assert f"threads {torch.get_num_threads()}" in lines
    assert not torch.are_deterministic_algorithms_enabled()  # nothing to gain on a CPU, and it costs


def test_the_workspace_of_cublas_is_set_before_cuda_is_used_or_not_at_all() -> None:
    assert cublas_workspace(None, cuda_in_use=False) == cublas_workspace("", cuda_in_use=False) == ":4096:8"
    for given in (":4096:8", ":16:8"):
        assert cublas_workspace(given, cuda_in_use=True) == given
    with pytest.raises(ConfigError, match=r"used the GPU before pliant\.join") as too_late:
        cublas_workspace(None, cuda_in_use=True)
    for remedy in (
        "`pliant run`",
        'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"',
        "call pliant.join before",
        "D0",
    ):
        assert remedy in str(too_late.value)
    with pytest.raises(ConfigError, match=r"CONFIG=:0:0: .*unset it"):
        cublas_workspace(":0:0", cuda_in_use=False)


def change_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def change_benchmark() -> None:
    torch.backends.cudnn.benchmark = True


def change_tf32() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def change_reduction() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def change_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_deterministic, "deterministic is warn-only, and was strict"),
        (change_benchmark, "cudnn.benchmark is on, and was off"),
        (change_tf32, "matmul.fp32 is tf32"),
        (change_reduction, "matmul.bf16_reduction is off, and was on"),
        (change_attention, "attention is efficient,math,cudnn, and was flash,efficient,math,cudnn"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "threads is"),
    ],
    ids=["deterministic", "benchmark", "tf32", "reduction", "attention", "threads"],
)
def test_a_program_that_changes_settings_is_found(change: Callable[[], None], said: str) -> None:
    cuda, threads, tf32 = torch.backends.cuda, torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    warm = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        watch, mine = SettingsWatch(torch.device("cuda"), 10), fingerprint()
        on_cpu = SettingsWatch(torch.device("cpu"), 10)
        watch.end_step(committed(1))
        change()
        (line,) = differences(mine, fingerprint(), "D1")
        assert line.startswith(("settings: ", "threads: "))
        watch.end_step(committed(9))  # it is not time to look
        with pytest.raises(TrainError, match=f"step 10: .*{said}"):
            watch.end_step(committed(10))
        watch.enter_view()
        with pytest.raises(TrainError, match=said):
            watch.end_step(committed(11))
        if "threads" not in said:
            on_cpu.end_step(committed(10))  # nothing to a CPU
    finally:
        torch.use_deterministic_algorithms(warm)
        torch.backends.cudnn.benchmark = False
        cuda.matmul.fp32_precision = tf32
        cuda.matmul.allow_bf16_reduced_precision_reduction = True
        cuda.enable_flash_sdp(True)
        torch.set_num_threads(threads)


def committed(step: int) -> StepCommitted:
    return StepCommitted(step, 0, step, 1, 0, 0.1, 0.1, {})


ALIKE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}


def test_d2_needs_its_pins_before_the_program_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PINS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"ATEN_CPU_CAPABILITY.*pliant run --determinism D2"):
        pin("D2")
    for name, value in ALIKE.items():
        monkeypatch.setenv(name, value + " ")  # differs from what the tests themselves may have been started with
    with pytest.raises(ConfigError, match="before the program starts"):
        pin("D2")


PROBE = """
import hashlib, json, sys, torch
from pliant.errors import ConfigError
from pliant.train import determinism
from pliant.train.determinism import fingerprint, pin
found = {"pinned": pin(sys.argv[1]), "fingerprint": fingerprint().to_json()}
x = torch.randn(64, 513, generator=torch.Generator().manual_seed(0))
found["bits"] = hashlib.sha256(torch.nn.functional.softmax(x, 1).numpy().tobytes()).hexdigest()
try:
    torch.set_num_threads(2)
    pin(sys.argv[1])
except ConfigError as error:
    found["refused"] = str(error)
if sys.argv[1] == "D1":  # once is enough: it imports a large part of torch
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as a program may have asked for; needs no GPU
    found["asked"] = determinism.settings()
    determinism._pin_cuda("D1")
    found["D1"] = determinism.settings()
    determinism._pin_cuda("D2")
    found["D2"] = determinism.settings()
    found["fills"] = torch.utils.deterministic.fill_uninitialized_memory
print(json.dumps(found))
"""


def probe(level: str, environment: dict[str, str]) -> dict[str, object]:
    clean = {name: value for name, value in os.environ.items() if name not in PINS}
    command = [sys.executable, "-c", PROBE, level]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.processes
def test_real_workers() -> None:
    """S8: other vector instructions or threads are refused under D1; all pinned alike is admitted under D2."""
    with ThreadPoolExecutor(2) as pool:
        runs = [("D1", {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"}), ("D2", ALIKE)]
        plain, alike = pool.map(lambda run: probe(*run), runs)
    here, there = Fingerprint.from_json(plain["fingerprint"]), Fingerprint.from_json(alike["fingerprint"])
    assert "CPU capability: AVX2 here, DEFAULT there" in differences(here, there, "D1")
    assert differences(here, replace(here, num_threads=2), "D1") == ["threads: 1 here, 2 there"]
    assert differences(here, there, "D2"), "only one of them is pinned"
    assert plain["bits"] != alike["bits"], "the reason: vector instructions change bits"
    elsewhere = replace(there, cpu_vendor="GenuineIntel", cpu_model="Xeon", cpu_isa="AVX512_CORE_AMX")
    assert differences(there, elsewhere, "D1")
    assert differences(there, elsewhere, "D2") == []
    assert {f"{name}={value}" for name, value in ALIKE.items()} <= set(alike["pinned"])  # type: ignore[call-overload]
    assert "2 threads" in alike["refused"]  # type: ignore[operator]
    assert "refused" not in plain
    asked, strict, portable = (dict(plain[each]) for each in ("asked", "D1", "D2"))  # type: ignore[call-overload]
    assert (asked["deterministic"], asked["matmul.fp32"]) == ("off", "tf32")
    changed = {"deterministic": "strict", "cudnn.deterministic": "on"}
    assert strict == {**asked, **changed}, "D1 keeps the precision that the program has chosen"
    assert portable["matmul.fp32"] == "ieee"
    assert portable["attention"] == "math"
    assert portable["matmul.bf16_reduction"].startswith("off")
    assert plain["fills"] is False, "it would cost a write of every fresh tensor"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 6, 100])
def test_self_check(num_replicas: int) -> None:
    state = torch.get_rng_state()
    began_s = time.perf_counter()
    result = self_check(num_replicas)
    assert result.ok, result.detail
    assert time.perf_counter() - began_s < 5
    assert torch.equal(torch.get_rng_state(), state)


def test_thorough_self_check() -> None:
    result = self_check(3, thorough=True)
    assert result.ok, result.detail


@pytest.mark.parametrize("num_replicas", [3, 4])
def test_self_check_notices_another_order(num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "chain", lambda chunk, num_replicas: tuple(range(num_replicas)))
    result = self_check(num_replicas)
    assert not result.ok
    assert "use a torch whose self-check passes" in result.detail


def test_self_check_notices_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "chunk_length", lambda elements, item, replicas: max(1, elements // replicas))
    assert not self_check(3).ok


def test_self_check_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(determinism.dist, "ProcessGroupGloo")
    result = self_check(2)
    assert not result.ok
    assert "could not be asked" in result.detail
