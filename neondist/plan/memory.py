"""Lifetimes of the arrays of a step, which determine the arrays that may share memory.

A pass of L steps has 2 L time points: step i runs forward at time i, and backward at time 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from .graph import Graph

_ALIGNMENT_ELEMENTS = 16  # elements: a cache line of float32


class LiveRange(NamedTuple):
    """Lifetime of an array: its elements, and its first and last time, both included."""

    elements_per_sample: int
    first_time: int
    last_time: int

    def overlaps(self, other: LiveRange) -> bool:
        """Return whether two lifetimes overlap."""
        return self.first_time <= other.last_time and other.first_time <= self.last_time


def pack_ranges(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
    """Return an offset for every range, such that ranges with overlapping lifetimes are disjoint, and the total length.

    Ranges are placed first-fit in several orders. The shortest layout rarely exceeds the peak of live elements.
    """
    orders: list[Callable[[LiveRange], tuple[int, ...]]] = [
        lambda live: (live.first_time - live.last_time, -live.elements_per_sample),
        lambda live: (-live.elements_per_sample,),
        lambda live: (live.first_time, -live.last_time),
        lambda live: (-live.last_time, live.first_time),
    ]
    times = {live.first_time for live in ranges}
    live = (sum(r.elements_per_sample for r in ranges if r.first_time <= at <= r.last_time) for at in times)
    least = max(live, default=0)
    layouts: list[tuple[list[int], int]] = []
    for order in orders:
        layouts.append(_place_in_order(ranges, sorted(range(len(ranges)), key=lambda at: order(ranges[at]))))
        if layouts[-1][1] == least:
            break
    return min(layouts, key=lambda placed: placed[1])


def _place_in_order(ranges: Sequence[LiveRange], order: Sequence[int]) -> tuple[list[int], int]:
    offsets: dict[int, int] = {}
    for at in order:
        start = 0
        met = [other for other in offsets if ranges[at].overlaps(ranges[other])]
        for lo, hi in sorted((offsets[other], offsets[other] + ranges[other].elements_per_sample) for other in met):
            if start + ranges[at].elements_per_sample <= lo:
                break
            start = max(start, hi)
        offsets[at] = start
    length = max((offset + ranges[at].elements_per_sample for at, offset in offsets.items()), default=0)
    return [offsets[at] for at in range(len(ranges))], length


@dataclass
class MemoryPlan:
    """Arrays of a pass in the arena, and their lifetimes.

    Attributes
    ----------
    ranges : list of LiveRange
    view_ranges, gradient_ranges : dict of step to int
        Ranges of a step's view of its input (if larger than the value itself) and of the view's gradient; both
        are one range if the gradient overwrites the view.
    value_ranges, gradient_sum_ranges : dict of value to int
        Ranges of values outside all views, and of sums of the gradients from several readers.
    gradients_summed_in_place : set of value
        Values whose gradients from several readers are added to the first of these gradients.
    view_of_value : dict of value to step
        Step whose view contains the value in its interior.
    rebuilt_view_ranges, border_ranges : dict of step to int
        Ranges of views that are rebuilt for the backward pass, and of their kept part: the cells around the tile.
    backward_start : int
        First time of the backward pass.
    """

    backward_start: int
    ranges: list[LiveRange] = field(default_factory=list)
    view_ranges: dict[int, int] = field(default_factory=dict)
    gradient_ranges: dict[int, int] = field(default_factory=dict)
    value_ranges: dict[int, int] = field(default_factory=dict)
    gradient_sum_ranges: dict[int, int] = field(default_factory=dict)
    view_of_value: dict[int, int] = field(default_factory=dict)
    rebuilt_view_ranges: dict[int, int] = field(default_factory=dict)
    border_ranges: dict[int, int] = field(default_factory=dict)
    gradients_summed_in_place: set[int] = field(default_factory=set)

    @cached_property
    def packed(self) -> tuple[list[LiveRange], list[int], int]:
        """Ranges padded to whole cache lines, their offsets, and the total elements per sample."""
        sizes = [-(-live.elements_per_sample // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS for live in self.ranges]
        ranges = [live._replace(elements_per_sample=n) for live, n in zip(self.ranges, sizes, strict=True)]
        return ranges, *pack_ranges(ranges)

    @property
    def num_elements(self) -> int:
        """Total elements per sample."""
        return self.packed[2]

    def add(self, elements: int, first: int, last: int) -> int:
        """Append a range, and return its index in `ranges`."""
        self.ranges.append(LiveRange(elements, first, last))
        return len(self.ranges) - 1


def plan_memory(
    graph: Graph,
    view_elements: Sequence[int],
    has_window: Sequence[bool],
    gradient_can_overwrite_view: Sequence[bool],
    value_elements: Sequence[int],
    needs_input_gradient: bool = False,
    backward: bool = True,
    may_recompute: bool = False,
) -> MemoryPlan:
    """Return the lifetimes of all arrays on one rank.

    Parameters
    ----------
    view_elements : for each step, the elements per sample of the view of its input, including the tile
    has_window : whether the view is larger than the input itself
    gradient_can_overwrite_view : whether the view's gradient may overwrite the view
    value_elements : for each value, the elements of its tile
    needs_input_gradient : whether the gradient of the input is needed
    backward : False: forward only, so nothing is kept
    may_recompute : whether outputs of normalisations are recomputed in the backward pass instead of being kept
    """
    steps, end = graph.steps, 2 * len(graph.steps) - 1
    producers = graph.producers
    # values that never exist in memory
    absorbed = {steps[host].output_value for host in graph.fused_activations.values()}
    plan = MemoryPlan(len(steps))
    restored = graph.input_recomputation_steps if backward and may_recompute else {}
    saves = [step.saves_input and at not in restored for at, step in enumerate(steps)]

    def owns_gradient(value: int) -> bool:
        """Return whether a value's gradient is in memory that nothing else uses."""
        readers = graph.readers[value]
        if len(readers) != 1:
            return bool(readers)
        (at,) = readers
        return owns_gradient(steps[at].output_value) if at in graph.fused_activations else steps[at].layer is not None

    @cache
    def can_accumulate_in_first(value: int) -> bool:
        """Return whether all gradients of a value are added to the first one, because nothing else reads that one."""
        *_, previous, first = sorted(graph.readers[value])
        step = steps[first]
        others = [v for v in step.inputs if v != value]
        output = step.output_value
        disjoint = value_elements[value] == value_elements[output] and owns_gradient(output) and previous < first
        unread = (len(graph.readers[v]) == 1 and gradient_end(v) < end - previous for v in others)
        return step.layer is not None or (disjoint and all(unread))

    def gradient_stays_in_place(value: int, step: int) -> bool:
        """Return whether a value's gradient stays where a later step has written it."""
        readers = graph.readers[value]
        return len(readers) == 1 or (max(readers) == step and can_accumulate_in_first(value))

    @cache
    def gradient_end(value: int) -> int:
        """Return the time of the last read of a value's gradient; joins pass their gradient on unchanged."""
        if value == 0:
            return end
        at = producers[value]
        last = end - at
        if steps[at].join is not None and (
            value == steps[at].output_value or at in graph.deferred_relu_gradients or owns_gradient(value)
        ):
            last = max([last, *(gradient_end(v) for v in steps[at].inputs if gradient_stays_in_place(v, at))])
        return last

    def producer_reread_times(value: int) -> list[int]:
        """Return the times at which the producer of a value reads it again."""
        return [end - producers[value]] if graph.producer_reads_output(value) else []

    for value, readers in enumerate(graph.readers):
        wide = [at for at in readers if has_window[at]]
        if wide and (value or len(readers) == 1):
            plan.view_of_value[value] = max(wide, key=lambda at: steps[at].saves_input)
        elif value and value not in absorbed:
            first = producers[value]
            saved = [end - at for at in readers if not has_window[at] and saves[at]]
            kept = [*saved, *producer_reread_times(value)] if backward else []
            plan.value_ranges[value] = plan.add(value_elements[value], first, max([first, *readers, *kept]))
        if backward and (value or needs_input_gradient) and len(readers) > 1:
            if can_accumulate_in_first(value):
                plan.gradients_summed_in_place.add(value)
            else:
                plan.gradient_sum_ranges[value] = plan.add(
                    value_elements[value], end - max(readers), gradient_end(value)
                )
    for at, step in enumerate(steps):
        host = graph.fused_activations.get(at)
        in_join = host is not None and steps[host].join is not None and host not in graph.deferred_relu_gradients
        if step.layer is None or (host is not None and (not in_join or owns_gradient(step.output_value))):
            continue
        (value,) = step.inputs
        back, holds_value = end - at, plan.view_of_value.get(value) == at
        if has_window[at]:
            first = producers.get(value, at) if holds_value else at
            readers = graph.readers[value] if holds_value else [at]
            kept = [end - reader for reader in readers if saves[reader] and (reader == at or not has_window[reader])]
            kept += producer_reread_times(value) if holds_value else []
            plan.view_ranges[at] = plan.add(view_elements[at], first, max([*readers, *(kept if backward else [])]))
        if at in restored:
            plan.rebuilt_view_ranges[at] = plan.add(view_elements[at], back, back)
            if has_window[at]:
                plan.border_ranges[at] = plan.add(view_elements[at] - value_elements[value], at, back)
        if backward and (value or needs_input_gradient):
            last = gradient_end(value) if gradient_stays_in_place(value, at) else back
            view = plan.rebuilt_view_ranges.get(at, plan.view_ranges.get(at, plan.value_ranges.get(value)))
            if view is not None and gradient_can_overwrite_view[at] and plan.ranges[view].last_time == back:
                plan.gradient_ranges[at], plan.ranges[view] = view, plan.ranges[view]._replace(last_time=last)
            else:
                plan.gradient_ranges[at] = plan.add(view_elements[at], back, last)
    return plan
