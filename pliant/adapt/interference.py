"""The policy against interference: when collectives have become slow, change to a topology that avoids the slow links.

A worker votes for a change if its throughput is below a share of what it was in quiet times. After a majority twice in a
row, all links are measured. If some carry less than in quiet times, they are measured again in the next step. The
topology changes only if both measurements agree and another topology is clearly better on these links, because a busy
machine is not a busy network. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from pliant.adapt.policy import Observation, Policy, ProbeLinks, SetTopology
from pliant.comm import strategy_selection
from pliant.comm.strategy_selection import Network
from pliant.comm.topology import parse_strategy
from pliant.errors import ConfigError

WARMUP = 5
"""Steps at the beginning of a view that are ignored."""
LEARNED, WINDOW = 5, 20
"""Least and most quiet steps of which the reference is made."""
BAD_STEPS = 2
"""Majorities in a row after which the links are measured."""
MARGIN = 0.15
"""Share by which another topology must be faster than the present one."""
SETTLING = 3
"""Steps to ignore after a measurement or a change: figures come a step late and include it."""
TRIAL = 3
"""Steps after which a new topology is judged."""
WORSE = 0.9
"""A change is undone if the throughput is below this share of what it was before."""
DEGRADED = 1.4
"""The network is at fault if the present topology takes this many times as long on it as in quiet times."""
REMEMBERED = 5
"""Number of measurements of quiet links whose median is taken."""
LEAST_WAIT, MOST_WAIT = 4, 160
"""Steps without alarms after an alarm that changed nothing; doubled each time."""
MOST_RECHECK = 800
MIB = 1 << 20

Answer = ProbeLinks | SetTopology | None


class Interference(Policy):
    """Changes the topology when the present one suffers from other traffic, and changes back when the old one is better.

    Args:
        threshold: a worker votes for a change below this share of its reference, the median of its last quiet steps.
        recheck: steps after a change until the old topology is considered again; doubled each time.

    Attributes:
        report: called with a line on each vote, worded as in KungFu's artifact; does nothing unless it is replaced.
    """

    def __init__(self, *, threshold: float = 0.8, recheck: int = 50) -> None:
        if not 0 < threshold < 1 or recheck < 1:
            raise ConfigError(
                f"threshold={threshold:g}, recheck={recheck}: use a share such as 0.8, and 1 step or more"
            )
        self.threshold, self.recheck = threshold, recheck
        self.report: Callable[[str], None] = lambda text: None
        # The figures belong to these; if any of them changes, the reference is learned again.
        self._view, self._workers, self._strategy, self._batch = -1, list[str](), "", 0
        self._launch = ""
        """Strategy that the present view began with."""
        self._skip = 0
        self._rows: list[list[float]] = []
        """Throughput of each worker in the last quiet steps."""
        self._bad = 0
        self._quiet: dict[str, list[list[float]]] = {}
        """Rates at which each host could send and receive in quiet times, for the last measurements."""
        self._asked, self._asked_step = "", 0
        """Purpose of the measurement that is under way; empty if there is none."""
        self._why = ""
        self._rates: list[list[float]] = []
        """Link rates of the first of two measurements."""
        self._wait, self._deaf_until = LEAST_WAIT, 0
        self._next_recheck, self._recheck_every = 0, recheck
        self._trial: list[float] = []
        """After a change: the throughput before it, then the throughput of each step since."""
        self._chosen, self._before = "", ""
        """Strategy of the last change by this policy, and the strategy before it."""

    @property
    def has_adapted(self) -> bool:
        """Whether this policy has put the present view on another topology than it began with."""
        return self._chosen == self._strategy != self._launch

    def after_step(self, obs: Observation) -> Answer:
        if len({worker.host for worker in obs.workers}) < 2:
            return None
        names = [worker.name for worker in obs.workers]
        workers_changed = obs.view != self._view or names != self._workers
        if obs.link_rates is not None:
            return self._judge_links(obs) if self._asked and not workers_changed else None
        if workers_changed:
            return self._enter(obs, names)
        if self._asked == "first":
            return self._probe(obs, "second", self._why)
        if self._asked and obs.step > self._asked_step + SETTLING:
            self._asked = ""  # the measurement was not made
        if obs.strategy != self._strategy or obs.batch_size != self._batch:
            self._restart_learning(obs)
            if self._strategy not in (self._chosen, self._launch):
                self._launch = self._strategy  # somebody else changed it, so it is not undone
        rates = [worker.throughput for worker in obs.workers]
        if not all(rates):
            return None
        if self._skip:
            self._skip -= 1
            return None
        return self._evaluate(obs, rates)

    def _enter(self, obs: Observation, names: list[str]) -> Answer:
        """Begin a new view: its workers start with the strategy of the launch."""
        had_adapted = self._asked == "view" or self._chosen not in ("", self._launch)
        self._view, self._workers, self._launch = obs.view, names, obs.strategy
        self._asked, self._trial, self._chosen = "", [], ""
        self._restart_learning(obs)
        self._skip = WARMUP
        if had_adapted:
            return self._probe(obs, "view", "other workers: which topology is best for them?")
        return None

    def _restart_learning(self, obs: Observation) -> None:
        self._strategy, self._batch = obs.strategy, obs.batch_size
        self._rows, self._bad, self._skip = [], 0, SETTLING

    def _evaluate(self, obs: Observation, rates: list[float]) -> Answer:
        if self._trial:
            reverted = self._judge_change(obs, rates)
            if reverted is not None:
                return reverted
        if len(self._rows) < LEARNED:
            self._rows.append(rates)
            needs_quiet = not all(worker.host in self._quiet for worker in obs.workers)
            if len(self._rows) == LEARNED and needs_quiet and not self.has_adapted:
                return self._probe(obs, "quiet", "what the links carry in quiet times, to compare with")
            return None
        bad = self._vote(rates)
        if not bad or obs.step < self._deaf_until:
            # If the last alarm changed nothing, slow steps are normal now: the reference follows.
            self._rows = [*self._rows, rates][-WINDOW:]
        if not bad and len(self._rows) == WINDOW and obs.step > self._deaf_until + WINDOW:
            self._wait = LEAST_WAIT
        self._bad = self._bad + 1 if bad else 0
        if self._bad >= BAD_STEPS and obs.step >= self._deaf_until and not self._asked:
            self._bad = 0
            self.report("AP:: cluster reached consensus on changing to alternative strategy")
            return self._probe(obs, "alarm", self._why)
        if self.has_adapted and obs.step >= self._next_recheck and not self._asked:
            return self._probe(obs, "recheck", f"is {self._launch} better again than {self._strategy}?")
        return None

    def _vote(self, rates: Sequence[float]) -> bool:
        """Return whether this step was slow for most workers."""
        reference = [median(column) for column in zip(*self._rows, strict=True)]
        votes = sum(rate < self.threshold * usual for rate, usual in zip(rates, reference, strict=True))
        limit = self.threshold * reference[0]
        self.report(
            f"MonitorStrategy:: Checking Throughput = {rates[0] / MIB:.2f} MiB/s, reff= {limit / MIB:.2f} MiB/s"
        )
        self.report(f"AP:: cluster response -> {votes}")
        self._why = (
            f"{votes} of {len(rates)} workers below {self.threshold:g} of their usual throughput "
            f"({median(rates) / MIB:.1f} of {median(reference) / MIB:.1f} MiB/s)"
        )
        return bool(2 * votes > len(rates))

    def _judge_change(self, obs: Observation, rates: Sequence[float]) -> SetTopology | None:
        """Undo a change that has made things worse."""
        self._trial.append(median(rates))
        if len(self._trial) <= TRIAL:
            return None
        old, *new = self._trial
        self._trial = []
        if median(new) >= WORSE * old or self._strategy != self._chosen:
            return None
        self._ignore_alarms(obs)
        self._chosen = self._before
        reason = f"{median(new) / MIB:.1f} MiB/s after the change are less than the {old / MIB:.1f} before it"
        return SetTopology(strategy=_as_decided(self._before), reason=reason)

    def _probe(self, obs: Observation, asked: str, reason: str) -> ProbeLinks:
        self._asked, self._asked_step = asked, obs.step
        return ProbeLinks(reason=reason)

    def _judge_links(self, obs: Observation) -> SetTopology | None:
        """Decide after the links have been measured."""
        assert obs.link_rates is not None
        asked, self._asked = self._asked, ""
        self._skip = SETTLING
        hosts = tuple(worker.host for worker in obs.workers)
        network = Network(hosts, obs.link_rates, obs.replicas, obs.order)
        num_bytes = max((worker.comm_bytes for worker in obs.workers), default=0.0) or 1e6
        present, launch = parse_strategy(obs.strategy), parse_strategy(self._launch)
        match asked:
            case "quiet":
                self._remember(network)
                return None
            case "recheck":
                self._recheck_every = min(MOST_RECHECK, 2 * self._recheck_every)
                self._next_recheck = obs.step + self._recheck_every
                if not strategy_selection.is_faster(launch, present, network, num_bytes, MARGIN):
                    return None
                return self._change(obs, self._launch, f"{self._launch} is better again than {obs.strategy}")
            case "alarm" | "second":
                if asked == "second":
                    # A process that had to wait for a core makes a link seem slow, never fast.
                    rates = [[*map(max, *rows)] for rows in zip(self._rates, obs.link_rates, strict=True)]
                    network = Network(hosts, rates, obs.replicas, obs.order)
                slower = self._slower(network, num_bytes, obs)
                self.report(f"AP:: {obs.strategy} takes {slower:.2f} x as long on the links as in quiet times")
                if slower < DEGRADED:
                    self._remember(network)
                    self._ignore_alarms(obs)
                    return None
                if asked == "alarm":
                    self._asked, self._rates = "first", [[*row] for row in obs.link_rates]
                    return None
                self._why += f"; {obs.strategy} takes {slower:.2g} x as long on these links"
        found = strategy_selection.choose(network, num_bytes, present, preferred=(launch,), margin=MARGIN)
        if found.strategy == present:
            self._ignore_alarms(obs)
            return None
        written = ",".join(map(str, found.strategy.forest)) or found.strategy.name
        self.report("Interference detected. Changing to alternative comm strategy !")
        why = self._why if asked == "second" else "other workers"
        self._recheck_every, self._next_recheck = self.recheck, obs.step + self.recheck
        return self._change(
            obs,
            written,
            f"{why}; {written} is predicted to take {found.predicted_s / found.present_s:.0%} of its time",
        )

    def _remember(self, network: Network) -> None:
        for host, able in _host_rates(network).items():
            self._quiet[host] = [*self._quiet.get(host, []), able][-REMEMBERED:]

    def _slower(self, network: Network, num_bytes: float, obs: Observation) -> float:
        """Return how many times as long as in quiet times the present topology takes.

        Only what some hosts have lost more than most hosts counts.
        """
        now = _host_rates(network)
        quiet = {
            host: [median(each) for each in zip(*self._quiet.get(host, [able]), strict=True)]
            for host, able in now.items()
        }
        kept = {host: [a / b for a, b in zip(now[host], quiet[host], strict=True)] for host in now}
        # If all hosts have become slower, the machine is busy, and no topology helps.
        usual = median([share for shares in kept.values() for share in shares])
        left = {
            host: [able * min(1.0, share / usual) for able, share in zip(quiet[host], kept[host], strict=True)]
            for host in now
        }
        present = parse_strategy(obs.strategy)
        times = [
            strategy_selection.predict_s(
                present, Network(network.hosts, _links(network.hosts, able), obs.replicas, obs.order), num_bytes
            )
            for able in (left, quiet)
        ]
        return times[0] / times[1]

    def _change(self, obs: Observation, strategy: str, reason: str) -> SetTopology:
        self._before, self._chosen = obs.strategy, strategy
        self._trial = [median([worker.throughput for worker in obs.workers])]
        return SetTopology(strategy=_as_decided(strategy), reason=reason)

    def _ignore_alarms(self, obs: Observation) -> None:
        """Ignore alarms for a while, because nothing can be done."""
        self._deaf_until = obs.step + self._wait
        self._wait = min(MOST_WAIT, 2 * self._wait)


def _host_rates(network: Network) -> dict[str, list[float]]:
    """Return the rates at which each host can send and receive."""
    names = [network.hosts[head] for head in network.leaders]
    return {host: [*able] for host, *able in zip(names, network.egress, network.ingress, strict=True)}


def _links(hosts: Sequence[str], able: dict[str, list[float]]) -> list[list[float]]:
    """Return the rates of links that are limited only by the hosts at their ends."""
    return [[min(able[source][0], able[target][1]) for target in hosts] for source in hosts]


def _as_decided(strategy: str) -> str | tuple[int, ...]:
    """Return the strategy as a decision holds it: a name, or the parent of each rank."""
    parsed = parse_strategy(strategy)
    return parsed.forest or parsed.name
