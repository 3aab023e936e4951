"""Workaround for gradients of single-sample norms, which PyTorch's CPU kernels get wrong in some memory formats."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .plan import TorchPlan

_NORM_OPS = frozenset((F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm))
_NORM_NAME_PATTERN = re.compile("(batch|instance)_norm")


def convert_gradient_format(y: torch.Tensor, format: torch.memory_format = torch.contiguous_format) -> None:
    """Convert the gradient of a norm's result to a memory format, as PyTorch 2.13 requires for correct results.

    PyTorch guesses the memory format of a single sample's gradient from strides, which are ambiguous.
    """
    if y.requires_grad:
        y.register_hook(lambda dy: dy.contiguous(memory_format=format))


class ContiguousNormGradients(TorchFunctionMode):
    """Context in which single-sample norms receive contiguous gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; register the conversion on results of norms."""
        result = func(*args, **(kwargs or {}))
        if func in _NORM_OPS and not torch.compiler.is_compiling():
            y = result[0] if isinstance(result, tuple) else result
            if len(y) == 1:
                convert_gradient_format(y)
        return result


def has_single_sample_norm(plan: TorchPlan) -> bool:
    """Return whether a single-rank plan has a batch or instance norm of one sample."""
    norms = (step for step in plan.steps if step.inputs and _NORM_NAME_PATTERN.search(step.name))
    return any(plan.values[step.inputs[0]].local[:1] == (1,) for step in norms)
