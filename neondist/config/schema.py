"""JSON Schema of experiment files for editors, derived from the constructors that also check a file."""

from __future__ import annotations

import collections.abc
import inspect
import math
import re
import typing
from os import PathLike
from typing import Any

from ..layers import Node
from ..registry import registered_classes
from ..registry.fields import Field, constructor_fields
from ..registry.names import classes_by_name, subclasses
from ..registry.ranges import Range
from ..registry.type_hints import ranges_in_hint, registered_classes_in_hint, union_members, unwrap_hint

_SCHEMA_BY_SCALAR_TYPE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_CHAIN_DEFINITION = "layers"  # list of layers and of nested lists of layers


def experiment_schema(top: str = "FitExperiment") -> dict[str, Any]:
    """Return the JSON Schema of files whose top object is of the class `top`.

    Editors ignore the tag of a value, and accept the fields of any class that is possible at its position.
    """
    classes = registered_classes()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "neondist experiment",
        "$ref": f"#/definitions/{top}",
        "definitions": {name: _class_schema(cls) for name, cls in sorted(classes.items())}
        | {
            _CHAIN_DEFINITION: {
                "type": "array",
                "items": {"anyOf": [_hint_schema(Node), {"$ref": f"#/definitions/{_CHAIN_DEFINITION}"}]},
            }
        },
    }


def yaml_custom_tags() -> list[str]:
    """Return all tags in the form of the editor setting yaml.customTags."""
    return [f"!{name} mapping" for name in sorted(registered_classes())]


def _class_schema(cls: type) -> dict[str, Any]:
    class_fields, descriptions = constructor_fields(cls), _argument_docs(cls)
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    properties = {name: _field_schema(field, descriptions.get(name)) for name, field in class_fields.items()}
    required = [name for name, field in class_fields.items() if field.required]
    required_entry = {"required": required} if required else {}
    return {
        "type": "object" if required else ["object", "null"],
        "description": summary,
        "properties": properties,
        "additionalProperties": False,
        **required_entry,
    }


def _field_schema(field: Field, description: str | None) -> dict[str, Any]:
    schema = _hint_schema(field.hint)
    if description:
        schema = {"description": description} | (schema if "$ref" not in schema else {"allOf": [schema]})
    if not field.required and isinstance(field.default, bool | int | float | str):
        schema |= {"default": field.default}
    return schema


def _hint_schema(hint: Any) -> dict[str, Any]:
    bounds = _bounds_schema(ranges_in_hint(hint))
    options: list[dict[str, Any]] = []
    for member in union_members(hint):
        option = _member_schema(member)
        if option.get("type") in ("integer", "number"):
            option = option | bounds
        options += option["anyOf"] if set(option) == {"anyOf"} else [option]
    options = [option for index, option in enumerate(options) if option not in options[:index]]
    if {} in options:
        return {}
    return options[0] if len(options) == 1 else {"anyOf": options}


def _member_schema(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    base_type = origin or hint
    if classes := registered_classes_in_hint(hint):
        class_by_name = classes_by_name([*classes, *subclasses(classes[0])])
        names = sorted(name for name, cls in class_by_name.items() if name == cls.__name__)
        return {"anyOf": [{"$ref": f"#/definitions/{name}"} for name in names]}
    if base_type in _SCHEMA_BY_SCALAR_TYPE:
        return dict(_SCHEMA_BY_SCALAR_TYPE[base_type])
    if not isinstance(base_type, type) or base_type is object:
        return {}
    if issubclass(base_type, PathLike) or base_type is collections.abc.Callable:
        return {"type": "string"}
    if issubclass(base_type, collections.abc.Mapping):
        return {"type": "object", **({"additionalProperties": _hint_schema(args[-1])} if args else {})}
    if issubclass(base_type, tuple) and args and args[-1] is not Ellipsis:
        n = len(args)
        return {"type": "array", "items": [_hint_schema(arg) for arg in args], "minItems": n, "maxItems": n}
    if issubclass(base_type, collections.abc.Iterable) and Node in union_members(*args[:1] or (None,)):
        return {"$ref": f"#/definitions/{_CHAIN_DEFINITION}"}
    if issubclass(base_type, collections.abc.Iterable):
        return {"type": "array", **({"items": _hint_schema(unwrap_hint(args[0]) and args[0])} if args else {})}
    return {}


def _bounds_schema(intervals: tuple[Range, ...]) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for limit in intervals:
        if limit.low > -math.inf:
            bounds["exclusiveMinimum" if limit.exclude_low else "minimum"] = limit.low
        if limit.high < math.inf:
            bounds["exclusiveMaximum" if limit.exclude_high else "maximum"] = limit.high
    return bounds


def _argument_docs(cls: type) -> dict[str, str]:
    """Return the description of each argument from the docstrings of a class and its bases."""
    docs: dict[str, str] = {}
    for base in cls.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, section = text.partition("Parameters\n----------\n")
        for names, body in re.findall(r"^(\w[\w, ]*?)(?: :.*)?\n((?:    .*\n?|\n(?=    ))+)", section + "\n", re.M):
            for name in names.split(", "):
                docs.setdefault(name, " ".join(body.split()))
    return docs
