"""Decompressed sizes of compressed bytes, determined before a library allocates memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MAX_DEFLATE_RATIO = 1032  # maximum compression ratio of deflate
_ALWAYS_ACCEPTED_BYTES = 1 << 28  # decompressed size in bytes that is always accepted
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}  # fmt: skip
_DECOMPRESSION_STEP_BYTES = 1 << 20
_BLOSC_HEADER_BYTES, _MAX_ZSTD_BLOCK_BYTES = 16, 1 << 17
_ZSTD_MAGIC, _ZSTD_SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50


def decompressed_size(codec: str, compressed: bytes | memoryview, limit: int) -> int | None:
    """Return the decompressed size (for zstd without sizes, an upper bound), or some size above `limit` if larger.

    Parameters
    ----------
    codec : str
        'gzip', 'zlib', 'bz2', 'lzma', 'zstd', 'blosc', 'lz4' (of numcodecs) or 'lzf'; for other codecs, return None.
    compressed : bytes
        Compressed bytes; if they are recognised as damaged or incomplete, return 0.
    limit : int
    """
    try:
        if codec in _DECOMPRESSORS:
            return _decompressed_streams_size(_DECOMPRESSORS[codec], compressed, limit)
        return _SIZE_FUNCTIONS[codec](compressed, limit) if codec in _SIZE_FUNCTIONS else None
    except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError, IndexError):
        return 0


def deflate_fits_limit(compressed_size: int, limit: int) -> bool:
    """Return whether deflated data of this size cannot inflate beyond `limit`, or the size always accepted."""
    return _MAX_DEFLATE_RATIO * compressed_size <= max(limit, _ALWAYS_ACCEPTED_BYTES)


def _decompressed_streams_size(make_decompressor: Callable[[], Any], compressed: bytes | memoryview, limit: int) -> int:
    """Return the total size of consecutive streams, decompressed in pieces by the standard library."""
    size, remaining = 0, bytes(compressed)
    while True:
        stream = make_decompressor()
        while not stream.eof and size <= limit:
            num_bytes = len(stream.decompress(remaining, _DECOMPRESSION_STEP_BYTES))
            remaining = getattr(stream, "unconsumed_tail", b"")
            size += num_bytes
            if not num_bytes and not stream.eof and not remaining and getattr(stream, "needs_input", True):
                return 0  # incomplete
        remaining = stream.unused_data
        if size > limit or not remaining:
            return size
        with suppress(zlib.error, OSError, ValueError, lzma.LZMAError):
            next_stream = make_decompressor()
            next_stream.decompress(remaining, 1)
            continue
        return size  # trailing bytes


def _max_zstd_size(compressed: bytes | memoryview, limit: int) -> int:
    """Return the size of Zstandard frames; for frames without a size, the maximum size of their blocks."""
    offset = size = 0
    while offset < len(compressed) and size <= limit:
        magic = int.from_bytes(compressed[offset : offset + 4], "little")
        if magic & 0xFFFFFFF0 == _ZSTD_SKIPPABLE_MAGIC:
            offset += 8 + int.from_bytes(compressed[offset + 4 : offset + 8], "little")
            continue
        if magic != _ZSTD_MAGIC:
            return 0
        descriptor = compressed[offset + 4]
        is_single_segment = descriptor >> 5 & 1
        code = descriptor >> 6
        offset += 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
        count = (is_single_segment, 2, 4, 8)[code]
        declared = int.from_bytes(compressed[offset : offset + count], "little") + 256 * (code == 1) if count else None
        offset, max_size, is_last = offset + count, 0, False
        while not is_last and max_size <= limit:
            block_header = int.from_bytes(compressed[offset : offset + 3], "little")
            is_last, block_type = bool(block_header & 1), block_header >> 1 & 3
            length = block_header >> 3
            offset += 3 + (1 if block_type == 1 else length)
            max_size += length if block_type < 2 else _MAX_ZSTD_BLOCK_BYTES
            if offset > len(compressed):
                return 0
        size += max_size if declared is None else declared
        offset += 4 * (descriptor >> 2 & 1)
    return size


def _blosc_size(compressed: bytes | memoryview, limit: int) -> int:
    is_complete = len(compressed) >= max(_BLOSC_HEADER_BYTES, int.from_bytes(compressed[12:16], "little"))
    return int.from_bytes(compressed[4:8], "little") if is_complete else 0


def _lzf_size(compressed: bytes | memoryview, limit: int) -> int:
    """Return the decompressed size of LZF data, the sum over its runs."""
    with suppress(ImportError, RuntimeError):
        import imagecodecs  # many times faster

        return len(imagecodecs.lzf_decode(bytes(compressed), out=limit + 1))
    offset = size = 0
    while offset < len(compressed) and size <= limit:
        control = compressed[offset]
        if control < 32:
            offset, size = offset + control + 2, size + control + 1
        else:
            is_long = control >> 5 == 7
            size += (control >> 5) + 2 + (compressed[offset + 1] if is_long else 0)
            offset += 2 + is_long
    return size if offset <= len(compressed) or size > limit else 0


_SIZE_FUNCTIONS: dict[str, Callable[[bytes | memoryview, int], int]] = {
    "zstd": _max_zstd_size, "blosc": _blosc_size, "lzf": _lzf_size,
    "lz4": lambda raw, most: int.from_bytes(raw[:4], "little"),
}  # fmt: skip
