"""Decompressed sizes of compressed bytes, determined before a library allocates memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MOST_PACKED = 1032
"""maximal compression ratio of deflate"""
_UNHARMFUL = 1 << 28
"""decompressed size in bytes that is always accepted"""
_STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}  # fmt: skip
_AT_ONCE = 1 << 20  # bytes
_BLOSC_HEADER, _LONGEST_BLOCK = 16, 1 << 17
_ZSTD, _ZSTD_SKIPPED = 0xFD2FB528, 0x184D2A50


def unpacked_size(codec: str, raw: bytes | memoryview, most: int) -> int | None:
    """Return the size after decompression; if it exceeds `most`, any larger number.

    Parameters
    ----------
    codec : str
        'gzip', 'zlib', 'bz2', 'lzma', 'zstd', 'blosc', 'lz4' (of numcodecs) or 'lzf'; for others, None is returned.
    raw : bytes
        If they are recognised as damaged or incomplete, 0 is returned.
    most : int
    """
    try:
        if codec in _STREAMS:
            return _streams_size(_STREAMS[codec], raw, most)
        return _KINDS[codec](raw, most) if codec in _KINDS else None
    except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError, IndexError):
        return 0


def deflate_fits(size: int, most: int) -> bool:
    """Return whether `size` bytes of deflate decompress to at most `most` bytes, or to an always accepted size."""
    return _MOST_PACKED * size <= max(most, _UNHARMFUL)


def _streams_size(make: Callable[[], Any], raw: bytes | memoryview, most: int) -> int:
    """Return the size of consecutive streams of the standard library, decompressed in pieces."""
    size, rest = 0, bytes(raw)
    while True:
        stream = make()
        while not stream.eof and size <= most:
            count = len(stream.decompress(rest, _AT_ONCE))
            rest = getattr(stream, "unconsumed_tail", b"")
            size += count
            if not count and not stream.eof and not rest and getattr(stream, "needs_input", True):
                return 0  # incomplete
        rest = stream.unused_data
        if size > most or not rest:
            return size
        with suppress(zlib.error, OSError, ValueError, lzma.LZMAError):
            following = make()
            following.decompress(rest, 1)
            continue
        return size  # trailing bytes


def _zstd_size(raw: bytes | memoryview, most: int) -> int:
    """Return the size of Zstandard frames; for frames without a size, the maximal size of their blocks."""
    at = size = 0
    while at < len(raw) and size <= most:
        kind = int.from_bytes(raw[at : at + 4], "little")
        if kind & 0xFFFFFFF0 == _ZSTD_SKIPPED:
            at += 8 + int.from_bytes(raw[at + 4 : at + 8], "little")
            continue
        if kind != _ZSTD:
            return 0
        flags = raw[at + 4]
        single, code = flags >> 5 & 1, flags >> 6
        at += 5 + (not single) + (0, 1, 2, 4)[flags & 3]
        count = (single, 2, 4, 8)[code]
        declared = int.from_bytes(raw[at : at + count], "little") + 256 * (code == 1) if count else None
        at, bound, last = at + count, 0, False
        while not last and bound <= most:
            header = int.from_bytes(raw[at : at + 3], "little")
            last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
            at += 3 + (1 if kind == 1 else length)
            bound += length if kind < 2 else _LONGEST_BLOCK
            if at > len(raw):
                return 0
        size += bound if declared is None else declared
        at += 4 * (flags >> 2 & 1)
    return size


def _blosc_size(raw: bytes | memoryview, most: int) -> int:
    whole = len(raw) >= max(_BLOSC_HEADER, int.from_bytes(raw[12:16], "little"))
    return int.from_bytes(raw[4:8], "little") if whole else 0


def _lzf_size(raw: bytes | memoryview, most: int) -> int:
    """Return the size of LZF, the sum over its runs."""
    with suppress(ImportError, RuntimeError):
        import imagecodecs  # many times faster

        return len(imagecodecs.lzf_decode(bytes(raw), out=most + 1))
    at = size = 0
    while at < len(raw) and size <= most:
        control = raw[at]
        if control < 32:
            at, size = at + control + 2, size + control + 1
        else:
            long = control >> 5 == 7
            size += (control >> 5) + 2 + (raw[at + 1] if long else 0)
            at += 2 + long
    return size if at <= len(raw) or size > most else 0


_KINDS: dict[str, Callable[[bytes | memoryview, int], int]] = {
    "zstd": _zstd_size, "blosc": _blosc_size, "lzf": _lzf_size,
    "lz4": lambda raw, most: int.from_bytes(raw[:4], "little"),
}  # fmt: skip
