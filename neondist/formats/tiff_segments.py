"""Decoding of strips and tiles of TIFF files, with checks that a segment has the expected number of cells."""

from __future__ import annotations

from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

_JPEG, _WHOLE_JPEG, _LERC, _LERC_PARAMETERS = (6, 7, 34892, 33007), (7, 33007), 34887, 50674
_BYTES = (5, 8, 32946, 32773, 34925, 34926, 50000)  # LZW, deflate, PackBits, LZMA and Zstandard
_PADDED_BY_DECODER = (2, 3, 4, 22610, 34934)  # fax and JPEG XR, whose decoders make up missing data
_MARGIN = 3  # bytes of padding that a segment may have
_START, _END, _PROBE = b"\xff\xd8", b"\xff\xd9", b"\x55\xaa" * 64


class Segments:
    """Decoder for segments of pages with the same layout.

    Parameters
    ----------
    path : of the file, for messages
    key : tifffile.TiffPage
        A representative page.
    dtype : numpy.dtype
        Of the cells.

    Attributes
    ----------
    chunk : tuple of int
        Cells of a segment, on tifffile's five axes.

    Raises
    ------
    DataError
        If tifffile cannot decompress the segments.
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
            self._plain = copy(key)  # the page, uncompressed; tifffile caches decoders by hash
            self._plain.compression, self._plain.fillorder, self._plain.hash = 1, 1, hash((key.hash, "unpacked"))

    def check(self) -> None:
        """Raise DataError if tifffile cannot decompress the segments."""
        try:
            self._key.decode(None, 0)
        except ValueError as error:
            raise DataError(
                f"{self._path}: uses an unsupported compression ({error}); rewrite it with deflate"
            ) from error

    def decode(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Return the cells of a segment of a page, their position, and their extents inside the image."""
        key = self._key
        if key.compression == _LERC:
            return self._decode_lerc(data, index)
        if key.compression in _JPEG:
            return self._decode_whole_jpeg(data, index, page)
        if key.compression in _BYTES:
            return self._plain.decode(self._decompress(data, index), index)
        tile, corner, extents = key.decode(data, index)
        if key.compression in _PADDED_BY_DECODER and not np.array_equal(tile, key.decode(data + _PROBE, index)[0]):
            raise self._damaged(index, "ends early")
        return self._check_dtype(tile, index), corner, extents

    def _decompress(self, data: bytes, index: int) -> bytes:
        import imagecodecs
        import tifffile

        if self._key.fillorder == 2:
            data = bytes(imagecodecs.bitorder_decode(data))
        unpacked = bytes(tifffile.TIFF.DECOMPRESSORS[self._key.compression](data, out=self._size + _MARGIN + 1))
        if len(unpacked) > self._size + _MARGIN:
            raise self._damaged(index, f"unpacks to more than its {self._size} bytes")
        return unpacked

    def _decode_whole_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Decode a JPEG; it is incomplete if appended bytes change its cells."""
        segment = self._decode_jpeg(data, index, page)
        if self._key.compression in _WHOLE_JPEG and data[:2] == _START and _END not in data[-1024:]:
            start = data.rstrip(b"\xff")
            variants = [self._decode_jpeg(start + suffix + _END, index, page)[0] for suffix in (b"", _PROBE)]
            if not np.array_equal(*variants):
                raise self._damaged(index, "ends early")
        return self._check_dtype(segment[0], index), *segment[1:]

    def _decode_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        import imagecodecs

        key = self._key
        if key.planarconfig == 1:
            return key.decode(data, index, jpegtables=page.jpegtables, jpegheader=key.jpegheader)
        _, corner, extents = key.decode(None, index)  # tifffile assumes three channels in each colour plane
        tile = imagecodecs.jpeg_decode(
            data, bitspersample=key.bitspersample, tables=page.jpegtables, header=key.jpegheader
        )
        return tile[None, ..., None], corner, extents

    def _decode_lerc(self, data: bytes, index: int) -> tuple[Any, Any, Any]:
        """Decode LERC; floating-point cells that are masked in LERC become NaN."""
        import imagecodecs

        key = self._key
        _, corner, extents = key.decode(None, index)
        if second := key.tags[_LERC_PARAMETERS].value[1] if _LERC_PARAMETERS in key.tags else 0:
            limit = 2 * prod(self.chunk) * self._dtype.itemsize + (1 << 16)
            data = bytes((imagecodecs.zlib_decode, imagecodecs.zstd_decode)[second - 1](data, out=limit))
        cells, valid = imagecodecs.lerc_decode(data, masks=True)
        inner = extents[1:]
        if (valid is not None and valid.ndim == 3) or cells.shape == (inner[2], *inner[:2]) != inner:
            cells = np.moveaxis(cells, 0, -1)  # samples are planar if each has its own mask
            valid = valid if valid is None or valid.ndim < 3 else np.moveaxis(valid, 0, -1)
        if cells.size != prod(extents) or cells.shape[:2] != inner[:2]:
            raise self._damaged(index, f"has {list(cells.shape)} cells instead of {list(inner)}")
        cells = self._check_dtype(cells, index).reshape(inner)
        if self._dtype.kind == "f" and valid is not None and not valid.all():
            cells = np.where(valid.reshape(*inner[:2], -1), cells, np.nan).astype(self._dtype)
        return cells.reshape(extents), corner, extents

    def _check_dtype(self, tile: Any, index: int) -> Any:
        """Return the decoded cells; DataError if the type of the image cannot hold theirs."""
        if tile.dtype.itemsize > self._dtype.itemsize:
            raise self._damaged(index, f"has {tile.dtype} cells in an image of {self._dtype}")
        return tile

    def _damaged(self, index: int, problem: str) -> DataError:
        return DataError(f"{self._path}: strip or tile {index} {problem}; restore it from a good copy")
