"""What every metric answers: a sum and a count, which add up over ranks and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..registry import Registered


class Metric(Registered, ABC):
    """A number that judges outputs against targets: a mean over samples (and cells); smaller is better."""

    name: str = ""
    """What the number is called in results, such as 'misclassification'."""
    #: whether it wants outputs as NumPy's arrays; False: as the model gives them
    on_host = True

    @abstractmethod
    def measure(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the sum over the local samples and cells, and their number.

        `y` is (n, C) or (n, *spatial, C); `targets` are integer labels (n,) or (n, *spatial), or arrays of the shape of
        `y`: one-hot vectors, or numbers to be met. The metric is the sum over the count, each added over all ranks and
        batches; a sum of NaN says that it does not suit the targets. Arrays may be empty.
        """

    def check(self, classes: int | None) -> None:
        """Raise ConfigError if the metric cannot be used with that number of classes (None: no classes)."""
