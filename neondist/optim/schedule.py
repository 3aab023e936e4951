"""Learning-rate schedules: a factor on the learning rate as a function of the epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from ..errors import ConfigError
from ..registry import Registered
from ..registry.ranges import Count, Positive


class Schedule(Registered, ABC):
    """A factor on the learning rate that depends on the time since the start of training."""

    @abstractmethod
    def factor(self, epoch: float) -> float:
        """Return the factor at `epoch`, counted from 0; 2.5 is the middle of the third epoch."""

    def check(self, epochs: int) -> None:
        """Raise ConfigError if a run of so many epochs would train on at rate 0."""


class StepDecay(Schedule):
    """Multiply the learning rate by `factor` after every `every_epochs` epochs.

    Parameters
    ----------
    every_epochs : int
        Epochs between two drops.
    factor : float
        What one drop multiplies the learning rate by.
    """

    def __init__(self, every_epochs: Count, factor: Positive = 0.1) -> None:
        self.every_epochs, self.drop = int(every_epochs), float(factor)

    def factor(self, epoch: float) -> float:
        """Return `factor` to the power of the number of drops so far."""
        return self.drop ** math.floor(epoch / self.every_epochs)


class CosineDecay(Schedule):
    """Let the learning rate fall to zero along half a cosine (Loshchilov and Hutter 2017, without restarts).

    Parameters
    ----------
    epochs : int
        Length of the fall; afterwards the factor stays 0.
    """

    def __init__(self, epochs: Count) -> None:
        self.epochs = int(epochs)

    def check(self, epochs: int) -> None:
        """Raise ConfigError if the fall ends before a run of so many epochs does."""
        if epochs > self.epochs:
            raise ConfigError(
                f"epochs: the learning rate is 0 after {self.epochs} epochs, and {epochs} are to be trained;"
                f" set this to {epochs} as well"
            )

    def factor(self, epoch: float) -> float:
        """Return (1 + cos(pi * epoch / epochs)) / 2, never past the end of the fall."""
        return 0.5 * (1.0 + math.cos(math.pi * min(epoch / self.epochs, 1.0)))
