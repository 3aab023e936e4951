"""NPY files: one array without metadata."""

from __future__ import annotations

from math import prod
from pathlib import Path
from threading import Lock
from typing import IO, Any, BinaryIO, ClassVar

import numpy as np
from numpy.lib import format as npy

from ..errors import DataError
from ..io.hdf5 import size_and_mtime
from ..io.regular_file import open_regular
from .axes import Cells, guess_axes, squeeze_channels
from .base import TileSource, convert_read_errors
from .in_place import CellLayout, InPlaceSink, read_cells_in_place

_HEADER_LOCK = Lock()
"""NumPy parses headers with `ast`, which is not thread-safe before CPython 3.11.8 and 3.12.2 (gh-106905)"""


class NPYSource(TileSource):
    """Array of a .npy file; its axes, if not given, are guessed from its shape."""

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        with convert_read_errors(path):
            self._file_state, self._file = size_and_mtime(path), open_regular(path)
            try:
                self._cell_layout = _read_cell_layout(path, self._file, axes)
                layout = self._cell_layout
                super().__init__(path, layout.axes, layout.shape, layout.dtype, axes_given=axes is not None)
            except BaseException:
                self._file.close()
                raise

    def _read(self, cells: Cells) -> np.ndarray:
        # not memory-mapped: truncating a mapped file would kill the process
        array = read_cells_in_place(self._file, self.path, self._cell_layout, cells)
        if size_and_mtime(Path(self.path)) != self._file_state:
            raise DataError(f"{self.path}: has changed since it was opened; run the command again")
        return array

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NPYSink(InPlaceSink):
    """New .npy file; if `channels` is False, a channel axis of extent 1 is dropped."""

    default_options: ClassVar[dict[str, Any]] = {"channels": True}

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        axes, shape = squeeze_channels(self.axes, self.shape, self._options)
        with open(draft, "xb") as file:
            npy.write_array_header_1_0(file, {"descr": self.dtype.str, "fortran_order": False, "shape": shape})
            return CellLayout(axes, self.dtype.str, shape, shape, (file.tell(),))


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether the cells are in Fortran order, and the dtype; the cells follow in the stream."""
    version = npy.read_magic(file)
    parse_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    with _HEADER_LOCK:
        return parse_header(file)


def _read_cell_layout(path: Path, file: BinaryIO, axes: str | None) -> CellLayout:
    shape, is_fortran, dtype = read_header(file)
    if dtype.hasobject or dtype.itemsize == 0:
        raise DataError(f"{path}: holds {dtype}, not numbers; give an array of numbers")
    data_start, file_end = file.tell(), file.seek(0, 2)
    if min(shape, default=1) < 0 or data_start + prod(shape) * dtype.itemsize > file_end:
        raise DataError(f"{path}: is truncated: its header specifies an array of {list(shape)}; restore the file")
    axes = axes or guess_axes(shape, path)
    if is_fortran:
        axes, shape = axes[::-1], shape[::-1]
    return CellLayout(axes, dtype.str, shape, shape, (data_start,))
