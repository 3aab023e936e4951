"""Images to predict for: NPY, HDF5 or picture files, of which a rank reads its tile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, Protocol

import numpy as np

from ..errors import DataError
from ..io.hdf5 import CheckedArray, faults, find, open_file, state
from .image_loader import SUFFIXES, Loader, pictures_in

KINDS = f".npy, .h5, {', '.join(SUFFIXES)} or a folder of pictures"


class Cells(Protocol):
    """What is sliced like an array, and reads only what is asked for."""

    shape: Any

    def __getitem__(self, index: Any, /) -> Any: ...


class Source:
    """Samples (N, *spatial, C) of an array-like that may lack the axes of samples or of channels.

    Attributes
    ----------
    shape : tuple of int
        (N, *spatial, C).
    """

    def __init__(self, cells: Cells, shape: tuple[int, ...], one_sample: bool) -> None:
        self.cells, self.shape, self.one_sample = cells, shape, one_sample

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, samples: range, tile: Sequence[slice]) -> np.ndarray:
        """Return the tile (n, *tile, C) of consecutive samples, raw."""
        index = (*(() if self.one_sample else (slice(samples.start, samples.stop),)), *tile)
        found = np.asarray(self.cells[index])
        return found.reshape(len(samples), *(part.stop - part.start for part in tile), self.shape[-1])

    def close(self) -> None:
        """Close the file, if it is HDF5."""
        if isinstance(self.cells, _HDF5Cells):
            self.cells.array.file.close()


def open_source(path: str | Path, sample_shape: Sequence[int]) -> Source:
    """Return the images of a file or folder, for a model that was trained on samples like (*spatial, C).

    Raises
    ------
    DataError
        It is missing, damaged, of an unknown kind, or of another number of axes or channels.
    """
    cells = _open(str(path))
    axes, channels = len(sample_shape), sample_shape[-1]
    shape = tuple(cells.shape)
    missing = axes + 1 - len(shape)
    no_channels = channels == 1 and (missing == 2 or (missing == 1 and shape[-1] != 1))
    one_sample = missing - no_channels == 1
    full = (*([1] if one_sample else []), *shape, *([1] if no_channels else []))
    if len(full) != axes + 1 or full[-1] != channels:
        wanted = ", ".join(["N", *"DHW"[-(axes - 1) :], str(channels)])
        raise DataError(f"{path}: holds an array of shape {list(shape)}; the model takes ({wanted})")
    if not full[0]:
        raise DataError(f"{path}: has no images")
    return Source(cells, full, one_sample)


def _open(text: str) -> Cells:
    path = Path(text)
    file, _, name = text.rpartition(":") if ".h5:" in text or ".hdf5:" in text else (text, "", "")
    try:
        if Path(file).suffix in (".h5", ".hdf5"):
            return _hdf5(Path(file), name)
        if path.suffix == ".npy":
            return _numbers(text, _NPYCells(path))
        if path.is_dir() or path.suffix.lower() in SUFFIXES:
            return _Pictures(path)
    except FileNotFoundError:
        raise DataError(f"{text}: no such file; check the path") from None
    except (
        OSError,
        ValueError,
        RuntimeError,
        EOFError,
        OverflowError,
        SyntaxError,
        TokenError,
        AttributeError,
    ) as problem:
        reason = " ".join(str(problem).split())
        raise DataError(f"{text}: cannot be read ({reason}); give {KINDS}") from None
    raise DataError(f"{text}: " + (f"is of no known kind; give {KINDS}" if path.exists() else "no such file"))


class _NPYCells:
    """A .npy file that is mapped; one that has become shorter is told, and not touched, which would end the process."""

    def __init__(self, path: Path) -> None:
        self.path, self._state = path, state(path)
        self._cells = np.load(path, mmap_mode="r", allow_pickle=False)
        self.shape, self.dtype = self._cells.shape, self._cells.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self._check()
        found = np.array(self._cells[index])
        self._check()
        return found

    def _check(self) -> None:
        if state(self.path) != self._state:
            raise DataError(f"{self.path}: has changed since it was opened; start anew")


def _numbers(name: str, cells: Any) -> Cells:
    if cells.dtype.kind not in "fiub":
        raise DataError(f"{name}: holds {cells.dtype}, not numbers; give an array of numbers")
    return cells


def _hdf5(path: Path, name: str) -> Cells:
    import h5py

    file = open_file(path)
    with faults(path):
        names = [key for key in file if isinstance(file.get(key, getlink=True), h5py.HardLink)]
        names = [key for key in names if isinstance(file[key], h5py.Dataset)]
        name = name or ("images" if "images" in names else names[0] if len(names) == 1 else "")
        found = find(file, name) if name else None
        if not isinstance(found, h5py.Dataset):
            choices = ", ".join(f"{path}:{key}" for key in names) or "it has none"
            raise DataError(f"{path}: which data set? {choices}")
        return _numbers(f"{path}:{name}", _HDF5Cells(path, name.strip("/"), found))


class _HDF5Cells:
    """An array in an open file, whose faults are told in one message."""

    def __init__(self, path: Path, name: str, array: Any) -> None:
        self.path, self.name, self.array, self.shape, self.dtype = path, name, array, array.shape, array.dtype
        self._state = state(path)
        self._checked: CheckedArray | None = None

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the cells, compared with the checksums that the file has; what the first axis is does not matter."""
        first, tile = index[0], (*index[1:], *(slice(0, n) for n in self.shape[len(index) :]))
        out = np.empty([cut.stop - cut.start for cut in (first, *tile)], self.dtype)
        with faults(self.path):
            if self._checked is None or self._checked.tile != tile:
                self._checked = CheckedArray(self.array.file, self.name, tile)
            self._checked.read(first.start, out)
        if state(self.path) != self._state:
            raise DataError(f"{self.path}: {self.name} has changed since it was opened; start anew")
        return out


class _Pictures:
    """A picture, or the pictures of a folder in the order of their names; each is decoded when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.single = not path.is_dir()
        self.files = [path] if self.single else pictures_in(path)
        first = self._decode(self.files[0])
        self.shape = first.shape if self.single else (len(self.files), *first.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if self.single:
            return self._decode(self.files[0])[index]
        found = []
        for file in self.files[index[0]]:
            picture = self._decode(file)
            if picture.shape != self.shape[1:]:
                shapes = f"{list(picture.shape)}, that of the folder's first is {list(self.shape[1:])}"
                raise DataError(f"{file}: its shape is {shapes}; pictures must be of one size")
            found.append(picture[index[1:]])
        return np.stack(found) if found else np.empty((0, *self.shape[1:]), np.uint8)[index]

    @staticmethod
    def _decode(file: Path) -> np.ndarray:
        """Return a picture's cells (H, W, C), as `neondist data convert` reads them."""
        return Loader().load(file)
