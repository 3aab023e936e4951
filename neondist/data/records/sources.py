"""Opening of record sources by name."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import DataError
from ...io.files import short_reason
from ...io.hdf5 import HDF5_SIGNATURE
from ...io.regular_file import open_regular
from ..datasets.hdf5 import HDF5Dataset
from .arrays import DatasetSplitRecords, HDF5Records
from .base import ConcatenatedRecords, RecordReader
from .csv_file import CsvRecords
from .recordio import MAGIC, RecordIORecords
from .table import SQLTableRecords


def open_records(source: str, role: str = "training") -> RecordReader:
    """Return the reader of a source.

    Parameters
    ----------
    source : str
        A CSV or RecordIO file, or a folder of them; FILE.h5:ARRAY, or FILE.h5 in the layout of HDF5Dataset; or a table,
        as an SQLAlchemy URL such as sqlite:///FILE.db#TABLE.
    role : {'training', 'evaluation', 'prediction'}
        Selects the split if the source has several.

    Raises
    ------
    DataError, MissingPackageError
        If the source is missing or damaged, or a table is read and SQLAlchemy is not installed.
    """
    if not source.strip():
        raise DataError("the name of the records is empty; specify a CSV, RecordIO or HDF5 file, or a table's URL")
    if "://" in source:
        return SQLTableRecords(source)
    path = Path(os.path.expanduser(source))
    file, _, array = source.rpartition(":")
    if array and not path.exists() and Path(os.path.expanduser(file)).is_file():
        return HDF5Records(Path(os.path.expanduser(file)), array)
    if path.is_dir():
        readers = [_open_file(p, role) for p in sorted(path.iterdir()) if p.is_file() and p.name[0] not in "._"]
        if not readers:
            raise DataError(f"{path}: has no files; specify a folder of CSV or RecordIO files")
        formats = {reader.describe_row(): reader.source for reader in readers if isinstance(reader, CsvRecords)}
        if len(formats) > 1:
            (row_format, file), (other_format, other_file), *_ = formats.items()
            raise DataError(
                f"{path}: {file} has rows of {row_format}, but {other_file} of {other_format}; keep only files with"
                " the same columns in the folder"
            )
        return ConcatenatedRecords(source, readers)
    return _open_file(path, role)


def _open_file(path: Path, role: str) -> RecordReader:
    try:
        with open_regular(path) as file:
            signature = file.read(len(HDF5_SIGNATURE))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({short_reason(error)}); check the path and its permissions. Expected a CSV,"
            " RecordIO or HDF5 file, or a folder of such files"
        ) from error
    if signature == HDF5_SIGNATURE:
        return DatasetSplitRecords(str(path), HDF5Dataset(path), role)
    if signature.startswith(MAGIC.to_bytes(4, "little")) or path.suffix == ".recordio":
        return RecordIORecords(path)
    return CsvRecords(path)
