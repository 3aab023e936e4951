"""Models of PyTorch as models of our layers, and back, where every part has a counterpart that gives the same numbers.

network: layers in the making. operators: an ATen operator as a layer. from_torch: a module's graph as a model.
to_torch: a model as a module.
"""

from .from_torch import from_torch
from .to_torch import to_torch

__all__ = ["from_torch", "to_torch"]
