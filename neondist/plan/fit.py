"""A plan is compiled; where it does not fit into memory, that of the stream that takes least time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from ..errors import ConfigError, UserError
from ..geometry import GridShape, split
from ..layers import Layer, Sequential
from ..system.memory import words
from .graph import Graph, Lowering, of_layer
from .layer import LayerPlan
from .plan import Plan, Training
from .section import Rows
from .segments import Found, find_regions
from .stream import Stream, work_of
from .streamable import can_stream

Shape = tuple[int, ...]
LARGE = 64 << 20
"""bytes from which on half of a step's memory is worth something"""
WORTH = 1.3
"""times the work, at most, that it is worth"""


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
            whole, found = stream.rest_of(graph), regions | stream.regions
        plans, at_once = [], stream is None and training.strips is None and not training.recompute
        idle = _idle(chain, whole) if at_once else 0
        _, stop = whole.ends[idle]
        for step in whole.steps:
            if (layer := step.layer) is not None:
                shapes = whole.shapes[step.inputs[0]], whole.shapes[step.output]
                gradient = step.inputs[0] > stop
                tiles, moved = found.get(id(layer), (None, None)), whole.redistributions(step, gradient)
                moved = [cut for cut in moved if step.output > stop or cut.direction == "forward"]
                with _named(chain, layer):
                    if layer.splits_outputs and step.output not in whole.shards:
                        raise ConfigError(
                            "split: outputs must be followed by fully connected layers with split: inputs, and"
                            " needs an elementwise activation; use split: inputs"
                        )
                    plans.append(LayerPlan(layer, *shapes, grid, tiles, gradient, moved))
        return Plan(whole, plans, grid, batch_size or grid.replicas, training, stream=stream, idle=idle)

    plan = planned()
    if training.memory is not None:
        return fitted(plan, planned, regions)
    return spared(plan, planned, regions) if training.spares else plan


def _idle(chain: Sequential, graph: Graph) -> int:
    """Return how many first nodes have nothing to train: the gradients of their outputs are not needed."""
    for at, step in enumerate(graph.steps):
        if step.layer is not None:
            with _named(chain, step.layer):
                if step.layer.parameters_for(graph.shapes[step.inputs[0]]):
                    return max(node for node, (steps, _) in enumerate(graph.ends) if steps <= at)
    return 0


def fitted(plan: Plan, planned: Callable[[Stream], Plan], regions: Found) -> Plan:
    """Return the plan, or that of the stream that takes least time of those that fit into the memory that there is.

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
    if plan.needed <= limit and rows is None:
        return plan
    found, tried = _best(plan, planned, regions, limit, rows)
    if found is not None:
        return found
    needed = [(made.needed_by(stream), made) for made, stream in tried]
    count, made = min([(plan.needed, plan), *needed], key=lambda pair: pair[0])
    layer = max(made.layers, key=lambda each: each.largest_view * each.input_shape[-1])
    raise ConfigError(
        f"memory: a rank may use {words(limit)}, but needs at least {words(count)}, most of it for layer"
        f" '{layer.name}'; give more memory, or use more ranks or smaller batches"
    )


def spared(plan: Plan, planned: Callable[[Stream], Plan], regions: Found) -> Plan:
    """Return the plan of a stream that takes half of the memory, where that costs little; else the plan.

    On one tile alone: on several of them the strips would have to read more of the image than a tile's halo.
    """
    if plan.grid.tiles > 1 or plan.training.strips is not None or plan.training.recompute or plan.needed < LARGE:
        return plan
    limit, most = plan.needed // 2, WORTH * work_of(plan.graph, None)
    found, _ = _best(plan, planned, regions, limit, None, most)
    return found or plan


def _best(
    plan: Plan, planned: Callable[[Stream], Plan], regions: Found, limit: int, rows: Rows | None, most: float = inf
) -> tuple[Plan | None, list[tuple[Plan, Stream]]]:
    """Return the plan of the stream that takes least time within the limit; and plans with the streams that were tried.

    Where the rows of a strip are asked for, of the longest stream.

    Parameters
    ----------
    most : float
        Those that take as long are left out.
    """
    graph, best, tried, alone = plan.graph, None, list[tuple[Plan, Stream]](), isinstance(rows, int)
    ends = [nodes for nodes in range(len(graph.ends) - 1, 0, -1) if can_stream(graph, nodes, plan.grid, regions)]
    whole = {nodes: Stream.of(graph, nodes, plan.grid, 1) for nodes in ends}
    least = {nodes: work_of(graph, _keeping_all(stream)) for nodes, stream in whole.items()}
    for nodes in ends if rows is not None else sorted(ends, key=lambda nodes: least[nodes]):
        if least[nodes] >= most:
            continue
        made, stream = planned(whole[nodes]), whole[nodes]
        if isinstance(rows, int):
            stream = stream.in_strips(-(-stream.rows // rows))
        if made.needed_by(None) < limit:
            stream = _fewest(made, stream, limit, 0 if alone else stream.rows)
        tried.append((made, stream))
        for work, filled in _filled(made, stream, limit, most, alone):
            if (made := planned(filled)).needed <= limit:
                best, most = made, work
                break
        if rows is not None and best is not None:
            break
    return best, tried


def _keeping_all(stream: Stream) -> Stream:
    return stream.keeping(stream.grid.strips, tuple(stream.possible_cuts()))


def _filled(plan: Plan, stream: Stream, limit: int, most: float, alone: bool) -> list[tuple[float, Stream]]:
    """Return streams in as many strips and more that keep what there is room for, so that it need not be made again.

    With what they take; the best first.

    Parameters
    ----------
    plan : Plan
        With such a stream.
    stream : Stream
        Of which nothing is kept.
    limit : int
        Bytes of a rank.
    most : float
        More strips are not tried where they take as long, whatever they keep.
    alone : bool
        Whether they are to be as many.
    """
    tiles, itemsize, samples = plan.classes(stream).tiles, plan.itemsize, plan.held_samples(0)
    found: list[tuple[float, Stream]] = []

    def add(stream: Stream) -> None:
        if (work := work_of(plan.graph, stream)) < most:
            found.append((work, stream))

    while work_of(plan.graph, _keeping_all(stream)) < most:
        strips, cuts, left = stream.grid.strips, stream.possible_cuts(), limit - plan.needed_by(stream)
        if left < 0:
            break
        saved = samples * max(stream.keeping(strips).saved(tile, itemsize) for tile in tiles)
        checkpointed_strips = _share(strips, saved, left)
        add(stream.keeping(checkpointed_strips))
        left -= saved * checkpointed_strips // strips
        for largest in sorted(set(cuts.values())):
            few = tuple(sorted(nodes for nodes, size in cuts.items() if size <= largest))
            cutting = strips
            while cutting:  # less than in proportion, because they keep cells around theirs
                cut = stream.keeping(checkpointed_strips, few, cutting)
                kept = samples * itemsize * max(cut.kept(tile) for tile in tiles)
                if kept <= left:
                    add(cut)
                    break
                cutting = cutting * left // kept
        if alone or strips >= stream.rows:
            break
        most = min([most, *(work for work, _ in found)])
        stream = stream.in_strips(min(stream.rows, strips + (strips + 1) // 2))
    return sorted(found, key=lambda pair: pair[0])


def _share(strips: int, needed: int, room: int) -> int:
    """Return for how many strips there is room, if all of them need so much."""
    return strips if needed <= room else strips * max(0, room) // needed


def _fewest(plan: Plan, stream: Stream, limit: int, most: int) -> Stream:
    """Return the stream in the fewest strips for which there is room, from as many as it has up to `most`."""
    beside = plan.needed_by(None)
    strips, room, before = stream.grid.strips, limit - beside, (0, 0)
    while (size := plan.needed_by(stream) - beside) > room and strips < most:
        fixed = (strips * size - before[0] * before[1]) / (strips - before[0])  # more strips do not make it less
        if before[0] and fixed > 2 * room:
            break
        before = strips, size
        strips = min(most, 8 * strips, max(strips + 1, int(strips * size / room)))
        stream = stream.in_strips(strips)
    return stream


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
