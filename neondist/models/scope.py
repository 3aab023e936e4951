"""The scope in which a model is made, which decides of which class it is."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

CLASS_IN_SCOPE: ContextVar[Callable[[type], type] | None] = ContextVar("class_in_scope", default=None)
"""From the class of a model to that which is made of it; set by `model_scope`."""


def class_in_scope(cls: type) -> type:
    """Return the class of which a model is made here."""
    choose = CLASS_IN_SCOPE.get()
    return cls if choose is None else choose(cls)
