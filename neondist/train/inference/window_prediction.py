"""Score maps of a tile classifier applied to windows of an image."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError
from ...formats import TileSource
from ...formats.axes import Cells
from .images import SPATIAL_AXES, SourceSamples
from .prediction_methods import BlockwisePrediction, chunk_cache_bytes

MAX_BLOCK_WINDOWS, MAX_BLOCK_CELLS = 8, 2048
"""Limits of a block along each axis: windows, and image cells from the first window to the last."""


class WindowCentres(TileSource):
    """Centre cells of an image's windows, with the calibration of the score map.

    Parameters
    ----------
    source : TileSource
        The image.
    window, stride : int
        Extent of a window, and distance between windows, along each spatial axis.
    """

    def __init__(self, source: TileSource, window: int, stride: int) -> None:
        self._source = source
        self._first_centres = [window // 2 if axis in SPATIAL_AXES else 0 for axis in source.axes]
        self._strides = [stride if axis in SPATIAL_AXES else 1 for axis in source.axes]
        shape = [
            (n - window) // stride + 1 if axis in SPATIAL_AXES else n
            for n, axis in zip(source.shape, source.axes, strict=True)
        ]
        scale, shift = source.metadata.get("scale", {}), source.metadata.get("translation", {})
        spatial = [axis for axis in scale if axis in SPATIAL_AXES]
        metadata = {
            "scale": scale | {axis: scale[axis] * stride for axis in spatial},
            "translation": shift | {axis: shift.get(axis, 0.0) + scale[axis] * (window - 1) / 2 for axis in spatial},
            "units": source.metadata.get("units", {}),
        }
        super().__init__(
            source.path, source.axes, shape, source.dtype, metadata={n: value for n, value in metadata.items() if value}
        )

    def metadata_names(self) -> list[str]:
        """Return the names of the image's metadata, including those that the score map lacks."""
        return list(dict.fromkeys([*self.metadata, *self._source.metadata_names()]))

    def _read(self, cells: Cells) -> np.ndarray:
        source_slices, sample_steps = [], []
        for cut, step, first in zip(cells, self._strides, self._first_centres, strict=True):
            source_slices.append(slice(first + cut.start * step, first + (cut.stop - 1) * step + 1))
            sample_steps.append(slice(None, None, step))
        return self._source.read(source_slices)[tuple(sample_steps)]


class WindowPrediction(BlockwisePrediction):
    """Block-wise prediction of a score map."""

    def __init__(self, images: SourceSamples, plan: Any, memory_limit: int) -> None:
        super().__init__(images, plan, plan.run, chunk_cache_bytes(images, memory_limit), plan.output_shape, plan.dtype)

    def source_aligned_with_output(self) -> TileSource:
        """Return the image at the positions of the score map."""
        return WindowCentres(self.images.source, self.plan.window, self.plan.stride)


def check_window_fits(images: SourceSamples, window: int) -> None:
    """Raise DataError if the images are smaller than a window."""
    extents = images.shape[1:-1]
    if min(extents) < window:
        raise DataError(
            f"{images.source.path}: {' x '.join(map(str, extents))} cells are smaller than a window of {window};"
            f" give --windows of at most {min(extents)}, or a larger image"
        )


def windows_per_block(stride: int, requested_windows: int | None, resumed_method: list[Any] | None) -> int:
    """Return the windows along each axis of a block: from the resumed job, the option, or the default."""
    if requested_windows is None and resumed_method is not None and resumed_method[0] == "blocks":
        return int(max(resumed_method[1]))
    return requested_windows or max(1, min(MAX_BLOCK_WINDOWS, MAX_BLOCK_CELLS // stride))
