"""CIFAR-10, small colour photographs of ten kinds: the official binary batches."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from ..comm import ProcessGrid
from ..errors import ConfigError, DataError
from .base import Dataset, Split, tile_slices
from .cache import Arrays, cached, fingerprint
from .cache_path import cache_path, check_template
from .cifar10_files import BATCHES, RECORD, Source, records

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the official training set


class CIFAR10(Dataset):
    """Colour photographs, 32 x 32 pixels, 10 classes (Krizhevsky 2009), in the official binary format.

    Parameters
    ----------
    path : path
        The folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the .tar.gz that holds them; `~` is
        expanded. A file may hold fewer records than the official 10,000.
    serialized_path : path, optional
        Where each rank keeps its tile between runs, as in MNIST.

    Raises
    ------
    ConfigError
        If an argument is not a path, or the template has other fields than {rank} and {size}.
    """

    def __init__(self, path: str | os.PathLike[str], serialized_path: str | os.PathLike[str] | None = None) -> None:
        if not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not a path; give the folder of the batches, or the .tar.gz")
        if serialized_path is not None:
            check_template(serialized_path)
        self.path, self.serialized_path = path, serialized_path
        self.sample_shape = (32, 32, 3)
        self.classes = 10

    @property
    def source(self) -> Source:
        """The folder or archive that the batches come from."""
        return Source(Path(os.path.expanduser(self.path)))

    def check(self) -> None:
        """Check that all batches are there and hold whole records; the pixels are not read."""
        for name, size in self.source.sizes().items():
            if size == 0 or size % RECORD:
                raise DataError(
                    f"{self.source.path}: {name} has {size} bytes, which is no whole number of records of {RECORD}"
                    " bytes: it is truncated or not in the binary format; fetch it again"
                )

    def load(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits with this rank's tile, from the cache where it is good."""
        if self.serialized_path is None:
            arrays = self._decode(grid)
        else:
            stamp = fingerprint("CIFAR10", self.source.files(), grid, self.sample_shape[:-1])
            arrays = cached(cache_path(self.serialized_path, grid), stamp, lambda: self._decode(grid))
        self.content = arrays["content"].tobytes().hex()
        train, test = (Split(arrays[f"{name}/images"], arrays[f"{name}/targets"], MEAN, STD) for name in BATCHES)
        return train, test

    def _decode(self, grid: ProcessGrid) -> Arrays:
        arrays: Arrays = {}
        cut = (slice(None), *tile_slices(grid, self.sample_shape))
        digest = hashlib.md5(usedforsecurity=False)
        for split, names in BATCHES.items():
            tiles, labels = [], []
            for batch in self.source.each(names):
                digest.update(batch)
                for images, classes in records(batch):
                    tiles.append(images[cut].copy())
                    labels.append(classes)
            arrays[f"{split}/images"], targets = np.concatenate(tiles), np.concatenate(labels)
            arrays[f"{split}/targets"] = targets
            wrong = np.flatnonzero(targets > 9)
            if wrong.size:
                raise DataError(
                    f"{self.source.path}: label {targets[wrong[0]]} of {split} sample {wrong[0]} is not one of 0 to 9;"
                    " the file is damaged or of CIFAR-100; fetch the binary version of CIFAR-10"
                )
        arrays["content"] = np.frombuffer(digest.digest(), np.uint8)
        return arrays
