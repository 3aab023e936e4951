"""Runs of `ndt.loader`: training of a small network, and the random numbers drawn afterwards."""

import random

import numpy as np
import torch
from torch import nn

import neondist as nd
import neondist.torch as ndt


def train(dataset, world, factors=(1, 1, 1), epochs=2, **options):
    """Return the loss and the sum of the batch for every step."""
    grid = nd.ProcessGrid(world, *factors)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    model = ndt.distribute(net.double(), (3, 2, 9, 11), grid)
    optimizer, criterion, results = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), []
    loader = ndt.loader(dataset, 3, grid=grid, **options)
    for loader.epoch in range(epochs):
        for image, target in loader:
            loss = model.loss(criterion, model(image), target["cells"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append((loss.item(), model.gather(image).double().sum().item()))
            assert target["name"] == [f"sample {at}" for at in target["index"].tolist()] or not len(target["index"])
    return results


def check_global_generators_unchanged(dataset):
    """Check that an epoch leaves the generators of torch, NumPy and Python as they were."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    list(ndt.loader(dataset, 3, grid=nd.ProcessGrid.serial()))
    numbers = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert numbers == (torch.rand(1), np.random.rand(), random.random())
