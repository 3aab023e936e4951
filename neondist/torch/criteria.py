"""Criteria, as modules that are captured like others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from .plan import TorchPlan


def check_number(plan: TorchPlan, tree: Any) -> None:
    """Raise ConfigError unless a criterion gives one number."""
    (out, *more) = plan.outputs if plan.outputs else (None,)
    if more or not isinstance(out, int) or not tree.is_leaf():
        raise ConfigError(f"criterion: has to return one tensor, got {tree}")
    shape = plan.values[out].shape
    if shape:
        raise ConfigError(
            f"criterion: gives a tensor of shape {shape}, such as a number for each cell or sample; it has to return"
            " one number: reduction='mean' or 'sum'"
        )


def identity(criterion: Any) -> Hashable:
    """Return what two criteria have in common that compute the same: a lambda of a loop is one, not many."""
    if isinstance(criterion, nn.Module):
        return id(criterion)
    if not hasattr(criterion, "__code__") or hasattr(criterion, "__self__"):
        return id(criterion) if not hasattr(criterion, "__self__") else (id(criterion.__self__), criterion.__func__)
    plain = int, float, str, bool, type(None)
    known = [cell.cell_contents for cell in criterion.__closure__ or ()]
    known += [*(criterion.__defaults__ or ()), *(criterion.__kwdefaults__ or {}).values()]
    return criterion.__code__, tuple(each if isinstance(each, plain) else id(each) for each in known)


class CriterionModule(nn.Module):
    """A criterion as a module of tensors; what else is in the output and the target stays as it is."""

    def __init__(self, criterion: Any, spec: Any, leaves: Sequence[Any], at: Sequence[int]) -> None:
        super().__init__()
        self.criterion, self.spec, self.at = criterion, spec, list(at)
        self.others = [None if i in at else leaf for i, leaf in enumerate(leaves)]

    def forward(self, *tensors: Any) -> Any:
        """Return what the criterion gives."""
        filled = list(self.others)
        for i, tensor in zip(self.at, tensors, strict=True):
            filled[i] = tensor
        return self.criterion(*pytree.tree_unflatten(filled, self.spec))
