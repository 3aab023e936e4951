"""MNIST, the handwritten digits: the official IDX files, or the subset that ships with the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import ConfigError, DataError
from ..cache import ArraysByName, CachedDataset
from .idx import IMAGES_MAGIC, LABELS_MAGIC, REMEDY, IdxHeader, IdxReader, open_idx, read_idx_header


@dataclass(frozen=True)
class MnistFile:
    """An official file: its name without .gz, IDX magic number, number of samples, and md5 of the unpacked bytes."""

    name: str
    magic: int
    count: int
    md5: str

    def possible_names(self) -> Iterator[str]:
        """Yield the usual file names, gzipped first, as in a download."""
        for name in (self.name, self.name.replace("-idx", ".idx")):
            yield f"{name}.gz"
            yield name

    def path_in(self, folder: Path) -> Path:
        """Return the path of the file in `folder`; DataError if it is missing."""
        for name in self.possible_names():
            if os.path.isfile(folder / name):
                return folder / name
        raise DataError(f"MNIST path: {folder} has no {self.name}[.gz]; {_download_hint(folder)}")


@dataclass(frozen=True)
class MnistPair:
    """The images and labels of one split."""

    images: MnistFile
    labels: MnistFile


TRAIN = MnistPair(
    MnistFile("train-images-idx3-ubyte", IMAGES_MAGIC, 60000, "6bbc9ace898e44ae57da46a324031adb"),
    MnistFile("train-labels-idx1-ubyte", LABELS_MAGIC, 60000, "a25bea736e30d166cdddb491f175f624"),
)
TEST = MnistPair(
    MnistFile("t10k-images-idx3-ubyte", IMAGES_MAGIC, 10000, "2646ac647ad5339dbf082846283269ea"),
    MnistFile("t10k-labels-idx1-ubyte", LABELS_MAGIC, 10000, "27ae3e4e09519cfbb04c329615203637"),
)
ALL_FILES = (TRAIN.images, TRAIN.labels, TEST.images, TEST.labels)


def check_mnist_folder_exists(folder: Path) -> None:
    """Raise DataError unless `folder` is a folder."""
    # os.path returns False without permission, where Path raises
    if not os.path.exists(folder):
        raise DataError(f"MNIST path: no folder {folder}; correct the path, or {_download_hint(folder)}")
    if not os.path.isdir(folder):
        raise DataError(f"MNIST path: {folder} is a file; give the folder that holds the four MNIST files")


def _download_hint(folder: Path) -> str:
    return f"fetch the files with: neondist data mnist --to {folder}"


EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
_FILES_BY_SPLIT = {"train": TRAIN, "test": TEST}
_IMAGE_SIZE = (28, 28)


class MNIST(CachedDataset):
    """Handwritten digits, 28 x 28 grey pixels, 10 classes (LeCun, Cortes and Burges).

    Parameters
    ----------
    path : path, optional
        Folder with the four official files, plain or .gz; `~` is expanded. Default: the embedded subset of 10,000
        training and 2,000 test digits. Files with the official number of samples must be the official files, bit
        for bit.
    serialized_path : path, optional
        Cache of each rank's decoded tile: an HDF5 file whose name may contain {rank} (required for more than one rank)
        and {size}; `~` is expanded. It is rebuilt when the files, the grid or the format have changed. Default: no
        cache.
    validation : float or int, optional
        Fraction or number of the training digits to hold out for validation, taken from the end of the file.

    Raises
    ------
    ConfigError
        If a path is invalid or has fields other than {rank} and {size}, or `validation` is not a fraction or number.

    Notes
    -----
    Pixels are normalised with the mean 0.1307 and the standard deviation 0.3081 of the official training set.
    """

    sample_shape, classes = (*_IMAGE_SIZE, 1), 10
    mean, std = 0.1307, 0.3081

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        serialized_path: str | os.PathLike[str] | None = None,
        validation: float | int | None = None,
    ) -> None:
        super().__init__(serialized_path, validation)
        if path is not None and not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not a folder; give one, or leave it out for the embedded digits")
        self.path = path

    @property
    def folder(self) -> Path:
        """The folder of the digits."""
        return EMBEDDED_FOLDER if self.path is None else Path(os.path.expanduser(self.path))

    def check(self) -> None:
        """Check that the four files exist and their headers match; the data are not read."""
        check_mnist_folder_exists(self.folder)
        for pair in _FILES_BY_SPLIT.values():
            images, labels = (file.path_in(self.folder) for file in (pair.images, pair.labels))
            headers = read_idx_header(images, pair.images.magic), read_idx_header(labels, pair.labels.magic)
            _check_headers(images, labels, *headers)

    def source_files(self) -> list[Path]:
        """Return the four files."""
        return [file.path_in(self.folder) for file in ALL_FILES]

    def decode(self, tile: tuple[slice, ...]) -> ArraysByName:
        """Return one tile of all images, all labels, and the md5 of the unpacked image files."""
        arrays: ArraysByName = {}
        digests = []
        for name, pair in _FILES_BY_SPLIT.items():
            arrays[f"{name}/images"], arrays[f"{name}/targets"], digest = _read_pair(pair, self.folder, tile)
            digests.append(digest)
        arrays["content"] = np.frombuffer(b"".join(digests), np.uint8)
        return arrays


def _read_pair(pair: MnistPair, folder: Path, tile: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Return this rank's tile of all images (N, h, w, 1) uint8, all labels (N,) int64, and the images' md5.

    All bytes are validated.
    """
    images, labels = (file.path_in(folder) for file in (pair.images, pair.labels))
    with open_idx(images, pair.images.magic) as pixels, open_idx(labels, pair.labels.magic) as digits:
        _check_headers(images, labels, pixels.header, digits.header)
        cells = (slice(None), *tile)
        # copies, so that the chunks of whole images are freed
        tiles = [chunk[..., None][cells].copy() for chunk in pixels.read_chunks()]
        _check_official_md5(pixels, pair.images)
        targets = np.concatenate(list(digits.read_chunks())).astype(np.int64)
        _check_official_md5(digits, pair.labels)
    wrong = np.flatnonzero(targets > 9)
    if wrong.size:
        sample = wrong[0]
        raise DataError(f"{labels}: label {targets[sample]} of sample {sample} is not a digit (0 to 9); {REMEDY}")
    return np.concatenate(tiles), targets, bytes.fromhex(pixels.md5)


def _check_headers(images: Path, labels: Path, image_header: IdxHeader, label_header: IdxHeader) -> None:
    if image_header.sample_shape != _IMAGE_SIZE:
        size = " x ".join(map(str, image_header.sample_shape))
        raise DataError(f"{images}: has images of {size} pixels instead of 28 x 28; {REMEDY}")
    if image_header.count != label_header.count:
        raise DataError(
            f"{images} has {image_header.count} images but {labels} has {label_header.count} labels; take both files"
            " from the same set, such as that written by: neondist data mnist --to DIR"
        )


def _check_official_md5(reader: IdxReader, file: MnistFile) -> None:
    if reader.header.count == file.count and reader.md5 != file.md5:
        raise DataError(
            f"{reader.path}: has {file.count} samples like the official file, but its unpacked md5 is {reader.md5}"
            f" instead of {file.md5}, so it is damaged or another data set; {REMEDY}"
        )
