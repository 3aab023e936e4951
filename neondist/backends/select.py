"""Which backends there are, and which one `auto` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..registry import suggest
from .base import Backend
from .numpy import NumpyBackend


@dataclass(frozen=True)
class Availability:
    """A backend's name, whether it can be used here, and why."""

    name: str
    usable: bool
    reason: str


_MAKERS: dict[str, Callable[[], Backend]] = {"numpy": NumpyBackend}  # fastest first


def available() -> list[Availability]:
    """Return all backends, the one that `auto` prefers first."""
    return [Availability("numpy", True, "always there")]


def get_backend(name: str | Backend = "auto") -> Backend:
    """Return the backend of this name ('auto': the first usable one), or ConfigError with the choices."""
    if isinstance(name, Backend):
        return name
    if name == "auto":
        name = next(choice.name for choice in available() if choice.usable)
    if name not in _MAKERS:
        raise ConfigError(f"backend '{name}' is unknown{suggest(name, ['auto', *_MAKERS])}")
    return _MAKERS[name]()
