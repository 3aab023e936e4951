"""Gradients that cannot be differentiated themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import ConfigError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a backward function as once differentiable, like torch's decorator, but raise ConfigError with a remedy."""

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            result = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph
            return result
        return pytree.tree_map_only(torch.Tensor, lambda x: _NoSecondGrad.apply(x.detach().requires_grad_()), result)

    return call


class _NoSecondGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "second derivatives of a distributed module are not supported; compute terms that need create_graph=True,"
            " such as a gradient penalty, with the original module on whole images, or by finite differences"
        ).mark_raised_on_all_ranks()
