"""checkpoint.h5: all that is needed to continue a run, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import agree
from ..errors import DataError
from .hooks import Hook
from .output import finish, partial
from .position import Position
from .run import Run

FORMAT = 2


@dataclass(frozen=True)
class Snapshot:
    """Whole arrays by name, the same for every grid, and how far the run was."""

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    position: Position


class Checkpoint(Hook):
    """Write checkpoint.h5 after every epoch, on rank 0; the old one stays until the new one is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_epoch(self, run: Run) -> None:
        """Write a checkpoint."""
        self.save(run)

    def on_stop(self, run: Run) -> None:
        """Write a checkpoint of this very step."""
        self.save(run)

    def save(self, run: Run) -> None:
        """Collect the whole arrays (collective) and write them now; if rank 0 cannot, every rank raises."""
        snapshot = Snapshot(run.model.state(), run.model.optimizer_state(), Position.of(run))
        error: Exception | None = None
        if run.first_rank:
            try:
                write(self.path, snapshot)
            except Exception as problem:
                error = problem
        agree(run.grid.world, error)


def write(path: Path, snapshot: Snapshot) -> None:
    """Write the file whole or not at all."""
    import h5py

    with h5py.File(partial(path), "w") as file:
        place = snapshot.position
        file.attrs.update(format=FORMAT, epoch=place.epoch, step=place.step, position=place.to_json())
        _put(file.create_group("model"), snapshot.model)
        _put(file.create_group("optimizer"), snapshot.optimizer)
    finish(path)


def read(path: Path) -> Snapshot:
    """Return what the file holds.

    Raises
    ------
    DataError
        It is missing or damaged.
    """
    import h5py

    if not path.is_file():
        raise DataError(f"{path}: no such file, so there is nothing to resume; run without --resume to begin anew")
    try:
        with h5py.File(path, "r") as file:
            if int(file.attrs["format"]) != FORMAT:
                raise DataError(f"{path}: has format {file.attrs['format']}, not {FORMAT}; another neondist wrote it")
            return Snapshot(_get(file["model"]), _get(file["optimizer"]), Position.from_json(file.attrs["position"]))
    except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); put back a copy, or run without --resume to begin anew") from error


def restore(path: Path, run: Run) -> None:
    """Read the file on rank 0, give every rank its arrays, and let `run` go on from there; collective.

    Raises
    ------
    DataError
        On every rank, if the file is missing, damaged, or of another model or seed.
    """
    model, world = run.model, run.grid.world
    snapshot, error = None, None
    if world.rank == 0:
        try:
            snapshot = read(path)
        except Exception as problem:
            error = problem
    agree(world, error)
    found: Snapshot = world.bcast(snapshot)
    _compare(path, found.model, model.state())
    _compare(path, found.optimizer, model.optimizer_state())
    try:
        found.position.put(run)
    except DataError as problem:
        raise DataError(f"{path}: {problem}, or run without --resume") from None
    model.load_state(found.model)
    model.load_optimizer_state(found.optimizer)


def _compare(path: Path, found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Raise DataError where the file and the model differ in names or shapes."""
    for name in sorted({*found, *wanted}):
        there, here = (list(arrays[name].shape) if name in arrays else "nothing" for arrays in (found, wanted))
        if there != here:
            raise DataError(
                f"{path}: is of another model: it has {there} for '{name}', the model has {here};"
                " resume with the experiment that wrote it, or run without --resume"
            )


def _put(group: Any, arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        array = np.asarray(array)
        group.create_dataset(name, data=array, fletcher32=array.size > 0 and array.ndim > 0)  # a checksum per chunk


def _get(group: Any) -> dict[str, np.ndarray]:
    import h5py

    arrays: dict[str, np.ndarray] = {}

    def keep(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = item[()]

    group.visititems(keep)
    return arrays
