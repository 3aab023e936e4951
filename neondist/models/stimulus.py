"""The input that a unit answers to most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import rng
from ..arrays.namespace import to_host
from ..geometry import Box
from ..halo import Phase
from .model import Model
from .passes import whole_input_gradient


def optimal_stimulus(
    model: Model, layer: int, units: Sequence[Sequence[int]], norm: float = 1.0, steps: int = 40
) -> tuple[Any, np.ndarray]:
    """Maximise each unit over all inputs of one norm (Le et al. 2012), by gradient ascent on the sphere.

    A step along the gradient is taken where it makes the unit's value larger; where not, the next one is half as long.

    Parameters
    ----------
    model : Model
        Built; on P ranks the result is that of one.
    layer : int
        Place of the units' layer in `model.layers`.
    units : sequence of (*cell, channel)
        Global places in the layer's output.
    norm : float
        Euclidean norm of an input.
    steps : int

    Returns
    -------
    inputs : array (units, *tile, C)
        This rank's tile of each unit's input (`model.gather_input` makes them whole, once for every replica).
    values : array (units,)
        The units' values, the same on all ranks; collective over the tiles.
    """
    executor, grid = model.executor, model.grid
    extent = executor.graph.shapes[executor.graph.ends[layer + 1][1]][:-1]
    node, own = model.layers[layer], grid.tile_box(extent)
    tile = node.leaves[0].tile if node.leaves == [node] else own  # in a segment it has cells of other ranks too
    # what a tile's rank does not own is empty here; a vector is whole on every rank
    here = [own.intersect(_cell(unit)).relative_to(tile) for unit in units]
    places = [(at, *box.lo, unit[-1]) for at, (box, unit) in enumerate(zip(here, units, strict=True)) if box.size]
    index = tuple(np.array(places, int).reshape(-1, len(extent) + 2).T)

    def evaluate(x: Any, back: bool = False) -> tuple[np.ndarray, Any]:
        """Return the units' values and, if asked for, their gradients."""
        values = np.zeros(len(units))
        x = model.context.backend.real_array("x", x, model.dtype)
        with executor.passing(x, Phase(training=False), layer + 1) as run:
            y = to_host(run.output)
            values[index[0]] = y[index]
            if extent:
                grid.tile_comm.allreduce(values)
            if not back:
                return values, None
            dy = np.zeros_like(y)
            dy[index] = 1
            gradient = executor.backward(run, model.context.backend.real_array("dy", dy, model.dtype))
            return values, to_host(whole_input_gradient(model.input, gradient))

    x = _scaled(model, _noise(model, len(units)), norm)
    length = np.full(len(units), 1.0)
    for _ in range(steps):
        values, gradient = evaluate(x, back=True)
        moved = _scaled(model, x + _each(length, x) * _scaled(model, gradient, norm), norm)
        found, _ = evaluate(moved)
        better = found > values
        x = np.where(_each(better, x), moved, x)
        length[~better] /= 2
    return x, evaluate(x)[0]


def _cell(unit: Sequence[int]) -> Box:
    return Box(tuple(unit[:-1]), tuple(c + 1 for c in unit[:-1]))


def _noise(model: Model, count: int) -> Any:
    """Return this rank's tile of weak noise, keyed by global index."""
    shape = (count, *model.input_shape)
    cells = rng.box_index(shape, (slice(0, count), *model.input.own.slices, slice(0, shape[-1])))
    return rng.normal(rng.key(model.seed, "stimulus"), cells).astype(model.dtype)


def _scaled(model: Model, x: Any, norm: float) -> Any:
    """Return each sample with the norm asked for, taken over all tiles; what is 0 stays so."""
    own = model.input.owned(x)
    squares = np.asarray(np.sum(own * own, axis=tuple(range(1, x.ndim)), dtype=np.float64))
    model.grid.tile_comm.allreduce(squares)
    return x * _each(norm / np.sqrt(np.where(squares > 0, squares, np.inf)), x)


def _each(values: np.ndarray, x: Any) -> Any:
    """Return one value per sample, to be multiplied with x."""
    kind = bool if values.dtype == bool else x.dtype
    return values.reshape(-1, *(1,) * (x.ndim - 1)).astype(kind)
