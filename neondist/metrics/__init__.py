"""Metrics of trained models, as local sums and counts."""

from .base import Metric
from .classes import F1, Accuracy, ConfusionMatrix, IoU, Precision, Recall
from .fields import ACC, R2, RMSE, Bias, MeanAbsoluteError
from .images import PSNR, SSIM
from .log_loss import LogLoss
from .misclassification import Misclassification
from .output_layout import OutputLayout
from .roc import ROCAUC
from .topk import TopK

__all__ = [
    "ACC",
    "F1",
    "PSNR",
    "R2",
    "RMSE",
    "ROCAUC",
    "SSIM",
    "Accuracy",
    "Bias",
    "ConfusionMatrix",
    "IoU",
    "LogLoss",
    "MeanAbsoluteError",
    "Metric",
    "Misclassification",
    "OutputLayout",
    "Precision",
    "Recall",
    "TopK",
]
