"""The running mean of a model's weights, in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..optim import AVERAGE


@contextmanager
def averaged(model: Any) -> Iterator[None]:
    """Have the running mean that the optimiser of a built model keeps, if it does, in the weights' place meanwhile."""
    average = getattr(model, "slots", {}).get(AVERAGE)
    if average is None or model.step == model.uncounted:
        yield
        return
    parameters = model.parameters
    kept = parameters.values.copy()
    parameters.publish(average)
    parameters.version += 1
    try:
        yield
    finally:
        parameters.values[...] = kept
        parameters.version += 1
