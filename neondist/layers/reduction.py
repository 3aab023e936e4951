"""Declaration of a layer's reductions over ranks in a pass, which depend only on its shapes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..registry.ranges import Index


class Reduction(NamedTuple):
    """An allreduce over a group of ranks before `forward`, or before `backward`.

    Attributes
    ----------
    direction : 'forward' or 'backward'
        Whether `reduce` or `reduce_backward` returns this rank's partial result.
    group : str or None
        One of `comm.GROUP_NAMES`; None: no other rank contributes.
    result_elements_per_sample, fixed_elements : int
        Size of the partial result: elements per sample of this rank's replica, plus elements independent of the
        samples. Without elements per sample, the reduction spans the batch.
    combine : 'sum' or 'moments'
        'moments': a flat array (count, means, sums of squared deviations), combined without cancellation, in rank order
        (Chan, Golub and LeVeque 1983).
    needed_by_parameters : bool
        Whether `reduce_backward` also returns an array if only the gradients of parameters are needed.
    """

    direction: str
    group: str | None
    result_elements_per_sample: Index = 0
    fixed_elements: Index = 0
    combine: Literal["sum", "moments"] = "sum"
    needed_by_parameters: bool = True

    def result_elements(self, samples: int, calls: int = 1) -> int:
        """Return the number of elements of the partial results of all calls, which have `samples` samples in total."""
        return self.result_elements_per_sample * samples + self.fixed_elements * (1 if self.spans_batch else calls)

    @property
    def spans_batch(self) -> bool:
        """Whether all samples of a batch are reduced to one result."""
        return not self.result_elements_per_sample
