"""Costs: what training makes small, as local sums and their gradients."""

from .base import Cost
from .cross_entropy import CrossEntropy
from .sum_squared import SumSquared

__all__ = ["Cost", "CrossEntropy", "SumSquared"]
