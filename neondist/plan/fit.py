"""A plan is compiled; where it does not fit into memory, that of the stream that computes least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, prod
from typing import Any

from ..errors import ConfigError, UserError
from ..geometry import GridShape, split
from ..layers import Layer, Sequential
from ..memory import words
from .graph import Lowering, of_layer
from .layer import LayerPlan
from .plan import Plan, Training
from .planner import PASSES, operations
from .section import Rows
from .segments import Found, find_regions
from .stream import Stream, can_stream

Shape = tuple[int, ...]
LARGE = 64 << 20
"""bytes from which on half of a step's memory is worth something"""
WORTH = 1.25
"""times the multiplications, at most, that it is worth"""


def compile_plan(
    chain: Sequential, input_shape: Shape, grid: GridShape, batch_size: int | None, training: Training
) -> Plan:
    """Return the plan of a chain of layers.

    Parameters
    ----------
    batch_size : int, optional
        Global; default: one sample for each replica, of which no planner of segments knows.

    Raises
    ------
    UserError
        A layer does not fit; the error names it, and carries it as `subject`.
    """
    graph = Lowering(chain.layers, input_shape).graph
    samples = None if batch_size is None else max(1, split(batch_size, grid.replicas, 0)[1])
    with _named(chain):
        regions = find_regions(chain, graph, grid, samples)

    def planned(stream: Stream | None = None) -> Plan:
        whole, found = graph, regions
        if stream is not None:
            whole, found = stream.beside(graph), regions | stream.regions
        plans = []
        for step in whole.steps:
            if (layer := step.layer) is not None:
                shapes, gradient = (whole.shapes[step.inputs[0]], whole.shapes[step.output]), 0 not in step.inputs
                tiles, moved = found.get(id(layer), (None, None)), whole.redistributions(step, gradient)
                with _named(chain, layer):
                    plans.append(LayerPlan(layer, *shapes, grid, tiles, gradient, moved))
        return Plan(whole, plans, grid, batch_size or grid.replicas, training, stream=stream)

    plan = planned()
    if training.memory is not None:
        return fitted(plan, planned, regions)
    return spared(plan, planned, regions) if training.spares else plan


def fitted(plan: Plan, planned: Callable[[Stream], Plan], regions: Found) -> Plan:
    """Return the plan, or that of a stream, which computes least of those that fit into the memory that there is.

    Where the rows of a strip are asked for, of the longest stream.

    Parameters
    ----------
    planned : callable
        Returns the plan with a stream.
    regions : as `find_regions` returns them

    Raises
    ------
    ConfigError
        None fits: it names the layer that needs most, and the least that would do.
    """
    limit, rows = plan.training.memory, plan.training.strips
    assert limit is not None
    least = [(plan.needed, plan)]
    if plan.needed <= limit and rows is None:
        return plan
    for count, made in _streams(plan, planned, regions, limit, rows):
        if count <= limit and rows is not None:
            return _with_cuts(made, planned, limit)
        least.append((count, made))
    found = [made for count, made in least if count <= limit]
    if found:
        return _with_cuts(min(found, key=_work), planned, limit)
    count, made = min(least, key=lambda pair: pair[0])
    layer = max(made.layers, key=lambda each: max(box.size for box in each.kept) * each.input_shape[-1])
    raise ConfigError(
        f"memory: a rank may use {words(limit)}, but needs {words(count)} at least, most of it for layer"
        f" '{layer.name}'; give more memory, or use more ranks or smaller batches"
    )


def spared(plan: Plan, planned: Callable[[Stream], Plan], regions: Found) -> Plan:
    """Return the plan of a stream that takes half of the memory, where that costs little; else the plan.

    On one tile alone: on several of them the strips would have to read more of the image than a tile's halo.
    """
    if plan.grid.tiles > 1 or plan.training.strips is not None or plan.training.recompute or plan.needed < LARGE:
        return plan
    limit, most = plan.needed // 2, WORTH * _work(plan)
    found = [made for count, made in _streams(plan, planned, regions, limit, None, most) if count <= limit]
    return min([made for made in found if _work(made) <= most] or [plan], key=_work)


def _streams(
    plan: Plan,
    planned: Callable[[Stream], Plan],
    regions: Found,
    limit: int,
    rows: Rows | None,
    most: float = inf,
) -> Iterator[tuple[int, Plan]]:
    """Yield the plans with streams, the longest first, and the bytes that they need: within the limit if they can.

    Parameters
    ----------
    most : float
        Those that compute more in any case are left out.
    """
    for nodes in range(len(plan.graph.ends) - 1, 0, -1):
        if not can_stream(plan.graph, nodes, plan.grid, regions):
            continue
        if most < inf and _work(planned(Stream.of(plan.graph, nodes, plan.grid, 1, 1))) > most:
            continue
        for sparing in (True, False):
            yield _in_strips(plan, nodes, planned, limit, None if rows == "auto" else rows, sparing)


def _in_strips(
    plan: Plan, nodes: int, planned: Callable[[Stream], Plan], limit: int, rows: int | None, sparing: bool
) -> tuple[int, Plan]:
    """Return the plan with so many nodes in as few strips as fit, or of so many rows, and the bytes that it needs.

    Parameters
    ----------
    sparing : bool
        Whether of all strips what spares them work is kept, or of as many as there is room for.
    """
    most = Stream.of(plan.graph, nodes, plan.grid, 1).rows
    start = Stream.of(plan.graph, nodes, plan.grid, 1 if rows is None else -(-most // rows))
    count, made = _fewest(plan, start, float(sparing), planned, limit, most if rows is None else 0)
    strips = made.stream.grid.strips  # type: ignore[union-attr]
    if sparing or count > limit:
        return count, made
    found = [(count, made)]
    for strips in {min(most, strips * times) for times in ((1, 2, 4) if rows is None else (1,))}:
        all_spared, none = (planned(Stream.of(plan.graph, nodes, plan.grid, strips, n)) for n in (strips, 0))
        least = none.needed
        few = int(strips * (limit - least) / max(1, all_spared.needed - least))
        made = planned(Stream.of(plan.graph, nodes, plan.grid, strips, few))
        found.append((made.needed, made))
    return min(found, key=lambda pair: (pair[0] > limit, _work(pair[1])))


def _with_cuts(plan: Plan, planned: Callable[[Stream], Plan], limit: int) -> Plan:
    """Return a plan that keeps as many gradients on the way back as there is room for, in more strips if need be."""
    stream = plan.stream
    cuts = {} if stream is None else stream.possible_cuts()
    if stream is None or not cuts:
        return plan
    found = [plan]
    for largest in sorted(set(cuts.values())):
        few = tuple(sorted(nodes for nodes, size in cuts.items() if size <= largest))
        most = stream.rows if plan.training.strips is None else 0
        spared = stream.sparing / stream.grid.strips
        count, made = _fewest(plan, replace(stream, cuts=few), spared, planned, limit, most)
        if count <= limit:
            found.append(made)
    return min(found, key=_work)


def _fewest(
    plan: Plan, start: Stream, spared: float, planned: Callable[[Stream], Plan], limit: int, most: int
) -> tuple[int, Plan]:
    """Return the bytes that a plan needs, and it: in the fewest strips that fit, from those of `start` up to so many.

    Parameters
    ----------
    spared : float
        The share of strips of which something is kept.
    """
    strips = start.grid.strips
    while True:
        made = planned(Stream.of(plan.graph, start.nodes, plan.grid, strips, round(strips * spared), start.cuts))
        count, streamed = made.needed, made.streamed
        room = limit - (count - streamed)  # for strips, beside what else there is
        if count <= limit or room <= 0 or strips >= most:
            return count, made
        strips = min(most, max(strips + 1, int(strips * streamed / room)))


def _work(plan: Plan) -> float:
    """Return the multiplications of a sample in a training step."""
    stream = plan.stream
    steps = 0 if stream is None else len(stream.graph.steps)
    behind = {id(step.layer) for step in plan.graph.steps[steps:]}
    layers = [each for each in plan if id(each.layer) in behind]
    beside = sum(prod(each.output_shape[:-1]) * operations(each.layer, each.input_shape) for each in layers)
    return PASSES * beside + (0 if stream is None else stream.work)


@contextmanager
def _named(chain: Sequential, layer: Layer | None = None) -> Iterator[None]:
    """Put the layer that an error is about, by default its subject, in front of the message."""
    try:
        yield
    except UserError as error:
        about: Any = layer or error.subject
        if about is None:
            raise
        raise of_layer(error, next(i for i, node in enumerate(chain.layers) if about in node.leaves), about) from error
