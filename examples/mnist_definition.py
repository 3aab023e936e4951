"""A model-definition file for MNIST with PyTorch, after ElasticDL's design document.

neondist data records '!MNIST {}' --to train.csv
neondist data records '!MNIST {}' --role prediction --to test.csv
neondist train examples/mnist_definition.py --training-data train.csv --validation-data test.csv --num-epochs 3
"""

import numpy as np
import torch
from torch import nn


class CustomModel(nn.Module):
    """Two convolutions and a fully connected layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(16, 32, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        x = self.conv2(self.conv1(x))
        return self.out(x.reshape(x.size(0), -1))


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels.reshape(-1))


def optimizer(parameters, lr=0.001):
    return torch.optim.Adam(parameters, lr)


def feed(records, mode):
    """Return images (n, 1, 28, 28) and labels (n,) of records of 784 pixels and a label."""
    values = np.stack(records)
    features = (values[:, : 28 * 28].reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081
    if mode == "prediction":
        return features
    return features, values[:, 28 * 28].astype(np.int64)


def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: (predictions.argmax(1) == labels.reshape(-1)).float().mean()}


class PredictionOutputsProcessor:
    """Printer of the predicted digit of each record."""

    def process(self, predictions, worker_id):
        print(*predictions.argmax(1), sep="\n")
