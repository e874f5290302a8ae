"""The figures of a worker's steps, as `priority.tuning` wants them: what was computed, sent, and at which rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pliant.comm.engine import Engine
from pliant.comm.telemetry import Pressure
from pliant.train import trace
from pliant.train.priority.tuning import Measured


@dataclass(slots=True)
class Measuring:
    """The figures of the step in progress, and those of the last one."""

    compute_s: float = 0.0
    last: Measured = field(default_factory=Measured)
    began_s: float = 0.0
    """When the step in progress began, by time.monotonic()."""
    _turn_began_s: float = 0.0
    _waited_s: float = 0.0
    """At gates, when the turn began."""
    _pressure: Pressure = field(default_factory=lambda: Pressure(0, 0.0))
    _sent_bytes: int = 0

    @classmethod
    def of(cls, engine: Engine) -> Measuring:
        """In a new view, where nobody has done a step yet."""
        return cls(_pressure=engine.pressure(), _sent_bytes=engine.wire_bytes)

    def begin_step(self, engine: Engine, step: int) -> None:
        """The step before has ended, and the job's `step`-th begins."""
        now_s, sent, pressure = time.monotonic(), engine.wire_bytes, engine.pressure()
        self.last = Measured(self.compute_s, sent - self._sent_bytes, pressure.rate_since(self._pressure))
        if trace.enabled():
            trace.event("step", f"step {step - 1}", self.began_s or now_s, now_s)
        self.began_s, self.compute_s = now_s, 0.0
        self._sent_bytes, self._pressure = sent, pressure

    def begin_turn(self, waited_s: float) -> None:
        """A replica computes from now on; `waited_s` is what the network has cost so far."""
        self._turn_began_s, self._waited_s = time.monotonic(), waited_s

    def end_turn(self, waited_s: float) -> None:
        self.compute_s += max(0.0, time.monotonic() - self._turn_began_s - (waited_s - self._waited_s))
