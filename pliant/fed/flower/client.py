"""What a Flower client reports to our strategy: who it is, and how much its samples still teach. Starts without torch.

Two calls in a ClientApp suffice:

    @app.query()
    def who(message, context):
        return Message(introduction(context, samples=len(data)), reply_to=message)

    @app.train()
    def train(message, context):
        ...                                             # losses: of each sample, before the step it takes part in
        told = metrics(losses, samples=len(data), duration_s=time.perf_counter() - begun)
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told}), reply_to=message)

Only sums over a client's samples leave it. A client may report less: without `utility` it is worth nothing to guided
selection, and without an introduction it is known by its node.
"""

from __future__ import annotations

import math

from flwr.app import Context, MetricRecord, RecordDict

from pliant.errors import ConfigError
from pliant.fed.selection.base import Numbers, mean_of, statistical_utility

CLIENT, SAMPLES, UTILITY, LOSS, DURATION = "client", "num-examples", "utility", "loss", "duration-s"
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
PARTITION = "partition-id"
Value = int | float | list[int] | list[float]


def introduction(context: Context, *, samples: int, duration_s: float | None = None) -> RecordDict:
    """Return who the client is: the number in the node's config (`partition-id`), its samples, an estimate of its speed.

    The number identifies the client for the life of the federation: a node that comes back with it is the same client.

    Raises:
        ConfigError: the node's config has no such number.
    """
    number = context.node_config.get(PARTITION)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(f"{PARTITION} is {number!r}: start the SuperNode with --node-config '{PARTITION}=0', 1, ...")
    told: dict[str, Value] = {CLIENT: number, SAMPLES: samples}
    if duration_s is not None:
        told[DURATION] = duration_s
    return RecordDict({METRICS: MetricRecord(told)})


def metrics(losses: Numbers, *, samples: int, duration_s: float | None = None) -> MetricRecord:
    """Return the metrics that go with a client's new model.

    `losses` are those of its first pass over its samples, each from before the step that the sample takes part in. Give
    `duration_s` if the server's own measurement would be wrong, as in a simulation whose clients wait for a CPU.
    """
    told: dict[str, Value] = {SAMPLES: samples, UTILITY: statistical_utility(losses), LOSS: mean_of(losses)}
    if duration_s is not None:
        told[DURATION] = duration_s
    return MetricRecord(told)


def number_in(record: RecordDict, name: str) -> float:
    """Return a number that a client reported under this name, in any of its metrics; NaN if it did not."""
    for each in record.metric_records.values():
        value = each.get(name)
        if isinstance(value, (int, float)):
            return float(value)
    return math.nan
