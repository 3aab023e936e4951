"""HDF5: one array of a file, its checksums compared where it has some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, DataError
from ..io.hdf5 import CheckedArray, DeferredErrorFile, arrays_in, faults, find, get_text, open_file, put_text, state
from .axes import Cells, bare, guess
from .base import TileSource
from .placed import PlacedSink, Placement
from .tiles import default_chunks

_USUAL = ("images", "predictions")
_AXES = "axes"
_OWN = {
    _AXES,
    "CLASS",
    "NAME",
    "DIMENSION_LIST",
    "DIMENSION_LABELS",
    "REFERENCE_LIST",
    "_Netcdf4Coordinates",
    "_Netcdf4Dimid",
}
"""attributes that say what the axes are, or belong to HDF5"""


class HDF5Source(TileSource):
    """An array of an HDF5 file: the one named, or 'images', or the only one; its attribute 'axes' names its axes."""

    refusal: ClassVar[str | None] = None

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        self._file, self._state = open_file(path, self.refusal), state(path)
        self._whole: CheckedArray | None = None
        try:
            with faults(path):
                self._name = self._called(inside.strip("/")) or self._choose(path)
                array = find(self._file, self._name)
                if not _is_array(array):
                    raise DataError(f"{path}: has no array '{self._name}'; it has {', '.join(self._names()) or 'none'}")
                self._array = array
                named, dtype, metadata = self._describe(array)
                told, name = axes or named, f"{path}:{self._name}" if inside else path
                shape, chunks = self._extents(array), array.chunks
                super().__init__(
                    name, told or guess(shape, name), shape, dtype, chunks, metadata=metadata, named=told is not None
                )
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _called(self, name: str) -> str:
        """Return the name in the file of an array that someone names."""
        return name

    def _names(self) -> list[str]:
        """Return the names of the arrays of the file itself."""
        return [name for name, _ in arrays_in(self._file)]

    def _choose(self, path: Path) -> str:
        names = self._names()
        for name in (*_USUAL, *(names if len(names) == 1 else ())):
            if name in names:
                return name
        choices = ", ".join(f"{path}:{name}" for name in names) or "it has none"
        raise DataError(f"{path}: which data set? {choices}")

    def _describe(self, array: Any) -> tuple[str | None, Any, dict[str, Any]]:
        """Return the axes, if the file names them, the dtype of what is read, and what a sink wants to know."""
        # HDF5's own labels of dimensions are no choice: libhdf5 dies of those in a damaged file
        named = get_text(array.attrs, _AXES) if _AXES in array.attrs else ""
        named = named if named.isascii() and named.isupper() and named.isalpha() else ""
        known = {name: None for name in array.attrs if name not in _OWN}
        return named if len(named) == len({*named}) == array.ndim else None, array.dtype, known

    def _extents(self, array: Any) -> tuple[int, ...]:
        """Return the shape that the array has for readers."""
        return tuple(array.shape)

    def _read(self, cells: Cells) -> np.ndarray:
        path, (first, *tile) = Path(self._file.filename), cells
        out = np.empty([cut.stop - cut.start for cut in cells], self._array.dtype)
        with faults(path):
            if self._whole is None:
                self._whole = self._checked = CheckedArray(self._file, self._name)
            if self._checked.tile != tuple(tile):
                self._checked = self._whole.part(tuple(tile))
            self._checked.read(first.start, out)
        if state(path) != self._state:
            raise DataError(f"{self.path}: has changed since it was opened; run the command again")
        return out


class HDF5Sink(PlacedSink):
    """A new HDF5 file with one array, of which nothing is packed: every rank writes into its chunks itself.

    Parameters
    ----------
    name : str
        Of the array, default 'predictions'.
    channels : bool
        False: of a single channel the array has no axis.
    """

    choices: ClassVar[dict[str, Any]] = {"name": "predictions", "channels": True}

    @property
    def by_channel(self) -> bool:
        """Whether the file has an array for each channel."""
        return False

    def _lay(self, part: Path, like: TileSource | None) -> Placement:
        names = self._arrays()
        self.chunks = self.chunks or default_chunks(self.shape, self.axes, self.dtype)
        axes, shape = bare(self.axes, self.shape, self._options)
        each = self.by_channel
        self.chunks = (*self.chunks[:-1], 1) if each else self.chunks
        chunks, own = self.chunks[: len(shape)], len(shape) - each
        places: dict[tuple[int, ...], int] = {}
        with open(part, "xb+") as file:
            made = DeferredErrorFile(file, libver="v110")
            try:
                arrays = [self._array(made.hdf5, name, shape[:own], chunks[:own]) for name in names]
                self._describe(arrays, like)
                made.hdf5.flush()
                for number, array in enumerate(arrays):
                    channel = (number,) if each else ()

                    def note(chunk: Any, channel: tuple[int, ...] = channel) -> None:
                        places[(*chunk.chunk_offset, *channel)] = chunk.byte_offset

                    array.id.chunk_iter(note)
            finally:
                made.close()
        return Placement(axes, self.dtype.str, shape, chunks, tuple(places[at] for at in sorted(places)))

    def _array(self, file: Any, name: str, shape: Sequence[int], chunks: Sequence[int]) -> Any:
        """Return a new array, whose chunks have their places from the start."""
        import h5py

        facts = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        facts.set_chunk(tuple(chunks))
        facts.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        facts.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        facts.set_obj_track_times(False)  # the same cells make the same file, whenever
        of, space = h5py.h5t.py_create(self.dtype, logical=True), h5py.h5s.create_simple(tuple(shape))
        return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), of, space, facts))

    def _arrays(self) -> list[str]:
        """Return the names of the arrays: one, or one for each channel."""
        name = self._options["name"]
        if not name or "/" in name:
            raise ConfigError(f"{self.path}: invalid name {name!r}; give one without '/', such as predictions")
        return [name]

    def _describe(self, arrays: Sequence[Any], like: TileSource | None) -> None:
        """Write what the axes are, and what is known of them."""
        for array in arrays:
            put_text(array.attrs, _AXES, self.axes[: array.ndim])


def _is_array(found: Any) -> bool:
    import h5py

    return isinstance(found, h5py.Dataset)
