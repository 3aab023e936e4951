"""The scope in which a model is created, which determines its class."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

MODEL_CLASS_SELECTOR: ContextVar[Callable[[type], type] | None] = ContextVar("model_class_selector", default=None)
"""Function from the class of a model to the class to create; set by `distribute_created_models`."""


def resolve_model_class(cls: type) -> type:
    """Return the class to create for a model class in the current scope."""
    select_class = MODEL_CLASS_SELECTOR.get()
    return cls if select_class is None else select_class(cls)
