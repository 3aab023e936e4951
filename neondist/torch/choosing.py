"""Planner of a module's segments, from the costs of messages and redundant computation."""

from __future__ import annotations

from math import inf, prod

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..halo.fusion import Fusion
from ..plan.planner import PASSES, best_cuts
from ..system.machine import Figures
from .blocked import at_least_one
from .graph import Value
from .in_blocks import Ranged, ids_of
from .program_lowering import laid, ranges_at
from .schemes import policy_of
from .segments import Noted, OperatorSegment, Search
from .transfer import Range, Transfer, Want


def segments_of(search: Search) -> list[OperatorSegment]:
    """Return the segments; those of a scheme that has a planner are cut where it is cheapest."""
    found, starts = search.segments(), set[int]()
    for segment in found:
        first = next(iter(segment.noted.values()))
        policy = policy_of(first.call.where.module, search.schemes)
        figures = policy.figures(search.mesh.size) if isinstance(policy, Fusion) else None
        if figures is not None:
            starts |= _Choice(search, segment, figures).starts
    return search.segments(starts) if starts else found


class _Choice:
    """The cheapest cut of what could be one segment."""

    def __init__(self, search: Search, segment: OperatorSegment, figures: Figures) -> None:
        self.search, self.figures, self.numbers = search, figures, list(segment.noted)
        self.windows = [at for at, number in enumerate(self.numbers) if segment.noted[number].windows]
        self.products = {number: _products(noted, search.values) for number, noted in segment.noted.items()}
        self.middle = tuple(parts // 2 for parts in search.mesh.parts)  # which has most neighbours
        self.seconds: dict[tuple[int, int], float] = {}

    @property
    def starts(self) -> set[int]:
        """The operators at which its segments begin."""
        return {self.numbers[self.windows[first]] for first, _ in best_cuts(self._cost, len(self.windows))}

    def _cost(self, first: int, last: int) -> float:
        """Return the seconds of a training step that a segment of windows takes beyond its own cells.

        It is asked for longer and longer ones that end alike, of which what is computed twice only grows: where that
        takes more than exchanges one by one, no longer one is any better.
        """
        longer, shorter = (first, last), (first + 1, last)
        if self.seconds.get(shorter) == inf:
            self.seconds[longer] = inf
            return inf
        sending, twice = self._costs(first, last)
        alone = sum(self.seconds[at, at] for at in range(first, last)) + self.seconds.get((last, last), inf)
        self.seconds[longer] = inf if twice > alone else sending + twice
        return self.seconds[longer]

    def _costs(self, first: int, last: int) -> tuple[float, float]:
        """Return the seconds of exchanges, and of what is computed twice."""
        search, ends = self.search, [*self.windows, len(self.numbers)]
        segment = search.segment_of(self.numbers[ends[first] : ends[last + 1]])
        own = ranges_at([laid(out, search.mesh) for out in segment.traced.outputs], dict(enumerate(self.middle)))
        wanted = at_least_one(own, own)
        sending = sum(
            self._sending(search.values[value], ranges, 1 + (value not in search.images))
            for value, ranges in zip(segment.inputs, segment.traced.sources(wanted), strict=True)
            if value in search.values
        )
        twice = sum(
            self.products[number] * self._more(segment, search.values[ids_of(noted.call.found)[0]], wanted)
            for number, noted in segment.noted.items()
        )
        return sending, PASSES * twice / self.figures.speed

    def _sending(self, value: Value, ranges: tuple[Range, ...], ways: int) -> float:
        """Return the seconds in which the rank in the middle gets what it needs of a value."""
        mesh = self.search.mesh
        wants = []
        for dim, ((atom,), wanted) in enumerate(zip(value.layout, ranges, strict=True)):
            if atom.axis is not None:
                asked = [[own] for own in atom.ranges]
                asked[self.middle[atom.axis]] = [wanted]
                wants.append(Want(dim, atom, atom.axis, tuple(map(tuple, asked))))
        rank = mesh.rank(self.middle)
        pieces = [piece for piece in Transfer(mesh, tuple(wants)).receives(rank) if piece.peer != rank]
        whole = prod(n for n, (atom,) in zip(value.shape, value.layout, strict=True) if atom.axis is None)
        count = sum(piece.cells for piece in pieces) * whole * value.dtype.itemsize
        return ways * (len(pieces) * self.figures.latency + count / self.figures.bandwidth)

    def _more(self, segment: OperatorSegment, value: Value, wanted: Ranged) -> float:
        """Return which share of a value the rank in the middle computes beyond its own cells."""
        needs, mine, there = segment.traced.needs(wanted), 1.0, 1.0
        for (atom,), (block,) in zip(value.layout, segment.known[value.id].layout, strict=True):
            if atom.axis is not None and block.origin is not None:
                origin, factor = block.origin
                (first, last), (lo, hi) = atom.range(self.middle), needs.get(origin, (0, 0))
                mine *= (last - first) / atom.extent
                there *= (hi - lo) * factor / atom.extent
        return max(0.0, there - mine)


def _products(noted: Noted, values: dict[int, Value]) -> float:
    """Return the floating point operations of an operator on the whole image, forward; one for each number at least."""

    def empty(leaf: object) -> object:
        if not isinstance(leaf, Value):
            return leaf
        value = values[leaf.id]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    least = prod(values[ids_of(noted.call.found)[0]].shape)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            noted.call.target(
                *pytree.tree_map(empty, list(noted.call.args)), **pytree.tree_map(empty, dict(noted.call.kwargs))
            )
    except Exception:  # it looks at numbers, which are not there: no product then
        return least
    return max(least, counter.get_total_flops())
