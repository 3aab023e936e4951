"""An open HDF5 file whose faults are told in one message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError, UserError
from .text import SIGNATURE


def open_file(path: Path) -> Any:
    """Return an h5py.File, open for reading.

    Raises
    ------
    DataError
        It is missing, not HDF5, or damaged.
    """
    import h5py

    if not os.path.isfile(path):  # and not Path.is_file, which raises where a permission is missing
        what = "is a folder; name the HDF5 file in it" if os.path.isdir(path) else "no such file; check the path"
        raise DataError(f"{path}: {what}")
    with faults(path):
        with open(path, "rb") as file:
            if file.read(len(SIGNATURE)) != SIGNATURE and not h5py.is_hdf5(path):
                raise DataError(f"{path}: not an HDF5 file; make one with: neondist data convert SOURCE --to {path}")
        try:
            return h5py.File(path, "r")
        except OSError as error:
            if "unable to lock" not in str(error):
                raise
            return h5py.File(path, "r", locking=False)  # some shared file systems know no locks


def state(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written to: its size, and when it was written last (ns); 0 if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Raise DataError for whatever a damaged file makes h5py raise in the block; a UserError passes."""
    try:
        yield
    except UserError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).strip("'\"").split())
        raise DataError(f"{path}: damaged, or another kind of file ({reason}); put back a good copy") from error
