"""Optimal stimuli: inputs that maximise the output of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import rng
from ..arrays.namespace import to_host
from ..geometry import Box
from ..halo import Phase
from .model import Model
from .passes import sum_overlapping_input_gradients


def optimal_stimulus(
    model: Model, layer: int, units: Sequence[Sequence[int]], norm: float = 1.0, steps: int = 40
) -> tuple[Any, np.ndarray]:
    """Maximise each unit over all inputs of a given norm (Le et al. 2012), by gradient ascent. Collective over tiles.

    A step along the gradient is accepted if it increases the unit's value; otherwise the next step is halved.

    Parameters
    ----------
    model : Model
        A built model; the result is the same on any number of ranks.
    layer : int
        Index of the units' layer in `model.layers`.
    units : sequence of (*cell, channel)
        Global indices in the layer's output.
    norm : float
        Euclidean norm of an input.
    steps : int
        Number of gradient steps.

    Returns
    -------
    inputs : array (units, *tile, C)
        This rank's tile of each unit's input (`model.gather_input` assembles the whole inputs of a replica).
    values : array (units,)
        The units' values, the same on all ranks.
    """
    executor, grid = model.executor, model.grid
    extent = executor.graph.shapes[executor.graph.node_ends[layer + 1][1]][:-1]
    node, own_box = model.layers[layer], grid.tile_box(extent)
    tile = node.leaves[0].output_tile if node.leaves == [node] else own_box  # larger than `own_box` in a segment
    # boxes of other ranks' units are empty; a vector is whole on every rank
    boxes = [own_box.intersect(Box.from_ranges([(at, at + 1) for at in unit[:-1]])).relative_to(tile) for unit in units]
    indices = [(at, *box.lo, unit[-1]) for at, (box, unit) in enumerate(zip(boxes, units, strict=True)) if box.size]
    index = tuple(np.array(indices, int).reshape(-1, len(extent) + 2).T)

    def evaluate_units(x: Any, with_gradient: bool = False) -> tuple[np.ndarray, Any]:
        """Return the units' values and, optionally, their gradients."""
        values = np.zeros(len(units))
        x = model.context.backend.as_real_array("x", x, model.dtype)
        with executor.forward_pass(x, Phase(training=False), layer + 1) as run:
            y = to_host(run.output)
            values[index[0]] = y[index]
            if extent:
                grid.tile_comm.allreduce(values)
            if not with_gradient:
                return values, None
            dy = np.zeros_like(y)
            dy[index] = 1
            gradient = executor.backward(run, model.context.backend.as_real_array("dy", dy, model.dtype))
            return values, to_host(sum_overlapping_input_gradients(model.input, gradient))

    x = _scale_to_norm(model, _draw_initial_stimulus(model, len(units)), norm)
    step_lengths = np.full(len(units), 1.0)
    for _ in range(steps):
        values, gradient = evaluate_units(x, with_gradient=True)
        step = _broadcast_over_cells(step_lengths, x) * _scale_to_norm(model, gradient, norm)
        candidates = _scale_to_norm(model, x + step, norm)
        new_values, _ = evaluate_units(candidates)
        is_better = new_values > values
        x = np.where(_broadcast_over_cells(is_better, x), candidates, x)
        step_lengths[~is_better] /= 2
    return x, evaluate_units(x)[0]


def _draw_initial_stimulus(model: Model, count: int) -> Any:
    """Return this rank's tile of weak noise, keyed by global index."""
    shape = (count, *model.input_shape)
    cells = rng.row_major_indices(shape, (slice(0, count), *model.input.own.slices, slice(0, shape[-1])))
    return rng.normal(rng.key(model.seed, "stimulus"), cells).astype(model.dtype)


def _scale_to_norm(model: Model, x: Any, norm: float) -> Any:
    """Return each sample scaled to the given norm, computed over all tiles; zero samples stay zero."""
    own_cells = model.input.owned_part(x)
    square_sums = np.asarray(np.sum(own_cells * own_cells, axis=tuple(range(1, x.ndim)), dtype=np.float64))
    model.grid.tile_comm.allreduce(square_sums)
    return x * _broadcast_over_cells(norm / np.sqrt(np.where(square_sums > 0, square_sums, np.inf)), x)


def _broadcast_over_cells(values_per_sample: np.ndarray, x: Any) -> Any:
    """Return one value per sample, reshaped to broadcast with x."""
    dtype = bool if values_per_sample.dtype == bool else x.dtype
    return values_per_sample.reshape(-1, *(1,) * (x.ndim - 1)).astype(dtype)
