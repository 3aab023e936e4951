"""Outputs of a distributed module as whole tensors, which are gathered only if they are used for more than a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ..execution.tiling import Tiling
from ..ir.layout import Layout, replicated, shape_of
from ..ir.once_differentiable import once_differentiable
from ..rules.loss import weight_of_l1_loss_caller
from .module import DistributedModule

LOSSES_COMPUTED_ON_TILES = frozenset(
    (F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cross_entropy, F.huber_loss, F.kl_div, F.l1_loss,
     F.mse_loss, F.nll_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss)
)  # fmt: skip
"""Functions of (output, target) that can be computed on tiles; the loss modules of torch.nn call these functions."""
_METADATA_FUNCTIONS = frozenset(
    (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point,
     torch.is_floating_point,
     *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")))
)  # fmt: skip
"""Functions and attributes that do not depend on the tensor's values."""


class TiledOutput(torch.Tensor):
    """Whole output of a distributed module; this rank stores its tile.

    A loss of torch.nn with reduction 'mean' or 'sum' is computed on the tiles, as `DistributedModule.loss` does. Any
    other operation gathers the whole tensor on every rank, once and differentiably. Both are collective.
    """

    model: DistributedModule
    local_part: torch.Tensor
    tile_layout: Layout

    @staticmethod
    def __new__(cls, model: DistributedModule, tile: torch.Tensor, layout: Layout) -> TiledOutput:
        """Return the output, without allocating the whole tensor."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape_of(layout), dtype=tile.dtype, device=tile.device, requires_grad=tile.requires_grad
        )

    def __init__(self, model: DistributedModule, tile: torch.Tensor, layout: Layout) -> None:
        self.model, self.local_part, self.tile_layout = model, tile, layout
        self._gathered: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, through which gradients flow. Collective at the first call."""
        if self._gathered is None:
            self.model.grid.check("gather")
            tile = self.model.backward_check.alias_for_loss(self.local_part)
            self._gathered = self.model.tiling.gather(tile, self.tile_layout, differentiable=True)
        return self._gathered

    @property
    def is_gathered(self) -> bool:
        """Whether the whole tensor has been gathered; user code may have modified it since."""
        return self._gathered is not None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute losses on tiles, and other functions on whole tensors."""
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.l1_loss and (weight := weight_of_l1_loss_caller()) is not None:
            kwargs["weight"] = weight
        if func in LOSSES_COMPUTED_ON_TILES and (loss := _loss_on_tiles(func, *args, **kwargs)) is not None:
            return loss
        return func(*gather_outputs(args), **gather_outputs(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation that bypasses `__torch_function__` on whole tensors."""
        return func(*gather_outputs(args), **gather_outputs(kwargs or {}))


def gather_outputs(values: Any) -> Any:
    """Return a tree with tiled outputs gathered, the same on every rank. Collective."""
    return pytree.tree_map(lambda value: value.whole() if isinstance(value, TiledOutput) else value, values)


def _loss_on_tiles(
    function: Callable[..., torch.Tensor], output: Any, target: Any = None, *others: Any, **named: Any
) -> torch.Tensor | None:
    """Return a loss computed on tiles, or None if it needs the whole output."""
    if not isinstance(output, TiledOutput) or output.is_gathered or others:
        return None
    if named.get("reduction", "mean") not in ("mean", "sum", "batchmean"):
        return None
    model = output.model
    shape = tuple(output.shape)
    if isinstance(target, TiledOutput):
        if target.model is not model or target.tile_layout != output.tile_layout or target.is_gathered:
            return None
        target_tile = target.local_part
    elif isinstance(target, torch.Tensor) and not target.requires_grad:
        if tuple(target.shape) not in (shape, (shape[0], *shape[2:])):
            return None
        target_tile = model.scatter_target(target)
    else:
        return None
    tensor_arguments = {name: value.detach() for name, value in named.items() if isinstance(value, torch.Tensor)}
    if any(named[name].requires_grad or value.dim() > 1 for name, value in tensor_arguments.items()):
        return None
    for value in tensor_arguments.values():  # class weights
        model.tiling.remember_layout(value, replicated(value.shape))
    constant_arguments = {name: value for name, value in named.items() if name not in tensor_arguments}
    criterion = partial(function, **constant_arguments)
    if not tensor_arguments:
        return model.loss(criterion, output.local_part, target_tile)
    return model.loss(partial(_call_loss, criterion), output.local_part, {"target": target_tile, **tensor_arguments})


def _call_loss(criterion: Callable[..., torch.Tensor], output: torch.Tensor, tensors: dict[str, Any]) -> torch.Tensor:
    return criterion(output, **tensors)


class ScatteredInput(torch.autograd.Function):
    """This rank's part of a whole tensor; the gradient is gathered in the backward pass."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, tiling: Tiling, layout: Layout) -> torch.Tensor:
        """Return the part."""
        ctx.tiling, ctx.tile_layout = tiling, layout
        return tiling.local_part(image, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the whole tensor. Collective."""
        return ctx.tiling.gather(gradients[0], ctx.tile_layout), None, None
