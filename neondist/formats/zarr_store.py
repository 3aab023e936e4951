"""The files of a Zarr folder that is read: regular ones inside of it."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from typing import Any

from zarr.storage import LocalStore

from ..errors import DataError
from ..io.regular_file import check_regular
from ..memory import require_room, words

_FACTOR, _LEAST = 16, 1 << 20
"""limit of an unpacked chunk, as a multiple of its cells and in bytes: filters store other types"""
_MOST_PACKED, _UNHARMFUL = 1032, 1 << 28
"""deflate cannot pack more bytes into one; bytes that a chunk of it may come to without being unpacked twice"""
_STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}  # fmt: skip


class FolderStore(LocalStore):
    """A folder, whose metadata and chunks are regular files, and not links out of it; else DataError."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.packed, self.most = "", 0

    def expect(self, array: Any) -> None:
        """Refuse from now on chunks that unpack to much more than those of an array."""
        metadata = array.metadata
        names = (
            [str(one.to_dict()["name"]).removeprefix("numcodecs.") for one in metadata.codecs]
            if metadata.zarr_format == 3
            else []
        )
        names += [str(metadata.compressor.codec_id)] if not names and metadata.compressor is not None else []
        self.packed = next((name for name in reversed(names) if name != "crc32c"), "")
        self.most = _FACTOR * prod(array.chunks) * array.dtype.itemsize + _LEAST

    def get_sync(self, key: str, **options: Any) -> Any:
        """Return the bytes of a file, or None if it is not there."""
        self._check(key, options.get("byte_range"))
        return self._bounded(key, super().get_sync(key, **options))

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of a file, or None if it is not there."""
        self._check(key, byte_range)
        return self._bounded(key, await super().get(key, prototype, byte_range))

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
        """Return some bytes of files."""
        ranges = list(key_ranges)
        for key, byte_range in ranges:
            self._check(key, byte_range)
        return await super().get_partial_values(prototype, ranges)

    def _check(self, key: str, byte_range: Any) -> None:
        path = self.root / key
        with suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            check_regular(path, self.root)
            if byte_range is None:
                require_room(path.stat().st_size, str(path), "restore it from a good copy, or write smaller chunks")

    def _bounded(self, key: str, found: Any) -> Any:
        """Return the content of a file; DataError if it is a chunk that unpacks to more than it may."""
        if found is not None and self.packed and not key.endswith((".json", ".zarray", ".zgroup", ".zattrs")):
            size = unpacked_size(self.packed, memoryview(found.as_numpy_array()), self.most)
            if size > self.most:
                raise DataError(
                    f"{self.root / key}: unpacks to more than {words(self.most)}, and its cells are fewer; restore it"
                    " from a good copy"
                )
        return found


def unpacked_size(packed: str, raw: bytes | memoryview, most: int) -> int:
    """Return the size of an unpacked chunk: from its header, or by unpacking it up to one byte more than `most`."""
    if packed == "blosc":
        return int.from_bytes(raw[4:8], "little")
    if packed == "lz4":
        return int.from_bytes(raw[:4], "little")
    if packed == "zstd" and len(raw) > 5:
        flags = raw[4]
        start = 5 + (not flags & 32) + (0, 1, 2, 4)[flags & 3]
        count = (1 if flags & 32 else 0, 2, 4, 8)[flags >> 6]
        return int.from_bytes(raw[start : start + count], "little")
    if packed not in _STREAMS or (packed in ("gzip", "zlib") and _MOST_PACKED * len(raw) <= max(most, _UNHARMFUL)):
        return 0
    try:
        return len(_STREAMS[packed]().decompress(raw, most + 1))
    except (zlib.error, OSError, ValueError, lzma.LZMAError):
        return 0  # the reader tells what is wrong
