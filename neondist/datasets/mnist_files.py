"""The four MNIST files: their official names, sizes and checksums, and where they lie in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from .idx import IMAGES, LABELS


@dataclass(frozen=True)
class MnistFile:
    """An official file: its name without .gz, IDX magic number, number of samples, and md5 of the unpacked bytes."""

    name: str
    magic: int
    count: int
    md5: str

    def spellings(self) -> Iterator[str]:
        """Yield the names under which people keep it, the gzipped ones first: those a download mends."""
        for name in (self.name, self.name.replace("-idx", ".idx")):
            yield f"{name}.gz"
            yield name

    def find(self, folder: Path) -> Path:
        """Return where the file lies in `folder`; DataError if it does not."""
        for name in self.spellings():
            if os.path.isfile(folder / name):
                return folder / name
        raise DataError(f"MNIST path: {folder} has no {self.name}[.gz]; {_fetch(folder)}")


@dataclass(frozen=True)
class MnistPair:
    """The images and labels of one split."""

    images: MnistFile
    labels: MnistFile


TRAIN = MnistPair(
    MnistFile("train-images-idx3-ubyte", IMAGES, 60000, "6bbc9ace898e44ae57da46a324031adb"),
    MnistFile("train-labels-idx1-ubyte", LABELS, 60000, "a25bea736e30d166cdddb491f175f624"),
)
TEST = MnistPair(
    MnistFile("t10k-images-idx3-ubyte", IMAGES, 10000, "2646ac647ad5339dbf082846283269ea"),
    MnistFile("t10k-labels-idx1-ubyte", LABELS, 10000, "27ae3e4e09519cfbb04c329615203637"),
)
ALL = (TRAIN.images, TRAIN.labels, TEST.images, TEST.labels)


def check_folder(folder: Path) -> None:
    """Raise DataError unless `folder` is a folder."""
    # os.path and not Path: it answers False where a permission is missing, Path raises
    if not os.path.exists(folder):
        raise DataError(f"MNIST path: no folder {folder}; correct the path, or {_fetch(folder)}")
    if not os.path.isdir(folder):
        raise DataError(f"MNIST path: {folder} is a file; give the folder that holds the four MNIST files")


def _fetch(folder: Path) -> str:
    return f"fetch the files with: neondist data mnist --to {folder}"
