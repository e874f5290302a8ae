"""What a policy may look at: the facts of the job after a step, the same on every worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Rates = tuple[tuple[float, ...], ...]
"""Bytes per second from worker i to worker j; 0 on the diagonal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """One worker's last step but one: figures travel with the next. Zeros in the first step of a view."""

    name: str
    """host:port."""
    step_s: float = 0.0
    compute_s: float = 0.0
    """Without what it waited for the network."""
    comm_bytes: float = 0.0
    """What its collectives carried."""
    comm_s: float = 0.0
    """From the first collective's beginning to the last one's end."""
    egress_bytes: float = 0.0
    """To other hosts."""

    @property
    def throughput(self) -> float:
        """Bytes per second of its collectives; 0 where there were none."""
        return self.comm_bytes / self.comm_s if self.comm_s > 0 else 0.0

    @property
    def host(self) -> str:
        return self.name.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The job after a step, as all workers have agreed to see it."""

    step: int
    """Steps committed."""
    epoch: int = 0
    epoch_step: int = 0
    """Steps committed in this epoch."""
    steps_per_epoch: int = 0
    """With the batch size of now."""
    time_s: float = 0.0
    """Since the job began, by the first worker's clock."""
    view: int = 0
    """Grows with every change of the workers."""
    replicas: int = 1
    batch_size: int = 1
    """Of one replica."""
    learning_rate_factor: float = 1.0
    """By what decisions have multiplied the program's own learning rate."""
    strategy: str = "AUTO"
    noise_scale: float | None = None
    """In samples; None: not measured, or not known yet."""
    gradient_sqr: float | None = None
    """Of the true gradient: the estimate of its squared length."""
    gradient_var: float | None = None
    """The trace of the covariance of one sample's gradient."""
    variance: float | None = None
    workers: tuple[WorkerFigures, ...] = ()
    link_rates: Rates | None = None
    """Measured at this boundary, because a policy has asked for it with ProbeLinks; None else."""

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.replicas

    @cached_property
    def step_s(self) -> float:
        """The last step, by the slowest worker."""
        return max((each.step_s for each in self.workers), default=0.0)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s if self.step_s > 0 else 0.0
