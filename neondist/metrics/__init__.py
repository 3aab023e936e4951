"""Metrics: what a trained model is judged by, as local sums and counts."""

from .base import Metric
from .classes import F1, Accuracy, ConfusionMatrix, IoU, Precision, Recall
from .images import PSNR, SSIM
from .log_loss import LogLoss
from .misclassification import Misclassification
from .outputs import Outputs
from .roc import ROCAUC
from .topk import TopK

__all__ = [
    "F1",
    "PSNR",
    "ROCAUC",
    "SSIM",
    "Accuracy",
    "ConfusionMatrix",
    "IoU",
    "LogLoss",
    "Metric",
    "Misclassification",
    "Outputs",
    "Precision",
    "Recall",
    "TopK",
]
