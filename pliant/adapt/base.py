"""A policy looks at an observation and answers with decisions. Several can be put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pliant.adapt.decisions import Decision
from pliant.adapt.observation import Observation
from pliant.errors import ConfigError

Answer = Decision | Iterable[Decision] | None


class Policy:
    """Override the hooks you need; each is given the job as all workers see it, and may answer with decisions.

    Every worker asks its own copy, with the same observations; the first worker's answers count. So a policy that keeps
    something between calls should keep it in attributes that `state_dict` returns: newcomers and resumed jobs begin
    with it. By default these are all whose name begins with `_`; they must be plain values (what JSON can express).
    """

    needs: Mapping[str, int] = {}
    """Monitors that must run, with their interval in steps: {"noise_scale": 1}."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def before_train(self, seen: Observation) -> Answer:
        """Once, when the job begins; not again when it is resumed."""

    def before_epoch(self, seen: Observation) -> Answer:
        """At the beginning of an epoch."""

    def before_step(self, seen: Observation) -> Answer:
        """Before each step."""

    def after_step(self, seen: Observation) -> Answer:
        """After each step, with its figures."""

    def after_epoch(self, seen: Observation) -> Answer:
        """After an epoch's last step."""

    def after_train(self, seen: Observation) -> Answer:
        """Once, at the end; decisions are of no effect."""

    def state_dict(self) -> dict[str, Any]:
        """What a copy on another worker needs to go on as this one would; of JSON's types."""
        return {name: value for name, value in vars(self).items() if name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class Policies:
    """Several policies as one. The first that is asked and decides on something (batch size, workers, ...) has it; a later
    hook of the same step may still change it.

    Hooks named `after_...` are called in reverse, so that policies enclose each other.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        for each in policies:
            if not isinstance(each, Policy):
                raise ConfigError(f"{each!r} is no policy: derive it from pliant.Policy")
        self.policies = tuple(policies)

    def __len__(self) -> int:
        return len(self.policies)

    @property
    def needs(self) -> dict[str, int]:
        """The monitors of all of them, each at the shortest interval."""
        needs: dict[str, int] = {}
        for policy in self.policies:
            for monitor, interval in policy.needs.items():
                needs[monitor] = min(interval, needs.get(monitor, interval))
        return needs

    def ask(self, hook: str, seen: Observation) -> list[tuple[str, Decision]]:
        """The decisions of one hook, with the names of those who made them; one of each kind."""
        asked = reversed(self.policies) if hook.startswith("after_") else self.policies
        found: dict[str, tuple[str, Decision]] = {}
        for policy in asked:
            call: Callable[[Observation], Answer] = getattr(policy, hook)
            answer = call(seen)
            for decision in (answer,) if isinstance(answer, Decision) else answer or ():
                if not isinstance(decision, Decision):
                    raise ConfigError(f"{policy.name}.{hook} answered {decision!r}: return decisions, or None")
                found.setdefault(decision.kind, (policy.name, decision))
        return list(found.values())

    def state_dict(self) -> list[dict[str, Any]]:
        return [policy.state_dict() for policy in self.policies]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for policy, state in zip(self.policies, states, strict=True):
            policy.load_state_dict(state)
