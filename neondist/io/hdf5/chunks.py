"""Checks of compressed chunks before HDF5 decompresses them, since HDF5 neither limits nor verifies their size.

If a chunk decompresses to fewer bytes than expected, HDF5 reads memory beyond them; if to more, it ignores the rest.
HDF5 crashes on missing checksums, allocates any size that a filter returns, and leaves memory uninitialised for cells
that were never written and have no fill value.
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
from ..decompressed_size import decompressed_size, deflate_fits_limit

_DEFLATE, _SHUFFLE, _FLETCHER32, _SZIP, _SCALEOFFSET = 1, 2, 3, 4, 6
_LZF, _BLOSC, _BZIP2, _LZ4, _ZSTD = 32000, 32001, 307, 32004, 32015
_CHECKSUM_BYTES, _SCALE_HEADER_BYTES = 4, 21
_FILTER_MARGIN_BYTES = 64  # bytes that a filter may add

_NEVER_WRITTEN_MESSAGE = "was never written, and it has no fill value"


class ChunkCheck:
    """Check of each chunk of an array before it is first read.

    Parameters
    ----------
    array : h5py.Dataset
    name : str
        Name of the array, for messages.
    has_checksums : bool
        Whether the cells have checksums; if so, decompressed sizes are checked here only where they may exceed 256 MiB.

    Raises
    ------
    DataError
        If the array uses a filter that is not installed.
    """

    def __init__(self, array: Any, name: str, has_checksums: bool = False) -> None:
        self._array, self._name, self._has_checksums = array, name, has_checksums
        properties = array.id.get_create_plist()
        filters = [properties.get_filter(at) for at in range(properties.get_nfilters())] if array.chunks else []
        self._filters = [(int(code), tuple(values)) for code, _, values, _ in filters]
        self._checked_chunks = set[tuple[int, ...]]()
        _require_filters(array, name, filters)
        self._reads_uninitialised = _reads_uninitialised(properties)
        if array.chunks:
            self._chunk_bytes = prod(array.chunks) * array.id.get_type().get_size()
            self._file_bytes = os.stat(array.file.filename).st_size if os.path.isfile(array.file.filename) else None

    def check(self, cells: Sequence[slice] = ()) -> None:
        """Raise ValueError if a chunk of these cells (default: all) is damaged, unwritten or of unexpected size."""
        if self._reads_uninitialised and not self._array.chunks and not self._array.id.get_storage_size():
            raise ValueError(f"{self._name}: {_NEVER_WRITTEN_MESSAGE}")
        if not self._array.chunks or not (self._filters or self._reads_uninitialised):
            return
        cells = [*cells, *(slice(0, n) for n in self._array.shape[len(cells) :])]
        chunk_ranges = [
            range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(cells, self._array.chunks, strict=True)
        ]
        for chunk_index in product(*chunk_ranges):
            if chunk_index not in self._checked_chunks:
                self._check_chunk(tuple(at * c for at, c in zip(chunk_index, self._array.chunks, strict=True)))
                self._checked_chunks.add(chunk_index)

    def _check_chunk(self, offset: tuple[int, ...]) -> None:
        chunk = self._array.id.get_chunk_info_by_coord(offset)
        if chunk.byte_offset is None:
            if self._reads_uninitialised:
                raise self._damage_error(offset, _NEVER_WRITTEN_MESSAGE)
            return
        if self._file_bytes is not None and chunk.byte_offset + chunk.size > self._file_bytes:
            raise self._damage_error(offset, "lies beyond the end of the file")
        if not self._filters:
            return
        filter_codes = [code for number, (code, _) in enumerate(self._filters) if not chunk.filter_mask >> number & 1]
        if _FLETCHER32 in filter_codes and chunk.size <= _CHECKSUM_BYTES:
            raise self._damage_error(offset, "is shorter than its checksum")
        if self._has_checksums and (_DEFLATE not in filter_codes or deflate_fits_limit(chunk.size, self._chunk_bytes)):
            return  # checksums detect damage afterwards
        filter_mask, raw = self._array.id.read_direct_chunk(offset)
        try:
            size = self._decompressed_size(raw, filter_mask)
        except zlib.error:
            size = 0
        if not size and len(raw) == self._chunk_bytes:
            return  # chunks at the edge may be uncompressed
        if size == 0:
            raise self._damage_error(offset, "is damaged")
        if size is not None and size != self._chunk_bytes:
            size_text = f"{size} instead of" if size < self._chunk_bytes else "more than"
            raise self._damage_error(offset, f"unpacks to {size_text} {self._chunk_bytes} bytes")

    def _decompressed_size(self, compressed: bytes, filter_mask: int) -> int | None:
        """Return the decompressed size of a chunk, or some size above the limit; None if only HDF5 can determine it."""
        filters = [
            one for number, one in enumerate(self._filters) if not filter_mask >> number & 1 and one[0] != _SHUFFLE
        ]
        while filters:
            filter_code, filter_values = filters.pop()
            if filter_code == _FLETCHER32:
                compressed = compressed[:-_CHECKSUM_BYTES]
            elif not filters and filter_code in _SIZE_FUNCTIONS:
                return _SIZE_FUNCTIONS[filter_code](compressed, filter_values, self._chunk_bytes)
            elif filter_code == _DEFLATE:
                compressed = zlib.decompressobj().decompress(compressed, self._chunk_bytes + _FILTER_MARGIN_BYTES)
            else:
                return None
        return len(compressed)

    def _damage_error(self, offset: tuple[int, ...], problem: str) -> ValueError:
        return ValueError(f"{self._name}: its chunk at {list(offset)} {problem}")


def _reads_uninitialised(properties: Any) -> bool:
    """Return whether HDF5 leaves memory uninitialised for cells that were never written."""
    from h5py import h5d

    fill_time, is_undefined = properties.get_fill_time(), properties.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
    return fill_time == h5d.FILL_TIME_NEVER or (fill_time == h5d.FILL_TIME_IFSET and is_undefined)


def _require_filters(array: Any, name: str, filters: Sequence[Any]) -> None:
    from h5py import h5z

    for code, _, _, raw_name in filters:
        if not h5z.filter_avail(code):
            label = raw_name.decode(errors="replace") if isinstance(raw_name, bytes) else str(raw_name)
            raise DataError(
                f"{array.file.filename}: '{name}' is packed with the HDF5 filter {code} ({label[:40]}), which is not"
                " installed; set HDF5_PLUGIN_PATH to the filter's folder, or rewrite the file: h5repack -f GZIP=1 FILE"
                " NEW"
            )


def _szip_size(compressed: bytes, filter_values: Sequence[int], chunk_bytes: int) -> int | None:
    declared_size = int.from_bytes(compressed[:4], "little")
    if declared_size == chunk_bytes and len(filter_values) >= 4:
        with suppress(ImportError, RuntimeError):  # HDF5 reports damage that libaec detects
            import imagecodecs

            names = ("options_mask", "pixels_per_block", "bits_per_pixel", "pixels_per_scanline")
            options = dict(zip(names, filter_values, strict=False))
            return len(imagecodecs.szip_decode(compressed[4:], header=False, out=chunk_bytes, **options))
    return declared_size


def _scale_offset_size(compressed: bytes, filter_values: Sequence[int], chunk_bytes: int) -> int | None:
    """Return the size of a chunk of HDF5's scale-offset filter, or 0 if it is truncated."""
    num_values, value_bits = filter_values[2] if len(filter_values) > 2 else 0, int.from_bytes(compressed[:4], "little")
    return chunk_bytes if len(compressed) >= _SCALE_HEADER_BYTES + ceil(num_values * value_bits / 8) else 0


def _size_function(codec: str) -> Callable[[bytes, Sequence[int], int], int | None]:
    return lambda raw, values, size: decompressed_size(codec, raw, size)


_SIZE_FUNCTIONS = {
    _DEFLATE: _size_function("zlib"), _LZF: _size_function("lzf"), _BLOSC: _size_function("blosc"),
    _BZIP2: _size_function("bz2"), _ZSTD: _size_function("zstd"),
    _LZ4: lambda raw, values, size: int.from_bytes(raw[:8], "big"),
    _SZIP: _szip_size, _SCALEOFFSET: _scale_offset_size,
}  # fmt: skip
"""filters whose decompressed size can be determined"""
