"""User-defined autograd.Functions, executed as written."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.custom_gradients import FUNCTION_OPERATOR
from ..ir.graph import Value, axes_of_values
from ..ir.layout import axes_of
from ..ir.registry import rule
from ..lowering.lowering import Lowering


@rule(FUNCTION_OPERATOR, applies_if_replicated=True)
def user_function(lowering: Lowering, tensors: Sequence[Value], call_index: int) -> Sequence[Value]:
    """Run an autograd.Function locally; for partitioned tensors, its forward and backward must be pointwise."""
    function, fake_outs = lowering.autograd_functions[call_index], lowering.fake_out
    lowering.where = lowering.where._replace(operator=function.name)
    if lowering.has_partial_gradients:
        lowering.refuse("its backward may not be linear, and would receive parts of a gradient instead of their sum")
    if not axes_of_values(tensors):
        return lowering.local_results(function, tensors, fake_outs)
    aligned, layout = lowering.align_pointwise(tensors)
    partitioned_dims = [at - len(layout) for at, dim in enumerate(layout) if axes_of([dim])]
    has_gradient = function.gradients_if_pointwise([lowering.fake_tensor(value) for value in tensors], partitioned_dims)
    if has_gradient is None:
        lowering.refuse("its forward or its backward is not pointwise")
    return lowering.mark_constants(
        lowering.local_results(function, aligned, fake_outs, [layout for _ in fake_outs]), has_gradient
    )
