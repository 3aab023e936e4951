"""Flags that ranks exchange in every step, within a reduction that is performed anyway."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

FLAG_HEADER_LENGTH = 16
"""Number of array elements for flags in front of the gradients, chosen to keep the gradients aligned."""


class ControlFlag(IntEnum):
    """Kinds of flags that a rank can send."""

    NON_FINITE = 0
    SIGTERM = 1
    SIGUSR1 = 2
    TIME_LIMIT = 3
    STOP = 4
    SNAPSHOT = 5


class ControlFlags:
    """Number of ranks that set each flag; every rank receives the same counts, for the same step.

    The counts need no message of their own: they are sent in front of the gradients.

    Attributes
    ----------
    own_flags : array (FLAG_HEADER_LENGTH,)
        1 for each flag that this rank sets, until reset to 0. A signal handler may set flags.
    num_ranks_by_flag : array (FLAG_HEADER_LENGTH,)
        Sums over all ranks in the last training step.
    """

    def __init__(self) -> None:
        self.own_flags, self.num_ranks_by_flag = np.zeros(FLAG_HEADER_LENGTH), np.zeros(FLAG_HEADER_LENGTH)

    def count_ranks(self, flag: ControlFlag) -> int:
        """Return the number of ranks that set the flag in the last step."""
        return int(self.num_ranks_by_flag[flag])
