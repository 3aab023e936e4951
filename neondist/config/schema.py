"""JSON Schema of experiment files, from the same constructors as the check of a file; for editors."""

from __future__ import annotations

import collections.abc
import inspect
import math
import re
import typing
from os import PathLike
from typing import Any

from ..layers import Node
from ..registry import registered
from ..registry.fields import Field, fields
from ..registry.names import below, named
from ..registry.ranges import Range
from ..registry.words import bare, bases, members, ranges

_PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_CHAIN = "layers"  # each a layer, or a list of layers again


def schema(top: str = "FitExperiment") -> dict[str, Any]:
    """Return the JSON Schema of files whose top object is of the class of that name.

    Editors check a tagged value by its fields alone: where several classes may stand, it is that of any of them.
    """
    classes = registered()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "neondist experiment",
        "$ref": f"#/definitions/{top}",
        "definitions": {name: _of_class(cls) for name, cls in sorted(classes.items())}
        | {_CHAIN: {"type": "array", "items": {"anyOf": [_of_hint(Node), {"$ref": f"#/definitions/{_CHAIN}"}]}}},
    }


def tags() -> list[str]:
    """Return all tags, as the setting yaml.customTags of editors takes them."""
    return [f"!{name} mapping" for name in sorted(registered())]


def _of_class(cls: type) -> dict[str, Any]:
    known, told = fields(cls), _docs(cls)
    head = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    properties = {name: _of_field(field, told.get(name)) for name, field in known.items()}
    needed = [name for name, field in known.items() if field.required]
    more = {"required": needed} if needed else {}
    return {
        "type": "object" if needed else ["object", "null"],
        "description": head,
        "properties": properties,
        "additionalProperties": False,
        **more,
    }


def _of_field(field: Field, told: str | None) -> dict[str, Any]:
    found = _of_hint(field.hint)
    if told:
        found = {"description": told} | (found if "$ref" not in found else {"allOf": [found]})
    if not field.required and isinstance(field.default, bool | int | float | str):
        found |= {"default": field.default}
    return found


def _of_hint(hint: Any) -> dict[str, Any]:
    bounds = _bounds(ranges(hint))
    options: list[dict[str, Any]] = []
    for member in members(hint):
        one = _of_member(member)
        if one.get("type") in ("integer", "number"):
            one = one | bounds
        options += one["anyOf"] if set(one) == {"anyOf"} else [one]
    options = [one for at, one in enumerate(options) if one not in options[:at]]
    if {} in options:
        return {}
    return options[0] if len(options) == 1 else {"anyOf": options}


def _of_member(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    kind = origin or hint
    if found := bases(hint):
        names = sorted(name for name, cls in named([*found, *below(found[0])]).items() if name == cls.__name__)
        return {"anyOf": [{"$ref": f"#/definitions/{name}"} for name in names]}
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if not isinstance(kind, type) or kind is object:
        return {}
    if issubclass(kind, PathLike) or kind is collections.abc.Callable:
        return {"type": "string"}
    if issubclass(kind, collections.abc.Mapping):
        return {"type": "object", **({"additionalProperties": _of_hint(args[-1])} if args else {})}
    if issubclass(kind, tuple) and args and args[-1] is not Ellipsis:
        return {"type": "array", "items": [_of_hint(arg) for arg in args], "minItems": len(args), "maxItems": len(args)}
    if issubclass(kind, collections.abc.Iterable) and Node in members(*args[:1] or (None,)):
        return {"$ref": f"#/definitions/{_CHAIN}"}
    if issubclass(kind, collections.abc.Iterable):
        return {"type": "array", **({"items": _of_hint(bare(args[0]) and args[0])} if args else {})}
    return {}


def _bounds(found: tuple[Range, ...]) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for one in found:
        if one.low > -math.inf:
            bounds["exclusiveMinimum" if one.above else "minimum"] = one.low
        if one.high < math.inf:
            bounds["exclusiveMaximum" if one.below else "maximum"] = one.high
    return bounds


def _docs(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of each argument."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, rest = text.partition("Parameters\n----------\n")
        for names, body in re.findall(r"^(\w[\w, ]*?)(?: :.*)?\n((?:    .*\n?|\n(?=    ))+)", rest + "\n", re.M):
            for name in names.split(", "):
                found.setdefault(name, " ".join(body.split()))
    return found
