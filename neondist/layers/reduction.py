"""Declaration of a layer's reductions over ranks in a pass, from its shapes only."""

from __future__ import annotations

from typing import NamedTuple


class Reduction(NamedTuple):
    """An allreduce over a group of ranks before `forward`, or before `backward`.

    Attributes
    ----------
    direction : 'forward' or 'backward'
        Whether `reduce` or `reduce_backward` returns this rank's partial result.
    group : str or None
        One of `comm.GROUP_NAMES`; None: no other rank contributes.
    elements_per_sample, fixed_elements : int
        Number of elements of the partial result per sample of this rank's replica, and independent of the samples.
    combine : 'sum' or 'moments'
        'moments': a flat array (count, means, sums of squared deviations), combined without cancellation, in rank order
        (Chan, Golub and LeVeque 1983).
    """

    direction: str
    group: str | None
    elements_per_sample: int = 0
    fixed_elements: int = 0
    combine: str = "sum"

    @property
    def spans_batch(self) -> bool:
        """Whether all samples of a batch are reduced to one result."""
        return not self.elements_per_sample
