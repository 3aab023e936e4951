"""Costs minimised by training, as local sums and their gradients."""

from .base import Cost
from .cross_entropy import CrossEntropy, SoftmaxCrossEntropy
from .dice import Dice, DiceCE
from .elementwise import BCE, MAE, MSE, Huber
from .focal import Focal
from .sum_squared import SumSquared

__all__ = [
    "BCE",
    "MAE",
    "MSE",
    "Cost",
    "CrossEntropy",
    "Dice",
    "DiceCE",
    "Focal",
    "Huber",
    "SoftmaxCrossEntropy",
    "SumSquared",
]
