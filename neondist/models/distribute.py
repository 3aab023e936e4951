"""Conversion of a serial model to its distributed counterpart."""

from __future__ import annotations

from ..registry import dist_class
from ..registry.arguments import type_checked
from .model import Model


@type_checked
def distribute(model: Model) -> Model:
    """Return the distributed counterpart of a serial model, layer by layer, with its weights.

    Raises
    ------
    ConfigError
        If a layer or the model has no distributed class; the message names the class and explains how to write one.
    """
    layers = [layer.distributed_counterpart() for layer in model.layers]
    distributed: Model = dist_class(type(model))(**model.arguments() | {"layers": layers})
    state = model.pending_state if model.parameters is None else model.state()
    if state is not None:
        distributed.load_state(state)
    return distributed
