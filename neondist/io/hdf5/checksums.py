"""Checksums of the blocks of an array, kept in the same file and compared whenever a block is read.

HDF5's own, Fletcher-32, is 0 for a chunk of zeros, and so finds good what a power cut has zeroed; and what lies beyond
the end of a file it reads as zeros too. The CRC-32 of a block, which is a chunk without what sticks out of the array,
is in the array `checksums/NAME`. Arrays of other programs have none, and are read as they are.
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
_ROOM = 1 << 24  # bytes that are read at once, to be compared
Slices = tuple[slice, ...]


class ChecksumTable:
    """The checksums of an array that is being written.

    Parameters
    ----------
    shape, block : of the array, and of one of its blocks
    """

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        self.shape, self.block = tuple(shape), tuple(block)
        self.sums = np.zeros([ceil(n / b) for n, b in zip(shape, block, strict=True)], np.uint32)

    def add(self, cells: np.ndarray, first: int) -> None:
        """Note the samples from number `first` on, whose first one begins a block, as does the next call's."""
        for place, cut in _blocks(cells.shape, self.block):
            self.sums[(place[0] + first // self.block[0], *place[1:])] = checksum(cells[cut])

    def write(self, file: Any, name: str) -> None:
        """Write the table for the array of this name."""
        made = file.create_dataset(f"{GROUP}/{name}", data=self.sums, chunks=True, fletcher32=True)
        made.attrs["block"] = self.block


class CheckedArray:
    """An array of an open file, of which samples are read, and compared with the checksums that there are.

    Parameters
    ----------
    file : h5py.File
    name : str
    tile : slices, optional
        The cells of a sample that `read` gives, by axis; further axes are whole. Default: all.

    Raises
    ------
    ValueError, KeyError
        The array is missing, or its checksums are not what they should be.
    """

    def __init__(self, file: Any, name: str, tile: Slices = ()) -> None:
        self.array = find(file, name)
        if self.array is None:
            raise KeyError(f"has no array '{name}'")
        self.name, self.shape, self.dtype = name, self.array.shape, self.array.dtype
        table = find(file, f"{GROUP}/{name}")
        self.block = () if table is None else _block_of(name, self.shape, table)
        self._chunks = ChunkCheck(self.array, name, summed=table is not None)
        self._cut(tile, table, (0,) * (len(self.shape) - 1))

    def part(self, tile: Slices) -> CheckedArray:
        """Return the same array, of which other cells of a sample are read, all within the present tile."""
        found = copy(self)
        found._cut(tile, self._sums, [w.start for w in self._wide])
        return found

    def _cut(self, tile: Slices, sums: Any, first: Sequence[int]) -> None:
        """Note the tile and its checksums; those of `sums` begin with the cell `first` of a sample."""
        self.tile = (*tile, *(slice(0, n) for n in self.shape[1 + len(tile) :]))
        self._wide, self._sums = self.tile, None
        if self.block:
            pairs = list(zip(self.tile, self.block[1:], self.shape[1:], strict=True))
            self._wide = tuple(slice(t.start // b * b, min(n, ceil(t.stop / b) * b)) for t, b, n in pairs)
            starts = zip(self._wide, self.block[1:], first, strict=True)
            cut = tuple(slice((w.start - f) // b, ceil((w.stop - f) / b)) for w, b, f in starts)
            self._sums = sums[(slice(None), *cut)]
            self._blocks = list(_blocks([w.stop - w.start for w in self._wide], self.block[1:]))

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill `out`, (n, *tile), with the tiles of n samples from number `first` on.

        Raises
        ------
        ValueError
            A block is not as it was written.
        """
        if self._sums is None:
            self._read_direct(out, (slice(first, first + len(out)), *self.tile))
            return
        if self._wide == self.tile and self.block[0] == 1 and len(out) * out[0].nbytes <= _ROOM:  # nothing beside it
            self._read_direct(out, (slice(first, first + len(out)), *self.tile))
            for sample, cells in enumerate(out, start=first):
                for place, cut in self._blocks:
                    _compare(self.name, cells[cut], self._sums[(sample, *place)], sample)
            return
        for samples, rows in self._portions(first, first + len(out)):
            self._read_portion(samples, rows, first, out)

    def _read_direct(self, out: np.ndarray, cells: Slices) -> None:
        self._chunks.check(cells)
        try:
            self.array.read_direct(out, cells)
        except OSError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _read_portion(self, samples: slice, rows: slice, first: int, out: np.ndarray) -> None:
        """Read whole blocks, compare them, and keep of them what is asked for."""
        wide = (rows, *self._wide[1:])
        cells = np.empty((samples.stop - samples.start, *(w.stop - w.start for w in wide)), self.dtype)
        self._read_direct(cells, (samples, *wide))
        starts = (samples.start, rows.start - self._wide[0].start)
        for place, cut in _blocks(cells.shape, self.block):
            there = (place[0] + starts[0] // self.block[0], place[1] + starts[1] // self.block[1], *place[2:])
            _compare(self.name, cells[cut], self._sums[there], samples.start + cut[0].start)  # type: ignore[index]
        # of the samples and rows that were read, those that are asked for
        n, m = max(samples.start, first), min(samples.stop, first + len(out))
        top, end = max(rows.start, self.tile[0].start), min(rows.stop, self.tile[0].stop)
        inner = [slice(t.start - w.start, t.stop - w.start) for t, w in zip(self.tile[1:], wide[1:], strict=True)]
        kept = cells[(slice(n - samples.start, m - samples.start), slice(top - rows.start, end - rows.start), *inner)]
        out[n - first : m - first, top - self.tile[0].start : end - self.tile[0].start] = kept

    def _portions(self, first: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield samples and rows, in whole blocks, that are read at once."""
        per_sample, per_rows = self.block[:2]
        whole = self._wide[0]
        row = max(1, prod(w.stop - w.start for w in self._wide[1:]) * self.dtype.itemsize)
        rows = max(1, _ROOM // (row * per_rows * per_sample)) * per_rows
        samples = max(1, _ROOM // (row * (whole.stop - whole.start) * per_sample)) * per_sample
        start, stop = first // per_sample * per_sample, min(self.shape[0], ceil(end / per_sample) * per_sample)
        for at in range(start, stop, samples):
            for top in range(whole.start, whole.stop, rows):
                yield slice(at, min(at + samples, stop)), slice(top, min(top + rows, whole.stop))


def read_whole(file: Any, name: str) -> np.ndarray:
    """Return an array, compared with its checksums; ValueError or KeyError as of `CheckedArray`."""
    array = find(file, name)
    if array is None:
        raise KeyError(f"has no array '{name}'")
    table = find(file, f"{GROUP}/{name}")
    cells = read_array(array, name, table is not None)
    if table is not None:
        sums = read_array(table, f"{GROUP}/{name}")
        for place, cut in _blocks(cells.shape, _block_of(name, array.shape, table)):
            _compare(name, cells[cut], sums[place], cut[0].start)
    return cells


def read_array(array: Any, name: str, summed: bool = False) -> np.ndarray:
    """Return an array whose packed chunks have been looked at; ValueError and DataError as of `ChunkCheck`."""
    ChunkCheck(array, name, summed).check()
    return np.asarray(array[()])


def probe(file: Any, name: str) -> int:
    """Return a hash of an array that tells it from others at little cost: of some checksums, or else of some cells."""
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
    found = tuple(int(n) for n in block)
    if table.dtype != np.uint32 or table.shape != tuple(ceil(n / b) for n, b in zip(shape, found, strict=True)):
        raise ValueError(f"{name}: its checksums belong to another array; rewrite the file")
    return found


def _compare(name: str, cells: np.ndarray, expected: int, sample: int) -> None:
    if checksum(cells) != expected:
        raise ValueError(f"{name}: wrong checksum in sample {sample}: it has changed since it was written")


def checksum(cells: np.ndarray) -> int:
    """Return the CRC-32 of cells, the last axis fastest."""
    return zlib.crc32(np.ascontiguousarray(cells).data)


def _blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Slices]]:
    """Yield the place in the grid of blocks, and the cells, of each block of an array."""
    counts = (range(ceil(n / b)) for n, b in zip(shape, block, strict=True))
    for place in product(*counts):
        yield place, tuple(slice(at * b, min(n, at * b + b)) for at, b, n in zip(place, block, shape, strict=True))
