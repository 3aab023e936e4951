"""The name of a rank's cache file, from a template with {rank} and {size}."""

from __future__ import annotations

import os
import re
from pathlib import Path
from string import Formatter

from ..comm import ProcessGrid
from ..errors import ConfigError

_PADDED = re.compile(r"(0?[1-9])?d?")  # a wider number could be made as long as memory
_EXAMPLE = "for instance ~/.cache/neondist/mnist_{rank}_of_{size}.h5"


def check_template(template: object) -> None:
    """Raise ConfigError unless `template` is a path whose only fields are {rank} and {size}."""
    if not isinstance(template, (str, os.PathLike)) or not os.fspath(template):
        raise ConfigError(f"serialized_path: {template!r} is not a path; give one, {_EXAMPLE}")
    text = os.fspath(template)
    try:
        unknown = _fields(text) - {"rank", "size"}
        wide = [spec for _, _, spec, conversion in _parts(text) if conversion or not _PADDED.fullmatch(spec or "")]
        if wide:
            raise ValueError(f"'{wide[0]}' is no width of a number")
        if "\0" in text:
            raise ValueError("it has a null character")
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
    return {name for _, name, _, _ in _parts(text)}


def _parts(text: str) -> list[tuple[str, str, str | None, str | None]]:
    """Return literal text, name, width and conversion of each field."""
    return [
        (literal, name, spec, conversion)
        for literal, name, spec, conversion in Formatter().parse(text)
        if name is not None
    ]
