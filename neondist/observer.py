"""Interface of observers of passes and messages; they do not affect results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Observer:
    """Base class of observers; a subclass overrides the events it needs, and copies the arrays that it keeps.

    Events with begin and end: 'step' (of training), 'layer', 'halo' (a view is made, or its gradient exchanged),
    'reduce' (allreduce), 'redistribute' (of a vector), 'wait' (inside MPI), 'cost', 'sync' (of gradients), 'update'.
    """

    def on_begin(self, event: str, name: str, direction: str, subject: Any) -> None:
        """Start of an event, for the layer of this name, if any, in the 'forward' or 'backward' pass.

        Parameters
        ----------
        subject : Exchange, str or None
            Subject of a 'wait': messages, or the comm.GROUP_NAMES group of a reduction.
        """

    def on_end(self, event: str, name: str, direction: str) -> None:
        """End of an event, even after failure."""

    def on_value(self, layer: Any, name: str, array: Any) -> None:
        """A computed array: 'weights', 'output', 'gradients of the weights' or 'gradient of the input' of a layer.

        Without a layer: 'cost' and 'gradient of the cost'.

        Parameters
        ----------
        layer : Layer or None
        array : array or None
        """


class Observers:
    """Observers of one grid's ranks; without observers, an event costs one `if`."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.observers)

    def on_value(self, layer: Any, name: str, array: Any) -> None:
        """Pass an array to all observers."""
        for observer in self.observers:
            observer.on_value(layer, name, array)

    def observe(self, event: str, name: str = "", direction: str = "", subject: Any = None) -> EventScope:
        """Return a context manager that notifies all observers of the start and end of an event."""
        return EventScope(self.observers, event, name, direction, subject)

    def add(self, *observers: Observer) -> None:
        """Add observers; they do not see the end of events in progress."""
        self.observers = (*self.observers, *observers)

    def remove(self, *observers: Observer) -> None:
        """Remove observers; they still see the end of events in progress."""
        self.observers = tuple(observer for observer in self.observers if observer not in observers)

    @contextmanager
    def add_temporarily(self, *observers: Observer) -> Iterator[None]:
        """Add observers for the duration of the block."""
        self.add(*observers)
        try:
            yield
        finally:
            self.remove(*observers)


class EventScope:
    """Context manager of one event; a class, because a generator is slower."""

    __slots__ = "direction", "event", "name", "observers", "subject"

    def __init__(self, observers: Sequence[Observer], event: str, name: str, direction: str, subject: Any) -> None:
        self.observers, self.event, self.name, self.direction, self.subject = observers, event, name, direction, subject

    def __enter__(self) -> None:
        for observer in self.observers:
            observer.on_begin(self.event, self.name, self.direction, self.subject)

    def __exit__(self, *error: object) -> None:
        for observer in reversed(self.observers):
            observer.on_end(self.event, self.name, self.direction)
