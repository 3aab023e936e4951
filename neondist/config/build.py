"""Construction of objects from a tree of nodes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any

from ..errors import ConfigError, MissingPackageError, UserError
from ..registry import DistributedMixin, Registered, dist_class, registered_classes, serial_class, suggest
from ..registry.fields import Field, constructor_fields
from ..registry.functions import NamedFunction
from ..registry.names import classes_by_name, classes_by_short_name, subclasses
from ..registry.type_hints import describe_hint, registered_classes_in_hint
from ..yaml_nodes.convert import convert_node
from ..yaml_nodes.tree import Node, join_path, node_error
from .source import SourcePosition, add_location, describe_yaml_location, set_source

TORCH_TAGS = "TorchLoss", "TorchModel", "TorchOptimizer"
"""Tags whose classes need PyTorch, which takes seconds to import."""


def find_class(node: Node, path: str, hint: Any = Any) -> type:
    """Return the class named by a node's tag; errors suggest the classes that `hint` allows."""
    name = node.tag or ""
    if name in TORCH_TAGS:
        try:
            from .. import torch  # noqa: F401 - registers them
        except MissingPackageError as error:
            raise node_error(node, path, str(error)) from None
    for base in registered_classes_in_hint(hint):
        if name in (short_names := classes_by_short_name(base)):
            return short_names[name]
    classes = registered_classes()
    if name in classes:
        matches = [cls for cls in subclasses(Registered) if name in classes_by_name([cls])]
        user_modules = [cls.__module__ for cls in matches if not cls.__module__.startswith("neondist.")]
        if user_modules and len(user_modules) < len(matches):
            raise node_error(
                node, path, f"!{name} is a class of both neondist and {user_modules[0]}; rename your class"
            )
        return classes[name]
    for cls in subclasses(Registered):
        if cls.__name__ == name and inspect.isabstract(cls):
            missing_methods = ", ".join(sorted(vars(cls)["__abstractmethods__"]))
            raise node_error(node, path, f"!{name} cannot be created: class {name} must define {missing_methods}")
    allowed_classes = tuple(registered_classes_in_hint(hint)) or object
    allowed_names = [other for other, cls in classes.items() if issubclass(cls, allowed_classes)]
    suggestion = suggest(name, [*allowed_names, *TORCH_TAGS])
    if not suggestion.startswith("; did"):
        suggestion = suggest(name, allowed_names)
    raise node_error(node, path, f"unknown tag !{name}{suggestion}")


class ObjectBuilder:
    """Builder of objects, with each class replaced by its distributed or its serial counterpart.

    Parameters
    ----------
    distributed : True for distributed classes, False for serial ones
    modules : names of modules whose functions the file may name
    """

    def __init__(self, distributed: bool, modules: Collection[str] = ()) -> None:
        self.distributed, self.modules = distributed, modules

    def build(self, node: Node, path: str = "", hint: Any = Any) -> Any:
        """Return the object of a tagged node, or the function that a node without a tag names; build fields first."""
        if node.tag is None:
            return self._find_function(node, path)
        cls = self._serial_or_dist_class(find_class(node, path, hint), node, path)
        nodes = node.value if isinstance(node.value, dict) else {}
        class_fields = constructor_fields(cls)
        for name, child in nodes.items():
            if name not in class_fields:
                raise node_error(child, join_path(path, name), describe_unknown_field(cls, name, class_fields))
        for name, field in class_fields.items():
            if field.required and name not in nodes:
                type_text = "" if field.hint is Any else f" ({describe_hint(field.hint)})"
                raise node_error(
                    node, join_path(path, name), f"missing; {cls.__name__} requires it: add '{name}: ...'{type_text}"
                )
        arguments = {
            name: convert_node(child, class_fields[name].hint, join_path(path, name), self.build)
            for name, child in nodes.items()
        }
        field_places = {name: nodes[name].place if name in nodes else node.place for name in class_fields}
        source = SourcePosition(node.place, path, field_places)
        try:
            obj = cls(**arguments)
        except UserError as error:
            if describe_yaml_location(getattr(error, "subject", None)):  # the error concerns a part built earlier
                raise add_location(error) from None
            error.args = (source.message(str(error)),)
            raise
        set_source(obj, source)
        return obj

    def _find_function(self, node: Node, path: str) -> NamedFunction:
        module, _, name = str(node.value).partition(":")
        if module not in self.modules:
            remedy = f"add --import {module} (or the path of {module}.py)" if module else "write MODULE:NAME"
            raise node_error(node, path, f"'{node.value}': no module '{module}' is imported; {remedy}")
        names = [name for name, value in vars(sys.modules[module]).items() if callable(value) and name[:1] != "_"]
        if name not in names:
            raise node_error(node, path, f"'{node.value}': {module} has no function '{name}'{suggest(name, names)}")
        function = getattr(sys.modules[module], name)
        owner = str(getattr(function, "__module__", ""))
        if owner.partition(".")[0] != module.partition(".")[0]:  # such as an imported subprocess.run
            raise node_error(node, path, f"'{node.value}' is defined in {owner}; name a function defined in {module}")
        return NamedFunction(str(node.value), function)

    def _serial_or_dist_class(self, cls: type, node: Node, path: str) -> type:
        if not self.distributed:
            return serial_class(cls)
        if issubclass(cls, DistributedMixin):
            return cls
        try:
            return dist_class(cls)
        except ConfigError as error:
            if getattr(cls, "has_dist_counterpart", False):
                raise node_error(node, path, str(error)) from None
            return cls


def describe_unknown_field(cls: type, name: str, names: dict[str, Field]) -> str:
    """Return the message for a field that the class does not have."""
    return f"{cls.__name__} has no field '{name}'{suggest(name, names) or '; it has no fields'}"
