"""What users may get wrong, and the messages for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ShapeError
from .plan import TorchPlan


def check_gather_at(module: nn.Module, gather_at: Sequence[str]) -> None:
    """Raise ConfigError unless all are paths of modules, with names that are close."""
    if isinstance(gather_at, str):
        raise ConfigError(f"gather_at: expected a list of paths of modules, got a string; say [{gather_at!r}]")
    known = [path for path, _ in module.named_modules()]
    for path in gather_at:
        if path not in known:
            close = difflib.get_close_matches(path, known, 3, 0.4)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ConfigError(f"gather_at: the module has none named {path!r}{hint or '; see named_modules()'}")


_INNER = "pass model.module, not its {} wrapper: gradients arrive summed over all ranks without it"
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _INNER.format("DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"): _INNER.format("DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): _INNER.format("FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"): "call distribute instead of fully_shard",
}
"""By module and name, since importing them takes long."""


def check_module(module: nn.Module) -> None:
    """Raise ConfigError for what cannot be captured, or would not do what it does in one process."""
    for path, part in module.named_modules():
        name = f"the module {path!r}" if path else "the module"
        for kind in type(part).__mro__:
            if remedy := _WRAPPERS.get((kind.__module__.partition("._")[0], kind.__name__)):
                raise ConfigError(f"{name} is wrapped in {kind.__name__}, which moves tensors itself; {remedy}")
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(f"{name} is made by torch.jit, and cannot be captured; give the nn.Module that it was")
        if part._backward_hooks or part._backward_pre_hooks:
            raise ConfigError(
                f"{name} has a backward hook, which would not be called; remove it, or register it on what distribute"
                " returns"
            )
        if any(nn.parameter.is_lazy(p) for p in part._parameters.values()):
            raise ConfigError(f"{name} is lazy, and has no weights yet; apply the module to a small image before")


def check_tensor(what: str, value: Any) -> None:
    """Raise ShapeError for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        more = "; torch.from_numpy makes one of an array" if hasattr(value, "__array__") else ""
        raise ShapeError(f"{what}: expected a torch.Tensor, got {type(value).__name__}{more}")


def check_parameters(
    plan: TorchPlan, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Raise ConfigError if a tensor of the module has another shape than when it was captured, or is gone."""
    for kind, ids, tensors in (("parameter", plan.parameters, parameters), ("buffer", plan.buffers, buffers)):
        for name, value in ids.items():
            shape = plan.values[value].shape
            if name not in tensors or tuple(tensors[name].shape) != shape:
                now = f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is gone"
                raise ConfigError(
                    f"the module's {kind} {name!r}, of shape {shape}, {now}; call distribute after such a change"
                )


def gradients_of(what: str, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return whether gradients go to these, which decides on messages of the backward pass."""
    return {f"requires_grad of {what} {at}": tensor.requires_grad for at, tensor in enumerate(tensors)}
