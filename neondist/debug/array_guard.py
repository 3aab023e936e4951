"""A decorator of one PaddedArray: views begin as marks, and what is given away are copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import PaddedArray
from ..comm import Transport
from ..errors import HaloError
from .mark import mark, marked
from .shadow import Shadow, shadow_of


class ArrayGuard:
    """Stands before `get_fprop_view` and `get_bprop_view` of one array.

    Parameters
    ----------
    array : PaddedArray
    tiles : Transport
        Carries the array's messages from now on.
    problem : function of a direction and of what is wrong
        Returns the error to raise.
    """

    def __init__(self, array: PaddedArray, tiles: Transport, problem: Callable[[str, str], HaloError]) -> None:
        self.array, self.problem = array, problem
        self.shadow: Shadow | None = None
        self._view, self._home = array.get_fprop_view, array.get_bprop_view
        array.grid = copy.copy(array.grid)
        array.grid.tile_comm = tiles
        array.forget_frames()
        vars(array).update(get_fprop_view=self.get_fprop_view, get_bprop_view=self.get_bprop_view)

    def get_fprop_view(self, tile: Any) -> Any:
        """Return a copy of the view, all of whose cells have been filled since the call."""
        if not self.array.plan.trivial:
            _begin_anew(self.array, len(tile))
        fetched, _ = self._directions
        view = self._named(fetched, self._view, tile)
        missing = marked(view)
        if missing.any():
            raise self.problem(
                fetched,
                f"{missing.sum()} numbers of its view were never filled, the first for cell"
                f" {self._cell(missing)}; scheme {type(self.array.border.scheme).__name__} has to fill"
                " every cell of other tiles",
            )
        self.shadow = shadow_of(view, self.shadow)
        return self.shadow.array

    def get_bprop_view(self, dview: Any) -> Any:
        """Return the gradient of the tile, once that of the view is whole."""
        _, sent_home = self._directions
        missing = marked(dview)
        if missing.any():
            raise self.problem(
                sent_home,
                f"{missing.sum()} numbers of its view's gradient were never written, or computed from cells that are"
                f" not its own, the first for cell {self._cell(missing)}",
            )
        return self._named(sent_home, self._home, dview)

    @property
    def changed(self) -> bool:
        """Whether the layer has written into its view."""
        return self.shadow is not None and self.shadow.changed

    @property
    def _directions(self) -> tuple[str, str]:
        """When the view is fetched, and when its gradient goes home."""
        return ("backward", "forward") if self.array.border.reverse else ("forward", "backward")

    def _named(self, direction: str, call: Callable[[Any], Any], array: Any) -> Any:
        try:
            return call(array)
        except HaloError as error:
            raise self.problem(direction, str(error)) from None

    def _cell(self, missing: Any) -> tuple[int, ...]:
        """Return the first of these cells of the view, as cell of the image."""
        first = np.argwhere(missing)[0][1:-1]
        return tuple(int(lo + at) for lo, at in zip(self.array.need.lo, first, strict=True))


def _begin_anew(array: PaddedArray, samples: int) -> None:
    """Mark what has to be filled: all cells but the own ones, which may lie there already, and constant padding."""
    frame = array.frame(samples)
    tile = frame.tile.copy()
    mark(frame.buffer)
    frame.fill_outside()  # once for all
    frame.tile[...] = tile
