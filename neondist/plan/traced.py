"""Parts of a network's output, and of every value before it the cells from which they follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..geometry import GridShape, Partition, hulls, sources
from ..layers import Layer
from .graph import Graph
from .layer import LayerPlan
from .section import PlannedSection


def trace(
    graph: Graph,
    last: Partition,
    needed: Callable[[Layer, Partition, int], Partition],
    also: Mapping[int, Partition] | None = None,
) -> list[Partition]:
    """Return which cells of every value each part needs.

    Parameters
    ----------
    last : Partition
        The parts of the output.
    needed : callable
        Which cells of a value a layer needs for parts of its output.
    also : dict of value to Partition
        What each part has of a value, whether it needs it or not.
    """
    found = {graph.output: last}
    for step in reversed(graph.steps):
        if also is not None and step.output in also:
            found[step.output] = hulls(found[step.output], also[step.output])
        outputs = found[step.output]
        for value in step.inputs:
            cells = outputs if step.layer is None else needed(step.layer, outputs, value)
            found[value] = hulls(found[value], cells) if value in found else cells
    return [found[value] for value in range(len(graph.shapes))]


def needed_by(layer: Layer, outputs: Partition, shape: tuple[int, ...]) -> Partition:
    """Return the cells of a layer's input, of this shape, from which parts of its output follow."""
    reach = layer.reach_for(shape)
    assert reach is not None
    if reach.pointwise:
        return outputs  # with none of them none: what an activation is given may be what it gives
    return sources(outputs, reach, shape[:-1])


def section_of(graph: Graph, cells: Sequence[Partition], grid: GridShape, backward: bool = True) -> PlannedSection:
    """Return what is executed for each part: to it they are what tiles are to a network."""
    placed = {
        id(step.layer): LayerPlan(
            step.layer,
            graph.shapes[step.inputs[0]],
            graph.shapes[step.output],
            grid,
            (cells[step.inputs[0]], cells[step.output] if cells[step.output].extent else None),
        )
        for step in graph.steps
        if step.layer is not None
    }
    joined = {step.output: cells[step.output] for step in graph.steps if step.layer is None}
    regions = {0: cells[0], **joined}
    return PlannedSection(0, len(graph.ends) - 1, graph, placed, grid, regions, True, backward=backward)
