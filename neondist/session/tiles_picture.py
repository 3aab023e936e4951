"""tiles.png: an image cut into the tiles of the ranks, each with its halo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..comm import ProcessGrid, all_or_none
from ..files import can_draw
from ..geometry import Box
from .hooks import Hook
from .run import Run
from .tiles_drawing import draw_tiles

if TYPE_CHECKING:
    from ..datasets import Dataset
    from ..models.plan import LayerPlan

PIXELS = 512  # a larger image is drawn from every s-th cell, so that no rank has to hold it whole


class TilesPicture(Hook):
    """Draw an image before training begins, on rank 0; nothing without matplotlib or for other than images.

    The views drawn are those of the first layer whose window is larger than one cell.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def before_run(self, run: Run) -> None:
        """Collect the tiles (collective) and draw."""
        shape, grid = run.dataset.sample_shape, run.grid
        if len(shape) != 3 or not len(run.dataset.selection):
            return
        image = collect(run.dataset, grid, run.model.dtype, run.model.input.own)
        with all_or_none(grid.world):
            if run.first_rank and can_draw():
                layer = first_window(run.model.plan(shape, grid.shape, run.model.batch_size))
                partition = grid.partition(shape[:2])
                tiles = partition.boxes()
                views = tiles if layer is None else layer.views
                title = _title(shape, partition.parts, grid.replicas, layer)
                draw_tiles(self.path, image, shape[:2], partition.parts, tiles, views, title)


def first_window(plans: list[LayerPlan]) -> LayerPlan | None:
    """Return the first layer whose window is larger than one cell; it has to see the image at its full extent."""
    for plan in plans:
        if plan.window is not None and any(k > 1 for k in plan.window.kernel):
            return plan if tuple(plan.input_shape[:-1]) == tuple(plans[0].input_shape[:-1]) else None
    return None


def collect(dataset: Dataset, grid: ProcessGrid, dtype: np.dtype, box: Box) -> np.ndarray:
    """Return the first image of `dataset.selection` on every rank, whole or every s-th cell, (h, w, C); collective.

    `box` is what this rank's data set has of it: its tile, or more.
    """
    height, width, channels = dataset.sample_shape
    step = -(-max(height, width) // PIXELS)
    piece = None
    if grid.replica == 0:
        here = tuple(slice(-lo % step, None, step) for lo in box.lo)
        piece = (tuple(-(-lo // step) for lo in box.lo), dataset.selection.images([0], dtype)[0][here])
    image = np.zeros((-(-height // step), -(-width // step), channels))
    for part in grid.world.allgather(piece):
        if part is not None:
            (row, col), cells = part
            image[row : row + cells.shape[0], col : col + cells.shape[1]] = cells
    return image


def _title(shape: Sequence[int], parts: Sequence[int], replicas: int, layer: LayerPlan | None) -> str:
    what = f"An image ({' × '.join(map(str, shape))}) in {' × '.join(map(str, parts))} tiles"
    copies = f", the same in each of {replicas} replicas" if replicas > 1 else ""
    if layer is None or layer.window is None:
        return what + copies
    kernel = " × ".join(map(str, layer.window.kernel))
    return f"{what}{copies}, and what each rank sees for the layer '{layer.name}' (kernel {kernel})"
