"""Embedding: lookup of table rows by integer ids."""

from __future__ import annotations

from math import prod
from typing import Any

from ..errors import DataError
from ..initializers import Gaussian, Initializer
from ..registry.ranges import Count
from ..terminal.console import counted
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext


class EmbeddingLayer(Layer):
    """Lookup of rows of the table 'weights' (num_embeddings, dim) by integer ids, which start at 0.

    Input: ids (N, *spatial, C) per tile; output (N, *spatial, C * dim) per tile. For vectors (N, L) of ids at L
    positions the output is (N, L, dim), of which each rank has its tile. The gradient is sparse: only nonzero rows are
    sent, with their ids.

    Parameters
    ----------
    num_embeddings : int
        Rows of the table.
    dim : int
        Elements per row.
    weights_init : Initializer, optional
        Default Gaussian(1).
    """

    saves_output = has_input_gradient = False

    def __init__(
        self, num_embeddings: Count, dim: Count, *, weights_init: Initializer | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.num_embeddings, self.dim = num_embeddings, dim
        self.weights_init = weights_init or Gaussian(1.0)

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the shape of the ids, with `dim` elements for each id."""
        if len(input_shape) == 1:
            return *input_shape, self.dim
        return *input_shape[:-1], input_shape[-1] * self.dim

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights'."""
        shape = self.num_embeddings, self.dim
        return {"weights": Parameter(shape, self.weights_init, *shape, max_rows_per_sample=prod(input_shape))}

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the rows.

        Raises
        ------
        DataError
            If an id is not a row of the table.
        """
        xp, shape = ctx.xp, view.shape
        if view.ndim == 2:
            view = view[:, ctx.output_box.slices[0]]
        is_invalid = ~((view >= 0) & (view < self.num_embeddings) & (view == xp.floor(view)))
        if is_invalid.any():
            raise DataError(
                f"layer '{self.name}': id {view[is_invalid][0]:g} is not in the table of"
                f" {counted(self.num_embeddings, 'row')}; give whole numbers from 0 to {self.num_embeddings - 1}, or a"
                " larger num_embeddings"
            )
        ids = view.astype("i8")
        ctx.save(ids=ids.reshape(-1), input_shape=shape)
        return ctx.params["weights"][ids].reshape(*ids.shape[: 1 + len(self.output_shape[:-1])], self.output_shape[-1])

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Add the gradients of the rows; return zeros, since ids have no gradient."""
        if ctx.needs_weight_gradients and ctx.ids.size:
            id_order = ctx.xp.argsort(ctx.ids, kind="stable")
            ids, run_starts = ctx.xp.unique(ctx.ids[id_order], return_index=True)
            gradient = ctx.grads["weights"]
            gradient[ids] += ctx.xp.add.reduceat(dy.reshape(-1, self.dim)[id_order], run_starts, axis=0)
        return ctx.xp.zeros(ctx.input_shape, dy.dtype) if ctx.needs_input_gradient else None


class EmbeddingLayerDist(Dist, EmbeddingLayer):
    """Embedding over tiles."""
