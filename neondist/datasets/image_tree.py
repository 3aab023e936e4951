"""The images of a folder, and what lies beside them: nothing is left out without a word, no link followed out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

SUFFIXES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".gif", ".webp")
_CALLED = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


def images(folder: Path) -> list[Path]:
    """Return the images in a folder and in all below it, in the order of their names."""
    return sorted(path for path in files(folder) if path.suffix.lower() in SUFFIXES)


def files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and in all below it.

    Raises
    ------
    DataError
        A folder cannot be read, or is a link: what it leads to need not be the user's to give away.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                _check_link(folder, Path(place, name))
        yield from (path for name in names if (path := Path(place, name)).is_file())


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, in the order of their names; DataError as of `files`."""
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error
    for path in found:
        if path.is_symlink():
            _check_link(folder, path)
    return found


def _check_link(root: Path, path: Path) -> None:
    raise DataError(f"{path}: is a link to a folder, and links out of {root} are not followed; put the folder there")


def sets_of(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the folders of the splits by name, 'train' (which may be the folder itself) first, and those left out."""
    there = subfolders(folder)
    found: dict[str, Path] = {}
    for split, names in _CALLED.items():
        called = [path for path in there if path.name.lower() in names]
        if len(called) > 1:
            raise DataError(
                f"{folder}: has several folders of one split: {', '.join(p.name for p in called)}; keep one"
            )
        if called:
            found[split] = called[0]
    if not found:
        return {"train": folder}, []
    if "train" not in found:
        name = next(iter(found.values())).name
        raise DataError(
            f"{folder}: has a folder '{name}', but none for training; name that 'train', or '{name}' otherwise if it is"
            " a class"
        )
    return found, [path for path in there if path not in found.values()]
