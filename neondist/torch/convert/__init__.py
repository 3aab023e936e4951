"""Conversion between PyTorch modules and models of neondist layers, if every part has an exact counterpart.

network: builder of a network of layers. operators: conversion of ATen operators to layers. from_torch: conversion of
a module's graph to a model. to_torch: conversion of a model to a module.
"""

from .from_torch import from_torch
from .to_torch import to_torch

__all__ = ["from_torch", "to_torch"]
