"""Lifetimes of the arrays of a step, which determine the arrays that may share memory.

A pass of L steps has 2 L time points: step i runs forward at time i, and backward at time 2 L - 1 - i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    sort_keys: list[Callable[[LiveRange], tuple[int, ...]]] = [
        lambda live: (live.first_time - live.last_time, -live.elements_per_sample),
        lambda live: (-live.elements_per_sample,),
        lambda live: (live.first_time, -live.last_time),
        lambda live: (-live.last_time, live.first_time),
    ]
    first_times = {live.first_time for live in ranges}
    live = (sum(r.elements_per_sample for r in ranges if r.first_time <= at <= r.last_time) for at in first_times)
    min_length = max(live, default=0)
    layouts: list[tuple[list[int], int]] = []
    for sort_key in sort_keys:
        layouts.append(_place_in_order(ranges, sorted(range(len(ranges)), key=lambda at: sort_key(ranges[at]))))
        if layouts[-1][1] == min_length:
            break
    return min(layouts, key=lambda placed: placed[1])


def _place_in_order(ranges: Sequence[LiveRange], order: Sequence[int]) -> tuple[list[int], int]:
    offsets: dict[int, int] = {}
    for at in order:
        start = 0
        overlapping = [other for other in offsets if ranges[at].overlaps(ranges[other])]
        occupied = ((offsets[other], offsets[other] + ranges[other].elements_per_sample) for other in overlapping)
        for lo, hi in sorted(occupied):
            if start + ranges[at].elements_per_sample <= lo:
                break
            start = max(start, hi)
        offsets[at] = start
    total_elements = max((offset + ranges[at].elements_per_sample for at, offset in offsets.items()), default=0)
    return [offsets[at] for at in range(len(ranges))], total_elements


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
        Ranges of views that are rebuilt for the backward pass, and of the cells around the tile, which are kept.
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

    def add(self, elements: int, first_time: int, last_time: int) -> int:
        """Append a range, and return its index in `ranges`."""
        self.ranges.append(LiveRange(elements, first_time, last_time))
        return len(self.ranges) - 1


class _GradientLifetimes:
    """Memory locations and last reads of the gradients of a graph's values."""

    def __init__(self, graph: Graph, value_elements: Sequence[int]) -> None:
        self._graph, self._value_elements = graph, value_elements
        self._end = 2 * len(graph.steps) - 1
        self._last_reads: dict[int, int] = {0: self._end}
        self._accumulated: dict[int, bool] = {}

    def is_exclusive(self, value: int) -> bool:
        """Return whether a value's gradient is in memory that nothing else uses."""
        readers, steps = self._graph.readers[value], self._graph.steps
        if len(readers) != 1:
            return bool(readers)
        (reader,) = readers
        return (
            self.is_exclusive(steps[reader].output_value)
            if reader in self._graph.fused_activations
            else steps[reader].layer is not None
        )

    def accumulates_in_first(self, value: int) -> bool:
        """Return whether all gradients of a value are added to the first gradient, which nothing else reads."""
        if value not in self._accumulated:
            *_, reader, last_reader = sorted(self._graph.readers[value])
            step = self._graph.steps[last_reader]
            output_value, others = step.output_value, [v for v in step.inputs if v != value]
            self._accumulated[value] = step.layer is not None or (
                self._value_elements[value] == self._value_elements[output_value]
                and self.is_exclusive(output_value)
                and reader < last_reader
                and all(len(self._graph.readers[v]) == 1 and self.last_read(v) < self._end - reader for v in others)
            )
        return self._accumulated[value]

    def gradient_stays_in_place(self, value: int, step: int) -> bool:
        """Return whether a value's gradient stays in the memory to which a later step has written it."""
        readers = self._graph.readers[value]
        return len(readers) == 1 or (max(readers) == step and self.accumulates_in_first(value))

    def last_read(self, value: int) -> int:
        """Return the time of the last read of a value's gradient; joins pass their gradient on unchanged."""
        if value not in self._last_reads:
            at = self._graph.producers[value]
            step, times = self._graph.steps[at], [self._end - at]
            if step.join is not None and (
                value == step.output_value or at in self._graph.deferred_relu_gradients or self.is_exclusive(value)
            ):
                times += [self.last_read(v) for v in step.inputs if self.gradient_stays_in_place(v, at)]
            self._last_reads[value] = max(times)
        return self._last_reads[value]


@dataclass
class MemoryPlanner:
    """Lifetimes of all arrays of a pass on one rank.

    Attributes
    ----------
    graph : Graph
    view_elements : sequence of int
        For each step, the elements per sample of the view of its input, including the tile.
    has_window : sequence of bool
        For each step, whether the view is larger than the input itself.
    gradient_can_overwrite_view : sequence of bool
        For each step, whether the view's gradient may overwrite the view.
    value_elements : sequence of int
        For each value, the elements of its tile.
    needs_input_gradient : bool
        Whether the gradient of the input is needed.
    backward : bool
        False: forward only, so nothing is kept.
    may_recompute : bool
        Whether outputs of normalisations are recomputed in the backward pass instead of being kept.
    """

    graph: Graph
    view_elements: Sequence[int]
    has_window: Sequence[bool]
    gradient_can_overwrite_view: Sequence[bool]
    value_elements: Sequence[int]
    needs_input_gradient: bool = False
    backward: bool = True
    may_recompute: bool = False

    def __post_init__(self) -> None:
        graph = self.graph
        self._end = 2 * len(graph.steps) - 1
        self._gradients = _GradientLifetimes(graph, self.value_elements)
        self._recomputed = graph.input_recomputation_steps if self.backward and self.may_recompute else {}
        self._saves_input = [step.saves_input and at not in self._recomputed for at, step in enumerate(graph.steps)]
        # values that never exist in memory
        self._absorbed = {graph.steps[host].output_value for host in graph.fused_activations.values()}

    def plan(self) -> MemoryPlan:
        """Return the lifetimes of all arrays."""
        plan = MemoryPlan(len(self.graph.steps))
        for value in range(len(self.graph.readers)):
            self._add_value(plan, value)
            if self._has_gradient(value) and len(self.graph.readers[value]) > 1:
                self._add_gradient_sum(plan, value)
        for at in range(len(self.graph.steps)):
            if self._reads_own_view(at):
                self._add_views(plan, at)
                if self._has_gradient(self.graph.steps[at].inputs[0]):
                    self._add_gradient(plan, at)
        return plan

    def _has_gradient(self, value: int) -> bool:
        return self.backward and (value > 0 or self.needs_input_gradient)

    def _producer_reread_times(self, value: int) -> list[int]:
        """Return the times at which the producer of a value reads it again."""
        return [self._end - self.graph.producers[value]] if self.graph.producer_reads_output(value) else []

    def _add_value(self, plan: MemoryPlan, value: int) -> None:
        """Add the range of a value, unless a view of one of its readers contains it."""
        readers = self.graph.readers[value]
        windowed_readers = [at for at in readers if self.has_window[at]]
        if windowed_readers and (value or len(readers) == 1):
            plan.view_of_value[value] = max(windowed_readers, key=lambda at: self.graph.steps[at].saves_input)
        elif value and value not in self._absorbed:
            first_time = self.graph.producers[value]
            saved_times = [self._end - at for at in readers if not self.has_window[at] and self._saves_input[at]]
            kept_times = [*saved_times, *self._producer_reread_times(value)] if self.backward else []
            last_time = max([first_time, *readers, *kept_times])
            plan.value_ranges[value] = plan.add(self.value_elements[value], first_time, last_time)

    def _add_gradient_sum(self, plan: MemoryPlan, value: int) -> None:
        """Add the sum of the gradients from several readers of a value."""
        if self._gradients.accumulates_in_first(value):
            plan.gradients_summed_in_place.add(value)
        else:
            first_time = self._end - max(self.graph.readers[value])
            last_time = self._gradients.last_read(value)
            plan.gradient_sum_ranges[value] = plan.add(self.value_elements[value], first_time, last_time)

    def _reads_own_view(self, index: int) -> bool:
        """Return whether a step is a layer that is not computed in place by the step before it."""
        graph, step = self.graph, self.graph.steps[index]
        fusing_step = graph.fused_activations.get(index)
        if step.layer is None or fusing_step is None:
            return step.layer is not None
        is_join = graph.steps[fusing_step].join is not None and fusing_step not in graph.deferred_relu_gradients
        return is_join and not self._gradients.is_exclusive(step.output_value)

    def _add_views(self, plan: MemoryPlan, index: int) -> None:
        """Add the view of a step's input, and the parts of it that are rebuilt or kept for the backward pass."""
        (value,) = self.graph.steps[index].inputs
        backward_time = self._end - index
        if self.has_window[index]:
            holds_value = plan.view_of_value.get(value) == index
            first_time = self.graph.producers.get(value, index) if holds_value else index
            readers = self.graph.readers[value] if holds_value else [index]
            saving_readers = [r for r in readers if self._saves_input[r] and (r == index or not self.has_window[r])]
            kept_times = [self._end - r for r in saving_readers]
            kept_times += self._producer_reread_times(value) if holds_value else []
            last_time = max([*readers, *(kept_times if self.backward else [])])
            plan.view_ranges[index] = plan.add(self.view_elements[index], first_time, last_time)
        if index in self._recomputed:
            plan.rebuilt_view_ranges[index] = plan.add(self.view_elements[index], backward_time, backward_time)
            if self.has_window[index]:
                border_elements = self.view_elements[index] - self.value_elements[value]
                plan.border_ranges[index] = plan.add(border_elements, index, backward_time)

    def _add_gradient(self, plan: MemoryPlan, index: int) -> None:
        """Add the gradient of a step's view, in the memory of the view if the step may overwrite it."""
        (value,) = self.graph.steps[index].inputs
        first_time = self._end - index
        gradient_stays = self._gradients.gradient_stays_in_place(value, index)
        last_time = self._gradients.last_read(value) if gradient_stays else first_time
        view = plan.rebuilt_view_ranges.get(index, plan.view_ranges.get(index, plan.value_ranges.get(value)))
        if view is not None and self.gradient_can_overwrite_view[index] and plan.ranges[view].last_time == first_time:
            plan.gradient_ranges[index], plan.ranges[view] = view, plan.ranges[view]._replace(last_time=last_time)
        else:
            plan.gradient_ranges[index] = plan.add(self.view_elements[index], first_time, last_time)
