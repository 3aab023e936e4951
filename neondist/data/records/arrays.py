"""Records in an array of an HDF5 file, and in a split of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...comm import ProcessGrid
from ...errors import DataError
from ...io.hdf5 import array_names, convert_hdf5_errors, find_object, open_hdf5
from ..base import Dataset, Split
from .base import RecordReader


class HDF5Records(RecordReader):
    """Entries of an array of an HDF5 file along its first axis.

    Parameters
    ----------
    path : path
    name : name of the array
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(f"{path}:{name}")
        self.path = path
        self._file = open_hdf5(path)
        with convert_hdf5_errors(path):
            records = find_object(self._file, name)
            if records is None or not getattr(records, "shape", ()) or records.dtype.kind not in "iufb":
                names = ", ".join(array_names(self._file)) or "none"
                raise DataError(f"{path}: has no numeric array '{name}' with an axis of records; choose from {names}")
            self._records = records

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return entries by their numbers."""
        with convert_hdf5_errors(self.path):
            return [np.asarray(self._records[number]) for number in record_numbers]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class DatasetSplitRecords(RecordReader):
    """Samples of a data set: the stored values of an image, (H, W, C) in row-major order, followed by the target.

    Parameters
    ----------
    source : str
    dataset : Dataset
    role : {'training', 'evaluation', 'prediction'}
        Training: the training split. Evaluation: the validation split, or else the test split. Prediction: the test
        split, or else the validation split.
    """

    def __init__(self, source: str, dataset: Dataset, role: str) -> None:
        super().__init__(source)
        self._dataset = dataset
        dataset.open(ProcessGrid.serial())
        order = {"training": ["train"], "evaluation": ["validation", "test"], "prediction": ["test", "validation"]}
        splits = [dataset.splits[split] for split in order[role] if split in dataset.splits]
        if not splits:
            raise DataError(f"{source}: has no split for {role}; give it a split named {' or '.join(order[role])}")
        self._split: Split = splits[0]

    def __len__(self) -> int:
        return len(self._split)

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return samples by their numbers."""
        index = np.asarray(record_numbers, np.intp)
        images, targets = np.asarray(self._split.tiles[index]), np.asarray(self._split.targets(index))
        return [np.append(x.ravel(), t.ravel()) for x, t in zip(images, targets, strict=True)]

    def close(self) -> None:
        """Close the data set."""
        self._dataset.close()
