"""Who watches passes and messages is told what happens; nothing else changes for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Observer:
    """Base of all that watch; a subclass overrides what it wants to know. Arrays that it is shown belong to the pass.

    What begins and ends: 'step' (of training), 'layer', 'halo' (a view is made, or its gradient is taken home),
    'reduce' (all ranks add up), 'wait' (inside MPI), 'cost', 'sync' (of the gradients), 'update'.
    """

    def begin(self, what: str, name: str, direction: str) -> None:
        """Something begins, for the layer of this name where there is one, in the 'forward' or 'backward' pass."""

    def end(self, what: str, name: str, direction: str) -> None:
        """It has ended, or failed."""

    def value(self, layer: Any, name: str, array: Any) -> None:
        """An array was made: 'weights', 'output', 'gradients of the weights' or 'gradient of the input' of a layer.

        And, of none, 'cost' and 'gradient of the cost'.

        Parameters
        ----------
        layer : Layer or None
        array : array or None
        """


class Observers:
    """All that watch one grid's ranks; at first nobody does, and the cost is one `if`."""

    def __init__(self) -> None:
        self.watching: list[Observer] = []

    def __bool__(self) -> bool:
        return bool(self.watching)

    def value(self, layer: Any, name: str, array: Any) -> None:
        """Show an array."""
        for observer in self.watching:
            observer.value(layer, name, array)

    @contextmanager
    def during(self, what: str, name: str = "", direction: str = "") -> Iterator[None]:
        """Tell that something begins and, at the end of the block, ends."""
        watching = self.watching[:]
        for observer in watching:
            observer.begin(what, name, direction)
        try:
            yield
        finally:
            for observer in reversed(watching):
                observer.end(what, name, direction)

    @contextmanager
    def watched_by(self, *observers: Observer) -> Iterator[None]:
        """Let these watch, in the block."""
        self.watching = [*self.watching, *observers]
        try:
            yield
        finally:
            self.watching = [one for one in self.watching if one not in observers]
