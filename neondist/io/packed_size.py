"""Sizes of packed bytes: what they unpack to, before a library makes room for it."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MOST_PACKED = 1032
"""bytes that deflate packs into one, at most"""
_UNHARMFUL = 1 << 28
"""bytes that unpacking may take, whatever the cells"""
_STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(47), "zlib": lambda: zlib.decompressobj(47),
    "bz2": bz2.BZ2Decompressor, "lzma": lzma.LZMADecompressor,
}  # fmt: skip
_AT_ONCE = 1 << 20  # bytes
_BLOSC_HEADER, _LONGEST_BLOCK = 16, 1 << 17
_ZSTD, _ZSTD_SKIPPED = 0xFD2FB528, 0x184D2A50


def unpacked_size(codec: str, raw: bytes | memoryview, most: int) -> int | None:
    """Return the number of bytes that packed ones unpack to; once it exceeds `most`, some number above that.

    Parameters
    ----------
    codec : str
        'gzip', 'zlib', 'bz2', 'lzma', 'zstd', 'blosc', 'lz4' (of numcodecs) or 'lzf'; of others, None is returned.
    raw : bytes
        0 is returned if they are damaged or incomplete, as far as that shows.
    most : int
    """
    try:
        if codec in _STREAMS:
            return _of_streams(_STREAMS[codec], raw, most)
        return _KINDS[codec](raw, most) if codec in _KINDS else None
    except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError, IndexError):
        return 0


def deflate_fits(size: int, most: int) -> bool:
    """Return whether so many bytes of deflate cannot unpack to more than `most`, or to what does harm."""
    return _MOST_PACKED * size <= max(most, _UNHARMFUL)


def _of_streams(make: Callable[[], Any], raw: bytes | memoryview, most: int) -> int:
    """Return the size of streams of the standard library, unpacked piece by piece; they may follow each other."""
    size, rest = 0, bytes(raw)
    while True:
        stream = make()
        while not stream.eof and size <= most:
            found = len(stream.decompress(rest, _AT_ONCE))
            rest = getattr(stream, "unconsumed_tail", b"")
            size += found
            if not found and not stream.eof and not rest and getattr(stream, "needs_input", True):
                return 0  # incomplete
        rest = stream.unused_data
        if size > most or not rest:
            return size
        with suppress(zlib.error, OSError, ValueError, lzma.LZMAError):
            more = make()
            more.decompress(rest, 1)
            continue
        return size  # bytes that belong to nothing


def _of_zstd(raw: bytes | memoryview, most: int) -> int:
    """Return the size of frames of Zstandard; where one does not tell its own, what its blocks can have at most."""
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
        told = int.from_bytes(raw[at : at + count], "little") + 256 * (code == 1) if count else None
        at, found, last = at + count, 0, False
        while not last and found <= most:
            header = int.from_bytes(raw[at : at + 3], "little")
            last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
            at += 3 + (1 if kind == 1 else length)
            found += length if kind < 2 else _LONGEST_BLOCK
            if at > len(raw):
                return 0
        size += found if told is None else told
        at += 4 * (flags >> 2 & 1)
    return size


def _of_blosc(raw: bytes | memoryview, most: int) -> int:
    whole = len(raw) >= max(_BLOSC_HEADER, int.from_bytes(raw[12:16], "little"))
    return int.from_bytes(raw[4:8], "little") if whole else 0


def _of_lzf(raw: bytes | memoryview, most: int) -> int:
    """Return the size of LZF, of which each run tells its own."""
    with suppress(ImportError, RuntimeError):
        import imagecodecs  # many times as fast

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
    "zstd": _of_zstd, "blosc": _of_blosc, "lzf": _of_lzf, "lz4": lambda raw, most: int.from_bytes(raw[:4], "little"),
}  # fmt: skip
