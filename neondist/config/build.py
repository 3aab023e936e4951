"""A tree of nodes to the objects that it names."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from ..errors import ConfigError, MissingPackageError, UserError
from ..registry import Distributed, Registered, dist_class, registered, serial_class, suggest
from ..registry.fields import Field, fields
from ..registry.functions import Function
from ..registry.names import below, called_in_fields, named
from ..registry.words import bases, words
from ..yaml_nodes.tree import Node, fault, join
from .fit import fit
from .source import Source, locate, mark, place

OF_TORCH = "TorchLoss", "TorchModel", "TorchOptimizer"
"""Tags whose classes come with PyTorch, which takes seconds to import."""


def find_class(node: Node, path: str, hint: Any = Any) -> type:
    """Return the class that a node's tag names; where none is near, the message lists those that `hint` allows."""
    name = node.tag or ""
    if name in OF_TORCH:
        try:
            from .. import torch  # noqa: F401 - registers them
        except MissingPackageError as error:
            raise fault(node, path, str(error)) from None
    for base in bases(hint):
        if name in (known := called_in_fields(base)):
            return known[name]
    classes = registered()
    if name in classes:
        found = [cls for cls in below(Registered) if name in named([cls])]
        mine = [cls.__module__ for cls in found if not cls.__module__.startswith("neondist.")]
        if mine and len(mine) < len(found):
            raise fault(node, path, f"!{name} is a class of both neondist and {mine[0]}; rename the latter")
        return classes[name]
    near = suggest(name, [*classes, *OF_TORCH])
    wanted = tuple(bases(hint))
    if wanted and not near.startswith("; did"):
        near = suggest(name, [known for known, cls in classes.items() if issubclass(cls, wanted)])
    raise fault(node, path, f"unknown tag !{name}{near}")


class Builder:
    """Builds objects, each class replaced by its distributed or its serial twin.

    Parameters
    ----------
    dist : True for distributed classes, False for serial ones
    modules : whose functions the file may name
    """

    def __init__(self, dist: bool, modules: Collection[str] = ()) -> None:
        self.dist, self.modules = dist, modules

    def build(self, node: Node, path: str = "", hint: Any = Any) -> Any:
        """Return the object of a tagged node, its fields built first; of a text the function that it names."""
        if node.tag is None:
            return self._function(node, path)
        cls = self._twin(find_class(node, path, hint), node, path)
        given = node.value if isinstance(node.value, dict) else {}
        known = fields(cls)
        for name, child in given.items():
            if name not in known:
                raise fault(child, join(path, name), unknown_field(cls, name, known))
        for name, field in known.items():
            if field.required and name not in given:
                needs = "" if field.hint is Any else f" ({words(field.hint)})"
                raise fault(node, join(path, name), f"missing; {cls.__name__} requires it: add '{name}: ...'{needs}")
        arguments = {name: fit(child, known[name].hint, join(path, name), self.build) for name, child in given.items()}
        places = {name: given[name].place if name in given else node.place for name in known}
        source = Source(node.place, path, places)
        try:
            made = cls(**arguments)
        except UserError as error:
            if locate(getattr(error, "subject", None)):  # about a part that was built before
                raise place(error) from None
            error.args = (source.message(str(error)),)
            raise
        mark(made, source)
        return made

    def _function(self, node: Node, path: str) -> Function:
        module, _, name = str(node.value).partition(":")
        if module not in self.modules:
            remedy = f"add --import {module} (or the path of {module}.py)" if module else "write MODULE:NAME"
            raise fault(node, path, f"'{node.value}': no module '{module}' is imported; {remedy}")
        known = [name for name, value in vars(sys.modules[module]).items() if callable(value) and name[:1] != "_"]
        if name not in known:
            raise fault(node, path, f"'{node.value}': {module} has no function '{name}'{suggest(name, known)}")
        found = getattr(sys.modules[module], name)
        owner = str(getattr(found, "__module__", ""))
        if owner.partition(".")[0] != module.partition(".")[0]:  # such as subprocess.run, that the module uses itself
            raise fault(node, path, f"'{node.value}': is defined in {owner}; name a function defined in {module}")
        return Function(str(node.value), found)

    def _twin(self, cls: type, node: Node, path: str) -> type:
        if not self.dist:
            return serial_class(cls)
        if issubclass(cls, Distributed):
            return cls
        try:
            return dist_class(cls)
        except ConfigError as error:
            if getattr(cls, "has_dist_twin", False):
                raise fault(node, path, str(error)) from None
            return cls


def unknown_field(cls: type, name: str, known: dict[str, Field]) -> str:
    """Return the message for a field that the class does not have."""
    return f"{cls.__name__} has no field '{name}'{suggest(name, known) or '; it has none'}"
