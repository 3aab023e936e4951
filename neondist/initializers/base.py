"""Base class of initialisers, which compute values from global indices, so that each tile computes its own values."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..registry import Registered


class Initializer(Registered, ABC):
    """Base class of initialisers."""

    @abstractmethod
    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return float64 values for the entries of a parameter.

        Parameters
        ----------
        stream_key : int
            Key of the random stream (rng.key of seed, layer and parameter name).
        indices : uint64 array
            Row-major indices of the entries in the whole parameter.
        fan_in, fan_out : int
            Number of inputs on which each output depends, and of outputs that each input affects.
        """
