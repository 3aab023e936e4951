"""Costs: what training makes small, as local sums and their gradients."""

from .base import Cost
from .cross_entropy import CrossEntropy, SoftmaxCrossEntropy
from .dice import Dice
from .sum_squared import SumSquared

__all__ = [
    "Cost",
    "CrossEntropy",
    "Dice",
    "SoftmaxCrossEntropy",
    "SumSquared",
]
