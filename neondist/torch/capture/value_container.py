"""Containers of the values that the `forward` of a module can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

MISSING = object()


class ValueContainer(NamedTuple):
    """A container of values: the attributes of an object, the items of a collection, or the cells of a closure.

    Attributes
    ----------
    path : str
    module : nn.Module or None
        Innermost module that owns the container.
    object : the object that holds the values
    names : collection or None
        The relevant names of a mapping or an object; default: all.
    value_of_name : callable, optional
        Maps a name to its value; by default, the values are read by iterating over `object`.
    name_separator : str
        Separator between the path and the name of a value; empty: the values share the path as their name.
    in_nn_module : bool
        Whether the container belongs to nn.Module itself: parameters, modules, hooks.
    is_watched, is_restored : bool
        Whether the values are compared before each pass, and whether they are restored after a capture.
    """

    path: str
    module: nn.Module | None
    object: Any
    names: Collection[Any] | None = None
    value_of_name: Callable[[Any], Any] | None = None
    name_separator: str = ""
    in_nn_module: bool = False
    is_watched: bool = True
    is_restored: bool = True

    def value_name(self, key: Any) -> str:
        """Return the name of a value."""
        return f"{self.path}{self.name_separator}{key}".removeprefix(".") if self.name_separator else self.path

    def read_values(self) -> dict[Any, Any]:
        """Return the current values."""
        if self.names is None:
            return dict(self.object if isinstance(self.object, Mapping) else enumerate(self.object))
        assert self.value_of_name is not None
        if isinstance(self.object, dict):
            return {name: self.object[name] for name in self.names if name in self.object}
        return {
            name: value for name in self.names if (value := get_or_missing(self.value_of_name, name)) is not MISSING
        }

    def restore(self, values: Mapping[Any, Any]) -> None:
        """Restore earlier values."""
        container, current = self.object, self.read_values()
        if list(map(id, values.values())) == list(map(id, current.values())) and list(values) == list(current):
            return
        if isinstance(container, dict):
            if self.names is None:
                container.clear()
            container.update(values)
        elif isinstance(container, set):
            container.clear()
            container.update(values.values())
        elif isinstance(container, (list, deque)):
            container.clear()
            container.extend(values.values())
        elif isinstance(container, tuple):
            for name, value in values.items():
                container[name].cell_contents = value
        else:  # an object with slots, or a class
            for name, value in values.items():
                (type if isinstance(container, type) else object).__setattr__(container, name, value)


def get_or_missing(get: Callable[[Any], Any], name: Any) -> Any:
    """Return the value of a name, or MISSING."""
    try:
        return get(name)
    except (AttributeError, ValueError):  # an empty slot or cell
        return MISSING
