"""HDF5 files in which damage is found and not believed.

libhdf5 believes most of what a file says of itself. It keeps checksums of all metadata in files of the version below,
and of the cells of arrays written with `fletcher32=True`. Text of variable length has none, and one wrong byte there
makes libhdf5 2.0 search for ever: it is neither written nor read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VERSION = ("v110", "v110")
SIGNATURE = b"\x89HDF\r\n\x1a\n"


def create(path: Path) -> Any:
    """Return a new h5py.File, open for writing, of the version whose metadata have checksums."""
    import h5py

    return h5py.File(path, "w", libver=VERSION)


def put_text(attributes: Any, name: str, text: str) -> None:
    """Write an attribute as text of fixed length; longer text than 60 kB belongs into an array of bytes."""
    import numpy as np

    attributes[name] = np.bytes_(text.encode())


def get_text(attributes: Any, name: str) -> str:
    """Return what `put_text` wrote; KeyError or ValueError if it is missing or something else."""
    found = attributes.get_id(name)
    if found.dtype.kind != "S" or found.shape != ():
        raise ValueError(f"attribute {name} is not text of fixed length")
    return bytes(attributes[name]).decode()


def plain(array: Any) -> bool:
    """Tell whether a dataset's cells are plain numbers, which are safe to read, and not text, references or records."""
    return array.dtype.kind in "biuf"
