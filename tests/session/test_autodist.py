"""Training steps under AutoDist: the losses, weights and optimizer states of one process, on every grid."""

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
from torch_runs import share_captures

import neondist as nd

GRIDS = [(1,), (2, 1, 2), (3, 3), (4, 2, 1, 2), (4, 1, 2, 2)]
"""Ranks, replicas, rows, columns."""
STRATEGIES = ["PS", "AllReduce", "PartitionedPS", "Auto"]
SAMPLES = 6, 6, 5
"""Batch sizes; the last batch is smaller."""


@pytest.fixture(autouse=True, scope="module")
def float64_default():
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with share_captures():
        yield
    torch.set_default_dtype(previous)


class Net(nn.Module):
    """Network with two outputs in a dictionary: classes of cells, and classes of the image."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.cells, self.last = nn.Conv2d(5, 3, 3), nn.Linear(5, 4)

    def forward(self, x, scale=1.0):
        x = self.norm(self.first(x)).relu() * scale
        return {"cells": self.cells(x), "classes": self.last(x.mean((2, 3)))}


class Autoencoder(nn.Module):
    """Autoencoder whose parts are called separately."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh())
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, padding=1))


def train_with_several_losses(scope, function):
    """Losses of two outputs, a manual loss, a weight penalty, the accuracy, clipping and a schedule."""
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
        manual_loss = (y["cells"].softmax(1)[:, 0] - 0.5).abs().mean()
        loss = losses[0] + 0.3 * losses[1] + manual_loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, accuracy

    def train(x, labels, cells):
        results = step(x, labels, cells)
        scheduler.step()
        return results

    return [model], [optimizer], train


def train_with_accumulation(scope, function):
    """Gradients accumulated over two batches and clipped by value; two param groups; bounded weights."""
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
            model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)
        return loss.item()

    def train(*batch):
        loss = step(*batch)
        if len(calls) % 2 == 0:
            scheduler.step()
        return torch.tensor([loss])

    return [model], [optimizer], train


def train_two_models(scope, function):
    """Generator and critic with separate optimizers; the output of one model is the input of the other."""
    with scope:
        generator = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))
        critic = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (generator, critic)]

    @function
    def step(x, labels, cells):
        fake = generator(x)
        real_scores, fake_scores = critic(x), critic(fake.detach())
        critic_loss = (
            F.binary_cross_entropy_with_logits(real_scores, torch.ones_like(real_scores))
            + F.softplus(fake_scores).mean()
        )
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        generator_loss = F.softplus(-critic(fake)).mean() + F.mse_loss(fake, x)
        generator_loss = generator_loss + 0.1 * F.l1_loss(fake, x, weight=x.square())
        generator_loss.backward()
        optimizers[0].step()
        return critic_loss, generator_loss

    return [generator, critic], optimizers, step


def train_model_parts(scope, function):
    """Separately called parts of a model, with random noise in between; a schedule that depends on the loss."""
    with scope:
        model = Autoencoder()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    @function
    def step(x, labels, cells):
        mean, spread = model.encoder(x[..., :6, :8]).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(len(labels)))
        y = model.decoder(mean + noise * spread.exp())
        y[:, 0] *= 0.5  # in place, before the loss reads it
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


SCRIPTS = train_with_several_losses, train_with_accumulation, train_two_models, train_model_parts


def make_batch(number, samples):
    """Return images, classes of images, and classes of cells."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 2, 7, 9, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    return x, labels, torch.randint(0, 3, (samples, 5, 7), generator=generator)


def run_script(script, scope=None, function=lambda step: step, seed=0):
    """Return the results of all steps, and the final states of models and optimizers."""
    torch.manual_seed(seed)
    models, optimizers, step = script(scope or contextlib.nullcontext(), function)
    results = []
    for number, samples in enumerate(SAMPLES):
        result = step(*make_batch(number, samples))
        results += [item.detach().reshape(-1) for item in (result if isinstance(result, tuple) else (result,))]
    states = [item.state_dict() for item in (*models, *optimizers)]
    return copy.deepcopy([torch.cat(results), states])


@cache
def run_in_one_process(script):
    return run_script(script)


def run_distributed(script, strategy, ranks, replicas=1, rows=1, cols=1):
    def body(world):
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as grid:
            d = nd.AutoDist(strategy=strategy, grid=grid)
            return run_script(script, d.scope(), d.function), str(d.strategy)

    return nd.loopback.run(ranks, body)


def list_cases():
    """Return all combinations with NEONDIST_AUTODIST=all, else one for each script, drawn by NEONDIST_SEED."""
    combinations = list(itertools.product(SCRIPTS, GRIDS, STRATEGIES))
    if os.environ.get("NEONDIST_AUTODIST") == "all":
        return combinations
    rng = random.Random(os.environ["NEONDIST_SEED"])
    return list(zip(SCRIPTS, *(rng.sample(values, 4) for values in (GRIDS[1:], STRATEGIES)), strict=True))


@pytest.mark.parametrize(("script", "grid", "strategy"), list_cases())
@pytest.mark.long
def test_results_match_one_process(script, grid, strategy):
    for actual, text in run_distributed(script, strategy, *grid):
        torch.testing.assert_close(actual, run_in_one_process(script), rtol=1e-9, atol=1e-9)
        assert strategy in text or strategy == "Auto"


@pytest.mark.parametrize("strategy", ["AllReduce", "PartitionedPS"])
@pytest.mark.long
def test_session_resumes_the_state_of_a_script(strategy, tmp_path):
    """Weights, the optimizer's state and the schedule, from two ranks to four."""

    def train_in_session(folder, last, ranks):
        def body(world):
            with nd.ProcessGrid(world, replicas=None) as grid:
                torch.manual_seed(0)
                d = nd.AutoDist(strategy=strategy, grid=grid)
                (model,), _, train = train_with_accumulation(d.scope(), d.function)
                hooks, losses = [nd.StopAtStepHook(last)], []
                with d.session(tmp_path / folder, hooks, log_step_count_steps=None) as session:
                    while not session.should_stop():
                        losses.append(session.run(train, *make_batch(0, 6)))
                return losses, model.state_dict()

        return nd.loopback.run(ranks, body)

    ((expected, weights),) = train_in_session("uninterrupted", 4, 1)
    first = train_in_session("stopped", 2, 2)[0][0]
    assert len(first) == 2
    for losses, state in train_in_session("stopped", 4, 4):
        torch.testing.assert_close((first + losses, state), (expected, weights), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("optimizer", "ranks"), [("SGD", 2), ("Adam", 3)])
def test_parallax_gives_sparse_tables_an_owner(optimizer, ranks):
    def train(scope, function, sparse=True):
        torch.manual_seed(0)
        with scope:
            model = nn.Sequential(nn.Embedding(50, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 1))
            update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

        @function
        def step(ids, y):
            update.zero_grad()
            F.mse_loss(model(ids), y).backward()
            update.step()

        for _ in range(3):
            step(torch.randint(0, 9, (6, 3)), torch.randn(6, 1))
        return model.state_dict()

    def body(world):
        with nd.ProcessGrid(world, replicas=ranks) as grid:
            d = nd.AutoDist(strategy="Parallax", grid=grid)
            weights = train(d.scope(), d.function)
            return weights, {name: bool(rule.owners) for name, rule in d.strategy.parameters.items()}

    expected = train(contextlib.nullcontext(), lambda step: step, sparse=False)
    for weights, has_owners in nd.loopback.run(ranks, body):
        assert has_owners == {"module/0.weight": True, "module/2.weight": False, "module/2.bias": False}
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def test_input_gradient_matches_one_process():
    x = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def compute_gradient(grid):
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

    expected = compute_gradient(nd.ProcessGrid.serial())
    for actual in nd.loopback.run(4, lambda world: compute_gradient(nd.ProcessGrid(world, replicas=2, rows=2))):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Scaled(nn.Conv2d):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_model_modified_before_the_loss():
    def compute_losses(grid):
        torch.manual_seed(0)
        d = nd.AutoDist(grid=grid)
        with d.scope():
            model = Scaled(2, 3, 3, padding=1).double()

        @d.function
        def step(images, labels, scale):
            output = model(images)
            model.scale = scale
            return F.cross_entropy(output, labels)

        generator = torch.Generator().manual_seed(1)
        images, labels = torch.randn(2, 2, 4, 5, generator=generator), torch.randint(3, (2, 4, 5), generator=generator)
        return [step(images.double(), labels, scale).item() for scale in (2.0, 3.0, 3.0)]

    expected = compute_losses(nd.ProcessGrid.serial())
    for actual in nd.loopback.run(2, lambda world: compute_losses(nd.ProcessGrid(world))):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
