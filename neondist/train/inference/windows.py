"""Maps of the scores that a classifier of tiles has for windows of an image."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError
from ...formats import TileSource
from ...formats.axes import Cells
from .images import SPATIAL, Images
from .routes import InBlocks, cache_of

LONGEST, MOST = 8, 2048
"""Windows along each axis of a block, and the cells of the image between its first and its last one, at most."""


class Centres(TileSource):
    """The cells in the middle of an image's windows, with the calibration of their map.

    Parameters
    ----------
    source : TileSource
        The image.
    window, stride : int
        Along each spatial axis.
    """

    def __init__(self, source: TileSource, window: int, stride: int) -> None:
        self._source = source
        self._first = [window // 2 if axis in SPATIAL else 0 for axis in source.axes]
        self._steps = [stride if axis in SPATIAL else 1 for axis in source.axes]
        shape = [
            (n - window) // stride + 1 if axis in SPATIAL else n
            for n, axis in zip(source.shape, source.axes, strict=True)
        ]
        scale, middle = source.metadata.get("scale", {}), source.metadata.get("translation", {})
        spatial = [axis for axis in scale if axis in SPATIAL]
        facts = {
            "scale": scale | {axis: scale[axis] * stride for axis in spatial},
            "translation": middle | {axis: middle.get(axis, 0.0) + scale[axis] * (window - 1) / 2 for axis in spatial},
            "units": source.metadata.get("units", {}),
        }
        super().__init__(
            source.path, source.axes, shape, source.dtype, metadata={n: of for n, of in facts.items() if of}
        )

    def known(self) -> list[str]:
        """Return the names of what is known of the image; the map may not have all of it."""
        return list(dict.fromkeys([*self.metadata, *self._source.known()]))

    def _read(self, cells: Cells) -> np.ndarray:
        box, picked = [], []
        for cut, step, first in zip(cells, self._steps, self._first, strict=True):
            box.append(slice(first + cut.start * step, first + (cut.stop - 1) * step + 1))
            picked.append(slice(None, None, step))
        return self._source.read(box)[tuple(picked)]


class InWindows(InBlocks):
    """Each rank computes blocks of the map by itself."""

    def __init__(self, images: Images, plan: Any, limit: int) -> None:
        super().__init__(images, plan, plan.run, cache_of(images, limit), plan.output_shape, plan.dtype)

    def like(self) -> TileSource:
        """Return the image at the places of the map."""
        return Centres(self.images.source, self.plan.window, self.plan.stride)


def check_windows(images: Images, window: int) -> None:
    """Raise DataError unless the images have room for a window."""
    extents = images.shape[1:-1]
    if min(extents) < window:
        raise DataError(
            f"{images.source.path}: {' x '.join(map(str, extents))} cells are smaller than a window of {window};"
            f" give --windows of at most {min(extents)}, or a larger image"
        )


def block_of(stride: int, block: int | None, before: list[Any] | None) -> int:
    """Return how many windows a block has along each axis: as asked for, as in the job that is resumed, or some."""
    if block is None and before is not None and before[0] == "blocks":
        return int(max(before[1]))
    return block or max(1, min(LONGEST, MOST // stride))
