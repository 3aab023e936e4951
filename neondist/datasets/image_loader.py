"""One image file to an array, by Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, UserError


@dataclass(frozen=True)
class Loader:
    """How an image file becomes an array.

    Attributes
    ----------
    mode : 'L', 'RGB', 'RGBA', or None: as the first image is
    size : (H, W) that images are scaled to, or None: all have one size
    """

    mode: str | None = None
    size: tuple[int, int] | None = None

    def load(self, path: Path) -> np.ndarray:
        """Return an image (H, W, C), or the pages of a TIFF file as a volume (D, H, W, C).

        Raises
        ------
        DataError
            It is damaged or no image.
        """
        from PIL import Image, ImageSequence

        with _faults(path), Image.open(path) as image:
            if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
                return np.stack([self._array(page) for page in ImageSequence.Iterator(image)])
            return self._array(image)

    def _array(self, image: Any) -> np.ndarray:
        mode = self.mode or {"P": "RGB", "1": "L", "CMYK": "RGB", "YCbCr": "RGB", "LA": "L"}.get(image.mode)
        seen = image if mode is None or mode == image.mode else image.convert(mode)
        if self.size is not None and seen.size != self.size[::-1]:
            seen = seen.resize(self.size[::-1])
        array = np.asarray(seen)
        return array if array.ndim == 3 else array[..., None]

    def labels(self, path: Path) -> np.ndarray:
        """Return a map of classes (H, W): the numbers that the file holds, of a palette its indices."""
        from PIL import Image

        with _faults(path), Image.open(path) as image:
            size = image.size if self.size is None else self.size[::-1]
            array = np.asarray(image if image.size == size else image.resize(size, Image.Resampling.NEAREST))
        if array.ndim != 2:
            raise DataError(f"{path}: a map of classes has one channel, this has {array.shape[-1]}; save the numbers")
        return array.astype(np.uint8) if array.dtype == bool else array


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Let images be as large as they are, and tell what is wrong with one."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow; install it with: pip install pillow (or neondist[images])") from None
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None  # they are the user's own
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as an image ({reason}); replace or remove it") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit
