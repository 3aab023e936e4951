"""Backward propagation of ranges: the indices of every value that parts of the results depend on.

The range of a block along a dimension is symbolic: a number, the *symbol*, stands for it until the block is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...geometry import Atom, Range, hull_of_ranges
from .reach import Reach

SymbolRanges = dict[int, Range]
"""Non-empty range of each symbol."""


class Dependence(NamedTuple):
    """Reach declared in a call of a rule, the id of the resulting view, and the atom of the argument.

    Symbols created by the call are at least `first_symbol`.
    """

    first_symbol: int
    view_id: int
    reach: Reach
    source_atom: Atom


def trace_ranges(dependences: Sequence[Dependence], outputs: SymbolRanges) -> SymbolRanges:
    """Return the range of every symbol that the given ranges of the outputs' symbols depend on.

    Parameters
    ----------
    dependences : sequence of Dependence, in the order of the calls
        Reshaping adds none, since the range of a merged dimension is a multiple of its symbol's range.
    """
    needed_ranges = dict(outputs)
    for first_symbol, _, reach, source_atom in reversed(dependences):
        assert reach.out_partition.origin is not None
        symbol, factor = reach.out_partition.origin
        lo, hi = (at * factor for at in needed_ranges.get(symbol, (0, 0)))
        if symbol < first_symbol:  # the symbol of another argument: earlier calls may need more of its range
            lo, hi = 0, reach.out_partition.extent
        for indices in reach.view(lo, hi, source_atom.extent).ranges:
            extend_symbol_range(needed_ranges, source_atom, *indices)
    return needed_ranges


def extend_symbol_range(ranges: SymbolRanges, atom: Atom, lo: int, hi: int) -> None:
    """Extend the range of an atom's symbol by indices of the atom."""
    if atom.origin is not None and lo < hi:
        symbol, factor = atom.origin
        ranges[symbol] = hull_of_ranges(ranges.get(symbol, (0, 0)), (lo // factor, (hi - 1) // factor + 1))
