"""What `pliant bench priority` was asked for: parsed and checked before anything starts. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pliant.errors import ConfigError
from pliant_repro import profiles
from pliant_repro.bench.priority.hosts import Host
from pliant_repro.lab.rates import parse_rate
from pliant_repro.profiles import check_trained
from pliant_repro.scaling_model import Layer

SYNCS = ("baseline", "slicing", "priority", "fifo", "auto")
"""What `pliant.join(sync=)` takes."""
MODES = (*SYNCS, "ddp")
SLICED = ("slicing", "priority", "auto")
"""Modes for which the size of a slice is a choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorityOptions:
    """One sweep: a model over rates and modes.

    Raises (when made):
        ConfigError: a value that cannot be, with those that can.
    """

    model: str = "resnet50"
    """A profile's name (paced), a network's name (real), or module:function (real)."""
    nodes: int = 4
    rates: tuple[int | None, ...] = (100_000_000, 200_000_000, 400_000_000)
    """Bits per second; None: no limit."""
    modes: tuple[str, ...] = ("baseline", "slicing", "priority", "ddp")
    compute: str = "paced"
    slices: tuple[int | None, ...] = (None,)
    """Parameters per slice; None: tuned while running."""
    batch: int = 0
    """Samples of a replica's step; 0: the model's own."""
    size: int = 0
    """Pixels or words of a sample, where compute is real; 0: the model's own."""
    repeat: int = 5
    iters: int = 30
    warmup: int = 10
    hosts: tuple[Host, ...] = ()
    """Machines to use over ssh; empty: namespaces on this one."""
    utilisation: bool = False
    """Also sample what the first host sends, every 10 ms."""
    trace: Path | None = None
    start_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        _choose("--compute", self.compute, ("paced", "real"))
        if not self.modes:
            raise ConfigError(f"--modes is empty: use some of {', '.join(MODES)}")
        for mode in self.modes:
            _choose("--modes", mode, MODES)
        if not 2 <= self.nodes <= 64:
            raise ConfigError(f"--nodes {self.nodes}: use 2 to 64; one node sends nothing")
        if not self.rates:
            raise ConfigError("--rate is empty: use rates such as 100,200,400mbit, or none")
        for flag, value, least in (
            ("--repeat", self.repeat, 1), ("--iters", self.iters, 2), ("--warmup", self.warmup, 2),
            ("--batch", self.batch, 0), ("--size", self.size, 0),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"{flag} {value}: use {least} or more")
        if self.hosts and self.utilisation:
            raise ConfigError("--utilisation samples the lab's links: leave it out with --hosts")
        self._check_model()

    def _check_model(self) -> None:
        if ":" in self.model:
            if self.compute == "paced":
                raise ConfigError(f"--model {self.model}: a function's model computes for real; add --compute real")
            module, _, function = self.model.partition(":")
            if not re.fullmatch(r"[A-Za-z_][\w.]*", module) or not function.isidentifier():
                raise ConfigError(f"--model {self.model!r}: use module:function, such as mypackage.models:build")
        elif self.compute == "paced":
            profiles.profile(self.model)
        else:
            check_trained(self.model)

    @property
    def samples(self) -> int:
        """Samples of a replica's step, for throughput; 0: the network's own choice, which only the workers know."""
        return self.batch or (profiles.PUBLISHED_BATCH if self.compute == "paced" else 0)

    def profile(self) -> profiles.Profile:
        """The profile at its scale and batch; only where compute is paced."""
        return chosen_profile(self.model, self.batch)

    def layers(self) -> list[Layer] | None:
        """What the bound needs; None: it has to be measured."""
        return list(profiles.layers_of(self.profile())) if self.compute == "paced" else None


def chosen_profile(name: str, batch: int) -> profiles.Profile:
    """The profile `name` with its default scale; compute grows with the batch."""
    return profiles.scaled(profiles.profile(name, batch=batch or profiles.PUBLISHED_BATCH))


def _choose(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value!r}: use one of {', '.join(known)}")


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_modes(text: str) -> tuple[str, ...]:
    """The comma list of `--modes`."""
    return tuple(_words(text))


def parse_rates(text: str) -> tuple[int | None, ...]:
    """`100,200,400mbit`, `1gbit,none`: a number without a unit has that of the next word with one.

    Raises:
        ConfigError: another form.
    """
    rates: list[int | None] = []
    unit = ""
    for word in reversed([word.strip() for word in text.split(",") if word.strip()]):  # the same rate may come again
        if re.fullmatch(r"[\d.]+", word):
            if not unit:
                raise ConfigError(f"--rate {text!r}: {word} has no unit; use 100,200,400mbit")
            word += unit
        elif found := re.fullmatch(r"[\d.]+([kmg]bit)", word.lower()):
            unit = found[1]
        rates.append(parse_rate(word))
    return tuple(reversed(rates))


def parse_slices(text: str) -> tuple[int | None, ...]:
    """`auto`, or parameters per slice such as `1k,2k,50k,1m`.

    Raises:
        ConfigError: another form.
    """
    slices: list[int | None] = []
    for word in _words(text.lower()):
        found = re.fullmatch(r"(\d+)([km]?)", word)
        if word == "auto":
            slices.append(None)
        elif found and int(found[1]) > 0:
            slices.append(int(found[1]) * {"": 1, "k": 1000, "m": 1_000_000}[found[2]])
        else:
            raise ConfigError(f"--slice {word!r}: use auto, or parameters per slice such as 1k,2k,50k")
    if not slices:
        raise ConfigError("--slice is empty: use auto, or parameters per slice such as 1k,2k,50k")
    return tuple(slices)


def batch_from(flag: int | None, environ: Mapping[str, str]) -> int:
    """The flag, else BATCH_SIZE as the artifact's workflow has it, else 0 (the model's own).

    Raises:
        ConfigError: not a number.
    """
    if flag is not None:
        return flag
    text = environ.get("BATCH_SIZE", "").strip()
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"BATCH_SIZE={text!r} is not a number of samples: use 1 or more, or unset it")
    return int(text) if text else 0
