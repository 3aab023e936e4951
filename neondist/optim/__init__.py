"""Optimisers: in-place updates of parameters in one flat array."""

from .adam import LAMB, Adam, AdamW
from .base import AVERAGE_SLOT, Optimizer, ScheduledOptimizer
from .flat import FlatLayout
from .rmsprop import RMSprop
from .schedule import CosineDecay, OneCycle, Plateau, Schedule, StepDecay, Warmup
from .sgd import SGD

__all__ = [
    "AVERAGE_SLOT",
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "CosineDecay",
    "FlatLayout",
    "OneCycle",
    "Optimizer",
    "Plateau",
    "RMSprop",
    "Schedule",
    "ScheduledOptimizer",
    "StepDecay",
    "Warmup",
]
