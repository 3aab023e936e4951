"""Places in which the values are that the forward of a module can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

GONE = object()


class Holder(NamedTuple):
    """One place of values: the attributes of an object, the items of a container, the cells of a closure.

    Attributes
    ----------
    path : str
    module : nn.Module or None
        The innermost that holds it.
    store : what holds the values
    names : sequence or None
        Those that count, of a mapping or an object; default: all.
    get : callable, optional
        From a name to its value; default: `store` is iterated over.
    mark : str
        Between the path and the name of one value; empty: the values count as one.
    of_modules : bool
        Whether PyTorch's modules keep it themselves: parameters, modules, hooks.
    watched, restored : bool
        Whether it is looked at before each pass, and whether a capture restores it.
    """

    path: str
    module: nn.Module | None
    store: Any
    names: Collection[Any] | None = None
    get: Callable[[Any], Any] | None = None
    mark: str = ""
    of_modules: bool = False
    watched: bool = True
    restored: bool = True

    def called(self, key: Any) -> str:
        """Return the name of one value."""
        return f"{self.path}{self.mark}{key}".removeprefix(".") if self.mark else self.path

    def read(self) -> dict[Any, Any]:
        """Return the values that there are."""
        if self.names is None:
            return dict(self.store if isinstance(self.store, Mapping) else enumerate(self.store))
        assert self.get is not None
        if isinstance(self.store, dict):
            return {name: self.store[name] for name in self.names if name in self.store}
        return {name: value for name in self.names if (value := got(self.get, name)) is not GONE}

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Make the values what they were."""
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


def got(get: Callable[[Any], Any], name: Any) -> Any:
    """Return the value of a name, or GONE."""
    try:
        return get(name)
    except (AttributeError, ValueError):  # an empty slot, or cell
        return GONE
