"""Adaptation of a running job: observations, decisions, policies, and the models and monitors behind them."""

from pliant.adapt.policy import (
    Decision,
    Observation,
    Policies,
    Policy,
    ProbeLinks,
    Resize,
    SetBatchSize,
    SetLearningRate,
    SetTopology,
    WorkerFigures,
)

__all__ = [
    "Decision",
    "Observation",
    "Policies",
    "Policy",
    "ProbeLinks",
    "Resize",
    "SetBatchSize",
    "SetLearningRate",
    "SetTopology",
    "WorkerFigures",
]
