"""CIFAR-10, small colour photographs of ten classes: the official binary batches."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from ...errors import ConfigError, DataError
from ..cache import ArraysByName, CachedDataset
from .cifar10_files import BATCH_FILES, RECORD_BYTES, CIFAR10Files, decode_batch


class CIFAR10(CachedDataset):
    """Colour photographs, 32 x 32 pixels, 10 classes (Krizhevsky 2009), in the official binary format.

    Parameters
    ----------
    path : path
        The folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the .tar.gz archive; `~` is
        expanded. A file may have fewer records than the official 10,000.
    serialized_path : path, optional
        Cache of each rank's tile, as in MNIST.
    validation : float or int, optional
        Fraction or number of the training images to hold out for validation, taken from the end.

    Raises
    ------
    ConfigError
        If an argument is invalid, as for MNIST.
    """

    sample_shape, classes = (32, 32, 3), 10
    class_names = "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # statistics of the official training set

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        serialized_path: str | os.PathLike[str] | None = None,
        validation: float | int | None = None,
    ) -> None:
        super().__init__(serialized_path, validation)
        if not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not a path; give the folder of the batches, or the .tar.gz")
        self.path = path

    @property
    def cifar10_files(self) -> CIFAR10Files:
        """The folder or archive of the batches."""
        return CIFAR10Files(Path(os.path.expanduser(self.path)))

    def check(self) -> None:
        """Check that all batches exist and consist of whole records; the pixels are not read."""
        for name, size in self.cifar10_files.file_sizes().items():
            if size == 0 or size % RECORD_BYTES:
                raise DataError(
                    f"{self.cifar10_files.folder_or_archive}: {name} has {size} bytes, not a multiple of the record"
                    f" size {RECORD_BYTES}: it is truncated or not in the binary format; download it again"
                )

    def source_files(self) -> list[Path]:
        """Return the batches, or the archive."""
        return self.cifar10_files.files()

    def decode(self, tile: tuple[slice, ...]) -> ArraysByName:
        """Return one tile of all images, all labels, and the md5 of the batches."""
        arrays: ArraysByName = {}
        cells = (slice(None), *tile)
        digest = hashlib.md5(usedforsecurity=False)
        for split, names in BATCH_FILES.items():
            tiles, labels = [], []
            for batch in self.cifar10_files.read_batches(names):
                digest.update(batch)
                for images, classes in decode_batch(batch):
                    tiles.append(images[cells].copy())
                    labels.append(classes)
            arrays[f"{split}/images"], targets = np.concatenate(tiles), np.concatenate(labels)
            arrays[f"{split}/targets"] = targets
            wrong = np.flatnonzero(targets > 9)
            if wrong.size:
                raise DataError(
                    f"{self.cifar10_files.folder_or_archive}: label {targets[wrong[0]]} of {split} sample {wrong[0]} is"
                    " not a class from 0 to 9; the file is damaged, or belongs to CIFAR-100; download the binary"
                    " version of CIFAR-10"
                )
        arrays["content"] = np.frombuffer(digest.digest(), np.uint8)
        return arrays
