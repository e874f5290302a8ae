"""What a worker shows of itself: the page that Prometheus reads, and TensorBoard's scalars."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gang import free_port

from pliant.adapt import Observation, WorkerFigures
from pliant.adapt.monitors import StallDetector
from pliant.comm.transport import loopback_engines
from pliant.errors import ConfigError
from pliant.tokens import find_token
from pliant.train import exporters
from pliant.train.exporters import PORT_OFFSET, MetricsServer, TensorBoardExporter, scalars_of

HOST = "127.0.0.1"
SEEN = Observation(
    step=7, epoch=1, view=3, replicas=4, batch_size=8, learning_rate_factor=2.0, strategy="RING", noise_scale=321.5,
    variance=0.25,
    workers=tuple(WorkerFigures(name=f"host:{10000 + rank}", step_s=0.5, comm_bytes=100, comm_s=0.1) for rank in (0, 1)),
)  # fmt: skip


def _page(metrics: MetricsServer) -> dict[str, float]:
    request = urllib.request.Request(metrics.address, headers={"Authorization": "Bearer s3cret"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def _free_port() -> int:
    """A worker's port whose page would have a free one, too."""
    return free_port(HOST) - PORT_OFFSET


@pytest.fixture
def stalls() -> Iterator[StallDetector]:
    with StallDetector(print) as detector:
        yield detector


def test_the_page(monkeypatch: pytest.MonkeyPatch, stalls: StallDetector) -> None:
    monkeypatch.setattr(exporters, "SAMPLE_PERIOD_S", 0.02)
    monkeypatch.setattr(exporters, "LATENCY_PERIOD_S", 0.0)
    port = _free_port()
    metrics = MetricsServer(HOST, port, "s3cret", stalls)
    try:
        assert metrics.address == f"http://{HOST}:{port + PORT_OFFSET}/metrics"
        assert _page(metrics)["pliant_stalls"] == 0
        with loopback_engines(["a", "b"]) as [first, second]:
            metrics.enter_view(first)
            metrics.publish(SEEN, 0)
            tensors = [torch.ones(1000), torch.ones(1000)]
            for _ in range(200):  # until two samples have been taken with traffic between them
                for handle in [e.all_reduce("x", t) for e, t in zip((first, second), tensors, strict=True)]:
                    handle.wait()
                page = _page(metrics)
                if page.get('egress_rate_bytes_per_sec{peer="b:10001"}') and len(page) > 15:
                    break
            assert page['egress_total_bytes{peer="b:10001"}'] == first.counters().egress_bytes["b:10001"]
            assert page['ingress_total_bytes{peer="b:10001"}'] > 0
            assert page['egress_rate_bytes_per_sec{peer="b:10001"}'] > 0
            assert 0 < page['pliant_peer_latency_seconds{peer="b:10001"}'] < 5
            assert page['pliant_strategy_bytes_per_second{strategy="RING"}'] == 1000
            expected = {
                "step": 7,
                "step_seconds": 0.5,
                "samples_per_second": 64,
                "batch_size": 8,
                "workers": 2,
                "view": 3,
            }
            expected |= {"learning_rate_factor": 2, "noise_scale": 321.5, "gradient_variance": 0.25, "replicas": 4}
            assert {name: page[f"pliant_{name}"] for name in expected} == expected
    finally:
        metrics.close()
    assert not any(thread.name == "metrics" for thread in threading.enumerate())
    with pytest.raises(OSError):
        urllib.request.urlopen(metrics.address, timeout=5)


def test_a_port_in_use_gives_way_to_another(caplog: pytest.LogCaptureFixture) -> None:
    port = _free_port()
    with socket.create_server((HOST, port + PORT_OFFSET)), caplog.at_level(logging.WARNING):
        metrics = MetricsServer(HOST, port, "s3cret")
        try:
            assert _page(metrics) == {}
            assert metrics.address in caplog.text
            assert str(port + PORT_OFFSET) in caplog.text
        finally:
            metrics.close()


def test_the_page_is_for_who_has_the_token_which_is_kept_if_nobody_gave_one() -> None:
    metrics = MetricsServer(HOST, _free_port())
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(metrics.address, timeout=5)
        token = find_token(metrics.address)
        request = urllib.request.Request(metrics.address, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.status == 200
    finally:
        metrics.close()
    assert find_token(metrics.address) == ""


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="192.0.2.1"):
        MetricsServer("192.0.2.1", 10000)


def test_scalars() -> None:
    found = scalars_of(SEEN)
    assert found["gradients/noise_scale"] == 321.5
    assert found["job/samples_per_second"] == 64
    assert "gradients/noise_scale" not in scalars_of(Observation(step=1))


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r"pliant\[tensorboard\]"):
        TensorBoardExporter(str(tmp_path))


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `tensorboard`"
    )
    writer = TensorBoardExporter(str(tmp_path))
    writer.publish(SEEN, 1)
    assert not list(tmp_path.iterdir()), "only the first worker writes"
    writer.publish(SEEN, 0)
    writer.close()
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    [event] = events.Scalars("gradients/noise_scale")
    assert (event.step, event.value) == (7, 321.5)
