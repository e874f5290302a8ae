"""Interference: when most workers' collectives have become slow, measure the links and take the topology that avoids the slow ones.

Each worker has a vote, cast by its throughput: below a share of what it was in quiet times. A majority, twice in a row,
has all links measured, and measured again in the next step if some carry less than in quiet times. Only if both say so,
and another topology is clearly better on what they carry, is it changed: a busy machine is not a busy network. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from pliant.adapt.base import Policy
from pliant.adapt.decisions import ProbeLinks, SetTopology
from pliant.adapt.observation import Observation
from pliant.comm import strategy_selection
from pliant.comm.strategy_selection import Network
from pliant.comm.topology import parse_strategy
from pliant.errors import ConfigError

LEARNED = 5
"""Steps after which there is a reference."""
SETTLING = 3
"""Steps around a measurement or a change whose figures say nothing: they come a step late, and have it in them."""
TRIAL = 3
"""Steps after which a new topology must have proved itself."""
WORSE = 0.9
"""Below this share of what it was before, a change is taken back."""
DEGRADED = 1.4
"""The network is at fault if the present topology would take so much longer on it than in quiet times."""
REMEMBERED = 5
"""Measurements of quiet links, of which the median is taken."""
LEAST_WAIT, MOST_WAIT = 4, 160
"""Steps until the next alarm is heard, after one that has changed nothing; twice as many each time."""
MOST_RECHECK = 800
MIB = 1 << 20

Answer = ProbeLinks | SetTopology | None


class Interference(Policy):
    """Takes another topology when the present one suffers from other traffic, and the old one back when that is better again.

    Args:
        threshold: a worker votes for a change below this share of its reference, the median of its last quiet steps.
        warmup: steps of a view that are not looked at.
        window: quiet steps that make the reference.
        bad_steps: votes in a row that have the links measured.
        margin: how much faster than the present one another topology must be.
        recheck: steps after a change until the old way is looked at again; then twice as many, and so on.
        num_bytes: sent on each link when they are measured.

    Attributes:
        say: told of each vote, in the words of KungFu's artifact; silent unless it is replaced.
    """

    def __init__(
        self,
        *,
        threshold: float = 0.8,
        warmup: int = 5,
        window: int = 20,
        bad_steps: int = 2,
        margin: float = 0.15,
        recheck: int = 50,
        num_bytes: int = 1 << 18,
    ) -> None:
        if not 0 < threshold < 1:
            raise ConfigError(f"threshold={threshold:g}: use a share between 0 and 1, such as 0.8")
        if window < LEARNED or warmup < 0 or bad_steps < 1 or recheck < 1:
            raise ConfigError(
                f"warmup={warmup}, window={window}, bad_steps={bad_steps}, recheck={recheck}: "
                f"use 0, {LEARNED}, 1 and 1 or more"
            )
        if not margin > 0:
            raise ConfigError(f"margin={margin:g}: use a share above 0, such as 0.15")
        self.threshold, self.warmup, self.window, self.bad_steps = threshold, warmup, window, bad_steps
        self.margin, self.recheck, self.num_bytes = margin, recheck, num_bytes
        self.say: Callable[[str], None] = lambda text: None
        # What the figures belong to: they are learned anew where any of it changes.
        self._view, self._workers, self._strategy, self._batch = -1, list[str](), "", 0
        self._launch = ""
        """The strategy that the present view began with."""
        self._skip = 0
        self._rows: list[list[float]] = []
        """The last quiet steps: each worker's throughput."""
        self._bad = 0
        self._quiet: dict[str, list[list[float]]] = {}
        """What each host could send and receive when all was well, as often as it was measured."""
        self._asked, self._asked_step = "", 0
        """Why the links are being measured now; empty: they are not."""
        self._why = ""
        self._rates: list[list[float]] = []
        """What the first of two measurements has found."""
        self._wait, self._deaf_until = LEAST_WAIT, 0
        self._next_recheck, self._recheck_every = 0, recheck
        self._trial: list[float] = []
        """After a change: the throughput before it, then that of each step since."""
        self._chosen, self._before = "", ""
        """The strategy of our last change, and the one before it."""

    @property
    def has_adapted(self) -> bool:
        """Whether the present view runs, by our choice, on another topology than it began with."""
        return self._chosen == self._strategy != self._launch

    def after_step(self, seen: Observation) -> Answer:
        if len({worker.host for worker in seen.workers}) < 2:
            return None
        names = [worker.name for worker in seen.workers]
        are_others = seen.view != self._view or names != self._workers
        if seen.link_rates is not None:
            return self._judge(seen) if self._asked and not are_others else None
        if are_others:
            return self._enter(seen, names)
        if self._asked == "first":
            return self._probe(seen, "second", self._why)
        if self._asked and seen.step > self._asked_step + SETTLING:
            self._asked = ""  # the measurement fell victim to something
        if seen.strategy != self._strategy or seen.batch_size != self._batch:
            self._learn_anew(seen)
            if self._strategy not in (self._chosen, self._launch):
                self._launch = self._strategy  # somebody else's choice, which we shall not take back
        rates = [worker.throughput for worker in seen.workers]
        if not all(rates):
            return None
        if self._skip:
            self._skip -= 1
            return None
        return self._look(seen, rates)

    # --- what the figures say ---

    def _enter(self, seen: Observation, names: list[str]) -> Answer:
        """Other workers: they start with the strategy of the launch, and what was chosen for the old ones is no more."""
        had_adapted = self._asked == "view" or self._chosen not in ("", self._launch)
        self._view, self._workers, self._launch = seen.view, names, seen.strategy
        self._asked, self._trial, self._chosen = "", [], ""
        self._learn_anew(seen)
        self._skip = self.warmup
        if had_adapted:
            return self._probe(seen, "view", "other workers: which topology is best for them?")
        return None

    def _learn_anew(self, seen: Observation) -> None:
        self._strategy, self._batch = seen.strategy, seen.batch_size
        self._rows, self._bad, self._skip = [], 0, SETTLING

    def _look(self, seen: Observation, rates: list[float]) -> Answer:
        if self._trial:
            reverted = self._try(seen, rates)
            if reverted is not None:
                return reverted
        if len(self._rows) < LEARNED:
            self._rows.append(rates)
            needs_quiet = not all(worker.host in self._quiet for worker in seen.workers)
            if len(self._rows) == LEARNED and needs_quiet and not self.has_adapted:
                return self._probe(seen, "quiet", "what the links carry in quiet times, to compare with")
            return None
        bad = self._vote(rates)
        if not bad or seen.step < self._deaf_until:
            # While an alarm has just changed nothing, this is how things are: the reference follows.
            self._rows = [*self._rows, rates][-self.window :]
        if not bad and len(self._rows) == self.window and seen.step > self._deaf_until + self.window:
            self._wait = LEAST_WAIT
        self._bad = self._bad + 1 if bad else 0
        if self._bad >= self.bad_steps and seen.step >= self._deaf_until and not self._asked:
            self._bad = 0
            self.say("AP:: cluster reached consensus on changing to alternative strategy")
            return self._probe(seen, "alarm", self._why)
        if self.has_adapted and seen.step >= self._next_recheck and not self._asked:
            return self._probe(seen, "recheck", f"is {self._launch} better again than {self._strategy}?")
        return None

    def _vote(self, rates: Sequence[float]) -> bool:
        """Whether most workers find that this step was slow."""
        reference = [median(column) for column in zip(*self._rows, strict=True)]
        votes = sum(rate < self.threshold * usual for rate, usual in zip(rates, reference, strict=True))
        limit = self.threshold * reference[0]
        self.say(f"MonitorStrategy:: Checking Throughput = {rates[0] / MIB:.2f} MiB/s, reff= {limit / MIB:.2f} MiB/s")
        self.say(f"AP:: cluster response -> {votes}")
        self._why = (
            f"{votes} of {len(rates)} workers below {self.threshold:g} of their usual throughput "
            f"({median(rates) / MIB:.1f} of {median(reference) / MIB:.1f} MiB/s)"
        )
        return bool(2 * votes > len(rates))

    def _try(self, seen: Observation, rates: Sequence[float]) -> SetTopology | None:
        """Take a change back that has made things worse."""
        self._trial.append(median(rates))
        if len(self._trial) <= TRIAL:
            return None
        old, *new = self._trial
        self._trial = []
        if median(new) >= WORSE * old or self._strategy != self._chosen:
            return None
        self._deafen(seen)
        self._chosen = self._before
        reason = f"{median(new) / MIB:.1f} MiB/s after the change are less than the {old / MIB:.1f} before it"
        return SetTopology(strategy=_written(self._before), reason=reason)

    # --- what the links say ---

    def _probe(self, seen: Observation, asked: str, reason: str) -> ProbeLinks:
        self._asked, self._asked_step = asked, seen.step
        return ProbeLinks(num_bytes=self.num_bytes, reason=reason)

    def _judge(self, seen: Observation) -> SetTopology | None:
        """The links have been measured."""
        assert seen.link_rates is not None
        asked, self._asked = self._asked, ""
        self._skip = SETTLING
        hosts = tuple(worker.host for worker in seen.workers)
        network = Network(hosts, seen.link_rates, seen.replicas)
        num_bytes = max((worker.comm_bytes for worker in seen.workers), default=0.0) or 1e6
        present, launch = parse_strategy(seen.strategy), parse_strategy(self._launch)
        match asked:
            case "quiet":
                self._remember(network)
                return None
            case "recheck":
                self._recheck_every = min(MOST_RECHECK, 2 * self._recheck_every)
                self._next_recheck = seen.step + self._recheck_every
                if not strategy_selection.is_faster(launch, present, network, num_bytes, self.margin):
                    return None
                return self._change(seen, self._launch, f"{self._launch} is better again than {seen.strategy}")
            case "alarm" | "second":
                if asked == "second":
                    # A process that had to wait for its turn makes a link seem slow, never fast.
                    rates = [[*map(max, *rows)] for rows in zip(self._rates, seen.link_rates, strict=True)]
                    network = Network(hosts, rates, seen.replicas)
                slower = self._slower(network, num_bytes, seen)
                self.say(f"AP:: {seen.strategy} takes {slower:.2f} x as long on the links as in quiet times")
                if slower < DEGRADED:
                    self._remember(network)
                    self._deafen(seen)
                    return None
                if asked == "alarm":
                    self._asked, self._rates = "first", [[*row] for row in seen.link_rates]
                    return None
                self._why += f"; {seen.strategy} takes {slower:.2g} x as long on these links"
        found = strategy_selection.choose(network, num_bytes, present, preferred=(launch,), margin=self.margin)
        if found.strategy == present:
            self._deafen(seen)
            return None
        written = ",".join(map(str, found.strategy.forest)) or found.strategy.name
        self.say("Interference detected. Changing to alternative comm strategy !")
        why = self._why if asked == "second" else "other workers"
        self._recheck_every, self._next_recheck = self.recheck, seen.step + self.recheck
        return self._change(
            seen,
            written,
            f"{why}; {written} is predicted to take {found.predicted_s / found.present_s:.0%} of its time",
        )

    def _remember(self, network: Network) -> None:
        for host, able in _abilities(network).items():
            self._quiet[host] = [*self._quiet.get(host, []), able][-REMEMBERED:]

    def _slower(self, network: Network, num_bytes: float, seen: Observation) -> float:
        """How much longer the present topology takes than in quiet times, by what some hosts have lost more than most."""
        now = _abilities(network)
        quiet = {
            host: [median(each) for each in zip(*self._quiet.get(host, [able]), strict=True)]
            for host, able in now.items()
        }
        kept = {host: [a / b for a, b in zip(now[host], quiet[host], strict=True)] for host in now}
        # What all have lost, the machine has lost: no topology brings it back. Likewise if it was busy in quiet times.
        usual = median([share for shares in kept.values() for share in shares])
        left = {
            host: [able * min(1.0, share / usual) for able, share in zip(quiet[host], kept[host], strict=True)]
            for host in now
        }
        present = parse_strategy(seen.strategy)
        times = [
            strategy_selection.predict_s(present, Network(network.hosts, _links(network.hosts, able), seen.replicas), num_bytes)
            for able in (left, quiet)
        ]
        return times[0] / times[1]

    def _change(self, seen: Observation, strategy: str, reason: str) -> SetTopology:
        self._before, self._chosen = seen.strategy, strategy
        self._trial = [median([worker.throughput for worker in seen.workers])]
        return SetTopology(strategy=_written(strategy), reason=reason)

    def _deafen(self, seen: Observation) -> None:
        """Nothing can be done about it: hear no alarm for a while."""
        self._deaf_until = seen.step + self._wait
        self._wait = min(MOST_WAIT, 2 * self._wait)


def _abilities(network: Network) -> dict[str, list[float]]:
    """What each host can send and receive."""
    names = [network.hosts[head] for head in network.heads]
    return {host: [*able] for host, *able in zip(names, network.egress, network.ingress, strict=True)}


def _links(hosts: Sequence[str], able: dict[str, list[float]]) -> list[list[float]]:
    """What links can carry that are only limited by the hosts at their ends."""
    return [[min(able[source][0], able[target][1]) for target in hosts] for source in hosts]


def _written(strategy: str) -> str | tuple[int, ...]:
    """As a decision has it: a name, or fathers."""
    parsed = parse_strategy(strategy)
    return parsed.forest or parsed.name
