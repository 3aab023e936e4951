"""Lifetimes of the arrays of a step, which determine which of them may share memory.

A pass of L steps has 2 L moments: step i works forward at moment i, and backward at moment 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from .graph import Graph

_ALIGNED = 16  # numbers: a cache line of float32


class LiveRange(NamedTuple):
    """So many numbers for each sample, from one moment of a pass to another, both included."""

    numbers: int
    first: int
    last: int

    def meets(self, other: LiveRange) -> bool:
        """Return whether both live at the same moment."""
        return self.first <= other.last and other.first <= self.last


def pack(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
    """Return a place for every range, so that those that meet do not overlap, and the length of all.

    Each at the lowest free place, in the best of a few orders: none is so for all networks, but the best of them rarely
    needs more than the most that lives at one moment.
    """
    orders: list[Callable[[LiveRange], tuple[int, ...]]] = [
        lambda live: (live.first - live.last, -live.numbers),
        lambda live: (-live.numbers,),
        lambda live: (live.first, -live.last),
        lambda live: (-live.last, live.first),
    ]
    moments = {live.first for live in ranges}
    least = max((sum(r.numbers for r in ranges if r.first <= at <= r.last) for at in moments), default=0)
    found: list[tuple[list[int], int]] = []
    for order in orders:
        found.append(_placed(ranges, sorted(range(len(ranges)), key=lambda at: order(ranges[at]))))
        if found[-1][1] == least:
            break
    return min(found, key=lambda placed: placed[1])


def _placed(ranges: Sequence[LiveRange], order: Sequence[int]) -> tuple[list[int], int]:
    places: dict[int, int] = {}
    for at in order:
        start = 0
        met = [other for other in places if ranges[at].meets(ranges[other])]
        for lo, hi in sorted((places[other], places[other] + ranges[other].numbers) for other in met):
            if start + ranges[at].numbers <= lo:
                break
            start = max(start, hi)
        places[at] = start
    length = max((place + ranges[at].numbers for at, place in places.items()), default=0)
    return [places[at] for at in range(len(ranges))], length


@dataclass
class MemoryPlan:
    """Arrays of a pass in the arena, and their lifetimes.

    Attributes
    ----------
    ranges : list of LiveRange
    views, gradients : dict of step to int
        Which range holds a step's view of its input (where that is more than the value itself), and the gradient of it:
        the same one, where that is written over the view.
    values, sums : dict of value to int
        Which range holds a value that lies in no view, and the sum of the gradients from several readers.
    begun : set of value
        Whose sum lies where the first of these gradients does.
    homes : dict of value to step
        In the middle of whose view a value lies.
    restored, borders : dict of step to int
        Which range holds a view that is made again for the way back, and what is kept of it: cells around the tile.
    turn : int
        The moment at which the backward pass begins.
    """

    turn: int
    ranges: list[LiveRange] = field(default_factory=list)
    views: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)
    borders: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    @cached_property
    def packed(self) -> tuple[list[LiveRange], list[int], int]:
        """The ranges with their ends aligned, where each lies, and how many numbers of a sample they need together."""
        ranges = [aligned(live) for live in self.ranges]
        return ranges, *pack(ranges)

    @property
    def length(self) -> int:
        """Numbers of a sample that all of them need together."""
        return self.packed[2]

    def add(self, numbers: int, first: int, last: int) -> int:
        """Append a range, and return its place in `ranges`."""
        self.ranges.append(LiveRange(numbers, first, last))
        return len(self.ranges) - 1


def aligned(live: LiveRange) -> LiveRange:
    """Return a range whose neighbour begins with a cache line of its own."""
    return live._replace(numbers=-(-live.numbers // _ALIGNED) * _ALIGNED)


def plan_memory(
    graph: Graph,
    held: Sequence[int],
    windowed: Sequence[bool],
    in_place: Sequence[bool],
    numbers: Sequence[int],
    gradient: bool = False,
    backward: bool = True,
    restores: bool = False,
) -> MemoryPlan:
    """Return what lives when on one rank.

    Parameters
    ----------
    held : of each step, the numbers of the view of its input with the tile in it, for one sample
    windowed : whether that is more than the input itself
    in_place : whether its gradient may be written over it
    numbers : of each value, the numbers of its tile
    gradient : whether that of the input is needed
    backward : False: there is no way back, for which anything would have to be kept
    restores : whether what a normalisation gives is made again there, instead of being kept
    """
    steps, end = graph.steps, 2 * len(graph.steps) - 1
    made = graph.made
    gone = {steps[by].output for by in graph.absorbed.values()}  # values that are no more than an intermediate result
    plan = MemoryPlan(len(steps))
    restored = graph.restored if backward and restores else {}
    saves = [step.saves_input and at not in restored for at, step in enumerate(steps)]

    def own(value: int) -> bool:
        """Return whether a value's gradient arrives in memory that nothing else uses."""
        readers = graph.readers[value]
        if len(readers) != 1:
            return bool(readers)
        (at,) = readers
        return own(steps[at].output) if at in graph.absorbed else steps[at].layer is not None

    @cache
    def begins(value: int) -> bool:
        """Whether the first gradient of a value with several readers may take the others: nothing else reads it."""
        *_, before, first = sorted(graph.readers[value])
        step = steps[first]
        others = [v for v in step.inputs if v != value]
        apart = numbers[value] == numbers[step.output] and own(step.output) and before < first
        alone = (len(graph.readers[v]) == 1 and read_last(v) < end - before for v in others)
        return step.layer is not None or (apart and all(alone))

    def handed(value: int, at: int) -> bool:
        """Return whether a value's gradient lies where a step behind it has put it."""
        readers = graph.readers[value]
        return len(readers) == 1 or (max(readers) == at and begins(value))

    @cache
    def read_last(value: int) -> int:
        """Return when the gradient of a value is read last; joins hand theirs on as it is."""
        if value == 0:
            return end
        at = made[value]
        last = end - at
        if steps[at].join is not None and (value == steps[at].output or at in graph.cleared or own(value)):
            last = max([last, *(read_last(v) for v in steps[at].inputs if handed(v, at))])
        return last

    def looked_at(value: int) -> list[int]:
        """Return when what made a value looks at it again."""
        return [end - made[value]] if graph.looked_at(value) else []

    for value, readers in enumerate(graph.readers):
        wide = [at for at in readers if windowed[at]]
        if wide and (value or len(readers) == 1):
            plan.homes[value] = max(wide, key=lambda at: steps[at].saves_input)
        elif value and value not in gone:
            first = made[value]
            saved = [end - at for at in readers if not windowed[at] and saves[at]]
            kept = [*saved, *looked_at(value)] if backward else []
            plan.values[value] = plan.add(numbers[value], first, max([first, *readers, *kept]))
        if backward and (value or gradient) and len(readers) > 1:
            if begins(value):
                plan.begun.add(value)
            else:
                plan.sums[value] = plan.add(numbers[value], end - max(readers), read_last(value))
    for at, step in enumerate(steps):
        by = graph.absorbed.get(at)
        joined = by is not None and steps[by].join is not None and by not in graph.cleared
        if step.layer is None or (by is not None and (not joined or own(step.output))):
            continue
        (value,) = step.inputs
        back, homed = end - at, plan.homes.get(value) == at
        if windowed[at]:
            first = made.get(value, at) if homed else at
            readers = graph.readers[value] if homed else [at]
            kept = [end - each for each in readers if saves[each] and (each == at or not windowed[each])]
            kept += looked_at(value) if homed else []
            plan.views[at] = plan.add(held[at], first, max([*readers, *(kept if backward else [])]))
        if at in restored:
            plan.restored[at] = plan.add(held[at], back, back)
            if windowed[at]:
                plan.borders[at] = plan.add(held[at] - numbers[value], at, back)
        if backward and (value or gradient):
            last = read_last(value) if handed(value, at) else back
            view = plan.restored.get(at, plan.views.get(at, plan.values.get(value)))
            if view is not None and in_place[at] and plan.ranges[view].last == back:
                plan.gradients[at], plan.ranges[view] = view, plan.ranges[view]._replace(last=last)
            else:
                plan.gradients[at] = plan.add(held[at], back, last)
    return plan
