"""Large whitened crops of natural photographs, from installed packages or a folder, for learning filters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import rng
from ...comm import ProcessGrid
from ...errors import ConfigError, DataError
from ...formats.image_loader import ImageLoader, image_files_in
from ...io.hdf5 import checksum
from ...registry.ranges import Index
from ...version import find_module_spec
from ..base import Dataset, Split, tile_slices
from .synthetic import Extent


class Photographs(Dataset):
    """Whitened grey-scale crops of photographs, mirrored at random; a crop's class is its photograph.

    The position of crop i is a function of (seed, split, i) only. A rank computes its tiles of crops on demand from the
    whitened photographs, which take a few megabytes of memory.

    Parameters
    ----------
    path : path, optional
        A folder of images; `~` is expanded. Default: nine photographs included in scikit-image and scikit-learn.
    crop : int or (int, int)
        Height and width of a sample.
    train, test : int
        Number of crops of each split; test crops are at other positions in the same photographs.
    seed : int
    validation : float or int, optional
        Fraction or number of the training crops to hold out for validation, taken from the end.

    Raises
    ------
    ConfigError
        If an argument is of the wrong type or out of range.
    """

    target_shape = ()

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        crop: Extent | Sequence[Extent] = 200,
        train: Extent = 2000,
        test: Extent = 200,
        seed: Index = 0,
        validation: float | int | None = None,
    ) -> None:
        super().__init__(validation=validation)
        sides = list(crop) if isinstance(crop, Sequence | np.ndarray) else [crop, crop]
        if len(sides) != 2:
            raise ConfigError(f"crop: {crop!r} is invalid; expected a side, or [height, width]")
        self.path = None if path is None else Path(os.path.expanduser(path))
        self.sample_shape = (*map(int, sides), 1)
        self.split_sizes, self.seed = {"train": int(train), "test": int(test)}, int(seed)

    def check(self) -> None:
        """Find the photographs, set `files` and `classes`, and check from the headers that a crop fits in each."""
        self.files = find_photographs(self.path)
        self.classes = len(self.files)
        for file in self.files:
            size = ImageLoader().extents(file)
            if any(n < side for n, side in zip(size, self.sample_shape, strict=False)):
                sides = " x ".join(map(str, self.sample_shape[:2]))
                raise DataError(
                    f"{file}: is {size[0]} x {size[1]} pixels, smaller than the crop {sides}; give a smaller crop"
                )

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits, which crop this rank's tile on demand."""
        pictures = [read_grey_image(file) for file in self.files]
        self.content_hash = " ".join(f"{checksum(picture):08x}" for picture in pictures)
        photographs = [whiten(picture) for picture in pictures]
        box = tile_slices(grid, self.sample_shape)
        crops = {
            name: PhotographCrops(photographs, self.sample_shape, box, n, (self.seed, name))
            for name, n in self.split_sizes.items()
        }
        train, test = (Split(tiles, tiles.labels, scale=1.0) for tiles in crops.values())
        return train, test


class PhotographCrops:
    """One tile of `num_crops` crops; indexing with an integer array gives float32 tiles (n, *tile, 1)."""

    def __init__(
        self,
        photographs: list[np.ndarray],
        shape: Sequence[int],
        tile: tuple[slice, ...],
        num_crops: int,
        key: tuple[int | str, ...],
    ) -> None:
        self._photographs, self._crop_width, self._tile_slices = photographs, shape[1], tile
        index = np.arange(num_crops)
        self.labels = index % len(photographs)
        num_positions = [[n - side + 1 for n, side in zip(image.shape, shape, strict=False)] for image in photographs]
        draws = [rng.uniform(rng.key(name, *key), index) for name in ("row", "column", "mirror")]
        self._crop_corners = [(draws[axis] * np.array(num_positions)[self.labels, axis]).astype(int) for axis in (0, 1)]
        self._is_mirrored = draws[2] < 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> np.ndarray:
        sample_numbers = np.arange(len(self))[indices]
        out = np.empty((len(sample_numbers), *(cut.stop - cut.start for cut in self._tile_slices)), np.float32)
        for tile, number in zip(out, sample_numbers, strict=True):
            top, left = (int(corner[number]) for corner in self._crop_corners)
            rows, cols = self._tile_slices[:2]
            crop = self._photographs[self.labels[number]][
                top + rows.start : top + rows.stop, left : left + self._crop_width
            ]
            tile[..., 0] = (crop[:, ::-1] if self._is_mirrored[number] else crop)[:, cols]
        return out


_REFLECTION_MARGIN_CELLS = 32  # cells of reflection padding, against wrap-around at the borders


def whiten(image: np.ndarray, cutoff: float = 0.4) -> np.ndarray:
    """Return a grey image (H, W) whitened, with mean 0 and variance 1, as float32.

    The filter is f · exp(-(f / cutoff)⁴), f in cycles per pixel (Olshausen and Field 1997): natural images have
    amplitudes of about 1 / f, and the highest frequencies are noise.
    """
    margins = [min(_REFLECTION_MARGIN_CELLS, n - 1) for n in image.shape]
    padded = np.pad(np.asarray(image, np.float64), [(m, m) for m in margins], mode="reflect")
    row_freqs, col_freqs = np.fft.fftfreq(padded.shape[0])[:, None], np.fft.rfftfreq(padded.shape[1])[None]
    frequency = np.sqrt(row_freqs * row_freqs + col_freqs * col_freqs)
    gain = frequency * np.exp(-((frequency / cutoff) ** 4))
    whitened = np.fft.irfft2(np.fft.rfft2(padded) * gain, s=padded.shape)
    whitened = whitened[tuple(slice(m, n - m) for m, n in zip(margins, padded.shape, strict=True))]
    whitened -= whitened.mean()
    deviation, noise_floor = whitened.std(), 1e-12 * np.abs(padded).max(initial=0)
    return (whitened / deviation if deviation > noise_floor else np.zeros_like(whitened)).astype(np.float32)


PACKAGE_PHOTOGRAPHS = {
    "skimage": ("data", "astronaut.png brick.png camera.png chelsea.png coffee.png grass.png gravel.png"),
    "sklearn": ("datasets/images", "china.jpg flower.jpg"),
}
_INSTALL_HINT = "install them with: pip install 'neondist[examples]'"


def find_photographs(folder: Path | None) -> list[Path]:
    """Return the images of a folder, sorted by name, or the photographs of scikit-image and scikit-learn.

    Raises
    ------
    DataError
        If there are none, or a package is missing.
    """
    if find_module_spec("PIL") is None:
        raise DataError(f"photographs need Pillow, scikit-image and scikit-learn; {_INSTALL_HINT}")
    if folder is not None:
        try:
            return image_files_in(folder)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be read: {error.strerror}; specify a folder of images, or leave path out"
            ) from error
    return [path for package in PACKAGE_PHOTOGRAPHS for path in _find_packaged_photographs(package)]


def _find_packaged_photographs(package: str) -> list[Path]:
    spec = find_module_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("sk", "scikit-")
        raise DataError(
            f"the default photographs need scikit-image and scikit-learn, but {name} is missing; {_INSTALL_HINT}"
        )
    subfolder, names = PACKAGE_PHOTOGRAPHS[package]
    paths = [Path(spec.submodule_search_locations[0]) / subfolder / name for name in names.split()]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: is missing, though {package} is installed; reinstall {package}, or give a path")
    return paths


def read_grey_image(path: Path) -> np.ndarray:
    """Return an image's luminance (H, W) in [0, 1] as float32; DataError if it is not an image, or has 16 bits."""
    return np.asarray(ImageLoader("RGB").load_pillow_image(path).convert("F"), np.float32) / 255
