"""What a layer sums over ranks in a training step, from its shapes alone."""

from __future__ import annotations

from typing import NamedTuple


class LayerSum(NamedTuple):
    """One sum.

    Attributes
    ----------
    direction : 'forward' or 'backward'
    group : str
        One of `comm.GROUPS`.
    each, once : int
        Numbers for each sample of this rank's replica, and numbers whatever their count.
    """

    direction: str
    group: str
    each: int = 0
    once: int = 0
