"""Model definition and records of two linearly separable classes."""

import numpy as np

MODEL_DEFINITION = """
import numpy as np
import torch
from torch import nn


class CustomModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.out = nn.Linear(2 * 4 * 4, 2)

    def forward(self, x):
        return self.out(torch.relu(self.conv(x)).flatten(1))


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr)


def feed(records, mode):
    values = np.stack(records)
    features = values[:, :16].reshape(-1, 1, 4, 4)
    return features if mode == "prediction" else (features, values[:, 16].astype(np.int64))
"""
DATA_OPTIONS = "--training-data", "train.csv", "--validation-data", "test.csv"
SERVER_OPTIONS = "--distribution-strategy", "ParameterServerStrategy", "--num-workers", "2"
ELASTIC_OPTIONS = SERVER_OPTIONS[:-1]
ALLREDUCE_OPTIONS = "--distribution-strategy", "AllreduceStrategy", "--num-workers"


def draw_records(count, seed=0):
    """Return records of 16 features and a class label."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 16)).round(3)
    return np.column_stack([x, (x[:, :8].sum(1) > x[:, 8:].sum(1)).astype(int)])


def write_csv(path, records, header=""):
    """Write records to a CSV file."""
    np.savetxt(path, records, fmt="%g", delimiter=",", header=header, comments="")
    return str(path)


def write_model(project, text=None, name=None):
    """Write a model definition to a file of the working directory `project`; return its path."""
    path = project / f"{name or 'model'}_{project.name}.py"
    path.write_text(MODEL_DEFINITION if text is None else text)
    return str(path)
