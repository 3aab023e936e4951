"""Flags that ranks exchange in every step, within a reduction that is performed anyway."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

HEADER = 16
"""Numbers that travel: a multiple of what keeps the gradients behind them aligned."""


class Flag(IntEnum):
    """Kinds of flags that a rank can send."""

    NON_FINITE = 0
    SIGTERM = 1
    SIGUSR1 = 2
    TIME = 3
    STOP = 4
    SNAPSHOT = 5


class ControlFlags:
    """Counts of ranks that set each flag; every rank receives the same counts, for the same step.

    Nothing is sent for it alone: the numbers ride in front of the gradients.

    Attributes
    ----------
    mine : array (HEADER,)
        1 where this rank has the flag; it stays until it is set to 0. A signal handler may set it.
    reduced : array (HEADER,)
        Sums over all ranks, as of the last training step.
    """

    def __init__(self) -> None:
        self.mine, self.reduced = np.zeros(HEADER), np.zeros(HEADER)

    def ranks(self, flag: Flag) -> int:
        """Return how many ranks had the flag in the last step."""
        return int(self.reduced[flag])
