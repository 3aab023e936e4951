"""YAML text to a tree of nodes, without constructing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import yaml

from ..errors import ConfigError
from .scalars import scalar
from .tree import Node, Plain, fault, join, message

MAX_NODES = 10_000  # aliases of aliases can unfold into billions
MAX_DEPTH = 50
CORE = "tag:yaml.org,2002:"
SCALARS = ("null", "bool", "int", "float", "str", "timestamp", "value", "merge")
KINDS: dict[type, tuple[str, ...]] = {yaml.ScalarNode: SCALARS, yaml.SequenceNode: ("seq",), yaml.MappingNode: ("map",)}

Where: TypeAlias = Callable[[int], str]


def parse(text: str, where: Where, path: str = "", most_nodes: int = MAX_NODES) -> Node | None:
    """Return the tree of a YAML document, or None for an empty one.

    Parameters
    ----------
    text : the document
    where : line, counted from 0 → its place, such as 'FILE:LINE'
    path : the dotted path of the document's root, for messages
    most_nodes : the number of values that aliases may unfold into

    Raises
    ------
    ConfigError
        Syntax errors, forbidden tags, keys given twice, aliases that unfold without end.
    """
    root = _compose(text, where, path)
    return None if root is None else _Walk(where, most_nodes).node(root, path, where(root.start_mark.line))


def _compose(text: str, where: Where, path: str) -> yaml.Node | None:
    try:
        loader = yaml.SafeLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        problem = error.problem or "unreadable"
        remedy = "; indent with spaces, not tabs" if "'\\t'" in problem else "; check indentation, brackets and colons"
        raise ConfigError(message(where(line), path, f"not valid YAML: {problem}{remedy}")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        what = "not a text file: it has a character that YAML does not allow; remove it"
        raise ConfigError(message(where(line), path, what)) from None
    except RecursionError:
        raise ConfigError(message(where(0), path, _DEEP)) from None


_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep; flatten them"


class _Walk:
    """Copies a YAML node graph into a tree, so that an alias becomes a value of its own."""

    def __init__(self, where: Where, most_nodes: int) -> None:
        self.where, self.most_nodes = where, most_nodes
        self.count = 0
        self.open: list[int] = []

    def node(self, source: yaml.Node, path: str, place: str) -> Node:
        here = Node(None, place)
        self.count += 1
        if self.count > self.most_nodes:
            raise fault(here, path, f"aliases unfold into more than {self.most_nodes} values; write fewer")
        if id(source) in self.open:
            raise fault(here, path, "an alias refers to a value that contains it; remove the alias")
        if len(self.open) >= MAX_DEPTH:
            raise fault(here, path, _DEEP)
        here.tag = self._tag(source, path, here)
        self.open.append(id(source))
        if isinstance(source, yaml.MappingNode):
            here.value = self._fields(source, path, here)
        elif here.tag is not None:
            if isinstance(source, yaml.SequenceNode) or source.value:
                raise fault(here, path, f"!{here.tag} takes its fields by name; write !{here.tag} {{field: value}}")
            here.value = {}
        elif isinstance(source, yaml.SequenceNode):
            here.value = [
                self.node(item, join(path, i), self.where(item.start_mark.line)) for i, item in enumerate(source.value)
            ]
        elif isinstance(source, yaml.ScalarNode):
            here.value = self._scalar(source, path, here)
        self.open.pop()
        return here

    def _tag(self, source: yaml.Node, path: str, here: Node) -> str | None:
        tag: str = source.tag
        if tag.startswith("!"):
            return tag[1:] or None
        kind = tag.removeprefix(CORE)
        if tag == kind or kind not in KINDS.get(type(source), ()):
            name = f"!!{kind}" if tag != kind else f"!<{tag}>"
            raise fault(here, path, f"the tag {name} is not allowed; a tag names a neondist class, such as !MNIST")
        return None

    def _scalar(self, source: yaml.ScalarNode, path: str, here: Node) -> Plain:
        kind = source.tag.removeprefix(CORE)
        try:
            return scalar(source.value, kind, quoted=source.style is not None)
        except ValueError:
            raise fault(here, path, f"'{source.value}' is not a !!{kind}; remove the tag") from None

    def _fields(self, source: yaml.MappingNode, path: str, here: Node) -> dict[str, Node]:
        fields: dict[str, Node] = {}
        merged: list[yaml.Node] = []
        for key, value in source.value:
            at = Node(None, self.where(key.start_mark.line))
            if not isinstance(key, yaml.ScalarNode):
                raise fault(at, path, "a field's name must be a word, not a list or a mapping")
            if key.tag == CORE + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if key.value in fields:
                first = fields[key.value].place
                raise fault(at, join(path, key.value), f"given twice, first at {first}; remove one")
            fields[key.value] = self.node(value, join(path, key.value), at.place)
        for base in merged:  # '<<: *name' gives defaults for the fields that are not there
            if not isinstance(base, yaml.MappingNode):
                raise fault(here, path, "'<<' merges mappings only; write '<<: *name' of one")
            for name, node in self.node(base, path, here.place).value.items():  # type: ignore[union-attr]
                fields.setdefault(name, node)
        return fields
