"""Sinks for uncompressed files that any rank, thread or later process can write in place.

The library of the format creates a file of the final size; the offsets of its blocks are stored in a separate file.
Ranks then write boxes by pwrite, without the library or waiting for each other; a killed process loses no written box.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .axes import Axes, Cells, relative_slices
from .base import TileSource, convert_write_errors
from .draft import DraftSink


@dataclass(frozen=True)
class CellLayout:
    """Positions of the cells of an array in a file.

    Attributes
    ----------
    axes : one letter per axis, in stored order
    dtype : NumPy type string with byte order: '<f4'
    shape : shape of the array, in stored order
    block : shape of a block, row-major; blocks at the end of an axis are padded to full size
    offsets : offsets of the blocks, row-major
    """

    axes: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    offsets: tuple[int, ...]

    def byte_runs(self, cells: Cells) -> Iterator[tuple[Cells, np.ndarray, int]]:
        """Yield (cells relative to the box, offsets of runs, bytes per run) for each block that intersects a box."""
        block_counts = [ceil(n / b) for n, b in zip(self.shape, self.block, strict=True)]
        itemsize = np.dtype(self.dtype).itemsize
        strides = [itemsize * prod(self.block[axis + 1 :]) for axis in range(len(self.block))]
        block_ranges = [range(cut.start // b, ceil(cut.stop / b)) for cut, b in zip(cells, self.block, strict=True)]
        for block_index in product(*block_ranges):
            block_start = [at * b for at, b in zip(block_index, self.block, strict=True)]
            block_cells = [
                slice(max(cut.start, lo), min(cut.stop, lo + b))
                for cut, lo, b in zip(cells, block_start, self.block, strict=True)
            ]
            extents = [cut.stop - cut.start for cut in block_cells]
            first_full_axis = len(block_cells)  # axes from this one on are covered completely
            while first_full_axis > 1 and extents[first_full_axis - 1] == self.block[first_full_axis - 1]:
                first_full_axis -= 1
            offsets = np.array([self.offsets[int(np.ravel_multi_index(block_index, block_counts))]], np.int64)
            for axis, (cut, lo) in enumerate(zip(block_cells, block_start, strict=True)):
                positions = range(cut.start - lo, cut.stop - lo) if axis < first_full_axis - 1 else [cut.start - lo]
                offsets = np.add.outer(offsets, np.array(positions, np.int64) * strides[axis]).ravel()
            yield relative_slices(block_cells, cells), offsets, itemsize * prod(extents[first_full_axis - 1 :])


class InPlaceSink(DraftSink):
    """Sink that lays out the file first, and then writes cells in place."""

    @abstractmethod
    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        """Create the file without its cells, and return their layout; set `chunks` to the chunk shape of the file."""

    def flush(self) -> None:
        """Flush to disk everything that this rank has written."""
        with convert_write_errors(self.path):
            os.fsync(self._descriptor)

    def _create_empty_file(self, like: TileSource | None) -> dict[str, Any]:
        self._require_disk_space()
        layout = self._create_layout(self._temp_path, like)
        end_offset = max(layout.offsets) + prod(layout.block) * np.dtype(layout.dtype).itemsize
        os.truncate(self._temp_path, max(end_offset, self._temp_path.stat().st_size))
        return asdict(layout)

    def _open_created_file(self, open_arguments: dict[str, Any]) -> None:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in open_arguments.items()
        }
        self._cell_layout = CellLayout(**fields)
        self._stored_axes = Axes(self._cell_layout.axes)
        self._descriptor = os.open(self._temp_path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))

    def _close_file(self) -> None:
        os.close(self._descriptor)

    def _write(self, cells: Cells, array: np.ndarray) -> None:
        stored_cells = self._stored_axes.to_file(array)
        for inner, offsets, size in self._cell_layout.byte_runs(self._stored_axes.to_stored_order(cells)):
            values = np.ascontiguousarray(stored_cells[inner], self._cell_layout.dtype)
            unwritten = memoryview(values.reshape(-1).view(np.uint8).data)
            for offset in offsets.tolist():
                run, unwritten = unwritten[:size], unwritten[size:]
                while run:
                    num_written = os.pwrite(self._descriptor, run, offset)
                    run, offset = run[num_written:], offset + num_written


def read_cells_in_place(file: Any, path: str, layout: CellLayout, cells: Cells) -> np.ndarray:
    """Return cells of an open file; DataError if the file has been truncated."""
    out = np.empty([cut.stop - cut.start for cut in cells], layout.dtype)
    for inner, offsets, size in layout.byte_runs(cells):
        buffer = bytearray(size * len(offsets))
        view = memoryview(buffer)
        for offset in offsets.tolist():
            file.seek(offset)
            if file.readinto(view[:size]) != size:
                raise DataError(f"{path}: ends early, or has changed since it was opened; run the command again")
            view = view[size:]
        out[inner] = np.frombuffer(buffer, layout.dtype).reshape(out[inner].shape)
    return out
