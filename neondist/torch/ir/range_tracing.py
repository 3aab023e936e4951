"""Backward propagation of ranges: the indices of every value that parts of the results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...geometry import Atom, Range, hull_of_ranges
from .reach import Reach

CutRanges = dict[int, Range]
"""Non-empty range of each cut, by its number."""


class Dependence(NamedTuple):
    """Reach that a call of a rule declares, the id of its view, and the atom of the argument.

    Cuts of the call have at least the number `first_cut`.
    """

    first_cut: int
    view_id: int
    reach: Reach
    source_atom: Atom


def trace_ranges(dependences: Sequence[Dependence], outputs: CutRanges) -> CutRanges:
    """Return the range of every cut on which these ranges of the outputs' cuts depend.

    Parameters
    ----------
    dependences : in the order of the calls
        An atom of merged dimensions is a multiple of its cut, so that reshaping needs no dependence.
    """
    needed = dict(outputs)
    for first_cut, _, reach, source_atom in reversed(dependences):
        assert reach.out_atom.origin is not None
        cut, factor = reach.out_atom.origin
        lo, hi = (at * factor for at in needed.get(cut, (0, 0)))
        if cut < first_cut:  # the cut of another argument, which earlier calls may need more of
            lo, hi = 0, reach.out_atom.extent
        for indices in reach.view(lo, hi, source_atom.extent).ranges:
            extend_cut(needed, source_atom, *indices)
    return needed


def extend_cut(needed: CutRanges, atom: Atom, lo: int, hi: int) -> None:
    """Extend the range of an atom's cut by indices of the atom."""
    if atom.origin is not None and lo < hi:
        cut, factor = atom.origin
        needed[cut] = hull_of_ranges(needed.get(cut, (0, 0)), (lo // factor, (hi - 1) // factor + 1))
