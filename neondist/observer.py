"""Interface of observers of passes and messages; they do not affect results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Observer:
    """Base class of observers; a subclass overrides the events it needs. Arrays passed to it belong to the pass.

    Events with begin and end: 'step' (of training), 'layer', 'halo' (a view is made, or its gradient exchanged),
    'reduce' (allreduce), 'redistribute' (of a vector), 'wait' (inside MPI), 'cost', 'sync' (of gradients), 'update'.
    """

    def begin(self, what: str, name: str, direction: str, subject: Any) -> None:
        """Start of an event, for the layer of this name, if any, in the 'forward' or 'backward' pass.

        Parameters
        ----------
        subject : Exchange, str or None
            Subject of a 'wait': messages, or the comm.GROUPS group of a reduction.
        """

    def end(self, what: str, name: str, direction: str) -> None:
        """End of an event, also after failure."""

    def value(self, layer: Any, name: str, array: Any) -> None:
        """A computed array: 'weights', 'output', 'gradients of the weights' or 'gradient of the input' of a layer.

        Without a layer: 'cost' and 'gradient of the cost'.

        Parameters
        ----------
        layer : Layer or None
        array : array or None
        """


class Observers:
    """Observers of one grid's ranks; without any, the cost is one `if`."""

    def __init__(self) -> None:
        self.watching: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.watching)

    def value(self, layer: Any, name: str, array: Any) -> None:
        """Show an array."""
        for observer in self.watching:
            observer.value(layer, name, array)

    def during(self, what: str, name: str = "", direction: str = "", subject: Any = None) -> During:
        """Return a block at whose beginning and end all are told of it."""
        return During(self.watching, what, name, direction, subject)

    def add(self, *observers: Observer) -> None:
        """Let these watch from now on; whatever is at work already ends unseen."""
        self.watching = (*self.watching, *observers)

    def remove(self, *observers: Observer) -> None:
        """Let them watch no longer; they still see the end of what is at work."""
        self.watching = tuple(one for one in self.watching if one not in observers)

    @contextmanager
    def watched_by(self, *observers: Observer) -> Iterator[None]:
        """Let these watch, in the block."""
        self.add(*observers)
        try:
            yield
        finally:
            self.remove(*observers)


class During:
    """The time of something that observers are told of; a generator would cost a step more."""

    __slots__ = "direction", "name", "subject", "watching", "what"

    def __init__(self, watching: Sequence[Observer], what: str, name: str, direction: str, subject: Any) -> None:
        self.watching, self.what, self.name, self.direction, self.subject = watching, what, name, direction, subject

    def __enter__(self) -> None:
        for observer in self.watching:
            observer.begin(self.what, self.name, self.direction, self.subject)

    def __exit__(self, *error: object) -> None:
        for observer in reversed(self.watching):
            observer.end(self.what, self.name, self.direction)
