"""A network, grids and optimisers for the tests of strategies."""

import torch
from torch import nn

GRIDS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
SHAPE, BATCH = (7, 9, 2), 7


OPTIMIZERS = {
    "SGD": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, 1e-12),
    "Adam": ({"lr": 0.01}, 1e-8),
    "Adagrad": ({"lr": 0.05, "weight_decay": 0.02}, 1e-8),
}


class Net(nn.Module):
    """Network with dropout, tied, frozen, unused and scalar parameters, and an unused output."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.again = self.twice
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen, self.last = nn.Conv2d(6, 6, 1).requires_grad_(False), nn.Linear(6, 10)
        self.side = nn.Linear(6, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.frozen(self.again(self.twice(x) * self.scale)).mean((2, 3))
        return self.last(x), self.side(x)


def compute_first_loss(output, labels):
    return nn.functional.cross_entropy(output[0], labels)
