"""Values that the `forward` of a module can reach.

The values are attributes of modules and objects, items of containers, closures, defaults, class attributes and global
variables to which user code that `forward` may call refers by name.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import dis
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

from .value_container import MISSING, ValueContainer, get_or_missing

NN_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_VISITED_MODULE_ATTRIBUTES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, np.generic)
_CONTAINER_TYPES = (list, tuple, dict, set, frozenset, deque)
_CODE_TYPES = (FunctionType, staticmethod, classmethod, property)
_LIBRARY_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "neondist", "builtins"}
_DATA_HOLDING_PACKAGES = frozenset(("types", "argparse", "collections", "functools", "_thread"))
"""Standard-library modules whose objects may hold user values."""
_COMMON_BASE_CLASSES = (object, nn.Module, Generic, Protocol)
_IGNORED_METHODS = frozenset((
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__str__", "__del__", "__dir__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
))  # fmt: skip
_ENVIRONMENT_NAMES = frozenset(("environ", "getenv"))
GRADIENT_MODE_NAMES = frozenset(("is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "grad_fn", "is_leaf"))
"""Names that code uses to determine whether PyTorch computes gradients."""
_NAME_OPS = "LOAD_NAME", "IMPORT_NAME"
_DYNAMIC_ACCESS_NAMES = frozenset(("getattr", "vars", "__dict__", "attrgetter", "__getattribute__", "eval", "exec"))

_LRU_CACHE_TYPE = type(lru_cache(int))
_CTYPES_TYPES: Any = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def _dereference(proxy: Any) -> Any:
    """Return the referent of a weak proxy, or None if it no longer exists."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _slot_attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, MISSING)


def _closure_cell_content(cells: Any, index: int) -> Any:
    return cells[index].cell_contents


class ReachableState:
    """Everything that the code of a module, or of a function, can reach.

    Parameters
    ----------
    root : nn.Module or callable
    used_names : set of str
        Names used by the code; extended in place.
    excluded : collection of str
        Paths of values to leave out.

    Attributes
    ----------
    containers : list of ValueContainer
    key_by_path : dict
        Comparison key of the value at each path; two keys are equal if the code would read equal values.
    tensors : list of tensors
    arrays : dict of path to NumPy array
    random_generators, iterators : dict of path to object
        Objects that return a different value at each use.
    caches : list of functions
        Functions with a functools cache.
    """

    def __init__(self, root: Any, used_names: set[str], excluded: Collection[str] = frozenset()) -> None:
        self.used_names, self._excluded = used_names, excluded
        used_names.update(("forward", "training"))
        old_name_count = -1
        while old_name_count < len(used_names):  # code reached by these names may use further names
            old_name_count = len(used_names)
            self._has_dynamic_access = not _DYNAMIC_ACCESS_NAMES.isdisjoint(used_names)
            self.containers: list[ValueContainer] = []
            self.key_by_path: dict[str, Any] = {}
            self.tensors: list[torch.Tensor] = []
            self.arrays: dict[str, np.ndarray] = {}
            self.random_generators: dict[str, Any] = {}
            self.iterators: dict[str, Any] = {}
            self.caches: list[Any] = []
            self._path_by_id: dict[int, str] = {}
            self._kept_alive: list[Any] = []
            self._globals: dict[int, tuple[dict[str, Any], str, dict[str, None]]] = {}
            self._root = root
            self._visit(root, "", None)
            if not _ENVIRONMENT_NAMES.isdisjoint(used_names):
                self._visit_computed_value(os.environ, "os.environ", None, lambda: repr(os.environ))
            if self.depends_on_grad_mode:
                self._visit_computed_value(torch, "torch.is_grad_enabled()", None, torch.is_grad_enabled)
            for variables, path, visited in self._globals.values():
                self.containers.append(ValueContainer(path, None, variables, list(visited), variables.get, "."))

    @property
    def depends_on_grad_mode(self) -> bool:
        """Whether the code may depend on whether gradients are computed."""
        return not GRADIENT_MODE_NAMES.isdisjoint(self.used_names)

    def _visit(self, value: Any, path: str, module: nn.Module | None) -> None:
        """Record a value and everything reachable from it."""
        if type(value) in weakref.ProxyTypes:
            value = _dereference(value)
        if path in self._excluded:
            return
        if (leaf := plain_key(value)) is not None:
            self.key_by_path[path] = leaf
            return
        if id(value) in self._path_by_id:
            self.key_by_path[path] = "same as", self._path_by_id[id(value)]
            return
        self._path_by_id[id(value)] = path
        self._kept_alive.append(value)  # otherwise, another object could get its id
        kind = type(value)
        self.key_by_path[path] = kind
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.key_by_path[path] = IdentityKey(value), value.dtype, value.device
        elif isinstance(value, nn.Module) and (value is self._root or getattr(kind, "watched", True)):
            self._visit_module(value, path)
        elif isinstance(value, nn.Module):
            self.key_by_path[path] = IdentityKey(value)
        elif isinstance(value, _CONTAINER_TYPES):
            self._visit_items(value, path, module)
        elif isinstance(value, np.ndarray):
            self.arrays[path] = value
            self.key_by_path[path] = content_key(value)
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
            if not _is_library_module(value.__name__):
                self._visit_globals(vars(value), value.__name__, self.used_names, module)
        elif isinstance(value, type):
            self._visit_class(value, path, module)
        elif isinstance(value, weakref.ReferenceType):
            self._visit(value(), f"{path}()", module)
        elif isinstance(value, contextvars.ContextVar):
            self._visit_computed_value(value, f"{path}.get()", module, partial(value.get, None))
        elif isinstance(value, (bytearray, array.array)):
            self._visit_computed_value(value, path, module, partial(bytes, value))
        elif isinstance(value, _CTYPES_TYPES):
            self._visit(np.frombuffer(memoryview(value).cast("B"), np.uint8), f"{path}.value", module)
        elif kind.__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
            self._visit(value.get_obj(), path, module)
        else:
            self._visit_object(value, path, module)

    def _visit_computed_value(self, owner: Any, path: str, module: nn.Module | None, read: Callable[[], Any]) -> None:
        """Visit the result of `read`, which is called again before each pass."""
        self.containers.append(ValueContainer(path, module, owner, ("",), lambda _: read(), is_restored=False))
        self._visit(read(), path, module)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        attributes = vars(module)
        for name in NN_MODULE_ATTRIBUTES & attributes.keys():
            members = attributes[name]
            if not isinstance(members, (dict, set)):
                continue
            if name in _VISITED_MODULE_ATTRIBUTES and path not in self._excluded:
                self._visit_registered(members, name, path, module)
            else:
                container = ValueContainer(f"{path}.{name}", module, members, in_nn_module=True, is_watched=False)
                self.containers.append(container)
        reads_all = self._has_dynamic_access or not _is_user_class(cast(Any, type(module)))
        names = [n for n in attributes if n not in NN_MODULE_ATTRIBUTES and (reads_all or n in self.used_names)]
        names += ["training"] * ("training" in attributes)
        self.containers.append(ValueContainer(path, module, attributes, name_separator=".", is_watched=False))
        self._visit_attrs(attributes, path, module, names)
        self._visit_classes_of(type(module), path, module)

    def _visit_registered(self, members: Any, name: str, path: str, module: nn.Module) -> None:
        watched = name != "_buffers"  # a forward pass may replace buffers
        self.containers.append(ValueContainer(f"{path}.{name}", module, members, in_nn_module=True, is_watched=watched))
        for key, value in members.items():
            member_path = f"{path}.{key}".removeprefix(".")
            if name in ("_parameters", "_buffers") and isinstance(value, torch.Tensor):
                first_path = self._path_by_id.setdefault(id(value), member_path)
                is_trained = self.depends_on_grad_mode and value.requires_grad
                self.key_by_path[member_path] = name, first_path, value.dtype, value.device, value.shape, is_trained
                self.tensors.append(value)
                self._kept_alive.append(value)
            else:
                self._visit(value, member_path if name == "_modules" else f"{path}.{name}[{key}]", module)

    def _visit_function(self, function: FunctionType, path: str, module: nn.Module | None) -> None:
        self.key_by_path[path] = function.__code__
        cells = function.__closure__ or ()
        if cells:
            self.containers.append(
                ValueContainer(path, module, cells, range(len(cells)), partial(_closure_cell_content, cells))
            )
        for index, name in enumerate(function.__code__.co_freevars):
            if (value := get_or_missing(partial(_closure_cell_content, cells), index)) is not MISSING:
                self._visit(value, f"{path}:{name}", module)
        for name in ("__defaults__", "__kwdefaults__"):
            self._visit(getattr(function, name), f"{path}.{name}", module)
        if vars(function):
            self._visit_attrs(vars(function), path, module, list(vars(function)))
        if not _is_library_module(function.__module__):
            used_names = names_used_by(function.__code__)
            self.used_names.update(used_names)
            global_names = global_names_used_by(function.__code__)
            self._visit_globals(function.__globals__, function.__module__ or "", global_names, module)
            for name in used_names & sys.modules.keys() - function.__globals__.keys():  # imported inside the function
                self._visit(sys.modules[name], f"module {name}", module)

    def _visit_globals(
        self, variables: dict[str, Any], owner: str, names: Collection[str], module: nn.Module | None
    ) -> None:
        path = f"module {owner}"
        visited_names = self._globals.setdefault(id(variables), (variables, path, {}))[2]
        for name in sorted(names):
            if name in variables and name not in visited_names and f"{path}.{name}" not in self._excluded:
                visited_names[name] = None
                self._visit(variables[name], f"{path}.{name}", module)

    def _visit_object(self, value: Any, path: str, module: nn.Module | None) -> None:
        cls = type(value)
        package = (cls.__module__ or "").partition(".")[0]
        if package in ("builtins", "itertools") and hasattr(value, "__next__"):
            self.iterators[path] = value
        if isinstance(value, _LRU_CACHE_TYPE):
            self.caches.append(value)
        if cls.__module__ == "random" or isinstance(value, (np.random.Generator, np.random.RandomState)):
            self.random_generators[path] = value
        is_torch_object = cls.__module__.startswith(("torch.optim", "torch.distributions"))
        is_relevant = not _is_library_module(cls.__module__) or package in _DATA_HOLDING_PACKAGES or is_torch_object
        if (
            isinstance(value, enum.Enum)
            or not is_relevant
            or not (hasattr(value, "__dict__") or _slot_attribute_names(cast(Any, cls)))
        ):
            self.key_by_path[path] = IdentityKey(value)
            return
        reads_all = self._has_dynamic_access or not (_is_user_class(cast(Any, cls)) or is_torch_object)
        if hasattr(value, "__dict__"):
            attributes = vars(value)
            self.containers.append(ValueContainer(path, module, attributes, is_watched=False))
            self._visit_attrs(attributes, path, module, [n for n in attributes if reads_all or n in self.used_names])
        slot_names = [
            name
            for name in _slot_attribute_names(cast(Any, cls))
            if (reads_all or name in self.used_names) and _slot_attribute(value, name) is not MISSING
        ]
        if slot_names:
            self.containers.append(ValueContainer(path, module, value, slot_names, partial(_slot_attribute, value)))
            for name in slot_names:
                self._visit(_slot_attribute(value, name), f"{path}.{name}", module)
        self._visit_classes_of(cls, path, module)

    def _visit_classes_of(self, base: type, path: str, module: nn.Module | None) -> None:
        for cls in base.__mro__:
            self._visit(cls, f"class {cls.__module__}.{cls.__qualname__}", module)

    def _visit_class(self, cls: type, path: str, module: nn.Module | None) -> None:
        if _is_library_module(cls.__module__) or issubclass(cls, enum.Enum):
            return
        names = [
            name
            for name, value in vars(cls).items()
            if name in self.used_names
            or (name[:2] == "__" == name[-2:] and name not in _IGNORED_METHODS and isinstance(value, _CODE_TYPES))
        ]
        names = [name for name in names if f"{path}.{name}" not in self._excluded]
        self.containers.append(ValueContainer(path, module, cls, names, vars(cls).get, "."))
        for name in names:
            self._visit(vars(cls)[name], f"{path}.{name}", module)

    def _visit_attrs(self, attrs: dict[str, Any], path: str, module: nn.Module | None, names: Collection[str]) -> None:
        paths = {name: f"{path}.{name}".removeprefix(".") for name in names}
        paths = {name: attr_path for name, attr_path in paths.items() if attr_path not in self._excluded}
        self.containers.append(ValueContainer(path, module, attrs, list(paths), attrs.get, is_restored=False))
        for name, attr_path in paths.items():
            self._visit(attrs[name], attr_path, module)

    def _visit_items(self, value: Any, path: str, module: nn.Module | None) -> None:
        self.key_by_path[path] = type(value), len(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        paths = {
            key: f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[#{position}]"
            for position, (key, _) in enumerate(items)
        }
        is_complete = not any(item_path in self._excluded for item_path in paths.values())
        self.containers.append(ValueContainer(path, module, value, is_watched=is_complete))
        if not is_complete:
            names = [key for key, item_path in paths.items() if item_path not in self._excluded]
            get_item = value.get if isinstance(value, dict) else value.__getitem__
            self.containers.append(ValueContainer(path, module, value, names, get_item, is_restored=False))
        members = value.values() if isinstance(value, dict) else value
        for (key, item_path), item in zip(paths.items(), members, strict=True):
            if not isinstance(key, (str, int)):
                self._visit(key, f"{item_path}#", module)
            self._visit(item, item_path, module)
        if not _is_library_module(type(value).__module__):
            if hasattr(value, "__dict__"):
                self.containers.append(ValueContainer(path, module, vars(value), is_watched=False))
                self._visit_attrs(vars(value), path, module, list(vars(value)))
            self._visit_classes_of(type(value), path, module)


def plain_key(value: Any) -> Any:
    """Return a comparison key of a value of PLAIN_TYPES, or of a tuple of such values; None for other values."""
    kind = type(value)
    if isinstance(value, PLAIN_TYPES):
        return kind, value
    if (
        isinstance(value, tuple)
        and all(isinstance(item, PLAIN_TYPES) for item in value)
        and kind.__module__ in _LIBRARY_PACKAGES
    ):
        return kind, value, tuple(map(type, value))
    return None


def content_key(array: np.ndarray) -> Any:
    """Return a comparison key of the contents of an array."""
    data = array.tobytes()
    return array.dtype, array.shape, data if len(data) < 1000 else hash(data)


class IdentityKey:
    """Comparison key of a value by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(maxsize=4096)
def names_used_by(code: CodeType) -> frozenset[str]:
    """Return the names that a function's code uses, nested functions included: attributes, global variables, keys."""
    names = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= names_used_by(const)
    return frozenset(names)


@lru_cache(maxsize=4096)
def global_names_used_by(code: CodeType) -> frozenset[str]:
    """Return the names that a function's code uses, without names of attributes only, such as `data` in `x.data`."""
    names = {const for const in code.co_consts if isinstance(const, str)}
    names.update(op.argval for op in dis.get_instructions(code) if "GLOBAL" in op.opname or op.opname in _NAME_OPS)
    nested = (global_names_used_by(const) for const in code.co_consts if isinstance(const, CodeType))
    return names_used_by(code) & names.union(*nested)


def _is_library_module(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARY_PACKAGES


@lru_cache(maxsize=4096)
def _is_user_class(kind: type) -> bool:
    """Return whether a class is entirely user-defined, apart from common base classes."""
    return all(cls in _COMMON_BASE_CLASSES or not _is_library_module(cls.__module__) for cls in kind.__mro__)


@lru_cache(maxsize=4096)
def _slot_attribute_names(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
