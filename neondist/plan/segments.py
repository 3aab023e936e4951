"""Segments requested by schemes: layers recompute cells of other tiles, so that only their first input is exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TypeAlias

from ..errors import ConfigError
from ..geometry import GridShape, Partition, Window, needed_image_cells
from ..halo.fusion import FusionScheme, fusion_scheme_or_none
from ..layers import Layer, Node
from ..system.machine import MachineProfile
from .graph import Graph
from .planner import LayerWithRegions, can_compute_halo_cells, cheapest_ranges, overhead_seconds

Shape = tuple[int, ...]
Chain: TypeAlias = Sequence[tuple[Node, Shape]]
LayerRegions: TypeAlias = dict[int, tuple[Partition | None, Partition | None]]
"""By layer id: the cells of its input and output on each tile; None: the balanced partition."""
_FIRST_LAYERS_ONLY_MESSAGE = (
    "reads an extended tile of the image, so it applies only to the first layers of a model, not inside or after"
    " Sum or Concat"
)


def find_regions(chain: Node, graph: Graph, grid: GridShape, samples: int | None = None) -> LayerRegions:
    """Return the regions of all layers that are in segments.

    Parameters
    ----------
    graph : Graph
        Graph of the chain.
    samples : int, optional
        Samples of a replica per step, for a planner.

    Raises
    ------
    ConfigError
        A layer cannot be in the segment that its scheme requests; `subject` is the layer.
    """
    regions: LayerRegions = {}
    for number, links in enumerate(chain.chains_with_input_shapes(graph.shapes[0])):
        for segment in _chain_segments(links, grid, samples, is_first_chain=number == 0):
            regions |= regions_of(segment, grid)
    for step in graph.steps:
        layer, shape = step.layer, graph.shapes[step.inputs[0]]
        fusion = None if layer is None else fusion_scheme_or_none(layer.scheme)
        wide = fusion is not None and fusion.reads_extended_tile
        if layer is not None and wide and id(layer) not in regions and windowed_layer(layer, shape, grid) is not None:
            raise _scheme_error(layer, _FIRST_LAYERS_ONLY_MESSAGE)
    return regions


def _chain_segments(links: Chain, grid: GridShape, samples: int | None, is_first_chain: bool) -> Iterator[Chain]:
    """Yield the segments of a chain: at least two layers with windows, or layers that read an extended tile."""
    begin = 0
    while begin < len(links):
        layer = windowed_layer(*links[begin], grid)
        fusion = None if layer is None else fusion_scheme_or_none(layer.scheme)
        if layer is None or fusion is None or fusion.layers == 1:
            begin += 1
            continue
        end, wide = _segment_end(links, begin, layer, fusion.layers, grid), fusion.reads_extended_tile
        if wide and (not is_first_chain or not all(is_pointwise(node, shape, grid) for node, shape in links[:begin])):
            raise _scheme_error(layer, _FIRST_LAYERS_ONLY_MESSAGE)
        profile = fusion.planner_profile(grid.size, samples)
        if profile is not None:
            needs_dx = not is_first_chain or begin > 0
            yield from _divide_into_segments(profile, links[begin : end + 1], grid, needs_dx)
        elif wide or end > begin:
            yield links[0 if wide else begin : end + 1]
        begin = end + 1


def _segment_end(links: Chain, begin: int, first_layer: Layer, max_layers: int, grid: GridShape) -> int:
    """Return the index of the last layer of a segment that begins at `begin`."""
    end, num_windowed_layers = begin, 1
    for place in range(begin + 1, len(links)):
        node, shape = links[place]
        if is_pointwise(node, shape, grid):
            continue
        layer = windowed_layer(node, shape, grid)
        if layer is None or num_windowed_layers == max_layers or not _has_same_scheme(first_layer, layer):
            break
        end, num_windowed_layers = place, num_windowed_layers + 1
    return end


def _divide_into_segments(profile: MachineProfile, links: Chain, grid: GridShape, needs_dx: bool) -> Iterator[Chain]:
    """Yield the segments into which a planner divides layers with the same scheme."""
    halo_layers = [at for at, (node, shape) in enumerate(links) if windowed_layer(node, shape, grid) is not None]
    can_join_segment = [can_compute_halo_cells(node.leaves[0], shape) for node, shape in links]

    def cost(first: int, last: int) -> float:
        if last > first and not all(can_join_segment[halo_layers[first] : halo_layers[last] + 1]):
            return inf
        segment = layers_with_regions(links[halo_layers[first] : halo_layers[last] + 1], grid, is_single=last == first)
        return sum(overhead_seconds(profile, segment, grid, needs_dx or first > 0))

    for first, last in cheapest_ranges(cost, len(halo_layers)):
        if last > first:
            yield links[halo_layers[first] : halo_layers[last] + 1]


def layers_with_regions(
    segment: Chain, grid: GridShape, is_single: bool = False, extends_input: bool | None = None
) -> list[LayerWithRegions]:
    """Return the layers of a segment with their regions; `is_single`: a single layer without recomputation."""
    regions = {} if is_single else regions_of(segment, grid, extends_input)
    layers = [(node.leaves[0], shape) for node, shape in segment]
    return [LayerWithRegions(layer, shape, regions.get(id(layer), (None, None))) for layer, shape in layers]


def windowed_layer(node: Node, shape: Shape, grid: GridShape) -> Layer | None:
    """Return the node if it is a layer with a window whose output has tiles, else None."""
    if not is_layer(node) or len(node.output_shape_for(shape)) < 2:
        return None
    (layer,) = node.leaves
    return layer if any(not w.pointwise for _, w in layer.halos_for(shape, grid)) else None


def is_pointwise(node: Node, shape: Shape, grid: GridShape) -> bool:
    """Return whether a node is a pointwise layer."""
    return is_layer(node) and len(node.output_shape_for(shape)) > 1 and windowed_layer(node, shape, grid) is None


def is_layer(node: Node) -> bool:
    """Return whether a node is a layer, not a container."""
    return len(node.leaves) == 1 and node.leaves[0] is node


def _has_same_scheme(layer: Layer, other: Layer) -> bool:
    a, b = layer.scheme, other.scheme
    return type(a) is type(b) and a is not None and b is not None and a.arguments() == b.arguments()


def regions_of(segment: Chain, grid: GridShape, extends_input: bool | None = None) -> LayerRegions:
    """Return the regions of one segment, traced from its last output, which the tiles partition, back to its input.

    Parameters
    ----------
    extends_input : bool, optional
        Whether the segment's input also has extended tiles; default: as its schemes request.
    """
    regions: LayerRegions = {}
    if extends_input is None:
        extends_input = any(fusion.reads_extended_tile for fusion in _fusion_schemes(segment))
    last_node, shape = segment[-1]
    outputs: Partition = grid.partition(last_node.output_shape_for(shape)[:-1])
    for place in range(len(segment) - 1, -1, -1):
        node, shape = segment[place]
        layer = node.leaves[0]
        window = layer.window_for(shape) or Window.for_pointwise(len(shape) - 1)
        inputs: Partition | None = None
        if place or extends_input:
            _check_halo_computable(layer, shape, segment, window)
            inputs = needed_image_cells(outputs, window, shape[:-1], grid.partition(shape[:-1]))
        elif blocker := layer.recompute_blocker_for(shape):
            raise _scheme_error(layer, f"computes cells of other tiles, but this layer cannot do so: {blocker}")
        regions[id(layer)] = inputs, outputs
        outputs = inputs or outputs
    return regions


def _check_halo_computable(layer: Layer, shape: Shape, segment: Chain, window: Window) -> None:
    """Raise ConfigError if a layer of a segment cannot compute cells of other tiles."""
    reason = layer.recompute_blocker_for(shape) or ("its image wraps around" if window.wraps else "")
    if reason:
        raise _scheme_error(layer, f"computes cells of other tiles, but this layer cannot do so: {reason}")
    if layer.reduces_over_image(shape) and any(
        fusion.reads_extended_tile and fusion.statistics is None for fusion in _fusion_schemes(segment)
    ):
        raise _layer_error(
            layer,
            "scheme overlap_tile exchanges nothing, but this layer normalises over the whole image; set"
            " 'statistics: global' in the scheme (its sums are then reduced over all tiles), or use deep_halo",
        )


def _fusion_schemes(segment: Chain) -> list[FusionScheme]:
    fusions = (fusion_scheme_or_none(layer.scheme) for node, _ in segment for layer in node.leaves)
    return [fusion for fusion in fusions if fusion is not None]


def _scheme_error(layer: Layer, problem: str) -> ConfigError:
    return _layer_error(layer, f"its scheme {problem}; set 'scheme: halo' for this layer")


def _layer_error(layer: Layer, message: str) -> ConfigError:
    error = ConfigError(message)
    error.subject = layer
    return error
