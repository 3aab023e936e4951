"""tiles.png: an image divided into the tiles of the ranks, each with its halo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.allocator import release_cached_memory
from ...comm import ProcessGrid, all_or_none
from ...data import Dataset
from ...geometry import Box
from ...io.files import has_matplotlib, write_figure
from ...plan import LayerPlan
from ...terminal.console import counted
from ..state import TrainState
from .hook import Hook
from .subsampling import assemble_subsampled_images, sampled_slices, subsampling_step

MAX_PICTURE_EXTENT = 512  # a larger image is subsampled, so that no rank needs to store the whole image


class TilesPicture(Hook):
    """Draw an image and its tiles before training, on rank 0; do nothing without matplotlib, or if samples are not 2-D.

    A resumed run draws the picture after its first epoch, since importing matplotlib would delay the next step. The
    views are those of the first layer whose window is larger than one cell.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_drawn = False

    def before_run(self, run: TrainState) -> None:
        """Draw, unless the run is resumed. Collective."""
        self._is_drawn = False
        if run.step == 0 and run.epoch == 0:
            self._draw(run)

    def after_epoch(self, run: TrainState) -> None:
        """Draw if not done yet. Collective."""
        self._draw(run)

    def after_run(self, run: TrainState) -> None:
        """Draw if not done yet. Collective."""
        self._draw(run)

    def _draw(self, run: TrainState) -> None:
        if self._is_drawn:
            return
        self._is_drawn = True
        shape, grid = run.dataset.sample_shape, run.grid
        if len(shape) != 3 or not len(run.dataset.selection_split):
            return
        image = gather_first_image(run.dataset, grid, run.model.dtype, run.model.whole_model.input.own)
        with all_or_none(grid.world):
            if run.is_first_rank and has_matplotlib():
                layer = run.model.whole_model.compiled.first_windowed_layer
                partition = grid.partition(shape[:2])
                tiles = partition.boxes()
                views = tiles if layer is None else layer.views
                title = _figure_title(shape, partition.parts, grid.replicas, layer)
                write_tiles_picture(self.path, image, shape[:2], partition.parts, tiles, views, title)
                release_cached_memory()  # memory of matplotlib, before the training


ROWS_PER_READ = 256


def gather_first_image(dataset: Dataset, grid: ProcessGrid, dtype: np.dtype, box: Box) -> np.ndarray:
    """Gather the first image of `dataset.selection_split` on every rank, subsampled if large, (h, w, C). Collective.

    `box` has the cells of this rank's data set: the rank's tile, or more.
    """
    *extent, channels = dataset.sample_shape
    step = subsampling_step(extent, MAX_PICTURE_EXTENT)
    local_image = np.zeros((0, 0, 0, channels))
    if grid.replica == 0:
        top, left = sampled_slices(box, step)
        cells, (rows, cols) = dataset.selection_split.lazy_images([0], dtype), box.shape
        band_rows = -(-ROWS_PER_READ // step) * step  # the image may not fit into memory
        bands = [slice(at, min(at + band_rows, rows)) for at in range(top.start, rows, band_rows)] or [slice(0, 0)]
        arrays = [cells.read([rows_of, slice(0, cols)])[:, ::step, left].astype(np.float64) for rows_of in bands]
        local_image = np.concatenate(arrays, axis=1)
    return assemble_subsampled_images(grid, box, extent, step, local_image, 0)[0]


def _figure_title(shape: Sequence[int], tiles_per_axis: Sequence[int], replicas: int, layer: LayerPlan | None) -> str:
    text = f"An image ({' × '.join(map(str, shape))}) in {' × '.join(map(str, tiles_per_axis))} tiles"
    replicas_text = f", the same in each of {replicas} replicas" if replicas > 1 else ""
    if layer is None or layer.window is None:
        return text + replicas_text
    kernel_text = " × ".join(map(str, layer.window.kernel))
    return f"{text}{replicas_text}, and each rank's view in the layer '{layer.name}' (kernel {kernel_text})"


HALO_COLOUR, PADDING_COLOUR, SEAM_COLOUR = "tab:orange", "0.85", "tab:red"
MAX_DRAWN_TILES = 36  # more tiles would be too small to read


def write_tiles_picture(
    path: Path,
    image: np.ndarray,
    extent: Sequence[int],
    tiles_per_axis: Sequence[int],
    tiles: Sequence[Box],
    views: Sequence[Box],
    title: str,
) -> None:
    """Write a picture of `image` with the seams between its tiles and, if there are at most 36, of each tile's view.

    Parameters
    ----------
    image : array (h, w, C)
        Pixels of the image, which may be subsampled.
    extent : (H, W)
        Extent of the whole image in cells, the unit of the boxes.
    tiles_per_axis : (rows, cols)
    tiles, views : owned cells and view of each tile; row-major
    """
    from matplotlib.figure import Figure

    rows, cols = tiles_per_axis if len(tiles) <= MAX_DRAWN_TILES else (0, 0)
    frame_shapes = [hull_of_tile_and_view(tile, view).shape for tile, view in zip(tiles, views, strict=True)]
    panel_extent = [max((shape[axis] for shape in frame_shapes), default=1) for axis in (0, 1)]
    width, height = _panels_size(rows, cols, panel_extent)
    figure: Any = Figure(figsize=(4.6 + width, 1.3 + max(4.6, height)), layout="constrained")
    figure.suptitle(title, fontsize=12, wrap=True)
    image_figure, views_figure = figure.subfigures(1, 2, width_ratios=(4.6, width))
    pixels = _scale_to_rgb(image)
    image_axes = image_figure.subplots()
    _show_image(image_axes, pixels, extent)
    image_axes.set_title(f"the image and its seams ({counted(len(tiles), 'tile')})", fontsize=10)
    for rank, tile in enumerate(tiles):
        _outline_box(image_axes, tile, color=SEAM_COLOUR, linewidth=2)
        _label_tile(image_axes, rank, tile)
    _hide_ticks(image_axes)
    if rows:
        _draw_views(views_figure.subplots(rows, cols, squeeze=False), pixels, extent, tiles, views, panel_extent)
    _add_legend(figure)
    write_figure(path, figure, dpi=110)


def hull_of_tile_and_view(tile: Box, view: Box) -> Box:
    """Return the hull of a tile and its view; an empty box is ignored."""
    if tile.empty or view.empty:
        return view if tile.empty else tile
    return tile.hull(view)


def split_outside_box(box: Box, excluded: Box) -> Iterator[Box]:
    """Yield the parts of a 2-D box that lie outside another: above, below, left, right."""
    excluded = box.intersect(excluded)
    if excluded.empty:
        yield box
        return
    (top, left), (bottom, right) = box.lo, box.hi
    yield Box((top, left), (excluded.lo[0], right))
    yield Box((excluded.hi[0], left), (bottom, right))
    yield Box((excluded.lo[0], left), (excluded.hi[0], excluded.lo[1]))
    yield Box((excluded.lo[0], excluded.hi[1]), (excluded.hi[0], right))


def _panels_size(rows: int, cols: int, panel_extent: Sequence[int]) -> tuple[float, float]:
    """Return the total width and height of the panels on a common scale, with space for titles."""
    if not rows * cols * min(panel_extent):
        return 2.5, 0.0
    scale = min(max(5.0, 1.3 * max(rows, cols)), 12.0) / max(rows * panel_extent[0], cols * panel_extent[1])
    return max(scale * cols * panel_extent[1], 1.5 * cols), scale * rows * panel_extent[0] + 0.5 * rows


def _draw_views(
    panels: Any,
    pixels: np.ndarray,
    extent: Sequence[int],
    tiles: Sequence[Box],
    views: Sequence[Box],
    panel_extent: Sequence[int],
) -> None:
    for rank, (axes, tile, view) in enumerate(zip(panels.flat, tiles, views, strict=True)):
        axes.set_title(f"rank {rank}\ntile {_format_shape(tile)}, view {_format_shape(view)}", fontsize=8)
        shown_box = hull_of_tile_and_view(tile, view)
        _hide_ticks(axes)
        if shown_box.empty:
            axes.text(0.5, 0.5, "no cells", ha="center", va="center", transform=axes.transAxes, color="0.5")
            axes.set_frame_on(False)
            continue
        _fill_box(axes, view, facecolor=PADDING_COLOUR, edgecolor="0.6", hatch="////", linewidth=0)
        _show_image(axes, pixels, extent, clip=shown_box)
        for strip in split_outside_box(view.intersect(Box.of(extent)), tile):
            if not strip.empty:
                _fill_box(axes, strip, facecolor=HALO_COLOUR, alpha=0.55, linewidth=0, zorder=3)
        _outline_box(axes, tile, color=SEAM_COLOUR, linewidth=1.5)
        centre = [(lo + hi) / 2 for lo, hi in shown_box.axes()]
        half_h, half_w = (0.52 * n for n in panel_extent)  # the same scale for all tiles
        axes.set(xlim=(centre[1] - half_w, centre[1] + half_w), ylim=(centre[0] + half_h, centre[0] - half_h))
        axes.set_frame_on(False)


def _scale_to_rgb(image: np.ndarray) -> np.ndarray:
    """Return an image as RGB scaled to [0, 1], grey unless it has three channels."""
    image = image if image.shape[-1] in (1, 3) else image.mean(axis=-1, keepdims=True)
    low, high = float(image.min(initial=np.inf)), float(image.max(initial=-np.inf))
    scaled = (image - low) / (high - low) if high > low else np.zeros_like(image)
    return np.broadcast_to(scaled, (*image.shape[:2], 3))


def _show_image(axes: Any, pixels: np.ndarray, extent: Sequence[int], clip: Box | None = None) -> None:
    """Show the image in cell coordinates: cell i covers [i, i + 1)."""
    drawn_image = axes.imshow(pixels, extent=(0, extent[1], extent[0], 0), interpolation="nearest", zorder=2)
    if clip is not None:
        drawn_image.set_clip_path(_rectangle_patch(clip, transform=axes.transData))


def _rectangle_patch(box: Box, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    height, width = box.shape
    return Rectangle((box.lo[1], box.lo[0]), width, height, **style)


def _fill_box(axes: Any, box: Box, **style: Any) -> None:
    axes.add_patch(_rectangle_patch(box, **style))


def _outline_box(axes: Any, box: Box, **style: Any) -> None:
    if not box.empty:
        axes.add_patch(_rectangle_patch(box, fill=False, zorder=4, **style))


def _label_tile(axes: Any, rank: int, tile: Box) -> None:
    if not tile.empty:
        row, col = ((lo + hi) / 2 for lo, hi in tile.axes())
        bbox = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
        axes.text(col, row, str(rank), ha="center", va="center", color=SEAM_COLOUR, fontsize=9, bbox=bbox, zorder=5)


def _hide_ticks(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def _format_shape(box: Box) -> str:
    return "×".join(map(str, box.shape))


def _add_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(fill=False, edgecolor=SEAM_COLOUR, label="cells that the rank owns"),
        Patch(facecolor=HALO_COLOUR, alpha=0.55, label="halo: cells that other ranks send"),
        Patch(facecolor=PADDING_COLOUR, edgecolor="0.6", hatch="////", label="padding: outside the image"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
