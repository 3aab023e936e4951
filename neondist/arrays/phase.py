"""What a pass is for."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """What a pass is for: training or not, the step's number, and the first of the replica's samples in the batch."""

    training: bool = True
    step: int = 0
    first_sample: int = 0


WHOLE = Phase()
"""Of calls that do not say."""
