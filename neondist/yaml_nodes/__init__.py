"""YAML text as a tree of nodes with file and line, for experiments, strategies and resource files.

read: a file's text, limited in size. parse: text to `tree`, without constructing objects. scalars: plain values.
"""

from .parse import parse
from .read import parse_file, read_text
from .tree import Node, fault, join, message, node_of, shorten, value_of

__all__ = ["Node", "fault", "join", "message", "node_of", "parse", "parse_file", "read_text", "shorten", "value_of"]
