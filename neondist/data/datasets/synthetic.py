"""Learnable synthetic images of any size, computed on demand from global indices."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, TypeAlias

import numpy as np

from ...arrays import rng
from ...comm import ProcessGrid
from ...errors import ConfigError
from ...registry.ranges import Index, NotNegative, between
from ...system.memory import require_memory
from ..base import Dataset, Split, tile_slices

_MAX_EXTENT = 1 << 48  # larger products of extents exceed NumPy's index range
Extent: TypeAlias = Annotated[int, between(1, _MAX_EXTENT)]
_BYTES_PER_SAMPLE = 40  # label, phase and position in the order


class Synthetic(Dataset):
    """Synthetic gratings, one direction and wavelength per class, a random phase per sample, and noise per cell.

    Every cell is a pure function of (seed, split, sample, global cell index): each rank computes only its tile, on
    demand, and values are bitwise identical on all grids.

    Parameters
    ----------
    shape : sequence of int
        Global shape of a sample, (H, W, C) or (*spatial, C) with one spatial axis or more.
    classes : int
        Number of classes; sample i is of class i modulo `classes`.
    train, test : int
        Number of samples of each split.
    seed : int
        Seed of phases and noise; the classes do not depend on it.
    noise : float
        Half-width of the uniform noise; the gratings range from -1 to 1.
    validation : float or int, optional
        Fraction or number of the training samples to hold out for validation, taken from the end.
    per_cell : bool
        Whether the target is a label map, with the sample's class in each cell.

    Raises
    ------
    ConfigError
        If an argument is of the wrong type or out of range.
    """

    classes: int
    target_shape: tuple[int, ...] = ()

    def __init__(
        self,
        shape: Sequence[Extent] = (256, 256, 3),
        *,
        classes: Annotated[int, between(2, _MAX_EXTENT)] = 4,
        train: Extent = 256,
        test: Extent = 64,
        seed: Index = 0,
        noise: NotNegative = 1.0,
        validation: float | int | None = None,
        per_cell: bool = False,
    ) -> None:
        super().__init__(validation=validation)
        if len(shape) < 2:
            raise ConfigError(f"shape: {shape!r} is not a list of extents; give [H, W, C] or [*spatial, C]")
        self.sample_shape, self.classes = tuple(map(int, shape)), int(classes)
        self.split_sizes = {"train": int(train), "test": int(test)}
        self.seed, self.noise, self.per_cell = int(seed), float(noise), per_cell
        if per_cell:
            self.target_shape = self.sample_shape[:-1]

    def check(self) -> None:
        """Check that there is enough memory for the data kept per sample; arguments are checked by the constructor."""
        count = sum(self.split_sizes.values())
        require_memory(_BYTES_PER_SAMPLE * count, f"bookkeeping for {count} samples", "give fewer for train and test")

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits, which compute this rank's tile on demand."""
        box = tile_slices(grid, self.sample_shape)
        tiles = {
            name: Gratings(self.sample_shape, box, self.classes, count, (self.seed, name), self.noise)
            for name, count in self.split_sizes.items()
        }
        train, test = (Split(images, self._targets(images), scale=1.0) for images in tiles.values())
        return train, test

    def _targets(self, images: Gratings) -> np.ndarray:
        if not self.per_cell:
            return images.labels
        extent = images.shape[1:-1]
        return np.broadcast_to(images.labels.reshape(-1, *(1 for _ in extent)), (len(images), *extent))


_BLOCK_CELLS = 1 << 18


class Gratings:
    """One tile of `num_images` images, computed on demand.

    Indexing with an integer array gives float32 tiles (n, *tile, C). The sine of the sum of the axes' angles is
    computed by products and sums from sines and cosines along whole axes: cells are bitwise the same in every tile.

    Parameters
    ----------
    shape : sequence of int
        Global shape of an image, (*spatial, C).
    tile : tuple of slice
        This rank's cells in an image, one slice per axis, channels included.
    classes, num_images : int
        Number of classes and of images.
    key : tuple
        Key of the random numbers of this split and seed.
    noise : float
        Half-width of the uniform noise.
    """

    def __init__(
        self,
        shape: Sequence[int],
        tile: tuple[slice, ...],
        classes: int,
        num_images: int,
        key: tuple[int | str, ...],
        noise: float,
    ) -> None:
        self._image_shape, self._tile_slices, self._classes, self._noise = tuple(shape), tile, classes, noise
        self.labels = np.arange(num_images) % classes
        # within a third of a turn: the class means differ, so that even a linear model can learn
        self._phases = (2 * rng.uniform(rng.key("phase", *key), np.arange(num_images)) - 1) * np.pi / 3
        self._noise_stream = rng.key("noise", *key)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape (N, *tile, C)."""
        return (len(self), *(cut.stop - cut.start for cut in self._tile_slices))

    def __getitem__(self, indices: Any) -> np.ndarray:
        sample_numbers = np.arange(len(self))[indices]
        out = np.empty((len(sample_numbers), *self.shape[1:]), np.float32)
        for image, number in zip(out, sample_numbers, strict=True):
            self._fill_tile(image, int(number))
        return out

    def read_cells(self, indices: Any, cells: tuple[slice, ...]) -> np.ndarray:
        """Return cells (n, *cells, C) of some images; slices count from the tile's first cell."""
        cropped = copy(self)
        pairs = zip(self._tile_slices, cells, strict=False)
        cropped._tile_slices = (*(slice(t.start + c.start, t.start + c.stop) for t, c in pairs), self._tile_slices[-1])
        return cropped[indices]

    def _fill_tile(self, image: np.ndarray, number: int) -> None:
        """Compute one tile, a few rows at a time to keep the 64-bit temporaries in cache."""
        rows_per_block = max(1, _BLOCK_CELLS // max(1, image[:1].size))
        angles = self._angles(number)
        first_row = self._tile_slices[0].start
        for lo in range(0, len(image), rows_per_block):
            hi = min(lo + rows_per_block, len(image))
            block = (slice(first_row + lo, first_row + hi), *self._tile_slices[1:])
            image[lo:hi] = self._grating(angles, block) + self._cell_noise(number, block)

    def _angles(self, number: int) -> list[np.ndarray]:
        """Return the angles added along each axis of the whole image; those along the channels include the phase."""
        label, num_axes = int(self.labels[number]), len(self._image_shape) - 1
        orientation = np.pi * label / self._classes
        # wavelengths from 12 down to 6 cells: a few kernels wide, whatever the size of the image
        frequency = 2 * np.pi * (1 + label / self._classes) / 12
        direction = [np.cos(orientation - np.pi * axis / num_axes) if num_axes > 1 else 1.0 for axis in range(num_axes)]
        angles = [frequency * part * np.arange(n) for part, n in zip(direction, self._image_shape[:-1], strict=True)]
        channels = self._image_shape[-1]
        return [*angles, self._phases[number] + np.pi / 2 * np.arange(channels) / channels]

    def _grating(self, angles: list[np.ndarray], block: tuple[slice, ...]) -> np.ndarray:
        sine, cosine = np.zeros((1,) * len(block)), np.ones((1,) * len(block))
        for axis, (angle, cut) in enumerate(zip(angles, block, strict=True)):
            angle_shape = [1] * len(block)
            angle_shape[axis] = -1
            s, c = np.sin(angle)[cut].reshape(angle_shape), np.cos(angle)[cut].reshape(angle_shape)
            sine, cosine = sine * c + cosine * s, cosine * c - sine * s
        return sine

    def _cell_noise(self, number: int, block: tuple[slice, ...]) -> np.ndarray:
        index = rng.row_major_indices(self._image_shape, block)
        index += np.uint64(number * int(np.prod(self._image_shape, dtype=object)))
        return self._noise * (2 * rng.uniform(self._noise_stream, index) - 1)
