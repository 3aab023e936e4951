"""Checksums of the blocks of an array, stored in the same file and verified whenever a block is read.

HDF5's own checksum, Fletcher-32, is 0 for a chunk of zeros, so it accepts chunks zeroed by a power failure, and HDF5
reads data beyond the end of a file as zeros. The array `checksums/NAME` has the CRC-32 of each block, a chunk clipped
to the array. Arrays of other programs have no checksums, and are not verified.
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
from .reader import find

GROUP = "checksums"
_PROBES, _MOST_SUMS = 16, 1 << 20
_ROOM = 1 << 24  # bytes that are read and verified at once
Slices = tuple[slice, ...]


class ChecksumTable:
    """Checksums of an array that is being written.

    Parameters
    ----------
    shape, block : shapes of the array and of a block
    """

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        self.shape, self.block = tuple(shape), tuple(block)
        self.sums = np.zeros([ceil(n / b) for n, b in zip(shape, block, strict=True)], np.uint32)

    def add(self, cells: np.ndarray, first: int) -> None:
        """Add the checksums of samples starting at index `first`, which must begin a block, as in the next call."""
        for place, cut in _blocks(cells.shape, self.block):
            self.sums[(place[0] + first // self.block[0], *place[1:])] = checksum(cells[cut])

    def write(self, file: Any, name: str) -> None:
        """Write the checksums of the array `name`."""
        table = file.create_dataset(f"{GROUP}/{name}", data=self.sums, chunks=True, fletcher32=True)
        table.attrs["block"] = self.block


class CheckedArray:
    """Array of an open file, whose samples are verified as they are read, if it has checksums.

    Parameters
    ----------
    file : h5py.File
    name : str
    tile : slices, optional
        Cells of a sample that `read` returns, by axis; missing axes are whole. Default: all.

    Raises
    ------
    ValueError, KeyError
        If the array is missing, or its checksums are invalid.
    """

    def __init__(self, file: Any, name: str, tile: Slices = ()) -> None:
        self.array = find(file, name)
        if self.array is None:
            raise KeyError(f"has no array '{name}'")
        self.name, self.shape, self.dtype = name, self.array.shape, self.array.dtype
        table = find(file, f"{GROUP}/{name}")
        self.block = () if table is None else _block_of(name, self.shape, table)
        self._chunks = ChunkCheck(self.array, name, summed=table is not None)
        self._set_tile(tile, table, (0,) * (len(self.shape) - 1))

    def part(self, tile: Slices) -> CheckedArray:
        """Return the same array with another tile, which must lie within the current one."""
        array = copy(self)
        array._set_tile(tile, self._sums, [cut.start for cut in self._aligned])
        return array

    def _set_tile(self, tile: Slices, sums: Any, first: Sequence[int]) -> None:
        """Set the tile and its checksums; `sums` begins at the cell `first` of a sample."""
        self.tile = (*tile, *(slice(0, n) for n in self.shape[1 + len(tile) :]))
        self._aligned, self._sums = self.tile, None
        if self.block:
            pairs = list(zip(self.tile, self.block[1:], self.shape[1:], strict=True))
            self._aligned = tuple(slice(t.start // b * b, min(n, ceil(t.stop / b) * b)) for t, b, n in pairs)
            starts = zip(self._aligned, self.block[1:], first, strict=True)
            cut = tuple(slice((w.start - f) // b, ceil((w.stop - f) / b)) for w, b, f in starts)
            self._sums = sums[(slice(None), *cut)]
            self._blocks = list(_blocks([w.stop - w.start for w in self._aligned], self.block[1:]))

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill `out`, (n, *tile), with the tiles of n samples starting at index `first`.

        Raises
        ------
        ValueError
            If the checksum of a block is wrong.
        """
        if self._sums is None:
            self._read_direct(out, (slice(first, first + len(out)), *self.tile))
            return
        if self._aligned == self.tile and self.block[0] == 1 and len(out) * out[0].nbytes <= _ROOM:  # no extra cells
            self._read_direct(out, (slice(first, first + len(out)), *self.tile))
            for sample, cells in enumerate(out, start=first):
                for place, cut in self._blocks:
                    _verify(self.name, cells[cut], self._sums[(sample, *place)], sample)
            return
        for samples, rows in self._batches(first, first + len(out)):
            self._read_batch(samples, rows, first, out)

    def _read_direct(self, out: np.ndarray, cells: Slices) -> None:
        self._chunks.check(cells)
        try:
            self.array.read_direct(out, cells)
        except OSError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _read_batch(self, samples: slice, rows: slice, first: int, out: np.ndarray) -> None:
        """Read and verify whole blocks, and copy the requested cells."""
        cuts = (rows, *self._aligned[1:])
        cells = np.empty((samples.stop - samples.start, *(w.stop - w.start for w in cuts)), self.dtype)
        self._read_direct(cells, (samples, *cuts))
        starts = (samples.start, rows.start - self._aligned[0].start)
        for place, cut in _blocks(cells.shape, self.block):
            index = (place[0] + starts[0] // self.block[0], place[1] + starts[1] // self.block[1], *place[2:])
            _verify(self.name, cells[cut], self._sums[index], samples.start + cut[0].start)  # type: ignore[index]
        # requested samples and rows among those read
        n, m = max(samples.start, first), min(samples.stop, first + len(out))
        top, end = max(rows.start, self.tile[0].start), min(rows.stop, self.tile[0].stop)
        inner = [slice(t.start - w.start, t.stop - w.start) for t, w in zip(self.tile[1:], cuts[1:], strict=True)]
        kept = cells[(slice(n - samples.start, m - samples.start), slice(top - rows.start, end - rows.start), *inner)]
        out[n - first : m - first, top - self.tile[0].start : end - self.tile[0].start] = kept

    def _batches(self, first: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of samples and rows, in whole blocks, that are read at once."""
        per_sample, per_rows = self.block[:2]
        whole = self._aligned[0]
        row = max(1, prod(w.stop - w.start for w in self._aligned[1:]) * self.dtype.itemsize)
        rows = max(1, _ROOM // (row * per_rows * per_sample)) * per_rows
        samples = max(1, _ROOM // (row * (whole.stop - whole.start) * per_sample)) * per_sample
        start, stop = first // per_sample * per_sample, min(self.shape[0], ceil(end / per_sample) * per_sample)
        for at in range(start, stop, samples):
            for top in range(whole.start, whole.stop, rows):
                yield slice(at, min(at + samples, stop)), slice(top, min(top + rows, whole.stop))


def read_whole(file: Any, name: str) -> np.ndarray:
    """Return an array verified with its checksums; ValueError or KeyError as in `CheckedArray`."""
    array = find(file, name)
    if array is None:
        raise KeyError(f"has no array '{name}'")
    table = find(file, f"{GROUP}/{name}")
    cells = read_array(array, name, table is not None)
    if table is not None:
        sums = read_array(table, f"{GROUP}/{name}")
        for place, cut in _blocks(cells.shape, _block_of(name, array.shape, table)):
            _verify(name, cells[cut], sums[place], cut[0].start)
    return cells


def read_array(array: Any, name: str, summed: bool = False) -> np.ndarray:
    """Return an array whose chunks have been checked; ValueError and DataError as in `ChunkCheck`."""
    ChunkCheck(array, name, summed).check()
    return np.asarray(array[()])


def fingerprint(file: Any, name: str) -> int:
    """Return a cheap fingerprint of an array: a hash of some of its checksums, or else of some cells."""
    table = find(file, f"{GROUP}/{name}")
    if table is not None:
        ChunkCheck(table, f"{GROUP}/{name}").check()
        return checksum(table[:: 1 + table.size // _MOST_SUMS])
    array = find(file, name)
    middle = tuple(slice(n // 2, n // 2 + 1) for n in array.shape[1:-1]) + (slice(None),) * (array.ndim > 1)
    places = range(0, array.shape[0], max(1, array.shape[0] // _PROBES))
    cuts, chunks = [(slice(n, n + 1), *middle) for n in places], ChunkCheck(array, name)
    for cut in cuts:
        chunks.check([slice(*one.indices(n)) for one, n in zip(cut, array.shape, strict=False)])
    return checksum(np.concatenate([array[cut].ravel() for cut in cuts]))


def _block_of(name: str, shape: tuple[int, ...], table: Any) -> tuple[int, ...]:
    block = np.asarray(table.attrs["block"])
    if block.shape != (len(shape),) or block.dtype.kind not in "iu" or block.min() < 1:
        raise ValueError(f"{name}: its checksums are damaged")
    sizes = tuple(int(n) for n in block)
    if table.dtype != np.uint32 or table.shape != tuple(ceil(n / b) for n, b in zip(shape, sizes, strict=True)):
        raise ValueError(f"{name}: its checksums belong to another array; rewrite the file")
    return sizes


def _verify(name: str, cells: np.ndarray, expected: int, sample: int) -> None:
    if checksum(cells) != expected:
        raise ValueError(f"{name}: wrong checksum in sample {sample}: it has changed since it was written")


def checksum(cells: np.ndarray) -> int:
    """Return the CRC-32 of cells, the last axis fastest."""
    return zlib.crc32(np.ascontiguousarray(cells).data)


def _blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Slices]]:
    """Yield the grid index and the slices of each block of an array."""
    counts = (range(ceil(n / b)) for n, b in zip(shape, block, strict=True))
    for place in product(*counts):
        yield place, tuple(slice(at * b, min(n, at * b + b)) for at, b, n in zip(place, block, shape, strict=True))
