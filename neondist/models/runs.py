"""Runs of layers that compute cells of other tiles themselves, so that only the input of the run has to travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..geometry import GridShape, Partition, Window, sources
from ..halo import GlobalArray, PaddedArray
from ..halo.fusion import Fusion, fusion_of
from ..layers import Layer, Node
from ..machine import Figures
from .planner import Placed, best_cuts, can_follow, run_seconds

Shape = tuple[int, ...]
Links: TypeAlias = Sequence[tuple[Node, Shape]]
Found: TypeAlias = dict[int, tuple[Partition | None, Partition | None]]
"""By the layer's id: which cells of its input and of its output each tile has; None: the balanced ones."""
_FIRST = (
    "reads the image wide, so it is for the first layers of a model alone, and neither for those inside of Sum or"
    " Concat nor for those behind"
)


def find_regions(chain: Node, input_shape: Shape, grid: GridShape, samples: int | None = None) -> Found:
    """Return the regions of all layers that are in runs.

    Parameters
    ----------
    samples : int, optional
        Of a replica in a step, for a planner.

    Raises
    ------
    ConfigError
        A layer's scheme asks for a run in which it cannot be; `subject` is the layer.
    """
    found: Found = {}
    for number, links in enumerate(chain.chains(input_shape)):
        for run in _runs(links, grid, samples, first=number == 0):
            found |= regions_of(run, grid)
    for layer, shape in chain.walk(input_shape):
        fusion = fusion_of(layer.scheme)
        if (
            fusion is not None
            and fusion.reads_wide
            and id(layer) not in found
            and single(layer, shape, grid) is not None
        ):
            raise _refused(layer, _FIRST)
    return found


def _runs(links: Links, grid: GridShape, samples: int | None, first: bool) -> Iterator[Links]:
    """Yield the parts of a chain that are runs: of two layers with windows or more, or read wide from the image."""
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
            yield from _planned(figures, links[at : end + 1], grid, home=not first or at > 0)
        elif wide or end > at:
            yield links[0 if wide else at : end + 1]
        at = end + 1


def _end(links: Links, at: int, first: Layer, longest: int, grid: GridShape) -> int:
    """Return the place of the last layer of a run that begins at `at`."""
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


def _planned(figures: Figures, links: Links, grid: GridShape, home: bool) -> Iterator[Links]:
    """Yield the runs that a planner makes of layers with one scheme."""
    places = [at for at, (node, shape) in enumerate(links) if single(node, shape, grid) is not None]
    fits = [can_follow(node.leaves[0], shape) for node, shape in links]

    def cost(first: int, last: int) -> float:
        if last > first and not all(fits[places[first] : places[last] + 1]):
            return inf
        run = placed(links[places[first] : places[last] + 1], grid, alone=last == first)
        return sum(run_seconds(figures, run, grid, home or first > 0))

    for first, last in best_cuts(cost, len(places)):
        if last > first:
            yield links[places[first] : places[last] + 1]


def placed(run: Links, grid: GridShape, alone: bool = False, wide: bool | None = None) -> list[Placed]:
    """Return the layers of a run with their regions; `alone`: it is no run, and nothing is computed twice."""
    regions = {} if alone else regions_of(run, grid, wide)
    return [Placed(node.leaves[0], shape, regions.get(id(node.leaves[0]), (None, None))) for node, shape in run]


def single(node: Node, shape: Shape, grid: GridShape) -> Layer | None:
    """Return the node if it is a layer with a window whose output has tiles."""
    inside = node.leaves
    if len(inside) != 1 or inside[0] is not node or len(node.output_shape_for(shape)) < 2:
        return None
    return inside[0] if any(not w.pointwise for _, w in inside[0].halos_for(shape, grid)) else None


def blocks(node: Node, shape: Shape, grid: GridShape) -> bool:
    """Tell whether a node is anything but a layer that sees each cell alone."""
    alone = len(node.leaves) == 1 and node.leaves[0] is node and len(node.output_shape_for(shape)) > 1
    return not alone or single(node, shape, grid) is not None


def _alike(one: Layer, other: Layer) -> bool:
    a, b = one.scheme, other.scheme
    return type(a) is type(b) and a is not None and b is not None and a.arguments() == b.arguments()


def regions_of(run: Links, grid: GridShape, wide: bool | None = None) -> Found:
    """Return the regions of one run, from its last output, which is what each tile owns, to its input.

    Parameters
    ----------
    wide : bool, optional
        Whether the run's input has them too; default: what its schemes say.
    """
    found: Found = {}
    if wide is None:
        wide = any(fusion.reads_wide for fusion in _fusions(run))
    last, shape = run[-1]
    outputs: Partition = grid.partition(last.output_shape_for(shape)[:-1])
    for place in range(len(run) - 1, -1, -1):
        node, shape = run[place]
        layer = node.leaves[0]
        window = layer.window_for(shape) or Window(1, padding=0, ndim=len(shape) - 1)
        inputs: Partition | None = None
        if place or wide:
            _check(layer, run, window)
            inputs = sources(outputs, window, grid.partition(shape[:-1]))
        elif layer.no_recompute:
            raise _refused(layer, f"computes cells of other tiles, but this layer cannot: {layer.no_recompute}")
        found[id(layer)] = inputs, outputs
        outputs = inputs or outputs
    return found


def _check(layer: Layer, run: Links, window: Window) -> None:
    """Raise ConfigError if a layer of a run cannot compute cells of other tiles."""
    why = layer.no_recompute or ("its image wraps around" if window.mode == "wrap" else "")
    if why:
        raise _refused(layer, f"computes cells of other tiles, but this layer cannot: {why}")
    if layer.sums_image and any(fusion.reads_wide and fusion.statistics is None for fusion in _fusions(run)):
        raise _about(
            layer,
            "scheme overlap_tile exchanges nothing, but this layer normalises over the whole image; say"
            " 'statistics: global' in the scheme (its sums are then added over all tiles), or use deep_halo",
        )


def _fusions(run: Links) -> list[Fusion]:
    found = (fusion_of(layer.scheme) for node, _ in run for layer in node.leaves)
    return [fusion for fusion in found if fusion is not None]


def _refused(layer: Layer, why: str) -> ConfigError:
    return _about(layer, f"its scheme {why}; give it 'scheme: halo'")


def _about(layer: Layer, words: str) -> ConfigError:
    error = ConfigError(words)
    error.subject = layer
    return error


def wide_tiles(found: Found, leaves: Sequence[Layer]) -> Partition | None:
    """Return the tiles of the image that a model reads, if they overlap."""
    return found.get(id(leaves[0]), (None, None))[0] if leaves else None


def whole_gradient(images: PaddedArray, dx: Any) -> Any:
    """Return the gradient of tiles of the image that overlap, from each tile's share in it (collective).

    Training needs none; it takes an exchange each way.
    """
    shared = GlobalArray(images.grid, images.global_shape, dtype=str(images.dtype))
    shared.cut(outputs=images.tiles)
    return shared.get_fprop_view(shared.get_bprop_view(dx))
