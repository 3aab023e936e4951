"""Large crops of natural photographs, whitened, to learn filters from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import rng
from ..comm import ProcessGrid
from ..errors import ConfigError, DataError
from ..hdf5 import checksum
from .base import Dataset, Split, tile_slices
from .photograph_files import find_photographs, read_grey, read_size
from .synthetic import _integer
from .whitening import whiten


class Photographs(Dataset):
    """Grey crops of photographs, whitened, mirrored at random; a crop's class is the photograph that it is from.

    Where crop i lies is a function of (seed, split, i) alone. A rank makes its tile of a crop when a batch asks for it;
    it keeps the whitened photographs, some megabytes.

    Parameters
    ----------
    path : path, optional
        A folder of pictures; `~` is expanded. Default: nine that the wheels of scikit-image and scikit-learn ship.
    crop : int or (int, int)
        Height and width of a sample.
    train, test : int
        Number of crops of each split; test crops are other places in the same photographs.
    seed : int
    validation : float or int, optional
        A fraction, or a number, of the training crops, kept for validation: the last ones.

    Raises
    ------
    ConfigError
        If an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        crop: int | Sequence[int] = 200,
        train: int = 2000,
        test: int = 200,
        seed: int = 0,
        validation: float | int | None = None,
    ) -> None:
        super().__init__(validation)
        sides = [crop, crop] if isinstance(crop, int) else list(crop)
        if len(sides) != 2:
            raise ConfigError(f"crop: {crop!r} cannot be used; give a side, or [height, width]")
        self.path = None if path is None else Path(os.path.expanduser(path))
        self.sample_shape = (*(_integer("crop", side, 1) for side in sides), 1)
        self.counts = {"train": _integer("train", train, 1), "test": _integer("test", test, 1)}
        self.seed = _integer("seed", seed, 0)

    def check(self) -> None:
        """Find the photographs, and check that a crop fits into each; reads their headers, not the pixels."""
        self.files = find_photographs(self.path)
        self.classes = len(self.files)
        for file in self.files:
            size = read_size(file)
            if any(n < side for n, side in zip(size, self.sample_shape, strict=False)):
                sides = " x ".join(map(str, self.sample_shape[:2]))
                raise DataError(
                    f"{file}: has {size[0]} x {size[1]} pixels, less than a crop of {sides}; give a smaller crop"
                )

    def load(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits that cut this rank's tile on demand."""
        pictures = [read_grey(file) for file in self.files]
        self.content = " ".join(f"{checksum(picture):08x}" for picture in pictures)
        photographs = [whiten(picture) for picture in pictures]
        box = tile_slices(grid, self.sample_shape)
        crops = {
            name: Crops(photographs, self.sample_shape, box, n, (self.seed, name)) for name, n in self.counts.items()
        }
        train, test = (Split(made, made.labels, scale=1.0) for made in crops.values())
        return train, test


class Crops:
    """One tile of `count` crops; indexing with an integer array gives float32 tiles (n, *tile, 1)."""

    def __init__(
        self,
        photographs: list[np.ndarray],
        shape: Sequence[int],
        tile: tuple[slice, ...],
        count: int,
        key: tuple[int | str, ...],
    ) -> None:
        self._photographs, self._width, self._tile = photographs, shape[1], tile
        index = np.arange(count)
        self.labels = index % len(photographs)
        room = [[n - side + 1 for n, side in zip(photo.shape, shape, strict=False)] for photo in photographs]
        chance = [rng.uniform(rng.key(name, *key), index) for name in ("row", "column", "mirror")]
        self._corners = [(chance[axis] * np.array(room)[self.labels, axis]).astype(int) for axis in (0, 1)]
        self._mirrored = chance[2] < 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> np.ndarray:
        numbers = np.arange(len(self))[indices]
        out = np.empty((len(numbers), *(cut.stop - cut.start for cut in self._tile)), np.float32)
        for tile, number in zip(out, numbers, strict=True):
            top, left = (int(corner[number]) for corner in self._corners)
            rows, cols = self._tile[:2]
            whole = self._photographs[self.labels[number]][
                top + rows.start : top + rows.stop, left : left + self._width
            ]
            tile[..., 0] = (whole[:, ::-1] if self._mirrored[number] else whole)[:, cols]
        return out
