"""The IDX files of MNIST, plain or gzipped, read in bounded pieces and fully validated.

An IDX file is a big-endian magic number whose last byte is the number of axes, one 32-bit extent per axis, then one
byte per cell (LeCun, Cortes and Burges, "The MNIST database of handwritten digits").
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import DataError
from ...io.regular_file import open_regular

READ_PIECE_BYTES = 1 << 20
REMEDY = "replace the file with a good copy, such as one written by: neondist data mnist --to DIR"


class MaybeGzipStream:
    """Sequential stream of a file's bytes, decompressed if its content (not its name) is gzip; a context manager.

    Raises
    ------
    DataError
        If, on opening or reading, the file is missing, unreadable, or a damaged gzip file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _convert_errors(path):
            self._file = open_regular(path)
            self.is_gzip = self._file.read(2) == b"\x1f\x8b"
            self._file.seek(0)
            self.size_on_disk = os.fstat(self._file.fileno()).st_size
        self._stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=self._file) if self.is_gzip else self._file

    def __enter__(self) -> MaybeGzipStream:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        # errors are translated here, since __exit__ also sees those of other open files
        with _convert_errors(self.path):
            return self._stream.read(count)


def unpacked_md5(path: Path) -> str:
    """Return the md5 of a file's unpacked bytes; DataError if it cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    with MaybeGzipStream(path) as stream:
        while piece := stream.read(READ_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); {REMEDY}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; create it, for instance with: neondist data mnist --to DIR") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be read ({reason}); check that it is a file, and its permissions") from error


LABELS_MAGIC, IMAGES_MAGIC = 2049, 2051
_CONTENTS = {LABELS_MAGIC: "labels", IMAGES_MAGIC: "images"}
# deflate compresses by at most this factor, so a larger declared size is invalid
_MAX_COMPRESSION_RATIO = 1032
_MAX_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class IdxHeader:
    """The first bytes of an IDX file: extents (N,) of labels or (N, H, W) of images."""

    magic: int
    extents: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.extents[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample: () or (H, W)."""
        return self.extents[1:]


class IdxReader:
    """An open IDX file, created by `open_idx` and read once, sequentially, by `read_chunks`."""

    def __init__(self, stream: MaybeGzipStream, magic: int) -> None:
        self.path, self._stream, self._md5 = stream.path, stream, hashlib.md5(usedforsecurity=False)
        self.header = self._read_header(magic)

    @property
    def md5(self) -> str:
        """The md5 of the unpacked bytes read so far: of the whole file once `read_chunks` is exhausted."""
        return self._md5.hexdigest()

    def read_chunks(self, max_samples: int = 1000) -> Iterator[np.ndarray]:
        """Yield samples (n, *sample) uint8 in order, at most `max_samples` at once; DataError for a wrong number."""
        header = self.header
        sample_bytes = prod(header.sample_shape)
        max_samples = max(1, min(max_samples, _MAX_CHUNK_BYTES // sample_bytes))
        for lo in range(0, header.count, max_samples):
            n = min(max_samples, header.count - lo)
            raw = self._read_bytes(n * sample_bytes)
            if len(raw) < n * sample_bytes:
                raise DataError(
                    f"{self.path}: truncated: the header declares {header.count} {_CONTENTS[header.magic]}, but"
                    f" the data end after {lo + len(raw) // sample_bytes}; {REMEDY}"
                )
            yield np.frombuffer(raw, np.uint8).reshape(n, *header.sample_shape)
        if self._stream.read(1):
            raise DataError(
                f"{self.path}: too long: there are bytes after the {header.count} {_CONTENTS[header.magic]} that"
                f" the header declares; {REMEDY}"
            )

    def _read_header(self, magic: int) -> IdxHeader:
        num_axes = magic & 0xFF
        raw = self._read_bytes(4 + 4 * num_axes)
        actual = int.from_bytes(raw[:4], "big")
        if len(raw) >= 4 and actual != magic:
            raise DataError(
                f"{self.path}: not an IDX file of {_CONTENTS[magic]}: magic number {actual}, expected {magic}; {REMEDY}"
            )
        if len(raw) < 4 + 4 * num_axes:
            raise DataError(
                f"{self.path}: truncated: {len(raw)} bytes, but the header alone has {4 + 4 * num_axes}; {REMEDY}"
            )
        header = IdxHeader(magic, struct.unpack(f">{num_axes}I", raw[4:]))
        if 0 in header.extents:
            raise DataError(
                f"{self.path}: the header declares no {_CONTENTS[magic]} (extents {header.extents}); {REMEDY}"
            )
        self._check_size(len(raw) + prod(header.extents), header)
        return header

    def _check_size(self, expected: int, header: IdxHeader) -> None:
        """Compare the size declared by the header with the size on disk, before any data are read."""
        size, is_gzip = self._stream.size_on_disk, self._stream.is_gzip
        if size == expected or (is_gzip and expected <= size * _MAX_COMPRESSION_RATIO):
            return
        fault = "truncated" if is_gzip or size < expected else "too long"
        raise DataError(
            f"{self.path}: {fault}: extents {header.extents} in the header need {expected} bytes{' unpacked' * is_gzip}"
            f", but the file has {size}; {REMEDY}"
        )

    def _read_bytes(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end; memory grows only with bytes actually read."""
        pieces = []
        while count > 0 and (piece := self._stream.read(min(count, READ_PIECE_BYTES))):
            self._md5.update(piece)
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)


@contextmanager
def open_idx(path: Path, magic: int) -> Iterator[IdxReader]:
    """Open an IDX file, plain or gzipped (detected by its content), and check its header.

    Parameters
    ----------
    path : Path
    magic : int
        `LABELS_MAGIC` (2049) or `IMAGES_MAGIC` (2051).

    Raises
    ------
    DataError
        If the file is invalid, on opening or reading; the message names the file, the fault and the remedy.
    """
    with MaybeGzipStream(path) as stream:
        yield IdxReader(stream, magic)


def read_idx_header(path: Path, magic: int) -> IdxHeader:
    """Return the header, checked against the size of the file; no data are read."""
    with open_idx(path, magic) as reader:
        return reader.header
