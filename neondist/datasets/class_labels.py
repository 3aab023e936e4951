"""The classes of samples, or of their cells, on their way into a file."""

from __future__ import annotations

import numpy as np

from ..errors import DataError

_MOST = 2**31 - 1  # the largest label; no network has so many outputs
_WHITE = 255


class ClassLabels:
    """What labels of one part are like, block by block; those that no training could use are refused.

    Attributes
    ----------
    top : the largest label so far
    """

    def __init__(self, part: str) -> None:
        self.part, self.top, self._done = part, 0, 0

    def add(self, labels: np.ndarray) -> None:
        """Look at the labels of the next samples, (n,) or (n, *spatial).

        Raises
        ------
        DataError
            One is no class, or maps are masks of black and white.
        """
        if not labels.size:
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high > _MOST:
            wrong = low if low < 0 else high
            at = self._done + int(np.argwhere(labels == wrong)[0][0])
            raise DataError(
                f"{self.part}: sample {at} has the label {wrong}; classes are whole numbers from 0: correct the labels"
            )
        if labels.ndim > 1 and high == _WHITE and not self.top and np.isin(labels, (0, _WHITE)).all():
            raise DataError(
                f"{self.part}: its maps hold 0 and 255 only, which would be 256 classes; a map holds the number of each"
                " cell's class: save 0 and 1 (in NumPy: mask // 255)"
            )
        self.top = max(self.top, high)
        self._done += len(labels)
