"""Packed chunks, looked at before HDF5 unpacks them: it neither bounds their size nor compares it with the array's.

Of a chunk that unpacks to less, HDF5 reads what lies behind it in memory, and of one that unpacks to more the
beginning; it dies of a checksum that is not there, and makes room for all that a filter returns. Where nothing was
written and there is no fill value, it leaves memory as it was.
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

_DEFLATE, _SHUFFLE, _FLETCHER32, _SZIP, _SCALEOFFSET, _LZF, _BLOSC, _BZIP2, _LZ4, _ZSTD = (
    *(1, 2, 3, 4, 6),
    *(32000, 32001, 307, 32004, 32015),
)
_SUM, _SCALE_HEADER = 4, 21  # bytes
_MARGIN = 64  # bytes by which a filter may lengthen cells


_NEVER_WRITTEN = "was never written, and it has no fill value"


class ChunkCheck:
    """Check of the chunks of an array that are about to be read, each once.

    Parameters
    ----------
    array : h5py.Dataset
    name : str
        Of the array, for messages.
    summed : bool
        Whether the cells are compared with checksums: then only what would take too much memory is looked for.

    Raises
    ------
    DataError
        The array is packed with a filter that this machine does not have.
    """

    def __init__(self, array: Any, name: str, summed: bool = False) -> None:
        self._array, self._name, self._summed = array, name, summed
        properties = array.id.get_create_plist()
        filters = [properties.get_filter(at) for at in range(properties.get_nfilters())] if array.chunks else []
        self._filters = [(int(code), tuple(values)) for code, _, values, _ in filters]
        self._seen = set[tuple[int, ...]]()
        _require_filters(array, name, filters)
        self._unfilled = _is_unfilled(properties)
        if array.chunks:
            self._size = prod(array.chunks) * array.id.get_type().get_size()
            self._end = os.stat(array.file.filename).st_size if os.path.isfile(array.file.filename) else None

    def check(self, cells: Sequence[slice] = ()) -> None:
        """Raise ValueError if a chunk of these cells, or of all, does not have as many cells as it should."""
        if self._unfilled and not self._array.chunks and not self._array.id.get_storage_size():
            raise ValueError(f"{self._name}: {_NEVER_WRITTEN}")
        if not self._array.chunks or not (self._filters or self._unfilled):
            return
        cells = [*cells, *(slice(0, n) for n in self._array.shape[len(cells) :])]
        along = [range(cut.start // c, ceil(cut.stop / c)) for cut, c in zip(cells, self._array.chunks, strict=True)]
        for place in product(*along):
            if place not in self._seen:
                self._check(tuple(at * c for at, c in zip(place, self._array.chunks, strict=True)))
                self._seen.add(place)

    def _check(self, at: tuple[int, ...]) -> None:
        found = self._array.id.get_chunk_info_by_coord(at)
        if found.byte_offset is None:
            if self._unfilled:
                raise self._wrong(at, _NEVER_WRITTEN)
            return
        if self._end is not None and found.byte_offset + found.size > self._end:
            raise self._wrong(at, "lies beyond the end of the file")
        if not self._filters:
            return
        codes = [code for number, (code, _) in enumerate(self._filters) if not found.filter_mask >> number & 1]
        if _FLETCHER32 in codes and found.size <= _SUM:
            raise self._wrong(at, "is shorter than its checksum")
        if self._summed and (_DEFLATE not in codes or deflate_fits(found.size, self._size)):
            return  # checksums tell afterwards what is wrong
        mask, raw = self._array.id.read_direct_chunk(at)
        try:
            size = self._unpacked_size(raw, mask)
        except zlib.error:
            size = 0
        if not size and len(raw) == self._size:
            return  # it may be one at the edge that is not packed
        if size == 0:
            raise self._wrong(at, "is damaged")
        if size is not None and size != self._size:
            raise self._wrong(at, f"unpacks to {size if size < self._size else 'more'} instead of {self._size} bytes")

    def _unpacked_size(self, raw: bytes, mask: int) -> int | None:
        """Return the size of an unpacked chunk, or one that is too large; None where HDF5 alone can tell."""
        left = [one for number, one in enumerate(self._filters) if not mask >> number & 1 and one[0] != _SHUFFLE]
        while left:
            code, values = left.pop()
            if code == _FLETCHER32:
                raw = raw[:-_SUM]
            elif not left and code in _SIZES:
                return _SIZES[code](raw, values, self._size)
            elif code == _DEFLATE:
                raw = zlib.decompressobj().decompress(raw, self._size + _MARGIN)
            else:
                return None
        return len(raw)

    def _wrong(self, at: tuple[int, ...], what: str) -> ValueError:
        return ValueError(f"{self._name}: its chunk at {list(at)} {what}")


def _is_unfilled(properties: Any) -> bool:
    """Return whether HDF5 leaves alone the memory for cells that were never written."""
    from h5py import h5d

    time, undefined = properties.get_fill_time(), properties.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
    return time == h5d.FILL_TIME_NEVER or (time == h5d.FILL_TIME_IFSET and undefined)


def _require_filters(array: Any, name: str, filters: Sequence[Any]) -> None:
    from h5py import h5z

    for code, _, _, called in filters:
        if not h5z.filter_avail(code):
            text = called.decode(errors="replace") if isinstance(called, bytes) else str(called)
            raise DataError(
                f"{array.file.filename}: '{name}' is packed with the HDF5 filter {code} ({text[:40]}), which is not"
                " installed; set HDF5_PLUGIN_PATH to a folder that has it, or rewrite the file: h5repack -f GZIP=1 FILE"
                " NEW"
            )


def _size_of_szip(raw: bytes, values: Sequence[int], size: int) -> int | None:
    told = int.from_bytes(raw[:4], "little")
    if told == size and len(values) >= 4:
        with suppress(ImportError, RuntimeError):  # damage that libaec notices HDF5 tells of
            import imagecodecs

            names = ("options_mask", "pixels_per_block", "bits_per_pixel", "pixels_per_scanline")
            return len(imagecodecs.szip_decode(raw[4:], header=False, out=size, **dict(zip(names, values))))  # noqa: B905
    return told


def _size_of_scaled(raw: bytes, values: Sequence[int], size: int) -> int | None:
    """Return the size of a chunk that HDF5 has scaled to whole numbers of few bits, or 0 if some are missing."""
    count, bits = values[2] if len(values) > 2 else 0, int.from_bytes(raw[:4], "little")
    return size if len(raw) >= _SCALE_HEADER + ceil(count * bits / 8) else 0


def _size_of(codec: str) -> Callable[[bytes, Sequence[int], int], int | None]:
    return lambda raw, values, size: unpacked_size(codec, raw, size)


_SIZES = {
    _DEFLATE: _size_of("zlib"), _LZF: _size_of("lzf"), _BLOSC: _size_of("blosc"), _BZIP2: _size_of("bz2"),
    _ZSTD: _size_of("zstd"), _LZ4: lambda raw, values, size: int.from_bytes(raw[:8], "big"),
    _SZIP: _size_of_szip, _SCALEOFFSET: _size_of_scaled,
}  # fmt: skip
"""filters whose packed bytes tell what they unpack to"""
