"""Where the photographs come from: wheels that ship some, or a folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..errors import DataError
from .image_loader import Loader

SHIPPED = {
    "skimage": ("data", "astronaut.png brick.png camera.png chelsea.png coffee.png grass.png gravel.png"),
    "sklearn": ("datasets/images", "china.jpg flower.jpg"),
}
_INSTALL = "install them with: pip install 'neondist[examples]'"
_KINDS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")


def find_photographs(folder: Path | None) -> list[Path]:
    """Return the pictures of a folder by name, or those of scikit-image and scikit-learn.

    Raises
    ------
    DataError
        There are none.
    """
    if find_spec("PIL") is None:
        raise DataError(f"photographs need Pillow, scikit-image and scikit-learn; {_INSTALL}")
    if folder is not None:
        try:
            found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _KINDS)
        except OSError as error:
            raise DataError(
                f"{folder}: has no pictures: {error.strerror}; name a folder that has, or no path"
            ) from error
        if not found:
            raise DataError(f"{folder}: has no pictures ({', '.join(_KINDS)}); give a folder that has, or no path")
        return found
    return [path for package in SHIPPED for path in _shipped(package)]


def _shipped(package: str) -> list[Path]:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("sk", "scikit-")
        raise DataError(
            f"the photographs are those of scikit-image and scikit-learn, but {name} is missing; {_INSTALL}"
        )
    place, names = SHIPPED[package]
    paths = [Path(spec.submodule_search_locations[0]) / place / name for name in names.split()]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: is missing, though the package is there; install it anew, or give a path")
    return paths


def read_size(path: Path) -> tuple[int, int]:
    """Return (height, width); DataError if it is no picture, or too large for this machine."""
    return Loader().extents(path)


def read_grey(path: Path) -> np.ndarray:
    """Return a picture's luminance (H, W) in [0, 1] as float32; DataError if it is no picture, or of 16 bits."""
    return np.asarray(Loader("RGB").picture(path).convert("F"), np.float32) / 255
