"""Containers of the values that the forward of a module can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

MISSING = object()


class ValueHolder(NamedTuple):
    """A container of values: the attributes of an object, the items of a collection, the cells of a closure.

    Attributes
    ----------
    path : str
    module : nn.Module or None
        Innermost module that contains it.
    store : the container
    names : collection or None
        The relevant names of a mapping or an object; default: all.
    get : callable, optional
        Maps a name to its value; default: `store` is iterated over.
    separator : str
        Separator between the path and the name of a value; empty: the values share the path as their name.
    of_nn_module : bool
        Whether it belongs to nn.Module itself: parameters, modules, hooks.
    watched, restored : bool
        Whether it is compared before each pass, and whether a capture restores it.
    """

    path: str
    module: nn.Module | None
    store: Any
    names: Collection[Any] | None = None
    get: Callable[[Any], Any] | None = None
    separator: str = ""
    of_nn_module: bool = False
    watched: bool = True
    restored: bool = True

    def value_name(self, key: Any) -> str:
        """Return the name of a value."""
        return f"{self.path}{self.separator}{key}".removeprefix(".") if self.separator else self.path

    def read(self) -> dict[Any, Any]:
        """Return the current values."""
        if self.names is None:
            return dict(self.store if isinstance(self.store, Mapping) else enumerate(self.store))
        assert self.get is not None
        if isinstance(self.store, dict):
            return {name: self.store[name] for name in self.names if name in self.store}
        return {name: value for name in self.names if (value := get_or_missing(self.get, name)) is not MISSING}

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Restore earlier values."""
        store, now = self.store, self.read()
        if list(map(id, before.values())) == list(map(id, now.values())) and list(before) == list(now):
            return
        if isinstance(store, dict):
            if self.names is None:
                store.clear()
            store.update(before)
        elif isinstance(store, set):
            store.clear()
            store.update(before.values())
        elif isinstance(store, (list, deque)):
            store.clear()
            store.extend(before.values())
        elif isinstance(store, tuple):
            for name, value in before.items():
                store[name].cell_contents = value
        else:  # an object with slots, or a class
            for name, value in before.items():
                (type if isinstance(store, type) else object).__setattr__(store, name, value)


def get_or_missing(get: Callable[[Any], Any], name: Any) -> Any:
    """Return the value of a name, or MISSING."""
    try:
        return get(name)
    except (AttributeError, ValueError):  # an empty slot, or cell
        return MISSING
