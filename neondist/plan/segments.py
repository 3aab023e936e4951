"""Segments that schemes ask for: layers compute cells of other tiles, so that only the first one's input travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TypeAlias

from ..errors import ConfigError
from ..geometry import GridShape, Partition, Window, sources
from ..halo.fusion import Fusion, fusion_of
from ..layers import Layer, Node
from ..system.machine import Figures
from .graph import Graph
from .planner import InSegment, best_cuts, can_follow, segment_seconds

Shape = tuple[int, ...]
Links: TypeAlias = Sequence[tuple[Node, Shape]]
Found: TypeAlias = dict[int, tuple[Partition | None, Partition | None]]
"""By the layer's id: which cells of its input and of its output each tile has; None: the balanced ones."""
_FIRST = (
    "reads an extended tile of the image, so it applies only to the first layers of a model, not inside or after"
    " Sum or Concat"
)


def find_regions(chain: Node, graph: Graph, grid: GridShape, samples: int | None = None) -> Found:
    """Return the regions of all layers that are in segments.

    Parameters
    ----------
    graph : Graph
        Of the chain.
    samples : int, optional
        Of a replica in a step, for a planner.

    Raises
    ------
    ConfigError
        A layer's scheme asks for a segment in which it cannot be; `subject` is the layer.
    """
    found: Found = {}
    for number, links in enumerate(chain.chains(graph.shapes[0])):
        for segment in _segments(links, grid, samples, first=number == 0):
            found |= regions_of(segment, grid)
    for step in graph.steps:
        layer, shape = step.layer, graph.shapes[step.inputs[0]]
        fusion = None if layer is None else fusion_of(layer.scheme)
        wide = fusion is not None and fusion.reads_wide
        if layer is not None and wide and id(layer) not in found and single(layer, shape, grid) is not None:
            raise _refused(layer, _FIRST)
    return found


def _segments(links: Links, grid: GridShape, samples: int | None, first: bool) -> Iterator[Links]:
    """Yield the segments of a chain: of two layers with windows or more, or read wide from the image."""
    at = 0
    while at < len(links):
        layer = single(*links[at], grid)
        fusion = None if layer is None else fusion_of(layer.scheme)
        if layer is None or fusion is None or fusion.layers == 1:
            at += 1
            continue
        end, wide = _end(links, at, layer, fusion.layers, grid), fusion.reads_wide
        if wide and (not first or any(blocks(node, shape, grid) for node, shape in links[:at])):
            raise _refused(layer, _FIRST)
        figures = fusion.figures(grid.size, samples)
        if figures is not None:
            yield from _planned(figures, links[at : end + 1], grid, backward=not first or at > 0)
        elif wide or end > at:
            yield links[0 if wide else at : end + 1]
        at = end + 1


def _end(links: Links, at: int, first: Layer, longest: int, grid: GridShape) -> int:
    """Return the place of the last layer of a segment that begins at `at`."""
    end, count = at, 1
    for place in range(at + 1, len(links)):
        node, shape = links[place]
        if not blocks(node, shape, grid):
            continue
        layer = single(node, shape, grid)
        if layer is None or count == longest or not _alike(first, layer):
            break
        end, count = place, count + 1
    return end


def _planned(figures: Figures, links: Links, grid: GridShape, backward: bool) -> Iterator[Links]:
    """Yield the segments that a planner makes of layers with one scheme."""
    places = [at for at, (node, shape) in enumerate(links) if single(node, shape, grid) is not None]
    fits = [can_follow(node.leaves[0], shape) for node, shape in links]

    def cost(first: int, last: int) -> float:
        if last > first and not all(fits[places[first] : places[last] + 1]):
            return inf
        segment = placed(links[places[first] : places[last] + 1], grid, alone=last == first)
        return sum(segment_seconds(figures, segment, grid, backward or first > 0))

    for first, last in best_cuts(cost, len(places)):
        if last > first:
            yield links[places[first] : places[last] + 1]


def placed(segment: Links, grid: GridShape, alone: bool = False, wide: bool | None = None) -> list[InSegment]:
    """Return the layers of a segment with their regions; `alone`: it is none, and nothing is computed twice."""
    regions = {} if alone else regions_of(segment, grid, wide)
    return [InSegment(node.leaves[0], shape, regions.get(id(node.leaves[0]), (None, None))) for node, shape in segment]


def single(node: Node, shape: Shape, grid: GridShape) -> Layer | None:
    """Return the node if it is a layer with a window whose output has tiles."""
    inside = node.leaves
    if len(inside) != 1 or inside[0] is not node or len(node.output_shape_for(shape)) < 2:
        return None
    return inside[0] if any(not w.pointwise for _, w in inside[0].halos_for(shape, grid)) else None


def blocks(node: Node, shape: Shape, grid: GridShape) -> bool:
    """Return whether a node is anything but a layer that sees each cell alone."""
    alone = len(node.leaves) == 1 and node.leaves[0] is node and len(node.output_shape_for(shape)) > 1
    return not alone or single(node, shape, grid) is not None


def _alike(one: Layer, other: Layer) -> bool:
    a, b = one.scheme, other.scheme
    return type(a) is type(b) and a is not None and b is not None and a.arguments() == b.arguments()


def regions_of(segment: Links, grid: GridShape, wide: bool | None = None) -> Found:
    """Return the regions of one segment, from its last output, which is what each tile owns, to its input.

    Parameters
    ----------
    wide : bool, optional
        Whether the segment's input has them too; default: what its schemes say.
    """
    found: Found = {}
    if wide is None:
        wide = any(fusion.reads_wide for fusion in _fusions(segment))
    last, shape = segment[-1]
    outputs: Partition = grid.partition(last.output_shape_for(shape)[:-1])
    for place in range(len(segment) - 1, -1, -1):
        node, shape = segment[place]
        layer = node.leaves[0]
        window = layer.window_for(shape) or Window.of_one(len(shape) - 1)
        inputs: Partition | None = None
        if place or wide:
            _check(layer, segment, window)
            inputs = sources(outputs, window, shape[:-1], grid.partition(shape[:-1]))
        elif layer.recompute_blocker:
            raise _refused(layer, f"computes cells of other tiles, but this layer cannot: {layer.recompute_blocker}")
        found[id(layer)] = inputs, outputs
        outputs = inputs or outputs
    return found


def _check(layer: Layer, segment: Links, window: Window) -> None:
    """Raise ConfigError if a layer of a segment cannot compute cells of other tiles."""
    why = layer.recompute_blocker or ("its image wraps around" if window.wraps else "")
    if why:
        raise _refused(layer, f"computes cells of other tiles, but this layer cannot: {why}")
    if layer.sums_image and any(fusion.reads_wide and fusion.statistics is None for fusion in _fusions(segment)):
        raise _about(
            layer,
            "scheme overlap_tile exchanges nothing, but this layer normalises over the whole image; set"
            " 'statistics: global' in the scheme (its sums are then reduced over all tiles), or use deep_halo",
        )


def _fusions(segment: Links) -> list[Fusion]:
    found = (fusion_of(layer.scheme) for node, _ in segment for layer in node.leaves)
    return [fusion for fusion in found if fusion is not None]


def _refused(layer: Layer, why: str) -> ConfigError:
    return _about(layer, f"its scheme {why}; give it 'scheme: halo'")


def _about(layer: Layer, words: str) -> ConfigError:
    error = ConfigError(words)
    error.subject = layer
    return error
