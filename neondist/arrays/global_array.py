"""An activation cut into tiles, and the halo exchange between them."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends import Backend
from ..comm import ProcessGrid
from ..geometry import Window
from ..registry.arguments import checked
from .padded import PaddedArray


class GlobalArray(PaddedArray):
    """An activation (N, *spatial, C) cut over the ranks of `grid`; otherwise as PaddedArray.

    `get_fprop_view` and `get_bprop_view` are collective over the ranks of a replica.

    Examples
    --------
    >>> ga = nd.GlobalArray(grid, (8, 256, 256, 3), nd.Window(kernel=3, padding=1))   # doctest: +SKIP
    >>> view = ga.get_fprop_view(ga.scatter(images))                                  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        grid: ProcessGrid,
        global_shape: Sequence[int],
        window: Window | None = None,
        dtype: str = "float32",
        backend: str | Backend = "numpy",
        reuse: bool = False,
    ) -> None:
        self._lay_out(grid, global_shape, window, dtype, backend, reuse)
