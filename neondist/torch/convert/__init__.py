"""Conversion between PyTorch modules and models of neondist layers, where every part has an exact counterpart.

network: builder of layers. operators: ATen operators to layers. from_torch: a module's graph to a model. to_torch: a
model to a module.
"""

from .from_torch import from_torch
from .to_torch import to_torch

__all__ = ["from_torch", "to_torch"]
