"""One worker's view of the job: who it is, and the engine that connects it to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from pliant.cluster import View
from pliant.comm.engine import Engine, EngineConfig
from pliant.comm.mesh import MeshConfig
from pliant.comm.topology import Strategy
from pliant.comm.transport import connected
from pliant.identity import WorkerSpec, worker_spec


@dataclass(frozen=True, slots=True)
class Session:
    """A worker that has joined its job."""

    spec: WorkerSpec
    engine: Engine

    @property
    def view(self) -> View:
        return self.spec.view

    @classmethod
    @contextlib.contextmanager
    def join(cls, spec: WorkerSpec | None = None, *, timeout_s: float = 60.0) -> Iterator[Session]:
        """Join the job that the environment (or `spec`) describes; leaves it at the end of the `with`.

        Raises:
            NotLaunched: this process was not started by `pliant run`.
            CommError: the others did not come within `timeout_s`.
        """
        spec = spec or worker_spec()
        mesh = MeshConfig(
            secret=spec.secret,
            join_timeout_s=timeout_s,
            listen_fd=spec.listen_fd,
            tls_cert=spec.tls_cert,
            tls_key=spec.tls_key,
        )
        config = EngineConfig(strategy=Strategy(spec.strategy.upper()), heartbeat_timeout_s=spec.heartbeat_timeout_s)
        with connected(spec.view, spec.worker, mesh, config) as engine:
            yield cls(spec, engine)
