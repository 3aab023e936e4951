"""Training of a small network with the batches of `ndt.loader`."""

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
