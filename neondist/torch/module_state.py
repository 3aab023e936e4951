"""Values that the forward of a module can reach, and their restoration.

Attributes of modules and objects, items of containers, closures, defaults, class attributes and global variables: those
that the code of the user names, as far as it can be read, of all functions that are reached themselves.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import enum
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, Protocol, cast

import numpy as np
import torch
from torch import nn

from .holder import GONE, Holder, got

OF_MODULES = frozenset(vars(nn.Module()))
_SEEN_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
PLAIN = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "neondist", "builtins"}
_DATA_ONLY = frozenset(("types", "argparse", "collections", "functools", "_thread"))
"""Modules of the standard library whose objects hold values of the user."""
_BASES = (object, nn.Module, Generic, Protocol)
_CONSTRUCTION = frozenset((
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__str__", "__del__", "__dir__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
))  # fmt: skip
_ENVIRONMENT = frozenset(("environ", "getenv"))
OF_GRADIENTS = frozenset(("is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "grad_fn", "is_leaf"))
"""Names of what tells whether PyTorch computes gradients."""
_BY_COMPUTED_NAME = frozenset(("getattr", "vars", "__dict__", "attrgetter", "__getattribute__", "eval", "exec"))

_CACHE = type(lru_cache(int))
_IN_C: Any = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def _behind(proxy: Any) -> Any:
    """Return what a weak proxy stands for; None: it is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _slot(holder: Any, name: str) -> Any:
    return getattr(holder, name, GONE)


def _in_cell(cells: Any, at: int) -> Any:
    return cells[at].cell_contents


class Reach:
    """Everything that the code of a module, or of a function, can reach.

    Parameters
    ----------
    root : nn.Module or callable
    names : set of str
        Names that are known to count; others are added.
    excluded : collection of str
        Paths of values to leave out.

    Attributes
    ----------
    holders : list of Holder
    leaves : dict
        By path, values for comparison: two of them are equal if the code would find the same.
    tensors : list of tensors
    arrays : dict of path to NumPy array
    generators, iterators : dict of path to object
        What gives another value each time.
    caches : list of functions
        Those of functools that keep what they have returned.
    """

    def __init__(self, root: Any, names: set[str], excluded: Collection[str] = frozenset()) -> None:
        self.names, self._excluded = names, excluded
        names.update(("forward", "training"))
        known = -1
        while known < len(names):  # code that is reached names more
            known = len(names)
            self._all = not _BY_COMPUTED_NAME.isdisjoint(names)
            self.holders: list[Holder] = []
            self.leaves: dict[str, Any] = {}
            self.tensors: list[torch.Tensor] = []
            self.arrays: dict[str, np.ndarray] = {}
            self.generators: dict[str, Any] = {}
            self.iterators: dict[str, Any] = {}
            self.caches: list[Any] = []
            self._seen: dict[int, str] = {}
            self._alive: list[Any] = []
            self._globals: dict[int, tuple[dict[str, Any], str, dict[str, None]]] = {}
            self._root = root
            self._visit(root, "", None)
            if not _ENVIRONMENT.isdisjoint(names):
                self._read(os.environ, "os.environ", None, lambda: repr(os.environ))
            if self.asks_for_gradients:
                self._read(torch, "torch.is_grad_enabled()", None, torch.is_grad_enabled)
            for found, path, named in self._globals.values():
                self.holders.append(Holder(path, None, found, list(named), found.get, "."))

    @property
    def asks_for_gradients(self) -> bool:
        """Whether the code may ask whether there are gradients."""
        return not OF_GRADIENTS.isdisjoint(self.names)

    def _visit(self, value: Any, path: str, module: nn.Module | None) -> None:
        """Take note of a value, and of what can be reached from it."""
        if type(value) in weakref.ProxyTypes:
            value = _behind(value)
        if path in self._excluded:
            return
        if (leaf := plain(value)) is not None:
            self.leaves[path] = leaf
            return
        if id(value) in self._seen:
            self.leaves[path] = "same as", self._seen[id(value)]
            return
        self._seen[id(value)] = path
        self._alive.append(value)  # or others could have its id
        kind = type(value)
        self.leaves[path] = kind
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.leaves[path] = Identity(value), value.dtype, value.device
        elif isinstance(value, nn.Module) and (value is self._root or getattr(kind, "watched", True)):
            self._visit_module(value, path)
        elif isinstance(value, nn.Module):
            self.leaves[path] = Identity(value)
        elif isinstance(value, _CONTAINERS):
            self._items(value, path, module)
        elif isinstance(value, np.ndarray):
            self.arrays[path] = value
            self.leaves[path] = content(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value, path, module)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, f"{path}()", module)
            self._visit(value.__self__, f"{path}.__self__", module)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._visit(getattr(value, name), f"{path}.{name}", module)
        elif isinstance(value, (staticmethod, classmethod, property, cached_property)):
            for name in ("__func__", "fget", "func"):
                if (function := getattr(value, name, None)) is not None:
                    self._visit(function, f"{path}.{name}", module)
        elif isinstance(value, ModuleType):
            if not _of_library(value.__name__):
                self._named(vars(value), value.__name__, self.names, module)
        elif isinstance(value, type):
            self._visit_class(value, path, module)
        elif isinstance(value, weakref.ReferenceType):
            self._visit(value(), f"{path}()", module)
        elif isinstance(value, contextvars.ContextVar):
            self._read(value, f"{path}.get()", module, partial(value.get, None))
        elif isinstance(value, (bytearray, array.array)):
            self._read(value, path, module, partial(bytes, value))
        elif isinstance(value, _IN_C):
            self._visit(np.frombuffer(memoryview(value).cast("B"), np.uint8), f"{path}.value", module)
        elif kind.__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
            self._visit(value.get_obj(), path, module)
        else:
            self._visit_object(value, path, module)

    def _read(self, store: Any, path: str, module: nn.Module | None, read: Callable[[], Any]) -> None:
        """Visit what a function returns, now and before each pass."""
        self.holders.append(Holder(path, module, store, ("",), lambda _: read(), restored=False))
        self._visit(read(), path, module)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        attributes = vars(module)
        for name in OF_MODULES & attributes.keys():
            held = attributes[name]
            if not isinstance(held, (dict, set)):
                continue
            if name in _SEEN_OF_MODULES and path not in self._excluded:
                self._of_module(held, name, path, module)
            else:
                self.holders.append(Holder(f"{path}.{name}", module, held, of_modules=True, watched=False))
        every = self._all or not _own(cast(Any, type(module)))
        names = [name for name in attributes if name not in OF_MODULES and (every or name in self.names)]
        names += ["training"] * ("training" in attributes)
        self.holders.append(Holder(path, module, attributes, mark=".", watched=False))
        self._picked(attributes, path, module, names)
        self._visit_classes(type(module), path, module)

    def _of_module(self, held: Any, name: str, path: str, module: nn.Module) -> None:
        buffers = name == "_buffers"  # a forward may replace them
        self.holders.append(Holder(f"{path}.{name}", module, held, of_modules=True, watched=not buffers))
        for key, value in held.items():
            where = f"{path}.{key}".removeprefix(".")
            if name in ("_parameters", "_buffers") and isinstance(value, torch.Tensor):
                tied = self._seen.setdefault(id(value), where)
                trained = self.asks_for_gradients and value.requires_grad
                self.leaves[where] = name, tied, value.dtype, value.device, value.shape, trained
                self.tensors.append(value)
                self._alive.append(value)
            else:
                self._visit(value, where if name == "_modules" else f"{path}.{name}[{key}]", module)

    def _visit_function(self, function: FunctionType, path: str, module: nn.Module | None) -> None:
        self.leaves[path] = function.__code__
        cells = function.__closure__ or ()
        if cells:
            self.holders.append(Holder(path, module, cells, range(len(cells)), partial(_in_cell, cells)))
        for at, name in enumerate(function.__code__.co_freevars):
            if (value := got(partial(_in_cell, cells), at)) is not GONE:
                self._visit(value, f"{path}:{name}", module)
        for name in ("__defaults__", "__kwdefaults__"):
            self._visit(getattr(function, name), f"{path}.{name}", module)
        if vars(function):
            self._picked(vars(function), path, module, list(vars(function)))
        if not _of_library(function.__module__):
            named = names_of(function.__code__)
            self.names.update(named)
            self._named(function.__globals__, function.__module__ or "", named, module)
            for name in named & sys.modules.keys() - function.__globals__.keys():  # imported inside
                self._visit(sys.modules[name], f"module {name}", module)

    def _named(self, found: dict[str, Any], origin: str, named: Collection[str], module: nn.Module | None) -> None:
        """Visit the global variables of these names."""
        path = f"module {origin}"
        known = self._globals.setdefault(id(found), (found, path, {}))[2]
        for name in sorted(named):
            if name in found and name not in known and f"{path}.{name}" not in self._excluded:
                known[name] = None
                self._visit(found[name], f"{path}.{name}", module)

    def _visit_object(self, value: Any, path: str, module: nn.Module | None) -> None:
        kind = type(value)
        origin = (kind.__module__ or "").partition(".")[0]
        if origin in ("builtins", "itertools") and hasattr(value, "__next__"):
            self.iterators[path] = value
        if isinstance(value, _CACHE):
            self.caches.append(value)
        if kind.__module__ == "random" or isinstance(value, (np.random.Generator, np.random.RandomState)):
            self.generators[path] = value
        of_torch = kind.__module__.startswith(("torch.optim", "torch.distributions"))
        known = not _of_library(kind.__module__) or origin in _DATA_ONLY or of_torch
        if isinstance(value, enum.Enum) or not known or not (hasattr(value, "__dict__") or _slots(cast(Any, kind))):
            self.leaves[path] = Identity(value)
            return
        every = self._all or not (_own(cast(Any, kind)) or of_torch)
        if hasattr(value, "__dict__"):
            attributes = vars(value)
            self.holders.append(Holder(path, module, attributes, watched=False))
            self._picked(attributes, path, module, [n for n in attributes if every or n in self.names])
        slots = [
            name for name in _slots(cast(Any, kind)) if (every or name in self.names) and _slot(value, name) is not GONE
        ]
        if slots:
            self.holders.append(Holder(path, module, value, slots, partial(_slot, value)))
            for name in slots:
                self._visit(_slot(value, name), f"{path}.{name}", module)
        self._visit_classes(kind, path, module)

    def _visit_classes(self, kind: type, path: str, module: nn.Module | None) -> None:
        for cls in kind.__mro__:
            self._visit(cls, f"class {cls.__module__}.{cls.__qualname__}", module)

    def _visit_class(self, cls: type, path: str, module: nn.Module | None) -> None:
        if _of_library(cls.__module__) or issubclass(cls, enum.Enum):
            return
        names = [
            name
            for name, value in vars(cls).items()
            if name in self.names or (name[:2] == "__" == name[-2:] and name not in _CONSTRUCTION and _is_code(value))
        ]
        names = [name for name in names if f"{path}.{name}" not in self._excluded]
        self.holders.append(Holder(path, module, cls, names, vars(cls).get, "."))
        for name in names:
            self._visit(vars(cls)[name], f"{path}.{name}", module)

    def _picked(self, held: dict[str, Any], path: str, module: nn.Module | None, names: Collection[str]) -> None:
        """Visit attributes of these names."""
        paths = {name: f"{path}.{name}".removeprefix(".") for name in names}
        paths = {name: where for name, where in paths.items() if where not in self._excluded}
        self.holders.append(Holder(path, module, held, list(paths), held.get, restored=False))
        for name, where in paths.items():
            self._visit(held[name], where, module)

    def _items(self, value: Any, path: str, module: nn.Module | None) -> None:
        self.leaves[path] = type(value), len(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        paths = {
            key: f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[#{at}]"
            for at, (key, _) in enumerate(items)
        }
        every = not any(where in self._excluded for where in paths.values())
        self.holders.append(Holder(path, module, value, watched=every))
        if not every:
            names = [key for key, where in paths.items() if where not in self._excluded]
            get = value.get if isinstance(value, dict) else value.__getitem__
            self.holders.append(Holder(path, module, value, names, get, restored=False))
        for (key, where), item in zip(paths.items(), value.values() if isinstance(value, dict) else value, strict=True):
            if not isinstance(key, (str, int)):
                self._visit(key, f"{where}#", module)
            self._visit(item, where, module)
        if not _of_library(type(value).__module__):
            if hasattr(value, "__dict__"):
                self.holders.append(Holder(path, module, vars(value), watched=False))
                self._picked(vars(value), path, module, list(vars(value)))
            self._visit_classes(type(value), path, module)


def plain(value: Any) -> Any:
    """Return what is equal for equal values of Python's own types, nothing but such in them; None: of another type."""
    kind = type(value)
    if isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, tuple) and all(isinstance(each, PLAIN) for each in value) and kind.__module__ in _LIBRARIES:
        return kind, value, tuple(map(type, value))
    return None


def content(array: np.ndarray) -> Any:
    """Return what tells two contents of an array apart."""
    data = array.tobytes()
    return array.dtype, array.shape, data if len(data) < 1000 else hash(data)


class Identity:
    """A value that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names that a function's code has: of attributes, global variables, keys; those inside of it too."""
    found = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str) and one.isidentifier())}
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= names_of(one)
    return frozenset(found)


def _of_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


@lru_cache(maxsize=4096)
def _own(kind: type) -> bool:
    """Return whether all code of a class is the user's, but for what all modules have."""
    return all(cls in _BASES or not _of_library(cls.__module__) for cls in kind.__mro__)


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, staticmethod, classmethod, property))
