"""Lowering of a program with groups of operators that are executed as units, and the inputs that these need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ...geometry import DimRequest, joined
from ..ir.graph import Value
from ..ir.layout import Layout, Mesh, NeededRanges, at_place
from ..lowering.lower import Lowering
from .blocked import at_least_one
from .in_blocks import AxisRanges, Traced


class ProgramLowering(Lowering):
    """Lowering that tells operators of the program from those called by rules.

    Attributes
    ----------
    input_values : list of Value
        Values that are passed from outside.
    in_rule : bool
        Whether a rule is being called.
    number : int
        Number of the current operator of the program.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_values, self.in_rule, self.number = list[Value](), False, -1

    def input(self, layout: Layout, dtype: torch.dtype, kind: str = "value") -> Value:
        """Return a new input value."""
        self.input_values.append(super().input(layout, dtype, kind))
        return self.input_values[-1]

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator and return its values."""
        if self.in_rule:
            return self.lower_by_rule(target, args, kwargs)
        self.number += 1
        return self.lower_program_call(target, args, kwargs)

    def lower_by_rule(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator by its rule."""
        before, self.in_rule = self.in_rule, True
        try:
            return super().call(target, args, kwargs)
        finally:
            self.in_rule = before

    @abstractmethod
    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one operator of the program and return its values."""

    def input_views(
        self, inputs: Sequence[Value], needed: Sequence[NeededRanges]
    ) -> tuple[list[Value], list[list[int]]]:
        """Return this rank's views of the inputs, and the first indices of each view."""
        views, first = [], []
        for value, needed_ranges in zip(inputs, needed, strict=True):
            views.append(self.view_of(value, needed_ranges))
            ranges = at_place(needed_ranges, self.place)
            first.append([ranges[dim][0] if dim in ranges else 0 for dim in range(len(value.layout))])
        return views, first

    def input_ranges(
        self, traced: Sequence[Traced], layouts: Sequence[Sequence[Layout]], inputs: Sequence[Layout]
    ) -> list[NeededRanges]:
        """Return the ranges of each input that the parts of each axis need for their tiles of the outputs.

        Parameters
        ----------
        traced : groups that are executed together; all have these inputs
        layouts : of the outputs of each group
        inputs : layouts of the inputs
        """
        needs = {
            axis: [self._sources(traced, layouts, {axis: part}) for part in range(self.mesh.parts[axis])]
            for axis in self.mesh.axes
        }
        return [
            {
                dim: (atom.axis, [sources[at][dim] for sources in needs[atom.axis]])
                for dim, (atom,) in enumerate(layout)
                if atom.axis is not None
            }
            for at, layout in enumerate(inputs)
        ]

    def view_of(self, value: Value, needed: NeededRanges) -> Value:
        """Return this rank's view of a value."""
        views = (
            DimRequest(dim, self.atom(value, dim), axis, tuple((indices,) for indices in ranges))
            for dim, (axis, ranges) in sorted(needed.items())
        )
        moved = [request for request in views if not request.is_own]
        return self.transferred(value, moved, self.mesh.axes) if moved else self.enter(value, self.mesh.axes)

    @staticmethod
    def _sources(groups: Sequence[Traced], layouts: Sequence[Sequence[Layout]], place: Mapping[int, int]) -> AxisRanges:
        """Return the ranges of the inputs that the ranks at a place of some axes need."""
        own = [ranges_at(output_layouts, place) for output_layouts in layouts]
        sources = [part.sources(at_least_one(ranges, ranges)) for part, ranges in zip(groups, own, strict=True)]
        of_inputs = zip(*sources, strict=True)
        return tuple(tuple(reduce(joined, dims) for dims in zip(*inputs, strict=True)) for inputs in of_inputs)


def laid(value: Value, mesh: Mesh) -> Layout:
    """Return the layout of a box, partitioned evenly."""
    return tuple((mesh.atom(atom.extent, atom.axis),) for (atom,) in value.layout)


def ranges_at(layouts: Sequence[Layout], place: Mapping[int, int]) -> AxisRanges:
    """Return the ranges of the rank at a place along each dimension; full ranges along axes not in `place`."""
    return tuple(
        tuple(
            atom.ranges[place[atom.axis]] if atom.axis is not None and atom.axis in place else (0, atom.extent)
            for (atom,) in layout
        )
        for layout in layouts
    )
