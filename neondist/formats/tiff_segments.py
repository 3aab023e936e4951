"""Decoding of strips and tiles of TIFF files, with checks that a segment has the expected number of cells."""

from __future__ import annotations

from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

_JPEG_CODECS, _WHOLE_JPEG_CODECS, _LERC_CODEC, _LERC_PARAMETERS_TAG = (6, 7, 34892, 33007), (7, 33007), 34887, 50674
_BYTE_CODECS = (5, 8, 32946, 32773, 34925, 34926, 50000)  # LZW, deflate, PackBits, LZMA and Zstandard
_GREY_CODES = (0, 1)  # MinIsWhite and MinIsBlack
_PADDING_CODECS = (2, 3, 4, 22610, 34934)  # fax and JPEG XR, whose decoders fill in missing data
_MAX_PADDING_BYTES = 3  # bytes of padding that a segment may have
_JPEG_START, _JPEG_END, _PROBE_BYTES = b"\xff\xd8", b"\xff\xd9", b"\x55\xaa" * 64


class SegmentDecoder:
    """Decoder for segments (strips or tiles) of pages with the same layout.

    Parameters
    ----------
    path : path of the file, for messages
    page : tifffile.TiffPage
        A representative page.
    dtype : numpy.dtype
        Type of the cells.

    Attributes
    ----------
    segment_shape : tuple of int
        Extents of a segment along tifffile's five axes.

    Raises
    ------
    DataError
        If LERC is combined with a predictor, or with big-endian cells of several bytes.
    """

    def __init__(self, path: str | Path, page: Any, dtype: np.dtype) -> None:
        self._path, self._keyframe, self._dtype, self._unpacked_page = path, page, dtype, page
        depth, length, width = 1, page.rowsperstrip, page.imagewidth
        if page.is_tiled:
            depth, length, width = page.tiledepth, page.tilelength, page.tilewidth
        length = length if page.is_tiled else min(length, page.shaped[2])
        self.segment_shape = (1, depth, length, width, page.shaped[4])
        if page.compression == _LERC_CODEC and (
            page.predictor != 1 or (page.parent.byteorder == ">" and dtype.itemsize > 1)
        ):
            raise DataError(
                f"{path}: combines LERC with a predictor or with big-endian cells, which different readers decode"
                " differently; use the program that wrote it to rewrite it with deflate"
            )
        if page.compression in _BYTE_CODECS:
            bits = page.bitspersample if isinstance(page.bitspersample, int) else 8 * page.dtype.itemsize
            self._segment_bytes = depth * self.segment_shape[2] * -(-width * page.shaped[4] * bits // 8)
            self._unpacked_page = unpacked = copy(page)  # tifffile caches decoders by hash
            unpacked.compression, unpacked.fillorder, unpacked.hash = 1, 1, hash((page.hash, "unpacked"))

    def require_decodable(self) -> None:
        """Raise DataError if tifffile cannot decompress the segments."""
        try:
            self._keyframe.decode(None, 0)
        except ValueError as error:
            raise DataError(
                f"{self._path}: uses an unsupported compression ({error}); rewrite it with deflate"
            ) from error

    def decode(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Return the cells of a segment of a page, their position, and their extents inside the image."""
        key = self._keyframe
        if key.compression == _LERC_CODEC:
            return self._decode_lerc(data, index)
        if key.compression in _JPEG_CODECS:
            return self._decode_complete_jpeg(data, index, page)
        if key.compression in _BYTE_CODECS:
            return self._unpacked_page.decode(self._decompress(data, index), index)
        tile, corner, extents = key.decode(data, index)
        if key.compression in _PADDING_CODECS and not np.array_equal(tile, key.decode(data + _PROBE_BYTES, index)[0]):
            raise self._damage_error(index, "ends early")
        return self._check_itemsize(tile, index), corner, extents

    def _decompress(self, data: bytes, index: int) -> bytes:
        import imagecodecs
        import tifffile

        if self._keyframe.fillorder == 2:
            data = bytes(imagecodecs.bitorder_decode(data))
        max_bytes = self._segment_bytes + _MAX_PADDING_BYTES
        unpacked = bytes(tifffile.TIFF.DECOMPRESSORS[self._keyframe.compression](data, out=max_bytes + 1))
        if len(unpacked) > max_bytes:
            raise self._damage_error(index, f"unpacks to more than its {self._segment_bytes} bytes")
        return unpacked

    def _decode_complete_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        """Decode a JPEG; DataError if it is incomplete, that is, if appended bytes change its cells."""
        segment = self._decode_jpeg(data, index, page)
        if (
            self._keyframe.compression in _WHOLE_JPEG_CODECS
            and data[:2] == _JPEG_START
            and _JPEG_END not in data[-1024:]
        ):
            head = data.rstrip(b"\xff")
            variants = [self._decode_jpeg(head + suffix + _JPEG_END, index, page)[0] for suffix in (b"", _PROBE_BYTES)]
            if not np.array_equal(*variants):
                raise self._damage_error(index, "ends early")
        return self._check_itemsize(segment[0], index), *segment[1:]

    def _decode_jpeg(self, data: bytes, index: int, page: Any) -> tuple[Any, Any, Any]:
        import imagecodecs

        keyframe = self._keyframe
        is_not_rgb = keyframe.photometric in _GREY_CODES and keyframe.samplesperpixel == 3 and not keyframe.is_jfif
        if keyframe.planarconfig == 1 and not is_not_rgb:
            return keyframe.decode(data, index, jpegtables=page.jpegtables, jpegheader=keyframe.jpegheader)
        _, corner, extents = keyframe.decode(None, index)
        # tifffile assumes three channels in each colour plane, and libjpeg converts three channels that have no marker
        colour_space = "RGB" if keyframe.planarconfig == 1 else None
        tile = imagecodecs.jpeg_decode(
            data,
            bitspersample=keyframe.bitspersample,
            tables=page.jpegtables,
            header=keyframe.jpegheader,
            colorspace=colour_space,
            outcolorspace=colour_space,
        )
        return tile.reshape(1, *tile.shape[:2], -1), corner, extents

    def _decode_lerc(self, data: bytes, index: int) -> tuple[Any, Any, Any]:
        """Decode LERC; floating-point cells that are masked in LERC become NaN."""
        import imagecodecs

        keyframe = self._keyframe
        _, corner, extents = keyframe.decode(None, index)
        if second := keyframe.tags[_LERC_PARAMETERS_TAG].value[1] if _LERC_PARAMETERS_TAG in keyframe.tags else 0:
            max_bytes = 2 * prod(self.segment_shape) * self._dtype.itemsize + (1 << 16)
            data = bytes((imagecodecs.zlib_decode, imagecodecs.zstd_decode)[second - 1](data, out=max_bytes))
        cells, valid_mask = imagecodecs.lerc_decode(data, masks=True)
        shape = extents[1:]
        if (valid_mask is not None and valid_mask.ndim == 3) or cells.shape == (shape[2], *shape[:2]) != shape:
            cells = np.moveaxis(cells, 0, -1)  # samples are planar if each has its own mask
            valid_mask = valid_mask if valid_mask is None or valid_mask.ndim < 3 else np.moveaxis(valid_mask, 0, -1)
        if cells.size != prod(extents) or cells.shape[:2] != shape[:2]:
            raise self._damage_error(index, f"has {list(cells.shape)} cells instead of {list(shape)}")
        cells = self._check_itemsize(cells, index).reshape(shape)
        if self._dtype.kind == "f" and valid_mask is not None and not valid_mask.all():
            cells = np.where(valid_mask.reshape(*shape[:2], -1), cells, np.nan).astype(self._dtype)
        return cells.reshape(extents), corner, extents

    def _check_itemsize(self, tile: Any, index: int) -> Any:
        """Return the tile unchanged; DataError if its items are larger than the image's."""
        if tile.dtype.itemsize > self._dtype.itemsize:
            raise self._damage_error(index, f"has {tile.dtype} cells in an image of {self._dtype}")
        return tile

    def _damage_error(self, index: int, problem: str) -> DataError:
        return DataError(f"{self._path}: strip or tile {index} {problem}; restore it from a good copy")
