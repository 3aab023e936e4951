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

PIECE = 1 << 20
REMEDY = "replace it with a good copy, for instance with: neondist data mnist --to DIR"


class UnpackedFile:
    """Sequential stream of a file's bytes, decompressed if its content (not its name) is gzip; a context manager.

    Attributes
    ----------
    packed : bool
    size_on_disk : int

    Raises
    ------
    DataError
        If, on opening or reading, the file is missing, unreadable, or a damaged gzip file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _faults(path):
            self._plain = open_regular(path)
            self.packed = self._plain.read(2) == b"\x1f\x8b"
            self._plain.seek(0)
            self.size_on_disk = os.fstat(self._plain.fileno()).st_size
        self._stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=self._plain) if self.packed else self._plain

    def __enter__(self) -> UnpackedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._plain.close()

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        # errors are translated here, since __exit__ also sees those of other open files
        with _faults(self.path):
            return self._stream.read(count)


def unpacked_md5(path: Path) -> str:
    """Return the md5 of a file's unpacked bytes; DataError if it cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    with UnpackedFile(path) as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); {REMEDY}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {REMEDY}") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be read ({reason}); check that it is a file and its permissions") from error


LABELS, IMAGES = 2049, 2051
_KIND = {LABELS: "labels", IMAGES: "images"}
# deflate compresses by at most this factor, so a larger declared size is false
_MAX_RATIO = 1032
_LARGEST_CHUNK = 1 << 24


@dataclass(frozen=True)
class Header:
    """The first bytes of an IDX file: extents (N,) of labels or (N, H, W) of images."""

    magic: int
    extents: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.extents[0]

    @property
    def sample(self) -> tuple[int, ...]:
        """Shape of one sample: () or (H, W)."""
        return self.extents[1:]


class Reader:
    """An open IDX file, created by `open_idx` and read once, sequentially, by `chunks`."""

    def __init__(self, stream: UnpackedFile, magic: int) -> None:
        self.path, self._stream, self._md5 = stream.path, stream, hashlib.md5(usedforsecurity=False)
        self.header = self._read_header(magic)

    @property
    def md5(self) -> str:
        """The md5 of the unpacked bytes read so far; that of the whole file once `chunks` is exhausted."""
        return self._md5.hexdigest()

    def chunks(self, count: int = 1000) -> Iterator[np.ndarray]:
        """Yield the samples in order, at most `count` at once, (n, *sample) uint8; DataError if too few or too many."""
        header = self.header
        size = prod(header.sample)
        count = max(1, min(count, _LARGEST_CHUNK // size))
        for lo in range(0, header.count, count):
            n = min(count, header.count - lo)
            raw = self._read(n * size)
            if len(raw) < n * size:
                raise DataError(
                    f"{self.path}: truncated: the header declares {header.count} {_KIND[header.magic]}, the data ends"
                    f" after {lo + len(raw) // size}; {REMEDY}"
                )
            yield np.frombuffer(raw, np.uint8).reshape(n, *header.sample)
        if self._stream.read(1):
            raise DataError(
                f"{self.path}: too long: there are bytes after the {header.count} {_KIND[header.magic]} of the"
                f" header; {REMEDY}"
            )

    def _read_header(self, magic: int) -> Header:
        axes = magic & 0xFF
        raw = self._read(4 + 4 * axes)
        actual = int.from_bytes(raw[:4], "big")
        if len(raw) >= 4 and actual != magic:
            raise DataError(
                f"{self.path}: not an IDX file of {_KIND[magic]}: magic number {actual}, expected {magic}; {REMEDY}"
            )
        if len(raw) < 4 + 4 * axes:
            raise DataError(
                f"{self.path}: truncated: {len(raw)} bytes, but the header alone has {4 + 4 * axes}; {REMEDY}"
            )
        header = Header(magic, struct.unpack(f">{axes}I", raw[4:]))
        if 0 in header.extents:
            raise DataError(f"{self.path}: the header declares no {_KIND[magic]} (extents {header.extents}); {REMEDY}")
        self._check_size(len(raw) + prod(header.extents), header)
        return header

    def _check_size(self, expected: int, header: Header) -> None:
        """Compare the size declared by the header with the size on disk, before any data are read."""
        size, packed = self._stream.size_on_disk, self._stream.packed
        if size == expected or (packed and expected <= size * _MAX_RATIO):
            return
        fault = "truncated" if packed or size < expected else "too long"
        raise DataError(
            f"{self.path}: {fault}: extents {header.extents} in the header need {expected} bytes{' unpacked' * packed}"
            f", the file has {size}; {REMEDY}"
        )

    def _read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end; memory grows only with bytes actually read."""
        pieces = []
        while count > 0 and (piece := self._stream.read(min(count, PIECE))):
            self._md5.update(piece)
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)


@contextmanager
def open_idx(path: Path, magic: int) -> Iterator[Reader]:
    """Open an IDX file, plain or gzipped (detected by its content), and check its header.

    Parameters
    ----------
    path : Path
    magic : int
        `LABELS` (2049) or `IMAGES` (2051).

    Raises
    ------
    DataError
        If the file is invalid, on opening or reading; the message names the file, the fault and the remedy.
    """
    with UnpackedFile(path) as stream:
        yield Reader(stream, magic)


def read_header(path: Path, magic: int) -> Header:
    """Return the header, checked against the size of the file; no data are read."""
    with open_idx(path, magic) as reader:
        return reader.header
