"""Optimisers: how gradients change the parameters, in place, on one flat array."""

from .adam import Adam
from .base import Optimizer, Scheduled
from .schedule import CosineDecay, Schedule, StepDecay
from .sgd import SGD

__all__ = ["SGD", "Adam", "CosineDecay", "Optimizer", "Schedule", "Scheduled", "StepDecay"]
