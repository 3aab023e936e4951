"""Parsing of YAML text into a tree of nodes, without constructing objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import yaml

from ..errors import ConfigError
from .scalars import parse_scalar
from .tree import Node, PlainValue, format_message, join_path, node_error

MAX_EXPANDED_NODES = 10_000  # nested aliases can expand to billions
MAX_DEPTH = 50
CORE_TAG_PREFIX = "tag:yaml.org,2002:"
SCALAR_KINDS = ("null", "bool", "int", "float", "str", "timestamp", "value", "merge")
ALLOWED_KINDS_BY_NODE_TYPE: dict[type, tuple[str, ...]] = {
    yaml.ScalarNode: SCALAR_KINDS,
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}

Locator: TypeAlias = Callable[[int], str]


def parse_yaml(text: str, line_location: Locator, path: str = "", max_nodes: int = MAX_EXPANDED_NODES) -> Node | None:
    """Return the tree of a YAML document, or None for an empty one.

    Parameters
    ----------
    text : the document
    line_location : maps a line number, counted from 0, to a source position such as 'FILE:LINE'
    path : the dotted path of the document's root, for messages
    max_nodes : the maximum number of values after expansion of aliases

    Raises
    ------
    ConfigError
        For syntax errors, forbidden tags, duplicate keys, deep nesting, and aliases that expand to too many values.
    """
    root = _compose_yaml_graph(text, line_location, path)
    return (
        None
        if root is None
        else _AliasExpander(line_location, max_nodes).copy_node(root, path, line_location(root.start_mark.line))
    )


def _compose_yaml_graph(text: str, line_location: Locator, path: str) -> yaml.Node | None:
    try:
        loader = yaml.SafeLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        problem_mark, context_mark = error.problem_mark or error.context_mark, error.context_mark
        line = problem_mark.line if problem_mark else 0
        problem = error.problem or "unreadable"
        if context_mark and context_mark.line != line and str(error.context).startswith("while"):
            problem += f", {error.context} that starts on line {context_mark.line + 1}"
        remedy = "; indent with spaces, not tabs" if "'\\t'" in problem else "; check indentation, brackets and colons"
        if context_mark and problem_mark:  # a tag includes the bracket that follows it
            tag = re.search(r"(!\w+)[\]},]", text[context_mark.index : problem_mark.index + 1])
            remedy = f"; write {tag[1]} {{}}, with braces after the tag" if tag else remedy
        raise ConfigError(format_message(line_location(line), path, f"not valid YAML: {problem}{remedy}")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        reason = "not a text file: a character is not allowed in YAML; remove the character"
        raise ConfigError(format_message(line_location(line), path, reason)) from None
    except RecursionError:
        raise ConfigError(format_message(line_location(0), path, _TOO_DEEP_MESSAGE)) from None


_TOO_DEEP_MESSAGE = f"lists and mappings are nested more than {MAX_DEPTH} deep; flatten them"


class _AliasExpander:
    """Copier of a YAML node graph into a tree, in which each alias becomes a separate value."""

    def __init__(self, line_location: Locator, max_nodes: int) -> None:
        self._locate, self._max_nodes = line_location, max_nodes
        self._num_expanded_nodes = 0
        self._ancestor_node_ids: list[int] = []

    def copy_node(self, source: yaml.Node, path: str, location: str) -> Node:
        node = Node(None, location)
        self._num_expanded_nodes += 1
        if self._num_expanded_nodes > self._max_nodes:
            raise node_error(node, path, f"aliases expand to more than {self._max_nodes} values; use fewer aliases")
        if id(source) in self._ancestor_node_ids:
            raise node_error(node, path, "an alias refers to a value that contains it; remove the alias")
        if len(self._ancestor_node_ids) >= MAX_DEPTH:
            raise node_error(node, path, _TOO_DEEP_MESSAGE)
        node.tag = self._custom_tag(source, path, node)
        self._ancestor_node_ids.append(id(source))
        if isinstance(source, yaml.MappingNode):
            node.value = self._mapping_fields(source, path, node)
        elif node.tag is not None:
            if isinstance(source, yaml.SequenceNode) or source.value:
                raise node_error(
                    node, path, f"!{node.tag} takes its fields by name; write !{node.tag} {{field: value}}"
                )
            node.value = {}
        elif isinstance(source, yaml.SequenceNode):
            node.value = [
                self.copy_node(item, join_path(path, i), self._locate(item.start_mark.line))
                for i, item in enumerate(source.value)
            ]
        elif isinstance(source, yaml.ScalarNode):
            node.value = self._scalar_value(source, path, node)
        self._ancestor_node_ids.pop()
        return node

    def _custom_tag(self, source: yaml.Node, path: str, node: Node) -> str | None:
        tag: str = source.tag
        if tag.startswith("!"):
            return tag[1:] or None
        kind = tag.removeprefix(CORE_TAG_PREFIX)
        if tag == kind or kind not in ALLOWED_KINDS_BY_NODE_TYPE.get(type(source), ()):
            name = f"!!{kind}" if tag != kind else f"!<{tag}>"
            raise node_error(node, path, f"the tag {name} is not allowed; a tag names a neondist class, such as !MNIST")
        return None

    def _scalar_value(self, source: yaml.ScalarNode, path: str, node: Node) -> PlainValue:
        kind = source.tag.removeprefix(CORE_TAG_PREFIX)
        try:
            return parse_scalar(source.value, kind, quoted=source.style is not None)
        except ValueError:
            raise node_error(node, path, f"'{source.value}' is not a !!{kind}; remove the tag") from None

    def _mapping_fields(self, source: yaml.MappingNode, path: str, node: Node) -> dict[str, Node]:
        fields: dict[str, Node] = {}
        merged_nodes: list[yaml.Node] = []
        for key, value in source.value:
            key_node = Node(None, self._locate(key.start_mark.line))
            if not isinstance(key, yaml.ScalarNode):
                raise node_error(key_node, path, "a field's name must be a word, not a list or a mapping")
            if key.tag == CORE_TAG_PREFIX + "merge":
                merged_nodes += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if key.value in fields:
                place = fields[key.value].place
                raise node_error(key_node, join_path(path, key.value), f"given twice, first at {place}; remove one")
            fields[key.value] = self.copy_node(value, join_path(path, key.value), key_node.place)
        for base in merged_nodes:  # '<<: *name' sets defaults of missing fields
            if not isinstance(base, yaml.MappingNode):
                raise node_error(node, path, "'<<' merges mappings only; write '<<: *name', where *name is a mapping")
            for name, child in self.copy_node(base, path, node.place).value.items():  # type: ignore[union-attr]
                fields.setdefault(name, child)
        return fields
