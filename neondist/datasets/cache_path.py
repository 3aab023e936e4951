"""The name of a rank's cache file, from a template with {rank} and {size}."""

from __future__ import annotations

import os
from pathlib import Path
from string import Formatter

from ..comm import ProcessGrid
from ..errors import ConfigError

_EXAMPLE = "for instance ~/.cache/neondist/mnist_{rank}_of_{size}.h5"


def check_template(template: object) -> None:
    """Raise ConfigError unless `template` is a path whose only fields are {rank} and {size}."""
    if not isinstance(template, (str, os.PathLike)) or not os.fspath(template):
        raise ConfigError(f"serialized_path: {template!r} is not a path; give one, {_EXAMPLE}")
    text = os.fspath(template)
    try:
        unknown = _fields(text) - {"rank", "size"}
        if not unknown:
            text.format(rank=0, size=1)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"serialized_path: {text!r} is not a template ({error}); write it as a path, {_EXAMPLE}"
        ) from error
    if unknown:
        names = ", ".join("{" + name + "}" for name in sorted(unknown))
        raise ConfigError(
            f"serialized_path: unknown field {names} in {text!r}; only {{rank}} and {{size}} are allowed, {_EXAMPLE}"
        )


def cache_path(template: str | os.PathLike[str], grid: ProcessGrid) -> Path:
    """Return this rank's file; ConfigError where ranks would share one (replicas hold equal tiles, yet write apart)."""
    check_template(template)
    text = os.fspath(template)
    if grid.size > 1 and "rank" not in _fields(text):
        raise ConfigError(
            f"serialized_path: {text!r} has no {{rank}}, but each of the {grid.size} ranks needs a file of its own; add"
            f" {{rank}} to the name, {_EXAMPLE}"
        )
    return Path(os.path.expanduser(text.format(rank=grid.rank, size=grid.size)))


def _fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}
