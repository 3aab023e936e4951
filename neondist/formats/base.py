"""Abstract base classes of sources and sinks, which read and write an array in a file box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import ceil, prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..comm import ProcessGrid, all_or_none
from ..errors import ConfigError, DataError, NotReadyError, OutputError, ShapeError, UserError
from ..io.files import WRITE_REMEDY, short_reason
from ..system.memory import format_bytes, require_memory
from .axes import Axes, BoxLike, Cells, box_to_slices, relative_slices
from .cache import ChunkCache
from .conventions import AuxiliaryVariable
from .packing import Packing

MAX_CHUNK_BYTES = 1 << 30  # limit on bytes decoded at once; chunks usually have a few MiB
AXIS_METADATA_DEFAULTS: dict[str, tuple[Any, ...]] = {"scale": (1.0,), "translation": (0.0,), "units": (None,)}
"""metadata with one value per axis, and their default values, which need not be stored"""


class TileSource(ABC):
    """Reader of boxes of an array in a file; each rank opens its own reader, and the threads of a rank take turns.

    A subclass passes a description of the stored array to the constructor, and implements `_read`.

    Parameters
    ----------
    path : str
        File, as named in error messages.
    axes : str
        A letter for each stored axis: N samples, T time, Z, Y, X, C channels, or other letters, which count as samples.
    shape, dtype : shape and dtype of the stored array
    chunks : sequence of int, optional
        Unit of decoding of the stored array. None: single cells can be read.
    levels : int
        Number of resolution levels.
    metadata : dict, optional
        Metadata of the image by name. 'scale', 'translation' and 'units' are mappings by axis: {'X': 0.5}; units are
        named as in OME-Zarr. Metadata that a sink cannot store are listed in its `lost`.
    axes_given : bool
        Whether the axes are given by the file or the caller; otherwise they are guessed.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype, in native byte order
    axes : str
        A letter for each axis of `shape`, channels last: 'YXC', 'ZYXC', 'NYXC'. C is always present.
    chunks : tuple of int, or None
    levels : int
    bytes_read : int
        Bytes decoded so far; chunks found in `cache` do not count.
    cache : ChunkCache, optional
        Cache of decoded chunks shared by overlapping reads. Default: None.

    Raises
    ------
    DataError, ConfigError
        If the array does not contain numbers, is empty, or has chunks larger than 1 GiB, or if `axes` do not fit it.
    """

    max_chunk_bytes = MAX_CHUNK_BYTES
    cache: ChunkCache | None = None
    packing: Packing | None = None
    """Conversion of stored numbers that the file declares."""
    class_values: Sequence[int] = ()
    """Stored value of each class. If set, `read` returns class numbers, and raises DataError for other values."""
    ignored_value: int | None = None
    """Stored value outside `class_values` that `read` returns unchanged."""

    def __init__(
        self,
        path: str | Path,
        axes: str,
        shape: Sequence[int],
        dtype: Any,
        chunks: Sequence[int] | None = None,
        levels: int = 1,
        metadata: dict[str, Any] | None = None,
        axes_given: bool = True,
    ) -> None:
        self.path, self.levels, self.metadata, self.bytes_read = str(path), levels, metadata or {}, 0
        self.axes_given, self._read_lock = axes_given, Lock()
        if len(axes) != len(shape):
            raise ConfigError(
                f"{path}: axes '{axes}' do not fit an array of shape {list(shape)}; give one letter per"
                " axis, in the stored order"
            )
        self.stored_axes = Axes(axes)
        self.shape, self.axes = self.stored_axes.to_channels_last(shape), self.stored_axes.channels_last_letters
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.chunks: tuple[int, ...] | None = None
        if chunks is not None:
            self.chunks = self.stored_axes.to_channels_last([min(c, n) for c, n in zip(chunks, shape, strict=True)])
        if self.dtype.kind not in "fiub":
            raise DataError(f"{path}: holds {self.dtype}, not numbers; give an array of numbers")
        if min(self.shape) < 1:
            raise DataError(f"{path}: is empty, with shape {list(self.shape)}; give an array with at least one element")
        nbytes = prod(self.chunks or (1,)) * self.dtype.itemsize
        if nbytes > self.max_chunk_bytes:
            raise DataError(
                f"{path}: {format_bytes(nbytes)} must be decoded at once; rewrite the file with chunks of about 1 MB"
            )

    @property
    def files(self) -> list[str]:
        """The files of the image."""
        return [self.path]

    def convert_integers(self) -> None:
        """Read integers as floating-point numbers from now on, with NaN for values that the file declares missing."""
        if self.packing is not None:
            self.packing.convert_integers()
            self.dtype = self.packing.dtype

    def read(self, box: BoxLike) -> np.ndarray:
        """Return the cells of a box as a new array with channels last; concurrent threads take turns.

        Parameters
        ----------
        box : Box, or slices, or (start, stop) pairs
            One slice or pair for each axis of `shape`.

        Raises
        ------
        DataError
            If the file is damaged, has changed, or contains a value that is not in `class_values`.
        ShapeError
            If the box extends beyond the array.
        """
        cells = box_to_slices(box, self.shape, self.path)
        shape = tuple(cut.stop - cut.start for cut in cells)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        require_memory(prod(shape) * self.dtype.itemsize, f"{self.path}: a box of {list(shape)}", "read smaller boxes")
        with convert_read_errors(self.path), self._read_lock:  # threads share the file's position
            if self.cache is None or self.chunks is None:
                array = self._read_channels_last(cells)
            else:
                array = self._read_cached(self.cache, cells, self.chunks)
        return self._number_classes(array) if self.class_values else array

    def _number_classes(self, array: np.ndarray) -> np.ndarray:
        order = np.argsort(self.class_values)
        sorted_values = np.asarray(self.class_values)[order]
        positions = np.searchsorted(sorted_values, array).clip(max=len(sorted_values) - 1)
        is_wrong = sorted_values[positions] != array
        classes: np.ndarray = order[positions]
        if self.ignored_value is not None:
            is_ignored = array == self.ignored_value
            is_wrong, classes = is_wrong & ~is_ignored, np.where(is_ignored, self.ignored_value, classes)
        if is_wrong.any():
            raise DataError(
                f"{self.path}: contains the value {array[is_wrong][0]}, but class_values are {list(self.class_values)};"
                " add it, or correct the mask"
            )
        return classes.astype(self.dtype)

    def _read_channels_last(self, cells: Cells) -> np.ndarray:
        shape = [cut.stop - cut.start for cut in cells]
        array = self.stored_axes.from_file(np.asarray(self._read(self.stored_axes.to_stored_order(cells))))
        if list(array.shape) != shape:
            raise DataError(
                f"{self.path}: a box of {shape} was read as {list(array.shape)}; restore the file from a good copy"
            )
        self.bytes_read += self._decoded_bytes(cells)
        return np.require(array, self.dtype, ["C", "W"])  # copies read-only memory of the file

    def _read_cached(self, cache: ChunkCache, cells: Cells, chunks: Sequence[int]) -> np.ndarray:
        """Return cells from the cache; first read and cache missing chunks, a row of neighbouring chunks at a time."""
        out = np.empty([cut.stop - cut.start for cut in cells], self.dtype)
        spans = [_chunk_overlaps(cut, c, n) for cut, c, n in zip(cells, chunks, self.shape, strict=True)]
        longest_axis = max(range(len(spans)), key=lambda axis: len(spans[axis]))
        for line in product(*spans[:longest_axis], spans[longest_axis][:1], *spans[longest_axis + 1 :]):
            missing = []
            for span in spans[longest_axis]:
                chunk, in_chunk, in_box = zip(*line[:longest_axis], span, *line[longest_axis + 1 :], strict=True)
                cached = cache.get((self.path, self.shape, *(cut.start for cut in chunk)))
                if cached is None:
                    missing.append((chunk, in_chunk, in_box))
                else:
                    out[in_box] = cached[in_chunk]
            if missing:
                union = tuple(slice(a.start, b.stop) for a, b in zip(missing[0][0], missing[-1][0], strict=True))
                decoded = self._read_channels_last(union)
                for chunk, in_chunk, in_box in missing:
                    cached = decoded[relative_slices(chunk, union)].copy()
                    cache.put((self.path, self.shape, *(cut.start for cut in chunk)), cached)
                    out[in_box] = cached[in_chunk]
        return out

    def chunks_of_box(self, box: BoxLike) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the first cell and the decoded bytes of each chunk that contains cells of a box."""
        cells = box_to_slices(box, self.shape, self.path)
        chunks = self.chunks or self.shape
        spans = [_chunk_overlaps(cut, c, n) for cut, c, n in zip(cells, chunks, self.shape, strict=True)]
        for chunk in product(*([whole for whole, *_ in span] for span in spans)):
            yield tuple(cut.start for cut in chunk), prod(cut.stop - cut.start for cut in chunk) * self.dtype.itemsize

    @abstractmethod
    def _read(self, cells: Cells) -> np.ndarray:
        """Return cells in stored order."""

    def _unpack(self, raw: np.ndarray) -> np.ndarray:
        return raw if self.packing is None else self.packing.decode(raw)

    def affine(self) -> np.ndarray | None:
        """Return the 4 x 4 affine from the indices (x, y, z) of a cell to its position; None if the file has none."""
        return None

    def metadata_names(self) -> list[str]:
        """Return the names of the image's metadata."""
        return list(self.metadata)

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the coordinates and other variables of the array, and the names of those that cannot be read."""
        return [], []

    def array_attributes(self) -> dict[str, Any]:
        """Return the attributes of the array, if its format has any: text as str, numbers as arrays."""
        return {}

    def close(self) -> None:  # noqa: B027 - optional
        """Close the file."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decoded_bytes(self, cells: Cells) -> int:
        bounds = [(cut.start, cut.stop) for cut in cells]
        if self.chunks is not None:
            axes = zip(bounds, self.chunks, self.shape, strict=True)
            bounds = [(lo // c * c, min(n, ceil(hi / c) * c)) for (lo, hi), c, n in axes]
        return prod(hi - lo for lo, hi in bounds) * self.dtype.itemsize


class TileSink(ABC):
    """Writer of an array to a file: ranks write disjoint boxes, and `commit` gives the file its final name.

    Until then the file is called NAME.partial; it is removed if the sink is closed without `commit`, unless the sink
    was created with `resume`.

    Attributes
    ----------
    path : Path
    shape, dtype, axes, chunks : as for TileSource
    resumed : bool
        Whether the file has cells written by an earlier process.
    lost : list of str
        Metadata of the `like` image (position, time, calibration and others) that the file cannot store.
    """

    resumed: bool = False
    _is_finished = False

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        dtype: Any,
        axes: str,
        chunks: Sequence[int] | None,
        grid: ProcessGrid | None,
    ) -> None:
        self.path, self.axes, self.grid, self.lost = path, axes, grid, list[str]()
        self.shape, self.dtype = tuple(map(int, shape)), np.dtype(dtype)
        self.chunks = None if chunks is None else tuple(map(int, chunks))

    def write(self, box: BoxLike, array: np.ndarray) -> None:
        """Write the cells of a box; boxes may be written in any order, from any rank, and must not overlap.

        Raises
        ------
        OutputError
            If the disk is full, or write permission is missing.
        ShapeError
            If the box exceeds the sink, or the array has another shape, an unsuitable dtype, or masked elements.
        NotReadyError
            After `commit`, or after the sink's `with` block.
        """
        self._require_unfinished()
        cells = box_to_slices(box, self.shape, str(self.path))
        shape = tuple(cut.stop - cut.start for cut in cells)
        if np.ma.is_masked(array):
            raise ShapeError(f"{self.path}: the array has masked elements; replace them, such as with array.filled(0)")
        array = np.asarray(array)
        if array.shape != shape or not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise ShapeError(
                f"{self.path}: expected {list(shape)} cells of {self.dtype}, got {list(array.shape)} of {array.dtype};"
                " pass an array of that shape and dtype"
            )
        if array.size:
            with convert_write_errors(self.path):
                self._write(cells, array.astype(self.dtype, copy=False))

    def commit(self) -> None:
        """Give the file its final name; call after all boxes are written. Collective over the sink's grid, if any."""
        self._require_unfinished()
        with raise_on_all_ranks(self.grid), convert_write_errors(self.path):
            self.flush()
        self._on_all_cells_written()
        with raise_on_all_ranks(self.grid), convert_write_errors(self.path):
            if self.grid is None or self.grid.rank == 0:
                self._publish()
        self._is_finished = True

    def _require_unfinished(self) -> None:
        if self._is_finished:
            raise NotReadyError(f"{self.path}: the sink is committed or closed; create another with nd.create_sink")

    @abstractmethod
    def _write(self, cells: Cells, array: np.ndarray) -> None:
        """Write channels-last cells of the sink's dtype."""

    @abstractmethod
    def flush(self) -> None:
        """Flush to disk everything that this rank has written."""

    def _on_all_cells_written(self) -> None:  # noqa: B027 - optional
        """Finish the file after all cells are written, on every rank."""

    @abstractmethod
    def _publish(self) -> None:
        """Give the file its final name."""

    @abstractmethod
    def close(self) -> None:
        """Close the file, and remove it if it was neither committed nor created with `resume`."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_finished = True
        self.close()


def _chunk_overlaps(cut: slice, chunk: int, extent: int) -> list[tuple[slice, slice, slice]]:
    """Return, along one axis, each chunk that contains cells of a box, and their slices in the chunk and the box."""
    overlaps = []
    for lo in range(cut.start // chunk * chunk, cut.stop, chunk):
        first, end = max(lo, cut.start), min(lo + chunk, cut.stop)
        overlaps.append(
            (slice(lo, min(lo + chunk, extent)), slice(first - lo, end - lo), slice(first - cut.start, end - cut.start))
        )
    return overlaps


@contextmanager
def convert_read_errors(path: str | Path) -> Iterator[None]:
    """Convert any exception that a library raises on a damaged file into DataError; a UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except Exception as error:  # on damaged files, readers raise arbitrary exceptions
        text = " ".join(str(error).strip("'\"").split())[:200]
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        reason = text or type(error).__name__
        raise DataError(
            f"{path}: cannot be read: damaged, or of another file type ({reason}); restore it from a good copy"
        ) from error


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of the file system, raised directly or by a library, into OutputError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written ({short_reason(error)}); {WRITE_REMEDY}") from error


@contextmanager
def raise_on_all_ranks(grid: ProcessGrid | None) -> Iterator[None]:
    """Raise an exception of one rank on all ranks of a grid; without a grid, do nothing."""
    if grid is None:
        yield
    else:
        with all_or_none(grid.world):
            yield
