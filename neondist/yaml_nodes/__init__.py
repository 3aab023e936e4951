"""YAML text as a tree of nodes with file and line, for experiments, strategies and resource files.

read: a file's text, limited in size. parse: text to `tree`, without constructing objects. scalars: plain values.
convert: nodes to the types of fields.
"""

from .parse import parse_yaml
from .read import parse_file, read_text
from .tree import Node, field_error, format_message, join_path, node_error, shorten_to_line, to_node, typed_value

__all__ = [
    "Node",
    "field_error",
    "format_message",
    "join_path",
    "node_error",
    "parse_file",
    "parse_yaml",
    "read_text",
    "shorten_to_line",
    "to_node",
    "typed_value",
]  # fmt: skip
