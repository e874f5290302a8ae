"""`pliant bench preemption`: what its figures mean, without measuring any."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from pliant_repro.bench import preemption
from pliant_repro.bench.preemption import LATENCY, QUEUED, SEND_MODES, Delays, Links

MBIT = 125_000.0
LINKS = Links(2, 100 * MBIT)


def event(category: str, begin_s: float, end_s: float, name: str = "first") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}


def cells(narrow_s: float, fifo_s: float, wide_s: float, wide_queued: float = 1_250_000) -> list[dict[str, Any]]:
    found = (
        Delays([narrow_s] * 3, 125_000, 62_500), Delays([fifo_s] * 3, 125_000, 0), Delays([wide_s] * 3, 4 << 20, wide_queued)
    )  # fmt: skip
    return [preemption.make_cell(mode, LINKS, each) for mode, each in zip(SEND_MODES, found, strict=True)]


def test_the_yardsticks() -> None:
    assert LINKS.first_s == pytest.approx(4000 / 12.5e6)
    assert LINKS.all_s == pytest.approx(0.80032)
    assert LINKS.queues_s(125_000) == pytest.approx(0.020)


def test_a_latency_is_from_the_last_gradient_to_the_last_parameter() -> None:
    ranks = [
        [event(LATENCY, 1.0, 1.3), event("step", 0.0, 9.0), event(LATENCY, 2.0, 2.1)],
        [event(LATENCY, 1.1, 1.2), event(LATENCY, 2.0, 2.4)],
    ]
    assert preemption.latencies_s(ranks) == pytest.approx([0.2, 0.4])


def test_queues_are_those_of_the_last_steps() -> None:
    ranks = [
        [event(QUEUED, 1, 1, "900"), event(QUEUED, 2, 2, "100")],
        [event(QUEUED, 1, 1, "0"), event(QUEUED, 2, 2, "300")],
    ]
    assert preemption.mean_queued_bytes(ranks, 1) == 200


@pytest.mark.parametrize(
    ("figures", "holds"),
    [
        ((0.030, 0.73, 0.220), [True, True, True]),
        ((0.031, 0.73, 0.221), [False, True, True]),
        ((0.030, 0.71, 0.220), [True, False, True]),
        ((0.030, 0.73, 0.040), [True, True, False]),  # ten times the queues, no worse: one does not wait for them
        ((0.030, 0.73, 0.600), [True, True, False]),
    ],
)
def test_verdicts(figures: tuple[float, float, float], holds: list[bool]) -> None:
    made = cells(*figures)
    assert [ok for _, ok in preemption.judge(made)] == holds
    result = preemption.make_result(LINKS, made, {}, [])
    assert result["ok"] is all(holds)
    assert {"bench", "args", "ours", "peers", "bound", "cells", "machine", "ok", "remarks"} <= set(result)
    json.dumps(result)


def test_the_model_notes_latency_and_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(preemption.trace, "enabled", lambda: True)
    monkeypatch.setattr(preemption.trace, "event", lambda category, name, *_: noted.append((category, name)))
    model, inputs = preemption.build()
    for _ in range(2):
        model(inputs).square().mean().backward()
    assert [category for category, _ in noted] == [QUEUED, LATENCY, QUEUED]
    assert noted[0][1].isdecimal()


def test_unread_bytes_are_queued() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            sender.setblocking(False)
            before = preemption.queued_bytes()
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(b"\0" * 65536)
            assert preemption.queued_bytes() > before + 65536
