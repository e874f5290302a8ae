"""What a federated job is: data and whose they are, the model, who is picked, how long, and how results become one model.

`FedConfig` is all that a run depends on: two runs of one config have the same bits, whatever executes them; without `batching`,
where both have measured the same. Job files are read by `fed.jobfile` (our form) and `fed.artifact`; nothing here opens one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""As torch's generators take them."""
Rate = Annotated[float, Field(gt=0, le=1e30)]
"""A number of single precision."""
Option = int | float | str | bool | None
"""A value of a selector or an aggregator, which checks it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NamedOptions(_Section):
    """One of several kinds by its name, and its options."""

    kind: str
    options: dict[str, Option] = {}


class DataConfig(_Section):
    """Samples, and how they are dealt to clients."""

    kind: str = "fashion-mnist"
    """fashion-mnist, digits, images, speech, play, posts; or module:function, which returns training and test `Samples`."""
    path: str = ""
    """The file or folder; empty where the kind has a place of its own."""
    partition: Literal["natural", "iid", "dirichlet", "shards"] = "iid"
    map: str = ""
    """A client map (CSV, or FedScale's pickle) for natural partitions."""
    clients: Natural = 100
    """Of drawn partitions; of natural ones the first so many, 0 for all."""
    alpha: Positive = 0.1
    """Of Dirichlet partitions."""
    per_client: Count = 2
    """Shards of each client."""
    sizes: str = ""
    """A table of clients' sizes to draw from; empty: all alike."""
    least: Count = 1
    """Clients with fewer samples are left out; sizes from a table are raised to it."""
    most: Natural = 0
    """Clients with more are left out, sizes from a table lowered to it; 0: no limit."""
    test_samples: Natural = 0
    """How many of the test samples are used; 0: all."""


MAX_SAMPLES = 10**8
"""Of one client in one round."""


class LocalConfig(_Section):
    """What a participant does with the model it is given."""

    steps: Count = 10
    batch_size: Count = 20
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Rate = 0.05
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    lr_decay: Share = 1.0
    """The rate is multiplied by it every `decay_rounds` rounds."""
    decay_rounds: Count = 10
    min_lr: NotNegative = 0.0
    longer: bool = False
    """Who would wait for the slowest trains longer instead (PyramidFL's rule)."""


class PrivacyConfig(_Section):
    clip: Positive = 3.0
    noise_multiplier: NotNegative = 1.0
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Of the account of what was given away."""


class FedConfig(_Section):
    """A federated job."""

    name: str = "federated"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    model: str = "cnn"
    """A name that `fed.data.models` knows, or module:function, which is given the number of classes."""
    local: LocalConfig = LocalConfig()
    participants: Count = 20
    """K: updates that make a round."""
    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.3
    """So many times K are invited; the first K count."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """On the virtual clock; who is later is cut, and the round is made by those who are there."""
    rounds: Count = 100
    """For asynchronous jobs: how often the model moves."""
    target: Share = 0.0
    """The accuracy with which the job ends early; 0: it does not."""
    concurrency: Natural = 0
    """Of asynchronous jobs: clients that train at a time; 0: K times `overcommit`."""
    selector: NamedOptions = NamedOptions(kind="oort")
    aggregator: NamedOptions = NamedOptions(kind="fed-avg")
    privacy: PrivacyConfig | None = None
    malicious: Share = 0.0
    """The share of clients whose labels are permuted; for experiments."""
    devices: str = "synthetic"
    """A table, `synthetic`, or `equal`."""
    availability: str = ""
    """A trace, `synthetic`, or empty: always there."""
    model_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """What travels each way on the virtual clock; 0: the model's real size."""
    clock_factor: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Computing takes so many times as long as the table says: the model beside the one the table was measured with."""
    evaluate_every: Count = 5
    """Rounds; the last one is evaluated always."""
    checkpoint_every: Count = 10
    batching: Annotated[int, Field(ge=0)] | None = None
    """Clients trained at once by `torch.func.vmap`; 0 or 1: in turn; None: measured once, and kept with the job."""
    device: Literal["", "cpu", "cuda"] = ""
    """Of the executors; empty: what they have."""

    @field_validator("selector", "aggregator", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        """`oort`, or {kind: oort, preset: artifact}: options may stand beside the kind."""
        if isinstance(given, str):
            return {"kind": given}
        if isinstance(given, dict) and "options" not in given:
            return {"kind": given.get("kind"), "options": {k: v for k, v in given.items() if k != "kind"}}
        return given

    @model_validator(mode="after")
    def _together(self) -> FedConfig:
        if self.data.partition != "natural" and self.data.clients < 1:
            raise ValueError(f"data.clients {self.data.clients}: a {self.data.partition} partition needs 1 or more")
        steps, size = self.local.steps, self.local.batch_size
        if steps * size > MAX_SAMPLES:
            key, other = ("steps", "batch_size") if steps > size else ("batch_size", "steps")
            given = f"{max(steps, size)} with local.{other} {min(steps, size)}"
            raise ValueError(f"local.{key} {given}: use no more than {MAX_SAMPLES} samples of a client in a round")
        return self

    @property
    def invited(self) -> int:
        """Clients that a round begins with."""
        return max(self.participants, int(self.participants * self.overcommit + 1e-9))

    def lr_in(self, round_number: int) -> float:
        """The clients' learning rate in a round, counted from 1."""
        decayed = self.local.lr * self.local.lr_decay ** ((round_number - 1) // self.local.decay_rounds)
        return max(decayed, self.local.min_lr)
