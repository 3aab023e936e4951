"""A rank's part of the targets."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from ..geometry import Box
from ..halo import GlobalArray
from ..terminal.console import counted


def random_batch(model: Any, dataset: Any) -> tuple[Any, Any]:
    """Return this rank's part of a batch of random images, with random classes of the images or of their cells.

    The time of a step does not depend on the values, so no data set has to be read.
    """
    images, output, rng = model.input, model.output, np.random.default_rng(0)
    lo, hi = model.grid.sample_range(model.batch_size)
    # the tile that the model reads, which a scheme may widen
    x = rng.random((hi - lo, *images.own.shape, images.channels)).astype(model.dtype)
    return x, rng.integers(output.channels, size=(hi - lo, *model.grid.tile_box(output.extent).shape))


def local_targets(targets: Any, output: GlobalArray, batch_size: int, images: GlobalArray) -> Any:
    """Return this rank's part of the targets of a whole batch; local targets are returned unchanged.

    Parameters
    ----------
    targets : array
        Labels (N,) or (N, *spatial), or arrays of the output's shape (N, *spatial, C); N is `batch_size`, or the
        number of samples of this rank's replica.
    images : GlobalArray
        The layout of the images. Targets of the images' extent may also be given as tiles like the images'.
    """
    lo, hi = output.grid.sample_range(batch_size)
    if len(targets) == batch_size:
        targets = targets[lo:hi]
    elif len(targets) != hi - lo:
        raise ShapeError(f"{counted(len(targets), 'target')} for a batch of {batch_size}; give one per sample")
    spatial_extent = targets.shape[1 : 1 + len(output.extent)]
    if spatial_extent == output.own.shape:
        return targets
    if spatial_extent == output.extent:
        return targets[(slice(None), *output.own.slices)]
    if spatial_extent == images.own.shape and output.extent == images.extent:
        return targets[(slice(None), *own_slices_in_tile(images, output.own))]
    raise ShapeError(
        f"targets of spatial shape {spatial_extent}: expected the whole output's {output.extent} or this tile's"
        f" {output.own.shape}"
    )


def are_global_targets(targets: Any, output: GlobalArray, batch_size: int) -> bool:
    """Return whether targets are those of a whole batch of whole images, and thus the same on every rank."""
    spatial_extent, extent = tuple(targets.shape[1 : 1 + len(output.extent)]), output.extent
    if len(targets) != batch_size or spatial_extent != extent:
        return False
    tiles = output.tiles.boxes() if extent and output.grid.shape.tiles > 1 else []
    # if a tile covers the whole image, the targets may be local
    return all(box.shape != extent for box in tiles)


def own_slices_in_tile(images: GlobalArray, own: Box) -> tuple[slice, ...]:
    """Return the slices of this rank's cells in the tile that it reads, which may be larger."""
    starts = (max(0, lo - start) for lo, start in zip(own.lo, images.own.lo, strict=True))  # 0 if the tile begins later
    return tuple(slice(at, at + n) for at, n in zip(starts, own.shape, strict=True))
