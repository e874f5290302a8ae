"""The config of a federated job: data and partition, model, selection, local training, aggregation, number of rounds.

Two runs of one `FedConfig` have the same bits, wherever they run; without `batching`, if both measured the same value.
Nothing here opens a file; `jobfile` and `artifact` read configs from files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pliant.yaml_source import JointMistakes, KeyPath

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed as torch's generators take it."""
Rate = Annotated[float, Field(gt=0, le=1e30)]
"""A number that fits into single precision."""
MAX_CLIENTS = 10**8
Option = int | float | str | bool | None
"""Value of an option of a selector or an aggregator, which checks it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


DEFAULT_PRESET = "balanced"
"""The preset of a selector `oort` that names none. It is written into each config: a later default changes no stored job."""
FORMER_DEFAULT_PRESET = "paper"
"""The default while configs were stored without the preset."""


class NamedOptions(_Section):
    """The name of a selector or an aggregator, and its options."""

    kind: str
    options: dict[str, Option] = {}

    @field_validator("options", mode="before")
    @classmethod
    def _plain(cls, given: object) -> object:
        listed = given.items() if isinstance(given, dict) else ()
        wrong: dict[KeyPath, str] = {
            (name,): f"{name} {value!r:.60}: use a number, text, true or false"
            for name, value in listed
            if not isinstance(value, int | float | str | None)
            or (isinstance(value, float) and not math.isfinite(value))
        }
        if wrong:
            raise JointMistakes(wrong)
        return given


def name_stored_preset(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored config, as JSON, with the former default preset if its selector is `oort` and names none."""
    match config:
        case {"selector": {"kind": "oort", "options": dict(options)} as selector}:
            return {**config, "selector": {**selector, "options": {"preset": FORMER_DEFAULT_PRESET, **options}}}
    return config


class DataConfig(_Section):
    """The samples, and how they are dealt to clients."""

    kind: str = "fashion-mnist"
    """fashion-mnist, digits, images, speech, play, posts; or module:function that returns training and test samples."""
    path: str = ""
    """File or folder of the data; may be empty if the kind has a default."""
    partition: Literal["natural", "iid", "dirichlet", "shards"] = "iid"
    map: str = ""
    """Client map (CSV, or FedScale's pickle) for natural partitions."""
    clients: Annotated[int, Field(ge=0, le=MAX_CLIENTS)] = 100
    """Number of clients. For natural partitions, the first so many; 0 for all."""
    alpha: Positive = 0.1
    """Concentration of Dirichlet partitions."""
    per_client: Count = 2
    """Shards per client, for the partition into shards."""
    sizes: str = ""
    """Table of clients' sizes to draw from; empty: all clients get equally many samples."""
    scale_sizes: bool = False
    """Whether sizes from a table are scaled down if they sum to more samples than there are; if not, that is an error."""
    least: Count = 1
    """Clients with fewer samples are left out; sizes from a table are raised to this."""
    most: Natural = 0
    """Clients with more samples are left out, sizes from a table lowered to this; 0: no limit."""
    test_samples: Natural = 0
    """Number of test samples that are used; 0: all."""


MAX_SAMPLES = 10**8
"""Samples that one client may train on in one round."""


class LocalConfig(_Section):
    """Local training of a participant."""

    steps: Count = 10
    batch_size: Count = 20
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Rate = 0.05
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    lr_decay: Share = 1.0
    """The learning rate is multiplied by this every `decay_rounds` rounds."""
    decay_rounds: Count = 10
    min_lr: NotNegative = 0.0
    longer: bool = False
    """Clients that would wait for the slowest one train longer instead (PyramidFL's rule)."""


class PrivacyConfig(_Section):
    """Differential privacy: clipping and noise."""

    clip: Positive = 3.0
    noise_multiplier: NotNegative = 1.0
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta of the guarantee whose epsilon is computed."""


class FedConfig(_Section):
    """The config of a federated job."""

    name: str = "federated"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    model: str = "cnn"
    """A name from `fed.data.models`, or module:function that is called with the number of classes."""
    local: LocalConfig = LocalConfig()
    participants: Count = 20
    """K: the number of updates that make a round."""
    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.3
    """This many times K clients are invited; the first K to finish count."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds on the virtual clock after which a round ends without the clients that have not finished."""
    rounds: Count = 100
    """Number of rounds; for asynchronous jobs, how often the model changes."""
    target: Share = 0.0
    """Test accuracy at which the job ends early; 0: it does not."""
    concurrency: Natural = 0
    """For asynchronous jobs, clients that train at a time; 0: K times `overcommit`."""
    selector: NamedOptions = NamedOptions(kind="oort", options={"preset": DEFAULT_PRESET})
    aggregator: NamedOptions = NamedOptions(kind="fed-avg")
    privacy: PrivacyConfig | None = None
    malicious: Share = 0.0
    """Share of clients whose labels are permuted; for experiments."""
    devices: str = "synthetic"
    """Path of a device table, `synthetic`, or `equal`."""
    availability: str = ""
    """Path of an availability trace, `synthetic`, or empty: clients are always available."""
    model_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Bytes that travel each way on the virtual clock; 0: the model's real size."""
    clock_factor: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Computing takes this many times as long as the device table says, if it was measured with another model."""
    evaluate_every: Count = 5
    """Rounds from one test to the next; the last round is always tested."""
    checkpoint_every: Count = 10
    batching: Annotated[int, Field(ge=0)] | None = None
    """Clients trained as one computation; 0 or 1: in turn; None: measured once, and kept with the job."""
    device: Literal["", "cpu", "cuda"] = ""
    """Device of the workers; empty: a GPU if they have one."""

    @field_validator("selector", "aggregator", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        """Accept `oort` and {kind: oort, preset: artifact}: options may stand beside the kind."""
        if isinstance(given, str):
            return {"kind": given}
        if isinstance(given, dict) and "options" not in given:
            return {"kind": given.get("kind"), "options": {k: v for k, v in given.items() if k != "kind"}}
        return given

    @field_validator("selector")
    @classmethod
    def _name_preset(cls, selector: NamedOptions) -> NamedOptions:
        if selector.kind != "oort":
            return selector
        return NamedOptions(kind="oort", options={"preset": DEFAULT_PRESET, **selector.options})

    @model_validator(mode="after")
    def _together(self) -> FedConfig:
        wrong: dict[KeyPath, str] = {}
        clients = self.data.clients
        if self.data.partition != "natural" and clients < 1:
            wrong[("data", "clients")] = f"data.clients {clients}: a {self.data.partition} partition needs 1 or more"
        steps, size = self.local.steps, self.local.batch_size
        if steps * size > MAX_SAMPLES:
            key, other = ("steps", "batch_size") if steps > size else ("batch_size", "steps")
            given = f"{max(steps, size)} with local.{other} {min(steps, size)}"
            wrong[("local", key)] = (
                f"local.{key} {given}: use no more than {MAX_SAMPLES} samples of a client in a round"
            )
        if wrong:
            raise JointMistakes(wrong)
        return self

    def check_sizes(self, num_clients: int) -> dict[KeyPath, str]:
        """Return what is wrong with the numbers of clients that this job asks for, by key, if it has so many clients."""
        asked = {("participants",): self.participants, ("concurrency",): self.concurrency}
        return {
            place: f"{place[0]} {count}: the job has {num_clients} clients; use {num_clients} or less, or more clients"
            for place, count in asked.items()
            if count > num_clients
        }

    @property
    def invited(self) -> int:
        """Number of clients that are invited to a round."""
        return max(self.participants, int(self.participants * self.overcommit + 1e-9))

    def lr_in(self, round_number: int) -> float:
        """Return the clients' learning rate in a round, counted from 1."""
        decayed = self.local.lr * self.local.lr_decay ** ((round_number - 1) // self.local.decay_rounds)
        return max(decayed, self.local.min_lr)
