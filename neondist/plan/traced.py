"""Backward propagation of regions: the cells of every value on which parts of a network's output depend."""

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
    extra: Mapping[int, Partition] | None = None,
) -> list[Partition]:
    """Return the cells of every value that each part needs.

    Parameters
    ----------
    last : Partition
        The parts of the output.
    needed : callable
        Returns the cells of a value that a layer needs for parts of its output.
    extra : dict of value to Partition
        Cells that each part has of a value, needed or not.
    """
    regions = {graph.output: last}
    for step in reversed(graph.steps):
        if extra is not None and step.output in extra:
            regions[step.output] = hulls(regions[step.output], extra[step.output])
        outputs = regions[step.output]
        for value in step.inputs:
            cells = outputs if step.layer is None else needed(step.layer, outputs, value)
            regions[value] = hulls(regions[value], cells) if value in regions else cells
    return [regions[value] for value in range(len(graph.shapes))]


def needed_by(layer: Layer, outputs: Partition, shape: tuple[int, ...]) -> Partition:
    """Return the cells of a layer's input, of this shape, on which parts of its output depend."""
    reach = layer.reach_for(shape)
    assert reach is not None
    if reach.pointwise:
        return outputs  # empty stays empty: an activation's output may be its input
    return sources(outputs, reach, shape[:-1])


def section_of(graph: Graph, cells: Sequence[Partition], grid: GridShape, backward: bool = True) -> PlannedSection:
    """Return the section executed for each part, whose tiles are the parts."""
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
