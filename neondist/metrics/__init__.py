"""Metrics: what a trained model is judged by, as local sums and counts."""

from .base import Metric
from .log_loss import LogLoss
from .misclassification import Misclassification
from .topk import TopK

__all__ = ["LogLoss", "Metric", "Misclassification", "TopK"]
