"""What adaptation adds to a row, and decisions, come out as they went in; the facts of a step are those that are seen."""

from __future__ import annotations

import pytest

from pliant.adapt import Observation, Resize, SetBatchSize, WorkerFigures
from pliant.train.adaptation import (
    MESSAGE_BYTES,
    AdaptationMessage,
    decode_decisions,
    encode_decisions,
    links_fact,
    step_fact,
)

pytestmark = pytest.mark.timeout(30)
FIGURES = WorkerFigures(name="a:1", step_s=0.5, compute_s=0.25, comm_bytes=3e6, comm_s=0.125, egress_bytes=1e6)
DECIDED = [("one", SetBatchSize(size=64, reason="more")), ("other", Resize(workers=2, reason="fewer"))]


def test_a_row_says_what_it_was_given() -> None:
    message = AdaptationMessage(len(encode_decisions(DECIDED)), 12.5, FIGURES, b"probed")
    row = message.to_bytes()
    assert len(row) == MESSAGE_BYTES + len(b"probed")
    assert AdaptationMessage.from_bytes("a:1", row) == message


def test_decisions_travel() -> None:
    assert decode_decisions(encode_decisions(DECIDED)) == DECIDED
    assert decode_decisions(encode_decisions([])) == []


def _seen(**more: float) -> Observation:
    return Observation(step=3, epoch=1, view=5, replicas=4, batch_size=8, strategy="RING", workers=(FIGURES,), **more)


def test_what_is_not_known_is_no_fact() -> None:
    assert "noise_scale" not in step_fact(_seen(), {})
    assert "values" not in step_fact(_seen(), {})
    found = step_fact(_seen(noise_scale=2.0), {"loss": 0.5})
    assert (found["noise_scale"], found["values"], found["workers"]) == (2.0, {"loss": 0.5}, 1)


def test_links_are_those_between_hosts() -> None:
    rates = ((0.0, 9.0, 1.4), (9.0, 0.0, 9.0), (2.6, 9.0, 0.0))
    found = links_fact(["a", "a", "b"], rates)
    assert found == {"hosts": ["a", "b"], "bytes_per_s": [[0, 1], [3, 0]]}
