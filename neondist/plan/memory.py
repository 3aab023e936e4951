"""Lifetimes of the arrays of a step, which determine the arrays that may share memory.

A pass of L steps has 2 L moments: step i runs forward at moment i, and backward at moment 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from .graph import Graph

_ALIGNED = 16  # numbers: a cache line of float32


class LiveRange(NamedTuple):
    """Lifetime of an array: elements per sample, and its first and last moment, both included."""

    numbers: int
    first: int
    last: int

    def meets(self, other: LiveRange) -> bool:
        """Return whether two lifetimes overlap."""
        return self.first <= other.last and other.first <= self.last


def pack(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
    """Return an offset for every range, such that ranges alive together are disjoint, and the total length.

    Each range gets the lowest free offset, in the best of a few orders: no order is best for all networks, but the best
    of them rarely needs more than the peak of live elements.
    """
    orders: list[Callable[[LiveRange], tuple[int, ...]]] = [
        lambda live: (live.first - live.last, -live.numbers),
        lambda live: (-live.numbers,),
        lambda live: (live.first, -live.last),
        lambda live: (-live.last, live.first),
    ]
    moments = {live.first for live in ranges}
    least = max((sum(r.numbers for r in ranges if r.first <= at <= r.last) for at in moments), default=0)
    layouts: list[tuple[list[int], int]] = []
    for order in orders:
        layouts.append(_place(ranges, sorted(range(len(ranges)), key=lambda at: order(ranges[at]))))
        if layouts[-1][1] == least:
            break
    return min(layouts, key=lambda placed: placed[1])


def _place(ranges: Sequence[LiveRange], order: Sequence[int]) -> tuple[list[int], int]:
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
        Ranges of a step's view of its input (where that is more than the value itself) and of the view's gradient: the
        same one where the gradient overwrites the view.
    values, sums : dict of value to int
        Ranges of values outside all views, and of sums of the gradients from several readers.
    begun : set of value
        Values whose sum is accumulated in the first of these gradients.
    homes : dict of value to step
        Step in the middle of whose view a value lies.
    restored, borders : dict of step to int
        Ranges of views that are rebuilt for the backward pass, and of their kept part: the cells around the tile.
    turn : int
        First moment of the backward pass.
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
        """Aligned ranges, their offsets, and the total elements per sample."""
        ranges = [align(live) for live in self.ranges]
        return ranges, *pack(ranges)

    @property
    def length(self) -> int:
        """Total elements per sample."""
        return self.packed[2]

    def add(self, numbers: int, first: int, last: int) -> int:
        """Append a range, and return its index in `ranges`."""
        self.ranges.append(LiveRange(numbers, first, last))
        return len(self.ranges) - 1


def align(live: LiveRange) -> LiveRange:
    """Return a range padded to whole cache lines."""
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
    """Return the lifetimes of all arrays on one rank.

    Parameters
    ----------
    held : for each step, the elements per sample of the view of its input, including the tile
    windowed : whether the view is more than the input itself
    in_place : whether the view's gradient may overwrite the view
    numbers : for each value, the elements of its tile
    gradient : whether the gradient of the input is needed
    backward : False: forward only, so nothing is kept
    restores : whether outputs of normalisations are recomputed in the backward pass instead of being kept
    """
    steps, end = graph.steps, 2 * len(graph.steps) - 1
    producers = graph.producers
    absorbed = {steps[host].output for host in graph.absorbed.values()}  # values that never exist in memory
    plan = MemoryPlan(len(steps))
    restored = graph.restored if backward and restores else {}
    saves = [step.saves_input and at not in restored for at, step in enumerate(steps)]

    def is_private(value: int) -> bool:
        """Return whether a value's gradient is in memory that nothing else uses."""
        readers = graph.readers[value]
        if len(readers) != 1:
            return bool(readers)
        (at,) = readers
        return is_private(steps[at].output) if at in graph.absorbed else steps[at].layer is not None

    @cache
    def begins(value: int) -> bool:
        """Return whether the other gradients of a value may be added to its first: nothing else reads it."""
        *_, previous, first = sorted(graph.readers[value])
        step = steps[first]
        others = [v for v in step.inputs if v != value]
        disjoint = numbers[value] == numbers[step.output] and is_private(step.output) and previous < first
        unread = (len(graph.readers[v]) == 1 and read_last(v) < end - previous for v in others)
        return step.layer is not None or (disjoint and all(unread))

    def stays(value: int, at: int) -> bool:
        """Return whether a value's gradient stays where a later step has written it."""
        readers = graph.readers[value]
        return len(readers) == 1 or (max(readers) == at and begins(value))

    @cache
    def read_last(value: int) -> int:
        """Return the moment of the last read of a value's gradient; joins pass theirs on unchanged."""
        if value == 0:
            return end
        at = producers[value]
        last = end - at
        if steps[at].join is not None and (value == steps[at].output or at in graph.cleared or is_private(value)):
            last = max([last, *(read_last(v) for v in steps[at].inputs if stays(v, at))])
        return last

    def rereads(value: int) -> list[int]:
        """Return the moments at which the producer of a value rereads it."""
        return [end - producers[value]] if graph.is_reread(value) else []

    for value, readers in enumerate(graph.readers):
        wide = [at for at in readers if windowed[at]]
        if wide and (value or len(readers) == 1):
            plan.homes[value] = max(wide, key=lambda at: steps[at].saves_input)
        elif value and value not in absorbed:
            first = producers[value]
            saved = [end - at for at in readers if not windowed[at] and saves[at]]
            kept = [*saved, *rereads(value)] if backward else []
            plan.values[value] = plan.add(numbers[value], first, max([first, *readers, *kept]))
        if backward and (value or gradient) and len(readers) > 1:
            if begins(value):
                plan.begun.add(value)
            else:
                plan.sums[value] = plan.add(numbers[value], end - max(readers), read_last(value))
    for at, step in enumerate(steps):
        host = graph.absorbed.get(at)
        in_join = host is not None and steps[host].join is not None and host not in graph.cleared
        if step.layer is None or (host is not None and (not in_join or is_private(step.output))):
            continue
        (value,) = step.inputs
        back, homed = end - at, plan.homes.get(value) == at
        if windowed[at]:
            first = producers.get(value, at) if homed else at
            readers = graph.readers[value] if homed else [at]
            kept = [end - reader for reader in readers if saves[reader] and (reader == at or not windowed[reader])]
            kept += rereads(value) if homed else []
            plan.views[at] = plan.add(held[at], first, max([*readers, *(kept if backward else [])]))
        if at in restored:
            plan.restored[at] = plan.add(held[at], back, back)
            if windowed[at]:
                plan.borders[at] = plan.add(held[at] - numbers[value], at, back)
        if backward and (value or gradient):
            last = read_last(value) if stays(value, at) else back
            view = plan.restored.get(at, plan.views.get(at, plan.values.get(value)))
            if view is not None and in_place[at] and plan.ranges[view].last == back:
                plan.gradients[at], plan.ranges[view] = view, plan.ranges[view]._replace(last=last)
            else:
                plan.gradients[at] = plan.add(held[at], back, last)
    return plan
