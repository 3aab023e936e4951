"""User-defined autograd.Functions, executed as written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.custom_gradients import OPERATOR
from ..ir.graph import axes_of_values
from ..ir.layout import axes_of
from ..ir.registry import rule
from ..lowering.lower import Lowering
from ..lowering.steps import Where


@rule(OPERATOR, always=True)
def user_function(lowering: Lowering, tensors: Sequence[Any], number: int) -> Any:
    """Local, if forward and backward of an autograd.Function are elementwise."""
    function, here, outs = lowering.functions[number], lowering.where, lowering.out
    lowering.where = Where(function.name, here.module, here.source)
    if lowering.parts_of_gradients:
        lowering.refuse("its backward may not be linear, and would receive parts of a gradient instead of their sum")
    if not axes_of_values(tensors):
        return lowering.locals(function, tensors, outs)
    layout = lowering.common([value.layout for value in tensors])
    cut = [at - len(layout) for at, dim in enumerate(layout) if axes_of([dim])]
    trained = function.pointwise([lowering.fake(value) for value in tensors], cut)
    if trained is None:
        lowering.refuse("its forward and backward do not read one index each")
    aligned = [lowering.aligned(value, layout, axes_of(layout)) for value in tensors]
    return lowering.trained(lowering.locals(function, aligned, outs, [layout for _ in outs]), trained)
