"""Lowering of a program in which some operators go together: what those need, and what each rank has of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .blocked import at_least_one
from .graph import Value
from .in_blocks import Ranged, Traced
from .layout import Layout, Mesh
from .lower import Lowering
from .transfer import Range, Wanted, at_place, hull


class ProgramLowering(Lowering):
    """Knows the operators of the program, of which some go together, from those that rules call.

    Attributes
    ----------
    given : list of Value
        What is given from outside.
    ruling : bool
        Whether a rule is being called.
    number : int
        Of the operator of the program that is being called.
    """

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.given, self.ruling, self.number = list[Value](), False, -1

    def input(self, layout: Layout, dtype: torch.dtype, kind: str = "value") -> Value:
        """Return a new value that is given from outside."""
        self.given.append(super().input(layout, dtype, kind))
        return self.given[-1]

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives."""
        if self.ruling:
            return self.ruled(target, args, kwargs)
        self.number += 1
        return self.lower_program_call(target, args, kwargs)

    def ruled(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives by its rule."""
        before, self.ruling = self.ruling, True
        try:
            return super().call(target, args, kwargs)
        finally:
            self.ruling = before

    @abstractmethod
    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator of the program gives."""

    def wide(self, inputs: Sequence[Value], wanted: Sequence[Wanted]) -> tuple[list[Value], list[list[int]]]:
        """Return what this rank needs of the inputs, as `wanted` tells it of each, and the first indices of that."""
        found, first = [], []
        for value, wants in zip(inputs, wanted, strict=True):
            found.append(self.view_of(value, wants))
            here = at_place(wants, self.place)
            first.append([here[dim][0] if dim in here else 0 for dim in range(len(value.layout))])
        return found, first

    def wanted(
        self, traced: Sequence[Traced], layouts: Sequence[Sequence[Layout]], inputs: Sequence[Layout]
    ) -> list[Wanted]:
        """Return what each part of an axis needs of the inputs for its tiles of outputs, along the dimensions it cuts.

        Parameters
        ----------
        traced : what goes together; all have these inputs
        layouts : of the outputs of each
        inputs : their layouts
        """
        needs = {
            axis: [self._needed(traced, layouts, {axis: part}) for part in range(self.mesh.parts[axis])]
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

    def view_of(self, value: Value, wants: Wanted) -> Value:
        """Return what this rank needs of a value."""
        return self.view(
            value, {dim: (axis, [[r] for r in ranges]) for dim, (axis, ranges) in wants.items()}, self.mesh.axes
        )

    @staticmethod
    def _needed(traced: Sequence[Traced], layouts: Sequence[Sequence[Layout]], place: Mapping[int, int]) -> Ranged:
        """Return what the ranks at a place of some axes need of the inputs."""
        found = []
        for each, laid in zip(traced, layouts, strict=True):
            own = ranges_at(laid, place)
            found.append(each.sources(at_least_one(own, own)))
        return tuple(tuple(joined(dims) for dims in zip(*inputs, strict=True)) for inputs in zip(*found, strict=True))


def joined(ranges: Sequence[Range]) -> Range:
    """Return the range around several, of which some may be empty."""
    return hull([at for lo, hi in ranges if lo < hi for at in (lo, hi - 1)])


def laid(value: Value, mesh: Mesh) -> Layout:
    """Return how ranks have a box, cut evenly."""
    return tuple((mesh.atom(atom.extent, atom.axis),) for (atom,) in value.layout)


def ranges_at(layouts: Sequence[Layout], place: Mapping[int, int]) -> Ranged:
    """Return the range along each dimension that the rank at a place has; of axes that are left out, all."""
    return tuple(
        tuple(
            atom.ranges[place[atom.axis]] if atom.axis is not None and atom.axis in place else (0, atom.extent)
            for (atom,) in layout
        )
        for layout in layouts
    )
