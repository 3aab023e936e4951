"""Exact distribution of PyTorch modules over a process grid: `ndt.distribute(module, example_shape, grid)`.

capture/ traces a module to a graph of operators, lowering/ turns the graph into a plan by the rules in rules/, and
execution/ runs the plan, as a whole or in blocks. ir/ contains the data structures that these packages share, exchange/
the communication, and kernels/ faster local computation. module/ contains the module that users call, training/ its use
in experiments and scripts, and convert/ the conversion to and from neondist layers.
"""

from ..errors import MissingPackageError
from ..version import SUPPORTED_TORCH_RANGE, major_and_minor_version, unsupported_torch_remedy

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackageError("neondist.torch needs PyTorch: pip install 'neondist[torch]'") from error

_version_remedy = unsupported_torch_remedy(torch.__version__)
if _version_remedy and major_and_minor_version(torch.__version__) < SUPPORTED_TORCH_RANGE[0]:
    raise MissingPackageError(_version_remedy)
try:
    from . import rules
    from .convert import from_torch, to_torch
    from .exchange.functional import halo, reduce
    from .exchange.transport import TorchTransport, world
    from .ir.errors import UnsupportedOperator
    from .ir.registry import rule
    from .module.distributing import distribute
    from .module.loader import loader
    from .module.module import DistributedModule
    from .module.weights import load_weights, save_weights
    from .training.distributed_optimizer import DistributedOptimizer
    from .training.experiment import TorchModel
    from .training.losses_and_optimizers import TorchLoss, TorchOptimizer
except (ImportError, AttributeError) as error:  # a newer PyTorch may work
    if not _version_remedy:
        raise
    raise MissingPackageError(f"{_version_remedy} ({error})") from error

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
