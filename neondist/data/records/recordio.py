"""RecordIO files, as github.com/wangkuiyi/recordio and its package pyrecordio write them.

A file is a row of chunks: a header of five little-endian uint32 (the magic number 0x01020304, the CRC-32 of the packed
data, the compressor, the length of the packed data, the number of records), then the packed data: for each record its
length, uint32, and its bytes. Compressors: 0 none, 1 snappy (not read), 2 gzip.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ...errors import ConfigError, DataError, OutputError
from ...io.files import REMEDY, Draft, reason
from ...io.regular_file import open_regular
from .base import BadRecord, RecordReader

MAGIC = 0x01020304
_HEADER = struct.Struct("<5I")
_NONE, _SNAPPY, _GZIP = 0, 1, 2
_LARGEST = 1 << 30
"""bytes of a chunk"""
_NPY = b"\x93NUMPY"


class RecordIOWriter:
    """Writer of RecordIO files; the file is renamed to its final name when it is complete.

    Parameters
    ----------
    path : path
    records_per_chunk : int
        Chunks have a checksum and are read whole.
    compressor : {None, 'gzip'}

    Examples
    --------
    >>> with nd.RecordIOWriter("digits.recordio") as file:  # doctest: +SKIP
    ...     file.write(np.append(image.ravel(), label))
    """

    def __init__(self, path: str | Path, records_per_chunk: int = 1, compressor: Literal["gzip"] | None = None) -> None:
        if compressor not in (None, "gzip"):
            raise ConfigError(f"compressor: {compressor!r} is invalid; expected None or 'gzip'")
        self.path, self.records_per_chunk = Path(path), records_per_chunk
        self._compressor, self._records = _NONE if compressor is None else _GZIP, list[bytes]()
        try:
            self._draft = Draft(self.path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({reason(error)}); {REMEDY}") from error

    def write(self, record: Any) -> None:
        """Append a record: bytes, or an array in NumPy's .npy format."""
        if not isinstance(record, bytes):
            buffer = io.BytesIO()
            np.save(buffer, np.asarray(record), allow_pickle=False)
            record = buffer.getvalue()
        self._records.append(record)
        if len(self._records) >= self.records_per_chunk:
            self._flush()

    def close(self) -> None:
        """Complete the file."""
        self._flush()
        self._draft.finish()

    def __enter__(self) -> RecordIOWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        self._draft.discard()

    def _flush(self) -> None:
        if not self._records:
            return
        packed = b"".join(struct.pack("<I", len(record)) + record for record in self._records)
        if self._compressor == _GZIP:
            packed = gzip.compress(packed, mtime=0)
        head = _HEADER.pack(MAGIC, zlib.crc32(packed), self._compressor, len(packed), len(self._records))
        self._draft.file.write(head + packed)
        self._records = []


class RecordIORecords(RecordReader):
    """Records of a RecordIO file: arrays in .npy format, or else arrays of bytes (uint8).

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        try:
            self._file = open_regular(path)
            chunks = self._index()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({reason(error)}); name a RecordIO file") from error
        self._starts = np.array([start for start, _ in chunks], np.int64)
        self._ends = np.cumsum([count for _, count in chunks], dtype=np.int64)
        self._chunk = lru_cache(maxsize=4)(self._read_chunk)
        if not len(self):
            raise DataError(f"{path}: has no records")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers."""
        found = []
        for number in numbers:
            at = int(np.searchsorted(self._ends, number, side="right"))
            try:
                records = self._chunk(at)
            except ValueError as error:
                raise self._bad(number, str(error)) from error
            found.append(self._array(number, records[number - self._first(at)]))
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _first(self, chunk: int) -> int:
        return int(self._ends[chunk - 1]) if chunk else 0

    def _bad(self, number: int, what: str) -> BadRecord:
        return BadRecord(
            number,
            f"{self.path}: record {number}: {what}; rewrite the file, or skip such records with --skip-bad-records",
        )

    def _index(self) -> list[tuple[int, int]]:
        """Return where chunks begin, and how many records each has."""
        chunks, at, records = list[tuple[int, int]](), 0, 0
        size = self._file.seek(0, io.SEEK_END)
        while at < size:
            self._file.seek(at)
            head = self._file.read(_HEADER.size)
            if len(head) < _HEADER.size or _HEADER.unpack(head)[0] != MAGIC:
                what = "no chunk begins at byte" if chunks else "is not a RecordIO file: no chunk begins at byte"
                raise DataError(f"{self.path}: record {records}: {what} {at}; rewrite the file")
            _, _, _, length, count = _HEADER.unpack(head)
            if at + _HEADER.size + length > size:
                raise DataError(f"{self.path}: record {records}: the file ends inside its chunk; rewrite it")
            if count:
                chunks.append((at, count))
            at, records = at + _HEADER.size + length, records + count
        return chunks

    def _read_chunk(self, number: int) -> list[bytes]:
        """Return the records of a chunk; ValueError if it is damaged."""
        start, count = int(self._starts[number]), int(self._ends[number]) - self._first(number)
        self._file.seek(start)
        _, checksum, compressor, length, _ = _HEADER.unpack(self._file.read(_HEADER.size))
        packed = self._file.read(min(length, _LARGEST))
        if zlib.crc32(packed) != checksum:
            raise ValueError(f"bad checksum in the chunk of {count} records at byte {start}")
        data = _unpacked(packed, compressor)
        records, at = list[bytes](), 0
        for _ in range(count):
            if at + 4 > len(data):
                raise ValueError(f"the chunk at byte {start} ends too early")
            (size,) = struct.unpack_from("<I", data, at)
            if at + 4 + size > len(data):
                raise ValueError(f"the chunk at byte {start} ends too early")
            records.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        return records

    def _array(self, number: int, record: bytes) -> np.ndarray:
        if not record.startswith(_NPY):
            return np.frombuffer(record, np.uint8)
        try:
            found: np.ndarray = np.load(io.BytesIO(record), allow_pickle=False)
        except (ValueError, EOFError, SyntaxError) as error:
            raise self._bad(number, f"is not an array in .npy format ({error})") from error
        return found


def _unpacked(packed: bytes, compressor: int) -> bytes:
    if compressor == _NONE:
        return packed
    if compressor == _SNAPPY:
        raise ValueError(
            "is compressed with snappy, which is not supported; write the file with gzip or without compression"
        )
    if compressor != _GZIP:
        raise ValueError(f"has an unknown compressor, {compressor}")
    unpacking = zlib.decompressobj(wbits=31)
    try:
        data = unpacking.decompress(packed, _LARGEST)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed ({error})") from error
    if unpacking.unconsumed_tail:
        raise ValueError(f"has more than {_LARGEST:,} bytes")
    return data
