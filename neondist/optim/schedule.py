"""Learning-rate schedules: multipliers of the learning rate as functions of the epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..errors import ConfigError
from ..registry import Registered
from ..registry.ranges import Count, Index, Positive, UnitInterval
from ..terminal.console import counted


class Schedule(Registered, ABC):
    """A multiplier of the learning rate that depends on the number of epochs since the start of training."""

    @abstractmethod
    def factor(self, epoch: float) -> float:
        """Return the factor at `epoch`, counted from 0; 2.5 is the middle of the third epoch."""

    def factor_given_losses(self, epoch: float, losses: Sequence[float | None]) -> float:
        """Return the factor at `epoch`, given the validation losses of the completed epochs."""
        return self.factor(epoch)

    def momentum_at(self, epoch: float) -> float | None:
        """Return the momentum at `epoch`; None: the optimiser's own."""
        return None

    def check_schedule_covers(self, epochs: int) -> None:
        """Raise ConfigError if the schedule ends before `epochs` epochs are over."""


class StepDecay(Schedule):
    """Multiply the learning rate by `factor` after every `every_epochs` epochs.

    Parameters
    ----------
    every_epochs : int
        Epochs between two drops.
    factor : float
        Multiplier at each drop.
    """

    def __init__(self, every_epochs: Count, factor: Positive = 0.1) -> None:
        self.every_epochs, self.drop_factor = int(every_epochs), float(factor)

    def factor(self, epoch: float) -> float:
        """Return `factor` to the power of the number of drops so far."""
        return self.drop_factor ** math.floor(epoch / self.every_epochs)


class CosineDecay(Schedule):
    """Cosine decay of the learning rate (Loshchilov and Hutter 2017, without restarts).

    Parameters
    ----------
    epochs : int
        Length of the decay; the factor stays constant afterwards.
    floor : float
        Final factor, in [0, 1).
    """

    def __init__(self, epochs: Count, floor: UnitInterval = 0.0) -> None:
        self.epochs, self.floor = int(epochs), float(floor)

    def check_schedule_covers(self, epochs: int) -> None:
        """Raise ConfigError if the rate reaches 0 before `epochs` epochs are over."""
        if not self.floor:
            _check_schedule_length(self.epochs, epochs)

    def factor(self, epoch: float) -> float:
        """Return the factor, clamped to the end of the decay."""
        return _cosine_between(1.0, self.floor, min(epoch / self.epochs, 1.0))


class Warmup(Schedule):
    """Linear warmup of the learning rate, after which another schedule starts.

    Parameters
    ----------
    epochs : float
        Length of the warmup, such as 0.5.
    start : float
        Initial factor, in [0, 1).
    then : Schedule, optional
        Schedule that starts after the warmup. Default: constant learning rate.
    """

    def __init__(self, epochs: Positive, start: UnitInterval = 0.01, then: Schedule | None = None) -> None:
        self.epochs, self.start, self.then = float(epochs), float(start), then

    def check_schedule_covers(self, epochs: int) -> None:
        """Raise ConfigError if the following schedule ends too early."""
        if self.then is not None:
            self.then.check_schedule_covers(math.ceil(epochs - self.epochs))

    def factor(self, epoch: float) -> float:
        """Return the factor at `epoch`."""
        return self.factor_given_losses(epoch, ())

    def factor_given_losses(self, epoch: float, losses: Sequence[float | None]) -> float:
        """Return the factor at `epoch`, given the losses that the following schedule may need."""
        if epoch < self.epochs:
            return self.start + (1.0 - self.start) * epoch / self.epochs
        return 1.0 if self.then is None else self.then.factor_given_losses(epoch - self.epochs, losses)

    def momentum_at(self, epoch: float) -> float | None:
        """Return the momentum of the following schedule after the warmup."""
        return None if self.then is None or epoch < self.epochs else self.then.momentum_at(epoch - self.epochs)


class OneCycle(Schedule):
    """One-cycle schedule: cosine rise to the learning rate and cosine decay (Smith and Topin 2018).

    The curve is that of `torch.optim.lr_scheduler.OneCycleLR` with the optimiser's learning rate as max_lr, but peaks
    at epoch `rise * epochs` and ends at epoch `epochs`, whereas PyTorch's schedule peaks and ends one step earlier.

    Parameters
    ----------
    epochs : int
        Length of the cycle.
    rise : float
        Fraction of the cycle before the peak, in [0, 1).
    start, floor : float
        Initial and final factor, in [0, 1).
    momentum : (float, float), optional
        Momentum (Adam's beta1) at the peak and at both ends, such as [0.85, 0.95]: it falls as the learning rate rises.
        Default: constant momentum.
    """

    def __init__(
        self,
        epochs: Count,
        rise: UnitInterval = 0.3,
        start: UnitInterval = 0.04,
        floor: UnitInterval = 4e-6,
        momentum: tuple[UnitInterval, UnitInterval] | None = None,
    ) -> None:
        self.epochs, self.rise, self.start, self.floor = int(epochs), float(rise), float(start), float(floor)
        self.momentum = momentum

    def check_schedule_covers(self, epochs: int) -> None:
        """Raise ConfigError if the cycle ends before a run of `epochs` epochs does."""
        _check_schedule_length(self.epochs, epochs)

    def factor(self, epoch: float) -> float:
        """Return the factor, clamped to the end of the cycle."""
        return self._interpolate(epoch, self.start, 1.0, self.floor)

    def momentum_at(self, epoch: float) -> float | None:
        """Return the momentum, clamped to the end of the cycle."""
        return None if self.momentum is None else self._interpolate(epoch, self.momentum[1], *self.momentum)

    def _interpolate(self, epoch: float, first: float, peak: float, last: float) -> float:
        progress = min(epoch / self.epochs, 1.0)
        if progress < self.rise:
            return _cosine_between(first, peak, progress / self.rise)
        return _cosine_between(peak, last, (progress - self.rise) / (1.0 - self.rise))


class Plateau(Schedule):
    """Lower the learning rate when the validation loss stops improving.

    Equivalent to `torch.optim.lr_scheduler.ReduceLROnPlateau`. Without a validation split the test loss is used,
    without a test split the training loss. The factor depends on the losses of all completed epochs, so a resumed run
    continues identically.

    Parameters
    ----------
    factor : float
        Multiplier at each drop, in [0, 1).
    patience : int
        Number of epochs without improvement before a drop.
    threshold : float
        Minimum relative improvement over the best loss, in [0, 1).
    cooldown : int
        Number of epochs ignored after a drop.
    floor : float
        Minimum factor, in [0, 1).
    """

    def __init__(
        self,
        factor: UnitInterval = 0.1,
        patience: Index = 10,
        *,
        threshold: UnitInterval = 1e-4,
        cooldown: Index = 0,
        floor: UnitInterval = 0.0,
    ) -> None:
        self.drop_factor, self.patience, self.threshold = float(factor), int(patience), float(threshold)
        self.cooldown, self.floor = int(cooldown), float(floor)

    def factor(self, epoch: float) -> float:
        """Return 1, since no loss is known."""
        return 1.0

    def factor_given_losses(self, epoch: float, losses: Sequence[float | None]) -> float:
        """Return the factor after the drops so far."""
        factor, best_loss, stale_epochs, cooldown = 1.0, math.inf, 0, 0
        for loss in losses:
            has_improved = loss is not None and loss < best_loss * (1.0 - self.threshold)
            best_loss = loss if has_improved and loss is not None else best_loss
            stale_epochs = 0 if has_improved or cooldown else stale_epochs + 1
            cooldown = max(0, cooldown - 1)
            if stale_epochs > self.patience:
                factor, stale_epochs, cooldown = max(factor * self.drop_factor, self.floor), 0, self.cooldown
        return factor


def _cosine_between(first: float, last: float, progress: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _check_schedule_length(schedule_epochs: int, used_epochs: int) -> None:
    if used_epochs > schedule_epochs:
        raise ConfigError(
            f"epochs: the schedule ends after {counted(schedule_epochs, 'epoch')}, but is used for {used_epochs};"
            f" set its epochs to {used_epochs}"
        )
