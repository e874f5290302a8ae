"""Shell completion of the commands of this package."""

from __future__ import annotations

from pliant.cli.completion import Words, listed, values


def _experiments() -> Words:
    from pliant_repro.figures.catalog import FIGURES

    return [*((name, figure.about) for name, figure in FIGURES.items()), ("all", "every one"), ("report", "again")]


def _labs() -> Words:
    from pliant_repro.lab.namespaces import labs

    return labs()


def _zoo() -> Words:
    from pliant_repro.profiles import PROFILES, WORKLOADS

    return [*WORKLOADS, *PROFILES]


experiments = values(_experiments)
labs = values(_labs)
zoo = listed(_zoo)
