"""RecordIO files in the format written by github.com/wangkuiyi/recordio and its package pyrecordio.

A file is a sequence of chunks: a header of five little-endian uint32 (the magic number 0x01020304, the CRC-32 of the
packed data, the compressor, the length of the packed data, the number of records), then the packed data: for each
record its length, uint32, and its bytes. Compressors: 0 none, 1 snappy (unsupported), 2 gzip.
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
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ...errors import ConfigError, DataError, OutputError
from ...io.files import WRITE_REMEDY, DraftFile, short_reason
from ...io.regular_file import open_regular
from .base import BadRecordError, RecordReader

MAGIC = 0x01020304
_HEADER = struct.Struct("<5I")
_NO_COMPRESSION, _SNAPPY, _GZIP = 0, 1, 2
_MAX_CHUNK_BYTES = 1 << 30  # maximum size of a chunk, compressed or decompressed
_NPY_MAGIC = b"\x93NUMPY"


class RecordIOWriter:
    """Writer of RecordIO files in the format of pyrecordio, not MXNet; a file gets its final name when complete.

    Parameters
    ----------
    path : path
    records_per_chunk : int
        Number of records per chunk, the unit of checksums and reads.
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
        self._compressor, self._records = _NO_COMPRESSION if compressor is None else _GZIP, list[bytes]()
        try:
            self._draft = DraftFile(self.path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({short_reason(error)}); {WRITE_REMEDY}") from error

    def write(self, record: bytes | ArrayLike) -> None:
        """Append a record: bytes, or an array in NumPy's .npy format."""
        if not isinstance(record, bytes):
            buffer = io.BytesIO()
            np.save(buffer, np.asarray(record), allow_pickle=False)
            record = buffer.getvalue()
        self._records.append(record)
        if len(self._records) >= self.records_per_chunk:
            self._flush()

    def close(self) -> None:
        """Write the remaining records, and rename the file to its final name."""
        self._flush()
        self._draft.finish()

    def __enter__(self) -> RecordIOWriter:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error_type is None:
            self.close()
        self._draft.discard()

    def _flush(self) -> None:
        if not self._records:
            return
        packed = b"".join(struct.pack("<I", len(record)) + record for record in self._records)
        if self._compressor == _GZIP:
            packed = gzip.compress(packed, mtime=0)
        header = _HEADER.pack(MAGIC, zlib.crc32(packed), self._compressor, len(packed), len(self._records))
        self._draft.file.write(header + packed)
        self._records = []


class RecordIORecords(RecordReader):
    """Records of a RecordIO file: arrays in .npy format, otherwise arrays of bytes (uint8)."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        try:
            self._file = open_regular(path)
            chunks = self._index_chunks()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({short_reason(error)}); check its permissions") from error
        self._chunk_offsets = np.array([start for start, _ in chunks], np.int64)
        self._cumulative_counts = np.cumsum([count for _, count in chunks], dtype=np.int64)
        self._cached_chunk = lru_cache(maxsize=4)(self._read_chunk)
        if not len(self):
            raise DataError(f"{path}: has no records; write at least one")

    def __len__(self) -> int:
        return int(self._cumulative_counts[-1]) if len(self._cumulative_counts) else 0

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return records by their numbers."""
        arrays = []
        for number in record_numbers:
            chunk = int(np.searchsorted(self._cumulative_counts, number, side="right"))
            try:
                records = self._cached_chunk(chunk)
            except ValueError as error:
                raise self._bad_record(number, str(error)) from error
            arrays.append(self._decode_record(number, records[number - self._first_record(chunk)]))
        return arrays

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _first_record(self, chunk: int) -> int:
        return int(self._cumulative_counts[chunk - 1]) if chunk else 0

    def _bad_record(self, number: int, problem: str) -> BadRecordError:
        return BadRecordError(
            number, f"{self.path}: record {number}: {problem}, or skip such records with --skip-bad-records"
        )

    def _index_chunks(self) -> list[tuple[int, int]]:
        """Return the offset and the number of records of each chunk."""
        chunks, start, num_records = list[tuple[int, int]](), 0, 0
        file_size = self._file.seek(0, io.SEEK_END)
        while start < file_size:
            self._file.seek(start)
            header = self._file.read(_HEADER.size)
            if len(header) < _HEADER.size or _HEADER.unpack(header)[0] != MAGIC:
                problem = f"record {num_records}" if chunks else "not a RecordIO file"
                raise DataError(f"{self.path}: {problem}: no chunk begins at byte {start}; rewrite the file")
            _, _, _, length, count = _HEADER.unpack(header)
            if start + _HEADER.size + length > file_size:
                raise DataError(f"{self.path}: record {num_records}: the file ends inside its chunk; rewrite the file")
            if count:
                chunks.append((start, count))
            start, num_records = start + _HEADER.size + length, num_records + count
        return chunks

    def _read_chunk(self, chunk: int) -> list[bytes]:
        """Return the records of a chunk; ValueError if it is damaged."""
        start = int(self._chunk_offsets[chunk])
        count = int(self._cumulative_counts[chunk]) - self._first_record(chunk)
        self._file.seek(start)
        _, checksum, compressor, length, _ = _HEADER.unpack(self._file.read(_HEADER.size))
        packed = self._file.read(min(length, _MAX_CHUNK_BYTES))
        if zlib.crc32(packed) != checksum:
            raise ValueError(f"its chunk at byte {start} has a bad checksum; rewrite the file")
        data = _decompress(packed, compressor)
        records, offset = list[bytes](), 0
        for _ in range(count):
            (size,) = struct.unpack_from("<I", data, offset) if offset + 4 <= len(data) else (len(data),)
            if offset + 4 + size > len(data):
                raise ValueError(f"its chunk at byte {start} ends too early; rewrite the file")
            records.append(data[offset + 4 : offset + 4 + size])
            offset += 4 + size
        return records

    def _decode_record(self, number: int, record: bytes) -> np.ndarray:
        if not record.startswith(_NPY_MAGIC):
            return np.frombuffer(record, np.uint8)
        try:
            array: np.ndarray = np.load(io.BytesIO(record), allow_pickle=False)
        except (ValueError, EOFError, SyntaxError) as error:
            raise self._bad_record(number, f"not a valid .npy array ({error}); rewrite the file") from error
        return array


def _decompress(packed: bytes, compressor: int) -> bytes:
    if compressor == _NO_COMPRESSION:
        return packed
    if compressor == _SNAPPY:
        raise ValueError(
            "its chunk is compressed with snappy, which is not supported; rewrite the file with gzip or uncompressed"
        )
    if compressor != _GZIP:
        raise ValueError(f"its chunk has the unknown compressor {compressor}; rewrite the file")
    decompressor = zlib.decompressobj(wbits=31)
    try:
        data = decompressor.decompress(packed, _MAX_CHUNK_BYTES)
    except zlib.error as error:
        raise ValueError(f"its chunk cannot be decompressed ({error}); rewrite the file") from error
    if decompressor.unconsumed_tail:
        raise ValueError(f"its chunk has more than {_MAX_CHUNK_BYTES:,} bytes; rewrite the file in smaller chunks")
    return data
