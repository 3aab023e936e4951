"""Pictures of a pretrained stage: reconstructions beside inputs, filters, and optimal stimuli of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.namespace import to_host
from ...backends.allocator import release_cached_memory
from ...comm import ProcessGrid, all_or_none
from ...data import Split
from ...geometry import Box
from ...io.files import has_matplotlib, write_figure
from ...layers import Sequential
from ...models import Autoencoder, optimal_stimulus
from ..state import TrainState
from .hook import Hook
from .subsampling import assemble_subsampled_images, sampled_slices, subsampling_step

PictureRows = list[np.ndarray]
FiltersByPosition = dict[tuple[int, ...], np.ndarray]

MAX_IMAGES, MAX_STIMULI, MAX_FILTERS, MAX_PICTURE_EXTENT = 10, 24, 384, 256
"""Limits of images, units and filters in a picture, and of an image's height and width in pixels."""


class PretrainingPictures(Hook):
    """Draw pictures of a pretrained stage on rank 0; do nothing without matplotlib, or if samples are not images.

    `reconstructions_N.png` shows the stage's input, its reconstruction and their difference; `filters_N.png` the
    filters of cells spread over the tiles; both are drawn only if the stage's input has one or three channels.
    `stimuli_N.png` shows the images that maximise units of the stage's output, constrained to the root mean square norm
    of the first images. All input images are from `dataset.selection_split`.

    Parameters
    ----------
    folder : path
    """

    runs_during_pretraining = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_run(self, run: TrainState) -> None:
        """Gather the pictures from their tiles and draw them. Collective."""
        split, shape = run.dataset.selection_split, run.dataset.sample_shape
        for stage in run.model.stages if len(shape) == 3 and len(split) else ():
            pictures, filters = reconstruct_first_images(stage, split), gather_filters(stage)
            stimuli = compute_optimal_stimuli(stage, split)
            with all_or_none(run.grid.world):
                if run.is_first_rank and has_matplotlib():
                    self._draw(stage, pictures, filters, list(stimuli.reshape(3, -1, *stimuli.shape[1:])))
                    release_cached_memory()  # memory of matplotlib, before the next stage

    def _draw(
        self, stage: Autoencoder, reconstructions: PictureRows, filters: FiltersByPosition, stimuli: PictureRows
    ) -> None:
        name, number = stage.name, stage.stage_number
        if reconstructions[0].shape[-1] in (1, 3):
            title = f"Input of '{name}', its reconstruction, and the difference"
            write_picture_rows(self.folder / f"reconstructions_{number}.png", reconstructions, title)
            title = f"Filters of '{name}': each block is one output cell"
            write_filter_blocks(self.folder / f"filters_{number}.png", filters, title)
        if stimuli[0].shape[-1] in (1, 3):
            title = f"Optimal stimuli of units of the stage that begins with '{name}'"
            write_picture_rows(self.folder / f"stimuli_{number}.png", stimuli, title)


def reconstruct_first_images(stage: Autoencoder, split: Split) -> PictureRows:
    """Return inputs, reconstructions and differences of the first images, (samples, h, w, C) each. Collective."""
    x = split.images(np.arange(min(MAX_IMAGES, len(split))), stage.dtype)
    y = stage.fprop(x)
    own_box, extent = stage.output.own, stage.output_shape[:2]
    inputs, residuals = (_assemble_images(stage.grid, part, own_box, extent) for part in (y.x, y.residual))
    return [inputs, inputs + residuals, residuals]


def gather_filters(stage: Autoencoder) -> FiltersByPosition:
    """Return filters (*kernel, C, out_channels) at positions spread over the output, by position. Collective.

    If filters are shared within blocks, a position is that of a block.
    """
    weights, shard, grid = to_host(stage.layer.params["weights"]), stage.weights_shard, stage.grid
    weights_shape = shard.parameter.shape
    positions_per_axis = max(1, int((MAX_FILTERS / weights_shape[-1]) ** 0.5))
    positions = [sorted({int(i) for i in np.linspace(0, n - 1, min(n, positions_per_axis))}) for n in weights_shape[:2]]
    lo = shard.box.lo
    own_filters = {}
    if grid.replica == 0:
        for row, col in ((r, c) for r in positions[0] for c in positions[1]):
            local_position = (row - lo[0], col - lo[1])
            if all(0 <= i < n for i, n in zip(local_position, weights.shape, strict=False)):
                own_filters[row, col] = weights[local_position].copy()
    filters_by_position: FiltersByPosition = {}
    for part in grid.world.allgather(own_filters):
        filters_by_position.update(part)
    return dict(sorted(filters_by_position.items()))


def compute_optimal_stimuli(stage: Autoencoder, split: Split) -> np.ndarray:
    """Return the optimal stimuli (units, h, w, C) of units spread over the stage's output. Collective."""
    model = stage.whole_model
    *extent, channels = Sequential(model.layers[: stage.end_layer_index]).output_shape_for(model.input_shape)
    cells = [np.unravel_index(i * prod(extent) // MAX_STIMULI, extent) for i in range(MAX_STIMULI)]
    units = [(*map(int, cell), i % channels) for i, cell in enumerate(cells)]
    images = split.images(np.arange(min(MAX_IMAGES, len(split))), stage.dtype)
    tile = model.input.owned_part(images)
    squares = np.array([np.sum(tile * tile, dtype=np.float64)])
    model.grid.tile_comm.allreduce(squares)
    tiles, _ = optimal_stimulus(model, stage.end_layer_index - 1, units, norm=float(np.sqrt(squares[0] / len(images))))
    return _assemble_images(model.grid, tiles, model.input.own, model.input_shape[:2])


def _assemble_images(grid: ProcessGrid, tiles: Any, box: Box, extent: Sequence[int]) -> np.ndarray:
    """Assemble images (n, h, w, C) from the first replica's tiles, subsampled if large. Collective."""
    step = subsampling_step(extent, MAX_PICTURE_EXTENT)
    cells = to_host(tiles)[(slice(None if grid.replica == 0 else 0), *sampled_slices(box, step))]
    return assemble_subsampled_images(grid, box, extent, step, cells.astype(np.float64), 0)


GAP_VALUE = 1.0  # white, between pictures


def write_picture_rows(path: Path, rows: Sequence[np.ndarray], title: str) -> None:
    """Write rows of pictures (n, h, w, C) of equal size; the pictures of a row share a colour scale centred at 0."""
    row_pixels = [_join_in_row([_scale_to_rgb(p, np.abs(row).max(initial=0)) for p in row], 1) for row in rows]
    _write_figure(path, np.concatenate(row_pixels), title)


def write_filter_blocks(path: Path, blocks: Mapping[tuple[int, ...], np.ndarray], title: str) -> None:
    """Write blocks of pictures (h, w, C, n) by (row, column); those of a block share a colour scale centred at 0."""
    row_pixels = []
    for row in sorted({place[0] for place in blocks}):
        row_blocks = [_arrange_in_square(pictures) for place, pictures in sorted(blocks.items()) if place[0] == row]
        row_pixels.append(np.concatenate([_add_gap(block, 2) for block in row_blocks], axis=1))
    _write_figure(path, np.concatenate(row_pixels), title)


def _arrange_in_square(pictures: np.ndarray) -> np.ndarray:
    """Arrange n pictures in a block that is as square as possible."""
    tiles = [_scale_to_rgb(p, np.abs(pictures).max(initial=0)) for p in np.moveaxis(pictures, -1, 0)]
    row_length = -(-len(tiles) // max(1, int(len(tiles) ** 0.5)))
    tiles += [np.ones_like(tiles[0])] * (-len(tiles) % row_length)
    return np.concatenate([_join_in_row(tiles[at : at + row_length], 1) for at in range(0, len(tiles), row_length)])


def _scale_to_rgb(picture: np.ndarray, largest_magnitude: float) -> np.ndarray:
    """Scale a picture to (h, w, 3) in [0, 1], with 0 at 0.5."""
    grey = 0.5 + 0.5 * picture / largest_magnitude if largest_magnitude > 0 else np.full(picture.shape, 0.5)
    return np.broadcast_to(grey, (*picture.shape[:2], 3))


def _join_in_row(pictures: Sequence[np.ndarray], gap_pixels: int) -> np.ndarray:
    return np.concatenate([_add_gap(p, gap_pixels) for p in pictures], axis=1)


def _add_gap(picture: np.ndarray, gap_pixels: int) -> np.ndarray:
    return np.pad(picture, ((0, gap_pixels), (0, gap_pixels), (0, 0)), constant_values=GAP_VALUE)


def _write_figure(path: Path, pixels: np.ndarray, title: str) -> None:
    from matplotlib.figure import Figure

    height, width = pixels.shape[:2]
    figure: Any = Figure(figsize=(10, 0.6 + 9.8 * height / width), layout="constrained")
    axes = figure.subplots()
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=11)
    axes.set_axis_off()
    write_figure(path, figure)
