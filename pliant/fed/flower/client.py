"""What a Flower client tells our strategy: who it is, and how much its samples still teach. Starts without torch.

Two calls in a ClientApp suffice:

    @app.query()
    def who(message, context):
        return Message(introduction(context, samples=len(data)), reply_to=message)

    @app.train()
    def train(message, context):
        ...                                             # losses: of each sample, before the step it takes part in
        told = metrics(losses, samples=len(data), duration_s=time.perf_counter() - begun)
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told}), reply_to=message)

Only sums over a client's samples leave it. A client that tells less takes part all the same: without `utility` it is worth
nothing to guided selection, without an introduction it is known by its node.
"""

from __future__ import annotations

import math

from flwr.app import Context, MetricRecord, RecordDict

from pliant.errors import ConfigError
from pliant.fed.selection.base import LossMeter, Numbers

CLIENT, SAMPLES, UTILITY, LOSS, DURATION = "client", "num-examples", "utility", "loss", "duration-s"
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
PARTITION = "partition-id"
Value = int | float | list[int] | list[float]


def introduction(context: Context, *, samples: int, duration_s: float | None = None) -> RecordDict:
    """The answer to "who are you": the number in the node's config (`partition-id`), its samples, a guess of its speed.

    The number is the client's name for as long as the federation lives: a node that comes back with it is the same client.

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
    """What goes with a client's new model.

    `losses` are those of its first pass over its samples, each from before the step that the sample takes part in.
    `duration_s` is told where the server's own watch would be wrong: in a simulation, where clients wait for a processor.
    """
    meter = LossMeter()
    meter.add(losses)
    told: dict[str, Value] = {SAMPLES: samples, UTILITY: meter.utility(), LOSS: meter.mean}
    if duration_s is not None:
        told[DURATION] = duration_s
    return MetricRecord(told)


def number_in(record: RecordDict, name: str) -> float:
    """What a client told under this name, in whichever of its metrics; NaN where it did not, or told something else."""
    for each in record.metric_records.values():
        value = each.get(name)
        if isinstance(value, (int, float)):
            return float(value)
    return math.nan
