"""Gradients that have no gradients themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ConfigError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the results of a backward be differentiable only in name, as torch's decorator does, and say so."""

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # no create_graph
            return found
        return pytree.tree_map_only(torch.Tensor, lambda tensor: _End.apply(tensor.detach().requires_grad_()), found)

    return call


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "second derivatives of a distributed module are not supported; compute what needs create_graph=True, such"
            " as a gradient penalty, with the module itself on whole images, or by finite differences"
        ).on_all_ranks()
