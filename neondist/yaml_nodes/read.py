"""Reading of YAML files."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..io.regular_file import open_regular
from ..registry.names import suggest
from .parse import MAX_EXPANDED_NODES, parse_yaml
from .tree import Node

MAX_FILE_BYTES = 1 << 20


def parse_file(
    path: Path, text: str | None = None, max_bytes: int = MAX_FILE_BYTES, max_nodes: int = MAX_EXPANDED_NODES
) -> Node | None:
    """Return the tree of a file, or of its `text` if already read; None if the file is empty.

    Raises
    ------
    ConfigError
        If the file is missing or invalid; the message is 'FILE:LINE: field: problem; remedy'.
    """
    content = read_text(path, max_bytes) if text is None else text
    return parse_yaml(content, lambda line: f"{path}:{line + 1}", max_nodes=max_nodes)


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file of at most `max_bytes` bytes; otherwise raise ConfigError."""
    try:
        with open_regular(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        near = suggest(path.name, [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
        raise ConfigError(f"{path}: no such file{near or '; check the path'}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; specify the YAML file inside it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes >> 20} MiB; specify an experiment or settings file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
