"""Adaptation: an observation of the job in, decisions out. Pure: no torch, no sockets, no clocks.

`observation` is what can be seen, `decisions` what can be done, `base` what a policy is; the other files hold the
policies that come with pliant.
"""

from pliant.adapt.base import Policies, Policy
from pliant.adapt.decisions import Decision, ProbeLinks, Resize, SetBatchSize, SetLearningRate, SetTopology
from pliant.adapt.observation import Observation, WorkerFigures

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
