"""Bring your PyTorch model: `ndt.distribute(module, example_shape, grid)`, exact on any grid, or refused by name.

layout: how a tensor lies on the ranks. transfer: which indices travel. capture: from a module to a graph of operators.
lower: from the graph to a plan, by the rules of rules/, which are written with building and steps. plan, run: the plan,
and what runs it; traffic, costs: what that takes. mesh_comm, functions: tensors over a transport, and autograd.
distributing: what users call; module: what they get; consistency, checks, criteria: its parts. in_blocks: the rules run
backwards, for a block. blocks: a module block by block of its output, without messages; trunk, blocked: a training step
so, up to what sees the whole image. segments, choosing, fused: windows that go together. execution: which of these a
module has. weights: files of them. functional: halos and sums for custom code. transport: torch.distributed.
convert: modules as models of our layers, and back. by_name, factory, feeding, judging, module_plan, experiment: a
module in an experiment.
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
except (ImportError, AttributeError) as error:  # a newer one may work
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
    """Return the public names, without those of modules that have been imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
