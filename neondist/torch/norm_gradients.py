"""Gradients of norms over one sample, which PyTorch's kernels of the host compute wrongly from some memory formats."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .plan import TorchPlan

_NORMS = frozenset((F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm))
_NAMES = re.compile("(batch|instance)_norm")


def pass_contiguous(y: torch.Tensor, format: torch.memory_format = torch.contiguous_format) -> None:
    """Let the gradient of a norm's result have a memory format; as PyTorch 2.13 needs it to be right.

    Gradients of one sample are taken for channels-last ones, or not, by strides that do not tell.
    """
    if y.requires_grad:
        y.register_hook(lambda dy: dy.contiguous(memory_format=format))


class RightNorms(TorchFunctionMode):
    """Let norms of one sample, called inside, have right gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        found = func(*args, **(kwargs or {}))
        if func in _NORMS and not torch.compiler.is_compiling():
            y = found[0] if isinstance(found, tuple) else found
            if len(y) == 1:
                pass_contiguous(y)
        return found


def has_norm_of_one(plan: TorchPlan) -> bool:
    """Return whether a step of a plan for one rank is a norm of one sample, one of those."""
    norms = (step for step in plan.steps if step.inputs and _NAMES.search(step.name))
    return any(plan.values[step.inputs[0]].local[:1] == (1,) for step in norms)
