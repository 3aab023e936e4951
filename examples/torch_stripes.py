"""The PyTorch network and input function of torch_stripes.yaml, independent of ranks."""

import numpy as np
import torch
from torch import nn


def build(width=6, classes=4):
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(width, 2 * width, 3), nn.GroupNorm(2, 2 * width), nn.SiLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes),
    )  # fmt: skip


def feed(images, labels):
    """Return this rank's tile of the images, channels first and scaled, and the labels, as tensors."""
    features = torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, -1, 1)))
    return 2 * features, None if labels is None else torch.from_numpy(labels)
