"""Seconds, bytes and memory of a step on a rank count and a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...geometry import GridShape, grid_shape
from ...geometry.split import factorisations
from ...models import Model
from .machine import Machine
from .solo import Notes, solo_grid

STEPS = 3
LEAST = 0.1
"""seconds of computing to time, at least"""


def predict(
    experiment: Callable[[], Any], ranks: Iterable[int], machine: Machine, alone: Callable[..., Any] | None = None
) -> list[dict[str, Any]]:
    """Return, for each rank count, the prediction for its best grid.

    Parameters
    ----------
    experiment : function
        Returns a new FitExperiment, whose model is not built.
    alone : function, optional
        Instead of `rank_alone`.
    """
    rows = []
    for count in ranks:
        tried = [
            _prediction(shape, machine, *(alone or rank_alone)(experiment(), shape))
            for shape in grids(count, experiment())
        ]
        rows.append(min(tried, key=lambda row: row["seconds_per_step"]))
    return rows


def grids(count: int, experiment: Any) -> list[GridShape]:
    """Return the grids to try: the one that the file asks for, or the most square one, and cuts along one axis."""
    given = {name: value for name, value in experiment.grid.items() if value is not None}
    default = grid_shape(count, **given)
    if {"rows", "cols"} & given.keys() or default.tiles == 1:
        return [default]
    shapes = [default]
    for rows, cols in factorisations(default.rows * default.cols, 2):
        if 1 in (rows, cols) and (rows, cols) != (default.rows, default.cols):
            shapes.append(GridShape(default.replicas, rows, cols, default.planes))
    return shapes


def rank_alone(experiment: Any, shape: GridShape) -> tuple[float, Notes, int]:
    """Return the seconds that the fullest rank computes in a step, what it sends, and its memory in bytes.

    It computes at the shapes of its own tile and views, alone in this process.
    """
    model: Model = experiment.model
    notes = Notes()
    rank = fullest(shape, experiment.dataset.sample_shape[:-1])
    factors = {"replicas": shape.replicas, "rows": shape.rows, "cols": shape.cols, "planes": shape.planes}
    grid = solo_grid(rank, factors, shape.size, notes)
    sample_shape = experiment.dataset.sample_shape
    model.build(sample_shape, experiment.batch_size, grid)
    rng = np.random.default_rng(0)
    lo, hi = grid.sample_range(experiment.batch_size)
    x = rng.random((hi - lo, *grid.tile_box(sample_shape[:-1]).shape, sample_shape[-1])).astype(model.dtype)
    cells = grid.tile_box(model.output_shape[:-1]).shape
    targets = rng.integers(model.output_shape[-1], size=(hi - lo, *cells))
    whole = experiment.batch_size
    model.learning_rate_scale = 0.0  # its gradients are not those of the whole

    def step() -> None:
        notes.exchanges.clear()
        notes.sums.clear()
        model.train_batch(x, targets, batch_size=whole)

    step()
    return min(_timed(step) for _ in range(STEPS)), notes, _held(model)


def fullest(shape: GridShape, extent: Sequence[int]) -> int:
    """Return the tile with most cells, and of those one in the middle, which has most neighbours."""
    boxes = shape.partition(extent).boxes()
    middle = [n / 2 for n in extent]

    def order(tile: int) -> tuple[int, float]:
        away = sum(abs((lo + hi) / 2 - at) for (lo, hi), at in zip(boxes[tile].axes(), middle, strict=True))
        return boxes[tile].size, -away

    return max(range(len(boxes)), key=order)


def _timed(step: Callable[[], None]) -> float:
    count, begin = 0, time.perf_counter()
    while True:
        step()
        count += 1
        taken = time.perf_counter() - begin
        if taken > LEAST / STEPS:
            return taken / count


def _held(model: Model) -> int:
    """Return the bytes of parameters, gradients, slots, and of activations with their gradients."""
    assert model.parameters is not None
    flat = [model.parameters.values, model.parameters.grads, *model.slots.values()]
    views = sum(
        2 * int(np.prod(array.view_shape)) * model.dtype.itemsize for layer in model.leaves for array in layer.arrays
    )
    return sum(array.nbytes for array in flat) + views


def _prediction(shape: GridShape, machine: Machine, alone: float, notes: Notes, held: int) -> dict[str, Any]:
    link = machine.link(shape.tiles)
    exchange = sum(link.seconds(messages, sent) for messages, sent in notes.exchanges)
    sums = sum(machine.allreduce(ranks, count) for ranks, count in notes.sums)
    compute = machine.compute(alone, shape.size)
    return {
        "ranks": shape.size,
        "grid": {"replicas": shape.replicas, "rows": shape.rows, "cols": shape.cols},
        "compute_seconds": compute,
        "exchange_seconds": exchange,
        "sum_seconds": sums,
        "seconds_per_step": compute + exchange + sums,
        "bytes_sent": sum(sent for _, sent in notes.exchanges),
        "bytes_held": held,
    }


def turning_point(rows: Sequence[dict[str, Any]]) -> int:
    """Return the rank count from which more ranks no longer make a step faster."""
    best: int = min(rows, key=lambda row: row["seconds_per_step"])["ranks"]
    return best


def error(predicted: Sequence[dict[str, Any]], measured: dict[int, float]) -> float:
    """Return the mean relative distance between prediction and measurement."""
    both = [(row["seconds_per_step"], measured[row["ranks"]]) for row in predicted if row["ranks"] in measured]
    return float(np.mean([abs(a - b) / b for a, b in both]))
