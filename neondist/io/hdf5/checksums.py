"""Checksums of the blocks of an array, stored in the same file and verified whenever a block is read.

HDF5's own checksum, Fletcher-32, is 0 for a chunk of zeros, so it accepts chunks zeroed by a power failure, and HDF5
reads data beyond the end of a file as zeros. The array `checksums/NAME` has the CRC-32 of each block; a block is a
chunk clipped to the array. Arrays of other programs have no checksums, and are not verified.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np

from .chunks import ChunkCheck
from .reader import find_object

CHECKSUM_GROUP = "checksums"
_NUM_HASHED_SAMPLES, _NUM_HASHED_CHECKSUMS = 16, 1 << 20
_BATCH_BYTES = 1 << 24  # bytes read and verified per batch
Slices = tuple[slice, ...]


class ChecksumTable:
    """Checksums of an array that is being written.

    Parameters
    ----------
    shape, block : shapes of the array and of a block
    """

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        self.shape, self.block = tuple(shape), tuple(block)
        self.checksums = np.zeros([ceil(n / b) for n, b in zip(shape, block, strict=True)], np.uint32)

    def add(self, cells: np.ndarray, first_sample: int) -> None:
        """Add the checksums of consecutive samples; `first_sample`, the number of the first, must begin a block."""
        for block_index, cut in _iter_blocks(cells.shape, self.block):
            self.checksums[(block_index[0] + first_sample // self.block[0], *block_index[1:])] = checksum(cells[cut])

    def write(self, file: Any, name: str) -> None:
        """Write the checksums of the array `name`."""
        table = file.create_dataset(f"{CHECKSUM_GROUP}/{name}", data=self.checksums, chunks=True, fletcher32=True)
        table.attrs["block"] = self.block


class CheckedArray:
    """Array of an open file; if it has checksums, samples are verified as they are read.

    Parameters
    ----------
    file : h5py.File
    name : str
    tile : slices, optional
        Cells of a sample that `read` returns, by axis; missing axes are whole. Default: all cells.

    Raises
    ------
    ValueError, KeyError
        If the array is missing, or its checksums are invalid.
    """

    def __init__(self, file: Any, name: str, tile: Slices = ()) -> None:
        self.array = find_object(file, name)
        if self.array is None:
            raise KeyError(f"has no array '{name}'")
        self.name, self.shape, self.dtype = name, self.array.shape, self.array.dtype
        table = find_object(file, f"{CHECKSUM_GROUP}/{name}")
        self.block = () if table is None else _block_shape_of(name, self.shape, table)
        self._chunk_check = ChunkCheck(self.array, name, has_checksums=table is not None)
        self._set_tile(tile, table, (0,) * (len(self.shape) - 1))

    def part(self, tile: Slices) -> CheckedArray:
        """Return the same array with another tile, which must lie within the current one."""
        array = copy(self)
        array._set_tile(tile, self._tile_checksums, [cut.start for cut in self._block_aligned_tile])
        return array

    def _set_tile(self, tile: Slices, checksums: Any, checksums_origin: Sequence[int]) -> None:
        """Set the tile and its checksums; `checksums` begins at the cell `checksums_origin` of a sample."""
        self.tile = (*tile, *(slice(0, n) for n in self.shape[1 + len(tile) :]))
        self._block_aligned_tile, self._tile_checksums = self.tile, None
        if self.block:
            axes = list(zip(self.tile, self.block[1:], self.shape[1:], strict=True))
            self._block_aligned_tile = tuple(slice(t.start // b * b, min(n, ceil(t.stop / b) * b)) for t, b, n in axes)
            aligned_axes = zip(self._block_aligned_tile, self.block[1:], checksums_origin, strict=True)
            table_slices = tuple(slice((w.start - f) // b, ceil((w.stop - f) / b)) for w, b, f in aligned_axes)
            self._tile_checksums = checksums[(slice(None), *table_slices)]
            self._tile_blocks = list(_iter_blocks([w.stop - w.start for w in self._block_aligned_tile], self.block[1:]))

    def read(self, first_sample: int, out: np.ndarray) -> None:
        """Fill `out`, (n, *tile), with the tiles of n samples starting at index `first_sample`.

        Raises
        ------
        ValueError
            If a chunk is damaged, or the checksum of a block is wrong.
        """
        if self._tile_checksums is None:
            self._read_unverified(out, (slice(first_sample, first_sample + len(out)), *self.tile))
            return
        # blocks have no cells outside the tile
        if self._block_aligned_tile == self.tile and self.block[0] == 1 and len(out) * out[0].nbytes <= _BATCH_BYTES:
            self._read_unverified(out, (slice(first_sample, first_sample + len(out)), *self.tile))
            for sample, cells in enumerate(out, start=first_sample):
                for block_index, cut in self._tile_blocks:
                    _verify_block_checksum(self.name, cells[cut], self._tile_checksums[(sample, *block_index)], sample)
            return
        for samples, rows in self._iter_sample_and_row_ranges(first_sample, first_sample + len(out)):
            self._read_verified_batch(samples, rows, first_sample, out)

    def _read_unverified(self, out: np.ndarray, cells: Slices) -> None:
        self._chunk_check.check(cells)
        try:
            self.array.read_direct(out, cells)
        except OSError as error:
            raise ValueError(f"{self.name}: cannot be read ({error})") from error

    def _read_verified_batch(self, samples: slice, rows: slice, first_sample: int, out: np.ndarray) -> None:
        """Read and verify whole blocks, and copy the requested cells."""
        cuts = (rows, *self._block_aligned_tile[1:])
        cells = np.empty((samples.stop - samples.start, *(w.stop - w.start for w in cuts)), self.dtype)
        self._read_unverified(cells, (samples, *cuts))
        first_block = samples.start // self.block[0], (rows.start - self._block_aligned_tile[0].start) // self.block[1]
        for (sample_block, row_block, *other_blocks), cut in _iter_blocks(cells.shape, self.block):
            index = sample_block + first_block[0], row_block + first_block[1], *other_blocks
            _verify_block_checksum(self.name, cells[cut], self._tile_checksums[index], samples.start + cut[0].start)  # type: ignore[index]
        # requested samples and rows among those read
        n, m = max(samples.start, first_sample), min(samples.stop, first_sample + len(out))
        top, end = max(rows.start, self.tile[0].start), min(rows.stop, self.tile[0].stop)
        slices = [slice(t.start - w.start, t.stop - w.start) for t, w in zip(self.tile[1:], cuts[1:], strict=True)]
        kept = cells[(slice(n - samples.start, m - samples.start), slice(top - rows.start, end - rows.start), *slices)]
        out[n - first_sample : m - first_sample, top - self.tile[0].start : end - self.tile[0].start] = kept

    def _iter_sample_and_row_ranges(self, first_sample: int, stop_sample: int) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of samples and rows, in whole blocks, each read as a batch."""
        block_samples, block_rows = self.block[:2]
        row_range = self._block_aligned_tile[0]
        row_bytes = max(1, prod(w.stop - w.start for w in self._block_aligned_tile[1:]) * self.dtype.itemsize)
        batch_rows = max(1, _BATCH_BYTES // (row_bytes * block_rows * block_samples)) * block_rows
        sample_bytes = row_bytes * (row_range.stop - row_range.start)
        batch_samples = max(1, _BATCH_BYTES // (sample_bytes * block_samples)) * block_samples
        start = first_sample // block_samples * block_samples
        stop = min(self.shape[0], ceil(stop_sample / block_samples) * block_samples)
        for at in range(start, stop, batch_samples):
            for top in range(row_range.start, row_range.stop, batch_rows):
                yield slice(at, min(at + batch_samples, stop)), slice(top, min(top + batch_rows, row_range.stop))


def read_verified_array(file: Any, name: str) -> np.ndarray:
    """Return an array verified with its checksums; ValueError or KeyError as in `CheckedArray`."""
    array = find_object(file, name)
    if array is None:
        raise KeyError(f"has no array '{name}'")
    table = find_object(file, f"{CHECKSUM_GROUP}/{name}")
    cells = read_array(array, name, table is not None)
    if table is not None:
        checksums = read_array(table, f"{CHECKSUM_GROUP}/{name}")
        for block_index, cut in _iter_blocks(cells.shape, _block_shape_of(name, array.shape, table)):
            _verify_block_checksum(name, cells[cut], checksums[block_index], cut[0].start)
    return cells


def read_array(array: Any, name: str, has_checksums: bool = False) -> np.ndarray:
    """Return an array whose chunks have been checked; ValueError and DataError as in `ChunkCheck`."""
    ChunkCheck(array, name, has_checksums).check()
    return np.asarray(array[()])


def fingerprint_array(file: Any, name: str) -> int:
    """Return a cheap fingerprint of an array: a hash of some of its checksums, or else of some cells."""
    table = find_object(file, f"{CHECKSUM_GROUP}/{name}")
    if table is not None:
        ChunkCheck(table, f"{CHECKSUM_GROUP}/{name}").check()
        return checksum(table[:: 1 + table.size // _NUM_HASHED_CHECKSUMS])
    array = find_object(file, name)
    middle_cells = tuple(slice(n // 2, n // 2 + 1) for n in array.shape[1:-1]) + (slice(None),) * (array.ndim > 1)
    sample_numbers = range(0, array.shape[0], max(1, array.shape[0] // _NUM_HASHED_SAMPLES))
    cuts, chunk_check = [(slice(n, n + 1), *middle_cells) for n in sample_numbers], ChunkCheck(array, name)
    for cut in cuts:
        chunk_check.check([slice(*one.indices(n)) for one, n in zip(cut, array.shape, strict=False)])
    return checksum(np.concatenate([array[cut].ravel() for cut in cuts]))


def _block_shape_of(name: str, shape: tuple[int, ...], table: Any) -> tuple[int, ...]:
    block = np.asarray(table.attrs["block"])
    if block.shape != (len(shape),) or block.dtype.kind not in "iu" or block.min() < 1:
        raise ValueError(f"{name}: its checksums are damaged")
    block_shape = tuple(int(n) for n in block)
    if table.dtype != np.uint32 or table.shape != tuple(ceil(n / b) for n, b in zip(shape, block_shape, strict=True)):
        raise ValueError(f"{name}: its checksums belong to another array; rewrite the file")
    return block_shape


def _verify_block_checksum(name: str, cells: np.ndarray, expected_crc: int, sample: int) -> None:
    if checksum(cells) != expected_crc:
        raise ValueError(f"{name}: wrong checksum in sample {sample}, which has changed since it was written")


def checksum(cells: np.ndarray) -> int:
    """Return the CRC-32 of cells in row-major order."""
    return zlib.crc32(np.ascontiguousarray(cells).data)


def _iter_blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Slices]]:
    """Yield the grid index and the slices of each block of an array."""
    block_ranges = (range(ceil(n / b)) for n, b in zip(shape, block, strict=True))
    for block_index in product(*block_ranges):
        axes = zip(block_index, block, shape, strict=True)
        yield block_index, tuple(slice(i * b, min(n, i * b + b)) for i, b, n in axes)
