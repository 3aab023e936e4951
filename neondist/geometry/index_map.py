"""Index map of an operator that resamples or reorders cells: the cells that each output reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .lattice import AxisCells, group_into_ranges
from .window import Window


@dataclass(frozen=True, init=False)
class IndexMap(Window):
    """Window of one axis whose position and extent depend on the output.

    Parameters
    ----------
    cells_used_by : callable
        Returns the cells that the outputs [lo, hi) depend on, in any order; the same cell may occur more than once.
    """

    cells_used_by: Callable[[int, int], Iterable[int]]

    def __init__(self, cells_used_by: Callable[[int, int], Iterable[int]]) -> None:
        super().__init__(1, padding=0, ndim=1)
        self._set("cells_used_by", cells_used_by)

    @property
    def pointwise(self) -> bool:
        """Whether every output cell depends only on the input cell at the same position: unknown, hence False."""
        return False

    def used_cells(self, lo: int, hi: int) -> AxisCells:
        """Return the cells that the outputs [lo, hi) depend on."""
        return group_into_ranges(sorted(set(self.cells_used_by(lo, hi)))) if lo < hi else ()
