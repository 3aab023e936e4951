"""From the name of a source to the reader of its records."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import DataError
from ...io.files import reason
from ...io.hdf5 import SIGNATURE
from ...io.regular_file import open_regular
from ..datasets.hdf5 import HDF5Dataset
from .arrays import HDF5Records, SplitRecords
from .base import RecordReader, Sequential
from .csv_file import CsvRecords
from .recordio import MAGIC, RecordIORecords
from .table import TableRecords


def open_records(source: str, role: str = "training") -> RecordReader:
    """Return the reader of a source.

    Parameters
    ----------
    source : str
        A CSV file, a RecordIO file, a folder of those; FILE.h5:ARRAY, or FILE.h5 as HDF5Dataset has it; or a table,
        as an SQLAlchemy URL such as sqlite:///FILE.db#TABLE.
    role : {'training', 'evaluation', 'prediction'}
        Chooses the split, where a source has several.

    Raises
    ------
    DataError
        The source is missing, or damaged.
    """
    if "://" in source:
        return TableRecords(source)
    path = Path(os.path.expanduser(source))
    file, _, array = source.rpartition(":")
    if array and not path.exists() and Path(os.path.expanduser(file)).is_file():
        return HDF5Records(Path(os.path.expanduser(file)), array)
    if path.is_dir():
        parts = [_of_file(one, role) for one in sorted(path.iterdir()) if one.is_file() and one.name[0] != "."]
        if not parts:
            raise DataError(f"{path}: has no files; name a folder of CSV or RecordIO files")
        return Sequential(source, parts)
    return _of_file(path, role)


def _of_file(path: Path, role: str) -> RecordReader:
    try:
        with open_regular(path) as file:
            head = file.read(len(SIGNATURE))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); name a file or folder of records") from error
    if head == SIGNATURE:
        return SplitRecords(str(path), HDF5Dataset(path), role)
    if head.startswith(MAGIC.to_bytes(4, "little")) or path.suffix == ".recordio":
        return RecordIORecords(path)
    return CsvRecords(path)
