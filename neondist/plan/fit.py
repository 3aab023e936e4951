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
from .stream import StripwisePlan, operations_per_sample

Shape = tuple[int, ...]
StreamCompiler = Callable[[StripwisePlan], Plan]
MIN_STEP_BYTES_TO_HALVE = 64 << 20  # smallest step memory that is worth halving
MAX_WORK_FACTOR_OF_HALVING = 1.3  # maximum factor by which the work may grow to halve the memory of a step


def compile_plan(
    chain: Sequential, input_shape: Shape, grid: GridShape, batch_size: int | None, training: TrainingSettings
) -> Plan:
    """Return the plan of a chain of layers.

    Parameters
    ----------
    batch_size : int, optional
        Global. Default: one sample per replica; planners of segments then use their own number of samples.

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
        network, layer_regions = graph, regions
        if stream is not None:
            network, layer_regions = stream.with_replicated_output(graph), regions | stream.regions
        plans, may_skip_backward = [], stream is None and training.strips is None and not training.recompute
        idle = _count_leading_parameterless_nodes(chain, network) if may_skip_backward else 0
        _, last_idle_value = network.node_ends[idle]
        for step in network.steps:
            if (layer := step.layer) is not None:
                input_shape, output_shape = network.shapes[step.inputs[0]], network.shapes[step.output_value]
                needs_gradient = step.inputs[0] > last_idle_value
                cells = layer_regions.get(id(layer), (None, None))
                moves = network.redistributions(step, needs_gradient)
                moves = [move for move in moves if step.output_value > last_idle_value or move.direction == "forward"]
                with _prefix_errors_with_layer(chain, layer):
                    if layer.splits_outputs and step.output_value not in network.sharded_vectors:
                        raise ConfigError(
                            "'split: outputs' requires an elementwise activation, and fully connected layers with"
                            " 'split: inputs' as the next layers; otherwise use 'split: inputs' in this layer"
                        )
                    plans.append(LayerPlan(layer, input_shape, output_shape, grid, cells, needs_gradient, moves))
        return Plan(
            network, plans, grid, batch_size or grid.replicas, training, stream=stream, num_nodes_without_backward=idle
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
    max_bytes, rows_per_strip = plan.training.memory, plan.training.strips
    assert max_bytes is not None
    if plan.needed_bytes <= max_bytes and rows_per_strip is None:
        return plan
    search = partial(_find_fastest_stream_plan, plan, compile_stream, regions, max_bytes, rows_per_strip)
    best_plan, _ = search()
    if best_plan is not None or plan.needed_bytes <= max_bytes:
        return best_plan or plan
    best_plan, candidates = search(exhaustive=True)
    if best_plan is not None:
        return best_plan
    bytes_and_plans = [(candidate.needed_bytes_with(stream), candidate) for candidate, stream in candidates]
    min_bytes, smallest_plan = min([(plan.needed_bytes, plan), *bytes_and_plans], key=lambda pair: pair[0])
    largest, _ = max(smallest_plan.memory_by_layer(), key=lambda pair: pair[1])
    sufficient_limit = format_limit_for(min_bytes, plan.grid.size, plan.training.backend)
    raise ConfigError(
        f"memory: a rank may use {format_bytes(max_bytes)}, but needs at least {format_bytes(min_bytes)}; layer"
        f" '{largest}' needs the most; give memory: {sufficient_limit} or more, or use more ranks or smaller batches"
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
    max_work = MAX_WORK_FACTOR_OF_HALVING * operations_per_sample(plan.graph, None)
    best_plan, _ = _find_fastest_stream_plan(plan, compile_stream, regions, plan.needed_bytes // 2, None, max_work)
    return best_plan or plan


def _find_fastest_stream_plan(
    plan: Plan,
    compile_stream: StreamCompiler,
    regions: LayerRegions,
    max_bytes: int,
    rows_per_strip: Rows | None,
    max_work: float = inf,
    exhaustive: bool = False,
) -> tuple[Plan | None, list[tuple[Plan, StripwisePlan]]]:
    """Return the plan of the fastest stream within the limit, and the plans and streams that were tried.

    With given rows per strip, the longest stream is chosen.

    Parameters
    ----------
    max_work : float
        Streams that need at least this work are ignored.
    exhaustive : bool
        Whether to try the maximum number of strips, which takes seconds for large images, even if it is unlikely to
        fit.
    """
    graph, best_plan, candidates = plan.graph, None, list[tuple[Plan, StripwisePlan]]()
    fixed_strips = isinstance(rows_per_strip, int)
    lengths = [
        nodes
        for nodes in range(len(graph.node_ends) - 1, 0, -1)
        if _can_run_nodes_in_strips(graph, nodes, plan.grid, regions)
    ]
    one_strip_streams = {nodes: StripwisePlan.of(graph, nodes, plan.grid, 1) for nodes in lengths}
    min_work = {n: operations_per_sample(graph, _with_all_checkpoints(s)) for n, s in one_strip_streams.items()}
    for nodes in lengths if rows_per_strip is not None else sorted(lengths, key=lambda nodes: min_work[nodes]):
        if min_work[nodes] >= max_work:
            continue
        candidate, stream = compile_stream(one_strip_streams[nodes]), one_strip_streams[nodes]
        if isinstance(rows_per_strip, int):
            stream = stream.with_strips(-(-stream.rows // rows_per_strip))
        if exhaustive or candidate.needed_bytes_with(None) < max_bytes:
            max_strips = 0 if fixed_strips else stream.rows
            stream = _stream_with_fewest_strips(candidate, stream, max_bytes, max_strips, exhaustive)
        candidates.append((candidate, stream))
        for work, fitting_stream in _fitting_streams(candidate, stream, max_bytes, max_work, fixed_strips):
            if (candidate := compile_stream(fitting_stream)).needed_bytes <= max_bytes:
                best_plan, max_work = candidate, work
                break
        if rows_per_strip is not None and best_plan is not None:
            break
    return best_plan, candidates


def _can_run_nodes_in_strips(graph: Graph, num_nodes: int, grid: GridShape, regions: LayerRegions) -> bool:
    """Return whether the first nodes can run in strips without dividing a segment of `find_regions`."""
    num_steps, value = graph.node_ends[num_nodes]
    steps, later_steps = graph.steps[:num_steps], graph.steps[num_steps:]
    if all(step.layer is None for step in steps):
        return False
    if not all(_can_run_step_in_strips(step, graph, grid, is_last=step.output_value == value) for step in steps):
        return False
    return not any(step.layer and regions.get(id(step.layer), (None,))[0] is not None for step in later_steps)


def _can_run_step_in_strips(step: Step, graph: Graph, grid: GridShape, is_last: bool) -> bool:
    """Return whether a step can run in strips: exact scheme, bounded window, partitioned weights only if last."""
    layer, shape = step.layer, graph.shapes[step.inputs[0]]
    if len(graph.shapes[step.output_value]) < 2 and not is_last:
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
        and (is_last or not any(parameter.layout.is_partitioned for parameter in layer.parameters_for(shape).values()))
    )


def _with_all_checkpoints(stream: StripwisePlan) -> StripwisePlan:
    return stream.with_checkpoints(stream.grid.strips, tuple(stream.possible_cuts()))


def _fitting_streams(
    plan: Plan, stream: StripwisePlan, max_bytes: int, max_work: float, fixed_strips: bool
) -> list[tuple[float, StripwisePlan]]:
    """Return (work, stream) for the stream's number of strips or more, with as many checkpoints as fit; best first.

    Parameters
    ----------
    plan : Plan
        Plan with the stream.
    stream : StripwisePlan
        Stream without checkpoints.
    max_bytes : int
        Bytes per rank.
    max_work : float
        Streams that need at least this work are not tried.
    fixed_strips : bool
        Whether the number of strips is fixed.
    """
    tiles, itemsize, samples = plan.tile_classes_with(stream).representatives, plan.itemsize, plan.max_live_samples(0)
    work_and_streams: list[tuple[float, StripwisePlan]] = []

    def add(stream: StripwisePlan) -> None:
        if (work := operations_per_sample(plan.graph, stream)) < max_work:
            work_and_streams.append((work, stream))

    while operations_per_sample(plan.graph, _with_all_checkpoints(stream)) < max_work:
        strips, elements_by_cut = stream.grid.strips, stream.possible_cuts()
        free_bytes = max_bytes - plan.needed_bytes_with(stream)
        if free_bytes < 0:
            break
        saved_bytes = samples * max(stream.with_checkpoints(strips).saved_bytes(tile, itemsize) for tile in tiles)
        checkpointed_strips = _count_strips_that_fit(strips, saved_bytes, free_bytes)
        add(stream.with_checkpoints(checkpointed_strips))
        free_bytes -= saved_bytes * checkpointed_strips // strips
        for largest in sorted(set(elements_by_cut.values())):
            cut_nodes = tuple(sorted(nodes for nodes, size in elements_by_cut.items() if size <= largest))
            num_cut_strips = strips
            while num_cut_strips:  # memory falls less than proportionally: strips keep cells around their own
                cut_stream = stream.with_checkpoints(checkpointed_strips, cut_nodes, num_cut_strips)
                kept_bytes = samples * itemsize * max(cut_stream.kept_gradient_elements(tile) for tile in tiles)
                if kept_bytes <= free_bytes:
                    add(cut_stream)
                    break
                num_cut_strips = num_cut_strips * free_bytes // kept_bytes
        if fixed_strips or strips >= stream.rows:
            break
        max_work = min([max_work, *(work for work, _ in work_and_streams)])
        stream = stream.with_strips(min(stream.rows, strips + (strips + 1) // 2))
    return sorted(work_and_streams, key=lambda pair: pair[0])


def _count_strips_that_fit(strips: int, needed_bytes: int, free_bytes: int) -> int:
    """Return the number of strips that fit in `free_bytes`, if all need `needed_bytes` in total."""
    return strips if needed_bytes <= free_bytes else strips * max(0, free_bytes) // needed_bytes


def _stream_with_fewest_strips(
    plan: Plan, stream: StripwisePlan, max_bytes: int, max_strips: int, exhaustive: bool
) -> StripwisePlan:
    """Return the stream with the fewest strips, from its own number up to `max_strips`, that fits in memory.

    If none is likely to fit, return a stream that does not fit. With `exhaustive`, a stream that does not fit is
    returned only if none fits.
    """
    shortest = stream.with_strips(max(max_strips, stream.grid.strips))
    if exhaustive and plan.needed_bytes_with(shortest) > max_bytes:
        return shortest
    base_bytes = plan.needed_bytes_with(None)
    strips, free_bytes = stream.grid.strips, max(1, max_bytes - base_bytes)
    last_strips, last_bytes = 0, 0
    while (stream_bytes := plan.needed_bytes_with(stream) - base_bytes) > free_bytes and strips < max_strips:
        # memory that does not depend on the number of strips
        fixed_bytes = (strips * stream_bytes - last_strips * last_bytes) / (strips - last_strips)
        if last_strips and fixed_bytes > 2 * free_bytes and not exhaustive:
            break
        last_strips, last_bytes = strips, stream_bytes
        strips = min(max_strips, 8 * strips, max(strips + 1, int(strips * stream_bytes / free_bytes)))
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
        node_index = next(i for i, node in enumerate(chain.layers) if subject in node.leaves)
        raise prefix_error_with_layer(error, node_index, subject) from error
