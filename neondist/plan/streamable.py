"""Check whether nodes of a network can be computed strip by strip."""

from __future__ import annotations

from ..geometry import GridShape
from .graph import Graph, Step
from .segments import LayerRegions


def can_stream(graph: Graph, nodes: int, grid: GridShape, regions: LayerRegions) -> bool:
    """Return whether the first `nodes` nodes can run in strips without dividing a segment of `find_regions`."""
    steps, value = graph.ends[nodes]
    if not any(step.layer is not None for step in graph.steps[:steps]) or any(
        not _is_streamable(step, graph, grid, last=step.output == value) for step in graph.steps[:steps]
    ):
        return False
    following = graph.steps[steps:]
    return not any(step.layer and regions.get(id(step.layer), (None,))[0] is not None for step in following)


def _is_streamable(step: Step, graph: Graph, grid: GridShape, last: bool) -> bool:
    """Return whether a step has a bounded window or a reduction, and position-dependent weights only at the end."""
    layer, shape = step.layer, graph.shapes[step.inputs[0]]
    if len(graph.shapes[step.output]) < 2 and not last:
        return False
    if layer is None:
        return True
    window = layer.window_for(shape)
    halos = [] if window is None else [(shape, window)]
    return (
        len(shape) > 1
        and (layer.scheme is None or layer.scheme.exact)
        and layer.reach_for(shape) is not None
        and layer.gathers_for(shape, grid) is None
        and (window is None or not window.wraps)
        and (layer.sees_reach or layer.view_window_for(shape, grid) == window)
        and (layer.sees_reach or layer.reverse_halos or layer.halos_for(shape, grid) == halos)
        and (last or not any(parameter.layout.cut for parameter in layer.parameters_for(shape).values()))
    )
