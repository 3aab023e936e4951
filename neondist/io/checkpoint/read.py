"""Reading of a checkpoint file by one rank for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import CALL_KEY, Transport, check_equal_on_ranks, raise_if_any_failed
from ...errors import DataError
from .checksum import verify_checksum
from .pieces import ArrayPart, Slices
from .stream import scatter_from_root

MAX_GROUP_DEPTH = 20  # limit on nested groups, which result from '/' in layer names


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a file, known on every rank.

    Attributes
    ----------
    path : the file
    texts : texts by name
    shapes : global shapes of the arrays, by name
    dtypes : dtypes of the arrays, by name
    """

    path: Path
    texts: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, np.dtype] = field(default_factory=dict)

    def group(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays in a group, by name."""
        return {key[len(name) + 1 :]: shape for key, shape in self.shapes.items() if key.startswith(name + "/")}


class CheckpointReader:
    """Checkpoint file that is open on one rank."""

    def __init__(self, contents: CheckpointContents, file: Any, world: Transport, root: int = 0) -> None:
        self.contents, self._file, self._world, self._root = contents, file, world, root

    def fill_parts(self, pieces: Sequence[ArrayPart]) -> None:
        """Fill every rank's parts from the arrays in the file, which must have the same shapes. Collective."""

        def read(piece: ArrayPart, file_slices: Slices) -> np.ndarray:
            return self._file[piece.name][file_slices]

        error: Exception | None = None
        try:
            scatter_from_root(self._world, pieces, read, self._root)
        except (OSError, RuntimeError) as problem:
            error = DataError(
                f"{self.contents.path}: cannot be read ({problem}); restore it from a copy, or specify another file"
            )
        raise_if_any_failed(self._world, error)


@contextmanager
def open_checkpoint(path: Path, world: Transport, root: int = 0) -> Iterator[CheckpointReader]:
    """Verify a checkpoint on the rank `root` and open it there. Collective.

    Raises
    ------
    DataError
        On every rank, if the file is missing, damaged, or not a checkpoint.
    """
    check_equal_on_ranks(world, {CALL_KEY: "reading a checkpoint"})
    file, contents, error = None, None, None
    if world.rank == root:
        try:
            verify_checksum(path)
            file, contents = _open_and_scan(path)
        except Exception as problem:
            error = problem
    try:
        raise_if_any_failed(world, error)
        yield CheckpointReader(world.bcast(contents, root), file, world, root)
    finally:
        if file is not None:
            file.close()


def read_checkpoint_texts(path: Path) -> dict[str, str]:
    """Return the texts of a checkpoint by name, without verifying its checksum."""
    file, contents = _open_and_scan(path)
    file.close()
    return contents.texts


def _open_and_scan(path: Path) -> tuple[Any, CheckpointContents]:
    import h5py

    try:
        file = h5py.File(path, "r")
        contents = CheckpointContents(path)
        _collect_contents(file, "", contents)
    # a file with a matching checksum may have been crafted, and HDF5 may raise nearly any exception
    except Exception as error:
        raise DataError(f"{path}: is not a neondist checkpoint ({error}); specify another file") from error
    return file, contents


def _collect_contents(group: Any, prefix: str, contents: CheckpointContents) -> None:
    """Collect the texts and shapes of a group; reject links, external data, and other types."""
    import h5py

    if prefix.count("/") > MAX_GROUP_DEPTH:
        raise ValueError(f"it has more than {MAX_GROUP_DEPTH} nested groups")
    for name in group:
        full_name = prefix + name
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"'{full_name}' is a link")
        item = group[name]
        if isinstance(item, h5py.Group):
            _collect_contents(item, full_name + "/", contents)
        elif item.is_virtual or item.external:
            raise ValueError(f"'{full_name}' is stored in another file")
        elif item.dtype.kind == "S" and item.shape == ():
            contents.texts[full_name] = item[()].decode()
        elif item.dtype.kind in "fiu":
            contents.shapes[full_name], contents.dtypes[full_name] = tuple(item.shape), item.dtype.newbyteorder("=")
        else:
            raise ValueError(f"'{full_name}' holds {item.dtype}")
