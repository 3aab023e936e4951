"""Registry of YAML tags: every subclass of `Registered` can be used as a tag, with checked arguments.

Tags are class names, found in Python's list of subclasses: users only define a subclass, and do not register it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from .arguments import check_arguments
from .fields import constructor_fields
from .names import classes_by_name, subclasses, suggest

__all__ = ["DistributedMixin", "Registered", "dist_class", "registered_classes", "serial_class", "suggest"]


_signature = lru_cache(maxsize=1024)(inspect.signature)


class _ConstructorSignature:
    """Signature of a class for `inspect.signature` and `help`: the constructor's arguments, with **kwargs expanded.

    Otherwise `inspect` and `help` would show the signature of `Registered.__new__`.
    """

    def __get__(self, instance: object, cls: Any) -> inspect.Signature:
        if instance is not None:  # a callable object has the signature of its __call__
            raise AttributeError("__signature__")
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        parameters = list(_signature(cls.__init__).parameters.values())[1:]
        named_parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in named_parameters}
        inherited = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.hint)
            for name, field in constructor_fields(cls).items()
            if name not in names
        ]
        return inspect.Signature([*named_parameters, *inherited])


class Registered:
    """Base of all classes that a YAML file may name; stores the constructor's arguments."""

    __signature__ = _ConstructorSignature()
    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        self = super().__new__(cls)
        self._arguments = {}
        if cls.__init__ is object.__init__:  # no arguments; inspect would parse the signature from text
            if args or kwargs:
                raise TypeError(f"{cls.__name__} takes no arguments")
            return self
        try:
            bound_arguments = _signature(cls.__init__).bind_partial(self, *args, **kwargs)
        except TypeError as error:
            declared = inspect.signature(cls).parameters.values()
            expected = inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in declared])
            raise TypeError(f"{cls.__name__}: {error}; expected {cls.__name__}{expected}") from None
        arguments = dict(list(bound_arguments.arguments.items())[1:])
        check_arguments(cls, arguments | arguments.pop("kwargs", {}))
        bound_arguments.apply_defaults()
        values = dict(list(bound_arguments.arguments.items())[1:])
        if "kwargs" in values:
            extra_values = values.pop("kwargs")
            class_fields = constructor_fields(cls)
            defaults = {name: field.default for name, field in class_fields.items() if not field.required}
            values = defaults | values | extra_values
        values.pop("args", None)
        self._arguments = values
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, defaults included (a new dict)."""
        return dict(self._arguments)


class DistributedMixin:
    """Marker of mixins that make a serial class distributed: `class FooDist(Dist, Foo)`."""

    distributed: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if any(vars(base).get("distributed") for base in cls.__mro__) and not cls.distributed:
            bases = sorted(cls.__bases__, key=lambda base: not issubclass(base, DistributedMixin))
            right_order = ", ".join(base.__name__ for base in bases)
            raise ConfigError(f"class {cls.__name__}: list the mixin first: class {cls.__name__}({right_order})")


def registered_classes(base: type = Registered) -> dict[str, type]:
    """Return all concrete public subclasses of `base` by name, and by the aliases in `_aliases`."""
    return classes_by_name(subclasses(base))


def serial_class(cls: type) -> type:
    """Return the serial counterpart of a distributed class; return a serial class unchanged."""
    if not issubclass(cls, DistributedMixin):
        return cls
    return next(base for base in cls.__mro__ if not issubclass(base, DistributedMixin) and base is not cls)


def dist_class(cls: type) -> type:
    """Return the distributed counterpart of a serial class; ConfigError with instructions if there is none."""
    if issubclass(cls, DistributedMixin):
        return cls
    for candidate in registered_classes().values():
        if issubclass(candidate, DistributedMixin) and serial_class(candidate) is cls:
            return candidate
    name = cls.__name__
    raise ConfigError(
        f"{name} has no distributed class; define one next to {name}: class {name}Dist(nd.Dist, {name}): pass"
        " (docs/adding_a_layer.md)"
    )
