"""Images of any size in a file, normalised for a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...data.raw_values import fill_missing, normalise
from ...errors import AmbiguousAxesError, DataError
from ...formats import TileSource, open_source
from ...formats.axes import MAX_GUESSED_CHANNELS
from ...geometry import Box
from ...io.hdf5 import size_and_mtime

SPATIAL_AXES = "ZYX"


class SourceSamples:
    """Samples (N, *spatial, C) of a source; its additional axes are flattened to samples.

    Parameters
    ----------
    source : TileSource
    sample_shape : (*spatial, C)
        Shape of a training image, whose axes and channels must match.
    factor, subtrahend : sequence of float
        Normalisation of raw values as in training.
    fill : float, optional
        Raw value that replaces NaN. Default: NaN is an error.

    Attributes
    ----------
    shape : (N, *spatial, C)
    sample_extents : tuple of int
        Extents of the source's sample axes; () if the source is one image.
    """

    def __init__(
        self,
        source: TileSource,
        sample_shape: Sequence[int],
        factor: Sequence[float],
        subtrahend: Sequence[float],
        fill: float | None = None,
    ) -> None:
        self.source, self.factor, self.subtrahend, self.fill = source, factor, subtrahend, fill
        spatial_ndim, channels = len(sample_shape) - 1, sample_shape[-1]
        first_axis = len(source.shape) - 1 - spatial_ndim
        if first_axis < 0 or not set(source.axes[first_axis:-1]) <= set(SPATIAL_AXES) or source.shape[-1] != channels:
            raise _shape_error(source.path, sample_shape, source.shape, source.axes)
        self.sample_extents = source.shape[:first_axis]
        self.shape = prod(self.sample_extents), *source.shape[first_axis:]

    def read(self, samples: range, box: Box, dtype: Any) -> np.ndarray:
        """Return the normalised cells of a box of consecutive samples (n, *box, C)."""
        return normalise(self.read_raw(samples, box.slices), self.factor, self.subtrahend, dtype)

    def read_raw(self, samples: range, cells: Sequence[slice]) -> np.ndarray:
        """Return raw cells of consecutive samples, with NaN replaced."""
        ranges = [samples] if self.has_single_sample_axis else [samples[at : at + 1] for at in range(len(samples))]
        shape = (*(cut.stop - cut.start for cut in cells), self.shape[-1])
        boxes = ((*self.sample_slices(part), *cells, slice(0, self.shape[-1])) for part in ranges)
        arrays = [self.source.read(box).reshape(len(part), *shape) for part, box in zip(ranges, boxes, strict=True)]
        array = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty((0, *shape), self.source.dtype), *arrays])
        return fill_missing(self.source.path, array, self.fill)

    def close(self) -> None:
        """Close the file."""
        self.source.close()

    def sample_slices(self, samples: range) -> tuple[slice, ...]:
        """Return slices of the sample axes for consecutive samples, or for the first one unless there is one axis."""
        if len(self.sample_extents) == 1:
            return (slice(samples.start, samples.stop),)
        sample_index = np.unravel_index(samples.start, self.sample_extents) if self.sample_extents else ()
        return tuple(slice(int(at), int(at) + 1) for at in sample_index)

    @property
    def has_single_sample_axis(self) -> bool:
        """Whether consecutive samples form one box of the source."""
        return len(self.sample_extents) == 1

    def file_identity(self) -> list[Any]:
        """Return values that change if the file changes."""
        source, files = self.source, list[Path]()
        for path in map(Path, source.files):
            files += sorted(path.iterdir())[:1000] if path.is_dir() else [path]
        file_states = [size_and_mtime(file) for file in files]
        return [source.path, source.axes, list(source.shape), str(source.dtype), file_states]


def open_images(
    path: str | Path,
    sample_shape: Sequence[int],
    factor: Sequence[float] = (1,),
    subtrahend: Sequence[float] = (0,),
    fill: float | None = None,
    opener: Callable[..., TileSource] = open_source,
    axes: str | None = None,
) -> SourceSamples:
    """Return the images of a file; unnamed axes are inferred from the network's input.

    Parameters
    ----------
    path : path
    sample_shape, factor, subtrahend, fill : as in SourceSamples
    opener : callable
        Function that opens the file.
    axes : str, optional
        As in `open_source`.

    Raises
    ------
    DataError
        The file is missing, damaged or of an unknown kind, has wrong axes or channels, or it is unclear
        whether its last axis is channels.
    """
    try:
        source = opener(path, axes=axes) if axes else opener(path)
        shape = None
        if not source.axes_given:
            shape = source.shape if "C" in source.stored_axes.letters else source.shape[:-1]
            source.close()
    except AmbiguousAxesError as error:
        shape = error.shape
    if shape is not None:
        spatial, channels = SPATIAL_AXES[3 - (len(sample_shape) - 1) :], sample_shape[-1]
        axes_choices = [f"N{spatial}C", f"{spatial}C"] if shape[-1] == channels else []
        axes_choices += [f"N{spatial}", spatial] if channels == 1 else []
        fits = [choice for choice in axes_choices if len(choice) == len(shape)]
        if not fits:
            raise _shape_error(path, sample_shape, shape)
        if "C" not in fits[0] and 1 < shape[-1] <= MAX_GUESSED_CHANNELS and shape[-len(spatial) :] != sample_shape[:-1]:
            raise DataError(
                f"{path}: holds an array of shape {list(shape)} without names of its axes, whose last one may be"
                f" {shape[-1]} channels, but the model takes one channel; give images of one channel, or"
                f" --axes {fits[0]} if the last axis is {fits[0][-1]}"
            )
        source = opener(path, axes=fits[0])
    try:
        return SourceSamples(source, sample_shape, factor, subtrahend, fill)
    except DataError:
        source.close()
        raise


def _shape_error(path: str | Path, sample_shape: Sequence[int], shape: Sequence[int], axes: str = "") -> DataError:
    expected = ", ".join(["N", *"DHW"[4 - len(sample_shape) :], str(sample_shape[-1])])
    actual = f"an array of shape {list(shape)}" + (f" ({axes})" if axes else "")
    correction = "other names" if axes else "the order"
    remedy = f", or {correction} of the axes, such as --axes C{SPATIAL_AXES[4 - len(sample_shape) :]}"
    if axes and shape[-1] < sample_shape[-1]:
        remedy += ", or the files of all channels, as FILE,FILE"
    return DataError(
        f"{path}: holds {actual}; the model takes ({expected}): give images of these axes and channels{remedy}"
    )
