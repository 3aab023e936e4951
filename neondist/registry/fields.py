"""The fields of a class: its constructor's arguments."""

from __future__ import annotations

import inspect
import sys
import typing
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

_NAMED_PARAMETER_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


#: fields by class, for the lifetime of the class
_fields_by_class: WeakKeyDictionary[type, dict[str, Field]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Field:
    """One constructor argument."""

    hint: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """Whether the argument has no default."""
        return self.default is inspect.Parameter.empty


def constructor_fields(cls: type) -> dict[str, Field]:
    """Return the constructor's arguments by name; **kwargs stands for the arguments of the next class in the MRO."""
    if cls in _fields_by_class:
        return _fields_by_class[cls]
    result: dict[str, Field] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        hints = resolve_type_hints(init)
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in _NAMED_PARAMETER_KINDS:
                result.setdefault(parameter.name, Field(hints.get(parameter.name, Any), parameter.default))
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    _fields_by_class[cls] = result  # stored only when complete: virtual ranks are concurrent threads
    return result


def resolve_type_hints(function: Any) -> dict[str, Any]:
    """Return the type hints; hints that cannot be evaluated (names imported only for type checkers) become Any."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:
        pass
    hints: dict[str, Any] = {}
    names = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            hints[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint
        except Exception:
            hints[name] = Any
    return hints
