"""Figures of the whole job, outside of turns: evaluations, functions of each replica, sums over all workers.

The result of an evaluation does not depend on the workers: N fixed shards are dealt over the workers that there are. Each
shard runs with the random state of the replica of the same number, as it would on that DDP rank. Its figures are added in
the order of its batches, and the figures of all shards in the order of shards. If a worker is lost, the shards that only it
had evaluated are dealt to the others.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Subset

from pliant.child import die_with
from pliant.comm.engine import Engine
from pliant.errors import ConfigError, TrainError
from pliant.train.outer_calls import OuterCalls
from pliant.train.rendezvous import spread_state
from pliant.train.replica_copies import is_map
from pliant.train.shadow import Shadow, Unknown
from pliant.train.state_tree import flatten

Figures = dict[str, Any]
NO_EVALUATION = (
    "job.total adds the figures of a batch, in the body of `for batch in job.evaluate(...):`, where a worker that is lost can be "
    "replaced; for other sums use job.all_reduce"
)


class ShardedEvaluation:
    """One evaluation of a dataset: an iterator over batches, and the totals afterwards."""

    def __init__(self, calls: OuterCalls | Shadow, dataset: Any, options: dict[str, Any]) -> None:
        """`options` are those of torch's DataLoader."""
        refused = {"shuffle", "sampler", "batch_sampler"} & set(options)
        if refused:
            raise ConfigError(
                f"job.evaluate({', '.join(sorted(refused))}=...): leave it out, because every replica evaluates a fixed share of "
                "the dataset, in its order"
            )
        if not is_map(dataset):
            raise ConfigError(
                f"job.evaluate got a {type(dataset).__name__}: give it a dataset with __len__ and __getitem__, and a batch size"
            )
        try:
            DataLoader(dataset, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"job.evaluate: {error}. It takes the options of torch's DataLoader") from None
        self._calls, self._dataset, self._options = calls, dataset, options
        self._figures: Figures = {}
        """The figures of the shard in progress."""
        self.is_running = self._is_left = False
        self.totals: dict[str, float] = {}

    def total(self, figures: Figures) -> dict[str, float]:
        """Add figures of the present batch to those of its shard; return the totals, which are known after the loop."""
        if figures and not self.is_running:
            raise TrainError(NO_EVALUATION)
        if self._is_left:
            raise TrainError(
                "job.total() after a loop over job.evaluate that was left early: how far it came depends on the workers. To "
                "evaluate less, give job.evaluate a part of the dataset (torch.utils.data.Subset)"
            )
        for name, value in figures.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._figures[name] = self._figures[name] + value if name in self._figures else value
        return self.totals

    def __iter__(self) -> Iterator[Any]:
        calls, done = self._calls, dict[int, tuple[dict[str, float], bytes]]()
        calls.begin_shards("job.evaluate")
        count = calls.replicas.count
        shards = calls.share_of(range(count))
        self.is_running = True
        try:
            while True:
                for shard in shards:
                    self._figures = {}
                    calls.begin_shard(shard)
                    yield from itertools.islice(self._batches(shard, count), 1 if isinstance(calls, Shadow) else None)
                    figures = {name: _number(name, value) for name, value in self._figures.items()}
                    done[shard] = figures, calls.end_shard(shard)
                rows = self._gather(done)
                found = {shard: (figures, state) for row in rows for shard, figures, state in json.loads(row)}
                missing = [shard for shard in range(count) if shard not in found]
                if not missing or isinstance(calls, Shadow):
                    break
                shards = calls.share_of(missing)
        except GeneratorExit:
            self._is_left = True
            calls.end_shards({})
            raise
        finally:
            self.is_running = False
        calls.end_shards({shard: base64.b64decode(found[shard][1]) for shard in found})
        self.totals = _add([found[shard][0] for shard in sorted(found)])

    def _gather(self, done: dict[int, tuple[dict[str, float], bytes]]) -> list[bytes]:
        """Return what all workers have evaluated."""
        row = json.dumps(
            [[shard, figures, base64.b64encode(left).decode()] for shard, (figures, left) in done.items()]
        ).encode()
        return self._calls.together(
            lambda engine: engine.all_gather_bytes("shards", row), lambda: [row], "job.evaluate"
        )

    def _batches(self, shard: int, count: int) -> Iterator[Any]:
        indices = range(shard, len(self._dataset), count)
        options = dict(self._options)
        if options.get("num_workers"):
            options["worker_init_fn"] = partial(_begin_loading, os.getpid(), options.get("worker_init_fn"))
        return iter(DataLoader(Subset(self._dataset, indices), **options))


def _begin_loading(parent: int, user: Callable[[int], None] | None, number: int) -> None:
    """Begin a process of torch's DataLoader. It shall not outlive a worker that is killed: it has its connections, too."""
    if os.getppid() == parent:  # else a fork server has made it
        die_with(parent)
    if user is not None:
        user(number)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"job.total({name}={value!r:.60}): a figure is a number, or a tensor with one element"
        ) from error


def _add(shards: list[dict[str, float]]) -> dict[str, float]:
    """Add the figures of all shards, in their order. A shard without batches has none."""
    totals: dict[str, float] = {}
    for figures in shards:
        for name, value in figures.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def run_on_replicas(calls: OuterCalls | Shadow, function: Callable[[int], Any], *, draws: bool) -> list[Any]:
    """Return what `function` returns for each replica. The replicas are dealt over the workers that there are."""
    if isinstance(calls, Shadow):
        return [function(calls.replica)] * calls.replicas.count
    calls.begin_shards("job.on_replicas")
    count, done = calls.replicas.count, dict[int, tuple[Any, bytes]]()
    replicas = calls.share_of(range(count))
    while True:
        for replica in replicas:
            calls.begin_shard(replica)
            result = function(replica)
            flatten(result, "the result of job.on_replicas")
            done[replica] = result, calls.end_shard(replica)

        def ask(engine: Engine) -> list[Any]:
            return [spread_state(engine, done if engine.rank == rank else None, rank) for rank in range(engine.size)]

        rows = calls.together(ask, lambda: [done], "job.on_replicas")
        found = {replica: each for row in rows for replica, each in cast(dict[int, tuple[Any, bytes]], row).items()}
        missing = [replica for replica in range(count) if replica not in found]
        if not missing:
            break
        replicas = calls.share_of(missing)
    calls.end_shards({replica: left for replica, (_, left) in found.items()} if draws else {})
    return [found[replica][0] if replica in found else None for replica in range(count)]


def all_reduce(calls: OuterCalls | Shadow, value: Any, op: str) -> Any:
    """Return the sum of a number or tensor over all workers; or with another `op` the "mean", "max" or "min"."""
    if op not in ("sum", "max", "min", "mean"):
        raise ConfigError(f"job.all_reduce(op={op!r}): use 'sum', 'mean', 'max' or 'min'")
    try:
        own = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"job.all_reduce({value!r:.60}): use a number or a tensor") from None

    def ask(engine: Engine) -> torch.Tensor:
        host = own.to("cpu", copy=True).contiguous()
        engine.all_reduce("outer", host.view(-1), op="sum" if op == "mean" else op, order="ddp").wait()
        return host / engine.size if op == "mean" else host

    found = calls.together(ask, lambda: own.clone(), "job.all_reduce")
    return found.to(value.device) if isinstance(value, torch.Tensor) else float(found)


def gather(calls: OuterCalls | Shadow, value: Any) -> list[Any]:
    """Return what each worker has given, in the order of ranks."""
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"job.gather({value!r:.60}): use numbers, strings, and lists and dicts of them") from error
    rows = calls.together(lambda engine: engine.all_gather_bytes("outer", data), lambda: [data], "job.gather")
    return [json.loads(row) for row in rows]


def run_on_first(calls: OuterCalls | Shadow, function: Callable[[], Any]) -> Any:
    """Return what `function` returns on the first worker. It runs there once, with the random state of replica 0."""
    if isinstance(calls, Shadow):
        return Unknown()  # the function may write files
    calls.begin_shards("job.on_first")
    results: list[dict[str, Any]] = []

    def run() -> dict[str, Any]:
        if not results:
            calls.begin_shard(0)
            result = function()
            flatten(result, "the result of job.on_first")  # refuses what could not travel, also where nothing has to
            results.append({"result": result, "left": calls.end_shard(0)})
        return results[0]

    def ask(engine: Engine) -> Any:
        return spread_state(engine, run() if engine.rank == 0 else None)

    found = calls.together(ask, run, "job.on_first")
    calls.end_shards({0: found["left"]})
    return found["result"]
