"""Store for reading a Zarr folder, restricted to regular files inside it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from zarr.storage import LocalStore

from ..errors import DataError
from ..io.decompressed_size import decompressed_size, deflate_fits_limit
from ..io.regular_file import open_regular
from ..system.memory import format_bytes, require_memory

_MAX_EXPANSION, _EXPANSION_MARGIN_BYTES = 16, 1 << 20
"""limit of a decompressed chunk: a multiple of its cells' bytes, since filters may change types, plus a constant"""
_METADATA_SUFFIXES = (".json", ".zarray", ".zgroup", ".zattrs")
_MISSING_CHUNK_MARK = 2**64 - 1  # marks a chunk without data in the index of a shard
_OUTSIDE_MESSAGE = "has an index that points outside it"


class FolderStore(LocalStore):
    """Store of a folder; DataError if metadata or chunks are not regular files, or are links out of the folder."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compressor_name, self.max_chunk_bytes = "", 0
        self.shard_index: ShardIndex | None = None

    def limit_chunk_sizes_to(self, array: Any) -> None:
        """From now on, reject chunks that are empty, or that decompress to much more than a chunk of the array."""
        metadata = array.metadata
        codecs = list(metadata.codecs) if metadata.zarr_format == 3 else []
        if shards := [one for one in codecs if hasattr(one, "index_codecs")]:
            codecs = list(shards[0].codecs)
            chunk_counts = [n // c for n, c in zip(array.shards, shards[0].chunk_shape, strict=True)]
            self.shard_index = ShardIndex(shards[0], prod(chunk_counts))
        codec_names = [str(one.to_dict()["name"]).removeprefix("numcodecs.") for one in codecs]
        if metadata.zarr_format == 2 and metadata.compressor is not None:
            codec_names = [str(metadata.compressor.codec_id)]
        self.compressor_name = next((name for name in reversed(codec_names) if name != "crc32c"), "")
        self.max_chunk_bytes = _MAX_EXPANSION * prod(array.chunks) * array.dtype.itemsize + _EXPANSION_MARGIN_BYTES

    def get_sync(self, key: str, **options: Any) -> Any:
        """Return the bytes of a file, or None if it is missing."""
        byte_range = options.get("byte_range")
        self._require_readable_file(key, byte_range)
        return self._check_content(key, super().get_sync(key, **options), byte_range)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of a file, or None if it is missing."""
        self._require_readable_file(key, byte_range)
        return self._check_content(key, await super().get(key, prototype, byte_range), byte_range)

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
        """Return ranges of bytes of files."""
        ranges = list(key_ranges)
        for key, byte_range in ranges:
            self._require_readable_file(key, byte_range)
        return await super().get_partial_values(prototype, ranges)

    def _require_readable_file(self, key: str, byte_range: Any) -> None:
        """Raise DataError unless a file is missing, or is regular, fits in memory and, as a chunk, is not empty."""
        path = self.root / key
        with suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with open_regular(path, self.root) as file:
                size = os.fstat(file.fileno()).st_size
            if byte_range is None:
                require_memory(size, str(path), "restore it from a good copy, or write smaller chunks")
            if not size and self.max_chunk_bytes and not key.endswith(_METADATA_SUFFIXES):
                raise self._damage_error(key, "is empty")

    def _check_content(self, key: str, content: Any, byte_range: Any) -> Any:
        """Return the content of a file; DataError if one of its chunks is truncated, or exceeds the limit."""
        if content is None or not self.max_chunk_bytes or key.endswith(_METADATA_SUFFIXES):
            return content
        raw = memoryview(content.as_numpy_array())
        chunks = [raw]
        if self.shard_index is not None:
            is_index = byte_range is not None and (
                not hasattr(byte_range, "end") or (byte_range.start == 0 and self.shard_index.is_at_start)
            )
            if byte_range is None or is_index:
                chunk_ranges = self.shard_index.chunk_ranges(raw)
                if (chunk_ranges >> np.uint64(62)).any():
                    raise self._damage_error(key, _OUTSIDE_MESSAGE)
                if (chunk_ranges[1:, 0] < chunk_ranges[:-1].sum(axis=1)).any():
                    raise self._damage_error(key, "has an index in which chunks overlap")
                if is_index:
                    return content
                if (chunk_ranges.sum(axis=1) > len(raw)).any() or not chunk_ranges[:, 1].all():
                    raise self._damage_error(key, _OUTSIDE_MESSAGE)
                chunks = [raw[start : start + length] for start, length in chunk_ranges.tolist()]
            elif not 0 < byte_range.end - byte_range.start == len(raw):
                raise self._damage_error(key, _OUTSIDE_MESSAGE)
        for chunk in chunks:
            if self._decompressed_size(chunk) > self.max_chunk_bytes:
                raise self._damage_error(
                    key, f"unpacks to more than {format_bytes(self.max_chunk_bytes)}, the limit for its shape"
                )
        return content

    def _decompressed_size(self, raw: memoryview) -> int:
        if self.compressor_name in ("gzip", "zlib") and deflate_fits_limit(len(raw), self.max_chunk_bytes):
            return 0  # avoids decompressing it twice
        return decompressed_size(self.compressor_name, raw, self.max_chunk_bytes) or 0

    def _damage_error(self, key: str, problem: str) -> DataError:
        return DataError(f"{self.root / key}: {problem}; restore it from a good copy")


class ShardIndex:
    """Index of the chunks in a shard, if it is encoded with the usual codecs.

    Parameters
    ----------
    codec : zarr.codecs.ShardingCodec
    num_chunks : int
        Number of chunks in a shard.

    Attributes
    ----------
    is_at_start : bool
        Whether the index precedes the chunks.
    """

    def __init__(self, codec: Any, num_chunks: int) -> None:
        codecs = [one.to_dict() for one in codec.index_codecs]
        self.is_at_start = codec.index_location.value == "start"
        self._chunk_count, self._checksum_bytes = num_chunks, sum(4 for one in codecs if one["name"] == "crc32c")
        self._has_usual_codecs = {one["name"] for one in codecs} <= {"bytes", "crc32c"}
        is_big_endian = any(one.get("configuration", {}).get("endian") == "big" for one in codecs)
        self._dtype = ">u8" if is_big_endian else "<u8"

    def chunk_ranges(self, raw: memoryview) -> np.ndarray:
        """Return the start and length (n, 2) of each chunk of an index or a shard, in file order.

        The result is empty for unusual codecs, and for an incomplete index, which zarr reports.
        """
        index_bytes = 16 * self._chunk_count
        index_start = 0 if self.is_at_start else len(raw) - index_bytes - self._checksum_bytes
        if not self._has_usual_codecs or index_start < 0 or index_bytes > len(raw):
            return np.empty((0, 2), np.uint64)
        ranges = np.frombuffer(raw[index_start : index_start + index_bytes], self._dtype).reshape(-1, 2)
        ranges = ranges[(ranges != _MISSING_CHUNK_MARK).any(axis=1)]
        return ranges[np.argsort(ranges[:, 0], kind="stable")].astype(np.uint64)
