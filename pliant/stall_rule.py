"""When a worker counts as stalled: a pure rule over what the progress board says.

A worker is compared with its own recent steps. Nobody can say how long the program's code outside of turns takes (an
evaluation, a checkpoint, the start of loaders), or the first steps after a change of workers (kernels are compiled, data are
searched for the place to go on), so these have ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.duration import parse_duration, span_text
from pliant.errors import ConfigError
from pliant.progress_board import Activity, Reading

LEAST_S = 60.0
NUM_STEPS = 20
"""By default a worker has the time of so many median steps, and `LEAST_S` at least."""
MORE_TIME = 10
"""Outside of turns, and in its first steps in a view, a worker has so many times as long."""
FIRST_STEPS = 5
LOOK_S = 5.0
LOOK_STEPS = 5
"""A worker is looked at after so many median steps, and `LOOK_S` at least; after half its time at the latest."""


def parse_stall_timeout(text: str) -> float | None:
    """Parse `--stall-timeout`: 0.0 for `off`, and None for an empty text, which stands for the default.

    Raises:
        ConfigError: it is not a time.
    """
    if not text:
        return None
    if text.lower() == "off":
        return 0.0
    timeout_s = parse_duration(text, "--stall-timeout")
    if timeout_s <= 0:
        raise ConfigError(f"--stall-timeout {text!r}: use a time such as 90s, or off")
    return timeout_s


def format_stall_timeout(timeout_s: float | None) -> str:
    return "" if timeout_s is None else repr(timeout_s) if timeout_s else "off"


@dataclass(frozen=True, slots=True)
class StallRule:
    """How long a worker may keep the others waiting."""

    timeout_s: float | None = None
    """As the user has set it; None: by the median step. 0: for ever."""

    @property
    def is_on(self) -> bool:
        return self.timeout_s != 0

    def limit_s(self, reading: Reading | None, median_s: float = 0.0) -> float:
        """Return how long a worker may do the same thing before it is given up, infinity if it never is.

        Where nothing is known of it (`reading` is None), `median_s` is the step of whoever waits for it.
        """
        if not self.is_on:
            return float("inf")
        step_s = reading.median_s if reading is not None else median_s
        limit_s = self.timeout_s if self.timeout_s is not None else max(LEAST_S, NUM_STEPS * step_s)
        return limit_s if _is_in_turn(reading) else MORE_TIME * limit_s

    @property
    def start_limit_s(self) -> float:
        """How long a worker that the job does not count on yet may do nothing at all, infinity if that does not matter."""
        return MORE_TIME * (LEAST_S if self.timeout_s is None else self.timeout_s) if self.is_on else float("inf")

    def look_s(self, reading: Reading) -> float:
        """Return how long a worker may do the same thing before it is worth a look."""
        look_s = max(LOOK_S, LOOK_STEPS * reading.median_s) if _is_in_turn(reading) else MORE_TIME * LEAST_S / 2
        return min(look_s, self.limit_s(reading) / 2)


def _is_in_turn(reading: Reading | None) -> bool:
    return reading is not None and reading.activity is Activity.TURN and reading.num_begun > FIRST_STEPS


def idle_s(reading: Reading, now_s: float) -> float:
    """Return for how long a worker has done the same thing. Outside of a turn that ends whenever its stack is another. A
    worker that waits for others does nothing else, as long as its I/O thread runs."""
    if reading.activity is Activity.WAITING:
        return now_s - reading.pulse_s if reading.pulse_s else 0.0
    moved_s = 0.0 if reading.activity is Activity.TURN else reading.moved_s
    return now_s - max(reading.since_s, moved_s)


def describe(reading: Reading) -> str:
    """Return what a worker does, as the end of a sentence."""
    match reading.activity:
        case Activity.TURN:
            return f"in step {reading.step}"
        case Activity.WAITING:
            return f"in step {reading.step}, and holds its interpreter lock though it waits for others"
        case _:
            return f"in the program's code after step {reading.step}" if reading.num_begun else "before its first step"


def complaint(reading: Reading | None, waited_s: float) -> str:
    """Return why the others give a worker up."""
    what = describe(reading) if reading is not None else "and does not say where it is"
    return f"stalled {what}: the others have waited {span_text(waited_s)} for it (--stall-timeout)"
