"""Training steps of one process under AutoDist: the same losses, weights and optimizer states on every grid."""

import contextlib
import copy
import itertools
import os
import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_runs import captured_once

import neondist as nd

GRIDS = [(1,), (2, 1, 2), (3, 3), (4, 2, 1, 2), (4, 1, 2, 2)]
"""ranks, replicas, rows, columns"""
STRATEGIES = ["PS", "AllReduce", "PartitionedPS", "Auto"]
SAMPLES = 6, 6, 5
"""of the batches: the last one is smaller"""


@pytest.fixture(autouse=True, scope="module")
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with captured_once():
        yield
    torch.set_default_dtype(before)


class Net(nn.Module):
    """Cells and classes of an image, as two outputs in a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.cells, self.last = nn.Conv2d(5, 3, 3), nn.Linear(5, 4)

    def forward(self, x, scale=1.0):
        x = self.norm(self.first(x)).relu() * scale
        return {"cells": self.cells(x), "classes": self.last(x.mean((2, 3)))}


class Coder(nn.Module):
    """Parts that a step calls by themselves."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh())
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, padding=1))


def several_losses(scope, function):
    """Losses of two outputs, by functions and by hand; the accuracy; a penalty of weights; clipping; a schedule."""
    with scope:
        model = Net()
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    @function
    def step(x, labels, cells):
        optimizer.zero_grad()
        y = model(x, scale=1.5)
        losses = [criterion(y["cells"], cells), F.cross_entropy(y["classes"], labels, label_smoothing=0.1)]
        accuracy = (y["classes"].argmax(1) == labels).double().mean()
        by_hand = (y["cells"].softmax(1)[:, 0] - 0.5).abs().mean()
        loss = losses[0] + 0.3 * losses[1] + by_hand + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, accuracy

    def train(x, labels, cells):
        found = step(x, labels, cells)
        scheduler.step()
        return found

    return [model], [optimizer], train


def accumulation(scope, function):
    """Gradients of two batches added up, clipped by value, in param groups of their own."""
    with scope:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 35, 4))
    groups = [{"params": model[0].parameters(), "weight_decay": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    calls = []

    @function
    def step(x, labels, cells):
        calls.append(len(x))
        loss = nn.CrossEntropyLoss()(model(x), labels) / 2
        loss.backward()
        if len(calls) % 2 == 0:
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def train(*batch):
        found = step(*batch)
        if len(calls) % 2 == 0:
            scheduler.step()
        return torch.tensor([found])

    return [model], [optimizer], train


def two_models(scope, function):
    """A generator and a discriminator, each with its optimizer: a model's output is another one's input."""
    with scope:
        generator = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
        critic = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (generator, critic)]

    @function
    def step(x, labels, cells):
        fake = generator(x)
        real, made = critic(x), critic(fake.detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.softplus(made).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = F.softplus(-critic(fake)).mean() + F.mse_loss(fake, x)
        other = other + 0.1 * F.l1_loss(fake, x, weight=x.square())
        other.backward()
        optimizers[0].step()
        return loss, other

    return [generator, critic], optimizers, step


def parts(scope, function):
    """Parts of a model called by themselves, with random numbers in between; a schedule by the loss."""
    with scope:
        model = Coder()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    @function
    def step(x, labels, cells):
        mean, spread = model.encoder(x[..., :6, :8]).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(len(labels)))
        y = model.decoder(mean + noise * spread.exp())
        y[:, 0] *= 0.5  # of the whole, which the loss then reads
        loss = F.l1_loss(y, x[..., :6, :8], reduction="sum") / len(x)
        loss = loss + 0.1 * (mean.square() - spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def train(*batch):
        loss = step(*batch)
        scheduler.step(loss.detach())
        return loss

    return [model], [optimizer], train


SCRIPTS = several_losses, accumulation, two_models, parts


def batch_of(number, samples):
    """Return images, classes of images, and classes of cells."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 2, 7, 9, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    return x, labels, torch.randint(0, 3, (samples, 5, 7), generator=generator)


def run(script, scope=None, function=lambda step: step, seed=0):
    """Return all that a script has come to."""
    torch.manual_seed(seed)
    models, optimizers, step = script(scope or contextlib.nullcontext(), function)
    found = []
    for number, samples in enumerate(SAMPLES):
        result = step(*batch_of(number, samples))
        found += [one.detach().reshape(-1) for one in (result if isinstance(result, tuple) else (result,))]
    states = [one.state_dict() for one in (*models, *optimizers)]
    return copy.deepcopy([torch.cat(found), states])


@cache
def one_process(script):
    return run(script)


def distributed(script, strategy, ranks, replicas=1, rows=1, cols=1):
    def body(world):
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as grid:
            d = nd.AutoDist(strategy=strategy, grid=grid)
            return run(script, d.scope(), d.function), str(d.strategy)

    return nd.loopback.run(ranks, body)


def cases():
    """Return all scripts, grids and strategies with NEONDIST_AUTODIST=all; else each of them once, by NEONDIST_SEED."""
    every = list(itertools.product(SCRIPTS, GRIDS, STRATEGIES))
    if os.environ.get("NEONDIST_AUTODIST") == "all":
        return every
    rng = random.Random(os.environ["NEONDIST_SEED"])
    return list(zip(SCRIPTS, *(rng.sample(some, 4) for some in (GRIDS[1:], STRATEGIES)), strict=True))


@pytest.mark.parametrize(("script", "grid", "strategy"), cases())
@pytest.mark.long
def test_numbers_are_those_of_one_process(script, grid, strategy):
    for found, text in distributed(script, strategy, *grid):
        torch.testing.assert_close(found, one_process(script), rtol=1e-9, atol=1e-9)
        assert strategy in text or strategy == "Auto"


@pytest.mark.parametrize("strategy", ["AllReduce", "PartitionedPS"])
@pytest.mark.long
def test_a_session_goes_on_with_all_that_a_script_remembers(strategy, tmp_path):
    """Weights, the optimizer's state and the schedule, from two ranks to four."""

    def losses_and_weights(folder, last, ranks):
        def body(world):
            with nd.ProcessGrid(world, replicas=None) as grid:
                torch.manual_seed(0)
                d = nd.AutoDist(strategy=strategy, grid=grid)
                (model,), _, train = accumulation(d.scope(), d.function)
                hooks, losses = [nd.StopAtStepHook(last)], []
                with d.session(tmp_path / folder, hooks, log_step_count_steps=None) as session:
                    while not session.should_stop():
                        losses.append(session.run(train, *batch_of(0, 6)))
                return losses, model.state_dict()

        return nd.loopback.run(ranks, body)

    ((expected, weights),) = losses_and_weights("undisturbed", 4, 1)
    first = losses_and_weights("stopped", 2, 2)[0][0]
    assert len(first) == 2
    for losses, state in losses_and_weights("stopped", 4, 4):
        torch.testing.assert_close((first + losses, state), (expected, weights), rtol=1e-9, atol=1e-9)


def test_the_gradient_of_an_input_is_that_of_the_whole():
    x = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(grid):
        torch.manual_seed(0)
        d = nd.AutoDist(grid=grid)
        with d.scope():
            model = nn.Conv2d(2, 3, 3, padding=1).double()

            @d.function
            def step(images):
                return model(images).square().mean()

        images = x.clone().requires_grad_()
        step(images).backward()
        return images.grad

    expected = gradient(nd.ProcessGrid.serial())
    for found in nd.loopback.run(4, lambda world: gradient(nd.ProcessGrid(world, replicas=2, rows=2))):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Scaled(nn.Conv2d):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_model_that_changes_between_its_output_and_the_loss():
    def losses(grid):
        torch.manual_seed(0)
        d = nd.AutoDist(grid=grid)
        with d.scope():
            model = Scaled(2, 3, 3, padding=1).double()

        @d.function
        def step(images, labels, scale):
            output = model(images)
            model.scale = scale
            return F.cross_entropy(output, labels)

        drawn = torch.Generator().manual_seed(1)
        images, labels = torch.randn(2, 2, 4, 5, generator=drawn), torch.randint(3, (2, 4, 5), generator=drawn)
        return [step(images.double(), labels, scale).item() for scale in (2.0, 3.0, 3.0)]

    expected = losses(nd.ProcessGrid.serial())
    for found in nd.loopback.run(2, lambda world: losses(nd.ProcessGrid(world))):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
