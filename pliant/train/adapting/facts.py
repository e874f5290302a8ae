"""What of a job goes into its record: which facts, and the file that they are appended to.

Whose turn it is to write a fact is decided by the caller: one worker shall do so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pliant import record
from pliant.adapt import Observation
from pliant.adapt.policy import LinkRates
from pliant.comm.topology import masters


class Facts:
    """A record that is opened with the first fact that this worker writes; nothing at all without a path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._recorder: record.Recorder | None = None

    def write(self, kind: str, step: int, **data: Any) -> None:
        if not self._path:
            return
        if self._recorder is None:
            self._recorder = record.Recorder(self._path)
        self._recorder.write(kind, step, **data)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def of_workers(seen: Observation) -> dict[str, Any]:
    """Who trains now, and how."""
    names = [each.name for each in seen.workers]
    return {"view": seen.view, "workers": names, "replicas": seen.replicas, "strategy": seen.strategy}


def of_step(seen: Observation, values: Mapping[str, float]) -> dict[str, Any]:
    """How a step went; `values` are the program's own."""
    measured = {"noise_scale": seen.noise_scale, "variance": seen.variance}
    return {
        "epoch": seen.epoch,
        "workers": seen.num_workers,
        "batch_size": seen.batch_size,
        "learning_rate_factor": seen.learning_rate_factor,
        "step_s": round(seen.step_s, 6),
        "samples_per_s": round(seen.samples_per_s, 3),
        **{name: value for name, value in measured.items() if value is not None},
        **({"values": values} if values else {}),
    }


def of_links(hosts: Sequence[str], rates: LinkRates) -> dict[str, Any]:
    """Between hosts, each told by its first worker: those of one host share its memory. `hosts` are the workers'."""
    firsts = masters(hosts)
    between = [[round(rates[one][other]) for other in firsts] for one in firsts]
    return {"hosts": [hosts[first] for first in firsts], "bytes_per_s": between}
