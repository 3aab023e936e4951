"""Batches and images of other sizes than the example: one capture per size, with single-process results."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import neondist as nd
import neondist.torch as ndt

EXAMPLE = (4, 2, 9, 11)


def train(shapes, world, scatter_first=False, **factors):
    """Train one step per batch shape; return the losses and the gathered outputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    model = ndt.distribute(net.double(), EXAMPLE, nd.ProcessGrid(world, **factors))
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    batches = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(sum(shape))
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (shape[0], *shape[2:]), generator=generator)
        batches.append((x, y))
    results = []
    tiles = ((model.scatter(x), model.scatter_target(y)) for x, y in batches)
    for tile, target in list(tiles) if scatter_first else tiles:
        output = model(tile)
        loss = model.loss(criterion, output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append((loss.detach(), model.gather(output)))
    return results


shapes = st.builds(lambda n, h, w: (n, 2, h, w), st.integers(1, 5), st.integers(4, 12), st.integers(4, 12))
grids = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=6)
@given(st.lists(shapes, min_size=1, max_size=3), grids, st.booleans())
@pytest.mark.long
def test_other_batch_shapes_match_single_process(shapes, factors, scatter_first):
    replicas, rows, cols = factors
    shapes = [*shapes, EXAMPLE]
    expected = nd.loopback.run(1, lambda world: train(shapes, world))[0]

    def body(world):
        return train(shapes, world, scatter_first, replicas=replicas, rows=rows, cols=cols)

    for actual in nd.loopback.run(replicas * rows * cols, body):
        for actual_step, expected_step in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_step, expected_step, rtol=1e-12, atol=1e-12)


def test_different_batch_sizes_are_rejected():
    def body(world):
        train([(3 + world.rank, 2, 9, 11)], world)

    with pytest.raises(nd.ConfigError, match="the image passed to scatter"):
        nd.loopback.run(2, body)


def test_each_shape_is_captured_once():
    with nd.ProcessGrid.serial() as grid:
        model = ndt.distribute(nn.Conv2d(2, 3, 3), EXAMPLE, grid)
        plans = {shape: model.plan for shape in [EXAMPLE] for _ in [model(model.scatter(torch.zeros(shape)))]}
        for shape in ((1, 2, 9, 11), EXAMPLE, (1, 2, 9, 11)):
            model(model.scatter(torch.zeros(shape)))
            assert plans.setdefault(shape, model.plan) is model.plan


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("extent", [(9,), (9, 4), (3, 4, 5)], ids=str)
def test_targets_per_sample_match_single_process(extent):
    """A target (N, C) may accompany outputs (N, C, *spatial) of any number of spatial axes."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(shape, generator=generator) for shape in ((4, 2, *extent), (4, 2)))

    def loss_of_means(y, target):
        return (y.flatten(2).mean(2) - target).square().mean()

    def body(world):
        model = ndt.distribute(nn.Identity(), x.shape, nd.ProcessGrid(world))
        return model.loss(loss_of_means, model(model.scatter(x)), model.scatter_target(target)).item()

    for loss in nd.loopback.run(2, body):
        assert loss == pytest.approx(loss_of_means(x, target).item())
