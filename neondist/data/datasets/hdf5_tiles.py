"""This rank's tile of samples that stay on disk."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ...errors import DataError
from ...io.hdf5 import CheckedArray, convert_hdf5_errors, open_hdf5, size_and_mtime
from ..split import Split, TileArray

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


class HDF5Array:
    """One tile of the samples of an array (N, *spatial, ...), read on demand.

    Indexing with an integer array gives local tiles (n, *tile, ...) in the array's dtype. The file is opened at the
    first read. Not thread-safe.

    Parameters
    ----------
    path, name : the file, and the array in it
    shape, dtype : shape (N, *spatial, ...) and dtype of the array
    tile : slices of the cells in a sample; later axes are not sliced
    sample_numbers : array
        Indices of the samples in the array.
    file_size_and_mtime : `hdf5.size_and_mtime` of the file from before the array was inspected
    """

    def __init__(
        self,
        path: Path,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype,
        tile: tuple[slice, ...],
        sample_numbers: np.ndarray,
        file_size_and_mtime: tuple[int, int],
    ) -> None:
        self.path, self.name, self.dtype, self.tile, self.sample_numbers = path, name, dtype, tile, sample_numbers
        self._expected = (tuple(shape), dtype)
        self._file_state = file_size_and_mtime
        self.shape = (len(sample_numbers), *(cut.stop - cut.start for cut in tile), *shape[1 + len(tile) :])
        self._file: Any = None
        self._array: CheckedArray | None = None

    def __len__(self) -> int:
        return len(self.sample_numbers)

    def __getitem__(self, indices: Any) -> np.ndarray:
        indices = self.sample_numbers[indices]
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        if out.size:
            with convert_hdf5_errors(self.path):
                array = self._open_array()
                for start, first, count in contiguous_runs(indices):
                    array.read(first, out[start : start + count])
            # after the read: HDF5 reads zeros from a file that has been truncated
            if size_and_mtime(self.path) != self._file_state:
                raise DataError(f"{self.path}: {self.name} has changed since the run began; run the command again")
        return out

    def read_cells(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        """Return cells (n, *cells, ...) of some samples; slices count from the tile's first cell."""
        slices = (slice(own.start + cut.start, own.start + cut.stop) for own, cut in zip(self.tile, cells, strict=True))
        part = type(self)(self.path, self.name, *self._expected, tuple(slices), self.sample_numbers, self._file_state)
        with convert_hdf5_errors(self.path):
            part._array = self._open_array().part(part.tile)
        return part[indices]

    def describe_sample(self, number: int) -> str:
        """Return the file, the array and the index of a sample."""
        return f"{self.path}: sample {self.sample_numbers[number]} of {self.name}"

    def close(self) -> None:
        """Close the file; a later read reopens it."""
        file, self._file, self._array = self._file, None, None
        if file is not None:
            file.close()

    def _open_array(self) -> CheckedArray:
        if self._array is None:
            if self._file is None:
                self._file = open_hdf5(self.path)
            array = CheckedArray(self._file, self.name, self.tile)
            if (array.shape, array.dtype) != self._expected:
                raise DataError(f"{self.path}: {self.name} has changed since the run began; run the command again")
            self._array = array
        return self._array


class HDF5Targets(HDF5Array):
    """Targets of an HDF5 file, which must be finite."""

    def __getitem__(self, indices: Any) -> np.ndarray:
        targets = super().__getitem__(indices)
        if targets.dtype.kind == "f" and not np.isfinite(targets).all():
            index = int(np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))[0])
            number = self.sample_numbers[indices][index]
            raise DataError(f"{self.path}: {self.name} of sample {number} is not finite; correct it")
        return targets


class PrefetchingSplit(Split):
    """A split whose tiles, and possibly label maps, are read from disk; a thread prefetches the next batch.

    Every code path waits for the reader thread: a thread inside libhdf5 at interpreter exit would keep h5py's lock, so
    that the finalisation of h5py, and the other ranks in MPI_Finalize, would wait forever.
    """

    def __init__(self, tiles: TileArray, labels: TileArray, prefetch: bool = True, **normalisation: Any) -> None:
        super().__init__(tiles, labels, **normalisation)
        self._prefetches = prefetch
        self._reader_thread: ThreadPoolExecutor | None = None

    def batches(
        self, batch_indices: Iterable[ArrayLike], dtype: DTypeLike = "float32", lazy: bool = False
    ) -> Generator[tuple[Any, np.ndarray]]:
        """Yield `images` and `targets` of consecutive batches; a thread prefetches the next one.

        An error of the thread is raised in place of its batch. The thread ends when the split is closed.
        """
        if lazy or not self._prefetches:
            yield from super().batches(batch_indices, dtype, lazy)
            return
        batch_indices, pending_batch = iter(batch_indices), None
        try:
            pending_batch = self._start_reading(next(batch_indices, None), dtype)
            while pending_batch is not None:
                batch = pending_batch.result()
                pending_batch = self._start_reading(next(batch_indices, None), dtype)
                yield batch
        finally:
            if pending_batch is not None:
                pending_batch.exception()

    def close(self) -> None:
        """Wait for pending reads and close the file; a later read reopens it."""
        reader, self._reader_thread = self._reader_thread, None
        if reader is not None:
            reader.shutdown()
        for tiles in (self.tiles, self.labels):
            close = getattr(tiles, "close", None)  # arrays have no such method
            if close is not None:
                close()

    def _start_reading(self, index: ArrayLike | None, dtype: DTypeLike) -> Future[tuple[np.ndarray, np.ndarray]] | None:
        if index is None:
            return None
        if self._reader_thread is None:
            from concurrent.futures import ThreadPoolExecutor

            self._reader_thread = ThreadPoolExecutor(1, "neondist-reader")
        return self._reader_thread.submit(lambda: (self.images(index, dtype), self.targets(index)))


def contiguous_runs(indices: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first index, count) of each run of consecutive indices, which is read at once."""
    starts = np.flatnonzero(np.diff(indices, prepend=indices[:1] - 2) != 1)
    for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
        yield int(start), int(indices[start]), int(end - start)
