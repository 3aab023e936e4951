"""Decompressed sizes of compressed bytes, determined before a library allocates memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MAX_DEFLATE_RATIO = 1032  # maximal compression ratio of deflate
_ALWAYS_ACCEPTED_BYTES = 1 << 28  # decompressed size in bytes that is always accepted
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}  # fmt: skip
_DECOMPRESSION_STEP_BYTES = 1 << 20  # bytes
_BLOSC_HEADER_BYTES, _MAX_ZSTD_BLOCK_BYTES = 16, 1 << 17
_ZSTD_MAGIC, _ZSTD_SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50


def decompressed_size(codec: str, compressed: bytes | memoryview, limit: int) -> int | None:
    """Return the size after decompression (for zstd without sizes, an upper bound), or any size above `limit`.

    Parameters
    ----------
    codec : str
        'gzip', 'zlib', 'bz2', 'lzma', 'zstd', 'blosc', 'lz4' (of numcodecs) or 'lzf'; None is returned for others.
    compressed : bytes
        Compressed bytes; 0 is returned for bytes that are recognised as damaged or incomplete.
    limit : int
    """
    try:
        if codec in _DECOMPRESSORS:
            return _decompressed_streams_size(_DECOMPRESSORS[codec], compressed, limit)
        return _SIZE_FUNCTIONS[codec](compressed, limit) if codec in _SIZE_FUNCTIONS else None
    except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError, IndexError):
        return 0


def deflate_fits_limit(compressed_size: int, limit: int) -> bool:
    """Return whether deflated data of this size cannot exceed `limit`, or an accepted size, when decompressed."""
    return _MAX_DEFLATE_RATIO * compressed_size <= max(limit, _ALWAYS_ACCEPTED_BYTES)


def _decompressed_streams_size(make_decompressor: Callable[[], Any], compressed: bytes | memoryview, limit: int) -> int:
    """Return the size of consecutive streams of the standard library, decompressed in pieces."""
    size, rest = 0, bytes(compressed)
    while True:
        stream = make_decompressor()
        while not stream.eof and size <= limit:
            count = len(stream.decompress(rest, _DECOMPRESSION_STEP_BYTES))
            rest = getattr(stream, "unconsumed_tail", b"")
            size += count
            if not count and not stream.eof and not rest and getattr(stream, "needs_input", True):
                return 0  # incomplete
        rest = stream.unused_data
        if size > limit or not rest:
            return size
        with suppress(zlib.error, OSError, ValueError, lzma.LZMAError):
            following = make_decompressor()
            following.decompress(rest, 1)
            continue
        return size  # trailing bytes


def _max_zstd_size(compressed: bytes | memoryview, limit: int) -> int:
    """Return the size of Zstandard frames; for frames without a size, the maximal size of their blocks."""
    at = size = 0
    while at < len(compressed) and size <= limit:
        kind = int.from_bytes(compressed[at : at + 4], "little")
        if kind & 0xFFFFFFF0 == _ZSTD_SKIPPABLE_MAGIC:
            at += 8 + int.from_bytes(compressed[at + 4 : at + 8], "little")
            continue
        if kind != _ZSTD_MAGIC:
            return 0
        flags = compressed[at + 4]
        single, code = flags >> 5 & 1, flags >> 6
        at += 5 + (not single) + (0, 1, 2, 4)[flags & 3]
        count = (single, 2, 4, 8)[code]
        declared = int.from_bytes(compressed[at : at + count], "little") + 256 * (code == 1) if count else None
        at, bound, last = at + count, 0, False
        while not last and bound <= limit:
            header = int.from_bytes(compressed[at : at + 3], "little")
            last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
            at += 3 + (1 if kind == 1 else length)
            bound += length if kind < 2 else _MAX_ZSTD_BLOCK_BYTES
            if at > len(compressed):
                return 0
        size += bound if declared is None else declared
        at += 4 * (flags >> 2 & 1)
    return size


def _blosc_size(compressed: bytes | memoryview, limit: int) -> int:
    whole = len(compressed) >= max(_BLOSC_HEADER_BYTES, int.from_bytes(compressed[12:16], "little"))
    return int.from_bytes(compressed[4:8], "little") if whole else 0


def _lzf_size(compressed: bytes | memoryview, limit: int) -> int:
    """Return the decompressed size of LZF data, the sum over its runs."""
    with suppress(ImportError, RuntimeError):
        import imagecodecs  # many times faster

        return len(imagecodecs.lzf_decode(bytes(compressed), out=limit + 1))
    at = size = 0
    while at < len(compressed) and size <= limit:
        control = compressed[at]
        if control < 32:
            at, size = at + control + 2, size + control + 1
        else:
            long = control >> 5 == 7
            size += (control >> 5) + 2 + (compressed[at + 1] if long else 0)
            at += 2 + long
    return size if at <= len(compressed) or size > limit else 0


_SIZE_FUNCTIONS: dict[str, Callable[[bytes | memoryview, int], int]] = {
    "zstd": _max_zstd_size, "blosc": _blosc_size, "lzf": _lzf_size,
    "lz4": lambda raw, most: int.from_bytes(raw[:4], "little"),
}  # fmt: skip
