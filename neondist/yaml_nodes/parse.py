"""Parsing of YAML text into a tree of nodes, without constructing objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import yaml

from ..errors import ConfigError
from .scalars import scalar
from .tree import Node, Plain, fault, join, message

MAX_NODES = 10_000  # nested aliases can expand to billions
MAX_DEPTH = 50
CORE = "tag:yaml.org,2002:"
SCALARS = ("null", "bool", "int", "float", "str", "timestamp", "value", "merge")
KINDS: dict[type, tuple[str, ...]] = {yaml.ScalarNode: SCALARS, yaml.SequenceNode: ("seq",), yaml.MappingNode: ("map",)}

Locator: TypeAlias = Callable[[int], str]


def parse(text: str, where: Locator, path: str = "", most_nodes: int = MAX_NODES) -> Node | None:
    """Return the tree of a YAML document, or None for an empty one.

    Parameters
    ----------
    text : the document
    where : maps a line number, from 0, to its place, such as 'FILE:LINE'
    path : the dotted path of the document's root, for messages
    most_nodes : the maximum number of values after expansion of aliases

    Raises
    ------
    ConfigError
        For syntax errors, forbidden tags, duplicate keys, and aliases that expand without end.
    """
    root = _compose(text, where, path)
    return None if root is None else _TreeCopier(where, most_nodes).node(root, path, where(root.start_mark.line))


def _compose(text: str, where: Locator, path: str) -> yaml.Node | None:
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
        reason = "not a text file: it has a character that YAML does not allow; remove it"
        raise ConfigError(message(where(line), path, reason)) from None
    except RecursionError:
        raise ConfigError(message(where(0), path, _TOO_DEEP)) from None


_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep; flatten them"


class _TreeCopier:
    """Copies a YAML node graph into a tree, in which each alias is a separate value."""

    def __init__(self, where: Locator, most_nodes: int) -> None:
        self.where, self.most_nodes = where, most_nodes
        self.count = 0
        self.open: list[int] = []

    def node(self, source: yaml.Node, path: str, place: str) -> Node:
        node = Node(None, place)
        self.count += 1
        if self.count > self.most_nodes:
            raise fault(node, path, f"aliases expand to more than {self.most_nodes} values; use fewer")
        if id(source) in self.open:
            raise fault(node, path, "an alias refers to a value that contains it; remove the alias")
        if len(self.open) >= MAX_DEPTH:
            raise fault(node, path, _TOO_DEEP)
        node.tag = self._tag(source, path, node)
        self.open.append(id(source))
        if isinstance(source, yaml.MappingNode):
            node.value = self._fields(source, path, node)
        elif node.tag is not None:
            if isinstance(source, yaml.SequenceNode) or source.value:
                raise fault(node, path, f"!{node.tag} takes its fields by name; write !{node.tag} {{field: value}}")
            node.value = {}
        elif isinstance(source, yaml.SequenceNode):
            node.value = [
                self.node(item, join(path, i), self.where(item.start_mark.line)) for i, item in enumerate(source.value)
            ]
        elif isinstance(source, yaml.ScalarNode):
            node.value = self._scalar(source, path, node)
        self.open.pop()
        return node

    def _tag(self, source: yaml.Node, path: str, node: Node) -> str | None:
        tag: str = source.tag
        if tag.startswith("!"):
            return tag[1:] or None
        kind = tag.removeprefix(CORE)
        if tag == kind or kind not in KINDS.get(type(source), ()):
            name = f"!!{kind}" if tag != kind else f"!<{tag}>"
            raise fault(node, path, f"the tag {name} is not allowed; a tag names a neondist class, such as !MNIST")
        return None

    def _scalar(self, source: yaml.ScalarNode, path: str, node: Node) -> Plain:
        kind = source.tag.removeprefix(CORE)
        try:
            return scalar(source.value, kind, quoted=source.style is not None)
        except ValueError:
            raise fault(node, path, f"'{source.value}' is not a !!{kind}; remove the tag") from None

    def _fields(self, source: yaml.MappingNode, path: str, node: Node) -> dict[str, Node]:
        fields: dict[str, Node] = {}
        bases: list[yaml.Node] = []
        for key, value in source.value:
            key_node = Node(None, self.where(key.start_mark.line))
            if not isinstance(key, yaml.ScalarNode):
                raise fault(key_node, path, "a field's name must be a word, not a list or a mapping")
            if key.tag == CORE + "merge":
                bases += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if key.value in fields:
                first = fields[key.value].place
                raise fault(key_node, join(path, key.value), f"given twice, first at {first}; remove one")
            fields[key.value] = self.node(value, join(path, key.value), key_node.place)
        for base in bases:  # '<<: *name' sets defaults of missing fields
            if not isinstance(base, yaml.MappingNode):
                raise fault(node, path, "'<<' merges mappings only; write '<<: *name' of one")
            for name, child in self.node(base, path, node.place).value.items():  # type: ignore[union-attr]
                fields.setdefault(name, child)
        return fields
