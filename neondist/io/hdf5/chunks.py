"""Checks of compressed chunks before HDF5 decompresses them, since it neither limits nor verifies their size.

If a chunk decompresses to less than its size, HDF5 reads the memory behind it, and if to more, its beginning. It
crashes on missing checksums, allocates any size that a filter returns, and leaves memory uninitialised for cells that
were never written and have no fill value.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from math import ceil, prod
from typing import Any

from ...errors import DataError
from ..packed_size import deflate_fits, unpacked_size

_DEFLATE, _SHUFFLE, _FLETCHER32, _SZIP, _SCALEOFFSET = 1, 2, 3, 4, 6
_LZF, _BLOSC, _BZIP2, _LZ4, _ZSTD = 32000, 32001, 307, 32004, 32015
_SUM, _SCALE_HEADER = 4, 21  # bytes
_MARGIN = 64  # bytes that a filter may add

_NEVER_WRITTEN = "was never written, and it has no fill value"


class ChunkCheck:
    """Check of the chunks of an array before they are read, once each.

    Parameters
    ----------
    array : h5py.Dataset
    name : str
        Name of the array, for messages.
    summed : bool
        Whether the cells are verified with checksums: then only the memory requirement is checked.

    Raises
    ------
    DataError
        If the array uses a filter that is not installed.
    """

    def __init__(self, array: Any, name: str, summed: bool = False) -> None:
        self._array, self._name, self._summed = array, name, summed
        properties = array.id.get_create_plist()
        filters = [properties.get_filter(at) for at in range(properties.get_nfilters())] if array.chunks else []
        self._filters = [(int(code), tuple(values)) for code, _, values, _ in filters]
        self._checked = set[tuple[int, ...]]()
        _require_filters(array, name, filters)
        self._unfilled = _is_unfilled(properties)
        if array.chunks:
            self._size = prod(array.chunks) * array.id.get_type().get_size()
            self._end = os.stat(array.file.filename).st_size if os.path.isfile(array.file.filename) else None

    def check(self, cells: Sequence[slice] = ()) -> None:
        """Raise ValueError if a chunk of these cells (default: all) does not have the expected size."""
        if self._unfilled and not self._array.chunks and not self._array.id.get_storage_size():
            raise ValueError(f"{self._name}: {_NEVER_WRITTEN}")
        if not self._array.chunks or not (self._filters or self._unfilled):
            return
        cells = [*cells, *(slice(0, n) for n in self._array.shape[len(cells) :])]
        along = [range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(cells, self._array.chunks, strict=True)]
        for place in product(*along):
            if place not in self._checked:
                self._check_chunk(tuple(at * c for at, c in zip(place, self._array.chunks, strict=True)))
                self._checked.add(place)

    def _check_chunk(self, at: tuple[int, ...]) -> None:
        chunk = self._array.id.get_chunk_info_by_coord(at)
        if chunk.byte_offset is None:
            if self._unfilled:
                raise self._damaged(at, _NEVER_WRITTEN)
            return
        if self._end is not None and chunk.byte_offset + chunk.size > self._end:
            raise self._damaged(at, "lies beyond the end of the file")
        if not self._filters:
            return
        codes = [code for number, (code, _) in enumerate(self._filters) if not chunk.filter_mask >> number & 1]
        if _FLETCHER32 in codes and chunk.size <= _SUM:
            raise self._damaged(at, "is shorter than its checksum")
        if self._summed and (_DEFLATE not in codes or deflate_fits(chunk.size, self._size)):
            return  # checksums detect damage afterwards
        mask, raw = self._array.id.read_direct_chunk(at)
        try:
            size = self._unpacked_size(raw, mask)
        except zlib.error:
            size = 0
        if not size and len(raw) == self._size:
            return  # chunks at the edge may be uncompressed
        if size == 0:
            raise self._damaged(at, "is damaged")
        if size is not None and size != self._size:
            raise self._damaged(at, f"unpacks to {size if size < self._size else 'more'} instead of {self._size} bytes")

    def _unpacked_size(self, raw: bytes, mask: int) -> int | None:
        """Return the decompressed size of a chunk, or any larger than allowed; None if only HDF5 can determine it."""
        filters = [one for number, one in enumerate(self._filters) if not mask >> number & 1 and one[0] != _SHUFFLE]
        while filters:
            code, values = filters.pop()
            if code == _FLETCHER32:
                raw = raw[:-_SUM]
            elif not filters and code in _SIZES:
                return _SIZES[code](raw, values, self._size)
            elif code == _DEFLATE:
                raw = zlib.decompressobj().decompress(raw, self._size + _MARGIN)
            else:
                return None
        return len(raw)

    def _damaged(self, at: tuple[int, ...], problem: str) -> ValueError:
        return ValueError(f"{self._name}: its chunk at {list(at)} {problem}")


def _is_unfilled(properties: Any) -> bool:
    """Return whether HDF5 leaves memory uninitialised for cells that were never written."""
    from h5py import h5d

    time, undefined = properties.get_fill_time(), properties.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
    return time == h5d.FILL_TIME_NEVER or (time == h5d.FILL_TIME_IFSET and undefined)


def _require_filters(array: Any, name: str, filters: Sequence[Any]) -> None:
    from h5py import h5z

    for code, _, _, raw_name in filters:
        if not h5z.filter_avail(code):
            text = raw_name.decode(errors="replace") if isinstance(raw_name, bytes) else str(raw_name)
            raise DataError(
                f"{array.file.filename}: '{name}' is packed with the HDF5 filter {code} ({text[:40]}), which is not"
                " installed; set HDF5_PLUGIN_PATH to a folder that has it, or rewrite the file: h5repack -f GZIP=1 FILE"
                " NEW"
            )


def _size_of_szip(raw: bytes, values: Sequence[int], size: int) -> int | None:
    declared = int.from_bytes(raw[:4], "little")
    if declared == size and len(values) >= 4:
        with suppress(ImportError, RuntimeError):  # HDF5 reports damage that libaec detects
            import imagecodecs

            names = ("options_mask", "pixels_per_block", "bits_per_pixel", "pixels_per_scanline")
            return len(imagecodecs.szip_decode(raw[4:], header=False, out=size, **dict(zip(names, values))))  # noqa: B905
    return declared


def _size_of_scaled(raw: bytes, values: Sequence[int], size: int) -> int | None:
    """Return the size of a chunk of HDF5's scale-offset filter, or 0 if it is truncated."""
    count, bits = values[2] if len(values) > 2 else 0, int.from_bytes(raw[:4], "little")
    return size if len(raw) >= _SCALE_HEADER + ceil(count * bits / 8) else 0


def _size_of(codec: str) -> Callable[[bytes, Sequence[int], int], int | None]:
    return lambda raw, values, size: unpacked_size(codec, raw, size)


_SIZES = {
    _DEFLATE: _size_of("zlib"), _LZF: _size_of("lzf"), _BLOSC: _size_of("blosc"), _BZIP2: _size_of("bz2"),
    _ZSTD: _size_of("zstd"), _LZ4: lambda raw, values, size: int.from_bytes(raw[:8], "big"),
    _SZIP: _size_of_szip, _SCALEOFFSET: _size_of_scaled,
}  # fmt: skip
"""filters whose decompressed size can be determined"""
