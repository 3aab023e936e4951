"""A tree of nodes to the objects that it names."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, UserError
from ..registry import Distributed, dist_class, registered, serial_class, suggest
from ..registry.fields import Field, fields
from ..registry.words import bases, words
from .fit import fit
from .source import Source, locate, mark, place
from .tree import Node, fault, join


def find_class(node: Node, path: str, hint: Any = Any) -> type:
    """Return the class that a node's tag names; where none is near, the message lists those that `hint` allows."""
    classes = registered()
    name = node.tag or ""
    if name in classes:
        return classes[name]
    near = suggest(name, classes)
    wanted = tuple(bases(hint))
    if wanted and not near.startswith("; did"):
        near = suggest(name, [known for known, cls in classes.items() if issubclass(cls, wanted)])
    raise fault(node, path, f"unknown tag !{name}{near}")


class Builder:
    """Builds objects, each class replaced by its distributed or its serial twin.

    Parameters
    ----------
    dist : True for distributed classes, False for serial ones
    """

    def __init__(self, dist: bool) -> None:
        self.dist = dist

    def build(self, node: Node, path: str = "", hint: Any = Any) -> Any:
        """Return the object of a tagged node, its fields built first."""
        cls = self._twin(find_class(node, path, hint), node, path)
        given = node.value if isinstance(node.value, dict) else {}
        known = fields(cls)
        for name, child in given.items():
            if name not in known:
                raise fault(child, join(path, name), unknown_field(cls, name, known))
        for name, field in known.items():
            if field.required and name not in given:
                needs = "" if field.hint is Any else f" ({words(field.hint)})"
                raise fault(node, join(path, name), f"missing; {cls.__name__} needs it: add '{name}: ...'{needs}")
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
