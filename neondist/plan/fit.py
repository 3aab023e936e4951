"""Compilation of a plan, with the fastest stream if the step does not fit in memory without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

from ..errors import ConfigError, UserError
from ..geometry import GridShape, part_range
from ..layers import Layer, Sequential
from ..system.memory import format_bytes, format_limit_for
from .graph import Graph, GraphBuilder, Step, prefix_error_with_layer
from .layer import LayerPlan
from .plan import Plan, TrainingSettings
from .section import Rows
from .segments import LayerRegions, find_regions
from .stream import StripwisePlan, multiplications_per_sample

Shape = tuple[int, ...]
StreamCompiler = Callable[[StripwisePlan], Plan]
MIN_STEP_BYTES_TO_HALVE = 64 << 20  # smallest memory of a step that is halved
MAX_WORK_FACTOR_OF_HALVING = 1.3  # maximum factor by which the work may grow to halve the memory of a step


def compile_plan(
    chain: Sequential, input_shape: Shape, grid: GridShape, batch_size: int | None, training: TrainingSettings
) -> Plan:
    """Return the plan of a chain of layers.

    Parameters
    ----------
    batch_size : int, optional
        Global. Default: one sample per replica; planners of segments then assume no batch size.

    Raises
    ------
    UserError
        A layer is invalid; the message names it, and `subject` is the layer.
    """
    graph = GraphBuilder(chain.layers, input_shape).graph
    samples = None if batch_size is None else max(1, part_range(batch_size, grid.replicas, 0)[1])
    with _prefix_errors_with_layer(chain):
        regions = find_regions(chain, graph, grid, samples)

    def compile_stream(stream: StripwisePlan | None = None) -> Plan:
        whole, layer_regions = graph, regions
        if stream is not None:
            whole, layer_regions = stream.with_replicated_output(graph), regions | stream.regions
        plans, unsplit = [], stream is None and training.strips is None and not training.recompute
        idle = _count_leading_parameterless_nodes(chain, whole) if unsplit else 0
        _, stop = whole.node_ends[idle]
        for step in whole.steps:
            if (layer := step.layer) is not None:
                shapes = whole.shapes[step.inputs[0]], whole.shapes[step.output_value]
                gradient = step.inputs[0] > stop
                tiles = layer_regions.get(id(layer), (None, None))
                cuts = whole.redistributions(step, gradient)
                cuts = [cut for cut in cuts if step.output_value > stop or cut.direction == "forward"]
                with _prefix_errors_with_layer(chain, layer):
                    if layer.splits_outputs and step.output_value not in whole.sharded_vectors:
                        raise ConfigError(
                            "'split: outputs' requires an elementwise activation, and fully connected layers with"
                            " 'split: inputs' as the next layers; otherwise use 'split: inputs' in this layer"
                        )
                    plans.append(LayerPlan(layer, *shapes, grid, tiles, gradient, cuts))
        return Plan(
            whole, plans, grid, batch_size or grid.replicas, training, stream=stream, num_nodes_without_backward=idle
        )

    plan = compile_stream()
    if training.memory is not None:
        return fit_plan_in_memory(plan, compile_stream, regions)
    return halve_memory_if_cheap(plan, compile_stream, regions) if training.halve_memory_by_streaming else plan


def _count_leading_parameterless_nodes(chain: Sequential, graph: Graph) -> int:
    """Return the number of leading nodes without parameters, whose output gradients are not needed."""
    for at, step in enumerate(graph.steps):
        if step.layer is not None:
            with _prefix_errors_with_layer(chain, step.layer):
                if step.layer.parameters_for(graph.shapes[step.inputs[0]]):
                    return max(node for node, (steps, _) in enumerate(graph.node_ends) if steps <= at)
    return 0


def fit_plan_in_memory(plan: Plan, compile_stream: StreamCompiler, regions: LayerRegions) -> Plan:
    """Return the plan if it fits in memory, otherwise one with the fastest stream that fits.

    If the rows per strip are given, the stream that contains the most layers is used, even if the plan fits.

    Parameters
    ----------
    compile_stream : callable
        Returns the plan with a stream.
    regions : dict of layer's id to pair of Partition or None
        Cells of the input and output of each layer in a segment, as `find_regions` returns them.

    Raises
    ------
    ConfigError
        Nothing fits; the message names the layer that needs the most memory, and the minimum memory.
    """
    limit, rows = plan.training.memory, plan.training.strips
    assert limit is not None
    if plan.needed_bytes <= limit and rows is None:
        return plan
    search = partial(_find_fastest_stream_plan, plan, compile_stream, regions, limit, rows)
    best, _ = search()
    if best is not None or plan.needed_bytes <= limit:
        return best or plan
    best, tried = search(exhaustive=True)
    if best is not None:
        return best
    needed = [(streamed.needed_bytes_with(stream), streamed) for streamed, stream in tried]
    count, smallest = min([(plan.needed_bytes, plan), *needed], key=lambda pair: pair[0])
    largest, _ = max(smallest.memory_by_layer(), key=lambda pair: pair[1])
    enough = format_limit_for(count, plan.grid.size, plan.training.backend)
    raise ConfigError(
        f"memory: a rank may use {format_bytes(limit)}, but needs at least {format_bytes(count)}; layer '{largest}'"
        f" needs the most; give memory: {enough} or more, or use more ranks or smaller batches"
    )


def halve_memory_if_cheap(plan: Plan, compile_stream: StreamCompiler, regions: LayerRegions) -> Plan:
    """Return a plan with a stream that halves the memory if this costs little, else the given plan.

    A stream is used only on one tile: on several tiles, strips would read more of the image than a tile and its halo.
    """
    if (
        plan.grid.tiles > 1
        or plan.training.strips is not None
        or plan.training.recompute
        or plan.needed_bytes < MIN_STEP_BYTES_TO_HALVE
    ):
        return plan
    limit, most = plan.needed_bytes // 2, MAX_WORK_FACTOR_OF_HALVING * multiplications_per_sample(plan.graph, None)
    best, _ = _find_fastest_stream_plan(plan, compile_stream, regions, limit, None, most)
    return best or plan


def _find_fastest_stream_plan(
    plan: Plan,
    compile_stream: StreamCompiler,
    regions: LayerRegions,
    limit: int,
    rows: Rows | None,
    most: float = inf,
    exhaustive: bool = False,
) -> tuple[Plan | None, list[tuple[Plan, StripwisePlan]]]:
    """Return the plan of the fastest stream within the limit, and the plans and streams that were tried.

    With given rows per strip, the longest stream is chosen.

    Parameters
    ----------
    most : float
        Streams that need at least this work are ignored.
    exhaustive : bool
        Whether to try the most strips, which takes seconds for large images, even where these are unlikely to fit.
    """
    graph, best, tried, fixed = plan.graph, None, list[tuple[Plan, StripwisePlan]](), isinstance(rows, int)
    ends = [
        nodes
        for nodes in range(len(graph.node_ends) - 1, 0, -1)
        if _can_run_nodes_in_strips(graph, nodes, plan.grid, regions)
    ]
    whole = {nodes: StripwisePlan.of(graph, nodes, plan.grid, 1) for nodes in ends}
    least = {nodes: multiplications_per_sample(graph, _with_all_checkpoints(stream)) for nodes, stream in whole.items()}
    for nodes in ends if rows is not None else sorted(ends, key=lambda nodes: least[nodes]):
        if least[nodes] >= most:
            continue
        streamed, stream = compile_stream(whole[nodes]), whole[nodes]
        if isinstance(rows, int):
            stream = stream.with_strips(-(-stream.rows // rows))
        if exhaustive or streamed.needed_bytes_with(None) < limit:
            stream = _stream_with_fewest_strips(streamed, stream, limit, 0 if fixed else stream.rows, exhaustive)
        tried.append((streamed, stream))
        for work, filled in _fitting_streams(streamed, stream, limit, most, fixed):
            if (streamed := compile_stream(filled)).needed_bytes <= limit:
                best, most = streamed, work
                break
        if rows is not None and best is not None:
            break
    return best, tried


def _can_run_nodes_in_strips(graph: Graph, num_nodes: int, grid: GridShape, regions: LayerRegions) -> bool:
    """Return whether the first nodes can run in strips without dividing a segment of `find_regions`."""
    steps, value = graph.node_ends[num_nodes]
    if not any(step.layer is not None for step in graph.steps[:steps]) or any(
        not _can_run_step_in_strips(step, graph, grid, last=step.output_value == value) for step in graph.steps[:steps]
    ):
        return False
    return not any(step.layer and regions.get(id(step.layer), (None,))[0] is not None for step in graph.steps[steps:])


def _can_run_step_in_strips(step: Step, graph: Graph, grid: GridShape, last: bool) -> bool:
    """Return whether a step can run in strips: exact scheme, bounded window, partitioned weights only if last."""
    layer, shape = step.layer, graph.shapes[step.inputs[0]]
    if len(graph.shapes[step.output_value]) < 2 and not last:
        return False
    if layer is None:
        return True
    window = layer.window_for(shape)
    halos = [] if window is None else [(shape, window)]
    return (
        len(shape) > 1
        and (layer.scheme is None or layer.scheme.exact)
        and layer.receptive_window_for(shape) is not None
        and layer.gathered_gradient_shape_and_window(shape, grid) is None
        and (window is None or not window.wraps)
        and (layer.views_receptive_window_in_strips or layer.view_window_for(shape, grid) == window)
        and (layer.views_receptive_window_in_strips or layer.adds_output_halo or layer.halos_for(shape, grid) == halos)
        and (last or not any(parameter.layout.is_partitioned for parameter in layer.parameters_for(shape).values()))
    )


def _with_all_checkpoints(stream: StripwisePlan) -> StripwisePlan:
    return stream.with_checkpoints(stream.grid.strips, tuple(stream.possible_cuts()))


def _fitting_streams(
    plan: Plan, stream: StripwisePlan, limit: int, most: float, fixed: bool
) -> list[tuple[float, StripwisePlan]]:
    """Return (work, stream) for the stream's number of strips or more, with as many checkpoints as fit; best first.

    Parameters
    ----------
    plan : Plan
        Plan with the stream.
    stream : StripwisePlan
        Stream without checkpoints.
    limit : int
        Bytes per rank.
    most : float
        Streams that need at least this work are not tried.
    fixed : bool
        Whether the number of strips is fixed.
    """
    tiles, itemsize, samples = plan.tile_classes_with(stream).representatives, plan.itemsize, plan.max_live_samples(0)
    options: list[tuple[float, StripwisePlan]] = []

    def add(stream: StripwisePlan) -> None:
        if (work := multiplications_per_sample(plan.graph, stream)) < most:
            options.append((work, stream))

    while multiplications_per_sample(plan.graph, _with_all_checkpoints(stream)) < most:
        strips, cuts, left = stream.grid.strips, stream.possible_cuts(), limit - plan.needed_bytes_with(stream)
        if left < 0:
            break
        saved = samples * max(stream.with_checkpoints(strips).saved_bytes(tile, itemsize) for tile in tiles)
        checkpointed_strips = _count_strips_that_fit(strips, saved, left)
        add(stream.with_checkpoints(checkpointed_strips))
        left -= saved * checkpointed_strips // strips
        for largest in sorted(set(cuts.values())):
            nodes_kept = tuple(sorted(nodes for nodes, size in cuts.items() if size <= largest))
            cutting = strips
            while cutting:  # memory falls less than proportionally: strips keep cells around their own
                cut = stream.with_checkpoints(checkpointed_strips, nodes_kept, cutting)
                kept = samples * itemsize * max(cut.kept_gradient_elements(tile) for tile in tiles)
                if kept <= left:
                    add(cut)
                    break
                cutting = cutting * left // kept
        if fixed or strips >= stream.rows:
            break
        most = min([most, *(work for work, _ in options)])
        stream = stream.with_strips(min(stream.rows, strips + (strips + 1) // 2))
    return sorted(options, key=lambda pair: pair[0])


def _count_strips_that_fit(strips: int, needed: int, room: int) -> int:
    """Return the number of strips that fit in `room`, if all strips need `needed` in total."""
    return strips if needed <= room else strips * max(0, room) // needed


def _stream_with_fewest_strips(
    plan: Plan, stream: StripwisePlan, limit: int, most: int, exhaustive: bool
) -> StripwisePlan:
    """Return the stream in the fewest strips, from its own number up to `most`, that fits in memory.

    If none is likely to fit, return a stream that does not fit. With `exhaustive`, a stream that does not fit is
    returned only if none fits.
    """
    if exhaustive and plan.needed_bytes_with(smallest := stream.with_strips(max(most, stream.grid.strips))) > limit:
        return smallest
    base = plan.needed_bytes_with(None)
    strips, room, previous = stream.grid.strips, max(1, limit - base), (0, 0)
    while (size := plan.needed_bytes_with(stream) - base) > room and strips < most:
        fixed = (strips * size - previous[0] * previous[1]) / (strips - previous[0])  # memory independent of strips
        if previous[0] and fixed > 2 * room and not exhaustive:
            break
        previous = strips, size
        strips = min(most, 8 * strips, max(strips + 1, int(strips * size / room)))
        strips = -(-stream.rows // (stream.rows // strips))  # the fewest strips of this length
        stream = stream.with_strips(strips)
    return stream


@contextmanager
def _prefix_errors_with_layer(chain: Sequential, layer: Layer | None = None) -> Iterator[None]:
    """Prefix errors with `layer`; default: the `subject` of the error, if any."""
    try:
        yield
    except UserError as error:
        subject: Any = layer or error.subject
        if subject is None:
            raise
        index = next(i for i, node in enumerate(chain.layers) if subject in node.leaves)
        raise prefix_error_with_layer(error, index, subject) from error
