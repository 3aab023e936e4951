"""Distribution of PyTorch modules: `ndt.distribute(module, example_shape, grid)`, exact on any grid.

layout: partition of a tensor over ranks. transfer: the indices sent. capture: from a module to a graph of operators.
lower: from the graph to a plan, by the rules in rules/, which use building and steps. plan, run: the plan and its
execution; traffic, costs: its communication and costs. mesh_comm, functions: communication of tensors, and autograd.
distributing: the entry point; module: its result; consistency, checks, criteria: parts of that. in_blocks: lowering for
a single block. blocks: block-wise inference without messages; trunk, blocked: block-wise training, up to the first
operator that depends on the whole image. segments, choosing, fused: fused windows. execution: options that select
these. weights: weights files. functional: halos and sums for custom code. transport: torch.distributed.
convert: conversion to and from neondist layers. by_name, factory, feeding, judging, module_plan, experiment: modules in
experiments.
"""

from ..errors import MissingPackageError
from ..version import TORCH, numbers, torch_remedy

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackageError("neondist.torch needs PyTorch: pip install 'neondist[torch]'") from error

_remedy = torch_remedy(torch.__version__)
if _remedy and numbers(torch.__version__) < TORCH[0]:
    raise MissingPackageError(_remedy)
try:
    from . import rules
    from .by_name import TorchLoss, TorchOptimizer
    from .convert import from_torch, to_torch
    from .distributed_optimizer import DistributedOptimizer
    from .distributing import distribute
    from .errors import UnsupportedOperator
    from .experiment import TorchModel
    from .functional import halo, reduce
    from .loader import loader
    from .module import DistributedModule
    from .registry import rule
    from .transport import TorchTransport, world
    from .weights import load_weights, save_weights
except (ImportError, AttributeError) as error:  # a newer PyTorch may work
    if not _remedy:
        raise
    raise MissingPackageError(f"{_remedy} ({error})") from error

__all__ = [
    "DistributedModule",
    "DistributedOptimizer",
    "TorchLoss",
    "TorchModel",
    "TorchOptimizer",
    "TorchTransport",
    "UnsupportedOperator",
    "distribute",
    "from_torch",
    "halo",
    "load_weights",
    "loader",
    "reduce",
    "rule",
    "rules",
    "save_weights",
    "to_torch",
    "world",
]


def __dir__() -> list[str]:
    """Return the public names, without imported submodules."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
