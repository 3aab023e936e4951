"""Errors of an approximate border scheme by distance to the seams between tiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..geometry import Partition
from ..io.files import write_figure
from ..layers import Layer
from ..models import Model
from ..observer import Observer
from .tables import markdown_table, write_report

ErrorsByDistance = dict[str, list[float]]
"""'output' and 'gradient': relative differences, by distance to the nearest seam in cells."""
SeamErrors = dict[str, dict[str, ErrorsByDistance]]
"""Errors by scheme and layer."""
MAX_SHOWN_DISTANCES = 6
KIND_BY_ARRAY_NAME = {"output": "output", "gradient of the input": "gradient"}


def measure_seam_errors(
    exact: Model, approximate: Model, batches: Sequence[Any], seed: int = 0
) -> dict[str, ErrorsByDistance]:
    """Return the relative errors of outputs and input gradients of each layer with tiles. Collective.

    An error is the mean absolute difference of all cells at a distance, divided by the mean absolute exact value of all
    cells. Distance 0 is next to a seam. Errors of previous layers (for gradients: following layers) are included.

    Parameters
    ----------
    exact, approximate : Model
        Models with the same layers, built on the same grid; `approximate` receives the weights of `exact`.
    batches : sequence of array
        This rank's tiles of images; errors are those of the last batch, and stateful schemes use the earlier batches.
    """
    approximate.load_state(exact.state())
    profiles: dict[str, ErrorsByDistance] = {}
    traced, compared = (_record_outputs_and_gradients(model, batches, seed) for model in (exact, approximate))
    for layer in exact.leaves:
        name = str(layer.name)
        shapes = {"output": layer.output_shape, "gradient": layer.input_shape}
        profiles[name] = {
            kind: _error_by_distance(
                exact.grid, shape[:-1], *(_crop_to_own_cells(layer, kind, a[name, kind]) for a in (traced, compared))
            )
            for kind, shape in shapes.items()
            if len(shape) > 1 and traced.get((name, kind)) is not None
            # each overlapping input tile has only a share of the gradient
            if not (kind == "gradient" and layer.input.tiles.may_overlap)
        }
    return {name: profile for name, profile in profiles.items() if profile}


class _OutputAndGradientRecorder(Observer):
    """Observer that copies all outputs and input gradients of the last batch."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, str], Any] = {}

    def on_value(self, layer: Layer | None, name: str, array: Any) -> None:
        if layer is not None and name in KIND_BY_ARRAY_NAME:
            self.arrays[str(layer.name), KIND_BY_ARRAY_NAME[name]] = None if array is None else array.copy()


def _record_outputs_and_gradients(model: Model, batches: Sequence[Any], seed: int) -> dict[tuple[str, str], Any]:
    """Return copies of all outputs and input gradients of the last batch, without changing weights."""
    recorder, step = _OutputAndGradientRecorder(), model.step
    try:
        with model.grid.observers.add_temporarily(recorder):
            for number, x in enumerate(batches):
                model.step = number
                y = model.fprop(x)
                rng = np.random.default_rng(seed)  # the same output gradient for both models
                output_gradient = rng.normal(size=(model.batch_size, *model.output_shape)).astype(model.dtype)
                model.bprop(model.scatter_output(output_gradient)[: len(y)])
    finally:
        model.step = step
    return recorder.arrays


def _crop_to_own_cells(layer: Layer, kind: str, array: Any) -> Any:
    """Return the part of an output that no other rank has; return gradients unchanged."""
    if kind == "gradient":
        return array
    own = layer.context.grid.tile_box(layer.output_shape[:-1])
    return array[(slice(None), *own.relative_to(layer.output_tile).slices)]


def _error_by_distance(grid: ProcessGrid, extent: tuple[int, ...], exact: Any, other: Any) -> list[float]:
    distance = seam_distances(grid.partition(extent), grid.tile)
    longest = max(grid.world.allgather(int(distance.max(initial=-1)))) + 1
    sums = np.zeros((3, longest))
    cells = np.broadcast_to(distance[..., None], exact.shape[1:])
    for row, values in enumerate((np.abs(other - exact), np.abs(exact), np.ones_like(exact))):
        per_cell = values.sum(axis=0, dtype=float)
        sums[row] += np.bincount(cells.ravel(), per_cell.ravel(), minlength=longest)[:longest] if longest else 0
    grid.world.allreduce(sums)
    scale = sums[1].sum() / max(sums[2].sum(), 1)
    return [float(d / max(n, 1) / scale) if scale else 0.0 for d, n in zip(sums[0], sums[2], strict=True)]


def seam_distances(partition: Partition, tile: int) -> np.ndarray:
    """Return each cell's distance to the nearest seam: 0 for cells next to a seam, or if there is no seam."""
    box, max_distance = partition.box(tile), max(partition.extent, default=0)
    nearest = np.full(box.shape, max_distance)
    for axis, (lo, hi) in enumerate(box.axes()):
        cells = np.arange(lo, max(lo, hi))
        distance_before = cells - lo if lo > 0 else np.full(len(cells), max_distance)
        distance_after = hi - 1 - cells if hi < partition.extent[axis] else np.full(len(cells), max_distance)
        shape = [-1 if a == axis else 1 for a in range(box.ndim)]
        nearest = np.minimum(nearest, np.minimum(distance_before, distance_after).reshape(shape))
    return np.where(nearest == max_distance, 0, nearest) if partition.tiles == 1 else nearest


def seam_table(errors: SeamErrors) -> str:
    """Return a Markdown table of the errors at the first few distances from the seam."""
    return markdown_table(
        ["scheme", "layer", "kind", *(f"at {at}" for at in range(MAX_SHOWN_DISTANCES))],
        [
            [
                f"`{scheme}`",
                layer,
                kind,
                *(f"{v:.1e}" for v in values[:MAX_SHOWN_DISTANCES]),
                *[""] * (MAX_SHOWN_DISTANCES - len(values)),
            ]
            for scheme, layers in errors.items()
            for layer, profile in layers.items()
            for kind, values in profile.items()
        ],
    )


def write_seam_report(folder: Path, errors: SeamErrors) -> list[Path]:
    """Write seams.json, seams.md and, if matplotlib is installed, seams.png; return the files."""
    texts = {"seams.json": json.dumps(errors, indent=1) + "\n", "seams.md": seam_table(errors) + "\n"}
    return write_report(folder, texts, {"seams.png": partial(plot_seam_errors, errors)})


def plot_seam_errors(errors: SeamErrors, file: Path) -> None:
    """Plot the errors of each scheme in one row, outputs left and gradients right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * len(errors) + 0.6), layout="constrained")
    panels = figure.subplots(len(errors), 2, squeeze=False)
    for row, (scheme, layers) in zip(panels, errors.items(), strict=True):
        for axes, kind in zip(row, ("output", "gradient"), strict=True):
            for name, profile in layers.items():
                if kind in profile:
                    axes.semilogy([max(value, 1e-9) for value in profile[kind]], marker=".", label=name)
            axes.set_title(f"{scheme}: |Δ {kind}|, relative", fontsize=9)
            axes.set_xlabel("cells to the nearest seam")
        row[0].legend(fontsize=7)
    write_figure(file, figure)
