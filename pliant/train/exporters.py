"""Exporters of a running job: a Prometheus page per worker, scalars for TensorBoard, the stall detector.

A step only leaves its observation here. The Prometheus page is made when somebody asks for it; rates and latencies are
measured once in a while by a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from pliant.adapt import Observation
from pliant.adapt.monitors import StallDetector
from pliant.cluster import Worker
from pliant.comm.engine import Engine
from pliant.comm.probe import latencies
from pliant.elastic.http_server import listening, serving, single_page, uvicorn_config
from pliant.errors import CommError, ConfigError
from pliant.tensorboard import EventWriter
from pliant.tokens import random_token, token_kept

if TYPE_CHECKING:
    from pliant.train.adaptation import Adaptation, AdaptationSettings


def start_exporters(
    adaptation: Adaptation,
    settings: AdaptationSettings,
    worker: Worker,
    token: str,
    stack: contextlib.ExitStack,
    stalls: StallDetector | None,
) -> None:
    """Start the exporters that were asked for, until `stack` is closed."""
    if settings.metrics:
        metrics = MetricsServer(worker.host, worker.port, token, stalls)
        stack.callback(metrics.close)
        adaptation.view_listeners.append(metrics.enter_view)
        adaptation.listeners.append(metrics.publish)
    if settings.tensorboard:
        scalars = TensorBoardExporter(settings.tensorboard)
        stack.callback(scalars.close)
        adaptation.listeners.append(scalars.publish)


log = logging.getLogger(__name__)
PORT_OFFSET = 10000
"""The page of a worker is at its own port plus this, as KungFu's is."""
SAMPLE_PERIOD_S = 1.0
"""How often rates are measured."""
LATENCY_PERIOD_S = 10.0
LATENCY_TIMEOUT_S = 5.0
_HIGHEST_PORT = 65535


class MetricsServer(Collector):
    """The Prometheus page of one worker."""

    def __init__(self, host: str, port: int, token: str = "", stalls: StallDetector | None = None) -> None:
        """Serve the page of the worker at `host`:`port`, on that port plus 10000, or on another if that is taken.

        Requests need the token. Without one it is random, and kept where `pliant.tokens` keeps them.

        Raises:
            ConfigError: this machine does not have the address.
        """
        self._stalls = stalls
        self._engine: Engine | None = None
        self._seen: Observation | None = None
        self._own = ""
        """This worker's name among those observed."""
        self._rates: dict[str, dict[str, float]] = {"egress": {}, "ingress": {}}
        self._latencies: dict[str, float] = {}
        self._end = threading.Event()
        self._stack = contextlib.ExitStack()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        wanted = port + PORT_OFFSET
        try:
            listener = self._stack.enter_context(listening(host, wanted if wanted <= _HIGHEST_PORT else 0))
        except ConfigError:
            listener = self._stack.enter_context(listening(host, 0))
        bound = int(listener.getsockname()[1])
        if bound != wanted:
            log.warning("port %d is not free: metrics are at http://%s:%d/metrics", wanted, host, bound)
        self.address = f"http://{host}:{bound}/metrics"
        """The URL of the page."""

        def answer() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        if not token:
            token = random_token()
            file = self._stack.enter_context(token_kept(host, bound, token))
            log.info("metrics at %s (token in %s)", self.address, file)
        config = uvicorn_config(single_page("/metrics", answer, token), names=(host,))
        self._stack.enter_context(serving(config, listener, "metrics-server"))
        sampler = threading.Thread(target=self._sample_on, name="metrics", daemon=True)
        sampler.start()
        self._stack.callback(sampler.join, LATENCY_TIMEOUT_S + 1)
        self._stack.callback(self._end.set)

    def enter_view(self, engine: Engine) -> None:
        self._engine = engine
        self._rates, self._latencies = {"egress": {}, "ingress": {}}, {}

    def publish(self, seen: Observation, rank: int = 0) -> None:
        """Show this observation, as the worker of this rank sees it. (A listener of `Adaptation`.)"""
        self._seen = seen
        self._own = seen.workers[rank].name if rank < len(seen.workers) else ""

    def close(self) -> None:
        self._stack.close()

    # --- taken once in a while ---

    def _sample_on(self) -> None:
        before: tuple[Engine, float, Mapping[str, int], Mapping[str, int]] | None = None
        pinged_s = float("-inf")
        while not self._end.wait(SAMPLE_PERIOD_S):
            engine = self._engine
            if engine is None:
                continue
            now_s, counters = time.monotonic(), engine.counters()
            if before is not None and before[0] is engine:
                took_s = now_s - before[1]
                self._rates = {
                    "egress": _rates_per_s(before[2], counters.egress_bytes, took_s),
                    "ingress": _rates_per_s(before[3], counters.ingress_bytes, took_s),
                }
            before = (engine, now_s, counters.egress_bytes, counters.ingress_bytes)
            if now_s - pinged_s >= LATENCY_PERIOD_S and engine.size > 1:
                pinged_s = now_s
                self._ping(engine)

    def _ping(self, engine: Engine) -> None:
        with contextlib.suppress(CommError):  # the view is ending; the next one answers again
            found = latencies(engine, LATENCY_TIMEOUT_S)
            self._latencies = {
                str(worker): seconds
                for rank, (worker, seconds) in enumerate(zip(engine.view.workers, found, strict=True))
                if rank != engine.rank
            }

    # --- the page ---

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The page's own thread calls this."""
        yield from self._traffic()
        seen = self._seen
        if seen is not None:
            yield from self._progress(seen)
        latency = GaugeMetricFamily("pliant_peer_latency_seconds", "Round trip to a peer.", labels=["peer"])
        for peer, seconds in self._latencies.items():
            latency.add_metric([peer], seconds)
        yield latency
        if self._stalls is not None:
            yield GaugeMetricFamily("pliant_stalls", "Waits that were called a stall so far.", value=self._stalls.count)
            yield GaugeMetricFamily(
                "pliant_stalled_seconds",
                "Duration of the longest wait in progress that is called a stall, in seconds.",
                value=self._stalls.stalled_s,
            )

    def _traffic(self) -> Iterator[Metric]:
        engine = self._engine
        counters = engine.counters() if engine is not None else None
        for way, totals in (
            ("egress", counters.egress_bytes if counters is not None else {}),
            ("ingress", counters.ingress_bytes if counters is not None else {}),
        ):
            total = UnknownMetricFamily(f"{way}_total_bytes", "Payload bytes exchanged with a peer.", labels=["peer"])
            rate = GaugeMetricFamily(
                f"{way}_rate_bytes_per_sec",
                "Payload bytes per second exchanged with a peer, over the last second.",
                labels=["peer"],
            )
            for peer, num_bytes in totals.items():
                total.add_metric([peer], num_bytes)
                rate.add_metric([peer], self._rates[way].get(peer, 0.0))
            yield total
            yield rate

    def _progress(self, seen: Observation) -> Iterator[Metric]:
        for name, about, value in (
            ("pliant_step", "Steps committed.", seen.step),
            ("pliant_epoch", "The epoch.", seen.epoch),
            ("pliant_step_seconds", "Duration of the last step on the slowest worker, in seconds.", seen.step_s),
            ("pliant_samples_per_second", "Samples per second of the whole job.", seen.samples_per_s),
            ("pliant_batch_size", "Batch size of one replica.", seen.batch_size),
            (
                "pliant_learning_rate_factor",
                "Factor by which policies multiply the learning rate.",
                seen.learning_rate_factor,
            ),
            ("pliant_workers", "Number of workers.", seen.num_workers),
            ("pliant_replicas", "Number of replicas.", seen.replicas),
            ("pliant_view", "Number of the view; it grows with every change of the workers.", seen.view),
            ("pliant_noise_scale", "Gradient noise scale, in samples.", seen.noise_scale),
            (
                "pliant_gradient_variance",
                "Variance of the gradients between replicas, summed over parameters.",
                seen.variance,
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, about, value=value)
        own = next((worker for worker in seen.workers if worker.name == self._own), None)
        if own is not None:
            yield GaugeMetricFamily(
                "pliant_compute_seconds", "This worker's own part of the last step.", value=own.compute_s
            )
            yield GaugeMetricFamily(
                "pliant_wait_seconds", "What this worker waited for others in the last step.", value=own.wait_s
            )
            if own.gpu_bytes:
                yield GaugeMetricFamily(
                    "pliant_gpu_memory_bytes", "What torch holds on this worker's GPU.", value=own.gpu_bytes
                )
                yield GaugeMetricFamily(
                    "pliant_gpu_utilization", "Share of the time in which its GPU computes.", value=own.gpu_use
                )
            rate = GaugeMetricFamily(
                "pliant_strategy_bytes_per_second", "What collectives carried.", labels=["strategy"]
            )
            rate.add_metric([seen.strategy], own.throughput)
            yield rate


def _rates_per_s(before: Mapping[str, int], after: Mapping[str, int], took_s: float) -> dict[str, float]:
    return {peer: max(0, total - before.get(peer, 0)) / took_s for peer, total in after.items()}


class TensorBoardExporter:
    """Writes scalars to a folder. Only the first worker writes; the file is created with its first step."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if TensorBoard's writer is not installed."""
        self._events = EventWriter(folder)
        self.close = self._events.close

    def publish(self, seen: Observation, rank: int) -> None:
        """Write this observation. (A listener of `Adaptation`.)"""
        if rank == 0:
            self._events.add_scalars(scalars_of(seen), seen.step)


def scalars_of(seen: Observation) -> dict[str, float]:
    """Return the scalars of an observation by name, without unknown ones."""
    found: dict[str, float | None] = {
        "job/step_seconds": seen.step_s,
        "job/samples_per_second": seen.samples_per_s,
        "job/workers": seen.num_workers,
        "maths/batch_size": seen.batch_size,
        "maths/global_batch": seen.global_batch,
        "maths/learning_rate_factor": seen.learning_rate_factor,
        "gradients/noise_scale": seen.noise_scale,
        "gradients/variance": seen.variance,
    }
    if seen.workers:
        found["network/strategy_bytes_per_second"] = min(worker.throughput for worker in seen.workers)
        found["network/egress_bytes"] = sum(worker.egress_bytes for worker in seen.workers)
    return {name: value for name, value in found.items() if value is not None}
