"""RecordSource for the page's tests, as jobs would have written them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def write(path: Path, facts: Iterator[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for fact in facts:
            out.write(json.dumps(fact) + "\n")
    return path


def training(steps: int = 1200, begun_s: float = 1_790_000_000.0) -> Iterator[dict[str, Any]]:
    """A job that grows, loses a worker, doubles its batch, and changes its topology."""
    draw = random.Random(1)
    views = {1: 2, 301: 4, 601: 6, 801: 5}
    batch, workers = 16, 2
    for step in range(steps + 1):
        at: dict[str, Any] = {"step": step, "time_s": begun_s + step * 0.4}
        if step == 0:
            yield {"kind": "start", **at, "replicas": 8, "batch_size": batch, "workers": 2}
            continue
        if step in views:
            old, workers = workers, views[step]
            names = [f"{HOSTS[rank // 2]}:{10000 + rank % 2}" for rank in range(workers)]
            if step > 1:
                lost = step == 801
                view = {
                    "old": old,
                    "new": workers,
                    "pause_s": 0.9 if lost else 0.03,
                    "lost": lost,
                    "repeated": int(lost),
                }
                yield {"kind": "view", **at, "step": step - 1, **view}
            yield {"kind": "workers", **at, "view": step, "workers": names, "replicas": 8, "strategy": "AUTO"}
        noise = 60 + step * 0.9 + draw.gauss(0, 20)
        if step in (400, 900):
            batch *= 2
            reason = f"noise scale {noise:.0f} > batch {8 * batch // 2}"
            decided = {"kind": "set_batch_size", "size": batch, "reason": reason}
            yield {"kind": "decision", **at, "policy": "gns", "decision": decided}
        if step == 700:
            rates = [[0, 118e6, 120e6], [117e6, 0, 11.6e6], [119e6, 11.9e6, 0]]
            yield {"kind": "links", **at, "hosts": list(HOSTS), "bytes_per_s": rates}
            parents = {"kind": "set_topology", "strategy": [0, 0, 0, 2, 0, 4], "reason": "a link at 95 Mbit/s"}
            yield {"kind": "decision", **at, "policy": "interference", "decision": parents}
        speed = workers * 210 * (1 + math.log2(batch / 16) / 9) * draw.gauss(1, 0.05)
        loss = 2.3 * math.exp(-step / 380) + 0.18 + draw.gauss(0, 0.05)
        figures = {"workers": workers, "batch_size": batch, "step_s": 0.4, "samples_per_s": speed, "noise_scale": noise}
        yield {"kind": "step", **at, **figures, "values": {"loss": loss}}


def large(steps: int = 100_000, workers: int = 1000) -> Iterator[dict[str, Any]]:
    """What a page must bear."""
    draw = random.Random(2)
    names = [f"10.{rank // 8 // 250}.{rank // 8 % 250}.1:{10000 + rank % 8}" for rank in range(workers)]
    yield {"kind": "start", "step": 0, "time_s": 1.0, "replicas": workers, "batch_size": 8, "workers": workers}
    for step in range(1, steps + 1):
        at = {"step": step, "time_s": step}
        if step % 20_000 == 1:
            there = names if step % 40_000 == 1 else names[: workers // 2]
            yield {"kind": "workers", **at, "workers": there, "replicas": workers, "strategy": "AUTO"}
        speed = len(there) * 80 + draw.random()
        figures = {"workers": len(there), "batch_size": 8, "step_s": 0.1, "samples_per_s": speed}
        yield {"kind": "step", **at, **figures, "values": {"loss": 5 / step**0.3 + draw.random() / 9}}


def federated(rounds: int = 120, clients: int = 300, participants: int = 10) -> Iterator[dict[str, Any]]:
    """A job that prefers some clients."""
    draw = random.Random(3)
    clock_s = 0.0
    config = {
        "name": "speech",
        "participants": participants,
        "target": 0.7,
        "model": "cnn",
        "data": {"kind": "speech"},
        "selector": {"kind": "oort"},
        "aggregator": {"kind": "fed-yogi"},
    }
    yield {"kind": "start", "step": 0, "time_s": 1.79e9, "config": config, "clients": clients}
    for number in range(1, rounds + 1):
        invited = sorted({int(clients * draw.random() ** 1.7) for _ in range(participants * 13 // 10)})
        done, cut, lost = invited[:participants], invited[participants : participants + 2], invited[participants + 2 :]
        took_s = draw.uniform(50, 160)
        clock_s += took_s
        at = {"step": number, "time_s": 1.79e9 + number, "round": number, "clock_s": clock_s}
        outcome = {"invited": invited, "aggregated": done, "cut": cut, "lost": lost, "picked": len(invited)}
        of_clients = {
            "client_s": [took_s * (0.3 + 0.7 * (client % 97) / 97) for client in done],
            "client_loss": [3 / number**0.5 * (0.5 + client / clients) for client in done],
        }
        rest = {
            "begin_s": clock_s - took_s,
            "lr": 0.05,
            "there": clients,
            "malicious": 0,
            "left_out": {},
            "selector": {},
        }
        yield {"kind": "round", **at, "duration_s": took_s, **outcome, **of_clients, **rest, "loss": 3 / number**0.5}
        if number % 5 == 0:
            accuracy = 0.78 * (1 - math.exp(-number / 35)) + draw.gauss(0, 0.008)
            yield {"kind": "test", **at, "accuracy": accuracy, "top_5": min(1.0, accuracy + 0.15), "loss": 1.0}
    yield {"kind": "end", "step": rounds, "time_s": 1.79e9 + rounds, "why": "rounds"}


EVIL = "<img src=x onerror=window.evil=1>"


def evil(steps: int = 40) -> Iterator[dict[str, Any]]:
    """Names and reasons that would run in a browser, were they not escaped; a decision in the middle."""
    yield {"kind": "start", "step": 0, "time_s": 1.0, "replicas": 2, "batch_size": 8, "workers": 2}
    view = {"workers": [f"{EVIL}:1", "b:2"], "replicas": 2, "strategy": EVIL}
    yield {"kind": "workers", "step": 1, "time_s": 1.0, **view}
    for step in range(1, steps + 1):
        values = {"loss": 1 / step, EVIL: 0.5, ":formatter": 0.1}
        yield {"kind": "step", "step": step, "time_s": 1.0, "workers": 2, "samples_per_s": 9.0, "values": values}
        if step == steps // 2:
            decided = {"kind": "set_batch_size", "size": 16, "reason": f"noisy {EVIL}"}
            yield {"kind": "decision", "step": step, "time_s": 1.0, "policy": EVIL, "decision": decided}
