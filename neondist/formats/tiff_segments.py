"""Strips and tiles of TIFF files: from packed bytes to cells, and never to fewer or more than a segment has."""

from __future__ import annotations

from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

_JPEG, _WHOLE_JPEG, _LERC, _LERC_PARAMETERS = (6, 7, 34892, 33007), (7, 33007), 34887, 50674
_BYTES = (5, 8, 32946, 32773, 34925, 34926, 50000)  # LZW, deflate, PackBits, LZMA and Zstandard
_FILLED_UP = (2, 3, 4, 22610, 34934)  # fax and JPEG XR, whose decoders make up what is missing
_MARGIN = 3  # bytes that a segment may be filled up with
_BEGIN, _END, _RESERVED = b"\xff\xd8", b"\xff\xd9", b"\x55\xaa" * 64


class Segments:
    """Decoder of the segments of pages that are alike.

    Parameters
    ----------
    path : of the file, for messages
    key : tifffile.TiffPage
        A page that stands for all.
    dtype : numpy.dtype
        Of the cells.

    Attributes
    ----------
    chunk : tuple of int
        Cells of a segment, on tifffile's five axes.

    Raises
    ------
    DataError
        tifffile cannot unpack the segments.
    """

    def __init__(self, path: str | Path, key: Any, dtype: np.dtype) -> None:
        self._path, self._key, self._dtype, self._plain = path, key, dtype, key
        depth, length, width = 1, key.rowsperstrip, key.imagewidth
        if key.is_tiled:
            depth, length, width = key.tiledepth, key.tilelength, key.tilewidth
        self.chunk = (1, depth, min(length, key.shaped[2]) if not key.is_tiled else length, width, key.shaped[4])
        if key.compression in _BYTES:
            bits = key.bitspersample if isinstance(key.bitspersample, int) else 8 * key.dtype.itemsize
            self._size = depth * self.chunk[2] * -(-width * key.shaped[4] * bits // 8)
            self._plain = copy(key)  # the same page with what its segments unpack to, which tifffile tells by its hash
            self._plain.compression, self._plain.fillorder, self._plain.hash = 1, 1, hash((key.hash, "unpacked"))

    def check(self) -> None:
        """Raise DataError if tifffile cannot unpack the segments."""
        try:
            self._key.decode(None, 0)
        except ValueError as error:
            raise DataError(
                f"{self._path}: uses an unsupported compression ({error}); rewrite it with deflate"
            ) from error

    def decode(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Return the cells of a segment of a page, where they begin, and how many of them belong to the image."""
        key = self._key
        if key.compression == _LERC:
            return self._of_lerc(data, index)
        if key.compression in _JPEG:
            return self._of_jpeg(data, index, page)
        if key.compression in _BYTES:
            return self._plain.decode(self._unpacked(data, index), index)
        tile, corner, extents = key.decode(data, index)
        if key.compression in _FILLED_UP and not np.array_equal(tile, key.decode(data + _RESERVED, index)[0]):
            raise self._wrong(index, "ends early")
        return self._fitting(tile, index), corner, extents

    def _unpacked(self, data: bytes, index: int) -> bytes:
        import imagecodecs
        import tifffile

        if self._key.fillorder == 2:
            data = bytes(imagecodecs.bitorder_decode(data))
        found = bytes(tifffile.TIFF.DECOMPRESSORS[self._key.compression](data, out=self._size + _MARGIN + 1))
        if len(found) > self._size + _MARGIN:
            raise self._wrong(index, f"unpacks to more than its {self._size} bytes")
        return found

    def _of_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Return the cells of a JPEG, which is incomplete if what follows it changes them."""
        found = self._from_jpeg(data, index, page)
        if self._key.compression in _WHOLE_JPEG and data[:2] == _BEGIN and _END not in data[-1024:]:
            begun = data.rstrip(b"\xff")
            ends = [self._from_jpeg(begun + rest + _END, index, page)[0] for rest in (b"", _RESERVED)]
            if not np.array_equal(*ends):
                raise self._wrong(index, "ends early")
        return self._fitting(found[0], index), *found[1:]

    def _from_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        import imagecodecs

        key = self._key
        if key.planarconfig == 1:
            return key.decode(data, index, jpegtables=page.jpegtables, jpegheader=key.jpegheader)
        _, corner, extents = key.decode(None, index)  # tifffile takes each plane of colours for one with three channels
        tile = imagecodecs.jpeg_decode(
            data, bitspersample=key.bitspersample, tables=page.jpegtables, header=key.jpegheader
        )
        return tile[None, ..., None], corner, extents

    def _of_lerc(self, data: bytes, index: int) -> tuple[Any, Any, Any]:
        """Return the cells of a segment; of floats, those to which LERC itself notes no value are NaN."""
        import imagecodecs

        key = self._key
        _, corner, extents = key.decode(None, index)
        if second := key.tags[_LERC_PARAMETERS].value[1] if _LERC_PARAMETERS in key.tags else 0:
            most = 2 * prod(self.chunk) * self._dtype.itemsize + (1 << 16)
            data = bytes((imagecodecs.zlib_decode, imagecodecs.zstd_decode)[second - 1](data, out=most))
        cells, valid = imagecodecs.lerc_decode(data, masks=True)
        inner = extents[1:]
        if (valid is not None and valid.ndim == 3) or cells.shape == (inner[2], *inner[:2]) != inner:
            cells = np.moveaxis(cells, 0, -1)  # samples come one after the other where each has its own mask
            valid = valid if valid is None or valid.ndim < 3 else np.moveaxis(valid, 0, -1)
        if cells.size != prod(extents) or cells.shape[:2] != inner[:2]:
            raise self._wrong(index, f"has {list(cells.shape)} cells instead of {list(inner)}")
        cells = self._fitting(cells, index).reshape(inner)
        if self._dtype.kind == "f" and valid is not None and not valid.all():
            cells = np.where(valid.reshape(*inner[:2], -1), cells, np.nan).astype(self._dtype)
        return cells.reshape(extents), corner, extents

    def _fitting(self, tile: Any, index: int) -> Any:
        """Return cells of an image in a segment; DataError if they are of a type that the file's does not hold."""
        if tile.dtype.itemsize > self._dtype.itemsize:
            raise self._wrong(index, f"has {tile.dtype} cells in an image of {self._dtype}")
        return tile

    def _wrong(self, index: int, what: str) -> DataError:
        return DataError(f"{self._path}: strip or tile {index} {what}; restore it from a good copy")
